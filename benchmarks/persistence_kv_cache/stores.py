"""A placement that is measured: the blocks that it must hold, and the operations that run in each round.

Every placement has two stores. The *fresh* one has room for exactly its blocks, and is made again for every write. The
*churned* one is 95 % full and is kept. A third of its blocks, chosen at random, is replaced by others, call by call, as
eviction does: several times before the first round and once in each round. Block number k has its own key and holds row
k modulo the number of rows, so that a block returned in place of another is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from benchmarks.persistence_kv_cache.files import PageCache, Space, aligned_rows, space
from benchmarks.persistence_kv_cache.placements import (
    MAPPED,
    PLACEMENTS,
    PLAIN,
    PLAIN_DIRECT,
    SEGMENTS_DIRECT,
    empty,
)
from benchmarks.remote_kv_cache.copies import NAIVE
from benchmarks.remote_kv_cache.harness import Operation
from benchmarks.remote_kv_cache.shapes import Batch, Rows, random_rows

FULL: Final = 0.95
CHURN_BEFORE: Final = 3  # how often a third is replaced before the first round
THREADS: Final = 4

WRITE: Final = "write"
COLD: Final = "cold read"
WARM: Final = "warm read"
REPLACE: Final = "replace a third"
CHURNED: Final = "cold read after churn"
RESTART: Final = "restart"


def threaded(measure: str, threads: int = THREADS) -> str:
    """The name of a measure with this number of threads."""
    return measure if threads == 1 else f"{measure}, {threads} threads"


def operation_name(placement: str, measure: str) -> str:
    return f"{placement}: {measure}"


def limit_of(placement: str) -> str:
    """The name of the plain file that is the limit of a placement: the one with the same way of I/O. Empty for plain
    files."""
    if placement in (PLAIN, PLAIN_DIRECT):
        return ""
    return PLAIN_DIRECT if placement == SEGMENTS_DIRECT else PLAIN


def block_key(number: int) -> bytes:
    """Return the key of a block number. Keys are spread evenly, as prefix hashes are."""
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little"))


class Shape:
    """The blocks and the memory to read into, shared by all placements. Rows are page-aligned, for O_DIRECT."""

    def __init__(self, batch: Batch, block_bytes: int) -> None:
        self.batch = batch
        self.block_bytes = block_bytes
        self.source = aligned_rows(batch.blocks, block_bytes)
        self.source[:] = random_rows(batch.blocks, block_bytes)
        self.out = aligned_rows(batch.blocks, block_bytes)
        self.order: npt.NDArray[np.int64] = np.random.default_rng(0).permutation(batch.blocks)

    @property
    def total_bytes(self) -> int:
        """The bytes of all blocks."""
        return self.batch.blocks * self.block_bytes

    def row_of(self, number: int) -> Rows:
        """The row that block `number` holds."""
        row: Rows = self.source[number % self.batch.blocks]
        return row

    def naive(self) -> Operation:
        """Copies the same blocks in the same random order, from memory to memory, in a loop of NumPy copies."""

        def copy() -> None:
            for position, number in enumerate(self.order):
                self.out[position] = self.source[number]

        return Operation(
            NAIVE, copy, self.total_bytes, before=self.clear, after=partial(self.verify, NAIVE, self.order)
        )

    def clear(self) -> None:
        """Clear the memory of earlier reads."""
        self.out.fill(0)

    def verify(self, who: str, numbers: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Raise unless row i is block numbers[i]."""
        for position, number in enumerate(numbers):
            if not np.array_equal(self.out[position], self.row_of(int(number))):
                raise AssertionError(f"{who}: block {number}: the bytes read differ from those written")


class Store:
    """One placement in one directory, and the numbers of the blocks that it must hold."""

    def __init__(self, name: str, directory: Path, shape: Shape, full: float) -> None:
        self.name = name
        self.directory = directory
        self._make = partial(PLACEMENTS[name], directory, ceil(shape.batch.blocks / full), shape.block_bytes)
        self._shape = shape
        self._random = np.random.default_rng(1)
        self._next = shape.batch.blocks
        self.numbers = np.arange(shape.batch.blocks)
        self._is_open = False
        self.renew()

    def renew(self) -> None:
        """Empty the store and open it."""
        self.close()
        empty(self.directory)
        self.placement = self._make()
        self.open()

    def open(self) -> None:
        self.placement.open()
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self.placement.close()
            self._is_open = False

    def fill(self, threads: int = 1) -> float:
        """Write the first blocks. Return the seconds without the `sync`."""
        keys = [block_key(number) for number in range(self._shape.batch.blocks)]
        begin = time.perf_counter()
        for start, end in self._shape.batch.calls():
            self.placement.write(keys[start:end], self._shape.source[start:end], threads)  # type: ignore[arg-type]
        elapsed = time.perf_counter() - begin
        self.placement.sync()
        return elapsed

    def replace_third(self) -> None:
        """Evict a third of the blocks, chosen at random, and write as many others, call by call."""
        count = len(self.numbers) // 3
        victims = self._random.permutation(len(self.numbers))[:count]
        per_call = self._shape.batch.per_call
        for start in range(0, count, per_call):
            positions = victims[start : start + per_call]
            new = np.arange(self._next, self._next + len(positions))
            self._next += len(positions)
            self.placement.delete([block_key(int(number)) for number in self.numbers[positions]])
            rows = [self._shape.row_of(int(number)) for number in new]
            self.placement.write([block_key(int(number)) for number in new], rows, 1)
            self.numbers[positions] = new
        self.placement.sync()

    def read_all(self, keys: Sequence[bytes], threads: int) -> None:
        """Read all blocks into the shape's `out`, call by call."""
        for start, end in self._shape.batch.calls():
            self.placement.read(keys[start:end], self._shape.out[start:end], threads)

    def in_random_order(self) -> npt.NDArray[np.int64]:
        """The numbers of the blocks, in a random order of their places that is always the same."""
        return self.numbers[self._shape.order]

    def used(self) -> Space:
        """The space on disk after a sync."""
        return space(self.directory)


