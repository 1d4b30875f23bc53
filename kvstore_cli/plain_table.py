"""The tables that commands print for people. A table is data: its columns say what of a row they show, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore_cli.output import printable

_ANY_WIDTH: Final = 10_000

Value: TypeAlias = str | Callable[[Any], object]
Form: TypeAlias = str | Callable[[Any], str]


class Column(NamedTuple):
    """`value`: a function of a row, or a path of attributes and numbers of items, such as ``1.times.mean``. `form`: a
    format, as `format` takes it, or a function. None, where the path goes on or at its end, is an empty cell. `text`:
    words, on the left, which are folded if they are too long; figures are on the right."""

    heading: str
    value: Value
    form: Form = ""
    text: bool = False

    def cell(self, row: Any) -> str:
        """-> what this column shows of a row."""
        value = row
        for step in self.value.split(".") if isinstance(self.value, str) else ():
            if value is not None:
                value = value[int(step)] if step.isdigit() else getattr(value, step)
        if callable(self.value):
            value = self.value(row)
        if value is None:
            return ""
        return self.form(value) if callable(self.form) else format(value, self.form)


def columns(*each: tuple[Any, ...]) -> list[Column]:
    """-> columns whose fields are in these tuples."""
    return [Column(*fields) for fields in each]


def scaled(factor: float, form: str) -> Callable[[float], str]:
    """-> the form of a value in another unit."""
    return lambda value: format(value * factor, form)


MS: Final = scaled(1e3, ".1f")  # of seconds


def print_table(title: str, columns: Sequence[Column], rows: Iterable[object], narrow: bool = False) -> None:
    """Print a table; the first column holds names, on the left. narrow: without room beside the cells."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0 if narrow else 1)
    )
    for number, column in enumerate(columns):
        table.add_column(
            column.heading,
            justify="left" if column.text or not number else "right",
            no_wrap=not column.text,
            overflow="fold" if column.text else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(printable(column.cell(row))) for column in columns))
    Console(highlight=False).print(table)


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
