"""Tracks which slots of the host pools the workers still read, and which blocks they send from these slots to the
store.

Only the engine core's thread uses this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore_client.engine.paged.plan import Saves


class Sent(NamedTuple):
    """A block that no rank reads any more. `is_stored`: whether the store has it. `is_void`: whether the block is not
    expected in the store. Another block may then have the same key by now."""

    key: bytes
    slot: int
    is_stored: bool
    is_void: bool


class SendsUnderWay:
    """The sends in progress of one engine. Not thread-safe.

    void_below: blocks of jobs with numbers below this one must not be sent any more.
    """

    def __init__(self, *, ranks: int, slices: int) -> None:
        """`ranks`: the number of workers. Each of them reports every save. `slices`: the number of slices of each
        block in the store."""
        self.void_below = 0
        self._ranks = ranks
        self._slices = slices
        self._reading: dict[tuple[int, int], int] = {}  # for each (job, slot), how many ranks still read it
        self._keys: dict[tuple[int, int], bytes] = {}  # the keys of these blocks
        self._stored: Counter[tuple[int, int]] = Counter()  # for each (job, slot), how many slices are stored

    def __len__(self) -> int:
        return len(self._reading)

    @property
    def keys(self) -> Iterator[bytes]:
        """The keys of blocks that will be sent."""
        return (key for (job, _), key in self._keys.items() if job >= self.void_below)

    def begin(self, saves: Saves) -> None:
        for block in (*saves.copied, *saves.sent):
            self._reading[saves.job, block.slot] = self._ranks
            self._keys[saves.job, block.slot] = block.key

    def update(self, released: Mapping[tuple[int, int], int], stored: Mapping[tuple[int, int], int]) -> Sequence[Sent]:
        """Process the ranks' reports, and return the blocks that no rank reads any more. `released`: for each job and
        slot, how many ranks have stopped reading it. `stored`: for each job and slot, how many slices were stored."""
        self._stored.update(stored)
        ended = []
        for sent, ranks in released.items():
            self._reading[sent] -= ranks
            if not self._reading[sent]:
                del self._reading[sent]
                job, slot = sent
                is_stored = self._stored.pop(sent, 0) >= self._slices
                ended.append(Sent(self._keys.pop(sent), slot, is_stored, job < self.void_below))
        return ended
