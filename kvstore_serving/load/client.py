"""One request: sends a prompt, notes when each chunk of the answer arrives, and says what went wrong.

This is the hot path: for every chunk one look at the clock, a split at line ends and one typed decoding. The clock is
read when bytes are there, so events that came in one piece have one time. Nothing here waits for a free connection.

| error | meaning |
|---|---|
| `http_<status>` | the server refused: its status is not 200, `message` is its own |
| `connection` | no answer: refused, reset or closed before the status came |
| `generator` | this process had no socket or port left: the load is not what was asked |
| `timeout` | not complete within the time for a request |
| `cut` | the connection, or the stream without `[DONE]`, ended before all tokens were there |
| `malformed` | the stream is not HTTP, or not events with JSON as of OpenAI's API |
| `server` | the server reported an error inside the stream |
| `fewer_tokens` | the stream is complete, but has fewer tokens than were asked for |
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvstore_serving.load.prompts import Api
from kvstore_serving.load.records import Outcome, Planned
from kvstore_serving.sse import DONE, Comment, EventError, EventReader

REACH_S: Final = 10.0
_MAX_ERROR_BYTES: Final = 65536
_MAX_MESSAGE: Final = 400
_LARGE_BODY: Final = 1 << 20
_MAX_EVENT_BYTES: Final = 16 << 20  # an event that is longer is not one of an endpoint's
# Servers close idle connections, uvicorn after 5 s. A request sent at that moment would fail and be counted.
_KEEP_ALIVE_S: Final = 2.0
_NO_SOCKETS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_PATHS: Final[dict[Api, str]] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None  # an object or a string


_decode: Final = msgspec.json.Decoder(_Event).decode
_decode_object: Final = msgspec.json.Decoder(dict[str, object]).decode


class BadBody(ValueError):
    """The extra fields of the body are not a JSON object, or replace what the generator itself has to set."""


class Bodies:
    """The body of every request but for its prompt and length.

    `extensions`: with `ignore_eos`, which vLLM and others take, so that outputs have the length that was asked for.
    `extra`: a JSON object with more fields, which replace those set here. Raises `BadBody`.
    """

    def __init__(self, model: str, api: Api, *, extensions: bool = True, extra: str = "{}") -> None:
        self.api: Api = api
        self._fields: dict[str, object] = {"model": model, "temperature": 0}
        if extensions:
            self._fields["ignore_eos"] = True
        self._fields |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            more = _decode_object(extra)
        except msgspec.DecodeError as error:
            raise BadBody(f"{extra!r}: {error}; expected a JSON object, such as '{{\"top_k\": 1}}'") from error
        own = sorted({"model", "prompt", "messages", "max_tokens", "stream"} & more.keys())
        if own:
            raise BadBody(f"{', '.join(own)} cannot be replaced: the options of the command set what is measured")
        self._fields |= more
        self.whole_output = self._fields.get("ignore_eos") is True

    def around(self, output_tokens: int) -> tuple[bytes, bytes]:
        """-> what comes before the prompt, and after it."""
        rest = msgspec.json.encode({**self._fields, "max_tokens": output_tokens})[1:]
        if self.api == "completions":
            return b'{"prompt":', b"," + rest
        return b'{"messages":[{"role":"user","content":', b"}]," + rest


async def reach(url: str) -> None:
    """Connect once and say nothing. Raises `OSError` or `asyncio.TimeoutError` if nobody listens at the address."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), REACH_S)
    writer.close()
    with contextlib.suppress(OSError):  # whoever listens may have closed it first
        await writer.wait_closed()


