"""Markdown tables, which are described by their rows and by the heading and cell of each column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table as ConsoleTable

from benchmarks.render.cells import Cell, Row, Rows, cases, text, text_or_none
from benchmarks.results_reader import CaseResult, Result, Results

NOTHING: Final = "Not measured yet."

Item = str | CaseResult
Names = Callable[[Row], Iterable[Item]]


@dataclass(frozen=True)
class Each:
    """A column for each operation or case. Its cells are those of `row.at(item)`."""

    items: Sequence[str] | Names
    cell: Cell
    heading: Cell = "{name}"


Column = tuple[Cell, Cell] | Each


class Table:
    """A table of rows and columns. Headings are made from the first row. If there are no rows, there is no table."""

    def __init__(self, rows: Rows, *columns: Column, figures: bool = True) -> None:
        self.rows = rows
        self.columns = columns
        self.figures = figures

    def headings_and_rows(self, result: Result) -> tuple[list[str], list[list[str]]]:
        """Return the texts of all cells."""
        rows = list(self.rows(result))
        headings: list[str] = []
        cells: list[list[str]] = [[] for _ in rows]
        for column in self.columns if rows else ():
            heading, cell = (column.heading, column.cell) if isinstance(column, Each) else column
            for item in _items(column, rows[0]):
                headings.append(text(heading, _at(rows[0], item)))
                for made, row in zip(cells, rows, strict=True):
                    made.append(text_or_none(cell, _at(row, item)))
        return headings, cells

    def __call__(self, result: Result) -> str:
        """Its Markdown."""
        headings, rows = self.headings_and_rows(result)
        return markdown(headings, rows, self.figures) if rows else ""


def _items(column: Column, first: Row) -> Iterable[Item | None]:
    if not isinstance(column, Each):
        return (None,)
    return column.items(first) if callable(column.items) else column.items


def _at(row: Row, item: Item | None) -> Row:
    return row if item is None else row.at(item)


@dataclass(frozen=True)
class Mixed:
    """A table with several kinds of rows, each with its own cells."""

    headings: Sequence[Cell]
    kinds: Sequence[tuple[Rows, Sequence[Cell]]]
    figures: bool = True

    def __call__(self, result: Result) -> str:
        """Its Markdown."""
        rows = [(row, cells) for some, cells in self.kinds for row in some(result)]
        headings = [text(heading, rows[0][0]) for heading in self.headings] if rows else []
        made = [[text_or_none(cell, row) for cell in cells] for row, cells in rows]
        return markdown(headings, made, self.figures) if rows else ""


Part = Callable[[Result], str]


@dataclass(frozen=True)
class Section:
    """The content for one marker of a document, which is tables and paragraphs of one result."""

    needs: str
    parts: Sequence[Part]

    def __call__(self, results: Results) -> str:
        said = [part(results[self.needs]) for part in self.parts] if self.needs in results else []
        return "\n\n".join(filter(None, said)) if any(said) else NOTHING


def section(needs: str, *parts: Part | str) -> Section:
    """Return a section. A part that is a template becomes a paragraph, made from the first case."""
    return Section(needs, [paragraph(part) if isinstance(part, str) else part for part in parts])


def paragraph(cell: Cell, rows: Rows | None = None) -> Part:
    """Return a paragraph that is made from the first row."""
    return lambda result: next((text(cell, row) for row in (rows or cases())(result)), "")


def unavailable(result: Result) -> str:
    """Return the operations that were not run, with the reasons."""
    missing = result.cases[0].data["unavailable"]
    return "\n\n".join(f"{name}: {reason}." for name, reason in missing.items())


def matrix(heading: Cell, cell: Cell, names: Sequence[str] | Names, *groups: str, row: Cell = "{case}") -> Table:
    """Return a table with a row for each case and a column for each operation."""
    return Table(cases(*groups), (heading, row), Each(names, cell))


def names_of(row: Row) -> list[str]:
    return row.data.operations


def limited_of(row: Row) -> list[str]:
    return [name for name in row.data.operations if name in row.data.limits]


def console(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str] = (),
    sums: bool = False,
    caption: str | None = None,
) -> ConsoleTable:
    """Return a table for the terminal. `left`: the columns that are aligned to the left. `sums`: whether the last row
    has sums and is separated from the others."""
    table = ConsoleTable(title=title, title_justify="left", caption=caption)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for number, row in enumerate(rows, 1):
        table.add_row(*row, end_section=sums and number == len(rows) - 1)
    return table


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], figures: bool = True) -> str:
    """Return a Markdown table. The first column is aligned to the left. Other columns with figures are aligned to the
    right."""
    others = "--:|" if figures else "---|"
    lines = ["| " + " | ".join(headings) + " |", "|---|" + others * (len(headings) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
