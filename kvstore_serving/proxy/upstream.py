"""Requests to engines: one pool of connections, streams that are read as they arrive, and the errors of engines.

Used by one event loop. There are two errors. `EngineFailed` means that the engine is at fault and another one may be
tried. `EngineRefused` carries the engine's own answer, which is passed on unchanged. Leaving a stream closes its
connection, and an engine whose connection is closed stops computing. At most one socket buffer of a stream is read
ahead, so a slow user slows the engine down instead of filling this process's memory.

Over 400 lines because all kinds of requests end in the same two errors, and share the code that opens a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import aiohttp
import msgspec

from kvstore_client.engine.spans import Span
from kvstore_serving import sse
from kvstore_serving.failures import in_words
from kvstore_serving.proxy.hop import of_this_hop
from kvstore_serving.proxy.pools import Engine
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.silence import AwaitedAnswer

# Errors after which another engine is tried: this one is broken, or has no room.
_RETRIED: Final = frozenset({408, 425, 429, *range(500, 600)})
PROBE: Final = "kvstore-proxy-asks-for-a-token"  # the id of the proxy's own request for a token
_SILENT: Final = "it is silent: it accepts requests and answers none"
_IDLE_CLOSED_S: Final = 0.5  # if a reused connection ends sooner, the engine had closed it while it was idle
_KEEP_ALIVE_S: Final = 2.0  # engines keep idle connections longer: uvicorn closes them after 5 s
_MAX_ENGINE_EVENT_BYTES: Final = 32 << 20  # the first event may carry the token ids of a long prompt
_JSON: Final = {"content-type": "application/json"}
_encoder: Final = msgspec.json.Encoder()
_Result = TypeVar("_Result")


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    """The fields of a chunk that the proxy reads."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


_check_chunk: Final = msgspec.json.Decoder(_Chunk).decode


Headers: TypeAlias = "list[tuple[str, str]]"
"""Names and values, in order. Bytes of a value that are no UTF-8 are there as surrogates."""


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's whole answer."""

    status: int
    headers: Headers
    body: bytes


class EngineFailed(Exception):
    """The engine is at fault. `answer`: the engine's answer, if there was one."""

    def __init__(self, engine: Engine, why: str, answer: EngineAnswer | None = None) -> None:
        super().__init__(f"{engine.url}: {why}")
        self.engine = engine
        self.why = why
        self.answer = answer

    @property
    def kind(self) -> str:
        """The kind of failure for statistics. It is the HTTP status, if there was one."""
        return str(self.answer.status) if self.answer is not None else "EngineFailed"


class EngineRefused(Exception):
    """The engine refuses this request. Any other engine would refuse it, too."""

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer

    @property
    def kind(self) -> str:
        return str(self.answer.status)


