"""Measures one client with several connections to one shard over TCP: get_into, and set by the same number of threads.

Moves 512 blocks (8192 tokens of Qwen2.5-7B) in calls of 64. A read is spread over the connections. A set uses only one
connection, so that the blocks of a chain stay in order; as many threads set blocks as there are connections. The limit
is one plain socket. With client and server on the same two cores this shows the cost of more connections, not their
gain on a network.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import (
    PLAIN_GET,
    PLAIN_SET,
    Blocks,
    connect,
    get_into_operation,
    plain_operations,
    set_operation,
)
from kvstore_client import KVStoreClient

COUNTS: Final = (1, 2, 4)


def _in_threads(client: KVStoreClient, blocks: Blocks, count: int) -> Operation:
    """Return the operation in which `count` threads `set` at the same time. Each makes every `count`-th call."""
    one = set_operation(client, blocks, f"set, {count} connections", PLAIN_SET)
    calls = list(blocks.batch.calls())

    def work(number: int) -> None:
        for start, end in calls[number::count]:
            client.set(blocks.keys[start:end], blocks.source[start:end])

    def run() -> None:
        if count == 1:
            work(0)
            return
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(work, range(count)))

    def check() -> None:
        client.sync()
        if not client.contains(blocks.keys).all():
            raise AssertionError("blocks are missing")

    return Operation(one.name, run, blocks.total_bytes, PLAIN_SET, before=one.before, after=check)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    blocks = Blocks(benchmark.batch, HEADLINE.block_bytes)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        plain = stack.enter_context(plain_socket(benchmark.batch.blocks, HEADLINE.block_bytes))
        operations: list[Operation] = []
        for count in COUNTS:
            client = stack.enter_context(connect(endpoint, "connections", HEADLINE.block_bytes, connections=count))
            operations.append(_in_threads(client, blocks, count))
            operations.append(get_into_operation(client, blocks, f"get_into, {count} connections", PLAIN_GET))
        benchmark.measure(
            "connections", [*plain_operations(plain, blocks), *operations], block_bytes=HEADLINE.block_bytes
        )
    benchmark.finish(shards=1)


if __name__ == "__main__":
    main()
