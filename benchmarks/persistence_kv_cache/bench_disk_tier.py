"""Compares a server that has a disk tier with plain pread and pwrite on the same file system, in each round.

*Write*: `set` until every block is on disk, and pwrite of the same blocks over an allocated file (O_DIRECT, and
buffered with fsync). *Read*: blocks that are on disk and not in memory, and pread in the same order. Before each read,
the server is restarted (or its memory is filled with other blocks), and the page cache is emptied. Blocks are read in
the order in which they were written, as a prompt's blocks are, or with `--order random` in random order. *Hybrid*:
blocks in memory, on a server with a disk tier and on one without, both running. *Restart*: the time after a clean stop,
with an empty page cache, until the server is ready and until every block is readable. The bytes read are compared after
the clock has stopped; after a restart, those of a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.persistence_kv_cache import names
from benchmarks.persistence_kv_cache.disk_server import Server, disk_state, wait_for, wait_until_clean
from benchmarks.persistence_kv_cache.files import PageCache, add_disk_options, file_system
from benchmarks.persistence_kv_cache.placements import PLAIN, PLAIN_DIRECT
from benchmarks.persistence_kv_cache.plain_files import Disk, aligned_blocks, plain_files, plain_read
from benchmarks.persistence_kv_cache.restarts import measure_restart
from benchmarks.persistence_kv_cache.shapes import add_shape_options, chosen_shapes
from benchmarks.persistence_kv_cache.stores import THREADS
from benchmarks.persistence_kv_cache.tables import target_lines
from benchmarks.remote_kv_cache.harness import Benchmark, Operation, nothing
from benchmarks.remote_kv_cache.report import console
from benchmarks.remote_kv_cache.shapes import random_keys, random_rows
from benchmarks.remote_kv_cache.transfers import Blocks, kvstore_operations
from kvstore_client import KVStoreClient

ROUNDS: Final = 7
SPARE_BYTES: Final = 256 << 20
READ_MEMORY_BYTES: Final = 128 << 20  # the least memory of the server that is read


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser)
    parser.add_argument("--parts", nargs="+", choices=names.PARTS, default=list(names.PARTS), metavar="PART")
    parser.add_argument("--million", action="store_true", help="restart with 1 000 000 blocks, too")
    parser.add_argument(
        "--not-in-memory",
        choices=("restart", "eviction"),
        default="restart",
        help="how blocks leave memory before they are read; restart works only if the warm start is off",
    )
    parser.add_argument("--order", choices=("written", "random"), default="written", help="the order of reads")
    parser.add_argument(
        "--server-arguments", default="", metavar="TEXT", help="further arguments of servers with a disk tier"
    )
    add_disk_options(parser)


def measure_write(benchmark: Benchmark, disk: Disk, name: str, blocks: Blocks) -> None:
    """Measure sets until the blocks are on disk."""
    acknowledged_s: list[float] = []
    count = blocks.batch.blocks
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(plain_files(disk, blocks))
        server = stack.enter_context(
            disk.server(blocks.total_bytes * 5 // 4 + SPARE_BYTES, blocks.total_bytes, "write")
        )
        server.start()
        client = stack.enter_context(server.connect(name, blocks.block_bytes))

        def before_set() -> None:
            client.sync()
            client.delete(blocks.keys)
            wait_for("deletion", lambda: disk_state(client).blocks == 0)
            wait_until_clean(client)
            disk.drop_cache()

        def set_all() -> None:
            begin = time.perf_counter()
            for start, end in blocks.batch.calls():
                client.set(blocks.keys[start:end], blocks.source[start:end], deferred=True)
            acknowledged_s.append(time.perf_counter() - begin)
            wait_for("write-behind", partial(all_written, client, count))

        def written(which: str, file: str, threads: int) -> Operation:
            def before() -> None:
                plain[file].forget()
                disk.drop_cache()

            return Operation(which, partial(plain[file].write, threads), blocks.total_bytes, before=before)

        operations = [written(names.PLAIN_WRITE_BUFFERED, PLAIN, 1)]
        if PLAIN_DIRECT in plain:
            operations.append(written(names.PLAIN_WRITE_DIRECT, PLAIN_DIRECT, 1))
            operations.append(written(names.PLAIN_WRITE_DIRECT_4, PLAIN_DIRECT, THREADS))
        references = [operation.name for operation in operations]
        limit = names.PLAIN_WRITE_DIRECT if PLAIN_DIRECT in plain else names.PLAIN_WRITE_BUFFERED
        operations.append(Operation(names.SERVER_WRITE, set_all, blocks.total_bytes, limit, before=before_set))
        measure(benchmark, disk, names.WRITE_PART, name, blocks, operations, references, acknowledged_s=acknowledged_s)
        del acknowledged_s[0]  # from the uncounted round


def all_written(client: KVStoreClient, count: int) -> bool:
    """Return whether the disk tier holds `count` blocks and has none left to write."""
    state = disk_state(client)
    return state.dirty_blocks == 0 and state.blocks == count


def read_memory_bytes(blocks: Blocks) -> int:
    """Return the bytes of memory of the server whose blocks are read from disk: room for two of the eight calls, so
    that one call always fits."""
    return max(READ_MEMORY_BYTES, 2 * blocks.batch.per_call * blocks.block_bytes)


class ColdReader:
    """A server whose blocks are on disk and not in memory whenever `prepare` returns. `from_disk`: by read operation,
    the shares of blocks that the server reports as read from disk."""

    def __init__(self, benchmark: Benchmark, disk: Disk, server: Server, name: str, blocks: Blocks) -> None:
        self._by_restart = benchmark.options.not_in_memory == "restart"
        self._disk = disk
        self._server = server
        self._name = name
        self._blocks = blocks
        self._filler = -(-2 * read_memory_bytes(blocks) // blocks.block_bytes)
        self._reads_before = 0
        self.from_disk: dict[str, list[float]] = {}
        server.start()
        self.client = server.connect(name, blocks.block_bytes)
        order = disk.order(blocks.batch.blocks)
        for start, end in blocks.batch.calls():
            numbers = order[start:end]
            self.client.set(blocks.keys[numbers], blocks.source[numbers])
            wait_until_clean(self.client)  # memory is small, and blocks that are not on disk yet must not be evicted

    def close(self) -> None:
        self.client.close()

    def prepare(self) -> None:
        """Remove the blocks from memory and empty the page cache."""
        if self._by_restart:
            self._restart()
        else:
            self._fill_memory()
        self._disk.drop_cache()
        self._reads_before = disk_state(self.client).reads
        self._blocks.clear()

    def _restart(self) -> None:
        self.client.close()
        self._server.stop()
        self._server.start()
        self.client = self._server.connect(self._name, self._blocks.block_bytes)
        wait_for("recovery", lambda: bool(self.client.contains(self._blocks.keys).all()))

    def _fill_memory(self) -> None:
        """Set twice as many other blocks as memory holds, and delete them. Memory then holds none of the blocks to
        read."""
        keys = random_keys(self._filler, seed=77)
        rows = random_rows(min(64, self._filler), self._blocks.block_bytes, seed=78)
        for start in range(0, self._filler, len(rows)):
            part = keys[start : start + len(rows)]
            self.client.set(part, rows[: len(part)])
        wait_until_clean(self.client)
        self.client.delete(keys)
        wait_until_clean(self.client)

    def operation(self, which: str, call: Callable[[int, int], object], limit: str) -> Operation:
        """Return the operation that reads all blocks."""
        shares = self.from_disk.setdefault(which, [])

        def after() -> None:
            reads = disk_state(self.client).reads - self._reads_before
            shares.append(reads / self._blocks.batch.blocks)
            self._blocks.verify()

        run = self._blocks.each_call(call)
        return Operation(which, run, self._blocks.total_bytes, limit, before=self.prepare, after=after)

    def get_into(self, start: int, end: int) -> None:
        self.client.get_into(self._blocks.keys[start:end], self._blocks.out[start:end])

    def stream_get(self, start: int, end: int) -> None:
        rows = self._blocks.out[start:end]
        for position, block in self.client.stream_get(self._blocks.keys[start:end]):
            rows[position] = np.frombuffer(block, dtype=np.uint8)


def measure_read(benchmark: Benchmark, disk: Disk, name: str, blocks: Blocks) -> None:
    """Measure cold reads from disk."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(plain_files(disk, blocks))
        memory = read_memory_bytes(blocks)
        server = stack.enter_context(disk.server(memory, blocks.total_bytes + 2 * memory, "read"))
        reader = ColdReader(benchmark, disk, server, name, blocks)
        stack.callback(reader.close)

        operations = []
        for file, one, several in (
            (PLAIN, names.PLAIN_READ_BUFFERED, names.PLAIN_READ_BUFFERED_4),
            (PLAIN_DIRECT, names.PLAIN_READ_DIRECT, names.PLAIN_READ_DIRECT_4),
        ):
            for which, threads in ((one, 1), (several, THREADS)):
                if file in plain:
                    operations.append(plain_read(which, plain[file], threads, blocks, disk))
        references = [operation.name for operation in operations]
        limit = names.PLAIN_READ_DIRECT if PLAIN_DIRECT in plain else names.PLAIN_READ_BUFFERED
        for which, call in zip(names.SERVER_READS, (reader.get_into, reader.stream_get), strict=True):
            operations.append(reader.operation(which, call, limit))
        measure(benchmark, disk, names.READ_PART, name, blocks, operations, references, from_disk=reader.from_disk)
        for which, shares in reader.from_disk.items():
            del shares[0]  # from the uncounted round
            if min(shares) < 1:
                benchmark.say(f"[red]{which}: only {min(shares):.0%} of the blocks came from disk[/red]")


