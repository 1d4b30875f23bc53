"""The prefill engine's half of a request: the prompt's blocks go to the store, and the first token to the user.

If P fails, nothing has to be done, because D computes the blocks that do not come. So no error is raised here, but
outcomes are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Final, NamedTuple

from kvstore_client.engine.spans import Span
from kvstore_serving.proxy.serving import ServedRequest, engine_span
from kvstore_serving.proxy.silence import weight
from kvstore_serving.proxy.upstream import EngineFailed, EngineRefused, EngineStream
from kvstore_serving.proxy.usage import Usage, read_usage, usage_of
from kvstore_serving.sse import Comment

log = logging.getLogger(__name__)

_MOST_CHUNKS: Final = 16  # each chunk has one token; if an engine sends more, its stream is closed


async def prefill_only(request: ServedRequest) -> None:
    """Let P compute the prompt. Its token is not shown to the user."""
    engine = request.decision.prefill
    assert engine is not None
    with _counted(request) as span:
        headers = request.record.for_engine(span)
        body = request.traced(request.ask.for_prefill(request.decision.given, shown=False), headers)
        heavy = weight(request.decision.prompt_tokens, 1)
        answer = await request.serving.upstream.ask(engine, request.ask.path, body, headers, heavy)
        _note_usage(request, usage_of(answer.body))


class Early(NamedTuple):
    """A chunk from P. `at`: when it came, by `time.monotonic`."""

    at: float
    chunk: dict[str, Any]


async def prefill_shown(request: ServedRequest, chunks: asyncio.Queue[Early | None]) -> None:
    """Let P compute the prompt, and put the chunks that it streams into `chunks`, followed by None."""
    engine = request.decision.prefill
    assert engine is not None
    try:
        with _counted(request) as span:
            headers = request.record.for_engine(span)
            body = request.traced(request.ask.for_prefill(request.decision.given, shown=True), headers)
            heavy = weight(request.decision.prompt_tokens)
            upstream = request.serving.upstream
            async with await upstream.stream(engine, request.ask.path, body, headers, heavy) as stream:
                stream.span = span
                for _ in range(_MOST_CHUNKS):
                    chunk = await _no_comment(stream)
                    if chunk is None:
                        break
                    _note_usage(request, read_usage(chunk.get("usage")))
                    chunks.put_nowait(Early(time.monotonic(), chunk))
    finally:
        chunks.put_nowait(None)


async def _no_comment(stream: EngineStream) -> dict[str, Any] | None:
    while isinstance(chunk := await stream.chunk(), Comment):
        pass  # a comment only keeps P's connection to the proxy alive
    return chunk


def _note_usage(request: ServedRequest, usage: Usage | None) -> None:
    if usage is not None:
        request.record.prefill_cached_tokens = usage.cached_tokens


@contextlib.asynccontextmanager
async def beside(prefill: Coroutine[Any, Any, None] | None) -> AsyncGenerator[None, None]:
    """Run the prefill, if there is one, at the same time as the body of the `async with` block. The prefill is
    cancelled if it has not finished when the block ends."""
    task = asyncio.create_task(prefill) if prefill is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def _counted(request: ServedRequest) -> Iterator[Span]:
    serving, record, decision = request.serving, request.record, request.decision
    engine = decision.prefill
    assert engine is not None
    outcome = "cancelled"
    try:
        tokens = max(0, decision.prompt_tokens - decision.have.at(engine))
        with (
            serving.pools.prefilling(engine, tokens) as ahead,
            engine_span(record, "prefill", "proxy to P", engine) as span,
        ):
            yield span
        outcome = "ok"
        engine.worked()
        serving.decider.answered(request.ask, decision, engine, record.prefill_cached_tokens)
        serving.metrics.phases.labels("prefill").observe(span.ended - span.began)
        found = record.prefill_cached_tokens
        computed = tokens if found is None else max(0, decision.prompt_tokens - found)
        engine.pace.add(ahead + computed, span.ended - span.began)
    except EngineRefused as error:
        outcome = "refused"
        log.info("request %s: prefill engine %s refused it: %s", record.id, engine.url, error)
    except EngineFailed as error:
        outcome = "failed"
        engine.failed()
        serving.metrics.failures.labels(engine.url).inc()
        log.warning("request %s: the prefill failed: %s; the decode engine computes the prompt", record.id, error)
    finally:
        record.prefill_outcome = outcome
        request.prefilled.set()
        serving.metrics.prefills.labels(outcome).inc()
