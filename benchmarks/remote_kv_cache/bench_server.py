"""Measures set and get of a model's blocks, end to end, with kvstore, the plain socket, one memcpy, and Redis in each
round.

Moves 512 blocks (8192 tokens) in 8 calls of 64. Keys are deleted before each set; every byte read is compared after the
clock has stopped. The published design's figures are multiples of memcpy; the limit here is the plain socket in the
same direction.
"""

from __future__ import annotations

import contextlib
from typing import Final

from benchmarks.remote_kv_cache.harness import Benchmark, add_model_option, chosen_models
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server, redis_missing, redis_server
from benchmarks.remote_kv_cache.shapes import Model
from benchmarks.remote_kv_cache.transfers import (
    MEMCPY,
    PLAIN_SET,
    Blocks,
    connect,
    kvstore_operations,
    memcpy_operation,
    plain_operations,
    redis_operations,
    set_operation,
)

NOT_DEFERRED: Final = "set, not deferred"


def measure(benchmark: Benchmark, model: Model) -> None:
    """Measure one model, with its own servers."""
    benchmark.say(f"{model.name}: making {benchmark.batch.blocks} blocks of {model.block_bytes} bytes")
    blocks = Blocks(benchmark.batch, model.block_bytes)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        client = stack.enter_context(connect(endpoint, model.name, model.block_bytes))
        plain = stack.enter_context(plain_socket(blocks.batch.blocks, model.block_bytes))
        redis = stack.enter_context(redis_server())
        operations = [memcpy_operation(blocks), *plain_operations(plain, blocks), *kvstore_operations(client, blocks)]
        operations.append(set_operation(client, blocks, NOT_DEFERRED, PLAIN_SET, deferred=False))
        if redis is not None:
            operations += redis_operations(redis, blocks)
        benchmark.measure(
            model.name,
            operations,
            references=(MEMCPY,),
            unavailable={"redis": redis_missing()} if redis is None else {},
            **blocks.batch.described(model.block_bytes),
        )


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    for model in chosen_models(benchmark.options):
        measure(benchmark, model)
    benchmark.matrix("As multiples of one memcpy", MEMCPY)
    benchmark.matrix("As multiples of the plain socket of the same direction")
    benchmark.finish(shards=1)


if __name__ == "__main__":
    main()
