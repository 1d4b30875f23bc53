"""Reads one answer: finds the number of its tokens, when they arrived, and what went wrong.

Engines differ in what they send, so two steps decide whether a chunk has tokens. The first step is taken when the chunk
arrives:

| chunk of a choice | has tokens |
|---|---|
| text, content, reasoning, a refusal, a tool call, or token ids | certainly |
| only the role | no: some engines send it before they compute. But see below |
| an empty text or content | likely: a special token, or half a character, or an engine without a tokenizer |
| only a reason to end | perhaps: vLLM sends it with the last token, OpenAI after the last token |

The second step is taken when the answer has ended. Each chunk with tokens has one or more. So if there are more chunks
than tokens in `usage`, the least certain chunks have none. Without `usage`, the chunks that have tokens certainly or
likely are counted.

A parser of tool calls or of reasoning holds tokens back, sometimes the whole answer. vLLM sends the role when it has
the first token. So the role's chunk counts as the chunk with the first token, if the next chunk has no text and there
are enough tokens in `usage`.

An answer is complete if it ends with `[DONE]` or with a reason for each of its choices. Some gateways do not stream. An
answer that is one JSON object is also complete, and all its tokens get the time of its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from kvstore_serving.load.records import RequestOutcome
from kvstore_serving.sse import DONE, Comment, EventError, EventReader

MAX_MESSAGE: Final = 400
_MAX_ANSWER_EVENT_BYTES: Final = 16 << 20  # endpoints do not send longer events
_BROKEN_OFF: Final = ("abort", "error")  # reasons to end that mean the engine failed


class _Said(msgspec.Struct):
    """A delta of a chat, or its whole message. Engines differ in the values, so only the presence of a value
    matters."""

    role: object = None
    content: object = None
    reasoning: object = None
    reasoning_content: object = None
    refusal: object = None
    audio: object = None
    tool_calls: object = None
    function_call: object = None

    @property
    def calls_tools(self) -> bool:
        return bool(self.tool_calls or self.function_call)

    @property
    def shows(self) -> bool:
        return bool(
            self.content or self.reasoning or self.reasoning_content or self.refusal or self.audio or self.calls_tools
        )


_NOTHING: Final = _Said()


class _Choice(msgspec.Struct):
    index: int = 0
    text: object = None
    delta: _Said | None = None
    message: _Said | None = None
    token_ids: object = None
    finish_reason: object = None

    @property
    def is_text(self) -> bool:
        return bool(self.text or self.said.content)

    @property
    def said(self) -> _Said:
        return self.delta or self.message or _NOTHING


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """A chunk, or a whole answer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None  # an object or a string
    kind: object = msgspec.field(default=None, name="object")
    prompt_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # sent by vLLM with the role; may be null

    @property
    def is_error(self) -> bool:
        return self.error is not None or self.kind == "error"


_decode: Final = msgspec.json.Decoder(_Event).decode


class _Sureness(IntEnum):
    """How certain it is that a chunk has tokens."""

    NONE = 0
    ROLE = 1  # only the role, as vLLM sends it
    PERHAPS = 2
    LIKELY = 3
    CERTAIN = 4


class _Chunk(NamedTuple):
    at_s: float
    choice: int
    sureness: _Sureness
    ends: bool
    is_text: bool


