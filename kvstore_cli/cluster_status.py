"""The state of every node of a cluster, as a client sees it, and its output by `kvstore cluster` for people.

Every poll asks every shard, so this module is meant for people and scripts, and not for a data path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live

from kvstore.sizes import format_size
from kvstore_cli.output import CommandFailed
from kvstore_cli.plain_table import fitting_table
from kvstore_cli.store_state import reported
from kvstore_client import KVStoreClient, ShardStatus

_NODE_COLUMNS: Final = ("node", "state", "zone", "up", "clients", "memory", "blocks", "on disk", "hits", "in / out")
# The order in which columns are left out of a narrow terminal. A node's id, state and up are always shown.
_STATUS_LEFT_OUT_FIRST: Final = ("on disk", "in / out", "clients", "zone", "memory", "blocks", "hits")


class NodeStatus(msgspec.Struct, frozen=True):
    """The state of one node. A counter is the sum over the shards that answer, and each shard counts since its
    start."""

    node: str
    zone: str  # empty if it has none
    state: str  # the registered state; "listed" without a directory
    version: str
    endpoint: str  # the address of the node's first shard
    shards: int
    shards_up: int
    connections: int
    streams: int
    memory_used_bytes: int
    memory_limit_bytes: int
    blocks: int
    block_bytes: int  # the total size of `blocks`, in memory
    disk_blocks: int
    hits: int
    misses: int
    evicted: int
    bytes_in: int
    bytes_out: int
    uptime_s: float  # the uptime of the node's youngest shard
    draining: bool  # whether a shard is shutting down

    @property
    def hit_rate(self) -> float | None:
        """The share of requested blocks that were found, or None if no block was requested."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


class ClusterStatus(msgspec.Struct, frozen=True):
    """The state of all nodes at one time."""

    epoch: int
    time: float  # unix seconds
    nodes: Sequence[NodeStatus]
    balance: float | None  # bytes of the fullest shard / weighted mean; None: nothing is stored
    hit_rate: float | None  # the hit rate of all nodes; None if no block was requested
    directory: str  # why etcd or DNS gives no members; empty if it does, or for a fixed list
    silent: Sequence[str]  # why shards do not answer

    @property
    def failure(self) -> CommandFailed | None:
        """The failure that describes what is wrong. It is None if every shard answers and the member list is up to
        date."""
        if self.directory:
            known = (
                "the list of nodes may be out of date"
                if self.nodes
                else "no node is known; to ask nodes without it, name them: --endpoint HOST:PORT"
            )
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
    """Ask every shard for its state. A shard that does not answer counts as down, even if the client is not
    `fail_open`."""
    shards = reported(client)
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
    """Return the balance of the shards on which blocks are set (see `ClusterStatus.balance`)."""
    stored, weights = [], []
    for shard in shards:
        if shard.info is not None and shard.takes_sets:
            stored.append(sum(namespace.blocks * namespace.block_bytes for namespace in shard.info.namespaces))
            weights.append(shard.weight)
    if not sum(stored):
        return None
    mean = sum(stored) / sum(weights)
    return max(each / weight for each, weight in zip(stored, weights, strict=True)) / mean


# ---- output for people -------------------------------------------------------------------------------------------


def print_status(status: ClusterStatus) -> None:
    """Print a table of nodes, and the figures of the whole cluster."""
    console = Console()
    console.print(_status(status, None, console))


def watch_status(look: Callable[[], ClusterStatus], interval_s: float) -> NoReturn:
    """Poll every `interval_s` seconds and show the nodes. Rates and hit rates are those between two polls. Never
    returns.

    If the output is not a terminal, the tables are printed one after the other.
    """
    console = Console()
    before = None
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = look()
            shown = _status(status, before, console)
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
                console.file.flush()
            before = status
            time.sleep(interval_s)


def _status(status: ClusterStatus, before: ClusterStatus | None, console: Console) -> RenderableType:
    old = {node.node: node for node in before.nodes} if before else {}
    seconds = status.time - before.time if before else 0.0
    rows = [_row(node, old.get(node.node), seconds) for node in status.nodes]
    table, left_out = fitting_table(_NODE_COLUMNS, rows, _STATUS_LEFT_OUT_FIRST, console)
    lines = [
        f"epoch {status.epoch}, {len(status.nodes)} node(s)",
        f"balance {_number(status.balance)}: the fullest shard for its weight, as a multiple of the mean",
        f"hit rate {_percent(status.hit_rate)} since the shards started",
    ]
    if left_out:
        lines.append(f"a wider terminal also shows: {', '.join(left_out)}")
    if not status.nodes:
        return Group()
    return Group(table, *lines)


def _row(node: NodeStatus, old: NodeStatus | None, seconds: float) -> list[str]:
    if not node.shards_up:
        return [node.node, node.state, node.zone, f"0/{node.shards}", *["-"] * (len(_NODE_COLUMNS) - 4)]
    # After a restart, a shard counts from 0 again. Its counters then contain only what came after the last poll.
    if old is None or seconds <= 0 or node.uptime_s < seconds:
        hit_rate, moved = node.hit_rate, [format_size(node.bytes_in), format_size(node.bytes_out)]
    else:
        hits, misses = node.hits - old.hits, node.misses - old.misses
        hit_rate = hits / (hits + misses) if hits + misses > 0 else None
        rates = ((node.bytes_in - old.bytes_in) / seconds, (node.bytes_out - old.bytes_out) / seconds)
        moved = [f"{max(0.0, rate) / 1e6:.0f} MB/s" for rate in rates]
    return [
        node.node,
        "stopping" if node.draining else node.state,
        node.zone,
        f"{node.shards_up}/{node.shards}",
        str(node.connections),
        _percent(node.memory_used_bytes / node.memory_limit_bytes if node.memory_limit_bytes else None),
        str(node.blocks),
        str(node.disk_blocks),
        _percent(hit_rate),
        " / ".join(moved),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
