"""Health checks, which find out whether each engine works and which models it serves. Each engine is checked in its own
loop.

Each check requests /health. When an engine becomes healthy, and again after every `_MODELS_EVERY` checks, the proxy
also requests /v1/models and /version, because adapters come and go. An engine that is up but does not list its models
gets no requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import msgspec

from kvstore_serving.proxy.describing import Describing
from kvstore_serving.proxy.engine_load import look_at_load
from kvstore_serving.proxy.pools import Engine, Model, Pools
from kvstore_serving.proxy.silence import MIN_SILENCE_S, weight
from kvstore_serving.proxy.upstream import EngineFailed, Upstream

log = logging.getLogger(__name__)

_MODELS_EVERY: Final = 15  # checks
LOOK_AGAIN_S: Final = 1.0
LATE_POLL_S: Final = 0.25  # the interval at which late requests are detected


class Checks:
    """Follows the pools: checks the engines that are added, and stops checking those that are removed."""

    def __init__(
        self, pools: Pools, upstream: Upstream, describing: Describing, interval_s: float, timeout_s: float
    ) -> None:
        self._pools = pools
        self._upstream = upstream
        self._describing = describing
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._tasks: dict[Engine, tuple[asyncio.Task[None], ...]] = {}
        self._asked: dict[Engine, asyncio.Event] = {}  # set when the engine was checked once
        self._unpaired: list[tuple[str, ...]] = []  # the pairs that were logged last
        self._looking: asyncio.Future[list[BaseException | None]] | None = None
        self._look_at = 0.0

    def follow(self) -> None:
        """Start and stop checks, so that exactly the engines in the pools are checked."""
        engines = set(self._pools.engines.values())
        for engine in engines - self._tasks.keys():
            self._asked[engine] = asyncio.Event()
            self._tasks[engine] = asyncio.create_task(self._watch(engine)), asyncio.create_task(self._listen(engine))
        for engine in self._tasks.keys() - engines:
            for task in self._tasks.pop(engine):
                task.cancel()
            self._asked.pop(engine).set()

    async def first(self) -> None:
        """Return once every followed engine was checked."""
        await asyncio.gather(*(asked.wait() for asked in list(self._asked.values())))

    async def close(self) -> None:
        tasks = [task for each in self._tasks.values() for task in each]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, engine: Engine, number: int) -> None:
        """Check an engine once. `number`: the number of checks that it had before."""
        try:
            answer = await self._upstream.own(engine, "/health", self._timeout_s)
            if answer.status != 200:
                raise EngineFailed(engine, f"/health: status {answer.status}")
            if not engine.healthy or number % _MODELS_EVERY == 0:
                await self._identify(engine)
        except EngineFailed as error:
            if engine.healthy or number == 0:
                log.warning("engine %s takes no requests: %s", engine.url, error.why)
            engine.down(error.why)
            if engine.silence.late():
                engine.silence.give_up()
            return
        if not engine.healthy:
            names = ", ".join(engine.models)
            log.info("engine %s takes requests for %s", engine.url, names)
        engine.up()
        if not engine.shunned:
            await look_at_load(engine, self._upstream, self._timeout_s)
            await self._describing.look(engine)

    async def look_again(self, model: str | None) -> bool:
        """Ask healthy engines for their models again if no engine is known to serve this model, because adapters may be
        loaded at any time. Returns whether an engine serves it now. Engines are asked at most once in
        `LOOK_AGAIN_S`."""
        now = time.monotonic()
        healthy = [engine for engine in self._pools.engines.values() if engine.healthy]
        if model is None or any(engine.serves(model) for engine in healthy):
            return False
        if self._looking is None or (self._looking.done() and now >= self._look_at):
            self._look_at = now + LOOK_AGAIN_S
            self._looking = asyncio.ensure_future(
                asyncio.gather(*(self._identify(engine) for engine in healthy), return_exceptions=True)
            )
        await asyncio.shield(self._looking)
        return any(engine.serves(model) for engine in healthy)

    async def _listen(self, engine: Engine) -> None:
        """Keep checking whether the engine has become silent or, after a failure, works again."""
        while True:
            await asyncio.sleep(LATE_POLL_S)
            if engine.healthy and (engine.silence.late() or (engine.failures and time.monotonic() >= engine.ask_at)):
                await self.ask_for_a_token(engine)

    async def ask_for_a_token(self, engine: Engine) -> None:
        """Ask the engine for one token. After an answer, the engine gets requests again. If no answer comes while
        requests are late, the engine is considered silent."""
        usual_s = engine.silence.limit_s(weight(1, 1))
        before, late = engine.failures, engine.silence.late()
        try:
            await self._upstream.token(engine, min(max(self._timeout_s, MIN_SILENCE_S), usual_s))
        except EngineFailed as error:
            engine.failed()
            if late and not engine.silent:
                engine.silent = True
                log.warning("engine %s gets no requests: it is silent (%s)", engine.url, error.why)
            if engine.silent:
                engine.silence.give_up()
            return
        if before:
            log.info("engine %s works again", engine.url)
        engine.worked()
        engine.silence.answers()

    async def _watch(self, engine: Engine) -> None:
        number, asked = 0, self._asked[engine]
        while True:
            await asyncio.sleep(self._interval_s if number else 0)
            try:
                await self.check(engine, number)
                self._compare()
            finally:
                asked.set()
            number += 1

    async def _identify(self, engine: Engine) -> None:
        answer = await self._upstream.own(engine, "/v1/models", self._timeout_s)
        if answer.status != 200:
            raise EngineFailed(
                engine, f"/v1/models: status {answer.status}; if the engine requires a key, set KVSTORE_ENGINE_API_KEY"
            )
        try:
            cards = [card for card in msgspec.json.decode(answer.body)["data"] if isinstance(card["id"], str)]
            models = [_model(card) for card in cards]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise EngineFailed(engine, f"/v1/models: cannot read the answer: {error!r}") from None
        before, engine.cards, engine.models = engine.models, cards, {model.name: model for model in models}
        for name in [name for name in engine.adapters if engine.models.get(name) != before.get(name)]:
            del engine.adapters[name]  # it was loaded again, perhaps from other files
        version = await self._upstream.own(engine, "/version", self._timeout_s)
        engine.version = _version(version.body) if version.status == 200 else ""

    def _compare(self) -> None:
        """Log which engines cannot be paired, if that has changed."""
        unpaired = self._pools.unpaired()
        told: list[tuple[str, ...]] = [
            (each["model"], each["decode"]["url"], other["url"], other["why"])
            for each in unpaired
            for other in each["prefill"]
        ]
        if told != self._unpaired:
            for each in unpaired:
                log.warning(
                    "model %s: the decode engine %s is not paired with %s, and %s (docs/disaggregation.md)",
                    each["model"],
                    each["decode"]["url"],
                    ", ".join(f"{other['url']}: {other['why']}" for other in each["prefill"]),
                    "works alone" if each["alone"] else "is paired with others",
                )
        self._unpaired = told


def _model(card: dict[str, Any]) -> Model:
    longest = card.get("max_model_len")
    root, parent = str(card.get("root") or card["id"]), str(card.get("parent") or "")
    return Model(card["id"], root, longest if isinstance(longest, int) else None, parent)


def _version(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["version"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
