"""The content of `/status.json`: a node's state, its recent changes, and the findings about it.

The HTTP page and scripts read its fields. docs/monitoring.md has a table of them. Plain data; thread-safe. Names of
namespaces come from clients, so code that shows them must not treat them as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import msgspec

from kvstore.node.diagnosis import Finding
from kvstore.node.rates import Table, amount, counts_of, hit_rate, quantile_s
from kvstore.wire import MAX_SHOWN_MODEL, NamespaceInfo, ShardInfo
from kvstore.wire.status import TenantInfo, fields_of

MAX_SHOWN_NAMESPACES = 50  # first the namespaces with the most traffic, then those with the most memory


class DiskRow(msgspec.Struct, frozen=True):
    """The disk tier of a shard."""

    state: str  # "recovering", "on", "out of space" or "off"
    used_bytes: int
    limit_bytes: int
    blocks: int
    dirty_bytes: int  # bytes of blocks in memory that are waiting to be written
    behind: bool


class ShardRow(msgspec.Struct, frozen=True):
    """One shard. If it does not answer, only `shard`, `reason` and `pid` are set. The fields of INFO that have a
    column follow these fields."""

    shard: int
    reason: str = ""  # why it does not answer; empty if it does
    pid: int = 0  # 0 if the shard has no process, which is the case before it is restarted
    uptime_s: float = 0.0
    connections: int = 0
    memory_used_bytes: int = 0
    memory_limit_bytes: int = 0
    resident_bytes: int = 0
    blocks: int = 0
    bytes_in_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    hit_rate: float | None = None  # in the last minute; null if no block was requested
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
    hits: int  # in the last minute, like the next field
    misses: int
    hit_rate: float | None
    created: int  # since the shards started, like the next field
    evicted: int
    tenant: str = ""


class TenantRow(msgspec.Struct, frozen=True):
    """One tenant's use of the node, and its limits there."""

    tenant: str
    memory_bytes: int
    memory_guaranteed_bytes: int
    memory_limit_bytes: int | None  # null if there is no limit, like the limit of the disk
    disk_bytes: int
    disk_limit_bytes: int | None
    connections: int
    refused: int  # in the last minute: what a limit of the tenant refused


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
    metrics: str  # HOST:PORT of its HTTP server; empty if it has none
    here: bool  # whether it is this node


class ClusterRow(msgspec.Struct, frozen=True):
    """The node's membership."""

    registered: bool
    state: str
    epoch: int
    directory_up: bool
    members: list[MemberRow]


class History(msgspec.Struct, frozen=True):
    """The last minutes, as lists with one number per poll, the oldest first. A rate covers the time since the poll
    before."""

    time: list[float]  # unix seconds
    hit_rate: list[float | None]
    bytes_in_per_s: list[float]
    bytes_out_per_s: list[float]
    evicted_per_s: list[float]  # from memory
    disk_evicted_per_s: list[float]
    requests_per_s: list[float]  # SETs, GETs and look-ups


class Status(msgspec.Struct, frozen=True):
    """All of `/status.json`."""

    time: float  # of this poll, unix seconds
    interval_s: float  # between two polls
    node: str
    version: str
    uptime_s: float  # of the supervisor
    restarts: int  # of shards
    verdict: str  # "ok", "warning" or "bad": the worst of `messages`, where notes count as ok
    messages: list[Finding]  # the worst first
    hits: int  # blocks, on all shards in the last minute, like the next field
    misses: int
    shards: list[ShardRow]
    requests: list[RequestRow]
    namespaces: list[NamespaceRow]
    namespaces_left_out: int
    tenants: list[TenantRow]
    cluster: ClusterRow | None  # null if the node is in no cluster
    history: History
    settings: dict[str, str]


