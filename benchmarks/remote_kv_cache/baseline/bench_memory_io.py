"""Measures how long it takes to move 512 blocks within memory, 64 in each call, in every way that the published design
measured, and in ours.

The naive copies, layer to layer and block to block, are NumPy copies in a Python loop. One memcpy of the same bytes is
the limit.
"""

from __future__ import annotations

from benchmarks.remote_kv_cache.copies import INDEX_COPY, NAIVE, SWAP_IN, SWAP_OUT, Copies, no_cuda
from benchmarks.remote_kv_cache.harness import Benchmark, add_model_option, chosen_models, missing_module


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    unavailable = {}
    if missing_module("torch"):
        unavailable[INDEX_COPY] = missing_module("torch")
    if no_cuda():
        unavailable |= dict.fromkeys((SWAP_IN, SWAP_OUT), no_cuda())
    for model in chosen_models(benchmark.options):
        benchmark.say(f"{model.name}: making {benchmark.batch.blocks} blocks of {model.block_bytes} bytes")
        copies = Copies(model, benchmark.batch)
        operations = [
            *copies.block_operations(),
            *copies.layer_operations(),
            copies.fancy_index(),
            *copies.index_copy(),
            *copies.swaps(),
        ]
        benchmark.measure(
            model.name,
            operations,
            references=(NAIVE,),
            unavailable=unavailable,
            **benchmark.batch.described(model.block_bytes),
        )
    benchmark.matrix(f"As multiples of {NAIVE}", NAIVE)
    benchmark.finish(torch_threads=1)


if __name__ == "__main__":
    main()
