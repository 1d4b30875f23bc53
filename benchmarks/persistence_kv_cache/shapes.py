"""The options that select the measured blocks: `--models`, `--block-bytes` and `--blocks`."""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks.remote_kv_cache.bench_small_blocks import QUICK_BYTES, TOTAL_BYTES, batch_of
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.shapes import HEADLINE, MODELS, Batch, size_text

SMALL_BYTES: Final = 16 << 10
_CALL_BLOCKS: Final = 512  # the most blocks in a call


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the three options."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=["all", *MODELS],
        default=[],
        metavar="NAME",
        help=f"512 blocks of {', '.join(MODELS)}, or all; default: {HEADLINE.name} and {size_text(SMALL_BYTES)}",
    )
    parser.add_argument(
        "--block-bytes",
        nargs="+",
        type=int,
        default=[],
        metavar="BYTES",
        help=f"blocks of these sizes, {TOTAL_BYTES >> 20} MiB of each",
    )
    parser.add_argument("--blocks", type=int, metavar="N", help="the number of blocks of each model or size")


def chosen_shapes(benchmark: Benchmark) -> dict[str, tuple[Batch, int]]:
    """Return the chosen shapes: name -> the number of blocks, and the bytes of one."""
    options = benchmark.options
    models = list(MODELS) if "all" in options.models else options.models
    sizes = options.block_bytes
    if not models and not sizes:
        models, sizes = [HEADLINE.name], [SMALL_BYTES]
    found = {name: (benchmark.batch, MODELS[name].block_bytes) for name in models}
    total = QUICK_BYTES if benchmark.quick else TOTAL_BYTES
    found |= {size_text(size): (batch_of(size, total, _CALL_BLOCKS), size) for size in sizes}
    if options.blocks:
        found = {name: (Batch(options.blocks, batch.per_call), size) for name, (batch, size) in found.items()}
    return found
