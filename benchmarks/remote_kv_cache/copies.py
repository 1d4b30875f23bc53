"""The ways to move 512 blocks within memory, each with one thread unless stated otherwise.

The pool holds the blocks, which are used in random order; the rows hold them packed. Viewed with the shape `(blocks,
block_bytes)`, the memory is laid out block by block; with `(layers, blocks, layer_bytes)`, layer by layer. Both have
the same number of bytes, so all ways move the same number. Operations that read by block id (`rows[i] = pool[ids[i]]`)
or write by block id (`rows[ids[i]] = pool[i]`) are compared with NumPy's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.remote_kv_cache.harness import Operation, missing_module
from benchmarks.remote_kv_cache.shapes import Batch, Model, Rows, random_rows
from kvstore._cext import gather, scatter

ONE_MEMCPY: Final = "one memcpy"
NAIVE: Final = "block-to-block naive"
NAIVE_WRITE: Final = "block-to-block naive, write"
GATHER: Final = "cython gather"
SCATTER: Final = "cython scatter"
LAYERS: Final = "layer-to-layer naive"
FANCY: Final = "fancy index"
INDEX_COPY: Final = "index_copy_"
SWAP_IN: Final = "swap in"
SWAP_OUT: Final = "swap out"
VERIFIED_EVERY: Final = 7  # every seventh row; a prime, so that all calls and layers are covered

Copy = Callable[[int, int], object]


class Copies:
    """A pool, the rows, and the operations between them."""

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        self.pool = random_rows(batch.blocks, model.block_bytes)
        self.rows = np.zeros_like(self.pool)
        self.ids: npt.NDArray[np.int64] = np.random.default_rng(0).permutation(batch.blocks)
        shape = (model.layers, batch.blocks, model.layer_bytes)
        self.pool_layers = self.pool.reshape(shape)
        self.row_layers = self.rows.reshape(shape)

    @property
    def moved(self) -> int:
        """The bytes that one operation moves."""
        return self.pool.nbytes

    def operation(self, name: str, copy: Copy, expected: Callable[[], Rows]) -> Operation:
        """Return the operation that runs `copy(first, last)` for every call. `expected()`: every `VERIFIED_EVERY`-th of
        the rows that it must leave."""

        def run() -> None:
            for start, end in self.batch.calls():
                copy(start, end)

        def verify() -> None:
            if not np.array_equal(self.rows[::VERIFIED_EVERY], expected()):
                raise AssertionError(f"{name}: the bytes of the rows differ from those of the blocks")

        limit = "" if name == ONE_MEMCPY else ONE_MEMCPY
        return Operation(name, run, self.moved, limit, before=partial(self.rows.fill, 0), after=verify)

    # ---- the expected rows ---------------------------------------------------------------------------------

    def in_order(self) -> Rows:
        """Row i is block i."""
        return self.pool[::VERIFIED_EVERY]

    def read_by_id(self) -> Rows:
        """Row i is block ids[i]."""
        return self.pool[self.ids[::VERIFIED_EVERY]]

    def written_by_id(self) -> Rows:
        """Row ids[i] is block i."""
        return self.pool[np.argsort(self.ids)[::VERIFIED_EVERY]]

    def layers_copied(self) -> Rows:
        """Block i is block ids[i] in every layer."""
        layers = self.pool_layers[:, self.ids]
        return layers.reshape(self.rows.shape)[::VERIFIED_EVERY]

    def layers_packed(self) -> Rows:
        """Row i is block ids[i] of all layers, one after the other."""
        layers = self.pool_layers[:, self.ids[::VERIFIED_EVERY]]
        return np.ascontiguousarray(layers.swapaxes(0, 1)).reshape(-1, self.model.block_bytes)

    # ---- the copies ----------------------------------------------------------------------------------------------

    def block_operations(self) -> list[Operation]:
        """Return the block-wise operations: one memcpy, NumPy rows, gather and scatter."""
        pool, rows, ids = self.pool, self.rows, self.ids

        def memcpy(start: int, end: int) -> None:
            np.copyto(rows[start:end], pool[start:end])

        def read(start: int, end: int) -> None:
            for number in range(start, end):
                rows[number] = pool[ids[number]]

        def write(start: int, end: int) -> None:
            for number in range(start, end):
                rows[ids[number]] = pool[number]

        def gather_rows(start: int, end: int) -> None:
            gather([pool], ids[start:end], rows[start:end])

        def scatter_rows(start: int, end: int) -> None:
            scatter(pool[start:end], [rows], ids[start:end])

        return [
            self.operation(ONE_MEMCPY, memcpy, self.in_order),
            self.operation(NAIVE, read, self.read_by_id),
            self.operation(NAIVE_WRITE, write, self.written_by_id),
            self.operation(GATHER, gather_rows, self.read_by_id),
            self.operation(SCATTER, scatter_rows, self.written_by_id),
        ]

    def layer_operations(self) -> list[Operation]:
        """Return the layer-wise operations: NumPy, and gather, which packs the layers of a block into one row."""
        source, target, ids = list(self.pool_layers), list(self.row_layers), self.ids

        def copy(start: int, end: int) -> None:
            for mine, theirs in zip(target, source, strict=True):
                for number in range(start, end):
                    mine[number] = theirs[ids[number]]

        def pack(start: int, end: int) -> None:
            gather(source, ids[start:end], self.rows[start:end])

        return [
            self.operation(LAYERS, copy, self.layers_copied),
            self.operation(f"{GATHER}, from layers", pack, self.layers_packed),
        ]

    def fancy_index(self) -> Operation:
        """Return the operations that index by an array in NumPy, which copies twice."""

        def copy(start: int, end: int) -> None:
            self.rows[start:end] = self.pool[self.ids[start:end]]

        return self.operation(FANCY, copy, self.read_by_id)

    def index_copy(self) -> list[Operation]:
        """Return torch's `index_copy_` of 16-bit elements, on one thread; nothing if torch is missing."""
        if missing_module("torch"):
            return []
        import torch

        torch.set_num_threads(1)
        pool, rows = (torch.from_numpy(array).view(torch.bfloat16) for array in (self.pool, self.rows))
        ids = torch.from_numpy(self.ids)

        def copy(start: int, end: int) -> None:
            rows.index_copy_(0, ids[start:end], pool[start:end])

        return [self.operation(INDEX_COPY, copy, self.written_by_id)]

    def swaps(self) -> list[Operation]:
        """Return the copies between this memory, page-locked, and a CUDA device; nothing if there is no device."""
        if no_cuda():
            return []
        import torch

        pool: Any = torch.from_numpy(self.pool).pin_memory()
        device: Any = torch.empty_like(pool, device="cuda")
        back: Any = torch.empty_like(pool).pin_memory()

        def swap(target: Any, source: Any, start: int, end: int) -> None:
            for number in range(start, end):
                target[number].copy_(source[self.ids[number]], non_blocking=True)
            torch.cuda.synchronize()

        return [
            Operation(SWAP_IN, self._each(partial(swap, device, pool)), self.moved, ONE_MEMCPY),
            Operation(SWAP_OUT, self._each(partial(swap, back, device)), self.moved, ONE_MEMCPY),
        ]

    def _each(self, copy: Copy) -> Callable[[], None]:
        def run() -> None:
            for start, end in self.batch.calls():
                copy(start, end)

        return run


def no_cuda() -> str:
    """Return why blocks cannot be swapped; empty if they can."""
    if missing_module("torch"):
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "not available, no CUDA device"
