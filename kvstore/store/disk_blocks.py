"""One namespace's blocks on disk: their index in memory.

`DiskBlocks` is a `NamespaceTier` that also reports every key that leaves it, because the disk tier must then remove the
key from the persistent index. Nothing here touches the disk. Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvstore._index import BlockIndex
from kvstore.store.tier import NamespaceTier, Offsets, Slots, Space
from kvstore.wire import decode_namespace, namespace_id


class DiskBlocks(NamespaceTier):
    """A namespace's tier whose slots are slots of segment files.

    slot_bytes: the space of a block in its file, which may be more than the block's bytes.
    on_removed: called with the concatenated keys of all blocks that leave this index. Some of these keys may not have
    been in the index.
    """

    def __init__(
        self,
        space: Space,
        canonical: bytes,
        block_bytes: int,
        slot_bytes: int,
        index: BlockIndex,
        on_removed: Callable[[DiskBlocks, bytes], None],
    ) -> None:
        super().__init__(space, block_bytes, index, decode_namespace(canonical).tenant)
        index.keep_lapsed = True
        self._on_removed = on_removed
        self.slot_bytes = slot_bytes
        self.canonical = canonical
        self.replicas = 1  # copies of each block in the cluster, as in `NamespaceStore.replicas`; survives a restart
        self.recovering = False  # recovery may still add blocks

    @property
    def name(self) -> str:
        """The namespace's name in the log."""
        return f"namespace {namespace_id(self.canonical).hex()[:12]}"

    @property
    def empty(self) -> bool:
        """True if there is no block, no read or write of a block is in progress, and recovery cannot add a block."""
        return super().empty and not self.recovering

    def contains(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> bytes:
        """Return one byte per key: 1 if the block is on disk, and 0 if it is absent or still being written."""
        index = self.index
        if not index.writing:
            return index.contains(keys, now, refresh, tick, pin_until)
        slots = index.acquire(keys, now, tick, refresh)
        index.release(slots)
        if pin_until > now:
            index.contains(keys, now, False, 0, pin_until)
        return (slots >= 0).astype(np.uint8).tobytes()

    def file_offsets(self, slots: Slots) -> Offsets:
        """Return the offset of each slot in the file of its segment, in bytes."""
        return (slots % self.index.slots_per_segment).astype(np.int64) * self.slot_bytes

    def by_segment(self, slots: Slots) -> Iterator[tuple[int, Slots]]:
        """Yield each segment that has some of `slots`, with their positions in `slots`."""
        ordinals = slots // self.index.slots_per_segment
        for ordinal in np.unique(ordinals).tolist():
            yield self.segments[ordinal], np.flatnonzero(ordinals == ordinal).astype(np.int32)

    # ---- removals ------------------------------------------------------------------------------------------------

    def evict(self, count: int, now: float) -> int:
        keys = bytearray()
        evicted = self.index.evict(count, now, keys)
        self._on_removed(self, bytes(keys))
        self.evicted += evicted
        return evicted

    def remove_lapsed(self) -> None:
        """Report the blocks that have been found expired since the last call."""
        self._on_removed(self, self.index.take_lapsed())

    def expire(self, now: float, limit: int) -> None:
        """Free the expired blocks among the next `limit` slots, and report all blocks that have been found expired."""
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
        """Delete blocks. Return how many existed."""
        deleted = self.index.delete(keys)
        self._on_removed(self, keys)
        return deleted

    def _remove_records(self, slots: Slots) -> None:
        ready = slots[self.index.states_of(slots) == BlockIndex.READY]
        if len(ready):
            self._on_removed(self, self.index.keys_of(ready))
