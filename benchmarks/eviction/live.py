"""Replays the trace against a running server, to compare the server with the simulator at the same capacity.

The size of blocks is chosen so that the server's memory holds the wanted number of blocks. The blocks are in a separate
namespace, which is emptied afterwards. As in the simulator, requests do not overlap. The two hit rates are comparable
only if the server has one shard, no disk tier and no other blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.eviction.simulator import ServerCache, replay
from benchmarks.eviction.traces import Chain, Trace
from benchmarks.remote_kv_cache.processes import kvstore_server
from kvstore.sizes import format_size
from kvstore.wire import NamespaceInfo, ShardInfo
from kvstore.wire.status import segment_slots
from kvstore_client import KVStoreClient, Namespace

AGREEMENT: Final = 0.01  # the largest allowed difference between the live and the simulated hit rate
MAX_BLOCK_BYTES: Final = 64 << 10  # larger blocks would only make the replay slower
_SEGMENT_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096  # the approximate size for a server that is started here


class LiveError(Exception):
    """The trace cannot be replayed against this server. The message says why, and what to do."""


@dataclass(frozen=True)
class LiveResult:
    """The result of a live replay. `capacity`: the number of blocks for which the server had room."""

    policy: str
    block_bytes: int
    capacity: int
    live: float
    simulated: float


class LiveCache:
    """A server's namespace, used as an engine would use it: a request looks up a chain, gets the blocks that were
    found, and sets the rest.

    `call_blocks` has the same meaning as for `ServerCache`, which makes the same calls. The client `asking` makes the
    look-ups, and the client `moving` makes all other calls.
    """

    def __init__(self, asking: KVStoreClient, moving: KVStoreClient, trace: Trace, call_blocks: int | None) -> None:
        self._asking, self._moving = asking, moving
        self._keys = trace.keys
        self._call_blocks = call_blocks
        longest = max(len(chain) for chain in trace.chains)
        self._blocks = np.zeros((longest, asking.namespace.block_bytes), dtype=np.uint8)
        self._out = np.empty_like(self._blocks)

    def request(self, chain: Chain) -> int:
        """Request a chain, head first, and set the missing blocks. Return how many leading blocks were present."""
        keys, as_connector, most = self._keys[chain], self._call_blocks is not None, self._call_blocks or len(chain)
        found = self._asking.match_prefix(keys, refresh=as_connector)
        run = 0
        while run < found:
            part = keys[run : min(found, run + most)]
            present = self._moving.get_into(part, self._out[: len(part)])
            run += len(part) if present.all() else int(np.argmin(present))
            if not present.all():
                break
        for start in range(run, len(chain), most):
            part = keys[start : start + most]
            if as_connector:
                self._moving.contains(part)
            parent = keys[start - 1] if start else None
            self._moving.set(part, self._blocks[: len(part)], deferred=False, parent=parent, position=start)
        return run


def own_server(wanted: int) -> AbstractContextManager[str]:
    """Start a server of this checkout with room for about `wanted` blocks, and yield its endpoint."""
    segments = -(-wanted * _BLOCK_BYTES // _SEGMENT_BYTES)
    flags = ("--memory", f"{segments * _SEGMENT_BYTES}B", "--segment", f"{_SEGMENT_BYTES}B")
    return kvstore_server(0, flags=flags)


def replay_live(
    trace: Trace,
    endpoint: str,
    wanted: int,
    call_blocks: int | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> LiveResult:
    """Replay the trace with room for about `wanted` blocks. Raises `LiveError`, or the client's `KVStoreError`."""
    shard = _only_shard(endpoint)
    block_bytes = _block_bytes(shard, wanted)
    namespace = _namespace(block_bytes)
    with KVStoreClient(endpoint, namespace) as client, KVStoreClient(endpoint, namespace) as other:
        try:
            moving = client if call_blocks is None else other
            live = replay(trace, LiveCache(client, moving, trace, call_blocks), progress)
            mine = _namespace_info(client)
        finally:
            client.delete(trace.keys)
    # The server's memory grows with its blocks, so a server that has evicted nothing is not full yet.
    segments = mine.segments if mine.evicted else shard.memory_limit_bytes // shard.segment_bytes
    slots = segment_slots(shard.segment_bytes, block_bytes)
    with ServerCache(shard.policy, trace.keys, slots, segments, call_blocks) as cache:
        simulated = replay(trace, cache)
    return LiveResult(shard.policy, block_bytes, segments * slots, live, simulated)


def _namespace(block_bytes: int) -> Namespace:
    name = f"benchmarks.eviction {secrets.token_hex(8)}"
    return Namespace(model=name, dtype="uint8", block_tokens=1, block_bytes=block_bytes)


def _only_shard(endpoint: str) -> ShardInfo:
    with KVStoreClient(endpoint, _namespace(1)) as client:
        shards = client.info().shards
    if len(shards) != 1:
        raise LiveError(f"{endpoint} has {len(shards)} shards, but the simulator has one: use --shards 1")
    shard = shards[0]
    if shard.disk is not None:
        raise LiveError(f"{endpoint} has a disk tier, but the simulator has none: do not use --disk")
    others = sum(namespace.blocks for namespace in shard.namespaces)
    if others:
        raise LiveError(f"{endpoint} holds {others} other blocks: use an empty server")
    return shard


def _block_bytes(shard: ShardInfo, wanted: int) -> int:
    """Return the block size with which the server's memory holds about `wanted` blocks."""
    segments = shard.memory_limit_bytes // shard.segment_bytes
    block_bytes = shard.segment_bytes // max(1, round(wanted / segments))
    if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        most = wanted * MAX_BLOCK_BYTES
        raise LiveError(
            f"{wanted} blocks in the server's {format_size(shard.memory_limit_bytes)} have {block_bytes} bytes each: "
            f"expected 1 to {MAX_BLOCK_BYTES}; start the server with --memory between {wanted}B and {format_size(most)}"
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
