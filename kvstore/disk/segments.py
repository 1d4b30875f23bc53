"""Segment files: where blocks lie on disk.

Each segment is one file. All files have the same size, are preallocated and divided into slots, and have no header.
Only the index knows which block is in which slot, and the block's checksum shows whether it is really there. The number
of files bounds the space. A file stays once it has been made, and is used again.

Blocks of 64 KiB and more whose size is a multiple of 4 KiB bypass the page cache (with O_DIRECT, if the file system
supports it). The page cache would keep a second copy of the arena's blocks and compete for its memory, and reads would
depend on the machine's other work. Smaller blocks need the kernel's read-ahead, and its merging of writes.

Threads: `open_file` may be called on any thread. It creates the file if the segment has none yet, and waits for the
disk. The other methods are for the shard's loop. The methods that it calls while it serves clients touch no file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Final

from kvstore.disk.format import NO_SPACE, SEGMENT_SUFFIX, SEGMENTS, segment_path

DIRECT_BYTES: Final = 4096  # O_DIRECT requires sizes, offsets and addresses that are multiples of this
MIN_DIRECT_BYTES: Final = 64 << 10
CORRUPT: Final = -1  # the status that `read_blocks` gives a block whose bytes do not match its checksum

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def bypasses_page_cache(block_bytes: int) -> bool:
    """Return whether files with blocks of this size are opened with O_DIRECT."""
    return block_bytes >= MIN_DIRECT_BYTES and block_bytes % DIRECT_BYTES == 0


def open_segment(path: Path, flags: int, direct: bool) -> int:
    """Return a descriptor of a segment's file, with O_DIRECT if `direct` and the file system supports it.

    Raises `OSError`.
    """
    if direct:
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system does not support O_DIRECT
                raise
    return os.open(path, flags | os.O_CLOEXEC)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve the space of a new file. If the file system cannot do that, only set its size. Raises `OSError`."""
    # posix_fallocate is not used, because it writes to every page if the file system cannot preallocate.
    if _libc.fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, nbytes)


def _unless_full(error: OSError) -> bool:
    """Return False if the error is that of a full file system. Raise any other error."""
    if error.errno not in NO_SPACE:
        raise error
    return False


class SegmentFiles:
    """Up to `segments` files of `segment_bytes` each in a shard's folder. Methods that touch files may raise
    `OSError`."""

    def __init__(self, shard_directory: Path, segment_bytes: int, segments: int) -> None:
        self.segment_bytes = segment_bytes
        self._limit = segments
        self._shard_directory = shard_directory
        self._taken: set[int] = set()
        self._free = list(range(segments - 1, -1, -1))  # a stack, the lowest on top; it may also hold claimed segments
        self._files: dict[tuple[int, bool], int] = {}
        self._made: set[int] = set()  # segments whose file exists or will be made by the first write
        self._found: set[int] = set()  # segments whose file exists
        self._locks: dict[int, threading.Lock] = {}  # one lock for each segment's file

    def open(self) -> None:
        """Find the existing files. Remove files of another size, and files beyond the limit, which may once have been
        higher."""
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
        """The maximum number of segments."""
        return self._limit

    @property
    def free(self) -> int:
        """The number of segments that belong to no namespace."""
        return self._limit - len(self._taken)

    @property
    def made(self) -> int:
        """The number of files that exist, or that will exist after the writes in progress."""
        return len(self._made)

    @property
    def used_bytes(self) -> int:
        """The size of all files together, in bytes."""
        return len(self._made) * self.segment_bytes

    def take(self) -> int | None:
        """Take a free segment. Return its number, or None if there is none."""
        while self._free:
            segment = self._free.pop()
            if segment not in self._taken:
                self._made.add(segment)
                self._taken.add(segment)
                return segment
        return None

    def claim(self, segment: int) -> bool:
        """Take a given segment, which has blocks of an earlier run. Return False if it has no file or is taken
        already."""
        if segment not in self._made or segment in self._taken:
            return False
        self._taken.add(segment)
        return True

    def give_back(self, segment: int) -> None:
        """Give back a segment. No read or write of it may be in progress."""
        self._taken.remove(segment)
        self._free.append(segment)

    def remove_one(self) -> bool:
        """Remove the file of one segment that no namespace holds. Return False if there is no such file."""
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
        """Return a descriptor of a segment's file, which stays open. `direct`: whether to bypass the page cache if
        possible.

        May be called on any thread. Blocks while the file is made or opened. Raises `OSError`.
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
            preallocate(fd, self.segment_bytes)
        except OSError as error:
            path.unlink()
            error.filename = str(path)
            raise
        finally:
            os.close(fd)
        self._found.add(segment)

    def has_room(self, more_bytes: int) -> bool:
        """Return whether two more files could be made, and `more_bytes` be written in addition.

        Blocks. May be called on any thread.
        """
        directory = self._shard_directory / SEGMENTS
        status = os.statvfs(directory)
        if status.f_bavail * status.f_frsize < 2 * self.segment_bytes + more_bytes:
            return False
        # These numbers leave out the quotas of users. So make a file without a name, which is gone when it is closed.
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # the file system has no such files
                return True
            return _unless_full(error)
        try:
            preallocate(fd, self.segment_bytes)
        except OSError as error:
            return _unless_full(error)
        finally:
            os.close(fd)
        return True

    def sync(self) -> None:
        """Flush all data written to open files. Blocks until the data is on the device."""
        for fd in list(self._files.values()):
            os.fdatasync(fd)

    def _path(self, segment: int) -> Path:
        return segment_path(self._shard_directory, segment)
