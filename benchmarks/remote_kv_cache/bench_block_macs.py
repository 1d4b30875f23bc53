"""Measures the cost of block MACs: clients with and without a block secret use the same server in turn.

Calls over one connection are compared with a plain socket, and calls in shared memory with one memcpy. Blocks have 16
KiB or 917504 bytes. *Hash* computes only the MACs of the same blocks, on one core; *xxh3* computes the checksums that
the MACs replace.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.bench_small_blocks import QUICK_BYTES, batch_of
from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, size_text
from benchmarks.remote_kv_cache.transfers import (
    MEMCPY,
    PLAIN_GET,
    PLAIN_SET,
    Blocks,
    connect,
    get_into_operation,
    memcpy_operation,
    namespace,
    plain_operations,
    set_operation,
)
from kvstore._cext import checksum_into
from kvstore_client._links.block_mac import BlockMac

TCP: Final = "one connection"
SHARED: Final = "shared memory"
SMALL: Final = 16 << 10
LARGE: Final = HEADLINE.block_bytes
TOTAL_BYTES: Final = 128 << 20
SECRET: Final = b"a secret of the benchmark"


def _hashes(blocks: Blocks, size: int) -> list[Operation]:
    """Return the operations that only compute the sums of all blocks."""
    macs = BlockMac(SECRET, namespace("macs", size)).batch(blocks.keys)
    views, numbers = [memoryview(row) for row in blocks.source], list(range(len(blocks.keys)))
    sums = np.empty(len(views), dtype=np.uint64)

    def hash_all() -> None:
        macs.of(numbers, views)

    def xxh3_all() -> None:
        checksum_into(views, sums)

    return [
        Operation(f"hash, {size_text(size)}", hash_all, blocks.total_bytes),
        Operation(f"xxh3, {size_text(size)}", xxh3_all, blocks.total_bytes),
    ]


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    total = QUICK_BYTES if benchmark.quick else TOTAL_BYTES
    for case, shared_memory in ((TCP, False), (SHARED, True)):
        operations: list[Operation] = []
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(kvstore_server(total * 6))
            for size in (SMALL, LARGE):
                blocks = Blocks(batch_of(size, total, 512), size, seed=size)
                for secret, name in ((None, "plain"), (SECRET, "MACs")):
                    client = stack.enter_context(connect(endpoint, "macs", size, shared_memory, secret=secret))
                    for make, call, limit in (
                        (set_operation, "set", PLAIN_SET),
                        (get_into_operation, "get_into", PLAIN_GET),
                    ):
                        what = f"{call} {size_text(size)}, {name}"
                        operations.append(make(client, blocks, what, MEMCPY if shared_memory else limit))
                if not shared_memory:
                    operations += _hashes(blocks, size)
            if shared_memory:
                limits = [memcpy_operation(blocks)]
            else:
                limits = plain_operations(stack.enter_context(plain_socket(blocks.batch.blocks, LARGE)), blocks)
            plain = tuple(each.name for each in operations if each.name.endswith(", plain"))
            benchmark.measure(case, [*limits, *operations], references=plain)
    benchmark.finish(total_bytes=total)


if __name__ == "__main__":
    main()
