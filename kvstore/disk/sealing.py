"""Blocks that lie on disk with more than their bytes: encrypted ones, and those whose checksum the server cannot check.

What is added stands behind the block, in the same slot, so it costs no other read or write:

    encrypted folder      ciphertext, its tag (16 bytes), its nonce (12 bytes)
    MACs, not encrypted   the block, then a sum of its own (8 bytes): xxh3-64 of its name and of the block's xxh3-64

The *name* is what a block is bound to: the namespace (its SHA-256), the block's key, the checksum that the client gave.
So bytes that were written for another block, or for an earlier one with the same key, are not taken for this one. Slots
of blocks that bypass the page cache are whole pages.

Copies: write = slot -> scratch -> disk, read = disk -> scratch -> slot; the copy is the encryption, or hashes. All
other blocks have none of this: `seal_of` is None. Threads: `read` and `write` on any; the scratch is the thread's own.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from abc import ABC, abstractmethod
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore._cext import checksum_blocks, copy_blocks, read_blocks, write_blocks
from kvstore.disk.segments import CORRUPT, DIRECT_BYTES, bypasses_page_cache
from kvstore.wire import CHECKSUM_BYTES

Places = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]
Statuses = npt.NDArray[np.int32]
Names = npt.NDArray[np.uint8]

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
MIN_SCRATCH_BYTES: Final = 1 << 20

_threads = threading.local()


class Cipher(Protocol):
    """One shard's key (`encryption`)."""

    def seal(self, block: memoryview, name: bytes, out: memoryview) -> None:
        """Write to `out` the ciphertext, its tag and its nonce. `name`: what the block is bound to."""

    def unseal(self, sealed: memoryview, name: bytes, out: memoryview) -> bool:
        """Write to `out` the block in `sealed`. -> whether `seal` has written that, for this name."""


def _scratch(nbytes: int) -> mmap.mmap:
    """-> memory of this thread, at a page's beginning; what was in it before is lost."""
    found: mmap.mmap | None = getattr(_threads, "scratch", None)
    if found is None or len(found) < nbytes:
        found = _threads.scratch = mmap.mmap(-1, max(nbytes, MIN_SCRATCH_BYTES))
    return found


