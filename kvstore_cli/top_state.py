"""The content of `kvstore top`: the nodes or shards of a store, what they hold, and what they did since the last
poll."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from kvstore.node.diagnosis import Finding, Seen, findings
from kvstore.node.rates import NAMESPACE_COUNTERS, Table, amount, change, hit_rate, table_of, took_s, total
from kvstore.node.status import model_of, tenant_of, tenant_rows
from kvstore.wire import NamespaceInfo, ShardInfo
from kvstore.wire.status import Field, fields_of
from kvstore_cli.output import CommandFailed
from kvstore_cli.store_state import reported
from kvstore_client import KVStoreClient, ShardStatus


class TopRow(msgspec.Struct, frozen=True):
    """The figures of one node, one shard, or the whole store. Sums include only the shards that answer. The last
    columns are those of INFO's fields."""

    name: str
    shards: int
    shards_up: int
    connections: int  # the highest number of any of its shards, as a client connects to each
    hit_rate: float | None  # since the last poll; null if no block was requested
    bytes_in_per_s: float
    bytes_out_per_s: float
    requests_per_s: float  # requests are SETs, GETs and look-ups
    get_p99_s: float | None  # the 99th percentile of the times of GETs in the shards; null if there were none
    blocks: int  # in memory
    memory_used_bytes: int
    memory_limit_bytes: int
    disk_blocks: int
    disk_used_bytes: int
    disk_limit_bytes: int  # 0 if there is no disk tier
    disk_evicted_per_s: float


_AnyRow = TypeVar("_AnyRow", TopRow, "UseRow")
_TOP_FIELDS: Final = [field for field in fields_of(ShardInfo) if field.top]
_TopRow: Final[Any] = msgspec.defstruct(
    "_TopRow", [(f.top_key, float) for f in _TOP_FIELDS], bases=(TopRow,), frozen=True
)


class UseRow(msgspec.Struct, frozen=True):
    """The figures of one namespace or one tenant, on all shards that answer. Rates are those since the last poll."""

    name: str  # the id of the namespace, or the tenant; empty for namespaces of no tenant
    model: str  # empty for a tenant
    tenant: str
    hit_rate: float | None  # null if no block was requested
    found_per_s: float  # blocks that were requested and present
    missed_per_s: float
    created_per_s: float
    evicted_per_s: float
    blocks: int  # in memory
    memory_bytes: int
    memory_limit_bytes: int | None  # of the tenant; null if there is no limit
    disk_blocks: int
    disk_bytes: int
    connections: int  # of the tenant, the highest number of any shard; 0 for a namespace
    refused_per_s: float  # requests that a limit of the tenant refused


class Top(msgspec.Struct, frozen=True):
    """The result of one poll."""

    time: float  # unix seconds
    seconds: float  # seconds since the poll before
    rows: Sequence[TopRow] | Sequence[UseRow]
    all: TopRow
    messages: Sequence[Finding]  # problems and remarks, the worst first
    silent: Sequence[str]  # why shards do not answer
    directory: str  # why etcd or DNS gives no members; empty if it does

    @property
    def failure(self) -> CommandFailed | None:
        """The failure that says why the result is incomplete. It is None if every shard answered."""
        if self.directory:
            return CommandFailed("unreachable", self.directory)
        if self.all.shards_up == self.all.shards and self.all.shards:
            return None
        missing = self.all.shards - self.all.shards_up
        return CommandFailed(
            "unreachable", f"{missing} of {self.all.shards} shards did not answer: {'; '.join(self.silent)}"
        )


class Looking:
    """Polls a store again and again."""

    def __init__(self, client: KVStoreClient, by: str) -> None:
        """`by`: the subject of a row: "node", "shard", "namespace" or "tenant"."""
        self._client = client
        self._by = by
        self._at = time.monotonic()
        self._processes: dict[str, int] = {}  # the process of each shard at the last poll
        self._tables: dict[str, Table] = {}

    def look(self) -> Top:
        """Ask every shard. Blocks for at most the client's timeout. Raises `CommandFailed` if all refuse."""
        shards = reported(self._client)
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        changes, restarted = self._changes(shards)
        seen = [
            Seen(
                _name(shard, shards),
                shard.info or shard.error,
                changes.get(shard.name, {}),
                0.0 if shard.name in restarted else None,
            )
            for shard in shards
        ]
        return Top(
            time=time.time(),
            seconds=seconds,
            rows=self._rows(shards, changes, seconds),
            all=_row("all", shards, changes, seconds),
            messages=findings(seen, when="since the last look"),
            silent=list(dict.fromkeys(shard.error for shard in shards if shard.info is None)),
            directory=self._client.directory_error,
        )

    def _rows(
        self, shards: Sequence[ShardStatus], changes: Mapping[str, Table], seconds: float
    ) -> list[TopRow] | list[UseRow]:
        if self._by in ("namespace", "tenant"):
            return _use_rows(self._by, shards, total(changes.values()), seconds)
        groups: dict[str, list[ShardStatus]] = {}
        for shard in shards:
            groups.setdefault(_name(shard, shards) if self._by == "shard" else shard.node, []).append(shard)
        return [_row(name, mine, changes, seconds) for name, mine in sorted(groups.items())]

    def _changes(self, shards: Sequence[ShardStatus]) -> tuple[dict[str, Table], set[str]]:
        """Return what each shard counted since the last poll, and the shards whose process has changed since then. New
        shards are left out of the counts."""
        changes: dict[str, Table] = {}
        restarted: set[str] = set()
        for shard in shards:
            if shard.info is None:
                continue
            table, process = table_of(shard.info), self._processes.get(shard.name)
            if process is not None:
                changes[shard.name] = change(self._tables[shard.name] if process == shard.info.pid else {}, table)
                if process != shard.info.pid:
                    restarted.add(shard.name)
            self._tables[shard.name], self._processes[shard.name] = table, shard.info.pid
        return changes, restarted


