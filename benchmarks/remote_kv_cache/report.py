"""Statistics of interleaved rounds, and the tables that are made from these statistics.

A `Case` holds the raw seconds of operations that were measured in the same rounds. A ratio is taken within each round,
and the median of the ratios is reported, so a disturbance of the machine affects both sides of a ratio. Ratios compare
seconds per byte if both operations move bytes, otherwise seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Case:
    """The rounds of operations that are compared with each other. `moved`: the payload bytes of one run, for operations
    that move bytes. `limits`: operation -> the operation that is its physical limit. `unavailable`: operations that
    were not run, and why."""

    name: str
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    references: Sequence[str] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def median(self, operation: str) -> float:
        """The median time of an operation, in seconds."""
        return median(self.seconds[operation])

    def ratios(self, operation: str, reference: str) -> list[float]:
        """The operation's time in each round as a multiple of the reference's."""
        mine, other = (self.moved.get(name, 0) for name in (operation, reference))
        scale = other / mine if mine and other else 1.0
        pairs = zip(self.seconds[operation], self.seconds[reference], strict=True)
        return [mine_s / other_s * scale for mine_s, other_s in pairs]

    def ratio(self, operation: str, reference: str) -> float:
        """The median of `ratios`."""
        return median(self.ratios(operation, reference))

    def to_json(self) -> dict[str, Any]:
        """The whole case, with the raw rounds first. All times are in seconds."""
        names = list(self.seconds)
        return {
            "case": self.name,
            "parameters": dict(self.parameters),
            "bytes": {name: self.moved.get(name, 0) for name in names},
            "limit": dict(self.limits),
            "unavailable": dict(self.unavailable),
            "seconds": {name: [_short(value) for value in self.seconds[name]] for name in names},
            "median": {name: _short(self.median(name)) for name in names},
            "min": {name: _short(min(self.seconds[name])) for name in names},
            "max": {name: _short(max(self.seconds[name])) for name in names},
            "ratio_to_limit": {name: self._spread(name, limit) for name, limit in self.limits.items()},
            "ratio_to": {
                reference: {name: _short(self.ratio(name, reference)) for name in names}
                for reference in self.references
            },
        }

    def _spread(self, operation: str, reference: str) -> dict[str, float]:
        ratios = self.ratios(operation, reference)
        return {"median": _short(median(ratios)), "min": _short(min(ratios)), "max": _short(max(ratios))}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def console() -> Console:
    """Return a console on standard output. If that is not a terminal, the console is wide enough for a table."""
    return Console(width=None if sys.stdout.isatty() else 140)


def time_text(seconds: float) -> str:
    """Return a time as text, in milliseconds, or in microseconds if it is below one millisecond."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def case_table(case: Case) -> Table:
    """A row for each operation: its time, spread and rate, and multiples of its limit and of the case's references."""
    table = Table("operation", title=case.name, title_justify="left")
    for heading in ("median", "min … max", "GB/s", "x limit", *(f"x {name}" for name in case.references)):
        table.add_column(heading, justify="right", no_wrap=heading in ("median", "GB/s"))
    table.add_column("its limit")
    for name, seconds in case.seconds.items():
        limit = case.limits.get(name, "")
        middle = case.median(name)
        table.add_row(
            name,
            time_text(middle),
            f"{time_text(min(seconds))} … {time_text(max(seconds))}",
            f"{case.moved[name] / middle / 1e9:.2f}" if case.moved.get(name) else "",
            f"{case.ratio(name, limit):.2f}" if limit else "",
            *(f"{case.ratio(name, reference):.2f}" for reference in case.references),
            limit,
        )
    table.caption = _missing(case)
    return table


def matrix_table(title: str, cases: Sequence[Case], reference: str = "") -> Table:
    """A row for each case and a column for each operation, with multiples of `reference`. Without a reference, the
    multiples are those of each operation's own limit."""
    first = cases[0]
    names = [name for name in first.seconds if (name != reference if reference else name in first.limits)]
    table = Table("", title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for case in cases:
        values = [f"{case.ratio(name, reference or case.limits[name]):.2f}" for name in names]
        table.add_row(case.name, *values)
    table.caption = _missing(first)
    return table


def _missing(case: Case) -> str | None:
    """The operations that were not run, and why."""
    return "; ".join(f"{name}: {reason}" for name, reason in case.unavailable.items()) or None
