"""Measures how much waiting reads and promises slow other clients. 10 000 reads wait at one server, which has 100 000
promises.

The limit of a call is the same call to another server, without waiting reads and promises. The result also has the
memory that the server holds for them, as a share of its limit; tests/attack/test_waiters.py compares the server's
resident memory with the documented bound.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.remote_kv_cache.bench_lookup import CALLS, QUICK_CALLS, Lookup
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.processes import environment, kvstore_server
from benchmarks.remote_kv_cache.report import console
from benchmarks.remote_kv_cache.shapes import Batch
from benchmarks.remote_kv_cache.transfers import Blocks, connect

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient

CONTAINS: Final = "contains 512"
PING: Final = "ping"
ALONE: Final = "{}, nobody waits"
KEYS: Final = 512
BLOCK_BYTES: Final = 4 << 10
MODEL: Final = "waiters"
CONNECTIONS: Final = 40
READS: Final = 250  # reads that wait on each connection
PROMISES: Final = 100_000
QUICK_SHARE: Final = 10


@contextlib.contextmanager
def waiters(endpoint: str, reads: int, promises: int) -> Iterator[None]:
    """Keep reads waiting while the body runs. Raises `RuntimeError` if one of them is not answered afterwards."""
    module = "benchmarks.remote_kv_cache.waiting"
    numbers = (BLOCK_BYTES, CONNECTIONS, reads, promises)
    command = [sys.executable, "-m", module, endpoint, MODEL, *map(str, numbers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "waiting\n":
                raise RuntimeError("the reads do not wait; see the output above")
            yield
            process.stdin.close()
            missed = process.stdout.readline().strip()
            if missed != str(CONNECTIONS * reads):
                raise RuntimeError(f"{missed or 'none'} of {CONNECTIONS * reads} reads missed after the promises ended")
        finally:
            process.kill()


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    share = QUICK_SHARE if benchmark.quick else 1
    reads, promises = READS // share, PROMISES // share
    calls = QUICK_CALLS if benchmark.quick else CALLS
    lookup = Lookup(calls)
    blocks = Blocks(Batch(KEYS, KEYS), BLOCK_BYTES)
    there = np.ones(KEYS, dtype=np.bool_)
    longest: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for limited in (False, True):  # first the server without waiting reads
            endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
            client = stack.enter_context(connect(endpoint, MODEL, BLOCK_BYTES))
            client.set(blocks.keys, blocks.source, deferred=False)
            calls_of = {CONTAINS: partial(client.contains, blocks.keys), PING: partial(_ping, client, longest, limited)}
            for (name, call), answer in zip(calls_of.items(), (there, None), strict=True):
                alone = ALONE.format(name)
                lookup.add(name if limited else alone, call, answer, alone if limited else "")
        [before] = client.info().shards
        stack.enter_context(waiters(endpoint, reads, promises))
        [after] = client.info().shards
        benchmark.measure(
            "waiters", lookup.operations, waiting_reads=CONNECTIONS * reads, promises=promises, connections=CONNECTIONS
        )
    held = {
        "held_bytes": sum(after.held_bytes.values()) - sum(before.held_bytes.values()),
        "held_limit_bytes": after.held_limit_bytes,
    }
    console().print(f"held for them: {held['held_bytes'] / 2**20:.0f} of {held['held_limit_bytes'] / 2**20:.0f} MiB")
    benchmark.finish(
        calls_per_round=calls, p99_seconds=lookup.p99(benchmark.rounds), longest_ping_seconds=longest, **held
    )


def _ping(client: KVStoreClient, longest: dict[str, float], waited: bool) -> None:
    name = PING if waited else ALONE.format(PING)
    longest[name] = max(longest.get(name, 0.0), client.ping())


if __name__ == "__main__":
    main()
