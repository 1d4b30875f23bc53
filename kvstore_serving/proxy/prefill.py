"""The prefill engine's half of a request: the prompt's blocks come to the store, and the first token to the user.

P's end needs no action whatever it is: D computes what does not come. So nothing is raised here; outcomes are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Final

from kvstore_serving.proxy.serving import Request
from kvstore_serving.proxy.upstream import EngineFailed, EngineRefused

log = logging.getLogger(__name__)

_MOST_CHUNKS: Final = 16  # of one token; an engine that streams on is left


async def prefill_only(request: Request) -> None:
    """Let P compute the prompt; its token is not shown to anybody."""
    engine = request.decision.prefill
    assert engine is not None
    with _counted(request):
        await request.serving.upstream.ask(
            engine, request.ask.path, request.ask.for_prefill(shown=False), request.record.for_engine()
        )


async def prefill_shown(request: Request, chunks: asyncio.Queue[dict[str, Any] | None]) -> None:
    """Let P compute the prompt, and put what it streams into `chunks`; last None."""
    engine = request.decision.prefill
    assert engine is not None
    try:
        with _counted(request):
            stream = await request.serving.upstream.stream(
                engine, request.ask.path, request.ask.for_prefill(shown=True), request.record.for_engine()
            )
            async with stream:
                for _ in range(_MOST_CHUNKS):
                    chunk = await stream.chunk()
                    if chunk is None:
                        break
                    chunks.put_nowait(chunk)
    finally:
        chunks.put_nowait(None)


@contextlib.contextmanager
def _counted(request: Request) -> Iterator[None]:
    serving, record, decision = request.serving, request.record, request.decision
    engine = decision.prefill
    assert engine is not None
    began = time.monotonic()
    outcome = "cancelled"
    try:
        with serving.pools.prefilling(engine, max(0, decision.prompt_tokens - decision.have.at(engine))):
            yield
        outcome = "ok"
        engine.worked()
        serving.decider.sent(decision, engine)
        serving.metrics.phases.labels("prefill").observe(time.monotonic() - began)
    except EngineRefused as error:
        outcome = "refused"
        log.info("request %s: prefill engine %s refused it: %s", record.id, engine.url, error)
    except EngineFailed as error:
        outcome = "failed"
        engine.failed()
        serving.metrics.failures.labels(engine.url).inc()
        log.warning("request %s: prefill: %s; the decode engine computes the prompt", record.id, error)
    finally:
        record.prefill_outcome = outcome
        serving.metrics.prefills.labels(outcome).inc()
