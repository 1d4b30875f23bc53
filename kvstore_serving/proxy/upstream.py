"""Requests to engines: one pool of connections, streams that are read as they come, and what can go wrong.

One event loop. Two errors come out of here. `EngineFailed`: the engine is to blame, another one may be asked.
`EngineRefused`: the engine's own answer, which is passed on as it is. Leaving a stream closes its connection, and an
engine whose connection is closed stops computing. Reading is ahead of what the caller takes by a socket's buffer only,
so a slow user slows the engine down instead of filling this process.

Over 400 lines because the ways to ask an engine end in the same two errors, and share one opening of a request.
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
from kvstore_serving.proxy.hop import of_this_hop
from kvstore_serving.proxy.pools import Engine
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.silence import Waiting

# Worth another engine: this one is broken, or has no room.
_RETRIED: Final = frozenset({408, 425, 429, *range(500, 600)})
PROBE: Final = "kvstore-proxy-asks-for-a-token"  # the id of such a request
_SILENT: Final = "it is silent: it accepts requests and answers none"
_IDLE_CLOSED_S: Final = 0.5  # after which a connection that ends was not idle
_KEEP_ALIVE_S: Final = 2.0  # less than engines keep an idle connection: uvicorn closes it after 5 s
_MAX_EVENT_BYTES: Final = 32 << 20  # the first event may carry the token ids of a long prompt
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
    """What the proxy reads of a chunk."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


_check_chunk: Final = msgspec.json.Decoder(_Chunk).decode


Headers: TypeAlias = "list[tuple[str, str]]"
"""Names and values, in order. Bytes of a value that are no UTF-8 are there as surrogates."""


