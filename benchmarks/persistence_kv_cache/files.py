"""What everything that measures a disk needs: aligned memory, whole preads and pwrites, cold page caches, space used.

A cold read is one whose bytes are in no page cache of this kernel. `drop_caches` empties all of it, names and inodes
too, and needs to be root; `fadvise` gives up the pages of the files named, and leaves directories where they are. What
lies below the kernel (a virtual disk's host, a drive's own memory) neither can empty.
"""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.shapes import Rows

ALIGNMENT: Final = 4096  # of memory, offsets and sizes with O_DIRECT: enough for every disk we know of
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
_POOL: Final = ThreadPoolExecutor(8, "disk")


def aligned_rows(count: int, row_bytes: int) -> Rows:
    """`(count, row_bytes)` of zeros that begin at a page, as the arena's slots do."""
    memory = mmap.mmap(-1, max(1, count * row_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8, count=count * row_bytes).reshape(count, row_bytes)


def write_row(descriptor: int, row: Rows, offset: int) -> None:
    """All of it, in one call; `OSError` when the kernel took less."""
    written = os.pwrite(descriptor, row, offset)
    if written != row.nbytes:
        raise OSError(f"pwrite at {offset}: {written} of {row.nbytes} bytes were written")


def read_row(descriptor: int, row: Rows, offset: int) -> None:
    """Fill `row`, in one call; `OSError` when the file ends before."""
    got = os.preadv(descriptor, [row], offset)
    if got != row.nbytes:
        raise OSError(f"pread at {offset}: {got} of {row.nbytes} bytes were read")


def spread(threads: int, count: int, work: Callable[[int, int], object]) -> None:
    """`work(first, last)` over `count` items, cut into one piece a thread."""
    if threads == 1:
        work(0, count)
        return
    ends = [count * number // threads for number in range(threads + 1)]
    for _ in _POOL.map(work, ends[:-1], ends[1:]):
        pass


def preallocate(path: Path, size: int, direct: bool = False) -> int:
    """Open a file of exactly that size whose blocks are its own; made if it is not there. The caller closes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


@dataclass(frozen=True)
class Space:
    """Of all files and directories below one: `allocated_bytes` is what the file system took for them."""

    files: int
    allocated_bytes: int


def _files(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            yield entry


def space(directory: Path) -> Space:
    """Looked up in the file system, now."""
    files = allocated = 0
    for entry in _files(directory):
        files += entry.is_file(follow_symlinks=False)
        allocated += entry.stat(follow_symlinks=False).st_blocks * 512
    return Space(files, allocated)


def file_system(directory: Path) -> str:
    """The type of the one that `directory` lies on, as /proc/mounts calls it."""
    device = directory.stat().st_dev
    found = "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        try:
            if os.stat(point).st_dev == device:
                found = kind
        except OSError:
            continue  # a mount point that is not ours to look at
    return found


class PageCache:
    """Empties it, in the way `--drop` says."""

    def __init__(self, how: str) -> None:
        permitted = os.access(_DROP_CACHES, os.W_OK)
        if how == "drop_caches" and not permitted:
            raise PermissionError(
                "--drop drop_caches: /proc/sys/vm/drop_caches may not be written; be root, or fadvise"
            )
        self.how = how if how != "auto" else "drop_caches" if permitted else "fadvise"

    def drop(self, *directories: Path) -> None:
        """Write back what is dirty, then forget it. What is mapped stays: close such files before."""
        os.sync()
        if self.how == "drop_caches":
            _DROP_CACHES.write_text("3\n")
            return
        for directory in directories:
            for entry in _files(directory):
                if entry.is_file(follow_symlinks=False):
                    descriptor = os.open(entry.path, os.O_RDONLY)
                    try:
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(descriptor)


def add_disk_options(parser: argparse.ArgumentParser) -> None:
    """`--directory`, `--drop`."""
    parser.add_argument(
        "--directory", type=Path, metavar="PATH", help="on the file system to be measured; default: the temporary one"
    )
    parser.add_argument(
        "--drop",
        choices=("auto", "drop_caches", "fadvise"),
        default="auto",
        help="how the page cache is emptied; auto: all of it where permitted, else the files' pages",
    )
