"""What serving a request needs, and what all kinds of answers share: the choice of another engine after a failure, and
the end of the request.

Used by one event loop. There are two kinds of answers: `plain.serve` sends a whole JSON document, and
`handover.StreamedAnswer` sends a stream.
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
from kvstore_serving.proxy.ask import ParsedRequest, with_trace
from kvstore_serving.proxy.decision import Decider, Decision
from kvstore_serving.proxy.metrics import Metrics
from kvstore_serving.proxy.pools import Engine, Pools
from kvstore_serving.proxy.record import Record
from kvstore_serving.proxy.settings import Settings
from kvstore_serving.proxy.upstream import EngineFailed, EngineRefused, Upstream
from kvstore_serving.proxy.user import JSON_HEADERS, User, error_body

log = logging.getLogger(__name__)

_LAST_WORD_S: Final = 0.25


@dataclass(frozen=True)
class Serving:
    """The objects that all requests share."""

    settings: Settings
    pools: Pools
    upstream: Upstream
    metrics: Metrics
    decider: Decider
    traced: bool = False  # whether engines also get the trace in the request's body

    def note(self, engine: Engine, record: Record, error: EngineFailed) -> None:
        """Note that an engine failed while it served a request."""
        engine.failed()
        self.metrics.failures.labels(engine.url).inc()
        log.warning("request %s: %s", record.id, error)


@contextlib.contextmanager
def engine_span(record: Record, name: str, row: str, engine: Engine, method: str = "POST") -> Iterator[Span]:
    """Measure a request to an engine, until the block ends."""
    parts = urlsplit(engine.url)
    with record.span(name, "client", row) as span:
        span.attributes["server.address"] = parts.hostname or ""
        span.attributes["http.request.method"] = method
        if parts.port is not None:
            span.attributes["server.port"] = parts.port
        yield span


@dataclass
class ServedRequest:
    """One request while it is served."""

    serving: Serving
    ask: ParsedRequest
    user: User
    record: Record
    decision: Decision
    engine: Engine = field(init=False)  # the engine that answers now
    tried: set[str] = field(default_factory=set)
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)  # set when P has finished, even if it failed

    def __post_init__(self) -> None:
        self.engine = self.decision.decode

    @contextlib.contextmanager
    def attempt(self) -> Iterator[Span]:
        """Measure a request to the engine that answers now, until the block ends."""
        with engine_span(self.record, "decode", "proxy to D", self.engine) as span:
            if self.record.retries:
                span.attributes["http.request.resend_count"] = self.record.retries
            yield span

    def traced(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the body of a request to an engine. It contains the trace from these headers if `Serving.traced` is
        set."""
        return with_trace(body, headers["traceparent"]) if self.serving.traced else body

    def after(self, error: EngineFailed, when: str) -> bool:
        """Note that the engine failed, and choose another one. Returns False if there is no other engine, or after too
        many retries."""
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
        """Return how many tokens of the prompt were cached before the request. `by_decode` is the number that D
        reports. P may have computed some of these tokens without having answered yet. In that case this waits briefly
        for P, because P's answer comes just after its blocks."""
        if self.decision.prefill is not None and by_decode > self.decision.cached_tokens:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.prefilled.wait(), _LAST_WORD_S)
        return self.record.found_before(by_decode)

    def answered(self, cached: int | None) -> None:
        """Note that the answering engine has the prompt now. `cached`: the number of the prompt's tokens that the
        engine found in a cache; None if not known."""
        decider, decision, record = self.serving.decider, self.decision, self.record
        decider.answered(self.ask, decision, self.engine, cached)
        if self.engine is decision.decode and not record.retries and record.prefill_outcome == "ok":
            decider.handed_over(decision, cached)

    async def fail(self, error: EngineFailed | EngineRefused) -> None:
        """End a request whose reply has not begun. The reply is the engine's answer if there is one, otherwise the
        proxy's own error."""
        if error.answer is not None:
            answer = error.answer
            self.record.outcome = "refused" if isinstance(error, EngineRefused) else "failed"
            await self.user.reply(answer.status, answer.body, answer.headers)
            return
        self.record.outcome = "failed"
        body = error_body(502, f"no engine could serve this request; the last one: {error}", "upstream_error")
        await self.user.reply(502, body, [*JSON_HEADERS, ("retry-after", "1")])

    def _another(self, without: set[str]) -> Engine | None:
        decision, model = self.decision, self.ask.model
        worth = decision.have.worth(list(self.serving.pools.engines.values()))
        return self.serving.pools.decoder(model, worth, decision.prompt_tokens, without=without, like=decision.decode)
