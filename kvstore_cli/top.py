"""`kvstore top`: shows every node or shard of a store, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from kvstore.sizes import format_size
from kvstore.wire import ShardInfo
from kvstore.wire.status import Field, fields_of
from kvstore_cli.options import ID_DIGITS, EndpointOption, JsonOption, TimeoutOption, connected
from kvstore_cli.output import print_json, show

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvstore_cli.top_state import Looking, Top, TopRow

_KEPT_COLUMNS: Final = ("name", "hits", "out", "model", "tenant", "memory")
_TOP_LEFT_OUT_FIRST: Final = (
    *("clients", "requests", "blocks", "up", "slow", "disk", "evicted", "p99", "memory", "in"),
    *("missed", "refused", "created", "found"),
)
_NEXT: Final = (b">", b"s", b"\x1b[C")  # the last one is the right arrow
_PREVIOUS: Final = (b"<", b"\x1b[D")


class By(str, Enum):
    """The kinds of rows."""

    NODE = "node"
    SHARD = "shard"
    NAMESPACE = "namespace"
    TENANT = "tenant"


def _cell(field: Field, row: TopRow) -> str:
    value = getattr(row, field.top_key)
    text = format_size(value) if field.unit == "bytes" else f"{value:.1f} s" if field.unit == "s" else f"{value:.0f}"
    return f"{text}/s" if field.per_second else text


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _percent(used: int, limit: int) -> str:
    return f"{used / limit:.0%}" if limit else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}/s"


_Columns: TypeAlias = "dict[str, tuple[str, Callable[[Any], str]]]"

# For each column, the field by which rows are sorted, and how it is printed. Fields of INFO come last.
_TOP_COLUMNS: Final[_Columns] = {
    "name": ("name", lambda row: row.name),
    "up": ("shards_up", lambda row: f"{row.shards_up}/{row.shards}"),
    "clients": ("connections", lambda row: str(row.connections)),
    "hits": ("hit_rate", lambda row: _share(row.hit_rate)),
    "in": ("bytes_in_per_s", lambda row: _speed(row.bytes_in_per_s)),
    "out": ("bytes_out_per_s", lambda row: _speed(row.bytes_out_per_s)),
    "requests": ("requests_per_s", lambda row: _rate(row.requests_per_s)),
    "p99": ("get_p99_s", lambda row: _ms(row.get_p99_s)),
    "blocks": ("blocks", lambda row: str(row.blocks)),
    "memory": ("memory_used_bytes", lambda row: _percent(row.memory_used_bytes, row.memory_limit_bytes)),
    "disk": ("disk_used_bytes", lambda row: _percent(row.disk_used_bytes, row.disk_limit_bytes)),
    **{field.top: (field.top_key, partial(_cell, field)) for field in fields_of(ShardInfo) if field.top},
}


# The same for rows of namespaces and of tenants.
_USE_COLUMNS: Final[_Columns] = {
    "hits": ("hit_rate", lambda row: _share(row.hit_rate)),
    "found": ("found_per_s", lambda row: _rate(row.found_per_s)),
    "missed": ("missed_per_s", lambda row: _rate(row.missed_per_s)),
    "created": ("created_per_s", lambda row: _rate(row.created_per_s)),
    "evicted": ("evicted_per_s", lambda row: _rate(row.evicted_per_s)),
    "blocks": ("blocks", lambda row: str(row.blocks)),
    "memory": ("memory_bytes", lambda row: format_size(row.memory_bytes)),
    "disk": ("disk_bytes", lambda row: format_size(row.disk_bytes)),
}
_COLUMNS_BY: Final[dict[By, _Columns]] = {
    By.NODE: _TOP_COLUMNS,
    By.SHARD: _TOP_COLUMNS,
    By.NAMESPACE: {
        "name": ("name", lambda row: row.name[:ID_DIGITS]),
        "model": ("model", lambda row: row.model),
        "tenant": ("tenant", lambda row: row.tenant or "-"),
        **_USE_COLUMNS,
    },
    By.TENANT: {
        "name": ("name", lambda row: row.name or "-"),
        **_USE_COLUMNS,
        "limit": ("memory_limit_bytes", lambda row: _limit(row.memory_limit_bytes)),
        "clients": ("connections", lambda row: str(row.connections)),
        "refused": ("refused_per_s", lambda row: _rate(row.refused_per_s)),
    },
}
_ALL_COLUMNS: Final = list(dict.fromkeys(name for each in _COLUMNS_BY.values() for name in each))
_LEGEND: Final = """\
up        shards that answer, of all            clients   connections, the most of any shard
hits      blocks found, of those requested      in, out   bytes of blocks received and sent
requests  SETs, GETs and look-ups               p99       99 of 100 GETs took at most this long
memory    used, of the limit                    disk      used, of the limit
evicted   blocks removed to make room           slow      rounds of a shard's loop over 50 ms
found, missed, created   blocks, in each second       refused   requests over a limit of the tenant