class Client:
    """Sends requests to one endpoint. Use it with `async with`, in one event loop."""

    def __init__(self, url: str, api: Api, *, timeout_s: float, api_key: str | None, whole_output: bool) -> None:
        """`url`: with or without /v1. `whole_output`: fewer tokens than asked for are an error."""
        self._url = url.rstrip("/").removesuffix("/v1") + _PATHS[api]
        self._timeout_s = timeout_s
        self._chat = api == "chat"
        self._whole_output = whole_output
        # Compressed streams would be held back until there is enough to compress.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, planned: Planned, body: bytes, clock: Callable[[], float]) -> Outcome:
        """Send a request and read its answer to the end. `clock`: seconds since the start of the run.

        Whatever the server does is in the outcome; only cancellation raises.
        """
        assert self._session is not None
        outcome = Outcome(planned, sent_s=clock())
        answer = _Answer(outcome, self._chat)
        data = body if len(body) <= _LARGE_BODY else io.BytesIO(body)  # aiohttp sends a file in turns with other tasks
        try:
            async with self._session.post(self._url, data=data, allow_redirects=False) as response:
                outcome.http_status = response.status
                if response.status == 200:
                    async for received in response.content.iter_any():
                        answer.add(received, clock())
                    answer.end(self._whole_output)
                else:
                    said = await response.content.read(_MAX_ERROR_BYTES)
                    outcome.fail(f"http_{response.status}", error_message(said) or str(response.reason))
        except asyncio.TimeoutError:
            outcome.fail("timeout", f"not complete after {self._timeout_s:g} s")
        except (EventError, msgspec.DecodeError, aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
            outcome.fail("malformed", str(error)[:_MAX_MESSAGE])
        except (aiohttp.ClientError, OSError) as error:
            outcome.fail(_kind_of(error, outcome), (str(error) or type(error).__name__)[:_MAX_MESSAGE])
        outcome.ended_s = clock()
        outcome.tokens = outcome.tokens or len(outcome.arrivals_s)
        return outcome


def _kind_of(error: Exception, outcome: Outcome) -> str:
    if isinstance(error, OSError) and error.errno in _NO_SOCKETS:
        return "generator"
    return "connection" if outcome.http_status is None else "cut"


class _Answer:
    """The stream of one answer, written into its outcome."""

    def __init__(self, outcome: Outcome, chat: bool) -> None:
        self._outcome, self._chat = outcome, chat
        self._reader = EventReader(_MAX_EVENT_BYTES)
        self._reported: int | None = None
        self._last_is_empty = False
        self._done = False

    def add(self, received: bytes, now_s: float) -> None:
        """Raises `EventError` and `msgspec.DecodeError`."""
        for data in self._reader.feed(received):
            if isinstance(data, Comment):
                continue
            if data == DONE:
                self._done = True
                continue
            event = _decode(data)
            if event.error is not None:
                self._outcome.fail("server", error_message(data))
            if event.usage is not None:
                self._count(event.usage)
            if event.choices and self._has_tokens(event.choices[0]):
                self._outcome.arrivals_s.append(now_s)

    def _has_tokens(self, choice: _Choice) -> bool:
        if self._chat:  # its first chunk names the role, its last one the reason to end
            delta = choice.delta
            return delta is not None and bool(delta.content or delta.reasoning or delta.reasoning_content)
        # An engine without a tokenizer sends tokens as empty texts.
        self._last_is_empty = not choice.text and choice.finish_reason is not None
        return True

    def _count(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self._reported = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self._outcome.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def end(self, whole_output: bool) -> None:
        """The stream ended in order. `whole_output`: it should have all tokens that were asked for."""
        outcome = self._outcome
        chunks, asked = len(outcome.arrivals_s), outcome.planned.output_tokens
        if self._last_is_empty and self._reported == chunks - 1:
            outcome.arrivals_s.pop()  # it told the reason to end and had no token
        outcome.tokens_reported = self._reported is not None
        outcome.tokens = len(outcome.arrivals_s) if self._reported is None else self._reported
        got = f"{outcome.tokens} of {asked} tokens"
        if not self._done and outcome.tokens < asked:
            outcome.fail("cut", f"the stream ended without [DONE], after {got}")
        elif not outcome.arrivals_s:
            outcome.fail("fewer_tokens", f"no token, {asked} were asked for")
        elif whole_output and outcome.tokens_reported and outcome.tokens < asked:
            outcome.fail("fewer_tokens", f"the stream ended after {got}")


def error_message(body: bytes) -> str:
    """What a server says in the body of an error: the message in its JSON, or else the text."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(said, Mapping) and name in said:
            said = said[name]
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return " ".join(text.split())[:_MAX_MESSAGE]
