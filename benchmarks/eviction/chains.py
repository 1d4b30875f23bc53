"""Tests whether chains keep their heads. New chains are set in calls of `CALL` blocks, and together need more memory
than a server has.

A block is usable if this block and every block before it in its chain are present. The result is the number of blocks
that match_prefix finds, as a share of the number that contains finds. Each round sets the chains on a new server,
because the blocks that each of several shards gets are random.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.table import Table

from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import console
from kvstore._index import BlockIndex
from kvstore_client import KVStoreClient, Namespace
from kvstore_client.keys import KeyArray

ROUNDS: Final = 7
BLOCK_BYTES: Final = 64 << 10
SLOTS: Final = 1024
MEMORY: Final = SLOTS * BLOCK_BYTES
CALL: Final = 64  # blocks in a call
SHAPES: Final = ((600, 600, 600), (2000,))
SHARDS: Final = (1, 4)
CONNECTIONS: Final = (1, 3)


def set_chain(clients: Sequence[KVStoreClient], keys: KeyArray) -> None:
    """Set a chain in calls of `CALL` blocks. The calls alternate between the clients."""
    blocks = np.zeros((CALL, BLOCK_BYTES), dtype=np.uint8)
    turns = itertools.cycle(clients)
    for start in range(0, len(keys), CALL):
        part = keys[start : start + CALL]
        parent = keys[start - 1] if start else None
        next(turns).set(part, blocks[: len(part)], deferred=False, parent=parent, position=start)


def round_of(policy: str, lengths: Sequence[int], shards: int, connections: int) -> list[tuple[int, int]]:
    """Return, for each chain, the number of its blocks that are present, and the number of those that are usable."""
    rng = np.random.default_rng()
    chains = [rng.integers(0, 256, (length, 16), dtype=np.uint8) for length in lengths]
    namespace = Namespace(model="benchmarks.eviction.chains", dtype="uint8", block_tokens=1, block_bytes=BLOCK_BYTES)
    flags = ["--memory", f"{MEMORY}B", "--segment", "4MiB", "--policy", policy]
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(MEMORY, shards, flags=flags))
        clients = [stack.enter_context(KVStoreClient(endpoint, namespace, timeout_s=30)) for _ in range(connections)]
        for chain in chains:
            set_chain(clients, chain)
        return [(int(clients[0].contains(chain).sum()), clients[0].match_prefix(chain)) for chain in chains]


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, ROUNDS, timed=False)
    cases = list(itertools.product(SHAPES, SHARDS, CONNECTIONS, BlockIndex.POLICIES))
    table = Table("chains", "shards", "connections", "policy", "least usable of a chain", "usable of memory")
    with benchmark.steps("chains", len(cases) * benchmark.rounds) as step:
        for lengths, shards, connections, policy in cases:
            chain_shares, memory_shares = [], []
            for _ in range(benchmark.rounds):
                found = round_of(policy, lengths, shards, connections)
                chain_shares.append(min(usable / present for present, usable in found if present))
                memory_shares.append(sum(usable for _, usable in found) / SLOTS)
                step()
            sizes = " + ".join(map(str, lengths))
            shares = {"chain": chain_shares, "memory": memory_shares}
            name = f"{sizes} in {SLOTS} slots, {shards} shards, {connections} connections, {policy}"
            benchmark.found(name, **{part: [round(share, 4) for share in each] for part, each in shares.items()})
            texts = [f"{np.median(each):.3f} ({min(each):.3f} … {max(each):.3f})" for each in shares.values()]
            table.add_row(sizes, str(shards), str(connections), policy, *texts)
    console().print(table)
    benchmark.finish(slots=SLOTS, block_bytes=BLOCK_BYTES, call=CALL)


if __name__ == "__main__":
    main()
