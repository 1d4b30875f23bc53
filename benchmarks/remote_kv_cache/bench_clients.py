"""Measures the total bytes a second of get_into and set by several client processes on one server at the same time.

Each process has its own blocks and connection. A run lasts from the first start to the last end. The limit is the same
number of concurrent plain sockets, each between two separate processes; a kvstore server has only one process for each
shard.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

from benchmarks.remote_kv_cache.client_processes import GET, SET, client_processes, operation_of
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.plain import plain_peer
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import PLAIN_GET, PLAIN_SET

COUNTS: Final = (1, 2, 4)
BLOCKS: Final = 256
QUICK_BLOCKS: Final = 32
NAMES: Final = (PLAIN_SET, PLAIN_GET, SET, GET)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="of the server; default: 1")


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=_add_options)
    shards: int = benchmark.options.shards
    each = QUICK_BLOCKS if benchmark.quick else BLOCKS
    moved = each * HEADLINE.block_bytes
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(moved * max(COUNTS), shards))
        ports = [stack.enter_context(plain_peer(each, HEADLINE.block_bytes)) for _ in range(max(COUNTS))]
        clients = stack.enter_context(client_processes(endpoint, ports, each))
        operations = [
            # The largest number of processes comes first, so the uncounted round leaves blocks for every process to
            # read.
            operation_of(clients, name, count, moved * count)
            for count in reversed(COUNTS)
            for name in NAMES
        ]
        benchmark.measure("clients", operations, block_bytes=HEADLINE.block_bytes, blocks_per_client=each)
    benchmark.finish(shards=shards)


if __name__ == "__main__":
    main()
