"""The jobs that move blocks between memory and segment files. The thread pools of the disk run them.

Blocks are on disk either unchanged or with added bytes (`sealing`). A job opens its file, and creates it if it does
not exist, so the loop never waits for a disk. The methods are called on the loop's thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore._cext import read_blocks, write_blocks
from kvstore.disk.sealing import Cipher, Seal, seal_of
from kvstore.disk.segments import SegmentFiles, bypasses_page_cache
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.tier import Offsets, Slots
from kvstore.wire import decode_namespace

P = ParamSpec("P")
T = TypeVar("T")


class BlockJobs:
    """Makes the jobs of one shard. `key`: the key of the shard's blocks, empty if they are not encrypted. `seals`: the
    seals of those namespaces whose blocks have one."""

    def __init__(self, segments: SegmentFiles, key: bytes) -> None:
        self._segments = segments
        self.seals: dict[DiskBlocks, Seal] = {}
        self._cipher: Cipher | None = None
        if key:
            from kvstore.disk.encryption import AESGCMCipher  # only if there is a key, because it takes megabytes

            self._cipher = AESGCMCipher(key)

    def seal_of(self, canonical: bytes, key_bytes: int, block_bytes: int) -> Seal | None:
        """Return the seal of a namespace's blocks on this disk, or None if the blocks are stored unchanged."""
        return seal_of(canonical, key_bytes, block_bytes, decode_namespace(canonical).opaque_sums, self._cipher)

    def reading(
        self, member: DiskBlocks, segment: int, slots: Slots, memory: mmap.mmap | memoryview, places: Offsets
    ) -> Callable[[], npt.NDArray[np.int32]]:
        """Return a job that reads blocks of one segment to `places` of `memory`, and checks them. The job returns the
        statuses of the blocks, as `read_blocks` does."""
        sums, offsets = member.index.checksums(slots), member.file_offsets(slots)
        seal = self.seals.get(member)
        if seal is None:
            return self._job(segment, member, read_blocks, memory, places, offsets, member.block_bytes, sums)
        return self._job(segment, member, seal.read, memory, places, offsets, member.index.keys_of(slots), sums)

    def writing(
        self,
        member: DiskBlocks,
        segment: int,
        slots: Slots,
        memory: memoryview,
        places: Offsets,
        sums: npt.NDArray[np.uint64],
    ) -> Callable[[], int]:
        """Return a job that writes the blocks at `places` of `memory` to their slots of one segment. `sums` are the
        clients' checksums of the blocks. The job returns 0 or an errno."""
        offsets, seal = member.file_offsets(slots), self.seals.get(member)
        if seal is None:
            return self._job(segment, member, write_blocks, memory, places, offsets, member.block_bytes)
        return self._job(segment, member, seal.write, memory, places, offsets, member.index.keys_of(slots), sums)

    def _job(
        self,
        segment: int,
        member: DiskBlocks,
        work: Callable[Concatenate[int, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Callable[[], T]:
        direct = bypasses_page_cache(member.slot_bytes)
        return lambda: work(self._segments.open_file(segment, direct), *args, **kwargs)
