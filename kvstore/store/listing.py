"""All blocks of a namespace in both tiers, the most recently used first: made in steps, read in parts.

A million blocks take about 0.2 s, in steps of some milliseconds; sorting is done on a thread of its own, without the
GIL. It is a list of slots: 24 bytes a block while it is made, 8 afterwards.

Only the loop's thread uses this module, but for the sorting.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockIndex
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import NamespaceTier, Slots

STEP_SLOTS: Final = 16384
SORT_AT_ONCE: Final = 65536  # blocks: in about 5 ms
BLOCK_BYTES: Final = 24  # what making the list takes for a block: slot, tick, and sorting

Ticks = npt.NDArray[np.uint64]


class Listing:
    """The blocks of one namespace by their last use. Use it once `steps` has come to its end."""

    def __init__(self, namespace: NamespaceStore, now: float) -> None:
        memory, disk = namespace.memory, namespace.disk
        self.namespace = namespace
        self.complete = False  # `steps` has come to its end
        self._now = now
        self._capacity = memory.index.ready + (disk.index.ready if disk is not None else 0)
        self._slots: Slots = np.zeros(0, dtype=np.int32)  # of memory first, then of blocks that are on disk only
        self._in_memory = 0  # how many are of memory
        self._order: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    @property
    def nbytes(self) -> int:
        """The most memory that making it takes."""
        return self._capacity * BLOCK_BYTES

    @property
    def total(self) -> int:
        """How many blocks it lists."""
        return len(self._order)

    def steps(self) -> Iterator[bool]:
        """Make it: yields after each step True, or False when there is nothing to do until the sorting ends."""
        memory, disk = self.namespace.memory, self.namespace.disk
        self._slots = np.empty(self._capacity, dtype=np.int32)
        ticks = np.empty(self._capacity, dtype=np.uint64)
        twins: list[Slots] = []
        end = 0
        for slots in _ready(memory, self._now):
            used = memory.index.ticks_of(slots)
            if disk is not None and not disk.empty:
                # The older use of the two counts: copying a block to the other tier was no use by a client.
                there = disk.index.acquire(memory.index.keys_of(slots), self._now, 0, False)
                disk.index.release(there)
                both = there >= 0
                used[both] = np.minimum(used[both], disk.index.ticks_of(there[both]))
                twins.append(there[both])
            end = self._put(ticks, end, slots, used)
            yield True
        self._in_memory = end
        if disk is not None and not disk.empty:
            known = np.sort(np.concatenate(twins)) if twins else np.zeros(0, dtype=np.int32)
            for on_disk in _ready(disk, self._now):
                slots = on_disk[~_among(on_disk, known)]
                end = self._put(ticks, end, slots, disk.index.ticks_of(slots))
                yield True
        yield from self._sort(ticks[:end])
        self.complete = True

    def _put(self, ticks: Ticks, at: int, slots: Slots, used: Ticks) -> int:
        """Add slots and their ticks. -> where the next ones go. Blocks set since the beginning may be left out."""
        end = min(self._capacity, at + len(slots))
        self._slots[at:end], ticks[at:end] = slots[: end - at], used[: end - at]
        return end

    def _sort(self, ticks: Ticks) -> Iterator[bool]:
        def sort() -> None:
            self._order = np.argsort(ticks)[::-1].astype(np.uint32)

        if len(ticks) <= SORT_AT_ONCE:
            sort()
            return
        sorting = threading.Thread(target=sort, name="kvstore-sort", daemon=True)
        sorting.start()
        while sorting.is_alive():
            yield False

    def keys(self, skip: int, limit: int) -> bytes:
        """-> the keys of up to `limit` blocks after the first `skip`; none only at the end.

        Blocks that left since are taken out of the list.
        """
        keys = b""
        while not keys and skip < len(self._order) and limit > 0:
            rows = self._order[skip : skip + limit]
            found, there = self._keys_of(rows)
            keys = found[there].tobytes()
            if not there.all():
                self._order = np.concatenate([self._order[:skip], rows[there], self._order[skip + limit :]])
        return keys

    def _keys_of(self, rows: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        keys = np.zeros((len(rows), self.namespace.key_bytes), dtype=np.uint8)
        there = np.zeros(len(rows), dtype=np.bool_)
        for tier, places in (
            (self.namespace.memory, np.flatnonzero(rows < self._in_memory)),
            (self.namespace.disk, np.flatnonzero(rows >= self._in_memory)),
        ):
            if tier is not None and len(places):
                slots = self._slots[rows[places]]
                ready = tier.index.states_of(slots) == BlockIndex.READY
                there[places] = ready
                found = np.frombuffer(tier.index.keys_of(slots[ready]), dtype=np.uint8)
                keys[places[ready]] = found.reshape(-1, self.namespace.key_bytes)
        return keys, there


def _ready(tier: NamespaceTier, now: float) -> Iterator[Slots]:
    """-> the READY slots of a tier, some at a time, without blocks that have expired."""
    index = tier.index
    per_segment = index.slots_per_segment
    for ordinal in sorted(tier.segments):
        for first in range(0, per_segment, STEP_SLOTS):
            numbers = np.arange(first, min(per_segment, first + STEP_SLOTS), dtype=np.int32)
            slots = np.int32(ordinal * per_segment) + numbers
            slots = slots[index.states_of(slots) == BlockIndex.READY]
            expires = index.expires_of(slots)
            slots = slots[(expires == 0) | (expires > now)]
            if len(slots):
                yield slots


def _among(slots: Slots, known: Slots) -> npt.NDArray[np.bool_]:
    """Which of the slots are in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(slots), dtype=np.bool_)
    at = np.minimum(np.searchsorted(known, slots), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == slots
    return found
