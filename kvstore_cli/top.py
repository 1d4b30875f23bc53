"""`kvstore top`: every node or shard of a store, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.sizes import format_size
from kvstore.wire import ShardInfo
from kvstore.wire.status import Field, fields_of
from kvstore_cli.options import EndpointOption, JsonOption, TimeoutOption, connected
from kvstore_cli.output import print_json, show

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvstore_cli.top_state import Looking, Top, TopRow

_KEPT: Final = ("name", "hits", "out")
_LEFT_OUT_FIRST: Final = ("clients", "requests", "blocks", "up", "slow", "disk", "evicted", "memory", "in")
_NEXT: Final = (b">", b"s", b"\x1b[C")  # also: the right arrow
_PREVIOUS: Final = (b"<", b"\x1b[D")


class By(str, Enum):
    """What a row is of."""

    NODE = "node"
    SHARD = "shard"


def _cell(field: Field, row: TopRow) -> str:
    value = getattr(row, field.top_key)
    text = format_size(value) if field.unit == "bytes" else f"{value:.1f} s" if field.unit == "s" else f"{value:.0f}"
    return f"{text}/s" if field.per_second else text


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _percent(used: int, limit: int) -> str:
    return f"{used / limit:.0%}" if limit else "-"


# Each column: the number that rows are sorted by, and how it is printed. Fields of INFO come last.
_COLUMNS: Final[dict[str, tuple[str, Callable[[TopRow], str]]]] = {
    "name": ("name", lambda row: row.name),
    "up": ("shards_up", lambda row: f"{row.shards_up}/{row.shards}"),
    "clients": ("connections", lambda row: str(row.connections)),
    "hits": ("hit_rate", lambda row: "-" if row.hit_rate is None else f"{row.hit_rate:.1%}"),
    "in": ("bytes_in_per_s", lambda row: _speed(row.bytes_in_per_s)),
    "out": ("bytes_out_per_s", lambda row: _speed(row.bytes_out_per_s)),
    "requests": ("requests_per_s", lambda row: f"{row.requests_per_s:.0f}/s"),
    "blocks": ("blocks", lambda row: str(row.blocks)),
    "memory": ("memory_used_bytes", lambda row: _percent(row.memory_used_bytes, row.memory_limit_bytes)),
    "disk": ("disk_used_bytes", lambda row: _percent(row.disk_used_bytes, row.disk_limit_bytes)),
    **{field.top: (field.top_key, partial(_cell, field)) for field in fields_of(ShardInfo) if field.top},
}


def _column(name: str) -> str:
    if name not in _COLUMNS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, _COLUMNS))}.")
    return name


def top(
    endpoint: EndpointOption = None,
    by: Annotated[By, typer.Option("--by", help="What a row is of.")] = By.NODE,
    sort: Annotated[
        str,
        typer.Option(
            *("--sort", "-s"),
            metavar=f"<{'|'.join(_COLUMNS)}>",
            callback=_column,
            autocompletion=lambda: list(_COLUMNS),
            help="Column to sort by; numbers from the largest.",
        ),
    ] = "name",
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="Sort the other way round.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, show that, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600.0, help="Seconds between looks.")
    ] = 2.0,
    timeout: TimeoutOption = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show what every node does, live: hit rate, traffic, blocks, memory, disk, evictions, slow turns.

    Rates are those between two looks. In a terminal the keys < and > (or the arrows) choose the column to sort by,
    r turns the order round, and q ends it. With --json each line is a document; with --once there is one, and the
    status is 1 if a shard does not answer.
    """
    from kvstore_cli.top_state import Looking

    with connected(endpoint, None, timeout, fail_open=True) as client:
        looking = Looking(client, by is By.SHARD)
        looking.look()
        shown = _Shown(sort, reverse)
        with contextlib.suppress(KeyboardInterrupt):
            if once:
                time.sleep(interval)
                found = shown.sorted(looking.look())
                show(found, as_json, lambda: _print(found, shown), found.failure)
            elif as_json:
                while True:
                    time.sleep(interval)
                    found = shown.sorted(looking.look())
                    print_json(found, found.failure)
                    sys.stdout.flush()
            else:
                _live(looking, shown, interval)


