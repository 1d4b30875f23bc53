"""Compares `get_into` with NIXL and `get_into` in band, with the same blocks from the same server.

UCX uses TCP (UCX_TLS=tcp,self) unless UCX_TLS is set: without an RDMA card that is its transport between hosts. With a
card, set UCX_TLS to the card's transports. The limit is one plain socket.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

from benchmarks.remote_kv_cache.bench_small_blocks import QUICK_BYTES, batch_of
from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, size_text
from benchmarks.remote_kv_cache.transfers import PLAIN_GET, Blocks, connect, get_into_operation, plain_operations
from kvstore.wire.transports.nixl import nixl_package

LARGE: Final = HEADLINE.block_bytes
SIZES: Final = (16 << 10, LARGE)
TOTAL_BYTES: Final = 64 << 20


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    if not nixl_package():
        sys.exit("NIXL is not installed; expected pip install llm-kvstore[nixl]")
    os.environ.setdefault("UCX_TLS", "tcp,self")
    total = QUICK_BYTES if benchmark.quick else TOTAL_BYTES
    operations: list[Operation] = []
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(total * (len(SIZES) + 1), flags=("--nixl",)))
        for size in SIZES:
            blocks = Blocks(batch_of(size, total, 512), size, seed=size)
            in_band = stack.enter_context(connect(endpoint, "nixl", size))
            with_nixl = stack.enter_context(connect(endpoint, "nixl", size, nixl=True))
            if with_nixl.stats.path != "nixl":
                raise AssertionError(f"blocks come over {with_nixl.stats.path}: expected nixl")
            in_band.set(blocks.keys, blocks.source)
            operations.append(get_into_operation(in_band, blocks, f"in band, {size_text(size)}", PLAIN_GET))
            operations.append(get_into_operation(with_nixl, blocks, f"nixl, {size_text(size)}", PLAIN_GET))
        plain = stack.enter_context(plain_socket(blocks.batch.blocks, LARGE))
        benchmark.measure("nixl", [*plain_operations(plain, blocks), *operations], ucx_tls=os.environ["UCX_TLS"])
    benchmark.finish(total_bytes=total)


if __name__ == "__main__":
    main()
