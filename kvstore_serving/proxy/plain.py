"""An answer that is one JSON document.

P and D get the prompt at the same time. The proxy does not wait for P, because D's answer is complete by itself. The
user gets nothing before D's answer has arrived in full, so after a failure another D can answer the whole request.
"""

from __future__ import annotations

import time

from kvstore_serving.proxy.prefill import beside, prefill_only
from kvstore_serving.proxy.serving import ServedRequest
from kvstore_serving.proxy.silence import weight
from kvstore_serving.proxy.upstream import EngineFailed, EngineRefused
from kvstore_serving.proxy.usage import body_with_found, usage_of


async def serve(request: ServedRequest) -> None:
    """Answer a request that is not a stream."""
    async with beside(prefill_only(request) if request.decision.prefill is not None else None):
        await _serve(request)


async def _serve(request: ServedRequest) -> None:
    serving, record = request.serving, request.record
    split = request.decision.prefill is not None
    while True:
        try:
            with serving.pools.running(request.engine, request.decision.prompt_tokens), request.attempt() as span:
                headers = record.for_engine(span, record.retries)
                body = request.traced(request.ask.for_decode(request.decision.given, split=split), headers)
                heavy = weight(request.decision.prompt_tokens, request.ask.most_output)
                answer = await serving.upstream.ask(request.engine, request.ask.path, body, headers, heavy)
        except EngineRefused as error:
            await request.fail(error)
            return
        except EngineFailed as error:
            if not request.after(error, "before the answer"):
                await request.fail(error)
                return
            continue
        request.engine.worked()
        usage, whole = usage_of(answer.body), answer.body
        if usage is not None and usage.cached_tokens is not None and split:
            whole = body_with_found(whole, await request.found_before(usage.cached_tokens))
        request.answered(None if usage is None else usage.cached_tokens)
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.output_tokens = usage.completion_tokens or 0
            record.note_cached(usage.cached_tokens)
        record.outcome = "ok"
        await request.user.reply(answer.status, whole, answer.headers)
        record.seconds = time.monotonic() - record.began
        return
