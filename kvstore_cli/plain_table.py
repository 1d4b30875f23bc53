"""The tables that commands print for people: names on the left, figures on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore_cli.output import printable

_ANY_WIDTH: Final = 10_000


def plain_table(title: str, first: str, *columns: str) -> Table:
    """-> a table without rows."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def fitting_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left_out_first: Sequence[str], console: Console
) -> tuple[Table, list[str]]:
    """-> a table that fits the console, and the columns that have no room. left_out_first: the columns that may be left
    out, in that order."""
    for count in range(len(left_out_first) + 1):
        left_out = [name for name in columns if name in left_out_first[:count]]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in columns:
            if name not in left_out:
                table.add_column(name, justify="left" if name == columns[0] else "right", overflow="fold")
        for row in rows:
            table.add_row(
                *(Text(printable(cell)) for name, cell in zip(columns, row, strict=True) if name not in left_out)
            )
        if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
            break
    return table, left_out
