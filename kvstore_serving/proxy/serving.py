"""What serving a request needs, and what every answer has in common: choosing again after a failure, and its end.

One event loop. An answer is one of two: `plain.serve` for a whole JSON document, `handover.StreamedAnswer` for a
stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore_client.engine.spans import Span
from kvstore_serving.proxy.ask import Ask, with_trace
from kvstore_serving.proxy.decision import Decider, Decision
from kvstore_serving.proxy.metrics import Metrics
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.record import Record
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.upstream import EngineFailed, EngineRefused, Upstream
from kvstore_serving.proxy.user import JSON, User, error_body

log = logging.getLogger(__name__)

_LAST_WORD_S: Final = 0.25


@dataclass(frozen=True)
class Serving:
    """What all requests share."""

    settings: Settings
    pools: Pools
    upstream: Upstream
    metrics: Metrics
    decider: Decider
    traced: bool = False  # whether engines are told the trace in the request's body, too

    def note(self, engine: Engine, record: Record, error: EngineFailed) -> None:
        """Note that an engine failed in a request."""
        engine.failed()
        self.metrics.failures.labels(engine.url).inc()
        log.warning("request %s: %s", record.id, error)


@contextlib.contextmanager
def engine_span(record: Record, name: str, row: str, engine: Engine, method: str = "POST") -> Iterator[Span]:
    """A request to an engine."""
    parts = urlsplit(engine.url)
    with record.span(name, "client", row) as span:
        span.attributes["server.address"] = parts.hostname or ""
        span.attributes["http.request.method"] = method
        if parts.port is not None:
            span.attributes["server.port"] = parts.port
        yield span


@dataclass
class Request:
    """One request, while it is served."""

    serving: Serving
    ask: Ask
    user: User
    record: Record
    decision: Decision
    engine: Engine = field(init=False)  # that answers now
    tried: set[str] = field(default_factory=set)
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)  # set: P has said its last word

    def __post_init__(self) -> None:
        self.engine = self.decision.decode

    @contextlib.contextmanager
    def attempt(self) -> Iterator[Span]:
        """A request to the engine that answers now."""
        with engine_span(self.record, "decode", "proxy to D", self.engine) as span:
            if self.record.retries:
                span.attributes["http.request.resend_count"] = self.record.retries
            yield span

    def traced(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """-> the body of a request to an engine with these headers."""
        return with_trace(body, headers["traceparent"]) if self.serving.traced else body

    def after(self, error: EngineFailed, when: str) -> bool:
        """Note that the engine failed, and choose another one. -> False: there were enough, or there is none."""
        serving, record = self.serving, self.record
        serving.note(self.engine, record, error)
        self.tried.add(self.engine.url)
        if record.retries >= serving.settings.retries:
            return False
        engine = self._another({*self.tried}) or self._another({self.engine.url}) or self._another(set())
        if engine is None:
            return False
        record.retries += 1
        record.root.event("retry", **{"error.type": error.kind, "server.address": self.engine.url})
        serving.metrics.retries.labels(when).inc()
        self.engine = engine
        record.decode = engine.url
        return True

    async def found_before(self, by_decode: int) -> int:
        """-> how many tokens of the prompt were cached before the request, where D says that it found so many. If P may
        have computed some of them and has not said so yet, it is about to: its blocks come before its answer."""
        if self.decision.prefill is not None and by_decode > self.decision.cached_tokens:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.prefilled.wait(), _LAST_WORD_S)
        return self.record.found_before(by_decode)

    def answered(self, cached: int | None) -> None:
        """The engine that answers has the prompt now. cached: how many of its tokens it found; None: not known."""
        decider, decision, record = self.serving.decider, self.decision, self.record
        decider.answered(self.ask, decision, self.engine, cached)
        if self.engine is decision.decode and not record.retries and record.prefill_outcome == "ok":
            decider.handed_over(decision, cached)

    async def fail(self, error: EngineFailed | EngineRefused) -> None:
        """The end of a request whose reply has not begun: what the engine said, else what the proxy knows."""
        if error.answer is not None:
            answer = error.answer
            self.record.outcome = "refused" if isinstance(error, EngineRefused) else "failed"
            await self.user.reply(answer.status, answer.body, answer.headers)
            return
        self.record.outcome = "failed"
        body = error_body(502, f"no engine could serve this request; the last one: {error}", "upstream_error")
        await self.user.reply(502, body, [*JSON, ("retry-after", "1")])

    def _another(self, without: set[str]) -> Engine | None:
        decision, model = self.decision, self.ask.model
        worth = decision.have.worth(list(self.serving.pools.engines.values()))
        return self.serving.pools.decoder(model, worth, decision.prompt_tokens, without=without, like=decision.decode)