class _Shown:
    """The order of the rows, which keys change."""

    def __init__(self, sort: str, reverse: bool) -> None:
        self.sort = sort
        self.reverse = reverse

    def sorted(self, found: Top) -> Top:
        """-> the same look with its rows in order."""
        import msgspec

        from kvstore_cli.top_state import sorted_rows

        return msgspec.structs.replace(found, rows=sorted_rows(found.rows, _COLUMNS[self.sort][0], self.reverse))

    def press(self, keys: bytes) -> bool:
        """Take what was typed. -> False if it means the end."""
        sorts = list(_COLUMNS)
        if keys in _NEXT or keys in _PREVIOUS:
            step = 1 if keys in _NEXT else -1
            self.sort = sorts[(sorts.index(self.sort) + step) % len(sorts)]
        elif keys == b"r":
            self.reverse = not self.reverse
        return keys not in (b"q", b"Q", b"\x04")


def _live(looking: Looking, shown: _Shown, interval_s: float) -> None:
    """Look until q or Ctrl-C. If the output is not a terminal, the tables are printed one after the other."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        while True:
            time.sleep(interval_s)
            console.print(_table(shown.sorted(looking.look()), shown, console))
            console.file.flush()
    found = looking.look()
    with _keys() as typed, Live(console=console, auto_refresh=False, screen=True) as live:
        due = time.monotonic() + min(interval_s, 1.0)  # the first look is too short for a rate: the next comes soon
        while True:
            live.update(_table(shown.sorted(found), shown, console, keys=True), refresh=True)
            pressed = typed(due - time.monotonic())
            if pressed and not shown.press(pressed):
                return
            if time.monotonic() >= due:
                found = looking.look()
                due = time.monotonic() + interval_s


class _Typed:
    """What is typed while the table is shown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd  # -1: nobody can type

    def __call__(self, wait_s: float) -> bytes:
        """-> what was typed, at the latest after so long."""
        if self._fd < 0:
            time.sleep(max(0.0, wait_s))
            return b""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, wait_s))
        return os.read(self._fd, 16) if ready else b""


@contextlib.contextmanager
def _keys() -> Iterator[_Typed]:
    """Keys are read one by one and not shown, while the body runs."""
    if not sys.stdin.isatty():
        yield _Typed(-1)
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield _Typed(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _print(found: Top, shown: _Shown) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(found, shown, console))


def _table(found: Top, shown: _Shown, console: Console, keys: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kvstore_cli.output import printable
    from kvstore_cli.plain_table import fitting_table

    mark = f"{shown.sort}{'▲' if shown.reverse else '▼'}"
    columns = [mark if name == shown.sort else name for name in _COLUMNS]
    left_out_first = [*(name for name in _COLUMNS if name not in (*_KEPT, *_LEFT_OUT_FIRST)), *_LEFT_OUT_FIRST]
    rows = list(found.rows) if len(found.rows) == 1 else [*found.rows, found.all]
    table, left_out = fitting_table(
        columns,
        [[cell(row) for _, cell in _COLUMNS.values()] for row in rows],
        [name for name in left_out_first if name in columns],
        console,
    )
    styles = {"bad": "red", "warning": "yellow", "note": ""}
    lines = [Text(printable(message.text), styles[message.severity]) for message in found.messages]
    if left_out:
        lines.append(Text(f"a wider terminal also shows: {', '.join(left_out)}", "dim"))
    if keys:
        lines.append(Text(f"{time.strftime('%H:%M:%S')}   < > sort   r reverse   q quit", "dim"))
    return Group(table, *lines)
