"""The ledger of targets: each target, the command that measures it, the figure reached, and the verdict.

A target is *met* or *missed* only by a result of at least `MIN_ROUNDS` rounds on a machine that did nothing else when
the benchmark began. With any other result it is *not established*, whatever the figure. A result is *stale* if what
its benchmark measures (`measures.py`) has changed since the commit that it carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache.rig import changed_since
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
    """The figure that was reached, the limit of the same run, and whether the target is met. `rounds`: the number of
    rounds of this figure, if it is not that of its benchmark."""

    reached: str
    limit: str
    met: bool
    rounds: int | None = None


@dataclass(frozen=True)
class Claim:
    """A target. `find` raises `KeyError` if its case was not measured. `variant`: which of the benchmark's results."""

    target: str
    benchmark: str
    find: Callable[[Result], Finding]
    arguments: str = ""
    variant: str = ""

    @property
    def result(self) -> str:
        """The name of the result that it is found in."""
        return f"{self.benchmark}_{self.variant}" if self.variant else self.benchmark

    @property
    def command(self) -> str:
        """The command that measures it."""
        module = next(entry.module for entry in BENCHMARKS if entry.module.endswith(f".{self.benchmark}"))
        return f"python -m {module}{self.arguments and ' ' + self.arguments}"

    def look(self, results: Results) -> Finding | None:
        """The finding; None if it was not measured. Whoever gives a wrong answer misses every target."""
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
    """What a target is found by: what each row says of it, the limit that the first one names, and whether all of them
    meet it. own_rounds: the first row's operation has rounds of its own."""

    def find(result: Result) -> Finding:
        if not (mine := rows(result)):
            raise KeyError("no such case")
        said, rounds = between.join(text(reached, row) for row in mine), mine[0].rounds if own_rounds else None
        return Finding(said, text(limit, mine[0]), all(map(met, mine)), rounds)

    return find


def at_most(limit: float, figure: Callable[[Row], float] = lambda row: row.x.median) -> Callable[[Row], bool]:
    """Whether a figure is no larger; without one, the multiple of the limit's time."""
    return lambda row: figure(row) <= limit


def at_least(limit: float, figure: Callable[[Row], float] = lambda row: row.share.median) -> Callable[[Row], bool]:
    """Whether a figure is no smaller; without one, the share of the limit's throughput."""
    return lambda row: figure(row) >= limit


def verdict(finding: Finding | None, result: Result | None) -> str:
    """The verdict on a target: met, missed, not established, or not measured."""
    if finding is None or result is None:
        return NOT_MEASURED
    rounds = result.rounds if finding.rounds is None else finding.rounds
    if result.data["quick"] or rounds < MIN_ROUNDS or not result.quiet:
        return NOT_ESTABLISHED
    return MET if finding.met else MISSED


def why_not(finding: Finding, result: Result) -> str:
    """Why a target is not established."""
    rounds = result.rounds if finding.rounds is None else finding.rounds
    reasons = []
    if result.data["quick"]:
        reasons.append("a quick run")
    if rounds < MIN_ROUNDS:
        reasons.append(f"{rounds} round{'s' * (rounds != 1)}")
    if not result.quiet:
        reasons.append(f"the machine was busy (load {result.load_text})")
    return ", ".join(reasons)


def age(result: Result) -> str:
    """The commit of a result, and whether it is stale."""
    if not result.commit:
        return "not known"
    changed = changed_since(result.data["commit"], measured_by(result.data["benchmark"]))
    return f"`{result.commit}`" + (", **stale**" if changed else "" if changed is False else ", age not known")


def claims_table(claims: Sequence[Claim], results: Results) -> str:
    """The table of all targets."""
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
        rows.append((claim.target, *cells, f"`{claim.command}`"))
    return markdown(("target", "reached", "verdict", "limit, same run", "commit", "command"), rows, figures=False)


def missed_table(claims: Sequence[Claim], results: Results) -> str:
    """The table of all targets whose figures miss them, established or not."""
    rows = []
    for claim in claims:
        found = claim.look(results)
        if found is not None and not found.met:
            result = results[claim.result]
            rows.append((claim.target, found.reached, verdict(found, result), age(result), f"`{claim.command}`"))
    if not rows:
        return "None."
    return markdown(("target", "reached", "verdict", "commit", "command"), rows, figures=False)


def rig_table(results: Results) -> str:
    """The table of where and when results were measured, at which commit, and how quiet the machine was. Those of a GPU
    machine stand in docs/gpu.md."""
    results = {name: result for name, result in results.items() if not name.startswith("gpu_")}
    if not results:
        return "Not measured yet."
    rows = []
    for name, result in results.items():
        data = result.data
        rows.append((name, data["date"], age(result), str(result.rounds), result.load_text, f"`{data['command']}`"))
    any_data = next(iter(results.values())).data
    where, versions = any_data["rig"], any_data["versions"]
    quick = [name for name, result in results.items() if result.data["quick"]]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, {where['memory_bytes'] / 2**30:.0f} GiB, {where['kernel']}, "
        f"Python {where['python']}; {where['network']}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        *([f"**Quick runs, not fit for any claim: {', '.join(quick)}.**"] if quick else []),
        "",
        markdown(("benchmark", "date", "commit", "rounds", "load before", "command"), rows, figures=False),
    ]
    return "\n".join(lines)
