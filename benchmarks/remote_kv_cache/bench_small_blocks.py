"""Compares the bytes a second of small blocks (4, 16, 64 and 256 KiB) with those of blocks of 917504 bytes, with the
same total, in each round.

Many small blocks share a frame, so that the cost of a message never dominates; the cost of a block remains. A call
moves 512 blocks (one 8192-token prompt), or fewer if 512 are larger than 64 blocks of 917504 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, Batch, size_text
from benchmarks.remote_kv_cache.transfers import (
    PLAIN_GET,
    PLAIN_SET,
    Blocks,
    connect,
    get_into_operation,
    plain_operations,
    set_operation,
)

LARGE: Final = HEADLINE.block_bytes
SIZES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, LARGE)
TOTAL_BYTES: Final = 256 << 20
QUICK_BYTES: Final = 16 << 20


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks-per-call", type=int, default=512, metavar="N", help="at most; default: 512")


def batch_of(block_bytes: int, total_bytes: int, at_most: int) -> Batch:
    """Return the number of blocks of this size, in all and in one call."""
    return Batch(total_bytes // block_bytes, min(at_most, max(1, 64 * LARGE // block_bytes)))


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=_add_options)
    total = QUICK_BYTES if benchmark.quick else TOTAL_BYTES
    sets: list[Operation] = []
    gets: list[Operation] = []
    per_call: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(total * (len(SIZES) + 1)))
        for size in SIZES:
            blocks = Blocks(batch_of(size, total, benchmark.options.blocks_per_call), size, seed=size)
            client = stack.enter_context(connect(endpoint, "small blocks", size))
            name = size_text(size)
            per_call[name] = blocks.batch.per_call
            sets.append(set_operation(client, blocks, f"set {name}", PLAIN_SET))
            gets.append(get_into_operation(client, blocks, f"get_into {name}", PLAIN_GET))
        plain = stack.enter_context(plain_socket(blocks.batch.blocks, LARGE))
        benchmark.measure(
            "small blocks",
            [*plain_operations(plain, blocks), *sets, *gets],
            references=(f"set {size_text(LARGE)}", f"get_into {size_text(LARGE)}"),
            blocks_per_call=per_call,
        )
    benchmark.finish(total_bytes=total)


if __name__ == "__main__":
    main()
