"""The ledger of targets. It has each target, the command that measures it, the figure that was reached, and the
verdict.

A target is *met* or *missed* only if the result has at least `MIN_ROUNDS` rounds and the machine was idle when the
benchmark began. With any other result the target is *not established*, whatever the figure is. A result is *stale* if
the code of a path that its benchmark measures (`measures.py`) has changed since the result's commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.code_changes import changed_since
from benchmarks.measures import measured_by
from benchmarks.render.cells import Cell, Row, Rows, text
from benchmarks.render.tables import markdown
from benchmarks.results_reader import Result, Results
from benchmarks.run_all import BENCHMARKS

MIN_ROUNDS: Final = 5
MET: Final = "met"
MISSED: Final = "**missed**"
NOT_ESTABLISHED: Final = "not established"
NOT_MEASURED: Final = "not measured"


@dataclass(frozen=True)
class Finding:
    """The figure that was reached, the limit from the same run, and whether the target is met. `rounds`: the number of
    rounds of this figure, if it differs from the benchmark's number."""

    reached: str
    limit: str
    met: bool
    rounds: int | None = None


@dataclass(frozen=True)
class Claim:
    """A target. `find` raises `KeyError` if the case was not measured. `variant`: which of the benchmark's results the
    target uses."""

    target: str
    benchmark: str
    find: Callable[[Result], Finding]
    arguments: str = ""
    variant: str = ""

    @property
    def result(self) -> str:
        """The name of the result that has the target's figure."""
        return f"{self.benchmark}_{self.variant}" if self.variant else self.benchmark

    @property
    def command(self) -> str:
        """The command that measures the target's figure."""
        module = next(entry.module for entry in BENCHMARKS if entry.module.endswith(f".{self.benchmark}"))
        return f"python -m {module}{self.arguments and ' ' + self.arguments}"

    def look(self, results: Results) -> Finding | None:
        """Return the finding, or None if it was not measured. A benchmark with a wrong answer misses all its
        targets."""
        try:
            result = results[self.result]
            found = self.find(result)
        except KeyError:
            return None
        checks = result.data["parameters"].get("checks")
        right = checks is None or (not checks["answers_wrong"] and bool(checks["cached_as_expected"]))
        return found if right else replace(found, met=False)


def found(
    rows: Rows,
    reached: Cell,
    limit: Cell,
    met: Callable[[Row], bool],
    *,
    between: str = ", ",
    own_rounds: bool = False,
) -> Callable[[Result], Finding]:
    """Return a function that finds a target's figure. The function returns the text of each row, the limit that the
    first row names, and whether all rows meet the target. `own_rounds`: whether the first row's operation has its own
    number of rounds."""

    def find(result: Result) -> Finding:
        if not (mine := rows(result)):
            raise KeyError("no such case")
        said, rounds = between.join(text(reached, row) for row in mine), mine[0].rounds if own_rounds else None
        return Finding(said, text(limit, mine[0]), all(map(met, mine)), rounds)

    return find


def at_most(limit: float, figure: Callable[[Row], float] = lambda row: row.x.median) -> Callable[[Row], bool]:
    """Return a check that a figure is at most `limit`. By default the figure is the multiple of the limit's time."""
    return lambda row: figure(row) <= limit


def at_least(limit: float, figure: Callable[[Row], float] = lambda row: row.share.median) -> Callable[[Row], bool]:
    """Return a check that a figure is at least `limit`. By default the figure is the share of the limit's
    throughput."""
    return lambda row: figure(row) >= limit


def verdict(finding: Finding | None, result: Result | None) -> str:
    """Return the verdict on a target: met, missed, not established, or not measured."""
    if finding is None or result is None:
        return NOT_MEASURED
    if reservations(result, finding.rounds):
        return NOT_ESTABLISHED
    return MET if finding.met else MISSED


def why_not(finding: Finding, result: Result) -> str:
    """Return the reasons why a target is not established."""
    return ", ".join(reservations(result, finding.rounds))


def reservations(result: Result, rounds: int | None = None) -> list[str]:
    """Return the reasons why a result cannot decide a target, or an empty list if it can. `rounds`: the number of
    rounds of the figure, if it differs from the result's."""
    rounds = result.rounds if rounds is None else rounds
    reasons = []
    if result.data["quick"]:
        reasons.append("a quick run")
    if rounds < MIN_ROUNDS:
        reasons.append(f"{rounds} round{'s' * (rounds != 1)}")
    if not result.quiet:
        reasons.append(f"the machine was busy (load {result.load_text})")
    return reasons


def staleness(result: Result) -> str:
    """Return whether the measured paths have changed since a result was made: yes, no, or not known."""
    if not result.commit:
        return "not known"
    changed = changed_since(result.data["commit"], measured_by(result.data["benchmark"]))
    return "not known" if changed is None else "yes" if changed else "no"


def age(result: Result) -> str:
    """Return the commit of a result, and whether the result is stale."""
    if not result.commit:
        return "not known"
    said = {"yes": ", **stale**", "no": "", "not known": ", age not known"}
    return f"`{result.commit}`{said[staleness(result)]}"


def claims_table(claims: Sequence[Claim], results: Results) -> str:
    """Return the table of all targets."""
    rows = []
    for claim in claims:
        found = claim.look(results)
        if found is None:
            cells = ("", NOT_MEASURED, "", "")
        else:
            result = results[claim.result]
            said = verdict(found, result)
            if said == NOT_ESTABLISHED:
                said = f"{said}: {why_not(found, result)}"
            cells = (found.reached, said, found.limit, age(result))
        # Figures of several cases get one row each, so that no cell is long.
        first, *others = cells[0].split("; ")
        rows.append((claim.target, first, *cells[1:], f"`{claim.command}`"))
        rows += [("", other, "", "", "", "") for other in others]
    return markdown(("target", "reached", "verdict", "limit, same run", "commit", "command"), rows, figures=False)


def rig_table(results: Results) -> str:
    """Return the table that shows where and when results were measured, at which commit, and how idle the machine was.
    Results of a GPU machine are left out, as they are in docs/gpu.md."""
    results = {name: result for name, result in results.items() if not name.startswith("gpu_")}
    if not results:
        return "Not measured yet."
    rows = []
    for name, result in results.items():
        data = result.data
        command, *others = data["command"].split("; ")
        rows.append((name, data["date"], age(result), str(result.rounds), result.load_text, f"`{command}`"))
        rows += [("", "", "", "", "", f"`{other}`") for other in others]
    any_data = next(iter(results.values())).data
    where, versions = any_data["rig"], any_data["versions"]
    quick = [name for name, result in results.items() if result.data["quick"]]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, {where['memory_bytes'] / 2**30:.0f} GiB, {where['kernel']}, "
        f"Python {where['python']}; {where['network']}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        *([f"**Quick runs, which cannot decide a target: {', '.join(quick)}.**"] if quick else []),
        "",
        markdown(("benchmark", "date", "commit", "rounds", "load before", "command"), rows, figures=False),
    ]
    return "\n".join(lines)
