"""One namespace's blocks on disk, as the index in memory knows them.

What every tier has, and somebody who is told of all that leaves: the disk tier, which keeps an index on disk, too.
Nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvstore._cext import BlockIndex
from kvstore.store.tier import NamespaceTier, Offsets, Slots, Space
from kvstore.wire import namespace_id


class DiskBlocks(NamespaceTier):
    """Slots are slots of segment files.

    on_removed: told the keys of all that leaves this index, so that it leaves the persistent one, too; some of them may
    not have been in it.
    """

    def __init__(
        self,
        space: Space,
        canonical: bytes,
        block_bytes: int,
        index: BlockIndex,
        on_removed: Callable[[DiskBlocks, bytes], None],
    ) -> None:
        super().__init__(space, block_bytes, index)
        index.keep_lapsed = True
        self._on_removed = on_removed
        self.canonical = canonical
        self.recovering = False  # more of it may turn up

    @property
    def name(self) -> str:
        """For the log."""
        return f"namespace {namespace_id(self.canonical).hex()[:12]}"

    @property
    def empty(self) -> bool:
        """As far as is known it holds no block, and no block of it is being read or written."""
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

    # ---- what leaves ---------------------------------------------------------------------------------------------

    def evict(self, count: int, now: float) -> int:
        keys = bytearray()
        evicted = self.index.evict(count, now, keys)
        self._on_removed(self, bytes(keys))
        self.evicted += evicted
        return evicted

    def remove_lapsed(self) -> None:
        """Tell of blocks that were found past their time since the last call."""
        self._on_removed(self, self.index.take_lapsed())

    def expire(self, now: float, limit: int) -> None:
        """Free what is past its time among the next `limit` slots, and record what was found so by others."""
        self.index.expire(now, limit)
        self.remove_lapsed()

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
        self._on_removed(self, keys)
        return deleted

    def _remove_records(self, slots: Slots) -> None:
        ready = slots[self.index.states_of(slots) == BlockIndex.READY]
        if len(ready):
            self._on_removed(self, self.index.keys_of(ready))
