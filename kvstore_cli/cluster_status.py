"""The state of every node of a cluster, as one of its clients sees it.

Each look asks every shard. It is meant for people and scripts, not for a data path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvstore_cli.output import CommandFailed
from kvstore_client import KVStoreClient, ShardStatus


class NodeStatus(msgspec.Struct, frozen=True):
    """One node. Counters are sums over those of its shards that answer, since each of them started."""

    node: str
    zone: str  # empty: none
    state: str  # as registered; "listed" without a directory
    version: str
    endpoint: str  # of the node's first shard
    shards: int
    shards_up: int
    connections: int
    streams: int
    memory_used_bytes: int
    memory_limit_bytes: int
    blocks: int
    block_bytes: int  # total size of `blocks`, in memory
    disk_blocks: int
    hits: int
    misses: int
    evicted: int
    bytes_in: int
    bytes_out: int
    uptime_s: float  # of the node's youngest shard
    draining: bool  # whether a shard is shutting down

    @property
    def hit_rate(self) -> float | None:
        """The share of the requested blocks that were found; None if no block was requested."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


class ClusterStatus(msgspec.Struct, frozen=True):
    """All nodes at one time."""

    epoch: int
    time: float  # unix seconds
    nodes: Sequence[NodeStatus]
    balance: float | None  # the fullest shard's bytes, as a multiple of the mean by weight; None: nothing is stored
    hit_rate: float | None  # of all nodes; None: no block was requested
    directory: str  # why etcd or DNS cannot be asked for the members; empty if it can, or if the nodes are a list
    silent: Sequence[str]  # why shards do not answer

    @property
    def failure(self) -> CommandFailed | None:
        """What is wrong with the cluster; None if every shard answers and the member list is up to date."""
        if self.directory:
            known = "the list of nodes may be out of date" if self.nodes else "no node is known"
            return CommandFailed("unreachable", f"{self.directory}; {known}")
        if not self.nodes:
            return CommandFailed(
                "unreachable", "no node is registered: check the name of the cluster, and that its nodes run"
            )
        down = sum(node.shards - node.shards_up for node in self.nodes)
        if down:
            total = sum(node.shards for node in self.nodes)
            return CommandFailed("unreachable", f"{down} of {total} shards did not answer: {'; '.join(self.silent)}")
        return None


def cluster_status(client: KVStoreClient) -> ClusterStatus:
    """Ask every shard. Shards that do not answer count as down, even if the client is not `fail_open`."""
    shards = client.shards()
    by_node: dict[str, list[ShardStatus]] = {}
    for shard in shards:
        by_node.setdefault(shard.node, []).append(shard)
    nodes = [_node_status(mine) for _, mine in sorted(by_node.items())]
    hits, asked = sum(node.hits for node in nodes), sum(node.hits + node.misses for node in nodes)
    return ClusterStatus(
        epoch=client.epoch,
        time=time.time(),
        nodes=nodes,
        balance=_balance(shards),
        hit_rate=hits / asked if asked else None,
        directory=client.directory_error,
        silent=list(dict.fromkeys(shard.error for shard in shards if shard.info is None)),
    )


def _node_status(shards: Sequence[ShardStatus]) -> NodeStatus:
    first = shards[0]
    up = [shard.info for shard in shards if shard.info is not None]
    namespaces = [namespace for info in up for namespace in info.namespaces]
    return NodeStatus(
        node=first.node,
        zone=first.zone,
        state=first.state,
        version=up[0].version if up else "",
        endpoint=first.endpoint,
        shards=len(shards),
        shards_up=len(up),
        connections=sum(info.connections for info in up),
        streams=sum(info.streams for info in up),
        memory_used_bytes=sum(info.memory_used_bytes for info in up),
        memory_limit_bytes=sum(info.memory_limit_bytes for info in up),
        blocks=sum(namespace.blocks for namespace in namespaces),
        block_bytes=sum(namespace.blocks * namespace.block_bytes for namespace in namespaces),
        disk_blocks=sum(namespace.disk_blocks for namespace in namespaces),
        hits=sum(info.hits for info in up),
        misses=sum(info.misses for info in up),
        evicted=sum(info.evicted for info in up),
        bytes_in=sum(info.bytes_in for info in up),
        bytes_out=sum(info.bytes_out for info in up),
        uptime_s=min((info.uptime_s for info in up), default=0.0),
        draining=any(info.draining for info in up),
    )


def _balance(shards: Sequence[ShardStatus]) -> float | None:
    """The balance of the shards that blocks are set on: see `ClusterStatus.balance`."""
    stored, weights = [], []
    for shard in shards:
        if shard.info is not None and shard.takes_sets:
            stored.append(sum(namespace.blocks * namespace.block_bytes for namespace in shard.info.namespaces))
            weights.append(shard.weight)
    if not sum(stored):
        return None
    mean = sum(stored) / sum(weights)
    return max(each / weight for each, weight in zip(stored, weights, strict=True)) / mean
