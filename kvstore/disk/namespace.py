"""One namespace's blocks on disk: what every tier has, and the changes passed on to the keeper of the index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockIndex
from kvstore.disk.entries import ENTRY, Entries
from kvstore.disk.segments import DIRECT_BYTES, MIN_DIRECT_BYTES
from kvstore.store.tier import NamespaceTier, Offsets, Slots, Space
from kvstore.wire import namespace_id


class Records(Protocol):
    """Who keeps the persistent index: told of all that comes and goes."""

    def record(self, member: DiskNamespace, keys: bytes, entries: Entries) -> None:
        """Blocks are on disk now."""

    def record_evicted(self, member: DiskNamespace, keys: bytes) -> None:
        """Blocks are on disk no longer."""

    def wall_clock(self, expires: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
        """Monotonic times, 0 for never, as seconds of the wall clock."""


class DiskNamespace(NamespaceTier):
    """Slots are slots of segment files. Whatever leaves the index leaves the persistent one, too."""

    def __init__(self, records: Records, space: Space, canonical: bytes, block_bytes: int, index: BlockIndex) -> None:
        super().__init__(space, block_bytes, index)
        index.keep_lapsed = True
        self._records = records
        self.canonical = canonical
        self.ordinal: int | None = None  # the keeper's number for it, once it has one
        self.recovering = False  # more of it may turn up
        self.direct = block_bytes % DIRECT_BYTES == 0 and block_bytes >= MIN_DIRECT_BYTES

    @property
    def name(self) -> str:
        """For the log."""
        return f"namespace {namespace_id(self.canonical).hex()[:12]}"

    @property
    def empty(self) -> bool:
        """No block in it as far as is known, and nobody at one."""
        return super().empty and not self.recovering

    def contains(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> bytes:
        """One byte a key: 1 when the block is on disk, not only on its way there."""
        index = self.index
        if not index.writing:
            return index.contains(keys, now, refresh, tick, pin_until)
        slots = index.acquire(keys, now, tick, refresh)
        index.release(slots)
        if pin_until > now:
            index.contains(keys, now, False, 0, pin_until)
        return (slots >= 0).astype(np.uint8).tobytes()

    def file_offsets(self, slots: Slots) -> Offsets:
        """Where each slot begins in its segment's file, in bytes."""
        return (slots % self.index.slots_per_segment).astype(np.int64) * self.block_bytes

    def by_segment(self, slots: Slots) -> Iterator[tuple[int, Slots]]:
        """The segments of `slots`, each with the rows of those that are in it."""
        ordinals = slots // self.index.slots_per_segment
        for ordinal in np.unique(ordinals).tolist():
            yield self.segments[ordinal], np.flatnonzero(ordinals == ordinal).astype(np.int32)

    def entries(self, slots: Slots) -> Entries:
        """What the persistent index says of READY slots."""
        index = self.index
        entries = np.zeros(len(slots), dtype=ENTRY)
        ordinals, places = np.divmod(slots, index.slots_per_segment)
        entries["segment"] = [self.segments[ordinal] for ordinal in ordinals.tolist()]
        entries["place"] = places
        entries["checksum"] = index.checksums(slots)
        entries["tick"] = index.ticks_of(slots)
        entries["expires"] = self._records.wall_clock(index.expires_of(slots))
        entries["priority"] = index.priorities_of(slots)
        return entries

    def commit(self, slots: Slots, sums: npt.NDArray[np.uint64], tick: int, expires: float) -> None:
        """Written slots are readable, and are recorded."""
        self._records.record_evicted(self, self.index.take_lapsed())  # of what may be the same keys
        self.index.commit(slots, sums, tick, expires)
        self._records.record(self, self.index.keys_of(slots), self.entries(slots))

    # ---- what leaves ---------------------------------------------------------------------------------------------

    def evict(self, count: int, now: float) -> int:
        keys = bytearray()
        evicted = self.index.evict(count, now, keys)
        self._records.record_evicted(self, bytes(keys))
        self.evicted += evicted
        return evicted

    def expire(self, now: float, limit: int) -> None:
        """Free what is past its time among the next `limit` slots, and record what was found so by others."""
        self.index.expire(now, limit)
        self._records.record_evicted(self, self.index.take_lapsed())

    def detach(self, ordinal: int) -> int:
        per_segment = self.index.slots_per_segment
        self._remove_records(np.arange(ordinal * per_segment, (ordinal + 1) * per_segment, dtype=np.int32))
        return super().detach(ordinal)

    def drop(self, slots: Slots) -> int:
        self._remove_records(slots)
        return super().drop(slots)

    def delete(self, keys: bytes) -> int:
        """Delete blocks. -> how many there were."""
        deleted = self.index.delete(keys)
        self._records.record_evicted(self, keys)
        return deleted

    def _remove_records(self, slots: Slots) -> None:
        ready = slots[self.index.states_of(slots) == BlockIndex.READY]
        if len(ready):
            self._records.record_evicted(self, self.index.keys_of(ready))
