"""The engines: which ones exist, which of them work, how busy they are, and which one gets a request.

Used by the tasks of one event loop only. An engine is a candidate if its last health check passed and its circuit is
closed. A failed request opens the circuit, and so does silence (`silence.py`). The proxy then asks the engine for a
token from time to time, and waits twice as long after each failure. An answer closes the circuit. If the circuits of
all healthy engines are open, all of these engines are candidates, because a suspect engine is better than none.

P and D are paired only if D finds what P saves (`Identity.unlike`). An engine's load is the number of requests that
this proxy has in flight there, so it is exact for one proxy and a fair guess for several.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from kvstore_client.engine.block_names import NOT_SHARED, BlockNames
from kvstore_serving.proxy.pace import EngineLoad, TokenPace
from kvstore_serving.proxy.silence import Silence, nothing_usual

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
_LONGEST_BACKOFF_S: Final = 30.0
_lives: Final = itertools.count(1)
_OTHERS_TOKENS: Final = 1024  # assumed for each prompt that other clients sent, as its length is not known
_REQUEST_TOKENS: Final = 256  # a running request weighs this much, plus its tokens: each step computes all requests


class Identity(NamedTuple):
    """What identifies a model of an engine, for comparing it with the same model of another engine.

    root: the place from which the engine loaded the model
    weights: the version of the weights; empty if not known
    names: how the engine names the model's blocks
    is_adapter: whether the model is a LoRA adapter
    """

    root: str
    weights: str
    names: BlockNames = BlockNames()
    is_adapter: bool = False

    def same_weights(self, other: Identity) -> bool:
        """Return whether an engine with one model may continue an answer of the other. If the contents of the files are
        known, they are compared; otherwise the places of the files are compared."""
        if self.weights and other.weights and self.weights != other.weights:
            return False
        mine, others = self.names, other.names
        if self.is_adapter and mine.adapter and others.adapter:
            return mine.adapter == others.adapter
        same_names = mine.namespaces == others.namespaces not in ("", NOT_SHARED)
        return self.root == other.root or (same_names and not self.is_adapter)

    def unlike(self, other: Identity) -> str:
        """Return in words why a prompt cannot be handed over from one engine to the other. The text is empty if it
        can."""
        mine, others = self.names, other.names
        if NOT_SHARED in (mine.namespaces, others.namespaces):
            return "one of them shares no blocks now"
        if self.weights and other.weights and self.weights != other.weights:
            return "other weights"
        if mine.namespaces and others.namespaces:
            if mine.namespaces != others.namespaces:
                return "other namespaces"
            if mine.generation != others.generation and min(mine.generation, others.generation) >= 0:
                return f"generations {mine.generation} and {others.generation} of the namespaces"
        if not self.same_weights(other):
            return "another adapter" if self.is_adapter and mine.adapter and others.adapter else "another root"
        return ""

    @property
    def holder(self) -> Identity:
        """The key under which the proxy notes this model's blocks in the store. The key contains the place of the
        model's files only if their contents are not known."""
        known = self.names.adapter if self.is_adapter else self.names.namespaces
        return self._replace(root="") if known else self


class Model(NamedTuple):
    """A model as an engine serves it. `parent`: for an adapter, the model that it belongs to."""

    name: str
    root: str
    max_model_len: int | None
    parent: str = ""


