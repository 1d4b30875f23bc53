"""How much of a prompt which engine has, and the store: a guess that steers requests, and never changes answers.

Two sources. What this proxy has sent where: prompts are cut into pieces of `PIECE` tokens, each named by a digest of
itself and all before it; whatever an engine was sent it has, and so has the store. And, for engines whose KV events are
known, what they really have, also if that is less.

Bounded: the pieces that were sent last. One event loop; events are heard by a thread of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from kvstore_client import KVStoreError
from kvstore_serving.proxy.engine_events import EngineEvents
from kvstore_serving.proxy.pools import Engine

log = logging.getLogger(__name__)

PIECE: Final = 64  # tokens
_PIECES: Final = 200_000
_STORED: Final = 0.8  # of a computed token is saved by one that is loaded from the store
_FIND_S: Final = 0.25


@dataclass
class Have:
    """Tokens from the prompt's beginning, by URL and in the store."""

    engines: dict[str, int] = field(default_factory=dict)
    store: int = 0

    def worth(self, engines: Sequence[Engine]) -> dict[str, int]:
        """-> by URL, how many tokens' work is saved there."""
        return {each.url: max(self.engines.get(each.url, 0), int(self.store * _STORED)) for each in engines}

    def at(self, engine: Engine) -> int:
        return max(self.engines.get(engine.url, 0), self.store)


class Prefixes:
    """See above."""

    def __init__(self, events: EngineEvents) -> None:
        self._events = events
        self._sent: OrderedDict[bytes, set[tuple[str, int]]] = OrderedDict()

    async def find(self, tokens: Sequence[int], engines: Sequence[Engine]) -> Have:
        have = self._sent_there(tokens, engines)
        if not self._events.heard:
            return have
        try:
            found = await asyncio.wait_for(asyncio.to_thread(self._events.find, tokens), _FIND_S)
        except (asyncio.TimeoutError, KVStoreError) as error:
            log.warning("where a prompt is could not be found out (%r): the proxy's own memory counts", error)
            return have
        for url, tiers in found.engines.items():
            have.engines[url] = tiers.get("any", 0)  # what it really has, also if that is less
        have.store = have.store if found.store is None else found.store
        return have

    def sent(self, tokens: Sequence[int], engine: Engine) -> None:
        """An engine has computed or loaded these tokens."""
        for name in _names(tokens):
            there = self._sent.setdefault(name, set())
            self._sent.move_to_end(name)
            if len(there) < 64:
                there.add((engine.url, engine.starts))
        while len(self._sent) > _PIECES:
            self._sent.popitem(last=False)

    def _sent_there(self, tokens: Sequence[int], engines: Sequence[Engine]) -> Have:
        have = Have()
        lives = {(engine.url, engine.starts) for engine in engines}
        for number, name in enumerate(_names(tokens), start=1):
            there = self._sent.get(name)
            if there is None:
                break
            have.store = number * PIECE
            lives &= there
            for url, _ in lives:
                have.engines[url] = number * PIECE
        return have


def _names(tokens: Sequence[int]) -> list[bytes]:
    data = np.asarray(tokens, dtype=np.int64)
    names = []
    name = b""
    for start in range(0, len(data) - PIECE + 1, PIECE):
        name = xxhash.xxh3_128_digest(name + data[start : start + PIECE].tobytes())
        names.append(name)
    return names
