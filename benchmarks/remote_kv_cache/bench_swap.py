"""Measures swaps of 512 blocks, 64 in each call, in both directions between paged layer tensors and a pool of rows in
host memory.

The blocks are in random order in the tensors and in the pool. For tensors on the CPU the limit is one memcpy of the
same bytes, and every seventh block is compared. For tensors on a CUDA device the limit is one copy of all bytes in the
same direction, from or to page-locked memory. There every byte is compared, on the device. Needs torch; without it
nothing is measured. Copies from and to a device are queued by vLLM, or by calls of the driver if vLLM is missing.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.gpu.driver import install
from benchmarks.remote_kv_cache.copies import ONE_MEMCPY, VERIFIED_EVERY, no_cuda
from benchmarks.remote_kv_cache.harness import Benchmark, Operation, add_model_option, chosen_models, missing_module
from benchmarks.remote_kv_cache.shapes import BLOCK_TOKENS, Batch, Model, Rows, random_rows

if TYPE_CHECKING:
    import torch

    from kvstore_client.engine.paged.layout import Copy

SWAP_OUT: Final = "swap out"
SWAP_IN: Final = "swap in"
CUDA_OUT: Final = "CUDA swap out"
CUDA_IN: Final = "CUDA swap in"
PINNED_OUT: Final = "one pinned copy out"
PINNED_IN: Final = "one pinned copy in"


class Swaps:
    """The KV cache of one model on the CPU, a pool, and the operations between them.

    Every seventh copied block is compared, so that all calls are covered. Before and after an operation the cache holds
    `blocks`; an operation that writes the cache clears it first.
    """

    def __init__(self, model: Model, batch: Batch, blocks: Rows, device: str = "cpu") -> None:
        """``blocks``: the blocks' content, `(blocks, block_bytes)`; the layers of a block one after the other."""
        import torch

        from kvstore_client.engine.paged.layout import BlockLayout

        self._batch = batch
        self._blocks = blocks
        self.cache: torch.Tensor = torch.empty(
            (model.layers, batch.blocks, model.kv_heads, BLOCK_TOKENS, 2 * model.head_size),
            dtype=torch.bfloat16,
            device=device,
        )
        self._bytes = self.cache.view(torch.uint8).view(model.layers, batch.blocks, model.layer_bytes)
        self._bytes.copy_(torch.from_numpy(self._by_layer()))
        self._layout = BlockLayout({str(index): layer for index, layer in enumerate(self.cache)}, batch.blocks)
        self.pool = self._layout.pool(batch.blocks)
        random = np.random.default_rng(0)
        self._ids: list[int] = random.permutation(batch.blocks).tolist()
        self._slots: list[int] = random.permutation(batch.blocks).tolist()
        self._compared_ids, self._compared_slots = self._ids[::VERIFIED_EVERY], self._slots[::VERIFIED_EVERY]

    def out(self, name: str, limit: str) -> Operation:
        """Copy block ids[i] to slot slots[i]. All calls are started before it waits for them."""

        def run() -> None:
            self._each(lambda start, end: self._layout.swap_out(ids[start:end], self.pool, slots[start:end]))

        def verify() -> None:
            if not self._pool_is_right():
                raise AssertionError(f"{name}: the bytes of the pool differ from those of the blocks")

        slots, ids = self._slots, self._ids
        return Operation(name, run, self._blocks.nbytes, limit, before=self._clear_pool, after=verify)

    def into(self, name: str, limit: str) -> Operation:
        """Copy slot slots[i] to block ids[i], as one load."""

        def fill() -> None:
            self._fill_pool()
            self._clear_cache()

        def run() -> None:
            fence = self._layout.fence()
            self._each(lambda start, end: self._layout.swap_in(self.pool, slots[start:end], ids[start:end], fence))

        def verify() -> None:
            if not self._cache_is_right():
                raise AssertionError(f"{name}: the bytes of the cache differ from those of the pool")

        slots, ids = self._slots, self._ids
        return Operation(name, run, self._blocks.nbytes, limit, before=fill, after=verify)

    def memcpy(self) -> Operation:
        """The operation that copies the same bytes in memory order: the limit."""
        source = self._bytes.numpy().reshape(self.pool.shape)

        def run() -> None:
            for start, end in self._batch.calls():
                np.copyto(self.pool[start:end], source[start:end])

        def verify() -> None:
            if not np.array_equal(self.pool[::VERIFIED_EVERY], source[::VERIFIED_EVERY]):
                raise AssertionError(f"{ONE_MEMCPY}: the bytes of the pool differ from those of the cache")

        return Operation(ONE_MEMCPY, run, self._blocks.nbytes, before=self._clear_pool, after=verify)

    def _by_layer(self) -> Rows:
        """The blocks, `(layers, blocks, layer_bytes)`."""
        layers, blocks, layer_bytes = self._bytes.shape
        return self._blocks.reshape(blocks, layers, layer_bytes).swapaxes(0, 1)

    def _each(self, swap: Callable[[int, int], Copy]) -> None:
        for copy in [swap(start, end) for start, end in self._batch.calls()]:
            copy.wait()

    # ---- the comparisons ----------------------------------------------------------------------------------------

    def _clear_pool(self) -> None:
        self.pool[self._compared_slots] = 0
        self.pool[::VERIFIED_EVERY] = 0  # the rows that the memcpy is to write

    def _fill_pool(self) -> None:
        self.pool[self._compared_slots] = self._blocks[self._compared_ids]

    def _clear_cache(self) -> None:
        self._bytes[:, self._compared_ids] = 0

    def _pool_is_right(self) -> bool:
        return np.array_equal(self.pool[self._compared_slots], self._blocks[self._compared_ids])

    def _cache_is_right(self) -> bool:
        found = self._bytes[:, self._compared_ids].numpy()
        return np.array_equal(found, self._by_layer()[:, self._compared_ids])


