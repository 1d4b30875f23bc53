"""The proxy's addresses: what is asked of it, and what becomes of a request from its first byte to its line in the log.

    POST /v1/completions, /v1/chat/completions     served by P and D, or by D alone
    GET  /v1/models                                the models of all healthy engines
    GET  /health /healthz /readyz /metrics /status of the proxy itself
    the paths in `PASSED`                          passed to a D engine as they are; any other: 404

One event loop. Every request ends in one record, whatever happens; when its user leaves, so do its requests to engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from kvstore_serving.proxy import plain
from kvstore_serving.proxy.ask import CHAT, COMPLETIONS, AskError, understand
from kvstore_serving.proxy.handover import StreamedAnswer
from kvstore_serving.proxy.pools import Engine
from kvstore_serving.proxy.record import AccessLog, Record, begin
from kvstore_serving.proxy.serving import Request, Serving, engine_span
from kvstore_serving.proxy.tracing import Tracing
from kvstore_serving.proxy.upstream import EngineFailed
from kvstore_serving.proxy.user import BodyTooLarge, BodyTooSlow, User, UserGone

log = logging.getLogger(__name__)

# Nothing that changes an engine is passed on.
PASSED: Final = frozenset(
    {
        *("/tokenize", "/detokenize", "/version", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/responses"),
        *("/v1/messages", "/pooling", "/classify", "/score", "/rerank"),
    }
)
_RETRY: Final = {"retry-after": "1"}
_TEXT: Final = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}


class Proxy:
    """The ASGI application. `draining`: no new requests are taken."""

    def __init__(
        self, serving: Serving, access_log: AccessLog, tracing: Tracing, status: Callable[[], dict[str, Any]]
    ) -> None:
        """`status`: what /status says beside the pools."""
        self.serving = serving
        self.in_flight: set[asyncio.Task[None]] = set()
        self.draining = False
        self._access_log = access_log
        self._tracing = tracing
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        user = User(scope, receive, send, self.serving.settings.user_stall_s)
        path, method = scope["path"], scope["method"]
        own = {
            "/health": self._health,
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/metrics": self._metrics,
            "/status": self._state,
            "/v1/models": self._models,
        }.get(path)
        try:
            if own is not None and method in ("GET", "HEAD"):
                await own(user)
            elif path in (COMPLETIONS, CHAT) and method == "POST":
                await self._recorded(user, method, path, self._generate)
            elif path in PASSED:
                query = scope["query_string"].decode("latin-1")
                whole = f"{path}?{query}" if query else path
                await self._recorded(user, method, path, lambda user, record: self._pass(user, record, method, whole))
            elif own is not None or path in (COMPLETIONS, CHAT):
                await user.refuse(405, f"{method} {path} is not allowed", "invalid_request_error")
            else:
                await user.refuse(404, f"this proxy has no {path}; see docs/proxy.md", "NotFoundError")
        except UserGone:
            log.debug("%s %s: the user has gone", method, path)

    # ---- requests ----------------------------------------------------------------------------------------------

    async def _recorded(
        self, user: User, method: str, path: str, serve: Callable[[User, Record], Awaitable[None]]
    ) -> None:
        """Serve a request, unless the proxy drains or has too many; end it when its user leaves; write its record."""
        record = begin(method, path, user.headers)
        work: asyncio.Task[None] | None = None
        try:
            if self.draining:
                record.outcome = "rejected"
                await user.refuse(503, "this proxy is shutting down; ask another one", "unavailable", None, _RETRY)
                return
            if len(self.in_flight) >= self.serving.settings.max_in_flight:
                record.outcome = "rejected"
                most = self.serving.settings.max_in_flight
                message = f"{most} requests are being served, as many as are allowed; ask again later"
                await user.refuse(503, message, "overloaded", None, _RETRY)
                return
            work = asyncio.create_task(self._guarded(user, record, serve))
            self.in_flight.add(work)
            self.serving.metrics.in_flight.set(len(self.in_flight))
            await work
        except UserGone:
            record.outcome = "disconnect"
        finally:
            if work is not None:
                self.in_flight.discard(work)
                self.serving.metrics.in_flight.set(len(self.in_flight))
            self._ended(user, record)

    async def _guarded(self, user: User, record: Record, serve: Callable[[User, Record], Awaitable[None]]) -> None:
        try:
            await serve(user, record)
        except UserGone:
            record.outcome = "disconnect"
        except asyncio.CancelledError:
            if not self.draining:
                raise
            record.outcome = "cut"
            await self._cut_off(user, "this proxy is shutting down")
        except Exception:  # the log says what is wrong here, the user that it is not the request
            log.exception("request %s failed", record.id)
            record.outcome = "failed"
            await self._cut_off(user, "the proxy failed; its log says why")

    async def _cut_off(self, user: User, why: str) -> None:
        try:
            if not user.status:
                await user.refuse(503, why, "unavailable", None, _RETRY)
            else:
                from kvstore_serving.proxy.user import error_body

                body = error_body(503, f"the answer was cut off: {why}; ask again", "unavailable")
                await user.write(b"data: %b\n\n" % body, more=False)
        except UserGone:
            log.debug("the user has gone, too")

    def _ended(self, user: User, record: Record) -> None:
        record.status = user.status
        record.seconds = time.monotonic() - record.began
        if record.ttft_s is None:
            record.ttft_s = user.first_s
        self.serving.metrics.ended(record)
        self._access_log.write(record)
        self._tracing.ended(record)

    async def _generate(self, user: User, record: Record) -> None:
        """A completion, of a prompt or of a chat."""
        body = await self._body(user, record)
        if body is None:
            return
        try:
            ask = understand(record.path, msgspec.json.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AskError) as error:
            record.outcome = "refused"
            param = error.param if isinstance(error, AskError) else None
            message = str(error) if isinstance(error, AskError) else f"the body is no JSON: {error}"
            await user.refuse(400, message, "BadRequestError", param)
            return
        record.model, record.stream = ask.model or "", ask.stream

        async def work() -> None:
            with record.span("decide") as span:
                decision = await self.serving.decider.decide(ask)
            self.serving.metrics.phases.labels("decide").observe(span.ended - span.began)
            if decision is None:
                await self._nobody(user, record, ask.model)
                return
            record.decision, record.why, record.decode = decision.path, decision.why, decision.decode.url
            record.prefill = decision.prefill.url if decision.prefill is not None else ""
            record.prompt_tokens, record.cached_tokens = decision.prompt_tokens, decision.cached_tokens
            request = Request(self.serving, ask, user, record, decision)
            await (StreamedAnswer(request).run() if ask.stream else plain.serve(request))

        await _while_there(user, work())

    async def _nobody(self, user: User, record: Record, model: str | None) -> None:
        """No engine serves the model now."""
        pools = self.serving.pools
        known = {name for engine in pools.engines.values() for name in engine.models}
        if model is not None and model not in known and any(engine.healthy for engine in pools.engines.values()):
            record.outcome = "refused"
            await user.refuse(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
            return
        record.outcome = "failed"
        down = "; ".join(f"{engine.url}: {engine.why_down}" for engine in pools.engines.values() if not engine.healthy)
        message = (
            f"no healthy engine serves {model or 'this request'} ({down or 'there are no engines'}); ask again later"
        )
        await user.refuse(503, message, "unavailable", None, _RETRY)

    async def _pass(self, user: User, record: Record, method: str, path: str) -> None:
        """A request that a D engine answers as it is."""
        body = await self._body(user, record)
        if body is None:
            return
        engine = self.serving.pools.decoder(_model_of(body), {}, 0)
        if engine is None:
            await self._nobody(user, record, _model_of(body))
            return
        record.decision, record.why, record.decode = "passed", "path", engine.url
        await _while_there(user, self._passed_to(engine, user, record, method, path, body))

    async def _passed_to(self, engine: Engine, user: User, record: Record, method: str, path: str, body: bytes) -> None:
        upstream, pools = self.serving.upstream, self.serving.pools
        headers: dict[str, str] = {}
        try:
            with pools.running(engine, 0), engine_span(record, "pass", "proxy to D", engine, method) as span:
                sent = record.for_engine(span)
                async with upstream.passed(engine, method, path, body, sent) as (status, headers, pieces):
                    await user.start(status, headers)
                    async for piece in pieces:
                        await user.write(piece)
                    await user.write(b"", more=False)
            record.outcome = "ok" if status < 400 else "refused"
        except EngineFailed as error:
            self.serving.note(engine, record, error)
            record.outcome = "cut" if user.status else "failed"
            if not user.status:
                await user.refuse(502, f"the engine failed: {error}", "upstream_error", None, _RETRY)
            elif headers.get("content-type", "").startswith("text/event-stream"):
                await self._cut_off(user, "the engine failed")
            # Else the server breaks the connection, so that nobody takes the part for the whole.

    async def _body(self, user: User, record: Record) -> bytes | None:
        most = self.serving.settings.max_body_bytes
        try:
            return await user.body(most)
        except BodyTooLarge:
            record.outcome = "refused"
            await user.refuse(413, f"the body is larger than {most} bytes, the most that is taken", "BadRequestError")
            return None
        except BodyTooSlow:
            record.outcome = "refused"
            seconds = self.serving.settings.user_stall_s
            await user.refuse(408, f"nothing more of the body came for {seconds:g} s", "BadRequestError")
            return None

    # ---- about the proxy -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return not self.draining and any(engine.healthy for engine in self.serving.pools.engines.values())

    async def _alive(self, user: User) -> None:
        await user.reply(200, b"ok\n", _TEXT)

    async def _health(self, user: User) -> None:
        """As the engines have it, for load balancers that check it: 200 while requests are taken."""
        await user.reply(200 if self.ready else 503, b"", _TEXT)

    async def _ready(self, user: User) -> None:
        why = "draining" if self.draining else "ok" if self.ready else "no healthy engine"
        await user.reply(200 if self.ready else 503, f"{why}\n".encode(), _TEXT)

    async def _metrics(self, user: User) -> None:
        await user.reply(200, self.serving.metrics.text(), _TEXT)

    async def _models(self, user: User) -> None:
        await user.reply(200, msgspec.json.encode({"object": "list", "data": self.serving.pools.cards()}))

    async def _state(self, user: User) -> None:
        pools = self.serving.pools
        engines = [engine.status() for engine in pools.engines.values()]
        state = {
            "ready": self.ready,
            "draining": self.draining,
            "in_flight": len(self.in_flight),
            "policy": self.serving.settings.policy,
            "split_tokens": self.serving.settings.split_tokens,
            "pools": {role: [each for each in engines if role in each["roles"]] for role in ("prefill", "decode")},
            "unpaired": pools.unpaired(),
            **self._status(),
        }
        await user.reply(200, msgspec.json.encode(state))


async def _while_there(user: User, work: Awaitable[None]) -> None:
    """Do the work while the user is there. Raises `UserGone` when not."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(user.gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done() and not user.ended:  # a server also calls it a disconnect when the reply was sent
            raise UserGone
        await doing
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


class _Named(msgspec.Struct):
    model: str | None = None


_decode_named: Final = msgspec.json.Decoder(_Named).decode


def _model_of(body: bytes) -> str | None:
    """-> the model that a body names, if it is JSON and names one."""
    try:
        return _decode_named(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
