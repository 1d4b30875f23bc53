"""Requests to engines: one pool of connections, streams that are read as they come, and what can go wrong.

One event loop. Two errors come out of here. `EngineFailed`: the engine is to blame, another one may be asked.
`EngineRefused`: the engine's own answer, which is passed on as it is. Leaving a stream closes its connection, and an
engine whose connection is closed stops computing. Reading is ahead of what the caller takes by a socket's buffer only,
so a slow user slows the engine down instead of filling this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn

import aiohttp
import msgspec

from kvstore_client.engine.spans import Span
from kvstore_serving import sse
from kvstore_serving.proxy.pools import Engine
from kvstore_serving.proxy.settings import Settings

# Worth another engine: this one is broken, or has no room.
_RETRIED: Final = frozenset({408, 425, 429, *range(500, 600)})
_KEPT: Final = ("content-type", "retry-after", "www-authenticate")
_MAX_EVENT_BYTES: Final = 32 << 20  # the first event may carry the token ids of a long prompt
_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True)
class Answer:
    """An engine's whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class EngineFailed(Exception):
    """The engine is to blame. `answer`: what it said, if it said anything."""

    def __init__(self, engine: Engine, why: str, answer: Answer | None = None) -> None:
        super().__init__(f"{engine.url}: {why}")
        self.engine = engine
        self.why = why
        self.answer = answer

    @property
    def kind(self) -> str:
        """For statistics: the status, if there was one."""
        return str(self.answer.status) if self.answer is not None else "EngineFailed"


class EngineRefused(Exception):
    """The engine does not take this request; nor would another one."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer

    @property
    def kind(self) -> str:
        return str(self.answer.status)


class Stream:
    """An engine's events. A context manager; leaving it ends the request at the engine."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, first_s: float, idle_s: float) -> None:
        self.engine = engine
        self.span: Span | None = None  # which is told when the first event comes
        self._response = response
        self._wait_s = first_s
        self._idle_s = idle_s
        self._expired = False
        self._reader = sse.EventReader(_MAX_EVENT_BYTES)
        self._events: deque[bytes] = deque()

    async def next(self) -> bytes | None:
        """-> the next event's data; None after the last one. Raises `EngineFailed`, also if the stream was cut."""
        while not self._events:
            # Not `wait_for`: it may swallow a cancellation that comes with the bytes.
            expiry = asyncio.get_running_loop().call_later(self._wait_s, self._expire)
            try:
                piece = await self._response.content.readany()
                self._events.extend(self._reader.feed(piece))
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                why = (
                    f"its stream was silent for {self._wait_s:g} s" if self._expired else f"its stream was cut: {error}"
                )
                raise EngineFailed(self.engine, why) from None
            except sse.EventError as error:
                raise EngineFailed(self.engine, str(error)) from None
            finally:
                expiry.cancel()
            if not piece:
                raise EngineFailed(self.engine, "its stream ended without [DONE]")
            self._wait_s = self._idle_s
        if self.span is not None:
            self.span.event("first token")
            self.span = None
        event = self._events.popleft()
        return None if event == sse.DONE else event

    async def chunk(self) -> dict[str, Any] | None:
        """-> the next chunk; None after the last one. Raises `EngineFailed`, and `EngineRefused` for an error in the
        stream that is the request's."""
        data = await self.next()
        return None if data is None else self.parse(data)

    def parse(self, data: bytes) -> dict[str, Any]:
        """-> the chunk that an event is. Raises what `chunk` raises."""
        try:
            chunk = sse.decode(data)
        except sse.EventError as error:
            raise EngineFailed(self.engine, str(error)) from None
        if chunk.get("error") is not None or chunk.get("object") == "error":
            self.refuse(data)
        choices = chunk.get("choices", [])
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise EngineFailed(self.engine, "an event whose choices are no list of objects")
        return chunk

    def refuse(self, data: bytes) -> NoReturn:
        """Raise what an event with an error means: one in `error`, or of engines that give it by itself."""
        try:
            event = sse.decode(data)
            said = event.get("error") or event
        except sse.EventError:
            said = None
        code = said.get("code") if isinstance(said, dict) else None
        why = f"an error in its stream: {data[:200].decode(errors='replace')}"
        if not isinstance(code, int) or not 400 <= code < 600:
            raise EngineFailed(self.engine, why)
        answer = Answer(code, {"content-type": "application/json"}, data)
        raise EngineFailed(self.engine, why, answer) if code in _RETRIED else EngineRefused(answer)

    def _expire(self) -> None:
        self._expired = True
        self._response.close()

    def close(self) -> None:
        self._response.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


