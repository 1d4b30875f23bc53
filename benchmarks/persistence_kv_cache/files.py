"""Helpers to measure a disk: aligned memory, whole preads and pwrites, cold page caches, used space.

A read is cold if its bytes are not in this kernel's page cache. `drop_caches` empties the whole cache, including names
and inodes, and needs root. `fadvise` drops the pages of the given files only, and leaves directories cached. Neither
can empty caches below the kernel (the host of a virtual disk, a drive's own memory).
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

ALIGNMENT: Final = 4096  # alignment of memory, offsets and sizes for O_DIRECT; enough for all common disks
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
_POOL: Final = ThreadPoolExecutor(8, "disk")


def aligned_rows(count: int, row_bytes: int) -> Rows:
    """Zeros of shape `(count, row_bytes)` that begin at a page, as the arena's slots do."""
    memory = mmap.mmap(-1, max(1, count * row_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8, count=count * row_bytes).reshape(count, row_bytes)


def write_row(descriptor: int, row: Rows, offset: int) -> None:
    """Write the whole row in one call. Raises `OSError` if the kernel took less."""
    written = os.pwrite(descriptor, row, offset)
    if written != row.nbytes:
        raise OSError(f"pwrite at {offset}: {written} of {row.nbytes} bytes were written")


def read_row(descriptor: int, row: Rows, offset: int) -> None:
    """Fill `row` in one call. Raises `OSError` if the file ends too early."""
    got = os.preadv(descriptor, [row], offset)
    if got != row.nbytes:
        raise OSError(f"pread at {offset}: {got} of {row.nbytes} bytes were read")


def spread(threads: int, count: int, work: Callable[[int, int], object]) -> None:
    """Run `work(first, last)` over `count` items, cut into one piece for each thread."""
    if threads == 1:
        work(0, count)
        return
    ends = [count * number // threads for number in range(threads + 1)]
    for _ in _POOL.map(work, ends[:-1], ends[1:]):
        pass


def preallocate(path: Path, size: int, direct: bool = False) -> int:
    """Open a file of exactly that size whose disk blocks are allocated; create the file if it does not exist. The
    caller closes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


@dataclass(frozen=True)
class Space:
    """The space of all files and directories below a directory. `allocated_bytes`: what the file system allocated for
    them."""

    files: int
    allocated_bytes: int


def _files(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            yield entry


def space(directory: Path) -> Space:
    """The space that a directory takes now, as the file system reports it."""
    files = allocated = 0
    for entry in _files(directory):
        files += entry.is_file(follow_symlinks=False)
        allocated += entry.stat(follow_symlinks=False).st_blocks * 512
    return Space(files, allocated)


def file_system(directory: Path) -> str:
    """The type of the file system that holds `directory`, as in /proc/mounts."""
    device = directory.stat().st_dev
    found = "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        try:
            if os.stat(point).st_dev == device:
                found = kind
        except OSError:
            continue  # a mount point that this user may not access
    return found


class PageCache:
    """Empties the page cache, in the way that `--drop` names."""

    def __init__(self, how: str) -> None:
        permitted = os.access(_DROP_CACHES, os.W_OK)
        if how == "drop_caches" and not permitted:
            raise PermissionError(
                "--drop drop_caches: /proc/sys/vm/drop_caches is not writable; run as root, or use --drop fadvise"
            )
        self.how = how if how != "auto" else "drop_caches" if permitted else "fadvise"

    def drop(self, *directories: Path) -> None:
        """Write back dirty pages, then drop them. Mapped pages stay, so close mapped files first."""
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
    """Add the options `--directory` and `--drop`."""
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="PATH",
        help="a folder on the file system to be measured; default: the temporary folder",
    )
    parser.add_argument(
        "--drop",
        choices=("auto", "drop_caches", "fadvise"),
        default="auto",
        help="how the page cache is emptied; auto: all of it if permitted, otherwise only the pages of the files",
    )
