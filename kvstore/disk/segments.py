"""Segment files: where blocks lie on disk.

A file a segment, all of equal size, preallocated, addressed by slot, with no header: what lies where is the index's
knowledge, and a block's checksum says whether it is there. Space is bounded by the number of files; a file once made
stays and is used again.

Blocks of 64 KiB and more whose size is a multiple of 4 KiB bypass the page cache (O_DIRECT, where the file system has
it): the memory they would be cached in twice is the arena's, and reads do not depend on what else the machine did.
Smaller ones need the kernel's read-ahead and its merging of writes.

Threads: all methods belong to the shard's loop; descriptors may be read and written by any thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from kvstore.disk.format import SEGMENT_SUFFIX, SEGMENTS, segment_path

DIRECT_BYTES: Final = 4096  # what O_DIRECT wants sizes, offsets and addresses to be multiples of
MIN_DIRECT_BYTES: Final = 64 << 10
CORRUPT: Final = -1  # what `read_blocks` says of a block whose bytes are not those of its checksum

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def bypasses_page_cache(block_bytes: int) -> bool:
    """Whether files with blocks of this size are opened with O_DIRECT."""
    return block_bytes >= MIN_DIRECT_BYTES and block_bytes % DIRECT_BYTES == 0


def open_segment(path: Path, flags: int, direct: bool) -> int:
    """A descriptor of a segment's file, with O_DIRECT if `direct` and the file system has it. Raises `OSError`."""
    if direct:
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without it
                raise
    return os.open(path, flags | os.O_CLOEXEC)


class SegmentFiles:
    """Up to `segments` files of `segment_bytes` in a shard's folder. Every method may raise OSError."""

    def __init__(self, shard_directory: Path, segment_bytes: int, segments: int) -> None:
        self.segment_bytes = segment_bytes
        self._limit = segments
        self._shard_directory = shard_directory
        self._taken: set[int] = set()
        self._free = list(range(segments - 1, -1, -1))  # a stack, the lowest first; some of them may be taken
        self._files: dict[tuple[int, bool], int] = {}
        self._made: set[int] = set()

    def open(self) -> None:
        """Find the files that are there; those beyond the limit, which was higher once, are removed."""
        directory = self._shard_directory / SEGMENTS
        directory.mkdir(exist_ok=True)
        for path in directory.glob(f"*{SEGMENT_SUFFIX}"):
            if not path.stem.isdigit():
                continue
            if int(path.stem) < self._limit and path.stat().st_size == self.segment_bytes:
                self._made.add(int(path.stem))
            else:
                path.unlink()

    @property
    def segments(self) -> int:
        """How many there may be."""
        return self._limit

    @property
    def free(self) -> int:
        """Segments that belong to no namespace."""
        return self._limit - len(self._taken)

    @property
    def made(self) -> int:
        """How many files there are."""
        return len(self._made)

    @property
    def used_bytes(self) -> int:
        """What the files take on disk."""
        return len(self._made) * self.segment_bytes

    def take(self) -> int | None:
        """The number of a free segment, whose file now exists; None when no segment is free."""
        while self._free:
            segment = self._free.pop()
            if segment not in self._taken:
                self._make(segment)
                self._taken.add(segment)
                return segment
        return None

    def claim(self, segment: int) -> bool:
        """Take a certain segment, of which blocks are known; False: there is no such file, or it is taken."""
        if segment not in self._made or segment in self._taken:
            return False
        self._taken.add(segment)
        return True

    def give_back(self, segment: int) -> None:
        """Return a segment none of whose bytes anybody reads or writes any more."""
        self._taken.remove(segment)
        self._free.append(segment)

    def remove_one(self) -> bool:
        """Remove the file of a segment that no namespace holds; False when there is no such file."""
        for segment in self._made - self._taken:
            self._path(segment).unlink()
            self._made.remove(segment)
            for direct in (False, True):
                if (segment, direct) in self._files:
                    os.close(self._files.pop((segment, direct)))
            return True
        return False

    def open_file(self, segment: int, direct: bool) -> int:
        """A descriptor of a segment's file, kept open; `direct`: past the page cache where that is possible."""
        found = self._files.get((segment, direct))
        if found is None:
            found = self._files[segment, direct] = open_segment(self._path(segment), os.O_RDWR, direct)
        return found

    def _make(self, segment: int) -> None:
        if segment in self._made:
            return
        path = self._path(segment)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not posix_fallocate, which writes every page itself where the file system cannot allocate.
            if _libc.fallocate(fd, 0, 0, self.segment_bytes) != 0:
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    path.unlink()
                    raise OSError(code, os.strerror(code), str(path))
                os.ftruncate(fd, self.segment_bytes)
        finally:
            os.close(fd)
        self._made.add(segment)

    def sync(self) -> None:
        """Blocking: see that what was written is on the device."""
        for fd in list(self._files.values()):
            os.fdatasync(fd)

    def _path(self, segment: int) -> Path:
        return segment_path(self._shard_directory, segment)
