"""The proxy's HTTP routes, and the life of a request from its first byte to its line in the access log.

    POST /v1/completions, /v1/chat/completions     served by P and D together, or by D alone
    GET  /v1/models                                the models of all healthy engines
    GET  / /health /healthz /readyz /metrics /status
                                                   about the proxy itself: a page for people, probes, numbers
    the paths in `PASSED`                          passed to a D engine unchanged; so are those above with other methods
    /v1/responses/ID                               passed to the engine that keeps the response
    any other path                                 answered with 404

Runs in one event loop. Every request ends in one record, whatever happens. When a user disconnects, the proxy also ends
the requests that it sent to engines for that user.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from kvstore_serving.proxy import plain
from kvstore_serving.proxy.ask import (
    CHAT,
    COMPLETIONS,
    POLICY_HEADER,
    BadRequest,
    NotUnderstood,
    ParsedRequest,
    model_of,
    understand,
)
from kvstore_serving.proxy.bodies import BodiesFull, BodyBudget, BodyTooLarge, BodyTooSlow
from kvstore_serving.proxy.handover import StreamedAnswer
from kvstore_serving.proxy.page import GUARDS, page_files
from kvstore_serving.proxy.pools import Engine
from kvstore_serving.proxy.recent import Recent
from kvstore_serving.proxy.record import NOT_SERVED, AccessLog, Record, begin
from kvstore_serving.proxy.responses import RESPONSES_PATH, Responses, is_of_one, named_in
from kvstore_serving.proxy.serving import ServedRequest, Serving, engine_span
from kvstore_serving.proxy.tracing import Tracing
from kvstore_serving.proxy.upstream import EngineFailed
from kvstore_serving.proxy.user import JSON_HEADERS, User, UserGone, while_there

log = logging.getLogger(__name__)

MODELS: Final = "/v1/models"
# Requests that would change an engine are not passed on.
PASSED: Final = frozenset(
    {
        *(COMPLETIONS, CHAT, MODELS),
        *("/tokenize", "/detokenize", "/version", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/responses"),
        *("/v1/messages", "/pooling", "/classify", "/score", "/rerank"),
    }
)
# The request target that a client sends if it treats this server as a forward proxy (RFC 9112, section 3.2.2).
_PROXY_FORM: Final = re.compile(r"^https?://[^/]*", re.IGNORECASE)
_RETRY: Final = {"retry-after": "1"}
_METRICS_HEADERS: Final = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)

Serve = Callable[[User, Record, bytes], Awaitable[None]]
"""Serves a request, whose body is given."""


class Proxy:
    """The ASGI application. `draining`: whether new requests are refused."""

    def __init__(
        self,
        serving: Serving,
        access_log: AccessLog,
        tracing: Tracing,
        status: Callable[[], dict[str, Any]],
        look_again: Callable[[str | None], Awaitable[bool]],
    ) -> None:
        """Make the application.

        status: returns what /status reports in addition to the pools
        look_again: asks all engines for their models again if none is known to serve this one; returns whether one does
        """
        self.serving = serving
        self.in_flight: set[asyncio.Task[None]] = set()
        self.draining = False
        self._access_log = access_log
        self._tracing = tracing
        self._status = status
        self._look_again = look_again
        self._recent = Recent()
        self._page = page_files()
        self._responses = Responses(serving.pools)
        settings = serving.settings
        self._bodies = BodyBudget(
            settings.max_body_bytes, settings.max_bodies_bytes, settings.max_in_flight, settings.user_stall_s
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        user = User(scope, receive, send, self.serving.settings.user_stall_s)
        path, method = _PROXY_FORM.sub("", scope["path"]), scope["method"]
        own = {
            "/health": self._health,
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/metrics": self._metrics,
            "/status": self._state,
            MODELS: self._models,
        }.get(path)
        if path in self._page:
            own = partial(self._page_file, path)
        try:
            if "transfer-encoding" in user.headers and "content-length" in user.headers:
                message = "Content-Length and Transfer-Encoding were given; expected one of them"
                await user.refuse(400, message, "BadRequestError", None, {"connection": "close"})
            elif own is not None and (method == "GET" or (method == "HEAD" and path != MODELS)):
                await own(user)
            elif path in PASSED or is_of_one(path):
                query = scope["query_string"].decode("latin-1")
                pass_on = self._passing(method, path, query)
                understood = path in (COMPLETIONS, CHAT) and method == "POST" and _is_json(user)
                await self._recorded(user, method, path, self._generating(pass_on) if understood else pass_on)
            elif own is not None:
                await user.refuse(405, f"{method} {path} is not allowed", "invalid_request_error")
            else:
                await user.refuse(404, f"this proxy has no {path}; see docs/reference/proxy.md", "NotFoundError")
        except UserGone:
            log.debug("%s %s: the user has disconnected", method, path)

    # ---- requests ----------------------------------------------------------------------------------------------

    async def _recorded(self, user: User, method: str, path: str, serve: Serve) -> None:
        """Serve a request, unless the proxy drains or is full; end it if its user disconnects; write its record."""
        record = begin(method, path, user.headers)
        user.request_id = record.id
        try:
            if await self._takes_more(user, record):
                async with self._bodies.body(user) as body:
                    if await self._takes_more(user, record):  # the body may have taken long to arrive
                        await self._served(user, record, lambda user, record: serve(user, record, body))
        except UserGone:
            record.outcome = "disconnect"
        except (BodyTooLarge, BodyTooSlow, BodiesFull) as error:
            record.outcome = "rejected" if isinstance(error, BodiesFull) else "refused"
            await self._refuse_body(user, error)
        finally:
            self._ended(user, record)

    async def _served(self, user: User, record: Record, serve: Callable[[User, Record], Awaitable[None]]) -> None:
        work = asyncio.create_task(self._guarded(user, record, serve))
        self.in_flight.add(work)
        self.serving.metrics.in_flight.set(len(self.in_flight))
        try:
            await work
        finally:
            self.in_flight.discard(work)
            self.serving.metrics.in_flight.set(len(self.in_flight))

    async def _takes_more(self, user: User, record: Record) -> bool:
        """Return whether a request can be served now. If it cannot, send the user the reason."""
        most = self.serving.settings.max_in_flight
        if self.draining:
            record.outcome = "rejected"
            await user.refuse(503, "this proxy is shutting down; ask another one", "unavailable", None, _RETRY)
            return False
        if len(self.in_flight) >= most:
            record.outcome = "rejected"
            message = f"{most} requests are being served, as many as are allowed; ask again later"
            await user.refuse(503, message, "overloaded", None, _RETRY)
            return False
        return True

    async def _refuse_body(self, user: User, error: BodyTooLarge | BodyTooSlow | BodiesFull) -> None:
        settings = self.serving.settings
        status, kind, headers = 503, "overloaded", _RETRY
        message = f"the bodies of other requests take {settings.max_bodies_bytes} bytes, the most that all may take"
        if isinstance(error, BodyTooLarge):
            status, kind, headers = 413, "BadRequestError", {}
            message = f"the body is larger than {settings.max_body_bytes} bytes, the most that is taken"
        elif isinstance(error, BodyTooSlow):
            status, kind, headers = 408, "BadRequestError", {"connection": "close"}
            message = f"the body did not come within {settings.user_stall_s:g} s, or as long as there was room for it"
        try:
            await user.refuse(status, message, kind, None, headers)
        except UserGone:
            log.debug("the user disconnected before the refusal was sent")

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
        except Exception:  # the log has the details; the user learns only that the request is not at fault
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
            log.debug("the user disconnected before the error was sent")

    def _ended(self, user: User, record: Record) -> None:
        record.status = user.status
        record.seconds = time.monotonic() - record.began
        if record.stream and record.ttft_s is None and record.decision != NOT_SERVED:
            record.ttft_s = user.first_s
        self.serving.metrics.ended(record)
        self._recent.add(record)
        self._access_log.write(record)
        self._tracing.ended(record)

    def _generating(self, pass_on: Serve) -> Serve:
        """Return the handler of a completion or chat request. `pass_on` serves a request whose body the proxy cannot
        parse: only an engine can refuse it."""

        async def serve(user: User, record: Record, body: bytes) -> None:
            try:
                ask = understand(record.path, msgspec.json.decode(body), user.headers.get(POLICY_HEADER, ""))
            except BadRequest as error:
                record.outcome = "refused"
                await user.refuse(400, str(error), "BadRequestError", error.param)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotUnderstood):
                await pass_on(user, record, body)
            else:
                if await self._lacks(ask.model):
                    await pass_on(user, record, body)
                else:
                    await self._generate(user, record, ask)

        return serve

    async def _lacks(self, model: str | None) -> bool:
        """Return whether engines work, but none of them serves this model even after they were asked again. In that
        case the caller lets an engine refuse the request."""
        healthy = [engine for engine in self.serving.pools.engines.values() if engine.healthy]
        lacking = bool(healthy) and not any(engine.serves(model) for engine in healthy)
        return lacking and not await self._look_again(model)

    async def _generate(self, user: User, record: Record, ask: ParsedRequest) -> None:
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
            request = ServedRequest(self.serving, ask, user, record, decision)
            await (StreamedAnswer(request).run() if ask.stream else plain.serve(request))

        await while_there(user, work())

    async def _nobody(self, user: User, record: Record, model: str | None) -> None:
        """Refuse the request, because no engine serves the model now."""
        pools = self.serving.pools
        record.outcome = "failed"
        down = "; ".join(f"{engine.url}: {engine.why_down}" for engine in pools.engines.values() if not engine.healthy)
        message = (
            f"no healthy engine serves {model or 'this request'} ({down or 'there are no engines'}); ask again later"
        )
        await user.refuse(503, message, "unavailable", None, _RETRY)

    def _passing(self, method: str, path: str, query: str) -> Serve:
        """Return the handler of a request that an engine answers unchanged."""

        async def serve(user: User, record: Record, body: bytes) -> None:
            model, response = model_of(body), named_in(path, body)
            if response:
                engine = self._responses.engine_of(response)
            else:
                engine = self.serving.pools.decoder(None if await self._lacks(model) else model, {}, 0)
            if engine is None and response:
                record.outcome = "refused"
                message = (
                    f"no engine here is known to have the response {response!r}: it is gone, or this proxy was started "
                    "after it was made; send the whole conversation as input"
                )
                await user.refuse(404, message, "NotFoundError", "previous_response_id")
                return
            if engine is None:
                await self._nobody(user, record, model)
                return
            record.decision, record.why, record.decode = "passed", "path", engine.url
            whole = f"{path}?{query}" if query else path
            await while_there(user, self._passed_to(engine, user, record, method, whole, body))

        return serve

    async def _passed_to(self, engine: Engine, user: User, record: Record, method: str, path: str, body: bytes) -> None:
        upstream, pools = self.serving.upstream, self.serving.pools
        events, makes_response = False, path.partition("?")[0] == RESPONSES_PATH and method == "POST"
        try:
            with pools.running(engine, 0), engine_span(record, "pass", "proxy to D", engine, method) as span:
                sent = record.for_engine(span)
                if makes_response:
                    sent["accept-encoding"] = "identity"  # the proxy reads the answer's id
                async with upstream.passed(engine, method, path, body, sent) as (status, headers, pieces):
                    events = dict(headers).get("content-type", "").startswith("text/event-stream")
                    await user.start(status, headers)
                    async for piece in self._responses.noting(engine, pieces) if makes_response else pieces:
                        await user.write(piece)
                    await user.write(b"", more=False)
            record.outcome = "ok" if status < 400 else "refused"
        except EngineFailed as error:
            self.serving.note(engine, record, error)
            record.outcome = "cut" if user.status else "failed"
            if not user.status:
                await user.refuse(502, f"the engine failed: {error}", "upstream_error", None, _RETRY)
            elif events:
                await self._cut_off(user, "the engine failed")
            # Otherwise the server breaks the connection, so that the user does not mistake a part of the answer for the
            # whole.

    # ---- about the proxy -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return not self.draining and any(engine.healthy for engine in self.serving.pools.engines.values())

    async def _alive(self, user: User) -> None:
        await user.reply(200, b"ok\n", _METRICS_HEADERS)

    async def _health(self, user: User) -> None:
        """Answer health checks as the engines do: 200 while requests are accepted."""
        await user.reply(200 if self.ready else 503, b"", _METRICS_HEADERS)

    async def _ready(self, user: User) -> None:
        why = "draining" if self.draining else "ok" if self.ready else "no healthy engine"
        await user.reply(200 if self.ready else 503, f"{why}\n".encode(), _METRICS_HEADERS)

    async def _metrics(self, user: User) -> None:
        await user.reply(200, self.serving.metrics.text(), _METRICS_HEADERS)

    async def _models(self, user: User) -> None:
        """Reply with one engine's own answer, to which the models of all engines are added. The request is passed to an
        engine because only engines know their API key and their CORS rules."""
        record, headers = begin("GET", MODELS, user.headers), [*JSON_HEADERS]
        engine = self.serving.pools.decoder(None, {}, 0)
        if engine is not None:
            try:
                timeout_s = self.serving.settings.check_timeout_s
                answer = await self.serving.upstream.get(engine, MODELS, record.for_engine(record.root), timeout_s)
            except EngineFailed as error:
                log.debug("%s did not list its models: %s", engine.url, error)
            else:
                if answer.status != 200:
                    await user.reply(answer.status, answer.body, answer.headers)
                    return
                headers = answer.headers
        await user.reply(200, msgspec.json.encode({"object": "list", "data": self.serving.pools.cards()}), headers)

    async def _page_file(self, path: str, user: User) -> None:
        kind, content = self._page[path]
        await user.reply(200, content, (("content-type", kind), *GUARDS))

    async def _state(self, user: User) -> None:
        pools = self.serving.pools
        engines = [engine.status() for engine in pools.engines.values()]
        state = {
            "ready": self.ready,
            "draining": self.draining,
            "in_flight": len(self.in_flight),
            "policy": self.serving.settings.policy,
            "split_tokens": self.serving.settings.split_tokens or "auto",
            "split_from": self.serving.decider.split_from(),
            "pools": {role: [each for each in engines if role in each["roles"]] for role in ("prefill", "decode")},
            "unpaired": pools.unpaired(),
            "recent": self._recent.status(),
            **self._status(),
        }
        await user.reply(200, msgspec.json.encode(state))


def _is_json(user: User) -> bool:
    """Return whether the request declares a JSON body; engines refuse any other."""
    kind = user.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "application/json"
