"""A row of a result, and the text that a template makes from the row.

A template is a string for `str.format`, with the attributes of a `Row` as names: "{case}: {rate:.2f} GB/s". A format
may begin with a unit, to which the value is converted. A "~" at its end adds the spread of the rounds to the median.
For example, "{s:ms.1f~}" gives "3.1 (2.9 … 3.4)", and "{x:.2f~ x}" gives "1.04 x (0.98 … 1.11)". For anything else, a
function of the row is used instead of a template.
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
    """A case of a result. If the rows or columns of a table are operations, it also has the operation's name."""

    result: Result
    data: CaseResult
    name: str = ""

    def at(self, item: str | CaseResult) -> Row:
        """Return the row of another operation, or of another case."""
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
        """The parameters of this operation alone."""
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
        """The operation's physical limit."""
        if self.name not in self.data.limits:
            raise NotMeasured(self.name)
        return self.at(self.data.limits[self.name])

    @property
    def x(self) -> Spread:
        """The operation's time as a multiple of the limit's time."""
        return self.limit.data.to_limit(self.name)

    @property
    def share(self) -> Spread:
        """The operation's throughput as a share of the limit's throughput."""
        return self.x.inverse

    def times(self, reference: str) -> float:
        """Return the time as a multiple of another operation's time (the median over the rounds)."""
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
    """Return the text of a cell. Raises `NotMeasured`."""
    return cell(row) if callable(cell) else _Formatter(row).vformat(cell, (), {})


def text_or_none(cell: Cell, row: Row) -> str:
    """Return the text of a cell. It is empty if the value was not measured."""
    try:
        return text(cell, row)
    except NotMeasured:
        return ""


def times(reference: str, spec: str = ".2f") -> Cell:
    """Return a cell with the time as a multiple of another operation's time."""
    return lambda row: format(row.times(reference), spec)


def at(name: str, cell: Cell) -> Cell:
    """Return the cell of another operation of the case."""
    return lambda row: text(cell, row.at(name))


def joined(cell: Cell, between: str = ", ", names: Iterable[str] = ()) -> Callable[[Row], str]:
    """Return the texts of several operations. If no names are given, return those of all operations of the row's
    case."""
    return lambda row: between.join(text(cell, row.at(name)) for name in names or row.data.operations)


# ---- which rows ----------------------------------------------------------------------------------------------------


def cases(*groups: str, where: Callable[[Row], bool] = lambda row: True) -> Rows:
    """Return a row for each case of these groups, or of all groups if none is given."""

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
    """Return a row for each operation of each case.

    case: if given, only this case is used
    limited: whether to return only operations that have a limit, by name
    """

    def rows(result: Result) -> list[Row]:
        of = [Row(result, result.case(case))] if case else cases(*groups)(result)
        found = []
        for each in of:
            found += [
                each.at(name) for name in names or (sorted(each.data.limits) if limited else each.data.operations)
            ]
        return [row for row in found if where(row)]

    return rows
