"""The output of `kvstore info --shards`: one narrow table for each subject. Each fits 80 columns with full names.

Each of INFO's fields names its table and column (`kvstore.wire.status`). This file defines the tables, the columns that
are made from several fields, and the order of columns where it differs from the order of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.node.rates import hit_rate
from kvstore.node.status import model_of
from kvstore.sizes import format_size
from kvstore.wire import DiskInfo, NamespaceInfo, ShardInfo
from kvstore.wire.status import Field, fields_of
from kvstore_cli.info_summary import duration
from kvstore_cli.options import ID_DIGITS
from kvstore_cli.output import printable
from kvstore_cli.store_state import StoreState

LEGEND: Final = """\
resident     memory of the shard's process, in which blocks, indexes and buffers are
lent         blocks that clients on this host are reading in shared memory; they are not evicted meanwhile
pinned       blocks that a client keeps from eviction for a time
transient    blocks that go after a number of reads, as in a hand-over from prefill to decode
to be written, behind
             blocks in memory that the disk does not have yet; clients that set wait while the disk is behind
skipped      blocks not written, because the disk had no room
lost         blocks of an earlier run that were not found again at the start"""


class _Row(NamedTuple):
    """The subject of a row, which is a shard, a shard's disk tier, or the parts of a namespace on all shards."""

    name: str
    parts: Sequence[Any]
    path: str = ""  # how this host reads blocks from the shard


Column = Callable[[_Row], str]


class _About(NamedTuple):
    """The description of one table. `parts`: the type of the parts of its rows. `columns`: the first columns, in order;
    the columns of other fields follow."""

    title: str
    first: str
    parts: type[msgspec.Struct]
    columns: dict[str, Column | None]  # None: the column of the field with this title


def _amount(of: str) -> Column:
    def cell(row: _Row) -> str:
        (info,) = row.parts
        blocks, size = getattr(info, f"{of}_blocks"), getattr(info, f"{of}_bytes")
        return f"{blocks} ({format_size(size)})" if blocks else "0"

    return cell


def _hit_rate(row: _Row) -> str:
    share = hit_rate(sum(part.hits for part in row.parts), sum(part.misses for part in row.parts))
    return "-" if share is None else f"{share:.1%}"


def _shown(of: Callable[[Any], str]) -> Column:
    """Return a column that shows the row's first part. It is for rows with one part, or with parts that are all
    alike."""
    return lambda row: of(row.parts[0])


_dirty: Final = _amount("dirty")
_TABLES: Final = {
    "shards": _About(
        *("Shards", "shard", ShardInfo),
        {**dict.fromkeys(("pid", "up", "policy", "clients", "errors")), "blocks come by": lambda row: row.path},
    ),
    "memory": _About("Memory", "shard", ShardInfo, dict.fromkeys(("used", "limit"))),
    "transient": _About(
        *("Transient blocks", "shard", ShardInfo),
        {"blocks": _shown(lambda shard: str(sum(each.transient_blocks for each in shard.namespaces)))},
    ),
    "requests": _About("Requests since the start", "shard", ShardInfo, {}),
    "disk": _About(
        *("Disk", "shard", DiskInfo),
        {
            "state": _shown(lambda disk: f"{disk.state}, warming up" if disk.warming else disk.state),
            **dict.fromkeys(("used", "limit", "blocks")),
            "to be written": lambda row: _dirty(row) + (", behind" if row.parts[0].behind else ""),
        },
    ),
    "disk work": _About(
        *("Disk since the start", "shard", DiskInfo),
        {"written": _amount("written"), "skipped": None, "read": _amount("fetched")},
    ),
    "disk checks": _About(
        *("Disk recovery and checks", "shard", DiskInfo),
        {
            "recovered": _shown(lambda disk: f"{disk.recovered_blocks} in {disk.recovery_s:.1f} s"),
            **dict.fromkeys(("lost", "corrupt")),
            "checks": _shown(lambda disk: f"{disk.scrub_passes}{', one runs' if disk.scrubbing else ''}"),
        },
    ),
    "namespaces": _About(
        *("Namespaces", "model", NamespaceInfo),
        {"namespace": lambda row: row.name, "block": _shown(lambda space: format_size(space.block_bytes))},
    ),
    "blocks": _About(
        *("Blocks of the namespaces, on all shards", "namespace", NamespaceInfo),
        dict.fromkeys(("in memory", "memory", "pinned", "transient", "on disk")),
    ),
    "use": _About(
        *("Use of the namespaces since the shards started", "namespace", NamespaceInfo),
        {"hits": None, "misses": None, "hit rate": _hit_rate},
    ),
}


def print_tables(state: StoreState) -> None:
    """Print tables of the shards that answer, of their disk tiers (if they have any), and of the namespaces."""
    console = Console(highlight=False)

    def show(parts: type[msgspec.Struct], rows: Sequence[_Row]) -> None:
        for name, about in _TABLES.items():
            if about.parts is parts and rows:
                console.print()
                console.print(_table(about, _columns(name, about), rows))

    found = zip(state.nodes, state.shards, state.paths, strict=True)
    shards = [_Row(f"{node}/{shard.shard}", [shard], path) for node, shard, path in found]
    show(ShardInfo, shards)
    show(DiskInfo, [_Row(row.name, [row.parts[0].disk]) for row in shards if row.parts[0].disk is not None])
    by_id = attrgetter("id")
    parts = sorted((space for shard in state.shards for space in shard.namespaces), key=by_id)
    show(NamespaceInfo, [_Row(id_[:ID_DIGITS], list(same)) for id_, same in groupby(parts, by_id)])
    if shards:
        print(f"\n{LEGEND}")


def _columns(name: str, about: _About) -> dict[str, Column]:
    fields = {
        field.info.removeprefix(f"{name}: "): _of_field(field)
        for field in fields_of(about.parts)
        if field.info.startswith(f"{name}: ")
    }
    return {**{title: cell or fields.pop(title) for title, cell in about.columns.items()}, **fields}


def _of_field(field: Field) -> Column:
    """Return the column of a field. It shows the sum over the parts or, for texts, the first part's text."""

    def cell(row: _Row) -> str:
        values: list[Any] = [getattr(part, field.name) for part in row.parts]
        if field.label:
            values = [sum(value.values()) for value in values]
        if isinstance(values[0], str):
            return values[0]
        value = sum(values)
        return format_size(value) if field.unit == "bytes" else duration(value) if field.unit == "s" else str(value)

    return cell


def _table(about: _About, columns: dict[str, Column], rows: Sequence[_Row]) -> Table:
    """Return a table. Its first column has names, which are folded if they are too long. The other columns stay on one
    line."""
    table = Table(
        title=about.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(about.first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        name = model_of(row.parts[0]) if about.first == "model" else row.name
        table.add_row(*(Text(printable(cell)) for cell in (name, *(column(row) for column in columns.values()))))
    return table