def measure_hybrid(benchmark: Benchmark, disk: Disk, name: str, blocks: Blocks) -> None:
    """Measure blocks in memory, with and without a disk tier. All blocks that an operation leaves dirty are written
    before the next operation begins, so a set competes only with its own write-behind. Memory is a few times the size
    of the blocks that are set. If more than half of it were dirty, sets would be slowed to the speed of the disk, which
    `write` measures."""
    memory = blocks.total_bytes * 5
    operations = []
    with contextlib.ExitStack() as stack:
        servers = {
            names.MEMORY_ONLY: stack.enter_context(Server(memory)),
            names.HYBRID: stack.enter_context(disk.server(memory, blocks.total_bytes, "hybrid")),
        }
        for prefix, server in servers.items():
            server.start()
            client = stack.enter_context(server.connect(name, blocks.block_bytes))
            settle = partial(wait_until_clean, client) if prefix == names.HYBRID else nothing
            for operation in kvstore_operations(client, blocks):
                operations.append(
                    dataclasses.replace(
                        operation,
                        name=prefix + operation.name,
                        limit=names.MEMORY_ONLY + operation.name if prefix == names.HYBRID else "",
                        before=partial(in_turn, operation.before, settle),
                        after=partial(in_turn, operation.after, settle),
                    )
                )
        measure(benchmark, disk, names.HYBRID_PART, name, blocks, operations, ())


