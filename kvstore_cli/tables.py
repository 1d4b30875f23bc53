"""What the command line shows to people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.sizes import format_size
from kvstore.wire import DiskInfo, ShardInfo

if TYPE_CHECKING:
    from kvstore.disk.verify import VerifyReport
    from kvstore_cli.bench import BenchReport
    from kvstore_cli.scrub import ScrubReport

MAX_SHOWN: Final = 20  # of what is damaged; --json has all


def print_info(shards: Sequence[ShardInfo]) -> None:
    """Tables: shards, their disk tiers if they have any, and the namespaces on them."""
    console = Console()
    console.print(_shards(shards))
    if any(shard.disk for shard in shards):
        console.print(_disks(shards))
    namespaces = _namespaces(shards)
    if namespaces.row_count:
        console.print(namespaces)


def _shards(shards: Sequence[ShardInfo]) -> Table:
    table = Table(title="shards")
    for name in (
        "shard",
        "pid",
        "up",
        "memory used",
        "limit",
        "resident",
        "policy",
        "index",
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
            shard.policy,
            format_size(shard.index_bytes),
            str(shard.connections),
            str(shard.sets),
            str(shard.gets),
            str(shard.lookups),
            f"{format_size(shard.bytes_in)} / {format_size(shard.bytes_out)}",
            str(shard.errors),
        )
    return table


def _disks(shards: Sequence[ShardInfo]) -> Table:
    table = Table(title="disk")
    for name in ("shard", "state"):
        table.add_column(name)
    for name in ("used / limit", "blocks", "dirty", "written", "fetched", "evicted", "corrupt", "recovered", "scrub"):
        table.add_column(name, justify="right")
    for shard in shards:
        disk = shard.disk
        if disk is None:
            continue
        table.add_row(
            f"{shard.node}/{shard.shard}",
            _state(disk),
            f"{format_size(disk.used_bytes)} / {format_size(disk.limit_bytes)}",
            str(disk.blocks),
            f"{disk.dirty_blocks} ({format_size(disk.dirty_bytes)})" + (", behind" if disk.behind else ""),
            f"{disk.written_blocks} ({format_size(disk.written_bytes)})"
            + (f", {disk.skipped_blocks} skipped" if disk.skipped_blocks else ""),
            f"{disk.fetched_blocks} ({format_size(disk.fetched_bytes)})",
            str(disk.evicted),
            str(disk.corrupt_blocks),
            f"{disk.recovered_blocks} in {disk.recovery_s:.1f} s, {disk.lost_blocks} lost",
            f"{disk.scrub_passes} passes, {disk.scrub_corrupt_blocks} damaged" + (", running" * disk.scrubbing),
        )
    return table


def _state(disk: DiskInfo) -> str:
    if disk.state == "off":
        return f"off: {disk.reason}"
    return f"{disk.state}, warming up" if disk.warming else disk.state


def _namespaces(shards: Sequence[ShardInfo]) -> Table:
    table = Table(title="namespaces")
    for name in ("namespace", "model", "shard"):
        table.add_column(name)
    for name in ("block", "blocks", "memory", "pinned", "hits", "misses", "created", "evicted", "disk blocks"):
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
                str(namespace.disk_blocks),
            )
    return table


# ---- verify --------------------------------------------------------------------------------------------------------


@contextmanager
def verifying(of_bytes: bool, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error. Gives what is to be called with how much is done, and how much there is."""
    amount = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task("checking", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_verified(report: VerifyReport) -> None:
    """What was found in a folder."""
    if report.damaged:
        table = Table(title="damaged blocks")
        for name in ("shard", "model", "key", "segment", "slot", "why"):
            table.add_column(name)
        for block in report.damaged[:MAX_SHOWN]:
            table.add_row(str(block.shard), block.model, block.key, str(block.segment), str(block.place), block.reason)
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
        print("nothing was changed: the server that uses this folder next takes what is damaged for a miss")


def print_scrubbed(report: ScrubReport) -> None:
    """What running shards found on their disks."""
    for shard in report.shards:
        print(
            f"shard {shard.shard}: {shard.blocks} blocks ({format_size(shard.bytes)}) checked, {shard.damaged} damaged"
            + (f"; not complete: {shard.failure}" if shard.failure else ""),
        )
    if any(shard.damaged for shard in report.shards):
        print("the server has dropped the damaged blocks: they are misses now; its log names some of them")


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
