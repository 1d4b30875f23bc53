"""The output of `kvstore verify` and `kvstore bench` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.sizes import format_size
from kvstore_cli.output import printable

if TYPE_CHECKING:
    from kvstore.disk.verify import VerifyReport
    from kvstore_cli.bench import BenchReport
    from kvstore_cli.scrub import ScrubReport

MAX_SHOWN: Final = 20  # most damaged blocks, and segments, that are listed; --json lists all


def print_verified(report: VerifyReport) -> None:
    """Print what `verify` found in a folder."""
    if report.damaged:
        table = Table(title="Damaged blocks", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
        for name in ("shard", "model", "key", "segment", "slot", "why"):
            table.add_column(name, overflow="fold")
        for block in report.damaged[:MAX_SHOWN]:
            cells = (str(block.shard), block.model, block.key, str(block.segment), str(block.place), block.reason)
            table.add_row(*(Text(printable(cell)) for cell in cells))
        Console(highlight=False).print(table)
        if len(report.damaged) > MAX_SHOWN:
            print(f"... and {len(report.damaged) - MAX_SHOWN} more: --json names them all")
    for missing in report.missing_segments[:MAX_SHOWN]:
        print(
            f"shard {missing.shard}: segment {missing.segment} with {missing.blocks} blocks cannot be used: "
            f"{missing.reason}",
        )
    if len(report.missing_segments) > MAX_SHOWN:
        print(f"... and {len(report.missing_segments) - MAX_SHOWN} more segments: --json names them all")
    for sentence in report.index_damage:
        print(sentence)
    if report.bad_entries:
        print(f"{report.bad_entries} entries of the index are damaged")
    print(
        f"{report.blocks} blocks ({format_size(report.bytes)}) on {report.shards} shard(s) checked, "
        f"{len(report.damaged)} damaged, {sum(missing.blocks for missing in report.missing_segments)} without a segment"
        + (f", {report.expired_blocks} expired and not checked" if report.expired_blocks else "")
    )
    if not report.ok:
        print("nothing was changed: the server that uses this folder next counts damaged blocks as misses")


def print_scrubbed(report: ScrubReport) -> None:
    """Print what running shards found on their disks."""
    for shard in report.shards:
        print(
            f"shard {shard.shard}: {shard.blocks} blocks ({format_size(shard.bytes)}) checked, {shard.damaged} damaged"
            + (f"; not complete: {shard.failure}" if shard.failure else ""),
        )
    if any(shard.damaged for shard in report.shards):
        print("the server has dropped the damaged blocks: they are misses now; its log names some of them")


def print_bench(report: BenchReport) -> None:
    """Print a table with one row per operation."""
    table = Table(title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.title = (
        f"{report.blocks} blocks of {format_size(report.block_bytes)}, {report.batch} a call, "
        f"median of {report.rounds} rounds; latencies of calls"
    )
    table.add_column("operation", no_wrap=True)
    for name in ("GB/s", "min … max", "blocks/s", "p50 ms", "p90 ms", "p99 ms"):
        table.add_column(name, justify="right", no_wrap=True)
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
    Console(highlight=False).print(table)
    print(f"\nThe benchmark used a namespace of its own and removed its {report.removed_blocks} blocks at the end.")
