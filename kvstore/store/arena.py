"""The arena: one shard's block memory.

The arena is one mapping of the shard's whole limit, cut into segments of equal size. A segment is free or belongs to
one namespace, which cuts it into slots of its block size. Address space is reserved at once. A thread touches memory
ahead of need, so that a transfer never waits for page faults, and a server that is half empty uses half its memory.

The mapping is a memfd, in huge pages where the system has reserved enough of them or allows them for shared memory.
Where the system allows them for private memory only (the usual setting), the mapping is private: huge pages make reads
through the server about 5 % faster, and no other process maps the memfd anyway.

Invariant: the mapping never grows, so the blocks of a shard can never take more than its limit.
Threads: only the shard's loop calls `take`, `give_back` and `allow`. The pre-faulting thread only touches pages
of free segments; populating a page of a segment that was taken meanwhile does not change its content.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from typing import Final

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20
_AHEAD_SEGMENTS: Final = 4
_POPULATE_STEP_BYTES: Final = 4 << 20
_MADV_POPULATE_WRITE: Final = 23
_MFD_HUGETLB: Final = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _free_huge_pages_bytes() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("HugePages_Free:"):
                return int(line.split()[1]) * HUGE_PAGE_BYTES
    return 0


def _transparent_huge_pages(setting: str) -> bool:
    """Whether the kernel gives transparent huge pages on request.

    setting: `enabled` for private memory, `shmem_enabled` for shared memory.
    """
    try:
        with open(f"/sys/kernel/mm/transparent_hugepage/{setting}") as file:
            chosen = file.read()
            return "[never]" not in chosen and "[deny]" not in chosen
    except OSError:
        return False


def _map(size: int) -> tuple[mmap.mmap, str]:
    """-> a mapping of `size` bytes, which takes no memory until it is touched, and the kind of its pages."""
    if size % HUGE_PAGE_BYTES == 0 and _free_huge_pages_bytes() >= size:
        return _map_memfd(size, _MFD_HUGETLB), "reserved huge pages"
    if _transparent_huge_pages("shmem_enabled"):
        kind, memory = "transparent huge pages", _map_memfd(size, 0)
    elif _transparent_huge_pages("enabled"):
        kind, memory = "private transparent huge pages", mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        return _map_memfd(size, 0), "small pages"
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, kind


def _map_memfd(size: int, flags: int) -> mmap.mmap:
    fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class Arena:
    """`limit_bytes // segment_bytes` segments of shared memory."""

    def __init__(self, limit_bytes: int, segment_bytes: int) -> None:
        count = limit_bytes // segment_bytes
        if count < 1:
            raise ValueError(f"{limit_bytes} bytes hold no segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes
        self.segments = count
        size = count * segment_bytes
        self._map, self.pages = _map(size)
        self._discard = mmap.MADV_DONTNEED if "private" in self.pages else mmap.MADV_REMOVE
        self.memory = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._free = list(range(count - 1, -1, -1))  # a stack: the lowest segment first
        self._populated = bytearray(count)
        self._allowed = count
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._populate_ahead, name="kvstore-prefault", daemon=True)
        self._thread.start()
        self._wake.set()

    @property
    def free(self) -> int:
        """How many segments belong to no namespace."""
        return len(self._free)

    def take(self) -> int | None:
        """Take a free segment. -> its number, or None."""
        if not self._free:
            return None
        segment = self._free.pop()
        self._wake.set()
        return segment

    def give_back(self, segment: int) -> None:
        """Return a segment. No read or write of it may be in progress."""
        self._free.append(segment)

    def allow(self, segments: int) -> None:
        """Keep pages of so many segments at most, those of namespaces included, as far as these are not more already.

        The memory of other free segments goes back to the system; their pages fault again when they are used.
        """
        self._allowed = segments
        spare = max(0, segments - (self.segments - self.free))
        for segment in self._free[: len(self._free) - spare]:
            if self._populated[segment]:
                self._populated[segment] = 0
                self._map.madvise(self._discard, segment * self.segment_bytes, self.segment_bytes)

    def view(self, segment: int) -> memoryview:
        """The segment's bytes."""
        start = segment * self.segment_bytes
        return self.memory[start : start + self.segment_bytes]

    def close(self) -> None:
        """Stop the pre-faulting thread; blocks until it has ended. The mapping stays until the process ends."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _populate_ahead(self) -> None:
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            ahead = min(_AHEAD_SEGMENTS, self._allowed - (self.segments - self.free))
            for segment in self._free[: -1 - ahead : -1] if ahead > 0 else ():
                if not self._populated[segment] and not self._closing:
                    if not self._populate(segment):
                        return
                    self._populated[segment] = 1

    def _populate(self, segment: int) -> bool:
        """Touch every page of a segment. -> False when the kernel cannot (before Linux 5.14): pages fault when used."""
        start = self._address + segment * self.segment_bytes
        for offset in range(0, self.segment_bytes, _POPULATE_STEP_BYTES):
            step = min(_POPULATE_STEP_BYTES, self.segment_bytes - offset)
            if _libc.madvise(start + offset, step, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                level = logging.INFO if code == errno.EINVAL else logging.WARNING
                log.log(level, "arena is not pre-faulted: %s", os.strerror(code))
                return False
        return True
