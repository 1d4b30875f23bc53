"""A streamed answer. P's first token is sent at once and D's stream follows. If D fails, another D takes over.

Nothing is sent twice and nothing is missing, because a `Transcript` records what the user has, and a `StreamFollower`
leaves that out of each engine's stream. After a failure, or when D disagrees with P's token, the answer must still
agree with what was already sent:

* an answer that another request may continue (`ParsedRequest.may_continue`), at temperature 0, is continued after
  exactly the tokens that were sent;
* any other steady answer (with a seed, stop strings or penalties) is requested again, and its beginning is left out;
* any other answer ends with an error event, because another engine would give another answer.

P's chunks are shown only after a D has accepted the request, because D may refuse a request that P accepts, such as one
for too many tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from kvstore_serving import sse
from kvstore_serving.proxy.ask import COMPLETIONS
from kvstore_serving.proxy.prefill import Early, beside, prefill_only, prefill_shown
from kvstore_serving.proxy.serving import ServedRequest
from kvstore_serving.proxy.silence import weight
from kvstore_serving.proxy.transcript import Diverged, StreamFollower, Transcript
from kvstore_serving.proxy.upstream import EngineFailed, EngineRefused, EngineStream
from kvstore_serving.proxy.usage import body_with_found, read_usage, usage_of, with_found
from kvstore_serving.proxy.user import error_body

_REPLACEMENT = "\ufffd"


class StreamedAnswer:
    """Streams the answer to one request. Call `run` once."""

    def __init__(self, request: ServedRequest) -> None:
        ask = request.ask
        # Two engines sample different tokens unless both have the same seed.
        self._shown = request.decision.prefill is not None and ask.may_continue
        if self._shown:
            request.ask = ask = ask.seeded()
        self._request = request
        self._ask = ask
        self._transcript = Transcript(ask)
        self._early: asyncio.Queue[Early | None] = asyncio.Queue()  # the first chunks of P, see `prefill_shown`
        self._early_over = not self._shown
        self._first: float | None = None  # when the user got the first token
        self._last = 0.0
        self._pieces = 0
        self._computing = contextlib.ExitStack()  # open while an engine computes the prompt alone
        self._alone: tuple[float, float] | None = None  # the uncached tokens queued before this prompt, and its start
        self._prefilled: float | None = None  # when P's token arrived
        self._raw_sent = False
        self._last_chunk: dict[str, Any] | None = None  # the chunk that ends the answer, until it is sent
        self._found: int | None = None  # cached tokens of the prompt, as the answering engine reports them

    async def run(self) -> None:
        """Answer the request. Raises `UserGone`."""
        request = self._request
        prefill = None
        if request.decision.prefill is not None:
            prefill = prefill_shown(request, self._early) if self._shown else prefill_only(request)
        try:
            async with beside(prefill):
                await self._answer()
        finally:
            self._computing.close()
            self._measure()

    # ---- engines, one after the other ------------------------------------------------------------------------

    async def _answer(self) -> None:
        request, transcript = self._request, self._transcript
        serving, record = request.serving, request.record
        continues: int | None = None  # the number of tokens after which the next stream continues
        while True:
            split = request.decision.prefill is not None
            path, body = self._ask.path, self._ask.for_decode(request.decision.given, split=split)
            if continues is not None:
                engine_longest = request.engine.max_model_len(self._ask.model)
                going_on = self._ask.continued(transcript.prompt_ids or [], transcript.ids[:continues], engine_longest)
                if going_on is None:
                    await self._end()
                    return
                path, body = COMPLETIONS, going_on
            try:
                with serving.pools.running(request.engine, request.decision.prompt_tokens), request.attempt() as span:
                    headers = record.for_engine(span, record.retries)
                    body = request.traced(body, headers)
                    self._compute(split or continues is not None)
                    async with await serving.upstream.stream(
                        request.engine, path, body, headers, weight(request.decision.prompt_tokens)
                    ) as stream:
                        stream.span = span
                        if self._ask.plain:
                            if not request.user.status:
                                await request.user.start(200, stream.headers)
                            await self._relay(stream, continues)
                        else:
                            await self._relay_raw(stream)
                request.engine.worked()
                request.answered(self._found)
                await self._send_last({})
                await self._write(sse.END, more=False)
                record.outcome = "ok"
                return
            except Diverged:
                record.mismatch = True
                if transcript.from_prefill == len(transcript.ids):
                    serving.metrics.mismatches.inc()
                continues = self._after_divergence() if continues is None else None
                if continues is None:
                    await self._break_off("the engines do not agree on the beginning of the answer that was sent")
                    return
            except EngineRefused as error:
                if request.user.status:
                    await self._break_off("", error.answer.body)
                else:
                    await request.fail(error)
                return
            except EngineFailed as error:
                if transcript.finished:
                    await self._end()
                    return
                begun = self._raw_sent or not transcript.empty
                known = self._ask.plain and not transcript.too_long
                if not begun or (known and (self._may_continue() or self._ask.steady)):
                    goes_on = request.after(error, "in the stream" if begun else "before the first token")
                else:
                    serving.note(request.engine, record, error)
                    goes_on = False
                if not goes_on:
                    if request.user.status:
                        await self._break_off(str(error))
                    else:
                        await request.fail(error)
                    return
                continues = transcript.safe_ids or None if begun and self._may_continue() else None

    def _compute(self, helped: bool) -> None:
        """Note that an engine gets the request. `helped`: whether the engine need not compute the whole prompt
        alone."""
        self._computing.close()
        self._alone = None
        request = self._request
        if helped or not self._transcript.empty:
            return
        uncached = max(0, request.decision.prompt_tokens - request.decision.have.at(request.engine))
        ahead = self._computing.enter_context(request.serving.pools.prefilling(request.engine, uncached))
        self._alone = ahead, time.monotonic()

    def _may_continue(self) -> bool:
        """Whether another engine can continue from what was sent. With stop strings this may be impossible, because
        engines hold text back."""
        return self._continuable() and self._ask.greedy and not self._ask.stops

    def _continuable(self) -> bool:
        length_known = (
            self._ask.max_tokens is not None or self._request.engine.max_model_len(self._ask.model) is not None
        )
        return self._transcript.continuable and length_known

    def _after_divergence(self) -> int | None:
        """Return the number of tokens after which another stream may continue, or None if no stream can continue
        correctly. The text of P's token is never held back."""
        transcript = self._transcript
        only_prefill = transcript.from_prefill == len(transcript.ids)
        if self._continuable() and (only_prefill or self._may_continue()):
            return transcript.safe_ids or None
        return None

    # ---- one engine's stream ---------------------------------------------------------------------------------

    async def _relay(self, stream: EngineStream, continues: int | None) -> None:
        """Pass on what is new in a stream. Until its first chunk arrives, pass on P's chunks."""
        reading: asyncio.Task[dict[str, Any] | sse.Comment | None] | None = None
        showing: asyncio.Task[Early | None] | None = None
        follower = StreamFollower(self._transcript, continues)
        try:
            while not self._early_over and self._transcript.empty:
                reading = reading or asyncio.create_task(stream.chunk())
                showing = showing or asyncio.create_task(self._early.get())
                await asyncio.wait({reading, showing}, return_when=asyncio.FIRST_COMPLETED)
                if showing.done():
                    early, showing = showing.result(), None
                    if early is None:
                        self._early_over = True
                    elif await self._show(early):
                        return
                    follower = StreamFollower(self._transcript, continues)  # D has sent only a role so far
                else:
                    chunk, reading = reading.result(), None
                    if chunk is None:
                        return
                    await self._take(chunk, follower, continues)
            if reading is not None:
                chunk, reading = await reading, None
            else:
                chunk = await stream.chunk()
            while chunk is not None:
                if self._prefilled is not None and not isinstance(chunk, sse.Comment):
                    took = time.monotonic() - self._prefilled
                    self._observe("handover", took)
                    decision = self._request.decision
                    self._request.engine.hand_overs.add(decision.prompt_tokens - decision.cached_tokens, took)
                    self._prefilled = None
                await self._take(chunk, follower, continues)
                chunk = await stream.chunk()
        finally:
            for task in (reading, showing):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def _take(self, chunk: dict[str, Any] | sse.Comment, follower: StreamFollower, continues: int | None) -> None:
        """Pass on the new part of a chunk from D, or a comment."""
        if isinstance(chunk, sse.Comment):
            await self._write(b"%b\n\n" % chunk)
            return
        usage = read_usage(chunk.get("usage")) if continues is None else None
        if usage is not None:
            self._found = usage.cached_tokens
            if self._found is not None:
                chunk["usage"] = with_found(chunk["usage"], await self._request.found_before(self._found))
        await self._send(follower.feed(chunk))

    async def _show(self, early: Early) -> bool:
        """Pass on a chunk from P if it can be shown. Returns whether the answer ended with this chunk."""
        chunk = early.chunk
        choices = chunk.get("choices")
        if not choices:
            return False
        choice = choices[0]
        delta = choice.get("delta")
        text = (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""
        finish = choice.get("finish_reason")
        if finish == "stop":  # D would have ended there too
            self._early_over = True
            await self._send(StreamFollower(self._transcript).feed(chunk, prefill=True))
            while (rest := await self._early.get()) is not None:
                await self._send(StreamFollower(self._transcript).feed(rest.chunk, prefill=True))
            return True
        odd = isinstance(delta, dict) and any(value for name, value in delta.items() if name not in ("role", "content"))
        if isinstance(delta, dict) and "role" in delta and not text and not odd and finish is None:
            if not self._transcript.role_sent:
                await self._send(StreamFollower(self._transcript).feed(chunk, prefill=True))
            return False
        self._early_over = True
        if text and not odd and not _may_be_held_back(text, self._ask.stops):
            if finish is not None:
                choice["finish_reason"] = None
                choice.pop("stop_reason", None)  # only a chat's last chunk has it
                choice |= {} if self._ask.chat else {"stop_reason": None}
            chunk.pop("usage", None)
            await self._send(StreamFollower(self._transcript).feed(chunk, prefill=True))
            self._prefilled = early.at
        return False

    async def _relay_raw(self, stream: EngineStream) -> None:
        """Pass on a stream unchanged. This is for answers with several parts, which are not parsed.

        The reply begins only when the first event arrives. If that event is an error, the reply is the error with its
        own status.
        """
        user, begun = self._request.user, False
        while (data := await stream.next()) is not None:
            comment = isinstance(data, sse.Comment)
            if not comment and (not begun or b'"error"' in data):
                stream.parse(data)
            if not user.status:
                await user.start(200, stream.headers)
            if comment:
                await self._write(b"%b\n\n" % data)
                continue
            self._raw_sent = begun = True
            await self._write(b"data: %b\n\n" % await self._with_found(data), token=True)
        if not user.status:
            await user.start(200, stream.headers)

    async def _with_found(self, data: bytes) -> bytes:
        record = self._request.record
        if not record.prefill or b'"cached_tokens"' not in data:
            return data
        usage = usage_of(data)
        found = usage.cached_tokens if usage is not None else None
        return data if found is None else body_with_found(data, await self._request.found_before(found))

    # ---- to the user -----------------------------------------------------------------------------------------

    async def _send(self, chunk: dict[str, Any] | None) -> None:
        if chunk is None:
            return
        if not self._ask.wants_usage:  # the proxy itself asked for it
            if chunk.get("choices") and self._transcript.finished:
                self._last_chunk = chunk  # without usage, this chunk would carry the engine's final fields
                return
            if not chunk.get("choices"):
                said = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
                await self._send_last(said)
                return
        await self._write(sse.encode(chunk), token=not self._transcript.empty)

    async def _send_last(self, said: Mapping[str, Any]) -> None:
        """Send the chunk that ends the answer, unless it was already sent. Other fields that the engine sent last are
        added to it."""
        last, self._last_chunk = self._last_chunk, None
        if last is not None:
            await self._write(sse.encode({**said, **last}), token=not self._transcript.empty)

    async def _write(self, piece: bytes, *, more: bool = True, token: bool = False) -> None:
        if token:
            now = time.monotonic()
            if self._first is None:
                self._first = now
                self._computing.close()
            else:
                self._request.serving.metrics.itl.labels(self._request.decision.path).observe(now - self._last)
            self._last = now
            self._pieces += 1
        await self._request.user.write(piece, more=more)

    async def _end(self) -> None:
        """Tell the user that the answer is complete."""
        transcript = self._transcript
        for chunk in transcript.ending():
            await self._send(transcript.stamp(chunk))
        await self._send_last({})
        await self._write(sse.END, more=False)
        self._request.record.outcome = "ok"

    async def _break_off(self, why: str, body: bytes = b"") -> None:
        """End a stream that cannot be continued: send an error event and no [DONE]."""
        await self._send_last({})
        message = f"the answer was cut off: {why}; ask again"
        await self._write(b"data: %b\n\n" % (body or error_body(502, message, "upstream_error")), more=False)
        self._request.record.outcome = "cut"

    def _measure(self) -> None:
        request, transcript = self._request, self._transcript
        record = request.record
        if transcript.prompt_ids is not None:
            record.prompt_tokens = len(transcript.prompt_ids)
        record.output_tokens = len(transcript.ids) if transcript.ids_known and transcript.ids else self._pieces
        usage = read_usage(transcript.usage)
        record.note_cached(None if usage is None else usage.cached_tokens)
        if self._first is not None:
            record.ttft_s = self._first - record.began
            if record.output_tokens > 1:
                record.tpot_s = (self._last - self._first) / (record.output_tokens - 1)
            self._observe("decode", self._last - self._first)
            if self._alone is not None:
                ahead, began = self._alone
                computed = record.prompt_tokens - record.cached_tokens
                if computed > record.prompt_tokens / 2:  # otherwise most of the time was spent on loading
                    request.engine.pace.add(ahead + computed, self._first - began)

    def _observe(self, phase: str, seconds: float) -> None:
        self._request.serving.metrics.phases.labels(phase).observe(seconds)


def _may_be_held_back(text: str, stops: list[str]) -> bool:
    """Return whether an engine might hold back a part of this text: the text may end with the beginning of a stop
    string or with an incomplete character."""
    if text.endswith(_REPLACEMENT):
        return True
    return any(
        stop.startswith(text[start:]) for stop in stops for start in range(max(0, len(text) - len(stop)), len(text))
    )