@dataclass(eq=False)
class Engine:
    """One engine, by its URL."""

    url: str
    roles: frozenset[Role]
    weights: str = ""
    backoff_s: float = 1.0  # the wait after the first failure
    healthy: bool = False
    why_down: str = "not checked yet"
    models: dict[str, Model] = field(default_factory=dict)
    version: str = ""
    cards: list[dict[str, Any]] = field(default_factory=list)  # the entries of /v1/models, for the proxy's own list
    life: int = 0  # changes when the engine becomes healthy: its cache is then empty
    failures: int = 0  # failures in a row, of requests and of the proxy's probes
    ask_at: float = 0.0  # when the proxy asks for a token again, to see whether the engine works
    silent: bool = False  # it accepts requests but answers none
    silence: Silence = field(default_factory=Silence)
    queued_tokens: int = 0  # uncached prompt tokens that it must still prefill
    running: int = 0  # requests of this proxy
    running_tokens: int = 0
    others_running: int = 0  # requests of other clients, according to the engine's metrics
    others_waiting: int = 0
    pace: TokenPace = field(default_factory=TokenPace)  # the time to the first token when it computes a prompt
    hand_overs: TokenPace = field(default_factory=TokenPace)  # hand-overs to this engine, from P's first token
    names: BlockNames = field(default_factory=BlockNames)  # for the model without an adapter
    renamed: int = 0  # how often `names` changed
    adapters: dict[str, str] = field(default_factory=dict)  # the digest of each known adapter, or an empty string
    recorded: BlockNames = field(default_factory=BlockNames)  # the names in its last directory record
    asked_names_at: float = 0.0
    ask_names_at: float = 0.0  # it is not asked before this time, see `Describing`
    ask_names_s: float = 0.0
    doubted: bool = False  # `names` may no longer hold

    @property
    def side(self) -> EngineLoad:
        return EngineLoad(self.pace.line, self.queued_tokens + self.others_waiting * _OTHERS_TOKENS)

    def load(self, running: int, waiting: int) -> None:
        """Note the number of running and waiting requests that the engine's own metrics report."""
        self.others_waiting = max(0, waiting - self.running)
        self.others_running = max(0, running + waiting - self.running - self.others_waiting)

    def serves(self, model: str | None) -> bool:
        return model is None or model in self.models

    def identity(self, model: str | None) -> Identity:
        served = self.models.get(model) if model is not None else next(iter(self.models.values()), None)
        if served is None:
            return Identity("", self.weights, self.names)
        names = msgspec.structs.replace(self.names, adapter=self.adapters.get(served.name, ""))
        return Identity(served.root, self.weights, names, bool(served.parent))

    def named(self, names: BlockNames) -> None:
        """Note the names that the engine gives its blocks."""
        names = msgspec.structs.replace(names, adapter="")
        self.renamed += names != self.names
        self.names = names

    def max_model_len(self, model: str | None) -> int | None:
        served = self.models.get(model) if model is not None else next(iter(self.models.values()), None)
        return served.max_model_len if served else None

    def failed(self) -> None:
        """Note that a request failed through the engine's fault, or that the proxy's own probe failed."""
        wait_s = self.backoff_s * 2 ** min(self.failures, 10)
        self.ask_at = time.monotonic() + min(_LONGEST_BACKOFF_S, wait_s)
        self.failures += 1

    def worked(self) -> None:
        self.failures, self.silent = 0, False

    def down(self, why: str) -> None:
        self.healthy, self.why_down = False, why

    def up(self) -> None:
        if not self.healthy:
            self.life = next(_lives)
            self.worked()
            self.names, self.asked_names_at = self.recorded, 0.0
            self.adapters.clear()
        self.healthy, self.why_down = True, ""

    @property
    def shunned(self) -> bool:
        """Whether the engine gets no requests as long as there are other engines. This ends when the engine answers the
        proxy's own probe, or a request that was sent to it because there was no other engine."""
        return self.failures > 0

    def status(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "roles": sorted(self.roles),
            "healthy": self.healthy,
            "why_down": self.why_down,
            "shunned": self.shunned,
            "silent": self.silent,
            "models": [model._asdict() for model in self.models.values()],
            "version": self.version,
            "weights": self.weights,
            "namespaces": self.names.namespaces,
            "generation": self.names.generation,
            "running": self.running,
            "running_tokens": self.running_tokens,
            "queued_tokens": self.queued_tokens,
            "others_running": self.others_running,
            "others_waiting": self.others_waiting,
            **_paces(self),
        }


