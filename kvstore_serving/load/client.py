"""One request: sends a prompt, notes when each chunk of the answer arrives, and says what went wrong.

This is the hot path: for every chunk one look at the clock, a split at line ends and one typed decoding, which
`answer` does. The clock is read when bytes are there, so events that came in one piece have one time. Nothing here
waits for a free connection.

| error | meaning |
|---|---|
| `http_<status>` | the server refused: its status is not 200, `message` is its own |
| `connection` | no answer: refused, reset or closed before the status came |
| `generator` | this process had no socket or port left: the load is not what was asked |
| `timeout` | not complete within the time for a request |
| `cut` | the connection, or the stream without `[DONE]` or a reason, ended before all tokens were there |
| `malformed` | the answer is not HTTP, or neither events nor one object with JSON as of OpenAI's API |
| `server` | the server reported an error instead of an answer, or in it |
| `fewer_tokens` | the answer is complete, but has fewer tokens than were asked for, and no tool call that ended it |
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvstore_serving.load.answer import MAX_MESSAGE, Answer, error_message
from kvstore_serving.load.prompts import Api
from kvstore_serving.load.records import Outcome, Planned
from kvstore_serving.sse import EventError

REACH_S: Final = 10.0
_MAX_ERROR_BYTES: Final = 65536
_LARGE_BODY: Final = 1 << 20
# Servers close idle connections, uvicorn after 5 s. A request sent at that moment would fail and be counted.
_KEEP_ALIVE_S: Final = 2.0
_NO_SOCKETS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_OWN_FIELDS: Final = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream"}
_PATHS: Final[dict[Api, str]] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


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
        own = sorted(_OWN_FIELDS & more.keys())
        if own:
            raise BadBody(f"{', '.join(own)} cannot be replaced: the options of the command set what is measured")
        self._fields |= more
        self.whole_output = self._fields.get("ignore_eos") is True
        answers = more.get("n", 1)
        if not isinstance(answers, int) or answers < 1:
            raise BadBody(f"n is {answers!r}: expected the number of answers to each prompt, 1 or more")
        self.answers = answers

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

    def __init__(
        self, url: str, api: Api, *, timeout_s: float, api_key: str | None, whole_output: bool, answers: int = 1
    ) -> None:
        """`url`: with or without /v1. `whole_output`: fewer tokens than asked for are an error. `answers`: to each
        prompt."""
        self._url = url.rstrip("/").removesuffix("/v1") + _PATHS[api]
        self._timeout_s = timeout_s
        self._whole_output, self._answers = whole_output, answers
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
        outcome = Outcome(planned, answers=self._answers, sent_s=clock())
        answer = Answer(outcome)
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
            outcome.fail("malformed", str(error)[:MAX_MESSAGE])
        except (aiohttp.ClientError, OSError) as error:
            outcome.fail(_kind_of(error, outcome), (str(error) or type(error).__name__)[:MAX_MESSAGE])
        outcome.ended_s = clock()
        if outcome.error:
            answer.settle()
        return outcome


def _kind_of(error: Exception, outcome: Outcome) -> str:
    if isinstance(error, OSError) and error.errno in _NO_SOCKETS:
        return "generator"
    return "connection" if outcome.http_status is None else "cut"
