"""The table that commands print for people: a title, names on the left, figures on the right."""

from __future__ import annotations

from rich import box
from rich.table import Table


def plain_table(title: str, first: str, *columns: str) -> Table:
    """-> a table without rows."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
