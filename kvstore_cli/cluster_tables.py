"""The output of `kvstore cluster` for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live

from kvstore.sizes import format_size
from kvstore_cli.plain_table import fitting_table

if TYPE_CHECKING:
    from kvstore_cli.cluster_status import ClusterStatus, NodeStatus
    from kvstore_client import Location

_COLUMNS: Final = ("node", "state", "zone", "up", "clients", "memory", "blocks", "on disk", "hits", "in / out")
# The order in which columns are left out of a narrow terminal. A node's id, state and up are always shown.
_LEFT_OUT_FIRST: Final = ("on disk", "in / out", "clients", "zone", "memory", "blocks", "hits")


def print_status(status: ClusterStatus) -> None:
    """Print a table of nodes, and the numbers of the whole cluster."""
    console = Console()
    console.print(_status(status, None, console))


def watch_status(look: Callable[[], ClusterStatus], interval_s: float) -> NoReturn:
    """Look every `interval_s` and show the nodes. Rates and hit rates are those between two looks. Never returns.

    If the output is not a terminal, the tables are printed one after the other.
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
    rows = [_row(node, old.get(node.node), seconds) for node in status.nodes]
    table, left_out = fitting_table(_COLUMNS, rows, _LEFT_OUT_FIRST, console)
    lines = [
        f"epoch {status.epoch}, {len(status.nodes)} node(s)",
        f"balance {_number(status.balance)}: the fullest shard for its weight, as a multiple of the mean",
        f"hit rate {_percent(status.hit_rate)} since the shards started",
    ]
    if left_out:
        lines.append(f"a wider terminal also shows: {', '.join(left_out)}")
    if not status.nodes:
        return Group()
    return Group(table, *lines)


def _row(node: NodeStatus, old: NodeStatus | None, seconds: float) -> list[str]:
    if not node.shards_up:
        return [node.node, node.state, node.zone, f"0/{node.shards}", *["-"] * (len(_COLUMNS) - 4)]
    # After a restart a shard counts from 0 again, so its counters hold only what came after the last look.
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
    """Print a line for each shard, in the order of `locations`."""
    for found in locations:
        zone = f"zone {found.zone}, " if found.zone else ""
        block = {None: "", True: ", block present", False: ", block absent"}[found.present]
        print(f"{found.role:<9}  {found.shard}  {found.endpoint}  {zone}{found.state}{block}")
