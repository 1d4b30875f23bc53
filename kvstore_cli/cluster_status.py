"""A cluster as one of its clients sees it: the state of every node, and where the block of a key is.

Each call asks every shard: for people and scripts, not for a data path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore import wire
from kvstore_cli.output import CommandFailed
from kvstore_cli.store_state import ask_every_shard
from kvstore_client._calls.exchange import outcome
from kvstore_client._calls.requests import Call, keyed_message, milliseconds
from kvstore_client._links.operations import Operation
from kvstore_client._links.sending import Message
from kvstore_client._links.view import NOBODY, Place
from kvstore_client.client import KVStoreClient
from kvstore_client.keys import pack_keys


class NodeStatus(msgspec.Struct, frozen=True):
    """One node. Counters are sums over its shards that answer, since each started."""

    node: str
    zone: str  # empty: none
    state: str  # as registered; "listed" without a directory
    version: str
    endpoint: str  # of its first shard
    shards: int
    shards_up: int
    connections: int
    streams: int
    memory_used_bytes: int
    memory_limit_bytes: int
    blocks: int
    block_bytes: int  # of those blocks, in memory
    disk_blocks: int
    hits: int
    misses: int
    evicted: int
    bytes_in: int
    bytes_out: int
    uptime_s: float  # of its youngest shard
    draining: bool  # it is shutting down

    @property
    def hit_rate(self) -> float | None:
        """Of the blocks asked for, those that were there; None: none was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


class ClusterStatus(msgspec.Struct, frozen=True):
    """All nodes at one time."""

    epoch: int
    time: float  # unix seconds
    nodes: Sequence[NodeStatus]
    balance: float | None  # the fullest shard's bytes, as a multiple of the mean by weight; None: nothing is stored
    hit_rate: float | None
    directory: str  # why etcd or DNS cannot be asked for the members; empty: it can, or the nodes are a list
    silent: Sequence[str]  # why shards do not answer

    @property
    def failure(self) -> CommandFailed | None:
        """What is wrong with the cluster; None: every shard answers and the member list is up to date."""
        if self.directory:
            known = "the list of nodes may be out of date" if self.nodes else "no node is known"
            return CommandFailed("unreachable", f"{self.directory}; {known}")
        if not self.nodes:
            return CommandFailed("unreachable", "no node is known")
        down = sum(node.shards - node.shards_up for node in self.nodes)
        if down:
            total = sum(node.shards for node in self.nodes)
            return CommandFailed("unreachable", f"{down} of {total} shards did not answer: {'; '.join(self.silent)}")
        return None


def cluster_status(client: KVStoreClient) -> ClusterStatus:
    """Ask every shard. Shards that do not answer are counted as down, also without `fail_open`."""
    view = client._core.view
    answers = ask_every_shard(client)
    infos = {answer.place.link.name: answer.info for answer in answers if answer.info is not None}
    by_node: dict[str, list[Place]] = {}
    for place in view.places:
        by_node.setdefault(place.node, []).append(place)
    nodes = [_node_status(places, infos) for _, places in sorted(by_node.items())]
    hits, asked = sum(node.hits for node in nodes), sum(node.hits + node.misses for node in nodes)
    return ClusterStatus(
        epoch=view.epoch,
        time=time.time(),
        nodes=nodes,
        balance=_balance(view.places, infos),
        hit_rate=hits / asked if asked else None,
        directory=client._core.directory_lost,
        silent=list(dict.fromkeys(answer.reason for answer in answers if answer.info is None)),
    )


def _node_status(places: Sequence[Place], infos: dict[str, wire.ShardInfo]) -> NodeStatus:
    first = places[0]
    up = [infos[place.link.name] for place in places if place.link.name in infos]
    namespaces = [namespace for info in up for namespace in info.namespaces]
    return NodeStatus(
        node=first.node,
        zone=_zone(first),
        state=first.state,
        version=up[0].version if up else "",
        endpoint=f"tcp://{first.link.host}:{first.link.port}",
        shards=len(places),
        shards_up=len(up),
        connections=sum(info.connections for info in up),
        streams=sum(info.streams for info in up),
        memory_used_bytes=sum(info.memory_used_bytes for info in up),
        memory_limit_bytes=sum(info.memory_limit_bytes for info in up),
        blocks=sum(namespace.blocks for namespace in namespaces),
        block_bytes=sum(namespace.blocks * namespace.block_bytes for namespace in namespaces),
        disk_blocks=sum(namespace.disk_blocks for namespace in namespaces),
        hits=sum(namespace.hits for namespace in namespaces),
        misses=sum(namespace.misses for namespace in namespaces),
        evicted=sum(namespace.evicted for namespace in namespaces),
        bytes_in=sum(info.bytes_in for info in up),
        bytes_out=sum(info.bytes_out for info in up),
        uptime_s=min((info.uptime_s for info in up), default=0.0),
        draining=any(info.draining for info in up),
    )


def _zone(place: Place) -> str:
    """A node without a zone is one of its own in a view."""
    return "" if place.zone == place.node else place.zone


def _balance(places: Sequence[Place], infos: dict[str, wire.ShardInfo]) -> float | None:
    """Over the shards that blocks are set on."""
    stored, weights = [], []
    for place in places:
        info = infos.get(place.link.name)
        if info is not None and place.new:
            stored.append(sum(namespace.blocks * namespace.block_bytes for namespace in info.namespaces))
            weights.append(place.link.weight)
    if not sum(stored):
        return None
    mean = sum(stored) / sum(weights)
    return max(each / weight for each, weight in zip(stored, weights, strict=True)) / mean


class Location(msgspec.Struct, frozen=True):
    """A shard that may have a block."""

    role: str  # "owner", "replica", or "old owner": where it was before a node joined, or began to drain
    node: str
    zone: str  # empty: none
    state: str
    shard: str
    endpoint: str
    present: bool | None  # None: it was not asked, or did not answer


def locate(client: KVStoreClient, key: bytes, replicas: int, ask: bool) -> list[Location]:
    """The shards that own a key, in the order in which clients with so many `replicas` ask them. `ask`: whether they
    have its block, too.

    The client itself is to have one replica: shards remember the most that a client of a namespace said, and move
    fewer blocks when they drain.
    """
    view = client._core.view
    packed = pack_keys([key])
    if not view.links:
        raise client._core.no_shards()
    owners = view.owners(packed, replicas)[0].tolist()
    others = [number for number in view.readers(packed, replicas)[0].tolist() if number != NOBODY]
    numbers = list(dict.fromkeys([*owners, *others]))
    present = _present(client, packed, numbers) if ask else {}
    found = []
    for number in numbers:
        place = view.places[number]
        role = "owner" if number == owners[0] else "replica" if number in owners else "old owner"
        link = place.link
        endpoint = f"tcp://{link.host}:{link.port}"
        found.append(Location(role, place.node, _zone(place), place.state, link.name, endpoint, present.get(number)))
    return found


def _present(client: KVStoreClient, packed: np.ndarray, numbers: Sequence[int]) -> dict[int, bool]:
    core = client._core
    view, timeout_s = core.view, core.timeout_s

    def message(call: Call) -> Message:
        return keyed_message(wire.Contains(call.operation.id, milliseconds(timeout_s), 1, packed.shape[1]), packed)

    calls = [Call(view.links[number], Operation(core.next_id()), np.arange(1), message) for number in numbers]
    client._exchange.run(calls, time.monotonic() + timeout_s)
    replies = [outcome(call, wire.ContainsReply, fail_open=True) for call in calls]
    return {number: reply.present == b"\1" for number, reply in zip(numbers, replies, strict=True) if reply is not None}
