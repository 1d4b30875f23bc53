"""The tables that commands print for people. A table is described by its columns: the value of a row that each column
shows, and its format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """A column of a table.

    value: a function of a row, or a path of attributes and item numbers, such as ``1.times.mean``; if None is found on
        the path, the cell is empty
    form: a format string as for `format`, or a function
    text: whether the column has words, which are on the left and folded if they are too long. Figures are on the right,
        and folded only if nothing else makes the table fit
    """

    heading: str
    value: Value
    form: Form = ""
    text: bool = False

    def cell(self, row: Any) -> str:
        """Return the text of this column in a row."""
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
    """Return the columns whose fields are in these tuples."""
    return [Column(*fields) for fields in each]


def scaled(factor: float, form: str) -> Callable[[float], str]:
    """Return a `form` that multiplies the value by a factor, to show it in another unit."""
    return lambda value: format(value * factor, form)


MS: Final = scaled(1e3, ".1f")  # for values in seconds


def print_table(title: str, columns: Sequence[Column], rows: Iterable[object], narrow: bool = False) -> None:
    """Print a table whose first column has names, on the left. In a table that is too wide, each word of a heading gets
    a line (a no-break space keeps two words together). If it is still too wide, cells are folded. `narrow`: whether to
    leave out the space around the cells."""
    console = Console(highlight=False)
    if title:
        console.print(Text(title, style="italic"))  # a title of the table's own would be folded to the table's width
    cells = [[Text(printable(column.cell(row))) for column in columns] for row in rows]
    for words_apart, folded in ((False, False), (True, False), (True, True)):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0 if narrow else 1))
        for number, column in enumerate(columns):
            table.add_column(
                (column.heading.replace(" ", "\n") if words_apart else column.heading).replace("\xa0", " "),
                justify="left" if column.text or not number else "right",
                no_wrap=not (column.text or folded),
                overflow="fold",
            )
        for each in cells:
            table.add_row(*each)
        if any(column.text for column in columns):
            break  # its texts are folded as far as needed
        if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
            break
    console.print(table)


def print_fitting(columns: Mapping[str, Sequence[str]], left_out_first: Sequence[str]) -> None:
    """Print a table of the texts of each column, which fits the terminal. Columns without any text are left out.
    `left_out_first`: see `fitting_table`."""
    shown = {heading: texts for heading, texts in columns.items() if any(texts)}
    console = Console(highlight=False)
    rows = list(zip(*shown.values(), strict=True))
    table, left_out = fitting_table(list(shown), rows, [name for name in left_out_first if name in shown], console)
    console.print(table)
    if left_out:
        print(f"a wider terminal also shows: {', '.join(left_out)}")


def fitting_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left_out_first: Sequence[str], console: Console
) -> tuple[Table, list[str]]:
    """Return a table that fits the console, and the columns that were left out. `left_out_first`: the columns that may
    be left out, in the order in which they are left out."""
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
