"""How the store scales over cores: servers of 1 to 8 shards, each with 1 to 8 client processes at once.

A shard is a process of the server. Each client process has blocks and connections of its own and calls `set` and
`get_into`, over TCP and over shared memory; figures are of all of them together, from the first start to the last end.
The limits take turns with them, with the same bytes and the same client processes:

* TCP: as many plain sockets, each from a client process to a process of its own. N clients then use N processes on the
  other side, kvstore as many as it has shards: with fewer shards than clients it has fewer cores than its limit, with
  more shards it has more.
* Shared memory: as many client processes that copy their blocks once with memcpy, and nobody on the other side. In
  `get_into` the client copies too, and the shards only say where the blocks are. In `set` the blocks are copied twice:
  by the client into memory that it shares, and by the shards into their own.

Nothing is bound to a core. With fewer cores than processes these share them; `cores` says how many there are. A case
that fails does not end the others: the result says why.
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
COUNTS: Final = (1, 2, 4, 8)  # of shards, and of clients
QUICK_COUNTS: Final = (1, 2)
MOST: Final = 64
BLOCKS: Final = 128
QUICK_BLOCKS: Final = 32
ROUNDS: Final = 7
TCP_NAMES: Final = (PLAIN_SET, PLAIN_GET, SET, GET)
SHARED_NAMES: Final = (MEMCPY, SHARED_SET, SHARED_GET)


def case_name(shards: int) -> str:
    """The name of the case of a server with so many shards."""
    return f"{shards} shard{'s' * (shards > 1)}"


def _no_shared_memory(endpoint: str) -> str:
    """Why clients cannot read blocks in the server's memory; empty if they can: then it says that it lends them."""
    key, block = random_keys(1), random_rows(1, HEADLINE.block_bytes)
    try:
        with connect(endpoint, MODEL, HEADLINE.block_bytes, shared_memory=True) as client:
            client.set(key, block)
            with client.borrow(key):
                lent = sum(shard.lent_blocks for shard in client.info().shards)
            client.delete(key)
    except KVStoreError as error:
        return str(error)
    return "" if lent else "the server lends no blocks; perhaps it may open too few files (ulimit -n)"


def measure(benchmark: Benchmark, shards: int, counts: Sequence[int], ports: list[int], blocks: int) -> None:
    """Measure a server of so many shards. `counts`: of clients; `ports`: of as many peers as the most of them."""
    each = blocks * HEADLINE.block_bytes
    with contextlib.ExitStack() as stack:
        # Twice the bytes: keys do not fall on the shards in equal parts, and half of a shard's memory can be lent.
        endpoint = stack.enter_context(kvstore_server(2 * each * max(counts), shards))
        problem = _no_shared_memory(endpoint)
        clients = stack.enter_context(client_processes(endpoint, ports, blocks, shared_memory=not problem))
        names = TCP_NAMES if problem else (*TCP_NAMES, *SHARED_NAMES)
        operations = [
            # Most processes first: the uncounted round then leaves blocks for every process to read.
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
            except Exception as error:  # the other cases are worth having, whatever it is
                benchmark.skip(case_name(shards), f"{type(error).__name__}: {error}")
    benchmark.finish(shards=shard_counts, clients=counts)
    if benchmark.skipped:
        sys.exit(f"failed: {', '.join(benchmark.skipped)}")


if __name__ == "__main__":
    main()