class EngineStream:
    """A stream of an engine's events. It is a context manager; leaving it ends the request at the engine."""

    def __init__(
        self, engine: Engine, response: aiohttp.ClientResponse, waiting: AwaitedAnswer, first_s: float, idle_s: float
    ) -> None:
        self.engine = engine
        self._waiting = waiting
        waiting.given_up.add_done_callback(self._silenced)
        self.span: Span | None = None  # notes when the first event comes
        self.headers = _passed_on(response, unpacked=True)
        self._response = response
        self._wait_s = first_s
        self._idle_s = idle_s
        self._until: float | None = None  # when the next event must have arrived; comments do not count
        self._why = ""  # why the proxy has closed the stream
        self._reader = sse.EventReader(_MAX_ENGINE_EVENT_BYTES)
        self._events: deque[bytes] = deque()

    async def next(self) -> bytes | None:
        """Return the data of the next event or comment, or None after the last one. Raises `EngineFailed`, also if the
        stream was cut."""
        loop = asyncio.get_running_loop()
        if self._events:
            await asyncio.sleep(0)  # one read may contain a thousand events: let other tasks run in between
        if self._until is None:
            self._until = loop.time() + self._wait_s
        while not self._events:
            # `wait_for` is not used because it may lose a cancellation that arrives together with the bytes.
            expiry = loop.call_at(self._until, self._expire)
            try:
                piece = await self._response.content.readany()
                self._events.extend(self._reader.feed(piece))
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                raise EngineFailed(self.engine, self._why or f"its stream was cut off: {error}") from None
            except sse.EventError as error:
                raise EngineFailed(self.engine, str(error)) from None
            finally:
                expiry.cancel()
            if not piece:
                raise EngineFailed(self.engine, "its stream ended without [DONE]")
        event = self._events.popleft()
        if isinstance(event, sse.Comment):
            return event
        self.engine.silence.came(self._waiting)
        self._wait_s, self._until = self._idle_s, None
        if self.span is not None:
            self.span.event("first token")
            self.span = None
        return None if event == sse.DONE else event

    async def chunk(self) -> dict[str, Any] | sse.Comment | None:
        """Return the next chunk or comment, or None after the last one. Raises `EngineFailed`, or `EngineRefused` if
        the stream has an error that is the request's fault."""
        data = await self.next()
        return data if data is None or isinstance(data, sse.Comment) else self.parse(data)

    def parse(self, data: bytes) -> dict[str, Any]:
        """Return the chunk in an event. Raises the same errors as `chunk`."""
        try:
            chunk = sse.decode(data)
        except sse.EventError as error:
            raise EngineFailed(self.engine, str(error)) from None
        if chunk.get("error") is not None or chunk.get("object") == "error":
            self.refuse(data)
        try:
            _check_chunk(data)
        except msgspec.ValidationError as error:
            raise EngineFailed(self.engine, f"an event is not a chunk of OpenAI's API: {error}") from None
        return chunk

    def refuse(self, data: bytes) -> NoReturn:
        """Raise the error that an event describes. The error is in the field `error`; for some engines it is the event
        itself."""
        try:
            event = sse.decode(data)
            said = event.get("error") or event
        except sse.EventError:
            said = None
        code = said.get("code") if isinstance(said, dict) else None
        why = f"an error in its stream: {data[:200].decode(errors='replace')}"
        if not isinstance(code, int) or not 400 <= code < 600:
            raise EngineFailed(self.engine, why)
        answer = EngineAnswer(code, [("content-type", "application/json")], data)
        raise EngineFailed(self.engine, why, answer) if code in _RETRIED else EngineRefused(answer)

    def _expire(self) -> None:
        self._why = f"no event came for {self._wait_s:g} s"
        self._response.close()

    def _silenced(self, _done: asyncio.Future[None]) -> None:
        self._why = _SILENT
        self._response.close()

    def close(self) -> None:
        self._waiting.given_up.remove_done_callback(self._silenced)
        self.engine.silence.ended(self._waiting)
        self._response.close()

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


