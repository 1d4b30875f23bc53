"""Measures the cost of sending one prompt's keys to many shards, with calls of 512 keys on real servers with 8, 32 and
64 shards.

A run is R consecutive keys of a chain on one shard. Placement uses only the first eight bytes of a key, so runs are
emulated by keys that begin with the same eight bytes. Real keys have R = 1. All keys are present, calls are made one at
a time, and all values of R are measured in each round. All shards share this machine's cores. This is the worst case
for many shards, because hardly any of their work runs in parallel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.cluster_sim.balance import RUNS
from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import Batch
from benchmarks.remote_kv_cache.transfers import Blocks, connect

KEYS: Final = 512
BLOCK_BYTES: Final = 16 << 10
SHARDS: Final = (8, 32, 64)
QUICK_SHARDS: Final = (2,)
SPARE_BYTES: Final = 64 << 20
CALLS: Final = 20
QUICK_CALLS: Final = 3
LOOKUPS: Final = ("contains", "match_prefix", "get_into")


def run_blocks(run: int) -> Blocks:
    """Return blocks in which all keys of a run have the same first eight bytes."""
    blocks = Blocks(Batch(KEYS, KEYS), BLOCK_BYTES, seed=run)
    blocks.keys[:, :8] = blocks.keys[np.arange(KEYS) // run * run, :8]
    return blocks


def _calling(name: str, calls: int, call: Callable[[], Any], expected: Any, blocks: Blocks) -> Operation:
    """Return an operation of several calls, whose time is the median over the calls."""

    def run() -> float:
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            result = call()
            times.append(time.perf_counter() - begin)
            if not np.array_equal(result, expected):
                raise AssertionError(f"{name}: some keys are missing")
        return float(np.median(times))

    if name.startswith("get_into"):
        return Operation(name, run, blocks.total_bytes, before=blocks.clear, after=blocks.verify)
    return Operation(name, run)


def operations(client: Any, all_blocks: Sequence[tuple[int, Blocks]], calls: int) -> list[Operation]:
    """Return the operations: every kind of lookup with every length of runs."""
    everything = np.ones(KEYS, dtype=np.bool_)
    found = []
    for run, blocks in all_blocks:
        keys = blocks.keys
        found += [
            _calling(f"contains R={run}", calls, partial(client.contains, keys), everything, blocks),
            _calling(f"match_prefix R={run}", calls, partial(client.match_prefix, keys), KEYS, blocks),
            _calling(f"get_into R={run}", calls, partial(client.get_into, keys, blocks.out), everything, blocks),
        ]
    return found


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    all_blocks = [(run, run_blocks(run)) for run in RUNS]
    total = sum(blocks.total_bytes for _, blocks in all_blocks)
    for shards in QUICK_SHARDS if benchmark.quick else SHARDS:
        with (
            kvstore_server(total, shards, SPARE_BYTES) as endpoint,
            connect(endpoint, "batch-latency", BLOCK_BYTES) as client,
        ):
            for _, blocks in all_blocks:
                client.set(blocks.keys, blocks.source, deferred=False)
            benchmark.measure(
                f"{shards} shards",
                operations(client, all_blocks, QUICK_CALLS if benchmark.quick else CALLS),
                shards=shards,
                keys=KEYS,
                block_bytes=BLOCK_BYTES,
                calls=list(LOOKUPS),
            )
    benchmark.finish(calls_per_round=QUICK_CALLS if benchmark.quick else CALLS)


if __name__ == "__main__":
    main()
