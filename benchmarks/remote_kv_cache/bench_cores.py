"""Measures how the store scales with the number of cores: servers with 1 to 8 shards, each with 1 to 8 concurrent
client processes.

A shard is a process of the server. Each client process has its own blocks and connections and calls `set` and
`get_into`, over TCP and over shared memory. Figures are for all clients together, from the first start to the last end.
The limits are measured in the same rounds, with the same bytes and the same client processes:

* TCP: the same number of plain sockets, each from a client process to its own peer process. So N clients use N
  processes on the other side, but a kvstore server has one process for each shard. Therefore kvstore can use fewer
  cores than its limit if it has fewer shards than clients, and more cores if it has more shards.
* Shared memory: the same number of client processes that copy their blocks once with memcpy, with no process on the
  other side. In `get_into` the client copies too, and the shards only say where the blocks are. In `set` the blocks are
  copied twice: by the client into memory that it shares, and by the shards into their own.

No process is bound to a core. If there are fewer cores than processes, they share them; `cores` is the number of cores.
A case that fails does not stop the others: the result says why it failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.remote_kv_cache.client_processes import (
    GET,
    MODEL,
    PER_CALL,
    SET,
    SHARED_GET,
    SHARED_SET,
    client_processes,
    operation_of,
)
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.plain import plain_peer
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, random_keys, random_rows
from benchmarks.remote_kv_cache.transfers import MEMCPY, PLAIN_GET, PLAIN_SET, connect
from kvstore_client import KVStoreError

GROUP: Final = "cores"
COUNTS: Final = (1, 2, 4, 8)  # numbers of shards, and of clients
QUICK_COUNTS: Final = (1, 2)
MOST: Final = 64
BLOCKS: Final = 128
QUICK_BLOCKS: Final = 32
ROUNDS: Final = 7
TCP_NAMES: Final = (PLAIN_SET, PLAIN_GET, SET, GET)
SHARED_NAMES: Final = (MEMCPY, SHARED_SET, SHARED_GET)


def case_name(shards: int) -> str:
    """Return the name of the case of a server with this number of shards."""
    return f"{shards} shard{'s' * (shards > 1)}"


def _no_shared_memory(endpoint: str) -> str:
    """Return why clients cannot read blocks in the server's memory; empty if they can. The server reports such blocks
    as lent."""
    key, block = random_keys(1), random_rows(1, HEADLINE.block_bytes)
    try:
        with connect(endpoint, MODEL, HEADLINE.block_bytes, shared_memory=True) as client:
            client.set(key, block)
            with client.borrow(key):
                lent = sum(shard.lent_blocks for shard in client.info().shards)
            client.delete(key)
    except KVStoreError as error:
        return str(error)
    return "" if lent else "the server lends no blocks; its limit of open files may be too low (ulimit -n)"


def measure(benchmark: Benchmark, shards: int, counts: Sequence[int], ports: list[int], blocks: int) -> None:
    """Measure a server of `shards` shards. `counts`: the numbers of clients; `ports`: the ports of the peers, one for
    each client of the largest number."""
    each = blocks * HEADLINE.block_bytes
    with contextlib.ExitStack() as stack:
        # Twice the bytes, because keys are not spread evenly over shards, and half of a shard's memory can be lent.
        endpoint = stack.enter_context(kvstore_server(2 * each * max(counts), shards))
        problem = _no_shared_memory(endpoint)
        clients = stack.enter_context(client_processes(endpoint, ports, blocks, shared_memory=not problem))
        names = TCP_NAMES if problem else (*TCP_NAMES, *SHARED_NAMES)
        operations = [
            # The largest number of processes comes first, so the uncounted round leaves blocks for every process to
            # read.
            operation_of(clients, name, count, each * count)
            for count in sorted(counts, reverse=True)
            for name in names
        ]
        benchmark.measure(
            case_name(shards),
            operations,
            unavailable=dict.fromkeys(SHARED_NAMES, problem) if problem else None,
            group=GROUP,
            shards=shards,
            clients=sorted(counts),
            cores=len(os.sched_getaffinity(0)),
            block_bytes=HEADLINE.block_bytes,
            blocks_per_client=blocks,
            blocks_per_call=PER_CALL,
        )


def _add_options(parser: argparse.ArgumentParser) -> None:
    default = f"default: {' '.join(map(str, COUNTS))}; --quick: {' '.join(map(str, QUICK_COUNTS))}"
    for name, what in (("shards", "of the servers"), ("clients", "processes at once")):
        parser.add_argument(
            f"--{name}", type=int, nargs="+", choices=range(1, MOST + 1), metavar="N", help=f"{what}; {default}"
        )


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=ROUNDS, add_options=_add_options)
    usual = QUICK_COUNTS if benchmark.quick else COUNTS
    shard_counts = sorted(set(benchmark.options.shards or usual))
    counts = sorted(set(benchmark.options.clients or usual))
    blocks = QUICK_BLOCKS if benchmark.quick else BLOCKS
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(plain_peer(blocks, HEADLINE.block_bytes)) for _ in range(max(counts))]
        for shards in shard_counts:
            try:
                measure(benchmark, shards, counts, ports, blocks)
            except Exception as error:  # whatever the error is, the other cases are still useful
                benchmark.skip(case_name(shards), f"{type(error).__name__}: {error}")
    benchmark.finish(shards=shard_counts, clients=counts)
    if benchmark.skipped:
        sys.exit(f"failed: {', '.join(benchmark.skipped)}")


if __name__ == "__main__":
    main()