def shard_row(shard: int, state: ShardInfo | str, pid: int, last: Table, seconds: float, minute: Table) -> ShardRow:
    """Return the row of a shard. `pid`: its process, as the supervisor knows it. `last`: its counts in the last
    `seconds`. `minute`: its counts in the last minute."""
    if isinstance(state, str):
        return ShardRow(shard, state, pid)
    disk = state.disk
    row: ShardRow = _ShardRow(
        shard=shard,
        pid=state.pid,
        uptime_s=round(state.uptime_s, 1),
        connections=state.connections - 1,  # without the connection of this poll
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
    """Return one row for each verb and tier, about the requests of all shards."""
    rows = []
    for verb, tier in sorted({(key[1], key[2]) for key in minute if key[0] == "took"}):
        counts = counts_of(minute, verb, tier)
        rows.append(RequestRow(verb, tier, sum(counts), quantile_s(counts, 0.5), quantile_s(counts, 0.99)))
    return rows


def namespace_rows(shards: Sequence[ShardInfo], minute: Table) -> tuple[list[NamespaceRow], int]:
    """Return the rows of the most important namespaces, and the number of the others."""
    parts: dict[str, list[NamespaceInfo]] = {}
    for shard in shards:
        for namespace in shard.namespaces:
            parts.setdefault(namespace.id, []).append(namespace)

    def traffic(item: tuple[str, list[NamespaceInfo]]) -> tuple[int, int]:
        return sum(minute.get(("namespace", item[0], name), 0) for name in ("hits", "misses")), sum(
            part.memory_bytes for part in item[1]
        )

    found = sorted(parts.items(), key=traffic, reverse=True)
    rows = [_namespace_row(id_, mine, minute) for id_, mine in found[:MAX_SHOWN_NAMESPACES]]
    return rows, max(0, len(found) - MAX_SHOWN_NAMESPACES)


SUMS: Final = ("blocks", "memory_bytes", "disk_blocks", "disk_bytes", "created", "evicted")


def _namespace_row(id_: str, parts: Sequence[NamespaceInfo], minute: Table) -> NamespaceRow:
    hits, misses = (minute.get(("namespace", id_, name), 0) for name in ("hits", "misses"))
    return NamespaceRow(
        id=id_,
        model=model_of(parts[0]),
        tenant=tenant_of(parts[0]),
        block_bytes=parts[0].block_bytes,
        hits=hits,
        misses=misses,
        hit_rate=hit_rate(hits, misses),
        **{name: sum(getattr(part, name) for part in parts) for name in SUMS},
    )


def model_of(namespace: NamespaceInfo) -> str:
    """Return the first `MAX_SHOWN_MODEL` characters of the model's name, which a client chose."""
    return str(msgspec.json.decode(namespace.namespace).get("model", ""))[:MAX_SHOWN_MODEL]


def tenant_of(namespace: NamespaceInfo) -> str:
    """Return the tenant of a namespace; empty if it has none."""
    return str(msgspec.json.decode(namespace.namespace).get("tenant", ""))


def tenant_rows(shards: Sequence[ShardInfo], counted: Table) -> list[TenantRow]:
    """Return each tenant's use and limits, summed over shards. `counted`: the counters from which `refused` is
    taken."""
    by_name = attrgetter("tenant")
    parts = sorted((tenant for shard in shards for tenant in shard.tenants), key=by_name)
    return [_tenant_row(list(same), counted) for _, same in groupby(parts, by_name)]


def _tenant_row(parts: Sequence[TenantInfo], counted: Table) -> TenantRow:
    def limit(field: str) -> int | None:
        limits = [getattr(part, field) for part in parts]
        return None if -1 in limits else sum(limits)

    return TenantRow(
        tenant=parts[0].tenant,
        memory_bytes=sum(part.memory_bytes for part in parts),
        memory_guaranteed_bytes=sum(part.memory_guaranteed_bytes for part in parts),
        memory_limit_bytes=limit("memory_limit_bytes"),
        disk_bytes=sum(part.disk_bytes for part in parts),
        disk_limit_bytes=limit("disk_limit_bytes"),
        connections=max(part.connections for part in parts),  # a client connects to each shard
        refused=counted.get(("tenant", parts[0].tenant, "refused"), 0),
    )
