"""Which slots of the host pools the workers still read for which block on its way to the store.

Thread: the engine core's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore_client.engine.paged.plan import Saves


class Sent(NamedTuple):
    """A block that no rank reads any more. is_void: nobody counts on it, and another block may have its key by now."""

    key: bytes
    slot: int
    is_stored: bool
    is_void: bool


class SendsUnderWay:
    """Of one engine. Not thread-safe.

    void_below: what jobs below this number have copied is not to be sent any more.
    """

    def __init__(self, *, ranks: int, parts: int) -> None:
        """ranks: workers, each of which reports on every save. parts: in how many parts the store has each block."""
        self.void_below = 0
        self._ranks = ranks
        self._parts = parts
        self._reading: dict[tuple[int, int], int] = {}  # (job, slot) -> ranks that still read it
        self._keys: dict[tuple[int, int], bytes] = {}  # of those
        self._stored: Counter[tuple[int, int]] = Counter()  # (job, slot) -> parts that the store has

    def __len__(self) -> int:
        return len(self._reading)

    @property
    def keys(self) -> Iterator[bytes]:
        """Of blocks that will be sent."""
        return (key for (job, _), key in self._keys.items() if job >= self.void_below)

    def begin(self, saves: Saves) -> None:
        for block in (*saves.copied, *saves.sent):
            self._reading[saves.job, block.slot] = self._ranks
            self._keys[saves.job, block.slot] = block.key

    def update(self, released: Mapping[tuple[int, int], int], stored: Mapping[tuple[int, int], int]) -> Sequence[Sent]:
        """So many ranks read these slots no more, and so many parts are in the store. -> the blocks that no rank reads
        any more."""
        self._stored.update(stored)
        ended = []
        for sent, ranks in released.items():
            self._reading[sent] -= ranks
            if not self._reading[sent]:
                del self._reading[sent]
                job, slot = sent
                is_stored = self._stored.pop(sent, 0) >= self._parts
                ended.append(Sent(self._keys.pop(sent), slot, is_stored, job < self.void_below))
        return ended
