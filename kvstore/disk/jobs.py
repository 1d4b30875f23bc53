"""The jobs that move blocks between memory and segment files, for the pools of the disk.

Blocks lie on disk as they are, or with more than their bytes (`sealing`). A job opens its file, and makes it if there
is none: the loop waits for no disk. Methods are called on the loop's thread.
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
    """Makes the jobs of one shard. `key`: of the shard's blocks; empty: they are not encrypted. `seals`: of the
    namespaces whose blocks have one."""

    def __init__(self, segments: SegmentFiles, key: bytes) -> None:
        self._segments = segments
        self.seals: dict[DiskBlocks, Seal] = {}
        self._cipher: Cipher | None = None
        if key:
            from kvstore.disk.encryption import AESGCMCipher  # only where there is a key: it takes megabytes

            self._cipher = AESGCMCipher(key)

    def seal_of(self, canonical: bytes, key_bytes: int, block_bytes: int) -> Seal | None:
        """-> how blocks of a namespace lie on this disk; None: as they are."""
        return seal_of(canonical, key_bytes, block_bytes, decode_namespace(canonical).opaque_sums, self._cipher)

    def reading(
        self, member: DiskBlocks, segment: int, slots: Slots, memory: mmap.mmap | memoryview, places: Offsets
    ) -> Callable[[], npt.NDArray[np.int32]]:
        """-> a job: read blocks of one segment to `places` of `memory`, and check them. It returns their statuses, as
        `read_blocks` does."""
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
        """-> a job: write the blocks at `places` of `memory`, with the clients' checksums `sums`, to their slots of one
        segment. It returns 0 or an errno."""
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
