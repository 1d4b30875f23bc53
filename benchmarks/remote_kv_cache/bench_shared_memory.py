"""Measures set and get of a model's blocks on the server's host, over shared memory, compared with one memcpy of the
same bytes.

Moves 512 blocks (8192 tokens) in 8 calls of 64. Keys are deleted before each set; every byte read is compared after the
clock has stopped. *From host memory*: the source is memory of `kvstore_client.memory.host_memory`. *Borrow* makes views
of 64 blocks and gives them back; it reads no bytes, so its time does not depend on the size of the blocks. *Small
blocks* are the same bytes in blocks of 16 KiB, 512 in each call. *Lookup* requests keys that are all present, over the
Unix socket.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.harness import Benchmark, Operation, add_model_option, chosen_models
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import Batch, Model, size_text
from benchmarks.remote_kv_cache.transfers import (
    MEMCPY,
    Blocks,
    connect,
    get_into_operation,
    memcpy_operation,
    set_operation,
    stream_get_operation,
)
from kvstore_client import KVStoreClient
from kvstore_client.memory import host_memory

BORROW: Final = "borrow 64"
CONTAINS: Final = "contains 512"
FROM_HOST: Final = "set from host memory"
SMALL_BYTES: Final = 16 << 10
SMALL_PER_CALL: Final = 512
LOOKUP: Final = "lookup"
CALLS: Final = 100


def _median_of(calls: int, call: Callable[[], object]) -> Callable[[], float]:
    """Return an operation that makes a call many times and returns the median of its seconds."""

    def run() -> float:
        seconds = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds))

    return run


def _operations(client: KVStoreClient, blocks: Blocks) -> list[Operation]:
    in_host_memory = Blocks(blocks.batch, blocks.block_bytes)
    in_host_memory.source = host_memory(*blocks.source.shape)
    in_host_memory.source[:] = blocks.source
    in_host_memory.keys = blocks.keys
    return [
        set_operation(client, in_host_memory, FROM_HOST, MEMCPY),
        set_operation(client, blocks, "set", MEMCPY),
        get_into_operation(client, blocks, "get_into", MEMCPY),
        stream_get_operation(client, blocks, "stream_get", MEMCPY),
    ]


def measure(benchmark: Benchmark, model: Model) -> None:
    """Measure one model, with its own server."""
    benchmark.say(f"{model.name}: making {benchmark.batch.blocks} blocks of {model.block_bytes} bytes")
    blocks = Blocks(benchmark.batch, model.block_bytes)

    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        client = stack.enter_context(connect(endpoint, model.name, model.block_bytes, shared_memory=True))
        some = blocks.keys[:64]

        def borrow() -> None:
            with client.borrow(some) as views:
                if any(view is None for view in views):
                    raise AssertionError("a block was evicted")

        benchmark.measure(
            model.name,
            [
                memcpy_operation(blocks),
                *_operations(client, blocks),
                Operation(BORROW, _median_of(benchmark.batch.per_call, borrow)),
            ],
            references=(MEMCPY,),
            **blocks.batch.described(model.block_bytes),
        )


def measure_small(benchmark: Benchmark) -> None:
    """Measure small blocks, and lookups of them."""
    total = (32 << 20) if benchmark.quick else (448 << 20)
    blocks = Blocks(Batch(total // SMALL_BYTES, SMALL_PER_CALL), SMALL_BYTES)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        client = stack.enter_context(connect(endpoint, "small", SMALL_BYTES, shared_memory=True))
        benchmark.measure(
            size_text(SMALL_BYTES), [memcpy_operation(blocks), *_operations(client, blocks)], references=(MEMCPY,)
        )
        keys = blocks.keys[:512]

        def contains() -> None:
            if not client.contains(keys).all():
                raise AssertionError("a block was evicted")

        benchmark.measure(
            LOOKUP,
            [Operation(CONTAINS, _median_of(CALLS, contains)), Operation("ping", _median_of(CALLS, client.ping))],
        )


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    for model in chosen_models(benchmark.options):
        measure(benchmark, model)
    measure_small(benchmark)
    benchmark.finish(shards=1)


if __name__ == "__main__":
    main()
