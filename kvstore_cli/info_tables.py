"""The output of `kvstore info` for people: narrow tables, one for each subject, that fit 80 columns with full names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.sizes import format_size
from kvstore.wire import DiskInfo, NamespaceInfo, ShardInfo
from kvstore_cli.output import printable
from kvstore_cli.store_state import StoreState

ID_DIGITS = 12  # how many digits of a namespace's id are shown


def print_info(state: StoreState) -> None:
    """Print tables of the shards that answer, of their disk tiers if they have any, and of the namespaces."""
    console = Console(highlight=False)

    def show(tables: Iterable[Table]) -> None:
        for table in tables:
            console.print(table)
            console.print()

    if state.shards:
        show(_shards(state.shards, state.paths))
    disks = [(_name(shard), shard.disk) for shard in state.shards if shard.disk is not None]
    if disks:
        show(_disks(disks))
        for name, disk in disks:
            if disk.state == "off":
                print(f"{name}: its disk tier is off: {disk.reason}\n")
    namespaces = [_Sums(list(same)) for same in _by_id(state.shards)]
    if namespaces:
        show(_namespaces(namespaces))
    elif state.shards:
        print("The store holds no blocks yet.")


def _table(title: str, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table. Its first column holds names and is folded if they are too long; the others stay on one line."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _name(shard: ShardInfo) -> str:
    return f"{shard.node}/{shard.shard}"


def _shards(shards: Sequence[ShardInfo], paths: Sequence[str]) -> Iterable[Table]:
    yield _table(
        "Shards",
        "shard",
        ("pid", "up", "policy", "clients", "errors", "blocks come by"),
        (
            (
                _name(shard),
                str(shard.pid),
                _duration(shard.uptime_s),
                shard.policy,
                str(shard.connections),
                str(shard.errors),
                path,
            )
            for shard, path in zip(shards, paths, strict=True)
        ),
    )
    yield _table(
        "Memory",
        "shard",
        ("used", "limit", "resident", "index", "lent"),
        (
            (
                _name(shard),
                format_size(shard.memory_used_bytes),
                format_size(shard.memory_limit_bytes),
                format_size(shard.rss_bytes),
                format_size(shard.index_bytes),
                format_size(shard.lent_bytes),
            )
            for shard in shards
        ),
    )
    yield _table(
        "Transient blocks",
        "shard",
        ("blocks", "memory", "limit"),
        (
            (
                _name(shard),
                str(sum(namespace.transient_blocks for namespace in shard.namespaces)),
                format_size(shard.transient_bytes),
                format_size(shard.transient_limit_bytes),
            )
            for shard in shards
        ),
    )
    yield _table(
        "Requests since the start",
        "shard",
        ("sets", "gets", "lookups", "received", "sent"),
        (
            (
                _name(shard),
                str(shard.sets),
                str(shard.gets),
                str(shard.lookups),
                format_size(shard.bytes_in),
                format_size(shard.bytes_out),
            )
            for shard in shards
        ),
    )


def _disks(disks: Sequence[tuple[str, DiskInfo]]) -> Iterable[Table]:
    yield _table(
        "Disk",
        "shard",
        ("state", "used", "limit", "blocks", "to be written"),
        (
            (
                name,
                f"{disk.state}, warming up" if disk.warming else disk.state,
                format_size(disk.used_bytes),
                format_size(disk.limit_bytes),
                str(disk.blocks),
                _amount(disk.dirty_blocks, disk.dirty_bytes) + (", behind" if disk.behind else ""),
            )
            for name, disk in disks
        ),
    )
    yield _table(
        "Disk since the start",
        "shard",
        ("written", "skipped", "read", "evicted"),
        (
            (
                name,
                _amount(disk.written_blocks, disk.written_bytes),
                str(disk.skipped_blocks),
                _amount(disk.fetched_blocks, disk.fetched_bytes),
                str(disk.evicted),
            )
            for name, disk in disks
        ),
    )
    yield _table(
        "Disk recovery and checks",
        "shard",
        ("recovered", "lost", "corrupt", "checks", "found damaged"),
        (
            (
                name,
                f"{disk.recovered_blocks} in {disk.recovery_s:.1f} s",
                str(disk.lost_blocks),
                str(disk.corrupt_blocks),
                f"{disk.scrub_passes}, one runs" if disk.scrubbing else str(disk.scrub_passes),
                str(disk.scrub_corrupt_blocks),
            )
            for name, disk in disks
        ),
    )


def _by_id(shards: Sequence[ShardInfo]) -> Iterable[Iterable[NamespaceInfo]]:
    found = sorted((namespace for shard in shards for namespace in shard.namespaces), key=lambda some: some.id)
    return (same for _, same in groupby(found, key=lambda some: some.id))


class _Sums:
    """The sums of one namespace over all shards."""

    def __init__(self, parts: Sequence[NamespaceInfo]) -> None:
        self.id = parts[0].id[:ID_DIGITS]
        self.model = str(msgspec.json.decode(parts[0].namespace).get("model", ""))
        self.block_bytes = parts[0].block_bytes
        self.blocks = sum(part.blocks for part in parts)
        self.memory_bytes = sum(part.memory_bytes for part in parts)
        self.disk_blocks = sum(part.disk_blocks for part in parts)
        self.hits = sum(part.hits for part in parts)
        self.misses = sum(part.misses for part in parts)
        self.created = sum(part.created for part in parts)
        self.evicted = sum(part.evicted for part in parts)
        self.pinned = sum(part.pinned for part in parts)
        self.transient_blocks = sum(part.transient_blocks for part in parts)


def _namespaces(namespaces: Sequence[_Sums]) -> Iterable[Table]:
    yield _table(
        "Namespaces",
        "model",
        ("namespace", "block"),
        ((some.model, some.id, format_size(some.block_bytes)) for some in namespaces),
    )
    yield _table(
        "Blocks of the namespaces, on all shards",
        "namespace",
        ("in memory", "memory", "pinned", "transient", "on disk"),
        (
            (
                some.id,
                str(some.blocks),
                format_size(some.memory_bytes),
                str(some.pinned),
                str(some.transient_blocks),
                str(some.disk_blocks),
            )
            for some in namespaces
        ),
    )
    yield _table(
        "Use of the namespaces since the shards started",
        "namespace",
        ("hits", "misses", "hit rate", "created", "evicted"),
        (
            (
                some.id,
                str(some.hits),
                str(some.misses),
                f"{some.hits / (some.hits + some.misses):.1%}" if some.hits + some.misses else "-",
                str(some.created),
                str(some.evicted),
            )
            for some in namespaces
        ),
    )


def _amount(blocks: int, size: int) -> str:
    return f"{blocks} ({format_size(size)})" if blocks else "0"


def _duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 20 min``, ``5 d 3 h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    if days < 1:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
