"""The disk on which the disk tier is measured, and the limit of the disk tier: plain files with the same blocks on the
same file system."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.persistence_kv_cache.disk_server import Server
from benchmarks.persistence_kv_cache.files import PageCache, aligned_rows
from benchmarks.persistence_kv_cache.placements import PLACEMENTS, PLAIN, PLAIN_DIRECT, Placement, unavailable
from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.shapes import Batch
from benchmarks.remote_kv_cache.transfers import Blocks

_SPARE_BYTES: Final = 256 << 20


class Disk:
    """The disk that all parts measure: a directory, its page cache, and the server's arguments for it."""

    def __init__(self, benchmark: Benchmark, directory: Path) -> None:
        self.directory = directory
        self._cache = PageCache(benchmark.options.drop)
        self._random_order = benchmark.options.order == "random"
        self._arguments = shlex.split(benchmark.options.server_arguments)

    def order(self, count: int) -> npt.NDArray[np.intp]:
        """Return the order in which to write blocks that will be read from the first to the last."""
        return np.random.default_rng(2).permutation(count) if self._random_order else np.arange(count)

    def drop_cache(self) -> None:
        """Empty the page cache of all files in the directory."""
        self._cache.drop(self.directory)

    def missing(self, block_bytes: int) -> dict[str, str]:
        """Return the kind of plain file that this file system does not support, if there is one, and why."""
        return unavailable((PLAIN_DIRECT,), block_bytes, self.directory)

    def server(self, memory_bytes: int, blocks_bytes: int, name: str) -> Server:
        """Return a server whose disk tier has a directory of this name, and room for `blocks_bytes` and some more."""
        path = self.directory / name
        path.mkdir()
        return Server(memory_bytes, path, blocks_bytes * 3 // 2 + _SPARE_BYTES, self._arguments)


class PlainFile:
    """One preallocated file, used by pread and pwrite only. Every block is written once before the first round."""

    def __init__(self, placement: Placement, blocks: Blocks, keys: list[bytes], order: npt.NDArray[np.intp]) -> None:
        self._placement = placement
        self._blocks = blocks
        self._keys = keys
        placement.open()
        placement.write([keys[number] for number in order], [blocks.source[number] for number in order], 1)
        placement.sync()

    def close(self) -> None:
        self._placement.close()

    def forget(self) -> None:
        """Free all places, so that they can be written again."""
        self._placement.delete(self._keys)

    def write(self, threads: int) -> None:
        for start, end in self._blocks.batch.calls():
            self._placement.write(self._keys[start:end], self._blocks.source[start:end], threads)  # type: ignore[arg-type]
        self._placement.sync()

    def read(self, threads: int) -> None:
        for start, end in self._blocks.batch.calls():
            self._placement.read(self._keys[start:end], self._blocks.out[start:end], threads)


def aligned_blocks(batch: Batch, block_bytes: int) -> Blocks:
    """Return blocks in memory that O_DIRECT can use."""
    blocks = Blocks(batch, block_bytes)
    for name in ("source", "out"):
        rows = aligned_rows(batch.blocks, block_bytes)
        rows[:] = getattr(blocks, name)
        setattr(blocks, name, rows)
    return blocks


@contextlib.contextmanager
def plain_files(disk: Disk, blocks: Blocks) -> Iterator[dict[str, PlainFile]]:
    """The plain files: buffered, and O_DIRECT where the file system supports it."""
    missing = disk.missing(blocks.block_bytes)
    keys = [key.tobytes() for key in blocks.keys]
    with contextlib.ExitStack() as stack:
        files = {}
        for name in (PLAIN, PLAIN_DIRECT):
            if name not in missing:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk.directory)))
                placement = PLACEMENTS[name](folder, blocks.batch.blocks, blocks.block_bytes)
                files[name] = PlainFile(placement, blocks, keys, disk.order(blocks.batch.blocks))
                stack.callback(files[name].close)
        yield files


def plain_read(which: str, file: PlainFile, threads: int, blocks: Blocks, disk: Disk) -> Operation:
    """Return the operation that reads all blocks with pread, in the order in which they are requested from the
    server."""

    def before() -> None:
        disk.drop_cache()
        blocks.clear()

    return Operation(which, partial(file.read, threads), blocks.total_bytes, before=before, after=blocks.verify)
