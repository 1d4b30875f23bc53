"""Measures the cost of a policy, which is the time per block to look up, touch and insert blocks in a full index.

The index is the server's, so a touch includes the look-up of the key and the policy's work. An insert includes an
eviction, a look-up, and the begin and end of the block's write. Blocks come in chains and have random slots, as in a
server.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from benchmarks.eviction.traces import KEY_BYTES
from benchmarks.remote_kv_cache.harness import Operation
from kvstore._index import BlockIndex

BLOCKS: Final = 1_000_000
QUICK_BLOCKS: Final = 50_000
CHAIN: Final = 64
CHAINS: Final = 2000  # chains in a round
ASK: Final = "ask"
TOUCH: Final = "touch"
INSERT: Final = "insert"
TARGET_S: Final = 1e-6  # seconds for a touch or an insert


class FullIndex:
    """An index without a free slot. The time of an operation is the time per block."""

    def __init__(self, policy: str, blocks: int) -> None:
        self._index = BlockIndex(KEY_BYTES, blocks, policy)
        self._index.attach()
        self._random = np.random.default_rng(blocks)
        self._tick = 1
        self._chains: list[bytes] = []
        for _ in range(0, blocks, CHAIN):
            self._insert(self._random.bytes(CHAIN * KEY_BYTES))

    def operations(self) -> list[Operation]:
        """Return the operations. They do not set `moved`, because only their seconds count."""
        return [
            Operation(ASK, self._ask, before=self._choose),
            Operation(TOUCH, self._touch, before=self._choose),
            Operation(INSERT, self._insert_chains, before=self._make),
        ]

    def _choose(self) -> None:
        """Choose blocks. Neighbours are mostly from the same chain."""
        ready = self._index.ready_slots()
        starts = self._random.integers(0, len(ready) - CHAIN, CHAINS).tolist()
        self._chains = [self._index.keys_of(ready[start : start + CHAIN]) for start in starts]

    def _make(self) -> None:
        self._chains = [self._random.bytes(CHAIN * KEY_BYTES) for _ in range(CHAINS)]

    def _ask(self) -> float:
        begin = time.perf_counter()
        for keys in self._chains:
            self._index.contains(keys, 0.0, False, 0)
        return (time.perf_counter() - begin) / (CHAIN * CHAINS)

    def _touch(self) -> float:
        begin = time.perf_counter()
        for keys in self._chains:
            self._index.contains(keys, 0.0, True, self._ticks())
        return (time.perf_counter() - begin) / (CHAIN * CHAINS)

    def _insert_chains(self) -> float:
        begin = time.perf_counter()
        for keys in self._chains:
            self._insert(keys)
        return (time.perf_counter() - begin) / (CHAIN * CHAINS)

    def _insert(self, keys: bytes) -> None:
        index = self._index
        room = index.missing(keys) - index.free
        if room > 0:
            index.evict(room, 0.0)
        slots = index.reserve(keys, False, self._ticks())
        index.commit(slots, _SUMS, self._ticks())
        index.link(keys, b"", slots)  # each batch is a separate chain

    def _ticks(self) -> int:
        self._tick += CHAIN
        return self._tick - CHAIN


_SUMS: Final = np.zeros(CHAIN, dtype=np.uint64)
