"""All blocks of a namespace in both tiers, the most recently used first. The list is made in steps and read in parts.

When a block is used, the blocks before it in its chain count as used, too. So they come before it in the list, and a
client that copies blocks in this order copies the heads of chains first.

Listing a million blocks takes about 0.2 s, in steps of some milliseconds. The sorting is done on a separate thread. A
list holds slots. It takes `LISTED_BLOCK_BYTES` per block while it is made, and 8 bytes per block afterwards.

Only the loop's thread uses this module, except for the sorting.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex, lift_ticks
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import NamespaceTier, Slots, keys_before

STEP_SLOTS: Final = 16384
SORT_AT_ONCE: Final = 8192  # up to this many blocks are sorted without a thread, in some milliseconds
LISTED_BLOCK_BYTES: Final = 32  # memory per block while the list is made: slot, tick, the block before it, and sorting
CHAIN_BITS: Final = 16  # ticks are multiplied by 65536, so that a chain of that many blocks fits between two of them

Ticks = npt.NDArray[np.uint64]
KeyRows = npt.NDArray[np.uint8]  # of shape (n, key_bytes)


class Listing:
    """The blocks of one namespace in the order of their last use. Exhaust `steps` before you use anything else."""

    _sorting: ClassVar[threading.Thread | None] = None  # there is never more than one such thread

    def __init__(self, namespace: NamespaceStore, now: float) -> None:
        memory, disk = namespace.memory, namespace.disk
        self.namespace = namespace
        self.complete = False  # `steps` is exhausted
        self._now = now
        self._capacity = memory.index.ready + (disk.index.ready if disk is not None else 0)
        self._slots: Slots = np.zeros(0, dtype=np.int32)  # slots in memory, then slots of blocks that are only on disk
        self._in_memory = 0  # how many of them are slots in memory
        self._order: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    @property
    def nbytes(self) -> int:
        """The most memory that the list takes while it is made, in bytes."""
        return self._capacity * LISTED_BLOCK_BYTES

    @property
    def total(self) -> int:
        """The number of blocks in the list."""
        return len(self._order)

    def steps(self) -> Iterator[bool]:
        """Make the list. Yields after each step: True, or False if there is nothing to do until the sorting ends."""
        memory, disk = self.namespace.memory, self.namespace.disk
        self._slots = np.empty(self._capacity, dtype=np.int32)
        ticks = np.empty(self._capacity, dtype=np.uint64)
        before = np.full(self._capacity, -1, dtype=np.int32)
        twins: list[Slots] = []
        end = 0
        for slots in _ready(memory, self._now):
            used = memory.index.ticks_of(slots)
            if disk is not None and not disk.empty:
                # Of the two times of use, the earlier one counts: a copy to the other tier is not a use by a client.
                there = disk.index.acquire(memory.index.keys_of(slots), self._now, 0, False)
                disk.index.release(there)
                both = there >= 0
                used[both] = np.minimum(used[both], disk.index.ticks_of(there[both]))
                twins.append(there[both])
            end = self._put(ticks, before, end, slots, used, memory.index)
            yield True
        self._in_memory = end
        if disk is not None and not disk.empty:
            known = np.sort(np.concatenate(twins)) if twins else np.zeros(0, dtype=np.int32)
            for on_disk in _ready(disk, self._now):
                slots = on_disk[~_among(on_disk, known)]
                end = self._put(ticks, before, end, slots, disk.index.ticks_of(slots), disk.index)
                yield True
        yield from self._sort(ticks[:end], before[:end])
        self.complete = True

    def _put(self, ticks: Ticks, before: Slots, at: int, slots: Slots, used: Ticks, index: BlockIndex) -> int:
        """Add slots, their ticks, and the slots before them in their chains, beginning at row `at`. Return the next
        free row. Blocks that were set after the start may be left out."""
        end = min(self._capacity, at + len(slots))
        slots = slots[: end - at]
        self._slots[at:end], ticks[at:end], before[at:end] = slots, used[: end - at], index.before_of(slots)
        return end

    def _sort(self, ticks: Ticks, before: Slots) -> Iterator[bool]:
        slots, memory = self._slots[: len(ticks)], self._in_memory

        def sort() -> None:
            np.left_shift(ticks, np.uint64(CHAIN_BITS), out=ticks)
            for tier in (slice(0, memory), slice(memory, None)):
                lift_ticks(slots[tier], before[tier], ticks[tier])
            self._order = np.argsort(ticks)[::-1].astype(np.uint32)

        if len(ticks) <= SORT_AT_ONCE:
            sort()
            return
        while Listing._sorting is not None and Listing._sorting.is_alive():  # it still sorts for a client that is gone
            yield False
        thread = Listing._sorting = threading.Thread(target=sort, name="kvstore-sort", daemon=True)
        thread.start()
        while thread.is_alive():
            yield False

    def keys(self, skip: int, limit: int) -> tuple[bytes, bytes]:
        """Return the keys of up to `limit` blocks after the first `skip` blocks. The result is empty only at the end of
        the list. For each block, return also the key of the block that it follows in its chain, or its own key if it
        follows none.

        Blocks that were removed meanwhile are taken out of the list.
        """
        keys = before = b""
        while not keys and skip < len(self._order) and limit > 0:
            rows = self._order[skip : skip + limit]
            found, followed, there = self._keys_of(rows)
            keys, before = found[there].tobytes(), followed[there].tobytes()
            if not there.all():
                self._order = np.concatenate([self._order[:skip], rows[there], self._order[skip + limit :]])
        return keys, before

    def _keys_of(self, rows: npt.NDArray[np.uint32]) -> tuple[KeyRows, KeyRows, npt.NDArray[np.bool_]]:
        keys = np.zeros((len(rows), self.namespace.key_bytes), dtype=np.uint8)
        before = keys.copy()
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
                before[places[ready]] = keys_before(tier, slots[ready])
        return keys, before, there


def _ready(tier: NamespaceTier, now: float) -> Iterator[Slots]:
    """Yield the READY slots of a tier in ascending order, in arrays that may be empty. Expired and transient blocks are
    left out."""
    index = tier.index
    per_segment = index.slots_per_segment
    for ordinal in sorted(tier.segments.keys() - tier.transient):
        for first in range(0, per_segment, STEP_SLOTS):
            numbers = np.arange(first, min(per_segment, first + STEP_SLOTS), dtype=np.int32)
            slots = np.int32(ordinal * per_segment) + numbers
            slots = slots[index.states_of(slots) == BlockIndex.READY]
            expires = index.expires_of(slots)
            slots = slots[(expires == 0) | (expires > now)]
            yield slots


def _among(slots: Slots, known: Slots) -> npt.NDArray[np.bool_]:
    """Return for each of the slots whether it is in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(slots), dtype=np.bool_)
    at = np.minimum(np.searchsorted(known, slots), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == slots
    return found
