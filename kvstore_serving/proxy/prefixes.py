"""How much of a prompt which engine has, and the store: a guess that steers requests, and never changes answers.

Two sources. What this proxy has sent where: prompts are cut into pieces of `PIECE` tokens, each named by a digest of
itself, all before it, and what else decides the KV (`kv_identity`); what an engine was sent it has, and so has the
store for all engines of that model. And, for engines whose KV events are known, what they really have, also if that is
less.

What is remembered ends: after `MAX_AGE_S`; with an engine's restart; for the store, when it lost what it had
(`StoreWatch.since`); and when an engine found less than was expected. That an engine answered says of the store only
that it has what this engine did not have before.

Bounded in bytes: the pieces that were sent last. One event loop; events are heard by a thread of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import xxhash

from kvstore_client import KVStoreError
from kvstore_serving.proxy.engine_events import EngineEvents
from kvstore_serving.proxy.kv_identity import KVIdentity
from kvstore_serving.proxy.pools import Engine, Identity

log = logging.getLogger(__name__)

PIECE: Final = 64  # tokens
MAX_AGE_S: Final = 600.0
MEMORY_BYTES: Final = 64 << 20
# What a piece takes, and each holder of it: of tests/unit/test_proxy_prefixes.py, which measures it.
_PIECE_BYTES: Final = 300
_HOLDER_BYTES: Final = 50
_HOLDERS: Final = 64  # of a piece
_STORED: Final = 0.8  # of a computed token is saved by one that is loaded from the store
_FIND_S: Final = 0.25


class Store(Protocol):
    """What is known of the store, see `StoreWatch`. Times are of `time.monotonic`."""

    @property
    def since(self) -> float:
        """Nothing that the store was given before is believed there."""

    @property
    def purged_at(self) -> float:
        """The last purge; 0: none."""


@dataclass
class Have:
    """Tokens from the prompt's beginning that an engine has itself, and that the store has for it, by URL."""

    engines: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)

    def worth(self, engines: Sequence[Engine]) -> dict[str, int]:
        """-> by URL, how many tokens' work is saved there."""
        return {
            each.url: max(self.engines.get(each.url, 0), int(self.stores.get(each.url, 0) * _STORED))
            for each in engines
        }

    def at(self, engine: Engine) -> int:
        return max(self.engines.get(engine.url, 0), self.stores.get(engine.url, 0))


@dataclass(frozen=True)
class Prompt:
    """A prompt whose KV is known by name. model: as the request names it. at: when it was looked at."""

    tokens: Sequence[int]
    kv: KVIdentity
    model: str | None
    names: Sequence[bytes]
    at: float

    @classmethod
    def of(cls, tokens: Sequence[int], kv: KVIdentity, model: str | None) -> Prompt:
        return cls(tokens, kv, model, _names(tokens, kv.salt), time.monotonic())


# Who has a piece: a life of an engine, or the store for all engines of a model.
_Holder = int | Identity


class Prefixes:
    """See above."""

    def __init__(self, events: EngineEvents, store: Store, memory_bytes: int = MEMORY_BYTES) -> None:
        self._events = events
        self._store = store
        self._memory_bytes = memory_bytes
        self._pieces: OrderedDict[bytes, dict[_Holder, float]] = OrderedDict()  # when it came to be there
        self._holders = 0

    @property
    def held_bytes(self) -> int:
        """What all of it takes, about."""
        return len(self._pieces) * _PIECE_BYTES + self._holders * _HOLDER_BYTES

    async def find(self, prompt: Prompt, engines: Sequence[Engine]) -> Have:
        have = self._remembered(prompt, engines)
        if not self._events.heard or not prompt.kv.plain:
            return have
        adapter = _adapter(prompt.model, engines)
        try:
            asked = asyncio.to_thread(
                self._events.find,
                prompt.tokens,
                lives={engine.url: engine.life for engine in engines},
                lora_name=adapter,
                cache_salt=prompt.kv.cache_salt,
            )
            found = await asyncio.wait_for(asked, _FIND_S)
        except (asyncio.TimeoutError, KVStoreError) as error:
            log.warning("where a prompt is could not be found out (%r): the proxy's own memory counts", error)
            return have
        for url, tiers in found.engines.items():
            have.engines[url] = tiers.get("any", 0)  # what it really has, also if that is less
        return have

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        """An engine has computed or loaded this prompt, and saved what of it the store had not."""
        stored, now = engine.identity(prompt.model).holder, time.monotonic()
        saved = len(prompt.tokens) if prompt.kv.saves is None else prompt.kv.saves
        for number, name in enumerate(prompt.names, start=1):
            holders = self._pieces.get(name)
            if holders is None:
                holders = self._pieces[name] = {}
            self._pieces.move_to_end(name)
            before = len(holders)
            known = self._engine_has(holders.get(engine.life), now)
            if number * PIECE <= saved and not known:
                holders[stored] = max(prompt.at, holders.get(stored, 0.0))
            if len(holders) < _HOLDERS or engine.life in holders:
                holders[engine.life] = prompt.at
            self._holders += len(holders) - before
        while self.held_bytes > self._memory_bytes:
            self._forget_piece(next(iter(self._pieces)))

    def missed(self, prompt: Prompt, engine: Engine, found: int) -> None:
        """An engine found only so many tokens of this prompt: beyond, neither it nor the store has it."""
        stored = engine.identity(prompt.model).holder
        for name in prompt.names[found // PIECE :]:
            holders = self._pieces.get(name)
            if holders is None:
                continue
            for holder in (engine.life, stored):
                self._holders -= holders.pop(holder, None) is not None
            if not holders:
                self._forget_piece(name)

    def _forget_piece(self, name: bytes) -> None:
        self._holders -= len(self._pieces.pop(name))

    def _engine_has(self, at: float | None, now: float) -> bool:
        return at is not None and at > self._store.purged_at and now - at < MAX_AGE_S

    def _store_has(self, at: float | None, now: float) -> bool:
        return at is not None and at > self._store.since and now - at < MAX_AGE_S

    def _remembered(self, prompt: Prompt, engines: Sequence[Engine]) -> Have:
        now = time.monotonic()
        own = {engine.url: engine.life for engine in engines}
        stored = {engine.url: engine.identity(prompt.model).holder for engine in engines}
        have = Have()
        for number, name in enumerate(prompt.names, start=1):
            holders = self._pieces.get(name)
            if holders is None or not (own or stored):
                break
            own = {url: life for url, life in own.items() if self._engine_has(holders.get(life), now)}
            stored = {url: model for url, model in stored.items() if self._store_has(holders.get(model), now)}
            have.engines |= dict.fromkeys(own, number * PIECE)
            have.stores |= dict.fromkeys(stored, number * PIECE)
        if prompt.kv.loads is not None:
            for url, tokens in have.stores.items():
                have.stores[url] = min(tokens, have.engines.get(url, 0) + prompt.kv.loads)
        return have


def _names(tokens: Sequence[int], salt: bytes) -> list[bytes]:
    data = np.asarray(tokens, dtype=np.int64)
    names = []
    name = salt
    for start in range(0, len(data) - PIECE + 1, PIECE):
        name = xxhash.xxh3_128_digest(name + data[start : start + PIECE].tobytes())
        names.append(name)
    return names


def _adapter(model: str | None, engines: Sequence[Engine]) -> str:
    """-> the model's name if it is an adapter, which has a model that it belongs to; else nothing."""
    cards = (card for engine in engines for card in engine.cards)
    return next((str(model) for card in cards if card.get("id") == model and card.get("parent")), "")
