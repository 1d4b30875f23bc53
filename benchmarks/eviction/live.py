"""Replays the trace against a running server, to compare it with the simulator at the same capacity.

The size of blocks is chosen so that the server's memory holds as many as wanted. They are in a namespace of its own,
which is emptied afterwards. As in the simulator, requests do not overlap. For the two hit rates to be comparable, the
server must have one shard, no disk tier and no other blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.eviction.simulator import ServerCache, replay
from benchmarks.eviction.traces import Chain, Trace
from kvstore.sizes import format_size
from kvstore.wire import NamespaceInfo, ShardInfo
from kvstore_client import KVStoreClient, Namespace

AGREEMENT: Final = 0.01  # between live and simulated hit rate
MAX_BLOCK_BYTES: Final = 64 << 10  # larger ones only take longer


class LiveError(Exception):
    """This server cannot replay a trace. The message says why, and what to do."""


@dataclass(frozen=True)
class LiveResult:
    """The result of a live replay. `capacity`: how many blocks the server had room for."""

    policy: str
    block_bytes: int
    capacity: int
    live: float
    simulated: float


class LiveCache:
    """A server's namespace, used as an engine uses it: look up the chain, get the blocks found, set the rest."""

    def __init__(self, client: KVStoreClient, trace: Trace) -> None:
        self._client = client
        self._keys = trace.keys
        longest = max(len(chain) for chain in trace.chains)
        self._blocks = np.zeros((longest, client.namespace.block_bytes), dtype=np.uint8)
        self._out = np.empty_like(self._blocks)

    def request(self, chain: Chain) -> int:
        """Ask for a chain, head first, and set the missing blocks. -> how many leading blocks were there."""
        keys = self._keys[chain]
        run = self._client.match_prefix(keys)
        if run:
            present = self._client.get_into(keys[:run], self._out[:run])
            run = run if present.all() else int(np.argmin(present))
        if run < len(chain):
            parent = keys[run - 1] if run else None
            self._client.set(keys[run:], self._blocks[: len(chain) - run], deferred=False, parent=parent, position=run)
        return run


def replay_live(
    trace: Trace, endpoint: str, wanted: int, progress: Callable[[int], object] = lambda done: None
) -> LiveResult:
    """Replay with room for about `wanted` blocks. Raises `LiveError`, and `KVStoreError` as the client does."""
    shard = _only_shard(endpoint)
    block_bytes = _block_bytes(shard, wanted)
    namespace = _namespace(block_bytes)
    with KVStoreClient(endpoint, namespace) as client:
        try:
            live = replay(trace, LiveCache(client, trace), progress)
            mine = _namespace_info(client)
        finally:
            client.delete(trace.keys)
    # It grows as it fills: one that evicted nothing is not full.
    segments = mine.segments if mine.evicted else shard.memory_limit_bytes // shard.segment_bytes
    slots = shard.segment_bytes // block_bytes
    with ServerCache(shard.policy, trace.keys, slots, segments) as cache:
        simulated = replay(trace, cache)
    return LiveResult(shard.policy, block_bytes, segments * slots, live, simulated)


def _namespace(block_bytes: int) -> Namespace:
    name = f"benchmarks.eviction {secrets.token_hex(8)}"
    return Namespace(model=name, dtype="uint8", block_tokens=1, block_bytes=block_bytes)


def _only_shard(endpoint: str) -> ShardInfo:
    with KVStoreClient(endpoint, _namespace(1)) as client:
        shards = client.info().shards
    if len(shards) != 1:
        raise LiveError(f"{endpoint} has {len(shards)} shards: the simulator is one; start the server with --shards 1")
    shard = shards[0]
    if shard.disk is not None:
        raise LiveError(f"{endpoint} has a disk tier: the simulator has none; start the server without --disk")
    others = sum(namespace.blocks for namespace in shard.namespaces)
    if others:
        raise LiveError(f"{endpoint} holds {others} blocks, which take room: use a server that holds none")
    return shard


def _block_bytes(shard: ShardInfo, wanted: int) -> int:
    """The block size with which the server's memory holds about `wanted` blocks."""
    segments = shard.memory_limit_bytes // shard.segment_bytes
    block_bytes = shard.segment_bytes // max(1, round(wanted / segments))
    if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        most = wanted * MAX_BLOCK_BYTES
        raise LiveError(
            f"the server's {format_size(shard.memory_limit_bytes)} hold {wanted} blocks of {block_bytes} bytes: "
            f"expected 1 to {MAX_BLOCK_BYTES}; start it with --memory between {wanted}B and {format_size(most)}"
        )
    return block_bytes


def _namespace_info(client: KVStoreClient) -> NamespaceInfo:
    (mine,) = (
        namespace
        for shard in client.info().shards
        for namespace in shard.namespaces
        if namespace.id == client.namespace.id
    )
    return mine