class Upstream:
    """The way to all engines."""

    def __init__(self, settings: Settings, api_key: str = "") -> None:
        """`api_key`: for what the proxy asks on its own."""
        self._settings = settings
        self._own_headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # As many connections as there are requests in flight; those are bounded.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def stream(self, engine: Engine, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Stream:
        """Ask for a stream; returns when the engine has accepted it. Raises `EngineFailed`, `EngineRefused`."""
        response = await self._open(engine, "POST", path, _encoder.encode(body), headers, self._settings.first_byte_s)
        try:
            if response.status == 200:
                stream = Stream(engine, response, self._settings.first_byte_s, self._settings.idle_s)
                if response.content_type == "application/json":  # no events: it says why there are none
                    stream.refuse((await self._read(engine, response)).body)
                return stream
            raise_for(engine, await self._read(engine, response))
        except BaseException:
            response.close()
            raise
        raise EngineFailed(engine, f"status {response.status} for a stream; expected 200")

    async def ask(self, engine: Engine, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        """-> the whole answer, of status 200. Raises `EngineFailed`, `EngineRefused`."""
        answer = await self._whole(engine, "POST", path, _encoder.encode(body), headers, self._settings.answer_s)
        raise_for(engine, answer)
        return answer

    async def own(self, engine: Engine, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> Answer:
        """-> the answer to a question of the proxy's own, of any status. Raises `EngineFailed`."""
        method, data = ("GET", b"") if body is None else ("POST", _encoder.encode(body))
        return await self._whole(engine, method, path, data, self._own_headers, timeout_s)

    @contextlib.asynccontextmanager
    async def passed(
        self, engine: Engine, method: str, path: str, data: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[bytes]]]:
        """An answer that is passed on as it comes: status, headers, pieces. Raises `EngineFailed`."""
        response = await self._open(engine, method, path, data, headers, self._settings.answer_s)
        with _closing(response):
            yield response.status, _kept(response), _pieces(engine, response)

    async def _whole(
        self, engine: Engine, method: str, path: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> Answer:
        response = await self._open(engine, method, path, data, headers, timeout_s, whole=True)
        with _closing(response):
            return await self._read(engine, response)

    async def _open(
        self,
        engine: Engine,
        method: str,
        path: str,
        data: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        whole: bool = False,
    ) -> aiohttp.ClientResponse:
        """`timeout_s`: for the beginning of the answer, and between its pieces; `whole`: for all of it."""
        limits = {"total": timeout_s} if whole else {"total": None, "sock_read": timeout_s}
        timeout = aiohttp.ClientTimeout(sock_connect=self._settings.connect_s, **limits)
        sent = {"content-type": "application/json", **headers} if data else dict(headers)
        request = self._session.request(
            method, engine.url + path, data=data or None, headers=sent, allow_redirects=False, timeout=timeout
        )
        try:
            return await request
        except asyncio.TimeoutError:
            raise EngineFailed(engine, f"no answer to {path} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineFailed(engine, f"{type(error).__name__}: {error}") from None

    async def _read(self, engine: Engine, response: aiohttp.ClientResponse) -> Answer:
        pieces = bytearray()
        async for piece in _pieces(engine, response):
            pieces += piece
            if len(pieces) > self._settings.max_answer_bytes:
                raise EngineFailed(engine, f"an answer of more than {self._settings.max_answer_bytes} bytes")
        return Answer(response.status, _kept(response), bytes(pieces))


async def _pieces(engine: Engine, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise EngineFailed(engine, f"its answer was cut: {type(error).__name__} {error}") from None


def raise_for(engine: Engine, answer: Answer) -> None:
    """Raises what the status of an answer means; returns for 200."""
    if answer.status in _RETRIED:
        raise EngineFailed(engine, f"status {answer.status}", answer)
    if answer.status != 200:
        raise EngineRefused(answer)


@contextlib.contextmanager
def _closing(response: aiohttp.ClientResponse) -> Iterator[None]:
    """An answer that was read in full gives its connection back; any other closes it."""
    try:
        yield
    finally:
        response.close() if not response.content.is_eof() else response.release()


def _kept(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: response.headers[name] for name in _KEPT if name in response.headers}
