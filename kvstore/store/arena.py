"""The arena: one shard's block memory.

The arena is one range of addresses of the shard's whole limit, cut into segments of equal size. A segment is free or
belongs to one namespace, which cuts it into slots of its block size. Address space is reserved at once. A thread
touches memory ahead of need, so that a transfer never waits for page faults, and a server that is half empty uses half
its memory.

A *shared* arena can hand its segments to clients on its host: each segment is a memfd of its own, mapped at its place,
so that a client maps the segments of its own namespace and nothing else. A client is given a descriptor that only
reads, of memory that is sealed: nobody can map it to write to it from then on. When a segment that a client was given
leaves its namespace, its file is cut to nothing and the segment gets a new one. So its memory is free at once, whoever
still maps the old file. What must hold: no client reads a segment that may be given back, see `kvstore.shard.leases`.

A segment that had blocks of another namespace is never given to a client, because their bytes are still there: it
gets a new file first. As long as no client on this host has come (`lending`), nothing is given to anybody, and segments
change their namespace without that.

Where the kernel cannot give a segment a memfd, or there is no descriptor for it, the segment stays memory of this
process, and its blocks are sent through the socket.

Pages: huge pages make reads through the server about 5 % faster. Shared memory gets them from the system's reserve if
that is large enough, or by the system's setting for shared memory; private memory where the system allows them.
MADV_COLLAPSE would need no setting, but it keeps this process from mapping anything until every processor has done some
work for it: where one is busy, the loop stood still for seconds.

Invariant: the range never grows, so the blocks of a shard can never take more than its limit.
Threads: only the shard's loop calls `take`, `give_back`, `allow` and `export`. The pre-faulting thread only touches
pages of free segments; populating a page of a segment that was taken meanwhile does not change its content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import resource
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from kvstore.pages import HUGE_PAGE_BYTES, Range, advise, map_at, populate

log = logging.getLogger(__name__)

_AHEAD_SEGMENTS: Final = 4
_OTHER_FILES: Final = 2048 + 1024  # descriptors for connections, and for files of the disk tier and what else there is
_POPULATE_STEP_BYTES: Final = 4 << 20
_MFD_HUGETLB: Final = 4
# Nobody can map it to write from now on, make it longer, or add a seal; this process can cut it to nothing.
_SEALS: Final = 0x10 | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # 0x10: F_SEAL_FUTURE_WRITE
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_READ_ONLY: Final = 0o400  # of the file: a client of another user cannot open it anew to write


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


class Arena:
    """`limit_bytes // segment_bytes` segments of memory. `shared`: clients may be given them."""

    def __init__(self, limit_bytes: int, segment_bytes: int, shared: bool = False) -> None:
        count = limit_bytes // segment_bytes
        if count < 1:
            raise ValueError(f"{limit_bytes} bytes hold no segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes
        self.segments = count
        self.retired: list[int] = []  # numbers of exported files that were cut to nothing, for the loop to tell clients
        self._shared = shared
        self.lending = False  # a client that reads in this memory has come
        self.withdraw: Callable[[memoryview], None] | None = None  # called with exported memory that will be replaced
        self._files: dict[int, int] = {}  # segment -> descriptor of its memfd
        self._most_files = 0
        if shared:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._most_files = max(0, limit - _OTHER_FILES)
            if self._most_files < count:
                log.warning(
                    "%d of %d segments can be shared with clients on this host: each takes a descriptor, and %d of %d "
                    "are kept for other use; raise the limit of open files (ulimit -n), or choose a larger --segment",
                    self._most_files,
                    count,
                    min(limit, _OTHER_FILES),
                    limit,
                )
        self._numbers = itertools.count(1)
        size = count * segment_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = size % HUGE_PAGE_BYTES == 0 and _free_huge_pages_bytes() >= size
        self._file_flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if reserved:
            self.pages = "reserved huge pages"
            self._file_flags |= _MFD_HUGETLB
            flags |= 0 if shared else mmap.MAP_HUGETLB if hasattr(mmap, "MAP_HUGETLB") else 0x40000
        elif _transparent_huge_pages("shmem_enabled" if shared else "enabled") and (
            not shared or segment_bytes % HUGE_PAGE_BYTES == 0
        ):
            self.pages = "transparent huge pages"
        else:
            self.pages = "small pages"
        self._range = Range(size, flags)
        self._address, self.memory = self._range.address, self._range.memory
        if "transparent" in self.pages and not shared:
            advise(self._address, size, mmap.MADV_HUGEPAGE)
        self.numbers = np.zeros(count, dtype=np.uint64)  # by segment: of its file, once a client was given it; else 0
        self._free = list(range(count - 1, -1, -1))  # a stack: the lowest segment first
        self._populated = bytearray(count)
        self._left = bytearray(count)  # segments with bytes of a namespace that they have left
        self._allowed = count
        self._share_ahead()
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
        if self._left[segment] and self.lending and not self._renew(segment):
            return self.take()
        self._share_ahead()
        self._wake.set()
        return segment

    def give_back(self, segment: int) -> None:
        """Return a segment. No read or write of it may be in progress, here or in a client."""
        self._left[segment] = 1
        if not self.numbers[segment] or self._renew(segment):
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
                advice = mmap.MADV_REMOVE if segment in self._files else mmap.MADV_DONTNEED
                advise(self._address + segment * self.segment_bytes, self.segment_bytes, advice)

    def view(self, segment: int) -> memoryview:
        """The segment's bytes."""
        start = segment * self.segment_bytes
        return self.memory[start : start + self.segment_bytes]

    # ---- sharing ---------------------------------------------------------------------------------------------------

    def export(self, segment: int) -> int:
        """Make a segment that belongs to a namespace ready to be given to that namespace's clients. -> the number of
        its file, which no other file ever has; 0: it cannot be given."""
        number = int(self.numbers[segment])
        if number or segment not in self._files or self._left[segment]:
            return number
        file = self._files[segment]
        try:
            os.fchmod(file, _READ_ONLY)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:  # this kind of memory cannot be sealed
            log.warning("segment %d cannot be shared with clients on this host: %s", segment, error)
            return 0
        number = next(self._numbers)
        self.numbers[segment] = number
        return number

    def open_to_read(self, segment: int) -> int:
        """-> a new descriptor of an exported segment's file, with which nobody can write. Raises `OSError`."""
        return os.open(f"/proc/self/fd/{self._files[segment]}", os.O_RDONLY | os.O_CLOEXEC)

    def _share_ahead(self) -> None:
        """Give the segments that are taken next a file each: `take` must not wait for it, and pages are touched only
        then."""
        if self._shared:
            for segment in self._free[: -2 - _AHEAD_SEGMENTS : -1]:
                if segment not in self._files and len(self._files) < self._most_files and not self._populated[segment]:
                    self._share(segment)

    def _renew(self, segment: int) -> bool:
        """Give a segment new memory, and cut its old file to nothing: it is free at once, whoever still maps it.

        -> False if the kernel has no new mapping for it: then nobody may use the segment again.
        """
        file = self._files.pop(segment, -1)
        if file < 0:
            return True
        if self.numbers[segment] and self.withdraw is not None:
            self.withdraw(self.view(segment))
        try:
            self._share(segment)  # first: no address of the range may ever be without memory
        except OSError as error:
            log.error("segment %d is out of use until the server is restarted: %s", segment, error)
            return False
        os.ftruncate(file, 0)
        os.close(file)
        if self.numbers[segment]:
            self.retired.append(int(self.numbers[segment]))
            self.numbers[segment] = 0
        self._populated[segment] = self._left[segment] = 0
        return True

    def _share(self, segment: int) -> None:
        """Map a new memfd at a segment's place. If that fails, the segment is private memory. Raises `OSError` if there
        is none either."""
        place = self._address + segment * self.segment_bytes
        file = -1
        try:
            file = os.memfd_create(f"kvstore-segment-{segment}", self._file_flags)
            os.ftruncate(file, self.segment_bytes)
            map_at(place, self.segment_bytes, _READ_WRITE, mmap.MAP_SHARED, file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(file)
            log.warning("segment %d cannot be shared with clients on this host: %s", segment, error)
            map_at(place, self.segment_bytes, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            return
        self._files[segment] = file
        if self.pages == "transparent huge pages":
            advise(place, self.segment_bytes, mmap.MADV_HUGEPAGE)

    # ---- touching pages ahead --------------------------------------------------------------------------------------

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
            try:
                populate(start + offset, step)
            except OSError as error:
                level = logging.INFO if error.errno == errno.EINVAL else logging.WARNING
                log.log(level, "arena is not pre-faulted: %s", error.strerror)
                return False
        return True