class Upstream:
    """Sends requests to all engines."""

    def __init__(self, settings: Settings, api_key: str = "") -> None:
        """api_key: the key for the proxy's own requests"""
        self._settings = settings
        self._own_headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # Connections need no limit here: there are at most as many as requests in flight, which are limited.
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_note_reuse)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        # Answers that the proxy reads are decompressed; answers that it passes on unread stay compressed.
        self._passing, self._reading = (
            aiohttp.ClientSession(
                connector=connector,
                connector_owner=False,
                auto_decompress=unpacks,
                trace_configs=[reuse],
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            )
            for unpacks in (False, True)
        )
        self._connector = connector

    async def close(self) -> None:
        await self._passing.close()
        await self._reading.close()
        await self._connector.close()

    async def stream(
        self, engine: Engine, path: str, body: Mapping[str, Any], headers: Mapping[str, str], weight: float
    ) -> EngineStream:
        """Request a stream, and return when the engine has accepted the request. `weight`: see `silence.weight`. Raises
        `EngineFailed` or `EngineRefused`."""
        waiting = engine.silence.begin(weight)
        first_s, idle_s = self._settings.first_byte_s, self._settings.idle_s
        try:
            opening = self._open(engine, "POST", path, _encoder.encode(body), headers, first_s)
            response = await _unless_given_up(engine, waiting, opening)
        except BaseException:
            engine.silence.ended(waiting)
            raise
        try:
            if response.status == 200:
                stream = EngineStream(engine, response, waiting, first_s, idle_s)
                if response.content_type == "application/json":  # an error instead of events
                    engine.silence.refused(waiting)
                    stream.refuse((await self._read(engine, response)).body)
                return stream
            engine.silence.refused(waiting)
            raise_for(engine, await self._read(engine, response))
        except BaseException:
            engine.silence.ended(waiting)
            response.close()
            raise
        raise EngineFailed(engine, f"status {response.status} for a stream; expected 200")

    async def ask(
        self, engine: Engine, path: str, body: Mapping[str, Any], headers: Mapping[str, str], weight: float
    ) -> EngineAnswer:
        """Return the whole answer, which has status 200. `weight`: as for `stream`. Raises `EngineFailed` or
        `EngineRefused`."""
        asking = self._whole(engine, "POST", path, _encoder.encode(body), headers, self._settings.answer_s)
        waiting = engine.silence.begin(weight)
        try:
            answer = await _unless_given_up(engine, waiting, asking)
            if answer.status == 200:
                engine.silence.came(waiting)
            else:
                engine.silence.refused(waiting)
        finally:
            engine.silence.ended(waiting)
        raise_for(engine, answer)
        return answer

    async def token(
        self,
        engine: Engine,
        timeout_s: float,
        model: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> EngineAnswer:
        """Ask for a token, to see whether the engine works. Raises `EngineFailed` if no answer comes in time. A refusal
        also shows that the engine works: it may be an engine that generates nothing, or that requires a key."""
        model = model or next(iter(engine.models), None)
        body: dict[str, Any] = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
        if kv_transfer_params:
            body["kv_transfer_params"] = kv_transfer_params
        headers = {**self._own_headers, **_JSON, "x-request-id": PROBE}
        answer = await self._whole(engine, "POST", "/v1/completions", _encoder.encode(body), headers, timeout_s)
        if answer.status in _RETRIED:
            raise EngineFailed(engine, f"status {answer.status}", answer)
        return answer

    async def own(
        self, engine: Engine, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> EngineAnswer:
        """Send a request of the proxy's own, and return the answer, whatever its status. Raises `EngineFailed`."""
        if body is None:
            return await self._whole(engine, "GET", path, b"", self._own_headers, timeout_s)
        headers = {**self._own_headers, **_JSON}
        return await self._whole(engine, "POST", path, _encoder.encode(body), headers, timeout_s)

    async def get(self, engine: Engine, path: str, headers: Mapping[str, str], timeout_s: float) -> EngineAnswer:
        """Return the answer to a user's GET, whatever its status. Raises `EngineFailed`."""
        return await self._whole(engine, "GET", path, b"", headers, timeout_s)

    @contextlib.asynccontextmanager
    async def passed(
        self, engine: Engine, method: str, path: str, data: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[int, Headers, AsyncIterator[bytes]]]:
        """Yield the status, the headers and the pieces of an answer, to be passed on as they arrive. Raises
        `EngineFailed`."""
        opening = self._open(engine, method, path, data, headers, self._settings.answer_s, reads=False)
        waiting = engine.silence.begin(float("inf"))  # the usual time of these requests is not known
        try:
            response = await _unless_given_up(engine, waiting, opening)
        finally:
            engine.silence.ended(waiting)
        with _closing(response):
            sent = _passed_on(response)
            if "content-length" in response.headers and "transfer-encoding" not in response.headers:
                sent.append(("content-length", response.headers["content-length"]))
            yield response.status, sent, _pieces(engine, response)

    async def _whole(
        self, engine: Engine, method: str, path: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> EngineAnswer:
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
        reads: bool = True,
    ) -> aiohttp.ClientResponse:
        """Send a request and return when the answer begins.

        timeout_s: the longest wait until the answer begins, and between its pieces
        whole: whether `timeout_s` is for the whole answer
        reads: whether the proxy reads the answer, instead of passing it on unchanged
        """
        limits = {"total": timeout_s} if whole else {"total": None, "sock_read": timeout_s}
        timeout = aiohttp.ClientTimeout(sock_connect=self._settings.connect_s, **limits)
        sent = list(headers.items())  # a header may occur twice
        if reads:
            sent = [pair for pair in sent if pair[0] != "accept-encoding"] + [("accept-encoding", "identity")]
        session = self._reading if reads else self._passing
        while True:
            used: set[str] = set()
            began = time.monotonic()
            try:
                response = await session.request(
                    method,
                    engine.url + path,
                    data=data or None,
                    headers=sent,
                    allow_redirects=False,
                    timeout=timeout,
                    trace_request_ctx=used,
                )
            except asyncio.TimeoutError:
                raise EngineFailed(engine, f"no answer to {path} within {timeout_s:g} s") from None
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, OSError) as error:
                if used and time.monotonic() - began < _IDLE_CLOSED_S:
                    continue  # the engine closed a connection that was idle: it has not seen the request
                raise EngineFailed(engine, in_words(error)) from None
            except (aiohttp.ClientError, ValueError) as error:
                raise EngineFailed(engine, in_words(error)) from None
            if not 200 <= response.status < 600:
                response.close()
                raise EngineFailed(engine, f"status {response.status}, which is not the status of an answer")
            return response

    async def _read(self, engine: Engine, response: aiohttp.ClientResponse) -> EngineAnswer:
        pieces = bytearray()
        async for piece in _pieces(engine, response):
            pieces += piece
            if len(pieces) > self._settings.max_answer_bytes:
                raise EngineFailed(engine, f"its answer has more than {self._settings.max_answer_bytes} bytes")
        return EngineAnswer(response.status, _passed_on(response, unpacked=True), bytes(pieces))


async def _pieces(engine: Engine, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise EngineFailed(engine, f"its answer was cut off: {in_words(error)}") from None


def raise_for(engine: Engine, answer: EngineAnswer) -> None:
    """Raise the error that the status of an answer means. Return if the status is 200."""
    if answer.status in _RETRIED:
        raise EngineFailed(engine, f"status {answer.status}", answer)
    if answer.status != 200:
        raise EngineRefused(answer)


async def _unless_given_up(engine: Engine, waiting: AwaitedAnswer, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work, but raise `EngineFailed` if the engine turns out to be silent."""
    doing = asyncio.ensure_future(work)
    try:
        both: set[asyncio.Future[Any]] = {doing, waiting.given_up}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise EngineFailed(engine, _SILENT)
        return doing.result()
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)


@contextlib.contextmanager
def _closing(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Return the connection to the pool if the answer was read in full; otherwise close it."""
    try:
        yield
    finally:
        response.close() if not response.content.is_eof() else response.release()


def _passed_on(response: aiohttp.ClientResponse, unpacked: bool = False) -> Headers:
    """Return the headers of an engine's answer that the user gets. `unpacked`: whether the proxy has decompressed the
    body."""
    left_out = of_this_hop(response.headers.get("connection", "")) | ({"content-encoding"} if unpacked else set())
    return [(name.lower(), value) for name, value in response.headers.items() if name.lower() not in left_out]


async def _note_reuse(_session: aiohttp.ClientSession, used: Any, _params: object) -> None:
    """Note that the request reuses the connection of an earlier request."""
    used.trace_request_ctx.add("reused")