class Measured:
    """The operations of one placement. `before_sync_s`: the seconds of every write without its `sync`, by operation."""

    def __init__(self, name: str, directory: Path, shape: Shape, cache: PageCache) -> None:
        self.name = name
        self._shape = shape
        self._cache = cache
        self.fresh = Store(name, directory / "fresh", shape, 1.0)
        self.churned = Store(name, directory / "churned", shape, FULL)
        self.before_sync_s: dict[str, list[float]] = {}

    def close(self) -> None:
        self.fresh.close()
        self.churned.close()

    def prepare(self) -> None:
        """Fill the churned store, and replace its blocks several times."""
        self.churned.fill()
        for _ in range(CHURN_BEFORE):
            self.churned.replace_third()

    def operations(self) -> list[Operation]:
        """All operations that the placement supports; each write comes before the reads of its blocks."""
        only_read = self.name == MAPPED  # its files are written as those of FilePerBlock
        writers = (1, THREADS) if self.fresh.placement.parallel_writes and not only_read else (1,)
        operations = [self._write(threads) for threads in writers]
        for threads in (1, THREADS):
            operations.append(self._read(COLD, self.fresh, threads))
            if self.name not in (PLAIN_DIRECT, SEGMENTS_DIRECT):  # they use no page cache
                operations.append(self._read(WARM, self.fresh, threads))
        if only_read:
            return operations
        operations.append(self._replace())
        operations += [self._read(CHURNED, self.churned, threads) for threads in (1, THREADS)]
        if self.name not in (PLAIN, PLAIN_DIRECT):
            operations.append(restart(self.fresh, self._cache))
        return operations

    def _operation(
        self,
        measure: str,
        run: Callable[[], None],
        moved: int,
        before: Callable[[], object],
        after: Callable[[], object],
    ) -> Operation:
        limit = limit_of(self.name)
        named_limit = operation_name(limit, measure) if limit else ""
        return Operation(operation_name(self.name, measure), run, moved, named_limit, before, after)

    def _write(self, threads: int) -> Operation:
        measure = threaded(WRITE, threads)
        before_sync = self.before_sync_s.setdefault(operation_name(self.name, measure), [])

        def before() -> None:
            self.fresh.renew()
            self._cache.drop(self.fresh.directory)

        def run() -> None:
            before_sync.append(self.fresh.fill(threads))

        return self._operation(measure, run, self._shape.total_bytes, before, lambda: None)

    def _replace(self) -> Operation:
        moved = self._shape.batch.blocks // 3 * self._shape.block_bytes
        settle = partial(self._cache.drop, self.churned.directory)
        return self._operation(REPLACE, self.churned.replace_third, moved, settle, lambda: None)

    def _read(self, measure: str, store: Store, threads: int) -> Operation:
        numbers: list[int] = []
        keys: list[bytes] = []

        def before() -> None:
            numbers[:] = [int(number) for number in store.in_random_order()]
            keys[:] = [block_key(number) for number in numbers]
            if measure == WARM:
                store.read_all(keys, 1)
            else:
                store.close()
                self._cache.drop(store.directory)
                store.open()
            self._shape.clear()

        return self._operation(
            threaded(measure, threads),
            lambda: store.read_all(keys, threads),
            self._shape.total_bytes,
            before,
            lambda: self._shape.verify(f"{self.name}, {measure}", numbers),
        )


def restart(store: Store, cache: PageCache) -> Operation:
    """Open a store with cold caches until all its keys are known."""
    found: set[bytes] = set()

    def before() -> None:
        store.close()
        cache.drop(store.directory)

    def run() -> None:
        store.open()
        found.update(store.placement.keys())

    def after() -> None:
        if found != {block_key(int(number)) for number in store.numbers}:
            raise AssertionError(f"{store.name}: {len(found)} keys were found, and not exactly those that were written")
        found.clear()

    return Operation(operation_name(store.name, RESTART), run, before=before, after=after)
