"""How much of a prompt each engine and the store have. This is a guess: it decides where requests go, and never changes
answers.

The guess has two sources. The first is the prompts that this proxy has sent to engines. Each prompt is cut into pieces
of `PIECE` tokens. A piece is named by a digest of its tokens, all pieces before it, and whatever else decides the KV
(`kv_identity`). An engine is assumed to have the prompts that were sent to it. The store is assumed to have them for
all engines of that model. The second source is the KV events of engines that publish them. They say what these engines
really have, even if that is less than assumed.

When an engine restarts, the proxy forgets which prompts the engine has. When the store has lost blocks
(`StoreWatch.since`), the proxy forgets which prompts the store has. It forgets both for a prompt after
`MAX_PREFIX_AGE_S`, and when an engine found less of the prompt than expected. After an answer, the store is only
assumed to have the tokens that the answering engine did not have before.

The memory of this table is bounded in bytes; the pieces that were sent last are kept. Used by one event loop. A
separate thread receives events.
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
MAX_PREFIX_AGE_S: Final = 600.0
PREFIX_MEMORY_BYTES: Final = 64 << 20
# The bytes of memory for a piece, and for each holder of a piece. tests/unit/test_proxy_prefixes.py measures them.
_PREFIX_BYTES: Final = 300
_HOLDER_BYTES: Final = 50
_HOLDERS: Final = 64  # the most holders that are remembered for one piece
_STORED: Final = 0.8  # the share of a token's computing work that loading it from the store saves
_FIND_S: Final = 0.25


class StoreView(Protocol):
    """What is known of the store (see `StoreWatch`). Times are those of `time.monotonic`."""

    @property
    def since(self) -> float:
        """The time before which all blocks that the store got are assumed to be lost."""

    @property
    def purged_at(self) -> float:
        """The time of the last purge, or 0 if there was none."""


@dataclass
class Have:
    """By URL, how many leading tokens of a prompt each engine has itself, and how many the store has for this
    engine."""

    engines: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)

    def worth(self, engines: Sequence[Engine]) -> dict[str, int]:
        """Return, by URL, how much computing each engine saves, as a number of tokens."""
        return {
            each.url: max(self.engines.get(each.url, 0), int(self.stores.get(each.url, 0) * _STORED))
            for each in engines
        }

    def at(self, engine: Engine) -> int:
        return max(self.engines.get(engine.url, 0), self.stores.get(engine.url, 0))


@dataclass(frozen=True)
class Prompt:
    """A prompt, with the names of its pieces. `model`: the model as the request names it. `at`: when the object was
    made."""

    tokens: Sequence[int]
    kv: KVIdentity
    model: str | None
    names: Sequence[bytes]
    at: float

    @classmethod
    def of(cls, tokens: Sequence[int], kv: KVIdentity, model: str | None) -> Prompt:
        return cls(tokens, kv, model, _names(tokens, kv.salt), time.monotonic())


# A holder of a piece: an engine in one of its lives, or the store for all engines of a model.
_Holder = int | Identity


class Prefixes:
    """The prompts that are remembered, as the module describes."""

    def __init__(self, events: EngineEvents, store: StoreView, memory_bytes: int = PREFIX_MEMORY_BYTES) -> None:
        self._events = events
        self._store = store
        self._memory_bytes = memory_bytes
        self._pieces: OrderedDict[bytes, dict[_Holder, float]] = OrderedDict()  # by holder, since when it has the piece
        self._holders = 0

    @property
    def held_bytes(self) -> int:
        """The approximate number of bytes that this object uses."""
        return len(self._pieces) * _PREFIX_BYTES + self._holders * _HOLDER_BYTES

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
            log.warning("could not find out which engines have a prompt (%r): using the proxy's own records", error)
            return have
        for url, tiers in found.engines.items():
            have.engines[url] = tiers.get("any", 0)  # the engine's real state, even if that is less
        return have

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        """Note that an engine has computed or loaded this prompt, and has saved the part that the store lacked."""
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
        """Note that an engine found only `found` tokens of this prompt: neither it nor the store has the rest."""
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
        return at is not None and at > self._store.purged_at and now - at < MAX_PREFIX_AGE_S

    def _store_has(self, at: float | None, now: float) -> bool:
        return at is not None and at > self._store.since and now - at < MAX_PREFIX_AGE_S

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
    """Return the model's name if it is an adapter, and an empty string if it is not."""
    cards = (card for engine in engines for card in engine.cards)
    return next((str(model) for card in cards if card.get("id") == model and card.get("parent")), "")
