"""Reads the JSON results of benchmarks. All charts and tables get their numbers only from here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

QUIET_BUSY: Final = 0.05  # the busy share of all cores in the two seconds before
QUIET_LOAD: Final = 0.5  # the load average of the minute before, used if the share was not measured


@dataclass(frozen=True)
class Spread:
    """The median, lowest and highest value of the rounds."""

    median: float
    low: float
    high: float

    @property
    def inverse(self) -> Spread:
        """Return the inverse of each value. Seconds become runs per second, and multiples of a time become shares of a
        throughput."""
        return Spread(1 / self.median, 1 / self.high, 1 / self.low)

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class CaseResult:
    """The results of the operations of one `Case` of a benchmark, which were measured in the same rounds."""

    data: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.data["case"])

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.data["parameters"])

    @property
    def operations(self) -> list[str]:
        return list(self.data["seconds"])

    @property
    def limits(self) -> dict[str, str]:
        """The name of each operation's physical limit, by the operation's name."""
        return dict(self.data["limit"])

    def seconds(self, operation: str) -> Spread:
        return Spread(*(self.data[what][operation] for what in ("median", "min", "max")))

    def rate(self, operation: str) -> Spread:
        """The operation's rate in GB/s, where a GB is 1e9 bytes."""
        moved = self.data["bytes"][operation] / 1e9
        seconds = self.seconds(operation)
        return Spread(moved / seconds.median, moved / seconds.high, moved / seconds.low)

    def to_limit(self, operation: str) -> Spread:
        """The operation's time divided by that of its physical limit, for each round."""
        spread = self.data["ratio_to_limit"][operation]
        return Spread(spread["median"], spread["min"], spread["max"])

    def ratio(self, operation: str, reference: str) -> float:
        """The operation's time divided by that of a reference operation of the case, as the median over the rounds."""
        return float(self.data["ratio_to"][reference][operation])


@dataclass(frozen=True)
class Result:
    """The results of a benchmark, from one file."""

    data: dict[str, Any]

    @property
    def cases(self) -> list[CaseResult]:
        return [CaseResult(case) for case in self.data["cases"]]

    def case(self, name: str) -> CaseResult:
        """Return the case with this name. Raises `KeyError` if it was not measured."""
        for case in self.cases:
            if case.name == name:
                return case
        raise KeyError(f"{self.data['benchmark']}: no case {name!r}; it was run as {self.data['command']!r}")

    def group(self, name: str) -> list[CaseResult]:
        """Return the cases of one kind, for a benchmark that has several kinds of cases."""
        return [case for case in self.cases if case.parameters.get("group") == name]

    def measured_group(self, name: str) -> list[CaseResult]:
        """Return the cases of one kind. Raises `KeyError` if none was measured."""
        if not (cases := self.group(name)):
            raise KeyError(name)
        return cases

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.data["parameters"])

    @property
    def rounds(self) -> int:
        return int(self.data["rounds"])

    @property
    def quiet(self) -> bool:
        """Whether the machine was idle when the benchmark began. It is always true for results that are not times."""
        if not self.data.get("timed", True):
            return True
        load = self.data["load"]
        if load["busy_before"] is not None:
            return bool(load["busy_before"] <= QUIET_BUSY)
        return bool(load["average_before"] <= QUIET_LOAD)

    @property
    def load_text(self) -> str:
        """The load of the machine when the benchmark began, as text."""
        load = self.data["load"]
        busy = load["busy_before"]
        return f"{load['average_before']:.2f}" + ("" if busy is None else f", {busy:.0%} busy")

    @property
    def commit(self) -> str:
        """The short id of the commit that was measured, or an empty string if it is not known."""
        commit = self.data["commit"]
        return str(commit["id"]) if commit else ""


Results = dict[str, Result]


def parameters_of(result: Result, group: str) -> list[dict[str, Any]]:
    """Return the parameters of the cases of one kind."""
    return [case.parameters for case in result.group(group)]


def read_results(folder: Path) -> Results:
    """Return all results in a folder, by benchmark. The results of a GPU machine are in the subfolder `gpu`; their
    names are `gpu_` and the step's name."""
    files = {file.stem: file for file in sorted(folder.glob("*.json"))}
    files |= {f"gpu_{file.stem}": file for file in sorted(folder.glob("gpu/*.json"))}
    return {name: Result(json.loads(file.read_text())) for name, file in files.items()}
