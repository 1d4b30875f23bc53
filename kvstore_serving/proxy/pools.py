"""The engines: which there are, which of them work, how busy they are, and which one takes a request.

Kept by one event loop, used by its tasks only. An engine is a candidate if its last health check passed and its circuit
is closed: failures of requests open it, and silence does (`silence.py`). The proxy then asks for a token itself, at
times that are twice as far apart after each failure, and an answer closes it. If every healthy engine's circuit is open
they are candidates all the same: a suspect is better than nobody.

P and D are paired only if D finds what P saves (`Identity.unlike`). Load is what this proxy has in flight, so it is
exact for one proxy and a fair guess for several.
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
from kvstore_serving.proxy.pace import Pace, Side
from kvstore_serving.proxy.silence import Silence, nothing_usual

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
_LONGEST_BACKOFF_S: Final = 30.0
_lives: Final = itertools.count(1)
_OTHERS_TOKENS: Final = 1024  # of a prompt that others sent there, which nobody has counted
_REQUEST_TOKENS: Final = 256  # what a running request weighs beside its tokens: each step computes all requests


class Identity(NamedTuple):
    """A model of an engine, as others must have it. root: where the engine has it from. weights: their version, empty:
    not known. names: of its blocks. is_adapter: it is a LoRA adapter."""

    root: str
    weights: str
    names: BlockNames = BlockNames()
    is_adapter: bool = False

    def same_weights(self, other: Identity) -> bool:
        """Whether one engine may go on with what the other has said. What is in the files counts more than where they
        are."""
        if self.weights and other.weights and self.weights != other.weights:
            return False
        mine, others = self.names, other.names
        if self.is_adapter and mine.adapter and others.adapter:
            return mine.adapter == others.adapter
        same_names = mine.namespaces == others.namespaces not in ("", NOT_SHARED)
        return self.root == other.root or (same_names and not self.is_adapter)

    def unlike(self, other: Identity) -> str:
        """-> why a prompt cannot be handed over from one engine to the other, in words; empty: it can."""
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
        """-> who has this model's blocks in the store: whatever its files' place, if they are known."""
        known = self.names.adapter if self.is_adapter else self.names.namespaces
        return self._replace(root="") if known else self


class Model(NamedTuple):
    """A model as an engine serves it. parent: of an adapter, the model that it belongs to."""

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
    backoff_s: float = 1.0  # after the first failure
    healthy: bool = False
    why_down: str = "not checked yet"
    models: dict[str, Model] = field(default_factory=dict)
    version: str = ""
    cards: list[dict[str, Any]] = field(default_factory=list)  # of /v1/models, for the proxy's own
    life: int = 0  # another one each time that it comes to be healthy: what it had cached before is gone
    failures: int = 0  # of requests and of the proxy's questions, one after the other
    ask_at: float = 0.0  # when the proxy asks for a token, to see whether it works again
    silent: bool = False  # it accepts requests, and answers none
    silence: Silence = field(default_factory=Silence)
    queued_tokens: int = 0  # uncached prompt tokens that it was sent to prefill
    running: int = 0  # requests
    running_tokens: int = 0
    others_running: int = 0  # by its own metrics: requests that this proxy has not sent
    others_waiting: int = 0
    pace: Pace = field(default_factory=Pace)  # of prompts, to the first token
    hand_overs: Pace = field(default_factory=Pace)  # to this engine, from the first token of the prefill engine
    names: BlockNames = field(default_factory=BlockNames)  # without an adapter
    renamed: int = 0  # how often `names` came to be others
    adapters: dict[str, str] = field(default_factory=dict)  # digests of those that it was asked about; empty: not known
    recorded: BlockNames = field(default_factory=BlockNames)  # the last names of its directory record
    asked_names_at: float = 0.0
    ask_names_at: float = 0.0  # not before, see `Describing`
    ask_names_s: float = 0.0
    doubted: bool = False  # whether `names` still hold

    @property
    def side(self) -> Side:
        return Side(self.pace.line, self.queued_tokens + self.others_waiting * _OTHERS_TOKENS)

    def load(self, running: int, waiting: int) -> None:
        """What its own metrics say of all requests there."""
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
        """It says how it names its blocks."""
        names = msgspec.structs.replace(names, adapter="")
        self.renamed += names != self.names
        self.names = names

    def max_model_len(self, model: str | None) -> int | None:
        served = self.models.get(model) if model is not None else next(iter(self.models.values()), None)
        return served.max_model_len if served else None

    def failed(self) -> None:
        """A request failed here that was not to blame for it, or the proxy's own question did."""
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
        """Whether it gets no requests while there are others. The proxy's own question brings it back, or a request of
        the time when there were no others."""
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
        """Add an engine, or change its roles. An engine with other weights than before begins anew. names: of its
        blocks, as its record has them."""
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
        """What is in flight there goes on."""
        self.engines.pop(url, None)

    def count(self, role: Role) -> int:
        return sum(role in engine.roles for engine in self.engines.values())

    def candidates(self, role: Role, model: str | None, without: Collection[str] = ()) -> list[Engine]:
        """Healthy engines of a role that serve the model; those with a closed circuit if there are any."""
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
        """Who answers: an engine of the role `first`, else one of the other role. `have`: by URL, how many of the
        prompt's tokens it need not compute. `like`: with the same weights as this one."""
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
        """Who prefills: the shortest queue with this prompt in it. `beside`: the engine that decodes, which must find
        what is prefilled and be another one."""
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
        """While a request of so many tokens runs on an engine."""
        engine.running += 1
        engine.running_tokens += tokens
        try:
            yield
        finally:
            engine.running -= 1
            engine.running_tokens -= tokens

    @contextlib.contextmanager
    def prefilling(self, engine: Engine, tokens: int) -> Iterator[float]:
        """While an engine has so many uncached prompt tokens to compute. -> how many it computes first."""
        ahead = engine.side.ahead
        engine.queued_tokens += tokens
        try:
            yield ahead
        finally:
            engine.queued_tokens -= tokens

    def unpaired(self) -> list[dict[str, Any]]:
        """Which decode engines cannot be paired with which prefill engines, by model, and why. `alone`: with none."""
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
        """Whether it cannot be paired with some engine of the other role, for any of its models."""
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
        """The models of all healthy engines, each once, as /v1/models lists them."""
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
    """-> what was measured there; None: too little."""
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
