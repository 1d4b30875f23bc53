"""The middle tier's index: which slot of the workers' host pools holds which block, and who goes first.

It is the server's own index (`kvstore._cext.BlockIndex`) over one segment, with its eviction policies. Without a middle
tier (``keep=False``) the same slots are only where blocks wait to be sent, and are free again afterwards.

A slot is reserved (being written), then kept (readable). References protect a slot from eviction while workers read
it. One thread, the scheduler's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockIndex

Slots = npt.NDArray[np.int32]


class HostTier:
    """Slots 0 … ``slots`` - 1. Keys are all of one length. ``policy``: one of `BlockIndex.POLICIES`."""

    def __init__(self, slots: int, *, keep: bool, policy: str = "default") -> None:
        self.slots = slots
        self.policy = policy
        self.keep = keep
        self._index: BlockIndex | None = None  # made when the first key tells how long keys are
        self._tick = 1

    @property
    def blocks(self) -> int:
        """Readable blocks."""
        return self._index.ready if self._index is not None else 0

    @property
    def busy(self) -> int:
        """Slots being written, and slots that are read although their blocks are gone."""
        return self._index.writing + self._index.gone if self._index is not None else 0

    def find(self, keys: Sequence[bytes]) -> Slots:
        """The slot of each key, negative where there is none."""
        slots = self.acquire(keys, refresh=False)
        self.release(slots)
        return slots

    def touch(self, keys: Sequence[bytes]) -> None:
        """The leading run of the chain was used; from here on its tail goes before its head."""
        if self._index is not None and keys:
            self._index.match_prefix(b"".join(keys), time.monotonic(), True, self._ticks(len(keys)))

    def acquire(self, keys: Sequence[bytes], *, refresh: bool = True) -> Slots:
        """`find`, with a reference on each slot found."""
        if self._index is None or not keys:
            return np.full(len(keys), -1, dtype=np.int32)
        return self._index.acquire(b"".join(keys), time.monotonic(), self._ticks(len(keys)), refresh)

    def release(self, slots: Slots | Sequence[int]) -> None:
        """Give references back; negative slots are skipped."""
        if self._index is not None and len(slots):
            self._index.release(np.asarray(slots, dtype=np.int32))

    def reserve(self, keys: Sequence[bytes]) -> Slots:
        """A slot to write for each key that is new, as far as there is room; negative otherwise (`is_known`)."""
        if not keys:
            return np.empty(0, dtype=np.int32)
        if self._index is None:
            self._index = BlockIndex(len(keys[0]), self.slots, self.policy)
            self._index.attach()
        packed = b"".join(keys)
        lacking = self._index.missing(packed) - self._index.free
        if lacking > 0:
            self._index.evict(lacking, time.monotonic())
        return self._index.reserve(packed, False, self._ticks(len(keys)))

    @staticmethod
    def is_known(slot: int) -> bool:
        """Whether `reserve` refused because the block is here, or on its way here."""
        return slot in (BlockIndex.EXISTED, BlockIndex.DUPLICATE)

    def commit(self, slots: Slots | Sequence[int]) -> None:
        """Reserved slots are written: readable from now on."""
        if self._index is not None and len(slots):
            # A block's checksum is the store's matter: host memory is as good as the engine's own.
            self._index.commit(
                np.asarray(slots, dtype=np.int32), np.zeros(len(slots), dtype=np.uint64), self._ticks(len(slots))
            )

    def abort(self, slots: Slots | Sequence[int]) -> None:
        """Reserved slots will not be written; negative ones are skipped."""
        if self._index is not None and len(slots):
            self._index.abort(np.asarray(slots, dtype=np.int32))

    def hold(self, slots: Sequence[int]) -> None:
        """One more reference on readable slots."""
        if self._index is not None and len(slots):
            self._index.acquire_slot(np.asarray(slots, dtype=np.int32))

    def drop(self, slots: Sequence[int]) -> None:
        """Forget blocks; slots that are referenced are free when that ends."""
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