def _name(shard: ShardStatus, shards: Sequence[ShardStatus]) -> str:
    """Return NODE/NUMBER as the name of a shard. If the shard does not answer, NUMBER is its position among its node's
    shards."""
    number = shard.info.shard if shard.info is not None else [s for s in shards if s.node == shard.node].index(shard)
    return f"{shard.node}/{number}"


def _row(name: str, shards: Sequence[ShardStatus], changes: Mapping[str, Table], seconds: float) -> TopRow:
    up = [shard.info for shard in shards if shard.info is not None]
    changed = total(changes.get(shard.name, {}) for shard in shards)
    disks = [info.disk for info in up if info.disk is not None]

    def rate(*key: str) -> float:
        return round(changed[key] / seconds, 1) if seconds else 0.0

    def shown(field: Field) -> float:
        value = amount(field, up, changed)
        return round(value / (seconds or 1), 1) if field.per_second else value

    row: TopRow = _TopRow(
        name=name,
        shards=len(shards),
        shards_up=len(up),
        connections=max((info.connections for info in up), default=0),
        hit_rate=hit_rate(changed["hits",], changed["misses",]),
        bytes_in_per_s=rate("bytes_in"),
        bytes_out_per_s=rate("bytes_out"),
        requests_per_s=round(sum(changed[name,] for name in ("sets", "gets", "lookups")) / (seconds or 1), 1),
        get_p99_s=took_s(changed, "get", 0.99),
        blocks=sum(namespace.blocks for info in up for namespace in info.namespaces),
        memory_used_bytes=sum(info.memory_used_bytes for info in up),
        memory_limit_bytes=sum(info.memory_limit_bytes for info in up),
        disk_blocks=sum(disk.blocks for disk in disks),
        disk_used_bytes=sum(disk.used_bytes for disk in disks),
        disk_limit_bytes=sum(disk.limit_bytes for disk in disks),
        disk_evicted_per_s=rate("disk", "evicted"),
        **{field.top_key: shown(field) for field in _TOP_FIELDS},
    )
    return row


def _use_rows(by: str, shards: Sequence[ShardStatus], changed: Table, seconds: float) -> list[UseRow]:
    """Return one row for each namespace, or for each tenant that has namespaces, connections or limits."""
    up = [shard.info for shard in shards if shard.info is not None]
    groups: dict[str, list[NamespaceInfo]] = {}
    for namespace in (each for info in up for each in info.namespaces):
        groups.setdefault(namespace.id if by == "namespace" else tenant_of(namespace), []).append(namespace)
    tenants = {row.tenant: row for row in tenant_rows(up, changed)} if by == "tenant" else {}
    for name in tenants:
        groups.setdefault(name, [])
    rows = []
    for name, mine in groups.items():
        counted = {
            counter: sum(changed.get(("namespace", id_, counter), 0) for id_ in {each.id for each in mine})
            for counter in NAMESPACE_COUNTERS
        }
        tenant = tenants.get(name)
        rate = {counter: round(count / (seconds or 1), 1) for counter, count in counted.items()}
        rows.append(
            UseRow(
                name=name,
                model=model_of(mine[0]) if by == "namespace" else "",
                tenant=tenant_of(mine[0]) if by == "namespace" else name,
                hit_rate=hit_rate(counted["hits"], counted["misses"]),
                found_per_s=rate["hits"],
                missed_per_s=rate["misses"],
                created_per_s=rate["created"],
                evicted_per_s=rate["evicted"],
                blocks=sum(each.blocks for each in mine),
                memory_bytes=sum(each.memory_bytes for each in mine),
                memory_limit_bytes=tenant.memory_limit_bytes if tenant else None,
                disk_blocks=sum(each.disk_blocks for each in mine),
                disk_bytes=sum(each.disk_bytes for each in mine),
                connections=tenant.connections if tenant else 0,
                refused_per_s=round(tenant.refused / (seconds or 1), 1) if tenant else 0.0,
            )
        )
    return rows


def sorted_rows(rows: Sequence[_AnyRow], field: str, reverse: bool) -> list[_AnyRow]:
    """Return rows sorted by a field. Names are sorted from A to Z and numbers from the largest, or the other way round
    with `reverse`. Rows without a number come last."""
    if rows and isinstance(getattr(rows[0], field), str):
        return sorted(rows, key=lambda row: str(getattr(row, field)), reverse=reverse)
    known: list[_AnyRow] = [row for row in rows if getattr(row, field) is not None]
    known.sort(key=lambda row: getattr(row, field), reverse=not reverse)
    known += [row for row in rows if getattr(row, field) is None]
    return known