Rates are those since the last refresh. Press a key to return."""


def _limit(count: int | None) -> str:
    return "-" if count is None else format_size(count)


def top(
    endpoint: EndpointOption = None,
    by: Annotated[By, typer.Option("--by", help="What each row shows.")] = By.NODE,
    sort: Annotated[
        str,
        typer.Option(
            *("--sort", "-s"),
            metavar="COLUMN",
            autocompletion=lambda: list(_ALL_COLUMNS),
            help=f"Column to sort by, one that is shown: {', '.join(_ALL_COLUMNS)}. The largest numbers come first.",
        ),
    ] = "name",
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="Reverse the order.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show one interval, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600.0, help="Seconds between polls.")
    ] = 2.0,
    timeout: TimeoutOption = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show every node's activity, live: hit rate, traffic, times of GETs, blocks, memory, disk, evictions.

    Rates are those between two polls. In a terminal, the keys < and > (or the arrows) choose the column to sort by, r
    reverses the order, ? explains the columns, and q ends the command. With --json, each line is a JSON document. With
    --once, there is one result, and the exit status is 1 if a shard does not answer.
    """
    from kvstore_cli.top_state import Looking

    if sort not in _COLUMNS_BY[by]:
        raise typer.BadParameter(
            f"--sort {sort!r} is not one of {', '.join(map(repr, _COLUMNS_BY[by]))}, the columns of --by {by.value}."
        )
    with connected(endpoint, None, timeout, fail_open=True) as client:
        looking = Looking(client, by.value)
        looking.look()
        shown = _Shown(_COLUMNS_BY[by], sort, reverse)
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
    """The columns, and the order of the rows, which the user changes with keys."""

    def __init__(self, columns: _Columns, sort: str, reverse: bool) -> None:
        self.columns = columns
        self.sort = sort
        self.reverse = reverse
        self.explained = False  # the legend is shown instead of the table

    def sorted(self, found: Top) -> Top:
        """Return the result of a poll with its rows in this order."""
        import msgspec

        from kvstore_cli.top_state import sorted_rows

        return msgspec.structs.replace(found, rows=sorted_rows(found.rows, self.columns[self.sort][0], self.reverse))

    def press(self, keys: bytes) -> bool:
        """Handle the keys that were typed. Returns False if one of them ends the command."""
        sorts = list(self.columns)
        if self.explained or keys in (b"?", b"h"):
            self.explained = not self.explained
        elif keys in _NEXT or keys in _PREVIOUS:
            step = 1 if keys in _NEXT else -1
            self.sort = sorts[(sorts.index(self.sort) + step) % len(sorts)]
        elif keys == b"r":
            self.reverse = not self.reverse
        return keys not in (b"q", b"Q", b"\x04")


def _live(looking: Looking, shown: _Shown, interval_s: float) -> None:
    """Poll until q or Ctrl-C. If the output is not a terminal, the tables are printed one after the other."""
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
        due = time.monotonic() + min(interval_s, 1.0)  # the first poll gives no rates, so the next one comes soon
        while True:
            live.update(_table(shown.sorted(found), shown, console, keys=True), refresh=True)
            pressed = typed(due - time.monotonic())
            if pressed and not shown.press(pressed):
                return
            if time.monotonic() >= due:
                found = looking.look()
                due = time.monotonic() + interval_s


class _Typed:
    """Reads the keys that are typed while the table is shown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd  # -1 if there is no keyboard

    def __call__(self, wait_s: float) -> bytes:
        """Return typed keys as soon as there are any, after at most `wait_s` seconds."""
        if self._fd < 0:
            time.sleep(max(0.0, wait_s))
            return b""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, wait_s))
        return os.read(self._fd, 16) if ready else b""


@contextlib.contextmanager
def _keys() -> Iterator[_Typed]:
    """Read keys one by one without showing them, while the body runs."""
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

    if shown.explained:
        return Text(_LEGEND)
    mark = f"{shown.sort}{'▲' if shown.reverse else '▼'}"
    columns = [mark if name == shown.sort else name for name in shown.columns]
    left_out_first = [
        *(name for name in shown.columns if name not in (*_KEPT_COLUMNS, *_TOP_LEFT_OUT_FIRST)),
        *_TOP_LEFT_OUT_FIRST,
    ]
    rows = list(found.rows)
    if len(rows) > 1 and shown.columns is _TOP_COLUMNS:
        rows.append(found.all)
    table, left_out = fitting_table(
        columns,
        [[cell(row) for _, cell in shown.columns.values()] for row in rows],
        [name for name in left_out_first if name in columns],
        console,
    )
    styles = {"bad": "red", "warning": "yellow", "note": ""}
    lines = [Text(printable(message.text), styles[message.severity]) for message in found.messages]
    if left_out:
        lines.append(Text(f"a wider terminal also shows: {', '.join(left_out)}", "dim"))
    if keys:
        lines.append(Text(f"{time.strftime('%H:%M:%S')}   < > sort   r reverse   ? columns   q quit", "dim"))
    return Group(table, *lines)
