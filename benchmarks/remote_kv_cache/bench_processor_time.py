"""Measures the processor time of client and server together for each GB. kvstore, Redis and the plain socket are
measured in each round.

Moves 512 blocks (8192 tokens of Qwen2.5-7B) in calls of 64. The reported seconds are the processor time of all
processes, as counted by the kernel's scheduler. kvstore makes and checks a checksum of each block, as it does by
default. Redis and the plain socket make no checksums, and the plain socket stores nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses

import psutil

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server, processor_seconds, redis_missing, redis_server
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import (
    Blocks,
    connect,
    kvstore_operations,
    plain_operations,
    redis_operations,
)


def _counted(operation: Operation) -> Operation:
    """Return the same operation, measured in processor time."""

    def run() -> float:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before = processor_seconds(processes)
        operation.run()
        return processor_seconds(processes) - before

    return dataclasses.replace(operation, run=run)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    blocks = Blocks(benchmark.batch, HEADLINE.block_bytes)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(plain_socket(benchmark.batch.blocks, HEADLINE.block_bytes))
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        client = stack.enter_context(connect(endpoint, "processor time", HEADLINE.block_bytes))
        operations = [*plain_operations(plain, blocks), *kvstore_operations(client, blocks)]
        redis = stack.enter_context(redis_server())
        if redis is not None:
            operations += redis_operations(redis, blocks)
        benchmark.measure(
            "processor time",
            [_counted(operation) for operation in operations],
            unavailable={"redis": redis_missing()} if redis is None else None,
            block_bytes=HEADLINE.block_bytes,
        )
    benchmark.finish()


if __name__ == "__main__":
    main()
