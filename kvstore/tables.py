"""What the command line shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from kvstore.sizes import format_size
from kvstore.wire import ShardInfo

if TYPE_CHECKING:
    from kvstore_client.bench import BenchReport


def print_info(shards: Sequence[ShardInfo]) -> None:
    """Two tables: shards, and the namespaces on them."""
    console = Console()
    table = Table(title="shards")
    for name in (
        "shard",
        "pid",
        "up",
        "memory used",
        "limit",
        "resident",
        "clients",
        "sets",
        "gets",
        "lookups",
    ):
        table.add_column(name, justify="right")
    table.add_column("in / out")
    table.add_column("errors", justify="right")
    for shard in shards:
        table.add_row(
            f"{shard.node}/{shard.shard}",
            str(shard.pid),
            f"{shard.uptime_s:.0f} s",
            format_size(shard.memory_used_bytes),
            format_size(shard.memory_limit_bytes),
            format_size(shard.rss_bytes),
            str(shard.connections),
            str(shard.sets),
            str(shard.gets),
            str(shard.lookups),
            f"{format_size(shard.bytes_in)} / {format_size(shard.bytes_out)}",
            str(shard.errors),
        )
    console.print(table)
    table = Table(title="namespaces")
    for name in ("namespace", "model", "shard"):
        table.add_column(name)
    for name in ("block", "blocks", "memory", "pinned", "hits", "misses", "created", "evicted"):
        table.add_column(name, justify="right")
    for shard in shards:
        for namespace in shard.namespaces:
            table.add_row(
                namespace.id[:12],
                str(msgspec.json.decode(namespace.namespace).get("model", "")),
                str(shard.shard),
                format_size(namespace.block_bytes),
                str(namespace.blocks),
                format_size(namespace.memory_bytes),
                str(namespace.pinned),
                str(namespace.hits),
                str(namespace.misses),
                str(namespace.created),
                str(namespace.evicted),
            )
    if table.row_count:
        console.print(table)


def print_bench(report: BenchReport) -> None:
    """One row an operation."""
    table = Table(
        title=f"{report.blocks} blocks of {format_size(report.block_bytes)}, {report.batch} a call, "
        f"median of {report.rounds} rounds; latencies of calls"
    )
    table.add_column("operation")
    for name in ("GB/s", "min … max", "blocks/s", "p50 ms", "p90 ms", "p99 ms"):
        table.add_column(name, justify="right")
    for row in report.operations:
        moved = row.gb_s > 0
        table.add_row(
            row.operation,
            f"{row.gb_s:.2f}" if moved else "",
            f"{row.gb_s_min:.1f} … {row.gb_s_max:.1f}" if moved else "",
            f"{row.blocks_s:,.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p90_ms:.2f}",
            f"{row.p99_ms:.2f}",
        )
    Console().print(table)
