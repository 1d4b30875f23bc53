"""A row of a result, and the text that a template makes of it.

A template is what `str.format` takes, with the attributes of a `Row` as its names: "{case}: {rate:.2f} GB/s". A format
may begin with a unit that the value is converted to, and end with "~" for the spread of the rounds beside the median:
"{s:ms.1f~}" is "3.1 (2.9 … 3.4)", and "{x:.2f~ x}" is "1.04 x (0.98 … 1.11)". What a template cannot say is a function
of the row.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.results_reader import CaseResult, Result, Spread

UNITS: Final = {"ms": 1e3, "us": 1e6, "M": 1e-6, "G": 1e-9, "Mi": 2**-20, "Gi": 2**-30, "pt": 1e2}
_SPEC: Final = re.compile(r"(ms|us|Mi|Gi|M|G|pt)?([^~]*)(~.*)?")


class NotMeasured(KeyError):
    """The case has no such operation, or no limit for it."""


@dataclass(frozen=True)
class Row:
    """A case of a result and, where a row or a column is an operation, its name."""

    result: Result
    data: CaseResult
    name: str = ""

    def at(self, item: str | CaseResult) -> Row:
        """The row of another operation, or of another case."""
        return replace(self, name=item) if isinstance(item, str) else replace(self, data=item)

    @property
    def case(self) -> str:
        return self.data.name

    @property
    def p(self) -> Mapping[str, Any]:
        """The parameters of the case."""
        return dict(self.data.data["parameters"])

    @property
    def run(self) -> Mapping[str, Any]:
        """The parameters of all cases."""
        return dict(self.result.data["parameters"])

    @property
    def mine(self) -> Mapping[str, Any]:
        """The parameters that each operation has of its own, of this one."""
        given = {**self.run, **self.p}
        return {key: value[self.name] for key, value in given.items() if isinstance(value, dict) and self.name in value}

    @property
    def s(self) -> Spread:
        """Seconds."""
        return self._there().seconds(self.name)

    @property
    def rate(self) -> Spread:
        """GB/s."""
        return self._there().rate(self.name)

    @property
    def rounds(self) -> int:
        return len(self._there().data["seconds"][self.name])

    @property
    def limit(self) -> Row:
        """Its physical limit."""
        if self.name not in self.data.limits:
            raise NotMeasured(self.name)
        return self.at(self.data.limits[self.name])

    @property
    def x(self) -> Spread:
        """The time as a multiple of the limit's."""
        return self.limit.data.to_limit(self.name)

    @property
    def share(self) -> Spread:
        """The throughput as a share of the limit's."""
        return self.x.inverse

    def times(self, reference: str) -> float:
        """The time as a multiple of another operation's, the median over the rounds."""
        return self._there().ratio(self.name, reference)

    def _there(self) -> CaseResult:
        if self.name not in self.data.operations:
            raise NotMeasured(self.name)
        return self.data


Cell = str | Callable[[Row], str]
Rows = Callable[[Result], Sequence[Row]]


class _Formatter(string.Formatter):
    def __init__(self, row: Row) -> None:
        self._row = row

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self._row, str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        match = _SPEC.fullmatch(format_spec)
        assert match is not None
        unit, spec, spread = match.groups()
        values = [value.median, value.low, value.high] if isinstance(value, Spread) else [value]
        texts = [_number(each, unit, spec) for each in values]
        return f"{texts[0]}{spread[1:]} ({texts[1]} … {texts[2]})" if spread else texts[0]


def _number(value: Any, unit: str | None, spec: str) -> str:
    if spec == "auto":
        spec = ".3f" if value < 0.01 else ".1f"
    return format(value if unit is None else value * UNITS[unit], spec)


def text(cell: Cell, row: Row) -> str:
    """The text of a cell. Raises `NotMeasured`."""
    return cell(row) if callable(cell) else _Formatter(row).vformat(cell, (), {})


def text_or_none(cell: Cell, row: Row) -> str:
    """The text of a cell; empty where it was not measured."""
    try:
        return text(cell, row)
    except NotMeasured:
        return ""


def times(reference: str, spec: str = ".2f") -> Cell:
    """The time as a multiple of another operation's."""
    return lambda row: format(row.times(reference), spec)


def at(name: str, cell: Cell) -> Cell:
    """The cell of another operation of the case."""
    return lambda row: text(cell, row.at(name))


def joined(cell: Cell, between: str = ", ", names: Iterable[str] = ()) -> Callable[[Row], str]:
    """The texts of several operations; without names: of all in the row's case."""
    return lambda row: between.join(text(cell, row.at(name)) for name in names or row.data.operations)


# ---- which rows ----------------------------------------------------------------------------------------------------


def cases(*groups: str, where: Callable[[Row], bool] = lambda row: True) -> Rows:
    """A row a case, of these groups or of all."""

    def rows(result: Result) -> list[Row]:
        found = [case for group in groups for case in result.group(group)] if groups else result.cases
        return [row for row in (Row(result, case) for case in found) if where(row)]

    return rows


def operations(
    *groups: str,
    case: str = "",
    names: Sequence[str] = (),
    limited: bool = False,
    where: Callable[[Row], bool] = lambda row: True,
) -> Rows:
    """A row an operation of each case. case: of this one only. limited: only operations that have a limit, by name."""

    def rows(result: Result) -> list[Row]:
        of = [Row(result, result.case(case))] if case else cases(*groups)(result)
        found = []
        for each in of:
            found += [
                each.at(name) for name in names or (sorted(each.data.limits) if limited else each.data.operations)
            ]
        return [row for row in found if where(row)]

    return rows
