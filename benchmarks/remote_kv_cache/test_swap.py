"""Swapping 512 blocks, 64 a call, between paged layer tensors and a pool of rows in host memory, out and in.

The blocks lie in the tensors, and in the pool, in random order. Tensors on the CPU: the limit is one memcpy of the
same bytes. Tensors on a CUDA device: the limit is one copy of all bytes in the same direction, from or to page-locked
memory. Needs torch; without it nothing is measured. The CUDA part needs a device, and vLLM for its batched copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.remote_kv_cache.copies import ONE_MEMCPY, VERIFIED_EVERY, no_cuda
from benchmarks.remote_kv_cache.harness import Benchmark, Operation, add_model_option, chosen_models, missing_module
from benchmarks.remote_kv_cache.shapes import BLOCK_TOKENS, Batch, Model, Rows, random_rows

if TYPE_CHECKING:
    from kvstore_client.vllm.connector.layout import Copy

SWAP_OUT: Final = "swap out"
SWAP_IN: Final = "swap in"
CUDA_OUT: Final = "CUDA swap out"
CUDA_IN: Final = "CUDA swap in"
PINNED_OUT: Final = "one pinned copy out"
PINNED_IN: Final = "one pinned copy in"


class Swaps:
    """The KV cache of one model on one device, a pool, and the operations between them."""

    def __init__(self, model: Model, batch: Batch, blocks: Rows, device: str) -> None:
        """``blocks``: the blocks' content, `(blocks, block_bytes)`; the layers of a block one after the other."""
        import torch

        from kvstore_client.vllm.connector.layout import BlockLayout

        self._batch = batch
        self._blocks = blocks
        self.cache: torch.Tensor = torch.empty(
            (model.layers, batch.blocks, model.kv_heads, BLOCK_TOKENS, 2 * model.head_size),
            dtype=torch.bfloat16,
            device=device,
        )
        self._layout = BlockLayout({str(index): layer for index, layer in enumerate(self.cache)}, batch.blocks)
        self.pool = self._layout.pool(batch.blocks)
        random = np.random.default_rng(0)
        self._ids: list[int] = random.permutation(batch.blocks).tolist()
        self._slots: list[int] = random.permutation(batch.blocks).tolist()
        self._bytes = self.cache.view(torch.uint8).view(model.layers, batch.blocks, model.layer_bytes)

    def out(self, name: str, limit: str) -> Operation:
        """Copy block ids[i] to slot slots[i]. All calls are made, and then waited for."""

        def swap(start: int, end: int) -> Copy:
            return self._layout.swap_out(self._ids[start:end], self.pool, self._slots[start:end])

        def verify() -> None:
            if not np.array_equal(self.pool[self._slots[::VERIFIED_EVERY]], self._blocks[self._ids[::VERIFIED_EVERY]]):
                raise AssertionError(f"{name}: the pool holds other bytes than the blocks")

        return Operation(name, self._each(swap), self._blocks.nbytes, limit, before=self.fill_cache, after=verify)

    def into(self, name: str, limit: str) -> Operation:
        """Copy slot slots[i] to block ids[i]."""

        def fill_pool() -> None:
            self.pool[self._slots] = self._blocks[self._ids]
            self.cache.zero_()
            self._layout.fence()
            self._settle()

        def swap(start: int, end: int) -> Copy:
            return self._layout.swap_in(self.pool, self._slots[start:end], self._ids[start:end])

        def verify() -> None:
            found = self._bytes[:, ::VERIFIED_EVERY].cpu().numpy()
            if not np.array_equal(found, self._by_layer()[:, ::VERIFIED_EVERY]):
                raise AssertionError(f"{name}: the cache holds other bytes than the pool")

        return Operation(name, self._each(swap), self._blocks.nbytes, limit, before=fill_pool, after=verify)

    def fill_cache(self) -> None:
        """Put the blocks into the cache, and clear the pool."""
        import torch

        self._bytes.copy_(torch.from_numpy(self._by_layer()))
        self.pool.fill(0)
        self._settle()

    def memcpy(self) -> Operation:
        """The operation that copies the same bytes in memory order: the limit."""
        source = self._bytes.numpy().reshape(self.pool.shape)

        def run() -> None:
            for start, end in self._batch.calls():
                np.copyto(self.pool[start:end], source[start:end])

        def verify() -> None:
            if not np.array_equal(self.pool[::VERIFIED_EVERY], source[::VERIFIED_EVERY]):
                raise AssertionError(f"{ONE_MEMCPY}: the pool holds other bytes than the cache")

        return Operation(ONE_MEMCPY, run, self._blocks.nbytes, before=self.fill_cache, after=verify)

    def pinned_copies(self) -> list[Operation]:
        """The operations that copy all bytes in one asynchronous copy, one for each direction."""
        import torch

        rows: Any = torch.from_numpy(self.pool).view(-1)
        cache: Any = self._bytes.view(-1)

        def run(target: Any, source: Any) -> Callable[[], None]:
            def copy() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            return copy

        return [
            Operation(PINNED_OUT, run(rows, cache), self._blocks.nbytes),
            Operation(PINNED_IN, run(cache, rows), self._blocks.nbytes),
        ]

    def _settle(self) -> None:
        """Wait until the device is idle."""
        if self.cache.is_cuda:
            import torch

            torch.cuda.synchronize()

    def _by_layer(self) -> Rows:
        """The blocks, `(layers, blocks, layer_bytes)`."""
        layers, blocks, layer_bytes = self._bytes.shape
        return self._blocks.reshape(blocks, layers, layer_bytes).swapaxes(0, 1)

    def _each(self, swap: Callable[[int, int], Copy]) -> Callable[[], None]:
        def run() -> None:
            for copy in [swap(start, end) for start, end in self._batch.calls()]:
                copy.wait()

        return run


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    if missing_module("torch"):
        benchmark.say(f"swap: {missing_module('torch')}, so it is not measured")
        return
    no_device = no_cuda() or missing_module("vllm")
    for model in chosen_models(benchmark.options):
        benchmark.say(f"{model.name}: making {benchmark.batch.blocks} blocks of {model.block_bytes} bytes")
        blocks = random_rows(benchmark.batch.blocks, model.block_bytes)
        host = Swaps(model, benchmark.batch, blocks, "cpu")
        operations = [host.memcpy(), host.out(SWAP_OUT, ONE_MEMCPY), host.into(SWAP_IN, ONE_MEMCPY)]
        if not no_device:
            device = Swaps(model, benchmark.batch, blocks, "cuda")
            operations += [*device.pinned_copies(), device.out(CUDA_OUT, PINNED_OUT), device.into(CUDA_IN, PINNED_IN)]
        benchmark.measure(
            model.name,
            operations,
            unavailable=dict.fromkeys((CUDA_OUT, CUDA_IN), no_device) if no_device else {},
            **benchmark.batch.described(model.block_bytes),
        )
    benchmark.finish()


if __name__ == "__main__":
    main()