class DeviceSwaps(Swaps):
    """The same on a CUDA device, where every byte is compared: the pool is filled and read by one copy of all of it."""

    def __init__(self, model: Model, batch: Batch, blocks: Rows) -> None:
        import torch

        super().__init__(model, batch, blocks, "cuda")
        self._wanted = self._bytes.clone()
        self._rows: Any = torch.from_numpy(self.pool)
        # The rows of a correct pool: slot slots[i] has block ids[i].
        block_of_slot = torch.empty(batch.blocks, dtype=torch.int64)
        block_of_slot[self._slots] = torch.tensor(self._ids)
        by_slot = self._wanted[:, block_of_slot.to("cuda")].transpose(0, 1)
        self._wanted_rows: Any = by_slot.reshape(self.pool.shape)
        self._layout.swap_out([0], self.pool, [0]).wait()  # from here on, the code that makes the copies is known

    def pinned_copies(self) -> list[Operation]:
        """The operations that copy all bytes in one asynchronous copy, one for each direction."""
        import torch

        rows, cache = self._rows.view(-1), self._bytes.view(-1)

        def run(target: Any, source: Any) -> Callable[[], None]:
            def copy() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            return copy

        def verify() -> None:
            if not torch.equal(self._uploaded().view(-1), cache):
                raise AssertionError("one pinned copy: the bytes of pool and cache differ")

        return [
            Operation(PINNED_OUT, run(rows, cache), self._blocks.nbytes, before=self._clear_pool, after=verify),
            Operation(PINNED_IN, run(cache, rows), self._blocks.nbytes, before=self._clear_cache, after=verify),
        ]

    def _uploaded(self) -> Any:
        """Return the pool's bytes on the device."""
        return self._rows.to("cuda")

    def _clear_pool(self) -> None:
        import torch

        self._bytes.copy_(self._wanted)
        self._rows.copy_(torch.zeros_like(self._wanted_rows))
        torch.cuda.synchronize()

    def _fill_pool(self) -> None:
        self._rows.copy_(self._wanted_rows)

    def _clear_cache(self) -> None:
        import torch

        self._bytes.zero_()
        torch.cuda.synchronize()

    def _pool_is_right(self) -> bool:
        import torch

        return torch.equal(self._uploaded(), self._wanted_rows)

    def _cache_is_right(self) -> bool:
        import torch

        return torch.equal(self._bytes, self._wanted)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    if why := missing_module("torch"):
        benchmark.skip("swap", why)
        return
    no_device = no_cuda()
    if no_device:
        benchmark.skip(f"{CUDA_OUT}, {CUDA_IN}", no_device)
    copies = None if no_device else install()
    importlib.import_module("kvstore_client.engine.paged.layout")
    gc.freeze()  # collecting garbage in torch before each operation would take longer than the operations
    for model in chosen_models(benchmark.options):
        benchmark.say(f"{model.name}: making {benchmark.batch.blocks} blocks of {model.block_bytes} bytes")
        blocks = random_rows(benchmark.batch.blocks, model.block_bytes)
        host = Swaps(model, benchmark.batch, blocks)
        operations = [host.memcpy(), host.out(SWAP_OUT, ONE_MEMCPY), host.into(SWAP_IN, ONE_MEMCPY)]
        described: dict[str, Any] = benchmark.batch.described(model.block_bytes)
        if copies is not None:
            device = DeviceSwaps(model, benchmark.batch, blocks)
            operations += [*device.pinned_copies(), device.out(CUDA_OUT, PINNED_OUT), device.into(CUDA_IN, PINNED_IN)]
            described["copies"] = copies.how
        benchmark.measure(
            model.name,
            operations,
            unavailable=dict.fromkeys((CUDA_OUT, CUDA_IN), no_device) if no_device else {},
            **described,
        )
    benchmark.finish()


if __name__ == "__main__":
    main()
