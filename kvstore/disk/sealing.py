"""Blocks that are stored on disk with added bytes: encrypted blocks, and blocks whose checksum the server cannot check.

The added bytes follow the block in the same slot, so they cost no extra read or write:

    encrypted folder      ciphertext, its tag (16 bytes), its nonce (12 bytes)
    MACs, not encrypted   the block, then a sum of its own (8 bytes): xxh3-64 of its name and of the block's xxh3-64

Each block is bound to its *name*: the namespace (its SHA-256), the block's key, and the checksum that the client gave.
So bytes of another block, or of an earlier block with the same key, are not mistaken for this block. For blocks that
bypass the page cache, slots are whole pages.

Copies: a write is slot -> scratch -> disk, and a read is disk -> scratch -> slot. The copy from or to the scratch
memory encrypts or hashes. Other blocks need none of this, and `seal_of` returns None for them. Threads: `read` and
`write` may run on any thread. Each thread has its own scratch memory.
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
    """One shard's key (see `encryption`)."""

    def seal(self, block: memoryview, name: bytes, out: memoryview) -> None:
        """Write to `out` the ciphertext, its tag and its nonce. `name`: the name to which the block is bound."""

    def unseal(self, sealed: memoryview, name: bytes, out: memoryview) -> bool:
        """Write to `out` the block in `sealed`. Return False if `seal` did not write it for this name."""


def _scratch(nbytes: int) -> mmap.mmap:
    """Return this thread's scratch memory, aligned to a page. Its earlier content is lost."""
    found: mmap.mmap | None = getattr(_threads, "scratch", None)
    if found is None or len(found) < nbytes:
        found = _threads.scratch = mmap.mmap(-1, max(nbytes, MIN_SCRATCH_BYTES))
    return found


class Seal(ABC):
    """How one namespace's blocks are stored on disk. `slot_bytes`: the space that each block takes there."""

    def __init__(self, canonical: bytes, key_bytes: int, block_bytes: int, added_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = block_bytes + added_bytes
        if bypasses_page_cache(block_bytes):
            self.slot_bytes += -self.slot_bytes % DIRECT_BYTES
        self._namespace = np.frombuffer(hashlib.sha256(canonical).digest(), dtype=np.uint8)
        self._key_bytes = key_bytes

    def write(self, fd: int, memory: Any, places: Places, offsets: Places, keys: bytes, sums: Sums) -> int:
        """Write blocks, as `write_blocks` does. `keys`, `sums`: the key and the client's checksum of each block."""
        scratch = _scratch(len(places) * self.slot_bytes)
        at = np.arange(len(places), dtype=np.int64) * self.slot_bytes
        self._seal(memory, places, scratch, at, self._names(keys, sums))
        return write_blocks(fd, scratch, at, offsets, self.slot_bytes)

    def read(self, fd: int, memory: Any, places: Places, offsets: Places, keys: bytes, sums: Sums) -> Statuses:
        """Read blocks and check them, as `read_blocks` does. A block that fails the check may also be copied
        to its place."""
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
        """Copy the blocks in the slots at `at` to `places`. Return for each block whether it is right."""


class Encrypted(Seal):
    """Encryption with AES-256-GCM, which authenticates the name as well."""

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
    """The block as it is, and a checksum that the server itself can check, because the client's checksum is a MAC."""

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
        """Return the checksums that follow the blocks of the first `count` slots, in the shape (count,
        CHECKSUM_BYTES)."""
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
    """Return the seal of a namespace's blocks. Return None if they are stored as they are and checked against the
    client's checksum."""
    if cipher is not None:
        return Encrypted(canonical, key_bytes, block_bytes, cipher)
    return Summed(canonical, key_bytes, block_bytes) if opaque_sums else None
