"""Segment files: where blocks lie on disk.

Each segment is one file. All files have equal size, are preallocated and divided into slots, and have no header: only
the index knows which block is in which slot, and the block's checksum tells whether it is really there. The number of
files bounds the space; a file stays once it is made, and is used again.

Blocks of 64 KiB and more whose size is a multiple of 4 KiB bypass the page cache (O_DIRECT, where the file system
supports it): the page cache would keep a second copy of the arena's blocks and take its memory, and reads would depend
on what else the machine does. Smaller blocks need the kernel's read-ahead and its merging of writes.

Threads: `open_file` may be called on any thread. It makes the file when the segment has none yet, which can take as
long as the disk likes; the other methods are the shard's loop's, and those that it calls while it serves touch no file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Final

from kvstore.disk.format import SEGMENT_SUFFIX, SEGMENTS, segment_path

DIRECT_BYTES: Final = 4096  # O_DIRECT requires sizes, offsets and addresses that are multiples of this
MIN_DIRECT_BYTES: Final = 64 << 10
CORRUPT: Final = -1  # the status that `read_blocks` gives a block whose bytes do not match its checksum

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def bypasses_page_cache(block_bytes: int) -> bool:
    """Whether files with blocks of this size are opened with O_DIRECT."""
    return block_bytes >= MIN_DIRECT_BYTES and block_bytes % DIRECT_BYTES == 0


def open_segment(path: Path, flags: int, direct: bool) -> int:
    """-> a descriptor of a segment's file, with O_DIRECT if `direct` and the file system supports it.

    Raises `OSError`.
    """
    if direct:
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system does not support O_DIRECT
                raise
    return os.open(path, flags | os.O_CLOEXEC)


class SegmentFiles:
    """Up to `segments` files of `segment_bytes` in a shard's folder. Methods that touch files may raise OSError."""

    def __init__(self, shard_directory: Path, segment_bytes: int, segments: int) -> None:
        self.segment_bytes = segment_bytes
        self._limit = segments
        self._shard_directory = shard_directory
        self._taken: set[int] = set()
        self._free = list(range(segments - 1, -1, -1))  # a stack, the lowest first; it may hold claimed segments, too
        self._files: dict[tuple[int, bool], int] = {}
        self._made: set[int] = set()  # segments whose file exists or is made by the first write
        self._found: set[int] = set()  # segments whose file exists
        self._locks: dict[int, threading.Lock] = {}  # by segment, for its file

    def open(self) -> None:
        """Find the existing files. Remove files of another size, and files beyond the limit, which was higher once."""
        directory = self._shard_directory / SEGMENTS
        directory.mkdir(exist_ok=True)
        for path in directory.glob(f"*{SEGMENT_SUFFIX}"):
            if not path.stem.isdigit():
                continue
            if int(path.stem) < self._limit and path.stat().st_size == self.segment_bytes:
                self._made.add(int(path.stem))
                self._found.add(int(path.stem))
            else:
                path.unlink()

    @property
    def segments(self) -> int:
        """The most segments that there may be."""
        return self._limit

    @property
    def free(self) -> int:
        """How many segments belong to no namespace."""
        return self._limit - len(self._taken)

    @property
    def made(self) -> int:
        """How many files exist, or will with the writes in progress."""
        return len(self._made)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files."""
        return len(self._made) * self.segment_bytes

    def take(self) -> int | None:
        """Take a free segment. -> its number; None when no segment is free."""
        while self._free:
            segment = self._free.pop()
            if segment not in self._taken:
                self._made.add(segment)
                self._taken.add(segment)
                return segment
        return None

    def claim(self, segment: int) -> bool:
        """Take a given segment, which has blocks of an earlier run. -> False when it has no file or is taken."""
        if segment not in self._made or segment in self._taken:
            return False
        self._taken.add(segment)
        return True

    def give_back(self, segment: int) -> None:
        """Return a segment. No read or write of it may be in progress."""
        self._taken.remove(segment)
        self._free.append(segment)

    def remove_one(self) -> bool:
        """Remove the file of one segment that no namespace holds. -> False when there is no such file."""
        for segment in self._made - self._taken:
            self._path(segment).unlink(missing_ok=True)
            self._made.remove(segment)
            self._found.discard(segment)
            for direct in (False, True):
                if (segment, direct) in self._files:
                    os.close(self._files.pop((segment, direct)))
            return True
        return False

    def open_file(self, segment: int, direct: bool) -> int:
        """-> a descriptor of a segment's file, which stays open. `direct`: bypass the page cache where possible.

        Any thread. Blocks while the file is made or opened. Raises `OSError`.
        """
        found = self._files.get((segment, direct))
        if found is None:
            with self._locks.setdefault(segment, threading.Lock()):
                if segment not in self._found:
                    self._make(segment)
                found = self._files.get((segment, direct))
                if found is None:
                    found = self._files[segment, direct] = open_segment(self._path(segment), os.O_RDWR, direct)
        return found

    def _make(self, segment: int) -> None:
        path = self._path(segment)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not posix_fallocate, which writes to every page where the file system cannot preallocate.
            if _libc.fallocate(fd, 0, 0, self.segment_bytes) != 0:
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    path.unlink()
                    raise OSError(code, os.strerror(code), str(path))
                os.ftruncate(fd, self.segment_bytes)
        finally:
            os.close(fd)
        self._found.add(segment)

    def sync(self) -> None:
        """Blocks until all data written to open files is on the device."""
        for fd in list(self._files.values()):
            os.fdatasync(fd)

    def _path(self, segment: int) -> Path:
        return segment_path(self._shard_directory, segment)