class Seal(ABC):
    """How one namespace's blocks lie on disk. `slot_bytes`: what each of them takes there."""

    def __init__(self, canonical: bytes, key_bytes: int, block_bytes: int, added_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = block_bytes + added_bytes
        if bypasses_page_cache(block_bytes):
            self.slot_bytes += -self.slot_bytes % DIRECT_BYTES
        self._namespace = np.frombuffer(hashlib.sha256(canonical).digest(), dtype=np.uint8)
        self._key_bytes = key_bytes

    def write(self, fd: int, memory: Any, places: Places, offsets: Places, keys: bytes, sums: Sums) -> int:
        """Write blocks, as `write_blocks` does. `keys`, `sums`: of each block its key, and the client's checksum."""
        scratch = _scratch(len(places) * self.slot_bytes)
        at = np.arange(len(places), dtype=np.int64) * self.slot_bytes
        self._seal(memory, places, scratch, at, self._names(keys, sums))
        return write_blocks(fd, scratch, at, offsets, self.slot_bytes)

    def read(self, fd: int, memory: Any, places: Places, offsets: Places, keys: bytes, sums: Sums) -> Statuses:
        """Read blocks and check them, as `read_blocks` does. A place gets bytes of a block that is not right, too."""
        scratch = _scratch(len(places) * self.slot_bytes)
        at = np.arange(len(places), dtype=np.int64) * self.slot_bytes
        status = read_blocks(fd, scratch, at, offsets, self.slot_bytes, None)
        rows = np.flatnonzero(status == 0)
        right = self._unseal(scratch, at[rows], memory, places[rows], self._names(keys, sums)[rows])
        status[rows[~right]] = CORRUPT
        return status

    def _names(self, keys: bytes, sums: Sums) -> Names:
        count, start = len(sums), len(self._namespace)
        end = start + self._key_bytes
        names = np.empty((count, end + CHECKSUM_BYTES), dtype=np.uint8)
        names[:, :start] = self._namespace
        names[:, start:end] = np.frombuffer(keys, dtype=np.uint8).reshape(count, self._key_bytes)
        names[:, end:] = sums.astype("<u8").view(np.uint8).reshape(count, CHECKSUM_BYTES)
        return names

    @abstractmethod
    def _seal(self, memory: Any, places: Places, scratch: mmap.mmap, at: Places, names: Names) -> None:
        """Fill the slots at `at` of `scratch` with the blocks at `places` of `memory`."""

    @abstractmethod
    def _unseal(
        self, scratch: mmap.mmap, at: Places, memory: Any, places: Places, names: Names
    ) -> npt.NDArray[np.bool_]:
        """Copy the blocks in the slots at `at` to `places`. -> which are right."""


class Encrypted(Seal):
    """AES-256-GCM; the name is authenticated."""

    def __init__(self, canonical: bytes, key_bytes: int, block_bytes: int, cipher: Cipher) -> None:
        super().__init__(canonical, key_bytes, block_bytes, TAG_BYTES + NONCE_BYTES)
        self._cipher = cipher

    def _seal(self, memory: Any, places: Places, scratch: mmap.mmap, at: Places, names: Names) -> None:
        blocks, slots = memoryview(memory), memoryview(scratch)
        for place, start, name in zip(places.tolist(), at.tolist(), names, strict=True):
            self._cipher.seal(
                blocks[place : place + self.block_bytes], name.tobytes(), slots[start : start + self.slot_bytes]
            )

    def _unseal(
        self, scratch: mmap.mmap, at: Places, memory: Any, places: Places, names: Names
    ) -> npt.NDArray[np.bool_]:
        blocks, slots = memoryview(memory), memoryview(scratch)
        right = [
            self._cipher.unseal(
                slots[start : start + self.slot_bytes], name.tobytes(), blocks[place : place + self.block_bytes]
            )
            for place, start, name in zip(places.tolist(), at.tolist(), names, strict=True)
        ]
        return np.array(right, dtype=np.bool_)


class Summed(Seal):
    """The block as it is, and a sum that the server itself can check: the client's is a MAC."""

    def __init__(self, canonical: bytes, key_bytes: int, block_bytes: int) -> None:
        super().__init__(canonical, key_bytes, block_bytes, CHECKSUM_BYTES)

    def _seal(self, memory: Any, places: Places, scratch: mmap.mmap, at: Places, names: Names) -> None:
        files = np.zeros(len(at), dtype=np.int64)
        found = copy_blocks([memory], files, places, self.block_bytes, scratch, at)
        self._behind(scratch, len(at))[:] = self._sums(names, found)

    def _unseal(
        self, scratch: mmap.mmap, at: Places, memory: Any, places: Places, names: Names
    ) -> npt.NDArray[np.bool_]:
        files = np.zeros(len(at), dtype=np.int64)
        found = copy_blocks([scratch], files, at, self.block_bytes, memory, places)
        behind = self._behind(scratch, int(at[-1]) // self.slot_bytes + 1 if len(at) else 0)
        right: npt.NDArray[np.bool_] = (behind[at // self.slot_bytes] == self._sums(names, found)).all(axis=1)
        return right

    def _behind(self, scratch: mmap.mmap, count: int) -> npt.NDArray[np.uint8]:
        """-> what stands behind the blocks of the first `count` slots, (count, CHECKSUM_BYTES)."""
        slots = np.frombuffer(scratch, dtype=np.uint8, count=count * self.slot_bytes).reshape(count, self.slot_bytes)
        return slots[:, self.block_bytes : self.block_bytes + CHECKSUM_BYTES]

    @staticmethod
    def _sums(names: Names, found: Sums) -> npt.NDArray[np.uint8]:
        count = len(names)
        rows = np.hstack([names, found.astype("<u8").view(np.uint8).reshape(count, CHECKSUM_BYTES)])
        sums = np.empty(count, dtype=np.uint64)
        checksum_blocks(np.ascontiguousarray(rows), rows.shape[1], sums)
        return sums.astype("<u8").view(np.uint8).reshape(count, CHECKSUM_BYTES)


def seal_of(
    canonical: bytes, key_bytes: int, block_bytes: int, opaque_sums: bool, cipher: Cipher | None
) -> Seal | None:
    """-> how a namespace's blocks lie on disk; None: as they are, checked against the client's checksum."""
    if cipher is not None:
        return Encrypted(canonical, key_bytes, block_bytes, cipher)
    return Summed(canonical, key_bytes, block_bytes) if opaque_sums else None
