"""What the command line shows of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.sizes import format_size

if TYPE_CHECKING:
    from kvstore_cli.cluster_status import ClusterStatus, Location, NodeStatus

_COLUMNS: Final = ("node", "state", "zone", "up", "clients", "memory", "blocks", "on disk", "hits", "in / out")
# Where they do not all fit; a node's id, its state and whether it is up are always there.
_LEFT_OUT_FIRST: Final = ("on disk", "in / out", "clients", "zone", "memory", "blocks", "hits")
_ANY_WIDTH: Final = 10_000


def print_status(status: ClusterStatus) -> None:
    """A table of nodes, and a line on the whole."""
    console = Console()
    console.print(_status(status, None, console))


def watch_status(look: Callable[[], ClusterStatus], interval_s: float) -> NoReturn:
    """Look again and again; rates and hit rates are those between two looks. Never returns.

    Where it is not shown on a terminal, one table follows the other.
    """
    console = Console()
    before = None
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = look()
            shown = _status(status, before, console)
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
                console.file.flush()
            before = status
            time.sleep(interval_s)


def _status(status: ClusterStatus, before: ClusterStatus | None, console: Console) -> RenderableType:
    old = {node.node: node for node in before.nodes} if before else {}
    seconds = status.time - before.time if before else 0.0
    table, left_out = _nodes([_row(node, old.get(node.node), seconds) for node in status.nodes], console)
    lines = [
        f"epoch {status.epoch}, {len(status.nodes)} node(s)",
        f"balance {_number(status.balance)}: the fullest shard for its weight, as a multiple of the mean",
        f"hit rate {_percent(status.hit_rate)} since the shards started",
    ]
    if left_out:
        lines.append(f"a wider terminal also shows: {', '.join(left_out)}")
    if status.directory:
        lines.append(f"the member list may be out of date: {status.directory}")
    return Group(table, *lines) if status.nodes else Group(*lines)


def _nodes(rows: Sequence[Sequence[str]], console: Console) -> tuple[Table, list[str]]:
    """A table, and the columns that there is no room for."""
    for count in range(len(_LEFT_OUT_FIRST) + 1):
        left_out: list[str] = [name for name in _COLUMNS if name in _LEFT_OUT_FIRST[:count]]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in _COLUMNS:
            if name not in left_out:
                table.add_column(name, justify="left" if name == "node" else "right", overflow="fold")
        for row in rows:
            table.add_row(*(cell for name, cell in zip(_COLUMNS, row, strict=True) if name not in left_out))
        if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
            break
    return table, left_out


def _row(node: NodeStatus, old: NodeStatus | None, seconds: float) -> list[str]:
    if not node.shards_up:
        return [node.node, node.state, node.zone, f"0/{node.shards}", *["-"] * (len(_COLUMNS) - 4)]
    # A shard that restarted counts from 0 again: what it has is since its start then.
    if old is None or seconds <= 0 or node.uptime_s < seconds:
        hit_rate, moved = node.hit_rate, [format_size(node.bytes_in), format_size(node.bytes_out)]
    else:
        hits, misses = node.hits - old.hits, node.misses - old.misses
        hit_rate = hits / (hits + misses) if hits + misses > 0 else None
        rates = ((node.bytes_in - old.bytes_in) / seconds, (node.bytes_out - old.bytes_out) / seconds)
        moved = [f"{max(0.0, rate) / 1e6:.0f} MB/s" for rate in rates]
    return [
        node.node,
        "stopping" if node.draining else node.state,
        node.zone,
        f"{node.shards_up}/{node.shards}",
        str(node.connections),
        _percent(node.memory_used_bytes / node.memory_limit_bytes if node.memory_limit_bytes else None),
        str(node.blocks),
        str(node.disk_blocks),
        _percent(hit_rate),
        " / ".join(moved),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_locations(locations: Sequence[Location]) -> None:
    """A table of shards, in the order in which they are asked."""
    table = Table()
    for name in ("role", "node", "zone", "state", "shard", "address", "block"):
        table.add_column(name, overflow="fold")
    for found in locations:
        block = {None: "-", True: "present", False: "absent"}[found.present]
        table.add_row(found.role, found.node, found.zone, found.state, found.shard, found.endpoint, block)
    Console().print(table)


@contextmanager
def draining(node: str, shown: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar; what it gives is told how many blocks are dealt with, and of how many (None: not known yet)."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )
    with bar:
        task = bar.add_task(f"{node} drains", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
