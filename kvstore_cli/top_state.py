"""What `kvstore top` shows: the nodes or shards of a store, what they hold, and what they did since the last look."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvstore.node.rates import Table, amount, change, hit_rate, table_of, total
from kvstore.node.words import Message, Seen, messages
from kvstore.wire import ShardInfo
from kvstore.wire.status import Field, fields_of
from kvstore_cli.output import CommandFailed
from kvstore_client import KVStoreClient, ShardStatus


class TopRow(msgspec.Struct, frozen=True):
    """One node or shard, or all of them. Sums are over those of its shards that answer. Then come the fields of INFO
    that have a column."""

    name: str
    shards: int
    shards_up: int
    connections: int  # the most that one of its shards has: a client connects to each
    hit_rate: float | None  # since the last look; null: nothing was asked for
    bytes_in_per_s: float
    bytes_out_per_s: float
    requests_per_s: float  # SETs, GETs and look-ups
    blocks: int  # in memory
    memory_used_bytes: int
    memory_limit_bytes: int
    disk_blocks: int
    disk_used_bytes: int
    disk_limit_bytes: int  # 0: no disk tier
    disk_evicted_per_s: float


_COLUMNS: Final = [field for field in fields_of(ShardInfo) if field.top]
_TopRow: Final[Any] = msgspec.defstruct("_TopRow", [(f.top_key, float) for f in _COLUMNS], bases=(TopRow,), frozen=True)


class Top(msgspec.Struct, frozen=True):
    """One look."""

    time: float  # unix seconds
    seconds: float  # since the look before
    rows: Sequence[TopRow]
    all: TopRow
    messages: Sequence[Message]  # what is wrong, or worth knowing, the worst first
    silent: Sequence[str]  # why shards do not answer
    directory: str  # why etcd or DNS cannot be asked for the members; empty if it can

    @property
    def failure(self) -> CommandFailed | None:
        """Why this is not all; None if every shard answered."""
        if self.directory:
            return CommandFailed("unreachable", self.directory)
        if self.all.shards_up == self.all.shards and self.all.shards:
            return None
        missing = self.all.shards - self.all.shards_up
        return CommandFailed(
            "unreachable", f"{missing} of {self.all.shards} shards did not answer: {'; '.join(self.silent)}"
        )


class Looking:
    """Looks at a store again and again."""

    def __init__(self, client: KVStoreClient, by_shard: bool) -> None:
        self._client = client
        self._by_shard = by_shard
        self._at = time.monotonic()
        self._processes: dict[str, int] = {}  # of each shard, as it was seen last
        self._tables: dict[str, Table] = {}

    def look(self) -> Top:
        """Ask every shard. Blocks for as long as the client's timeout."""
        shards = self._client.shards()
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        changes, restarted = self._changes(shards)
        groups: dict[str, list[ShardStatus]] = {}
        for shard in shards:
            groups.setdefault(_name(shard, shards) if self._by_shard else shard.node, []).append(shard)
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
            rows=[_row(name, mine, changes, seconds) for name, mine in sorted(groups.items())],
            all=_row("all", shards, changes, seconds),
            messages=messages(seen, when="since the last look"),
            silent=list(dict.fromkeys(shard.error for shard in shards if shard.info is None)),
            directory=self._client.directory_error,
        )

    def _changes(self, shards: Sequence[ShardStatus]) -> tuple[dict[str, Table], set[str]]:
        """-> by shard, what it counted since the last look, nothing if it was not seen before; and the shards where
        another process is now."""
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
    """-> NODE/NUMBER; for a shard that does not answer, its number among those of its node."""
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
        blocks=sum(namespace.blocks for info in up for namespace in info.namespaces),
        memory_used_bytes=sum(info.memory_used_bytes for info in up),
        memory_limit_bytes=sum(info.memory_limit_bytes for info in up),
        disk_blocks=sum(disk.blocks for disk in disks),
        disk_used_bytes=sum(disk.used_bytes for disk in disks),
        disk_limit_bytes=sum(disk.limit_bytes for disk in disks),
        disk_evicted_per_s=rate("disk", "evicted"),
        **{field.top_key: shown(field) for field in _COLUMNS},
    )
    return row


def sorted_rows(rows: Sequence[TopRow], field: str, reverse: bool) -> list[TopRow]:
    """-> rows by a field: names from A to Z, numbers from the largest; `reverse` turns that round. Rows without a
    number come last."""
    if field == "name":
        return sorted(rows, key=lambda row: row.name, reverse=reverse)
    known = [row for row in rows if getattr(row, field) is not None]
    known.sort(key=lambda row: getattr(row, field), reverse=not reverse)
    return [*known, *(row for row in rows if getattr(row, field) is None)]
