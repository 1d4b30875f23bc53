"""Measures the cost of lookups: contains and match_prefix, one call at a time, with all keys present.

The limit of a call is a round trip of the plain socket that sends the bytes of the keys and receives the bytes of the
answer. Redis answers EXISTS for each of 512 keys in one pipeline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.table import Table

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import PlainSocket, plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server, redis_missing, redis_server
from benchmarks.remote_kv_cache.report import console, time_text
from benchmarks.remote_kv_cache.shapes import KEY_BYTES, Batch
from benchmarks.remote_kv_cache.transfers import Blocks, connect

if TYPE_CHECKING:
    from redis import Redis

    from kvstore_client import KVStoreClient

KEYS: Final = 4096
BLOCK_BYTES: Final = 4 << 10
CALLS: Final = 200
QUICK_CALLS: Final = 20
MATCH_ANSWER_BYTES: Final = 8


class Lookup:
    """Makes operations of `calls` calls each. An operation's time is the median of its calls; all times are kept for
    p99."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self.operations: list[Operation] = []
        self._times: dict[str, list[float]] = {}

    def add(self, name: str, call: Callable[[], Any], expected: Any = None, limit: str = "") -> None:
        """Add a call that must return `expected`."""
        times = self._times[name] = []

        def run() -> float:
            mine = []
            for _ in range(self._calls):
                begin = time.perf_counter()
                result = call()
                mine.append(time.perf_counter() - begin)
                if not np.array_equal(result, expected):
                    raise AssertionError(f"{name}: got {result!r}, expected {expected!r}")
            times.extend(mine)
            return float(np.median(mine))

        self.operations.append(Operation(name, run, limit=limit))

    def p99(self, rounds: int) -> dict[str, float]:
        """Return the p99 in seconds over all calls of the counted rounds."""
        counted = rounds * self._calls
        return {name: float(f"{np.percentile(times[-counted:], 99):.6g}") for name, times in self._times.items()}


def add_round_trip(lookup: Lookup, plain: PlainSocket, keys: int, answer_bytes: int) -> str:
    """Add the limit of a lookup of this many keys. Return its name."""
    name = f"plain round trip {keys * KEY_BYTES} B / {answer_bytes} B"
    lookup.add(name, lambda: plain.ask(keys * KEY_BYTES, answer_bytes))
    return name


def add_kvstore(lookup: Lookup, client: KVStoreClient, plain: PlainSocket, blocks: Blocks) -> None:
    """Add the calls that are measured, each after its limit."""
    for count in (1, 64, 512):
        limit = add_round_trip(lookup, plain, count, count)
        keys = blocks.keys[:count]
        lookup.add(f"contains {count}", partial(client.contains, keys), np.ones(count, dtype=np.bool_), limit)
    for count in (512, KEYS):
        limit = add_round_trip(lookup, plain, count, MATCH_ANSWER_BYTES)
        keys = blocks.keys[:count]
        lookup.add(f"match_prefix {count}", partial(client.match_prefix, keys), count, limit)


def add_redis(lookup: Lookup, redis: Redis, blocks: Blocks) -> None:
    """Add EXISTS of 512 present keys."""
    names = [key.tobytes() for key in blocks.keys[:512]]
    redis.mset(dict(zip(names, [memoryview(row) for row in blocks.source], strict=False)))

    def exists() -> Any:
        commands = redis.pipeline(transaction=False)
        for name in names:
            commands.exists(name)
        return commands.execute()

    lookup.add("redis EXISTS pipeline 512", exists, [1] * 512, f"plain round trip {512 * KEY_BYTES} B / 512 B")


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    calls = QUICK_CALLS if benchmark.quick else CALLS
    lookup = Lookup(calls)
    blocks = Blocks(Batch(KEYS, 512), BLOCK_BYTES)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        client = stack.enter_context(connect(endpoint, "lookup", BLOCK_BYTES))
        plain = stack.enter_context(plain_socket(1, 1))
        redis = stack.enter_context(redis_server())
        client.set(blocks.keys, blocks.source, deferred=False)
        add_kvstore(lookup, client, plain, blocks)
        if redis is not None:
            add_redis(lookup, redis, blocks)
        benchmark.measure(
            "lookup",
            lookup.operations,
            unavailable={"redis": redis_missing()} if redis is None else {},
            keys_present=KEYS,
            block_bytes=BLOCK_BYTES,
        )
    p99 = lookup.p99(benchmark.rounds)
    table = Table("operation", "p99 of all calls", title="lookup", title_justify="left")
    for name, value in p99.items():
        table.add_row(name, time_text(value))
    console().print(table)
    benchmark.finish(calls_per_round=calls, p99_seconds=p99)


if __name__ == "__main__":
    main()