class AnswerReader:
    """Parses the body of one answer as it arrives, and writes the results into the request's outcome."""

    def __init__(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        self._reader = EventReader(_MAX_ANSWER_EVENT_BYTES)
        self._head = b""  # the first bytes after any spaces
        self._whole: bytearray | None = None  # the body of an answer that is one JSON object
        self._events = 0
        self._done = False
        self._chunks: list[_Chunk] = []
        self._finished: set[int] = set()
        self._reported: int | None = None
        self._calls_tools = False
        self._last_s = 0.0

    def add(self, received: bytes, now_s: float) -> None:
        """Parse received bytes. Raises `EventError` or `msgspec.DecodeError` if they cannot be parsed."""
        if not self._head:
            self._head = received.lstrip()[:MAX_MESSAGE]
            if self._head.startswith(b"{"):
                self._whole = bytearray()
        if self._whole is not None:
            self._whole += received
            self._last_s = now_s
            if len(self._whole) > _MAX_ANSWER_EVENT_BYTES:
                raise EventError(f"the answer has more than {_MAX_ANSWER_EVENT_BYTES} bytes")
            return
        for data in self._reader.feed(received):
            if data == DONE:
                self._done = True
            elif data and not isinstance(data, Comment):
                self._take(data, now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        event = _decode(data)
        self._events += 1
        self._last_s = now_s
        if event.is_error:
            self._outcome.fail("server", error_message(data))
        elif self._whole is not None and event.choices is None:
            raise EventError(f"the answer is a JSON object without choices: {error_message(data)}")
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices or ():
            self._calls_tools |= choice.said.calls_tools
            ends = choice.finish_reason is not None
            of_vllm = event.prompt_token_ids is not msgspec.UNSET
            if sureness := _sureness(choice, ends, of_vllm):
                self._chunks.append(_Chunk(now_s, choice.index, sureness, ends, choice.is_text))
            if ends:
                self._finished.add(choice.index)
            if choice.finish_reason in _BROKEN_OFF:
                self._outcome.fail("server", f"the engine ended the answer: finish_reason {choice.finish_reason!r}")

    def _count(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self._reported = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self._outcome.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def end(self, whole_output: bool) -> None:
        """Note that the body has ended without an error. `whole_output`: whether the answer must have all requested
        tokens. Raises the same errors as `add`."""
        if self._whole is not None:
            self._take(bytes(self._whole), self._last_s)
            self._done = self._outcome.whole = True
        elif self._head and not self._events and not self._done:
            raise EventError(f"the answer is neither events nor a JSON object: {error_message(self._head)}")
        self.settle()
        self._judge(whole_output)

    def settle(self) -> None:
        """Write the tokens and their times into the outcome. Nothing more will arrive."""
        outcome, chunks = self._outcome, self._with_tokens()
        outcome.tokens_reported = self._reported is not None
        outcome.tokens = len(chunks) if self._reported is None else self._reported
        if outcome.tokens and not chunks:  # the engine sent no chunk with a token
            chunks = [_Chunk(self._last_s, 0, _Sureness.NONE, True, False)]
        outcome.arrivals_s = [chunk.at_s for chunk in chunks]
        if any(chunk.choice for chunk in chunks):
            outcome.choices = [chunk.choice for chunk in chunks]

    def _with_tokens(self) -> list[_Chunk]:
        """Return the chunks that have tokens, in the order in which they arrived."""
        first = {chunk.choice: chunk for chunk in reversed(self._chunks) if chunk.sureness > _Sureness.ROLE}
        with_text = {choice for choice, chunk in first.items() if chunk.is_text}
        chunks = [chunk for chunk in self._chunks if chunk.sureness > _Sureness.ROLE or chunk.choice not in with_text]
        certain = sum(chunk.sureness is _Sureness.CERTAIN for chunk in chunks)
        if not self._reported and certain:
            self._reported = None  # 0 tokens although there is text: the server does not count them
        if self._reported is None:
            return [chunk for chunk in chunks if chunk.sureness > _Sureness.PERHAPS]
        surplus = max(0, min(len(chunks) - self._reported, len(chunks) - certain))
        places = range(len(chunks))
        empty = {*sorted(places, key=lambda place: (chunks[place].sureness, not chunks[place].ends))[:surplus]}
        return [chunks[place] for place in places if place not in empty]

    def _judge(self, whole_output: bool) -> None:
        """Set an error unless the answer is complete."""
        outcome = self._outcome
        asked = outcome.asked_tokens
        got = f"{outcome.tokens} of {asked} tokens"
        ended = self._done or len(self._finished) >= outcome.answers
        if not ended and outcome.tokens < asked:
            outcome.fail("cut", f"the stream ended without [DONE], after {got}")
        elif not outcome.tokens and (whole_output or not (self._finished or outcome.tokens_reported)):
            outcome.fail("fewer_tokens", f"the answer has no token; {asked} were requested")
        elif whole_output and outcome.tokens_reported and outcome.tokens < asked and not self._calls_tools:
            outcome.fail("fewer_tokens", f"the answer ended after {got}")


def _sureness(choice: _Choice, ends: bool, of_vllm: bool) -> _Sureness:
    said = choice.said
    if choice.text or said.shows or choice.token_ids:
        return _Sureness.CERTAIN
    if choice.token_ids is not None:
        return _Sureness.NONE
    if said.role and not ends:
        return _Sureness.ROLE if of_vllm else _Sureness.NONE
    if choice.text is not None or (said.content is not None and not said.role):
        return _Sureness.LIKELY
    return _Sureness.PERHAPS


def error_message(body: bytes) -> str:
    """Return the message in the body of an error. If the body is not JSON with a message, its text is returned."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(said, Mapping) and name in said:
            said = said[name]
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return " ".join(text.split())[:MAX_MESSAGE]
