"""Compares ways to keep block bytes on disk: LMDB values, one file for each block, or segments of slots, buffered or
with O_DIRECT.

It measures writes (with fsync, whose share is also shown), and reads in random order with a cold and with a warm page
cache. Then a third of the blocks of a store that is 95 % full is replaced, and cold reads follow. A restart (open and
list all keys, with a cold cache), the space and the number of files are measured, too. The limits, in the same rounds,
are plain pread and pwrite in one preallocated file, for each way of I/O, and block-to-block copies in memory. Every
byte read is compared after the clock has stopped. All blocks are read, so reads through the page cache sooner or later
use everything that the kernel reads ahead. O_DIRECT reads nothing ahead. LevelDB is measured if plyvel is installed.
Needs disk space of about 25 times the blocks of a shape, and memory of about twice these blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.persistence_kv_cache.files import PageCache, add_disk_options, file_system
from benchmarks.persistence_kv_cache.placements import FILES, LMDB, PLACEMENTS, SEGMENTS, unavailable
from benchmarks.persistence_kv_cache.shapes import add_shape_options, chosen_shapes
from benchmarks.persistence_kv_cache.stores import CHURN_BEFORE, FULL, Measured, Shape, Store, restart
from benchmarks.persistence_kv_cache.tables import PLACEMENT_GROUP, RESTART_GROUP, placement_console_table
from benchmarks.remote_kv_cache.copies import NAIVE
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.report import console
from benchmarks.remote_kv_cache.shapes import Batch, size_text

ROUNDS: Final = 5
CALL_BLOCKS: Final = 512
RESTART_BYTES: Final = 4096
RESTART_BLOCKS: Final = 100_000
QUICK_BLOCKS: Final = 64


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser)
    parser.add_argument(
        "--restart-blocks",
        type=int,
        metavar="N",
        help=f"the number of blocks of {RESTART_BYTES} bytes; default: {RESTART_BLOCKS}; 0: none",
    )
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), metavar="NAME")
    add_disk_options(parser)


def measure(benchmark: Benchmark, name: str, shape: Shape, directory: Path, cache: PageCache) -> None:
    """Measure all placements with blocks of one shape."""
    missing = unavailable(benchmark.options.placements, shape.block_bytes, directory)
    names = [placement for placement in benchmark.options.placements if placement not in missing]
    before_sync_s: dict[str, list[float]] = {}
    placements: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        measured = []
        for number, placement in enumerate(names):
            benchmark.say(f"{name}: {placement}: filling and churning")
            measured.append(Measured(placement, directory / str(number), shape, cache))
            stack.callback(measured[-1].close)
            measured[-1].prepare()
        operations = [shape.naive()]
        for one in measured:
            operations += one.operations()
            before_sync_s |= one.before_sync_s
        there = {operation.name for operation in operations}
        without_limit = [operation.limit for operation in operations if operation.limit not in there | {""}]
        if without_limit:
            raise SystemExit(f"--placements lacks the limit of a placement that is to be measured: {without_limit[0]}")
        benchmark.measure(
            name,
            operations,
            references=(NAIVE,),
            unavailable=missing,
            group=PLACEMENT_GROUP,
            **shape.batch.described(shape.block_bytes),
            before_sync_s=before_sync_s,
            space=placements,
        )
        for seconds in before_sync_s.values():
            del seconds[0]  # from the uncounted round
        for one in measured:
            fresh, churned = one.fresh.used(), one.churned.used()
            placements[one.name] = {
                "files": fresh.files,
                "fresh": fresh.allocated_bytes / shape.total_bytes,
                "churned": churned.allocated_bytes / shape.total_bytes,
            }
    console().print(placement_console_table(benchmark.cases[-1]))


def measure_restart(benchmark: Benchmark, shape: Shape, directory: Path, cache: PageCache) -> None:
    """Measure restarts with many small blocks, which are written once and then found again."""
    names = [name for name in (LMDB, FILES, SEGMENTS) if name in benchmark.options.placements]
    if not names:
        return
    title = f"restart, {shape.batch.blocks} blocks of {size_text(shape.block_bytes)}"
    with contextlib.ExitStack() as stack:
        operations = []
        for number, placement in enumerate(names):
            benchmark.say(f"{title}: {placement}: filling")
            store = Store(placement, directory / str(number), shape, 1.0)
            stack.callback(store.close)
            store.fill()
            operations.append(restart(store, cache))
        benchmark.measure(
            title, operations, group=RESTART_GROUP, block_bytes=shape.block_bytes, blocks=shape.batch.blocks
        )


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, ROUNDS, _add_options)
    cache = PageCache(benchmark.options.drop)
    with tempfile.TemporaryDirectory(dir=benchmark.options.directory, ignore_cleanup_errors=True) as made:
        directory = Path(made)
        for name, (batch, block_bytes) in chosen_shapes(benchmark).items():
            benchmark.say(f"{name}: making {batch.blocks} blocks of {block_bytes} bytes")
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                measure(benchmark, name, Shape(batch, block_bytes), Path(folder), cache)
        restart_blocks = benchmark.options.restart_blocks
        if restart_blocks is None:
            restart_blocks = QUICK_BLOCKS if benchmark.quick else RESTART_BLOCKS
        if restart_blocks:
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                shape = Shape(Batch(restart_blocks, CALL_BLOCKS), RESTART_BYTES)
                measure_restart(benchmark, shape, Path(folder), cache)
        benchmark.finish(
            file_system=file_system(directory),
            cold=cache.how,
            churn=f"{CHURN_BEFORE} thirds before the first round, one in each; {FULL:.0%} full",
            plyvel=missing_module("plyvel") or "installed",
        )


if __name__ == "__main__":
    main()