class Pools:
    """All engines."""

    def __init__(self, backoff_s: float = 1.0) -> None:
        self._backoff_s = backoff_s
        self._usual = nothing_usual()
        self.engines: dict[str, Engine] = {}

    def set(self, url: str, roles: Collection[Role], weights: str = "", names: BlockNames | None = None) -> Engine:
        """Add an engine, or change its roles. An engine whose weights have changed is treated as a new engine. `names`:
        the names of its blocks, from its record."""
        engine = self.engines.get(url)
        if engine is None or engine.weights != weights:
            engine = Engine(url, frozenset(roles), weights, self._backoff_s, silence=Silence(self._usual))
            self.engines[url] = engine
        engine.roles = frozenset(roles)
        if names is not None and names != engine.recorded:
            engine.recorded = names
            if names.namespaces:
                engine.named(names)
        return engine

    def remove(self, url: str) -> None:
        """Remove an engine. Its running requests continue."""
        self.engines.pop(url, None)

    def count(self, role: Role) -> int:
        return sum(role in engine.roles for engine in self.engines.values())

    def candidates(self, role: Role, model: str | None, without: Collection[str] = ()) -> list[Engine]:
        """Return the healthy engines of a role that serve the model. Engines with an open circuit are left out if there
        are others."""
        healthy = [
            engine
            for engine in self.engines.values()
            if role in engine.roles and engine.healthy and engine.serves(model) and engine.url not in without
        ]
        return [engine for engine in healthy if not engine.shunned] or healthy

    def decoder(
        self,
        model: str | None,
        have: Mapping[str, int],
        tokens: int,
        *,
        without: Collection[str] = (),
        like: Engine | None = None,
        first: Role = "decode",
    ) -> Engine | None:
        """Return the engine that answers: an engine of the role `first` if possible, otherwise one of the other role.
        Returns None if there is none.

        have: by URL, the number of the prompt's tokens that the engine need not compute
        like: an engine whose weights the chosen engine must have, too
        """
        for role in sorted(ROLES, key=lambda role: role != first):
            found = [
                engine
                for engine in self.candidates(role, model, without)
                if like is None or engine.identity(model).same_weights(like.identity(model))
            ]
            if found:
                return min(found, key=lambda engine: _decode_cost(engine, have, tokens))
        return None

    def prefiller(
        self,
        model: str | None,
        have: Mapping[str, int],
        tokens: int,
        beside: Engine | None = None,
        *,
        without: Collection[str] = (),
    ) -> Engine | None:
        """Return the engine that prefills: the one whose queue, including this prompt, is shortest.

        beside: the engine that decodes; it is never chosen, and it must find the blocks of the chosen engine
        """
        found = [
            engine
            for engine in self.candidates("prefill", model, without)
            if beside is None or (engine is not beside and not engine.identity(model).unlike(beside.identity(model)))
        ]
        if not found:
            return None
        return min(found, key=lambda engine: engine.side.ahead + max(0, tokens - have.get(engine.url, 0)))

    @contextlib.contextmanager
    def running(self, engine: Engine, tokens: int) -> Iterator[None]:
        """Count a request of this many tokens as running on the engine until the block ends."""
        engine.running += 1
        engine.running_tokens += tokens
        try:
            yield
        finally:
            engine.running -= 1
            engine.running_tokens -= tokens

    @contextlib.contextmanager
    def prefilling(self, engine: Engine, tokens: int) -> Iterator[float]:
        """Count this many uncached prompt tokens as queued at the engine until the block ends. Yields the number of
        tokens that the engine computes before them."""
        ahead = engine.side.ahead
        engine.queued_tokens += tokens
        try:
            yield ahead
        finally:
            engine.queued_tokens -= tokens

    def unpaired(self) -> list[dict[str, Any]]:
        """Return the decode and prefill engines that cannot be paired, by model, with the reason. `alone` in an entry
        says that the engine cannot be paired with any other."""
        found = []
        for name in sorted({name for engine in self.engines.values() for name in engine.models}):
            prefill = self.candidates("prefill", name)
            for one in self.candidates("decode", name):
                others = [each for each in prefill if each is not one]
                why = {each: each.identity(name).unlike(one.identity(name)) for each in others}
                apart = [{**_described(each, name), "why": why[each]} for each in others if why[each]]
                if apart:
                    told = {"model": name, "decode": _described(one, name), "prefill": apart}
                    found.append({**told, "alone": len(apart) == len(others)})
        return found

    def is_unpaired(self, engine: Engine) -> bool:
        """Return whether, for any of its models, there is an engine of the other role that it cannot be paired with."""
        others = [
            other
            for other in self.engines.values()
            if other is not engine and other.healthy and len(other.roles | engine.roles) > 1
        ]
        return any(
            other.serves(name) and engine.identity(name).unlike(other.identity(name))
            for name in engine.models
            for other in others
        )

    def cards(self) -> list[dict[str, Any]]:
        """Return the models of all healthy engines, each once, as /v1/models lists them."""
        cards: dict[str, dict[str, Any]] = {}
        for engine in self.engines.values():
            if engine.healthy:
                for card in engine.cards:
                    cards.setdefault(card["id"], card)
        return list(cards.values())


def _decode_cost(engine: Engine, have: Mapping[str, int], tokens: int) -> int:
    uncached = max(0, tokens - have.get(engine.url, 0))
    requests = engine.running + engine.others_running
    others = (engine.others_running + engine.others_waiting) * _OTHERS_TOKENS
    return engine.running_tokens + requests * _REQUEST_TOKENS + engine.queued_tokens + others + uncached


def _paces(engine: Engine) -> dict[str, Any]:
    """Return the measured times of an engine. A time with too few measurements is None."""
    pace, hand_overs = engine.pace.line, engine.hand_overs.line
    return {
        "first_token_s": None if pace is None else round(pace.first, 4),
        "prefill_tokens_per_s": None if pace is None or not pace.each else round(1 / pace.each, 1),
        "hand_over_s": None if hand_overs is None else round(hand_overs.first, 4),
        "hand_over_tokens_per_s": (
            None if hand_overs is None or not hand_overs.each else round(1 / hand_overs.each, 1)
        ),
    }


def _described(engine: Engine, model: str) -> dict[str, Any]:
    identity = engine.identity(model)
    return {
        "url": engine.url,
        "root": identity.root,
        "weights": identity.weights,
        **msgspec.to_builtins(identity.names),
    }
