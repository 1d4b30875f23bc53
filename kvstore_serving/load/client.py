"""Sends one request, notes when each chunk of the answer arrives, and reports what went wrong.

This is the hot path. For each chunk, the clock is read once, lines are split, and `answer` decodes the event once. The
clock is read when bytes arrive, so events that arrive in one piece have the same time. Nothing here waits for a free
connection.

| error | meaning |
|---|---|
| `http_<status>` | the server refused: the status is not 200, and `message` is the server's message |
| `connection` | no answer: the connection was refused, reset or closed before a status came |
| `generator` | this process had no socket or port left, so the load was not the one requested |
| `timeout` | the answer was not complete within the time for a request |
| `cut` | the connection ended before all tokens came, or the stream ended without `[DONE]` or a reason |
| `malformed` | the answer is not HTTP, or neither events nor one JSON object of OpenAI's API |
| `server` | the server reported an error instead of an answer, or within the answer |
| `fewer_tokens` | the answer is complete, but has fewer tokens than requested, and no tool call ended it |
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

from kvstore_serving.failures import in_words
from kvstore_serving.load.answer import MAX_MESSAGE, AnswerReader, error_message
from kvstore_serving.load.prompts import Api
from kvstore_serving.load.records import Planned, RequestOutcome
from kvstore_serving.sse import EventError

REACH_S: Final = 10.0
_MAX_ERROR_BYTES: Final = 65536
_LARGE_BODY: Final = 1 << 20
# Servers close idle connections, uvicorn after 5 s. A request sent at that moment would fail, and be counted as failed.
_KEEP_ALIVE_S: Final = 2.0
_NO_SOCKETS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_OWN_FIELDS: Final = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream"}
_PATHS: Final[dict[Api, str]] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


_decode_object: Final = msgspec.json.Decoder(dict[str, object]).decode


class BadBody(ValueError):
    """The extra fields of the body are not a JSON object, or replace fields that the generator itself must set."""


class RequestBodies:
    """The body of every request except for its prompt and length.

    extensions: whether to add `ignore_eos`, which vLLM and others accept, so that outputs have the requested length
    extra: a JSON object with more fields; they replace fields of the same name that are set here

    Raises `BadBody` if `extra` cannot be used.
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
            raise BadBody(f"{', '.join(own)} cannot be replaced: the command sets these fields itself")
        self._fields |= more
        self.whole_output = self._fields.get("ignore_eos") is True
        answers = more.get("n", 1)
        if not isinstance(answers, int) or answers < 1:
            raise BadBody(f"n is {answers!r}: expected the number of answers to each prompt, 1 or more")
        self.answers = answers

    def around(self, output_tokens: int) -> tuple[bytes, bytes]:
        """Return the part of the body before the prompt, and the part after it."""
        rest = msgspec.json.encode({**self._fields, "max_tokens": output_tokens})[1:]
        if self.api == "completions":
            return b'{"prompt":', b"," + rest
        return b'{"messages":[{"role":"user","content":', b"}]," + rest


async def reach(url: str) -> None:
    """Connect once without sending anything. Raises `OSError` or `asyncio.TimeoutError` if no server listens at the
    address."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), REACH_S)
    writer.close()
    with contextlib.suppress(OSError):  # the server may have closed the connection first
        await writer.wait_closed()


class Client:
    """Sends requests to one endpoint. Use it with `async with`, in one event loop."""

    def __init__(
        self, url: str, api: Api, *, timeout_s: float, api_key: str | None, whole_output: bool, answers: int = 1
    ) -> None:
        """Make a client.

        url: the endpoint's URL, with or without /v1
        whole_output: whether fewer tokens than requested are an error
        answers: the number of answers to each prompt
        """
        self._url = url.rstrip("/").removesuffix("/v1") + _PATHS[api]
        self._timeout_s = timeout_s
        self._whole_output, self._answers = whole_output, answers
        # With compression, the server would hold data back until there is enough to compress.
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

    async def send(self, planned: Planned, body: bytes, clock: Callable[[], float]) -> RequestOutcome:
        """Send a request and read its answer to the end. `clock`: returns the seconds since the start of the run.

        The outcome describes any failure of the server. An exception is raised only if the task is cancelled.
        """
        assert self._session is not None
        outcome = RequestOutcome(planned, answers=self._answers, sent_s=clock())
        answer = AnswerReader(outcome)
        data = body if len(body) <= _LARGE_BODY else io.BytesIO(body)  # while aiohttp sends a file, other tasks run
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
            outcome.fail(_kind_of(error, outcome), in_words(error)[:MAX_MESSAGE])
        outcome.ended_s = clock()
        if outcome.error:
            answer.settle()
        return outcome


def _kind_of(error: Exception, outcome: RequestOutcome) -> str:
    if isinstance(error, OSError) and error.errno in _NO_SOCKETS:
        return "generator"
    return "connection" if outcome.http_status is None else "cut"
