"""Markdown tables for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.results_reader import Spread


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], figures: bool = True) -> str:
    """A table. The first column is aligned to the left, the others to the right if they hold figures."""
    others = "--:|" if figures else "---|"
    lines = ["| " + " | ".join(headings) + " |", "|---|" + others * (len(headings) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def spread_text(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} … {spread.high:.2f})"
