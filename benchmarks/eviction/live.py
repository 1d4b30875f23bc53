"""Replays the trace against a running server, to compare it with the simulator at the same capacity.

The size of blocks is chosen so that the server's memory holds as many as wanted. They are in a namespace of its own,
which is emptied afterwards. As in the simulator, requests do not overlap. For the two hit rates to be comparable, the
server must have one shard, no disk tier and no other blocks.
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

AGREEMENT: Final = 0.01  # between live and simulated hit rate
MAX_BLOCK_BYTES: Final = 64 << 10  # larger ones only take longer
_SEGMENT_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096  # about, on a server of our own


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
    """A server's namespace, used as an engine uses it: look up the chain, get the blocks found, set the rest.

    `call_blocks`: as for `ServerCache`, whose calls these are; `asking` makes the look-ups, `moving` everything else.
    """

    def __init__(self, asking: KVStoreClient, moving: KVStoreClient, trace: Trace, call_blocks: int | None) -> None:
        self._asking, self._moving = asking, moving
        self._keys = trace.keys
        self._call_blocks = call_blocks
        longest = max(len(chain) for chain in trace.chains)
        self._blocks = np.zeros((longest, asking.namespace.block_bytes), dtype=np.uint8)
        self._out = np.empty_like(self._blocks)

    def request(self, chain: Chain) -> int:
        """Ask for a chain, head first, and set the missing blocks. -> how many leading blocks were there."""
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
    """A server of this checkout with room for about `wanted` blocks. -> its endpoint."""
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
    """Replay with room for about `wanted` blocks. Raises `LiveError`, and `KVStoreError` as the client does."""
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
    # It grows as it fills: one that evicted nothing is not full.
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
