"""The index of the host tier. It knows which slot of the workers' host pools has which block, and which block to evict
next.

It uses the server's index (`kvstore._index.BlockIndex`) for a single segment, with the same eviction policies. Without
a CPU tier (``keep=False``), blocks only wait in the slots until they are sent, and the slots are free again afterwards.

A slot is first reserved, which means that it is being written. When it is committed, it becomes readable. References
protect a slot from eviction while workers read it. Only the scheduler's thread uses this module.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore_client.engine.chain_keys import key_list
from kvstore_client.keys import KeyArray

Slots = npt.NDArray[np.int32]


class HostTier:
    """An index of the slots from 0 to `slots` - 1. All keys must have the same length. Keys are `bytes` or the rows of
    an array of uint8; for others, TypeError is raised. `keep`: whether blocks stay in their slots after they were sent.
    `policy`: the eviction policy, one of `BlockIndex.POLICIES`. Not thread-safe."""

    def __init__(self, slots: int, *, keep: bool, policy: str = "default") -> None:
        self.slots = slots
        self.policy = policy
        self.keep = keep
        self._index: BlockIndex | None = None  # made with the first key, whose length it needs
        self._tick = 1
        self._evicted = bytearray()  # keys

    @property
    def blocks(self) -> int:
        """The number of readable blocks."""
        return self._index.ready if self._index is not None else 0

    @property
    def busy(self) -> int:
        """The number of slots that are either being written, or still being read although their blocks were dropped."""
        return self._index.writing + self._index.gone if self._index is not None else 0

    def find(self, keys: Sequence[bytes] | KeyArray) -> Slots:
        """Return the slot of each key. It is negative for a key without a slot."""
        slots = self.acquire(keys, refresh=False)
        self.release(slots)
        return slots

    def touch(self, keys: Sequence[bytes] | KeyArray) -> None:
        """Count a use of the chain's leading blocks that have slots. The tail of a chain is evicted before its head."""
        keys = key_list(keys)
        if self._index is not None and keys:
            self._index.match_prefix(b"".join(keys), time.monotonic(), True, self._ticks(len(keys)))

    def acquire(self, keys: Sequence[bytes] | KeyArray, *, refresh: bool = True) -> Slots:
        """Do the same as `find`, and also take a reference on each slot found. `refresh`: whether to count this call as
        a use of the blocks."""
        keys = key_list(keys)
        if self._index is None or not keys:
            return np.full(len(keys), -1, dtype=np.int32)
        return self._index.acquire(b"".join(keys), time.monotonic(), self._ticks(len(keys)), refresh)

    def release(self, slots: Slots | Sequence[int]) -> None:
        """Release one reference on each slot. Negative slots are skipped."""
        if self._index is not None and len(slots):
            self._index.release(np.asarray(slots, dtype=np.int32))

    def reserve(self, keys: Sequence[bytes] | KeyArray) -> Slots:
        """Reserve a slot for each new key, and evict other blocks if necessary. Return the slots. A slot is negative
        either if the block is known already (see `is_known`) or if there is no room."""
        keys = key_list(keys)
        if not keys:
            return np.empty(0, dtype=np.int32)
        if self._index is None:
            self._index = BlockIndex(len(keys[0]), self.slots, self.policy)
            self._index.attach()
        packed = b"".join(keys)
        lacking = self._index.missing(packed) - self._index.free
        if lacking > 0:
            self._index.evict(lacking, time.monotonic(), self._evicted)
        return self._index.reserve(packed, False, self._ticks(len(keys)))

    def take_evicted(self) -> list[bytes]:
        """Return the keys of the blocks that were evicted since the last call."""
        if not self._evicted or self._index is None:
            return []
        keys, size = bytes(self._evicted), self._index.key_bytes
        self._evicted.clear()
        return [keys[at : at + size] for at in range(0, len(keys), size)]

    @staticmethod
    def is_known(slot: int) -> bool:
        """Return whether this result of `reserve` means that the block has a slot already, perhaps one that is being
        written."""
        return slot in (BlockIndex.EXISTED, BlockIndex.DUPLICATE)

    def commit(self, slots: Slots | Sequence[int]) -> None:
        """Make reserved slots readable, because they have been written."""
        if self._index is not None and len(slots):
            # The checksums are 0, because host memory is trusted as much as the engine's own memory. The store has
            # checksums of its own.
            self._index.commit(
                np.asarray(slots, dtype=np.int32), np.zeros(len(slots), dtype=np.uint64), self._ticks(len(slots))
            )

    def link(self, keys: Sequence[bytes], parents: Sequence[bytes | None]) -> None:
        """Set the parent of each block in its chain (None for the first block). A block is evicted before its
        parent."""
        if self._index is not None and keys:
            nothing = bytes(len(keys[0]))
            self._index.link(b"".join(keys), b"".join(parent or nothing for parent in parents))

    def abort(self, slots: Slots | Sequence[int]) -> None:
        """Free reserved slots that will not be written. Negative slots are skipped."""
        if self._index is not None and len(slots):
            self._index.abort(np.asarray(slots, dtype=np.int32))

    def hold(self, slots: Sequence[int]) -> None:
        """Take one more reference on readable slots."""
        if self._index is not None and len(slots):
            self._index.acquire_slot(np.asarray(slots, dtype=np.int32))

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the blocks in these slots. A slot with references becomes free when the last one is released."""
        if self._index is not None and len(slots):
            self._index.drop(np.asarray(slots, dtype=np.int32))

    def clear(self) -> None:
        """Forget all readable blocks."""
        if self._index is not None:
            self._index.clear()

    def _ticks(self, count: int) -> int:
        tick = self._tick
        self._tick += count
        return tick