@dataclass(frozen=True)
class Answer:
    """An engine's whole answer."""

    status: int
    headers: Headers
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

    def __init__(
        self, engine: Engine, response: aiohttp.ClientResponse, waiting: Waiting, first_s: float, idle_s: float
    ) -> None:
        self.engine = engine
        self._waiting = waiting
        waiting.given_up.add_done_callback(self._silenced)
        self.span: Span | None = None  # which is told when the first event comes
        self.headers = _passed_on(response, unpacked=True)
        self._response = response
        self._wait_s = first_s
        self._idle_s = idle_s
        self._until: float | None = None  # when the next event must be there; comments are none
        self._why = ""  # this side has closed it
        self._reader = sse.EventReader(_MAX_EVENT_BYTES)
        self._events: deque[bytes] = deque()

    async def next(self) -> bytes | None:
        """-> the next event's data, or a comment; None after the last one. Raises `EngineFailed`, also if the stream
        was cut."""
        loop = asyncio.get_running_loop()
        if self._events:
            await asyncio.sleep(0)  # one piece may have a thousand of them: between two it is the turn of others
        if self._until is None:
            self._until = loop.time() + self._wait_s
        while not self._events:
            # Not `wait_for`: it may swallow a cancellation that comes with the bytes.
            expiry = loop.call_at(self._until, self._expire)
            try:
                piece = await self._response.content.readany()
                self._events.extend(self._reader.feed(piece))
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                raise EngineFailed(self.engine, self._why or f"its stream was cut: {error}") from None
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
        """-> the next chunk, or a comment; None after the last one. Raises `EngineFailed`, and `EngineRefused` for an
        error in the stream that is the request's."""
        data = await self.next()
        return data if data is None or isinstance(data, sse.Comment) else self.parse(data)

    def parse(self, data: bytes) -> dict[str, Any]:
        """-> the chunk that an event is. Raises what `chunk` raises."""
        try:
            chunk = sse.decode(data)
        except sse.EventError as error:
            raise EngineFailed(self.engine, str(error)) from None
        if chunk.get("error") is not None or chunk.get("object") == "error":
            self.refuse(data)
        try:
            _check_chunk(data)
        except msgspec.ValidationError as error:
            raise EngineFailed(self.engine, f"an event that is no chunk of OpenAI's API: {error}") from None
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
        answer = Answer(code, [("content-type", "application/json")], data)
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
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_note_reuse)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        # What is passed on is not looked at, so it stays as it is; what is read is unpacked.
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
    ) -> Stream:
        """Ask for a stream; returns when the engine has accepted it. `weight`: see `silence.weight`. Raises
        `EngineFailed`, `EngineRefused`."""
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
                stream = Stream(engine, response, waiting, first_s, idle_s)
                if response.content_type == "application/json":  # no events: it says why there are none
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
    ) -> Answer:
        """-> the whole answer, of status 200. `weight`: as for `stream`. Raises `EngineFailed`, `EngineRefused`."""
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
    ) -> Answer:
        """Ask for a token, to see whether the engine works. Raises `EngineFailed` if it does not come in time. An
        answer that refuses it will do: of an engine that generates nothing, or wants a key."""
        model = model or next(iter(engine.models), None)
        body: dict[str, Any] = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
        if kv_transfer_params:
            body["kv_transfer_params"] = kv_transfer_params
        headers = {**self._own_headers, **_JSON, "x-request-id": PROBE}
        answer = await self._whole(engine, "POST", "/v1/completions", _encoder.encode(body), headers, timeout_s)
        if answer.status in _RETRIED:
            raise EngineFailed(engine, f"status {answer.status}", answer)
        return answer

    async def own(self, engine: Engine, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> Answer:
        """-> the answer to a question of the proxy's own, of any status. Raises `EngineFailed`."""
        if body is None:
            return await self._whole(engine, "GET", path, b"", self._own_headers, timeout_s)
        headers = {**self._own_headers, **_JSON}
        return await self._whole(engine, "POST", path, _encoder.encode(body), headers, timeout_s)

    async def get(self, engine: Engine, path: str, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """-> the answer to a user's GET, of any status. Raises `EngineFailed`."""
        return await self._whole(engine, "GET", path, b"", headers, timeout_s)

    @contextlib.asynccontextmanager
    async def passed(
        self, engine: Engine, method: str, path: str, data: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[int, Headers, AsyncIterator[bytes]]]:
        """An answer that is passed on as it comes: status, headers, pieces. Raises `EngineFailed`."""
        opening = self._open(engine, method, path, data, headers, self._settings.answer_s, reads=False)
        waiting = engine.silence.begin(float("inf"))  # how long it takes nobody knows
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
        reads: bool = True,
    ) -> aiohttp.ClientResponse:
        """`timeout_s`: for the beginning of the answer, and between its pieces; `whole`: for all of it. `reads`: it is
        to be read, and not passed on as it is."""
        limits = {"total": timeout_s} if whole else {"total": None, "sock_read": timeout_s}
        timeout = aiohttp.ClientTimeout(sock_connect=self._settings.connect_s, **limits)
        sent = list(headers.items())  # a name may be there twice
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
                    continue  # the engine has closed a connection that was idle: it has not seen the request
                raise EngineFailed(engine, f"{type(error).__name__}: {error}") from None
            except (aiohttp.ClientError, ValueError) as error:
                raise EngineFailed(engine, f"{type(error).__name__}: {error}") from None
            if not 200 <= response.status < 600:
                response.close()
                raise EngineFailed(engine, f"status {response.status}, which is none of an answer")
            return response

    async def _read(self, engine: Engine, response: aiohttp.ClientResponse) -> Answer:
        pieces = bytearray()
        async for piece in _pieces(engine, response):
            pieces += piece
            if len(pieces) > self._settings.max_answer_bytes:
                raise EngineFailed(engine, f"an answer of more than {self._settings.max_answer_bytes} bytes")
        return Answer(response.status, _passed_on(response, unpacked=True), bytes(pieces))


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


async def _unless_given_up(engine: Engine, waiting: Waiting, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work, unless the engine turns out to be silent. Raises `EngineFailed` then."""
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
    """An answer that was read in full gives its connection back; any other closes it."""
    try:
        yield
    finally:
        response.close() if not response.content.is_eof() else response.release()


def _passed_on(response: aiohttp.ClientResponse, unpacked: bool = False) -> Headers:
    """-> the headers of an engine's answer that its user gets. `unpacked`: a body that was packed is so no more."""
    left_out = of_this_hop(response.headers.get("connection", "")) | ({"content-encoding"} if unpacked else set())
    return [(name.lower(), value) for name, value in response.headers.items() if name.lower() not in left_out]


async def _note_reuse(_session: aiohttp.ClientSession, used: Any, _params: object) -> None:
    """The request goes over a connection that has served another one before."""
    used.trace_request_ctx.add("reused")
