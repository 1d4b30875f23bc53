"""The content of `/status.json`: a node's state, what changed in it lately, and what there is to say about it.

Its fields are for the page and for scripts; docs/operations.md has a table of them. Plain data; any thread. Names of
namespaces come from clients: whoever shows them must not take them for markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvstore.node.rates import Table, amount, below, counts_of, hit_rate, quantile_s
from kvstore.node.words import Message
from kvstore.wire import NamespaceInfo, ShardInfo
from kvstore.wire.status import fields_of

MAX_NAMESPACES = 50  # shown; those with the most traffic, then those with the most memory
MAX_NAME = 200  # characters of a model's name


class DiskRow(msgspec.Struct, frozen=True):
    """The disk tier of a shard."""

    state: str  # "recovering", "on" or "off"
    used_bytes: int
    limit_bytes: int
    blocks: int
    dirty_bytes: int  # in memory, waiting to be written
    behind: bool


class ShardRow(msgspec.Struct, frozen=True):
    """One shard. Without an answer there is only the reason. Then come the fields of INFO that have a column."""

    shard: int
    reason: str = ""  # why it does not answer; empty: it does
    pid: int = 0
    uptime_s: float = 0.0
    connections: int = 0
    memory_used_bytes: int = 0
    memory_limit_bytes: int = 0
    resident_bytes: int = 0
    blocks: int = 0
    bytes_in_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    hit_rate: float | None = None  # of the last minute; null: nothing was asked for
    disk: DiskRow | None = None


COLUMNS: Final = [field for field in fields_of(ShardInfo) if field.page]
_ShardRow: Final[Any] = msgspec.defstruct(
    "_ShardRow", [(f.name, float, 0) for f in COLUMNS], bases=(ShardRow,), frozen=True
)


class NamespaceRow(msgspec.Struct, frozen=True):
    """One namespace, on all shards that answer."""

    id: str
    model: str
    block_bytes: int
    blocks: int  # in memory
    memory_bytes: int
    disk_blocks: int
    disk_bytes: int
    hits: int  # in the last minute, as the next
    misses: int
    hit_rate: float | None
    created: int  # since the shards started, as the next
    evicted: int


class RequestRow(msgspec.Struct, frozen=True):
    """The requests of one verb and tier in the last minute."""

    verb: str
    tier: str
    count: int
    p50_s: float | None
    p99_s: float | None


class MemberRow(msgspec.Struct, frozen=True):
    """A node of the cluster."""

    node: str
    state: str
    zone: str
    version: str
    shards: int
    metrics: str  # HOST:PORT of its HTTP server; empty: none
    here: bool  # it is this node


class ClusterRow(msgspec.Struct, frozen=True):
    """The node's membership."""

    registered: bool
    state: str
    epoch: int
    directory_up: bool
    members: list[MemberRow]


class History(msgspec.Struct, frozen=True):
    """The last minutes, the oldest first: one number a look in each list. Rates are those since the look before."""

    time: list[float]  # unix seconds
    hit_rate: list[float | None]
    bytes_in_per_s: list[float]
    bytes_out_per_s: list[float]
    evicted_per_s: list[float]  # from memory
    disk_evicted_per_s: list[float]
    requests_per_s: list[float]  # SETs, GETs and look-ups


class Status(msgspec.Struct, frozen=True):
    """All of `/status.json`."""

    time: float  # of this look, unix seconds
    interval_s: float  # between two looks
    node: str
    version: str
    uptime_s: float  # of the supervisor
    restarts: int  # of shards
    verdict: str  # "ok", "warning" or "bad": the worst of `messages`; notes are ok
    messages: list[Message]  # the worst first
    hits: int  # blocks, on all shards in the last minute, as the next
    misses: int
    shards: list[ShardRow]
    requests: list[RequestRow]
    namespaces: list[NamespaceRow]
    namespaces_left_out: int
    cluster: ClusterRow | None  # null: the node is in no cluster
    history: History
    settings: dict[str, str]


def shard_row(shard: int, state: ShardInfo | str, last: Table, seconds: float, minute: Table) -> ShardRow:
    """-> the row of a shard. last: what it counted in the last so many seconds; minute: in the last minute."""
    if isinstance(state, str):
        return ShardRow(shard, state)
    disk = state.disk
    row: ShardRow = _ShardRow(
        shard=shard,
        pid=state.pid,
        uptime_s=round(state.uptime_s, 1),
        connections=state.connections - 1,  # without that of this look
        memory_used_bytes=state.memory_used_bytes,
        memory_limit_bytes=state.memory_limit_bytes,
        resident_bytes=state.rss_bytes,
        blocks=sum(namespace.blocks for namespace in state.namespaces),
        bytes_in_per_s=round(last.get(("bytes_in",), 0) / seconds) if seconds else 0,
        bytes_out_per_s=round(last.get(("bytes_out",), 0) / seconds) if seconds else 0,
        hit_rate=hit_rate(minute.get(("hits",), 0), minute.get(("misses",), 0)),
        disk=None if disk is None else DiskRow(*(getattr(disk, name) for name in DiskRow.__struct_fields__)),
        **{field.name: amount(field, [state], minute) for field in COLUMNS},
    )
    return row


def request_rows(minute: Table) -> list[RequestRow]:
    """-> the requests of all shards, by verb and tier."""
    rows = []
    for verb, tier in sorted({(key[1], key[2]) for key in minute if key[0] == "took"}):
        counts = counts_of(minute, verb, tier)
        rows.append(RequestRow(verb, tier, sum(counts), quantile_s(counts, 0.5), quantile_s(counts, 0.99)))
    return rows


def namespace_rows(shards: Sequence[ShardInfo], minute: Table) -> tuple[list[NamespaceRow], int]:
    """-> the namespaces that matter most, and how many more there are."""
    parts: dict[str, list[NamespaceInfo]] = {}
    for shard in shards:
        for namespace in shard.namespaces:
            parts.setdefault(namespace.id, []).append(namespace)

    def traffic(item: tuple[str, list[NamespaceInfo]]) -> tuple[int, int]:
        return below(minute, "namespace", item[0]), sum(part.memory_bytes for part in item[1])

    found = sorted(parts.items(), key=traffic, reverse=True)
    rows = [_namespace_row(id_, mine, minute) for id_, mine in found[:MAX_NAMESPACES]]
    return rows, max(0, len(found) - MAX_NAMESPACES)


SUMS: Final = ("blocks", "memory_bytes", "disk_blocks", "disk_bytes", "created", "evicted")


def _namespace_row(id_: str, parts: Sequence[NamespaceInfo], minute: Table) -> NamespaceRow:
    hits, misses = (minute.get(("namespace", id_, name), 0) for name in ("hits", "misses"))
    return NamespaceRow(
        id=id_,
        model=model_of(parts[0]),
        block_bytes=parts[0].block_bytes,
        hits=hits,
        misses=misses,
        hit_rate=hit_rate(hits, misses),
        **{name: sum(getattr(part, name) for part in parts) for name in SUMS},
    )


def model_of(namespace: NamespaceInfo) -> str:
    """-> the model's name, as a client chose it, but for what is longer than a name."""
    return str(msgspec.json.decode(namespace.namespace).get("model", ""))[:MAX_NAME]
