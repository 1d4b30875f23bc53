"""The first output of `kvstore info`: one line for each node, each tenant and each of the largest namespaces. The
tables of `info_tables.py` show the same shard by shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from rich.console import Console

from kvstore.node.rates import hit_rate, table_of, took_s, total
from kvstore.node.status import TenantRow, model_of, tenant_of, tenant_rows
from kvstore.sizes import format_size
from kvstore.wire import NamespaceInfo, ShardInfo
from kvstore.wire.status import TAKES_NO_BLOCKS
from kvstore_cli.options import ID_DIGITS
from kvstore_cli.plain_table import columns, fitting_table, print_table
from kvstore_cli.store_state import StoreState

LISTED_NAMESPACES: Final = 20  # shown; first those with the most memory


class _Node(NamedTuple):
    name: str
    shards: Sequence[ShardInfo]  # the shards that answer
    silent: int  # the number of the others


def duration(seconds: float) -> str:
    """Return a duration such as ``45 s``, ``12 min``, ``3 h 20 min``, ``5 d 3 h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    if days < 1:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


def _use(used: int, limit: int) -> str:
    return f"{used / limit:.0%} of {format_size(limit)}" if limit else "-"


def _hits(shards: Iterable[ShardInfo]) -> str:
    hits, misses = (sum(getattr(shard, name) for shard in shards) for name in ("hits", "misses"))
    rate = hit_rate(hits, misses)
    return "-" if rate is None else f"{rate:.1%}"


def _p99(shards: Iterable[ShardInfo], verb: str) -> str:
    """Return the 99th percentile of the times of a verb's requests since the start, from memory and disk."""
    seconds = took_s(total(table_of(shard) for shard in shards), verb, 0.99)
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _disk(shards: Sequence[ShardInfo]) -> str:
    disks = [shard.disk for shard in shards if shard.disk is not None]
    use = _use(sum(disk.used_bytes for disk in disks), sum(disk.limit_bytes for disk in disks))
    failed = Counter(disk.state for disk in disks if disk.state in TAKES_NO_BLOCKS)
    return ", ".join([use, *(f"{count} {state}" for state, count in sorted(failed.items()))])


# By heading. A narrow terminal leaves out the first of `_SUMMARY_LEFT_OUT_FIRST`.
_SUMMARY_COLUMNS: Final[dict[str, Callable[[_Node], str]]] = {
    "node": lambda node: node.name,
    "shards": lambda node: f"{len(node.shards)}/{len(node.shards) + node.silent}",
    "version": lambda node: ", ".join(sorted({shard.version for shard in node.shards})) or "-",
    "up": lambda node: duration(min(shard.uptime_s for shard in node.shards)) if node.shards else "-",
    "clients": lambda node: str(max((shard.connections for shard in node.shards), default=0)),
    "hits": lambda node: _hits(node.shards),
    "get p99": lambda node: _p99(node.shards, "get"),
    "set p99": lambda node: _p99(node.shards, "set"),
    "memory": lambda node: _use(
        sum(shard.memory_used_bytes for shard in node.shards), sum(shard.memory_limit_bytes for shard in node.shards)
    ),
    "disk": lambda node: _disk(node.shards),
    "errors": lambda node: str(sum(shard.errors for shard in node.shards)),
}
_SUMMARY_LEFT_OUT_FIRST: Final = ("set p99", "errors", "clients", "version", "up", "get p99", "disk")


def _limit_of(field: str) -> Callable[[TenantRow], str]:
    def cell(tenant: TenantRow) -> str:
        limit = getattr(tenant, field)
        return "-" if limit is None else format_size(limit)

    return cell


_TENANTS: Final = columns(
    ("tenant", "tenant", "", True),
    ("memory", "memory_bytes", format_size),
    ("limit", _limit_of("memory_limit_bytes")),
    ("guaranteed", "memory_guaranteed_bytes", format_size),
    ("disk", "disk_bytes", format_size),
    ("limit", _limit_of("disk_limit_bytes")),
    ("clients", "connections"),
    ("refused", "refused"),
)


class _Space(NamedTuple):
    """A namespace on all shards that answer."""

    id: str
    parts: Sequence[NamespaceInfo]

    def sum(self, field: str) -> int:
        return sum(getattr(part, field) for part in self.parts)


def _tenant_of(space: _Space) -> str:
    return tenant_of(space.parts[0])


def _hits_of(space: _Space) -> str:
    rate = hit_rate(space.sum("hits"), space.sum("misses"))
    return "-" if rate is None else f"{rate:.1%}"


_NAMESPACES: Final = columns(
    ("model", lambda space: model_of(space.parts[0]), "", True),
    ("namespace", lambda space: space.id[:ID_DIGITS]),
    ("block", lambda space: format_size(space.parts[0].block_bytes)),
    ("in memory", lambda space: space.sum("blocks")),
    ("on disk", lambda space: space.sum("disk_blocks")),
    ("hits", _hits_of),
)
_TENANT: Final = columns(("tenant", _tenant_of, "", True))


def print_summary(state: StoreState) -> None:
    """Print the nodes, the tenants (if the server has any), and the namespaces that use the most memory."""
    _print_nodes(state)
    tenants = tenant_rows(state.shards, total(table_of(shard) for shard in state.shards))
    if tenants:
        print_table("Tenants", _TENANTS, tenants, narrow=True)
        print()
    by_id = attrgetter("id")
    parts = sorted((space for shard in state.shards for space in shard.namespaces), key=by_id)
    spaces = [_Space(id_, list(same)) for id_, same in groupby(parts, by_id)]
    spaces.sort(key=lambda space: space.sum("memory_bytes"), reverse=True)
    if spaces:
        shown = [*_NAMESPACES[:1], *(_TENANT if any(map(_tenant_of, spaces)) else ()), *_NAMESPACES[1:]]
        print_table("Namespaces", shown, spaces[:LISTED_NAMESPACES], narrow=True)
        if len(spaces) > LISTED_NAMESPACES:
            print(f"{len(spaces) - LISTED_NAMESPACES} more namespaces use less memory")
    elif state.shards:
        print("The shards that answer hold no blocks." if state.silent else "The store holds no blocks yet.")
    if state.shards:
        print("\nFigures count since the shards started. For each shard: kvstore info --shards")


def _print_nodes(state: StoreState) -> None:
    answering: dict[str, list[ShardInfo]] = {}
    for name, shard in zip(state.nodes, state.shards, strict=True):
        answering.setdefault(name, []).append(shard)
    names = dict.fromkeys([*answering, *(shard.node for shard in state.silent)])
    nodes = [
        _Node(name, answering.get(name, []), sum(shard.node == name for shard in state.silent))
        for name in sorted(names)
    ]
    if not state.shards:
        return
    if len(nodes) > 1:
        nodes.append(_Node("all", state.shards, len(state.silent)))
    console = Console(highlight=False)
    table, left_out = fitting_table(
        list(_SUMMARY_COLUMNS),
        [[cell(node) for cell in _SUMMARY_COLUMNS.values()] for node in nodes],
        _SUMMARY_LEFT_OUT_FIRST,
        console,
    )
    console.print(table)
    if left_out:
        print(f"a wider terminal also shows: {', '.join(left_out)}")
    print()
    for name, shard in zip(state.nodes, state.shards, strict=True):
        if shard.disk is not None and shard.disk.state in TAKES_NO_BLOCKS:
            print(f"{name}/{shard.shard}: its disk tier is {shard.disk.state}: {shard.disk.reason}\n")
