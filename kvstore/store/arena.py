"""The arena: one shard's block memory.

The arena is one range of addresses, as large as the shard's limit and cut into segments of equal size. Each segment is
either free or belongs to one namespace, which cuts the segment into slots of its own block size. The addresses are
reserved at the start, but a page takes memory only after it was touched. So a server that is half full uses half of its
memory. A thread touches pages before they are needed, so that a transfer never waits for page faults.

A *shared* arena can hand its segments to clients on its host. For that, each segment is a memfd of its own, mapped at
the segment's place in the range. So a client maps only the segments of its own namespace. The client gets a read-only
descriptor, and the memory is sealed: from then on no process can map it for writing. When a segment that was handed to
a client leaves its namespace, the segment's file is truncated to length 0 and the segment gets a new file. So the
memory of the old file is freed at once, even if a client still maps that file. Invariant: a segment that a client may
still read is not given back (see `kvstore.shard.leases`).

A segment that held blocks of another namespace still has their bytes. So it gets a new file before it is handed to a
client. Until the first client on this host connects (`lending`), no segment is shared, and segments change their
namespace without a new file.

If the kernel cannot make a memfd for a segment, or no descriptor is left, the segment stays in private memory. Its
blocks are then sent through the socket.

Huge pages make reads through the server about 5 % faster. Shared memory gets them from the system's reserve if that is
large enough, or through the system's setting for shared memory. Private memory gets them if the system allows it.
MADV_COLLAPSE would need no setting. But during that call, this process cannot map memory until every processor has done
some work for the call. With one busy processor, the loop stood still for seconds.

Invariant: the range never grows, so the blocks of a shard can never take more than its limit.
Threads: only the shard's loop calls `take`, `give_back`, `allow` and `export`. The pre-faulting thread only touches
pages of free segments. If one of these segments is taken meanwhile, touching its pages does not change their content.
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

from kvstore.huge_pages import HUGE_PAGE_BYTES, Range, advise, map_at, populate

log = logging.getLogger(__name__)

_AHEAD_SEGMENTS: Final = 4
_OTHER_FILES: Final = 2048 + 1024  # descriptors: 2048 for connections, 1024 for the disk tier's files and the rest
_POPULATE_STEP_BYTES: Final = 4 << 20
_MFD_HUGETLB: Final = 4
# A file with these seals cannot be mapped for writing again, extended, or sealed further. This process can truncate it.
_ARENA_SEALS: Final = 0x10 | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # 0x10: F_SEAL_FUTURE_WRITE
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_READ_ONLY: Final = 0o400  # mode of the file: a client of another user cannot reopen it for writing


def _free_huge_pages_bytes() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("HugePages_Free:"):
                return int(line.split()[1]) * HUGE_PAGE_BYTES
    return 0


def _transparent_huge_pages(setting: str) -> bool:
    """Return whether the kernel gives transparent huge pages on request.

    setting: the kernel's setting to read, `enabled` for private memory or `shmem_enabled` for shared memory.
    """
    try:
        with open(f"/sys/kernel/mm/transparent_hugepage/{setting}") as file:
            chosen = file.read()
            return "[never]" not in chosen and "[deny]" not in chosen
    except OSError:
        return False


class Arena:
    """A memory of `limit_bytes // segment_bytes` segments. `shared`: segments may be handed to clients."""

    def __init__(self, limit_bytes: int, segment_bytes: int, shared: bool = False) -> None:
        count = limit_bytes // segment_bytes
        if count < 1:
            raise ValueError(f"{limit_bytes} bytes have no room for a segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes
        self.segments = count
        self.retired: list[int] = []  # numbers of exported files that were truncated; the loop reports them to clients
        self._shared = shared
        self.lending = False  # True once a client that reads this memory has connected
        self.withdraw: Callable[[memoryview], None] | None = None  # called before exported memory is replaced
        self._files: dict[int, int] = {}  # segment -> descriptor of its memfd
        self._most_files = 0
        if shared:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._most_files = max(0, limit - _OTHER_FILES)
            if self._most_files < count:
                log.warning(
                    "%d of %d segments can be shared with clients on this host: each takes a descriptor, and %d of %d "
                    "descriptors are reserved. Raise the limit of open files (ulimit -n), or choose a larger --segment",
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
        self.numbers = np.zeros(count, dtype=np.uint64)  # by segment: the number of its exported file, else 0
        self._free = list(range(count - 1, -1, -1))  # a stack: at first the lowest segment is on top
        self._populated = bytearray(count)
        self._left = bytearray(count)  # 1: the segment has bytes of a namespace that no longer holds it
        self._allowed = count
        self._share_ahead()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._populate_ahead, name="kvstore-prefault", daemon=True)
        self._thread.start()
        self._wake.set()

    @property
    def free(self) -> int:
        """The number of segments that belong to no namespace."""
        return len(self._free)

    def take(self) -> int | None:
        """Take a free segment. Return its number, or None if there is none."""
        if not self._free:
            return None
        segment = self._free.pop()
        if self._left[segment] and self.lending and not self._renew(segment):
            return self.take()
        self._share_ahead()
        self._wake.set()
        return segment

    def give_back(self, segment: int) -> None:
        """Give back a segment. Neither this process nor a client may be reading or writing it."""
        self._left[segment] = 1
        if not self.numbers[segment] or self._renew(segment):
            self._free.append(segment)

    def allow(self, segments: int) -> None:
        """Let at most `segments` segments keep their pages in memory. This number includes the segments of namespaces,
        which always keep their pages.

        The memory of the other free segments goes back to the system. Their pages fault again when they are used.
        """
        self._allowed = segments
        spare = max(0, segments - (self.segments - self.free))
        for segment in self._free[: len(self._free) - spare]:
            if self._populated[segment]:
                self._populated[segment] = 0
                advice = mmap.MADV_REMOVE if segment in self._files else mmap.MADV_DONTNEED
                advise(self._address + segment * self.segment_bytes, self.segment_bytes, advice)

    def view(self, segment: int) -> memoryview:
        """Return a view of the segment's bytes."""
        start = segment * self.segment_bytes
        return self.memory[start : start + self.segment_bytes]

    # ---- sharing ---------------------------------------------------------------------------------------------------

    def export(self, segment: int) -> int:
        """Prepare a segment of a namespace for sharing with that namespace's clients. Return the number of its file, or
        0 if the segment cannot be shared. No other file ever gets the same number."""
        number = int(self.numbers[segment])
        if number or segment not in self._files or self._left[segment]:
            return number
        file = self._files[segment]
        try:
            os.fchmod(file, _READ_ONLY)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _ARENA_SEALS)
        except OSError as error:  # this kind of memory cannot be sealed
            log.warning("segment %d cannot be shared with clients on this host: %s", segment, error)
            return 0
        number = next(self._numbers)
        self.numbers[segment] = number
        return number

    def open_to_read(self, segment: int) -> int:
        """Return a new read-only descriptor of an exported segment's file. Raises `OSError`."""
        return os.open(f"/proc/self/fd/{self._files[segment]}", os.O_RDONLY | os.O_CLOEXEC)

    def _share_ahead(self) -> None:
        """Give a file to each of the next few segments, because `take` must not wait for that. A segment's pages must
        not be touched before the segment has its file."""
        if self._shared:
            for segment in self._free[: -2 - _AHEAD_SEGMENTS : -1]:
                if segment not in self._files and len(self._files) < self._most_files and not self._populated[segment]:
                    self._share(segment)

    def _renew(self, segment: int) -> bool:
        """Give a segment a new file and truncate the old one. The old memory is freed at once, even if a client still
        maps it.

        Return False if the kernel cannot map new memory. The segment must then not be used again.
        """
        file = self._files.pop(segment, -1)
        if file < 0:
            return True
        if self.numbers[segment] and self.withdraw is not None:
            self.withdraw(self.view(segment))
        try:
            self._share(segment)  # before the truncation, because no address of the range may ever be without memory
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
        """Map a new memfd at a segment's place, or private memory if no memfd can be made. Raises `OSError` if private
        memory cannot be mapped either."""
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
        """Stop the pre-faulting thread, and wait until it has ended. The memory stays mapped until the process ends."""
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
        """Touch every page of a segment. Return False if the kernel has no call for this (before Linux 5.14). The pages
        then fault when they are used."""
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