def in_turn(*steps: Callable[[], object]) -> None:
    """Run these steps one after the other."""
    for step in steps:
        step()


def measure(
    benchmark: Benchmark,
    disk: Disk,
    part: str,
    name: str,
    blocks: Blocks,
    operations: list[Operation],
    references: list[str] | tuple[str, ...],
    **parameters: object,
) -> None:
    """Measure one case, named after its part and shape."""
    benchmark.measure(
        f"{part}, {name}",
        operations,
        references=references,
        unavailable=disk.missing(blocks.block_bytes),
        group=part,
        shape=name,
        **blocks.batch.described(blocks.block_bytes),
        **parameters,
    )


MEASURES: Final = {
    names.WRITE_PART: measure_write,
    names.READ_PART: measure_read,
    names.HYBRID_PART: measure_hybrid,
}


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, ROUNDS, _add_options)
    options = benchmark.options
    with tempfile.TemporaryDirectory(dir=options.directory, ignore_cleanup_errors=True) as made:
        for name, (batch, block_bytes) in chosen_shapes(benchmark).items():
            blocks = aligned_blocks(batch, block_bytes)
            for part, one in MEASURES.items():
                if part in options.parts:
                    with tempfile.TemporaryDirectory(dir=made) as folder:
                        one(benchmark, Disk(benchmark, Path(folder)), name, blocks)
            del blocks
        if names.RESTART_PART in options.parts:
            counts = [2_000] if benchmark.quick else [100_000, 1_000_000] if options.million else [100_000]
            for count in counts:
                with tempfile.TemporaryDirectory(dir=made) as folder:
                    disk = Disk(benchmark, Path(folder))
                    measure_restart(benchmark, disk.server, disk.drop_cache, count)
        for line in target_lines(benchmark.cases):
            console().print(line)
        benchmark.finish(
            file_system=file_system(Path(made)),
            cold=PageCache(options.drop).how,
            not_in_memory=options.not_in_memory,
            order=options.order,
            server_arguments=options.server_arguments,
        )


if __name__ == "__main__":
    main()
