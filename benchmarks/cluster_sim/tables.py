"""The tables of the cluster simulator for the terminal and the documents, each a function of its results.

`benchmarks.draw` fills its document from `CLUSTER_TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from benchmarks.cluster_sim.scenarios import (
    CRASH,
    JOIN,
    JOIN_AT_ONCE,
    JOIN_FILLED,
    LEAVE,
    RESTART,
    RESTART_FILLED,
    STEADY,
)
from benchmarks.markdown import markdown
from benchmarks.remote_kv_cache.report import Case
from benchmarks.results_reader import CaseResult, Results

BENCHMARK: Final = "cluster_sim"
LATENCY: Final = "batch_latency"
BALANCE_GROUP: Final = "balance"
RUN_GROUP: Final = "runs"
RUN_CRASH_GROUP: Final = "crash by run"
SCENARIO_GROUP: Final = "scenario"
GRACE_GROUP: Final = "grace"
MEMORY_GROUP: Final = "memory"
# The scenarios of which every minute is kept, for the chart.
LINES: Final = (STEADY, JOIN_AT_ONCE, JOIN, JOIN_FILLED, LEAVE, CRASH, RESTART, RESTART_FILLED)

Rows = tuple[str, list[str], list[list[str]]]


def _points(share: float) -> str:
    return f"{share * 100:.2f}"


def _balance(cases: Sequence[CaseResult]) -> Rows:
    headings = ["shards", "keys, max / mean", "moved by one more, %", "fair, %"]
    rows = []
    for case in cases:
        about = case.parameters
        rows.append(
            [
                str(about["shards"]),
                f"{about['max_to_mean']:.3f}",
                _points(about["moved_by_join"]),
                _points(about["fair"]),
            ]
        )
    return "Random keys over equal shards", headings, rows


def _runs(cases: Sequence[CaseResult]) -> Rows:
    headings = ["block", "shards", "R", "keys, max / mean", "reads, max / mean", "shards asked, mean", "p95"]
    rows = []
    for case in cases:
        about = case.parameters
        rows.append(
            [
                f"{about['block_tokens']} tokens",
                str(about["shards"]),
                str(about["run"]),
                f"{about['keys']:.2f}",
                f"{about['reads']:.2f}",
                f"{about['asked_mean']:.1f}",
                f"{about['asked_p95']:.0f}",
            ]
        )
    return "Keys of a chain in runs of R", headings, rows


def _run_crashes(cases: Sequence[CaseResult]) -> Rows:
    headings = ["R", "nodes", "worst minute, points", "worst 5 minutes, points"]
    rows = [
        [
            str(case.parameters["run"]),
            str(case.parameters["nodes"]),
            _points(case.parameters["drop_minute"]),
            _points(case.parameters["drop_five_minutes"]),
        ]
        for case in cases
    ]
    return "What the crash of a node costs, by run", headings, rows


def _scenarios(cases: Sequence[CaseResult]) -> Rows:
    headings = ["nodes", "replicas", "room", "scenario", "hit rate", "moved, %", "worst minute", "worst 5 minutes"]
    headings += ["repaired", "copied", "reads, max / mean"]
    rows = []
    for case in cases:
        about = case.parameters
        rows.append(
            [
                str(about["nodes"]),
                str(about["replicas"]),
                f"{about['capacity']:g} %",
                about["scenario"],
                f"{about['hit_rate']:.4f}",
                _points(about["moved"][0]) if about["moved"] else "",
                _points(about["drop_minute"]) if about["moved"] else "",
                _points(about["drop_five_minutes"]) if about["moved"] else "",
                str(about["repaired"]),
                str(about["copied"]),
                f"{about['reads_max_to_mean']:.2f}",
            ]
        )
    return "Changes, and the points of hit rate they cost", headings, rows


def _graces(cases: Sequence[CaseResult]) -> Rows:
    headings = ["nodes", "grace, s", "worst minute, points", "worst 5 minutes, points", "repaired"]
    rows = [
        [
            str(case.parameters["nodes"]),
            f"{case.parameters['grace_s']:g}",
            _points(case.parameters["drop_minute"]),
            _points(case.parameters["drop_five_minutes"]),
            str(case.parameters["repaired"]),
        ]
        for case in cases
    ]
    return "A node joins, 1 replica, nothing is copied: by grace period", headings, rows


_MAKE: Final[dict[str, Callable[[Sequence[CaseResult]], Rows]]] = {
    BALANCE_GROUP: _balance,
    RUN_GROUP: _runs,
    RUN_CRASH_GROUP: _run_crashes,
    SCENARIO_GROUP: _scenarios,
    GRACE_GROUP: _graces,
    MEMORY_GROUP: _scenarios,
}


def console_tables(cases: Sequence[Case]) -> list[Table]:
    """All findings, for the terminal."""
    tables = []
    results = [CaseResult(case.to_json()) for case in cases]
    for group, make in _MAKE.items():
        mine = [case for case in results if case.parameters["group"] == group]
        if mine:
            title, headings, rows = make(mine)
            table = Table(title=title, title_justify="left")
            for heading in headings:
                table.add_column(heading, justify="left" if heading == "scenario" else "right")
            for row in rows:
                table.add_row(*row)
            tables.append(table)
    return tables


def _table(group: str) -> Callable[[Results], str]:
    def make(results: Results) -> str:
        cases = results[BENCHMARK].group(group)
        return markdown(*_MAKE[group](cases)[1:]) if cases else "Not measured yet."

    return make


def changes(results: Results) -> str:
    """The cost of changes by size of the cluster: worst minute / worst five minutes, in points of hit rate."""
    cases = [case for case in results[BENCHMARK].group(SCENARIO_GROUP) if case.parameters["moved"]]
    sizes = sorted({case.parameters["nodes"] for case in cases})
    costs: dict[tuple[int, str], dict[int, str]] = {}
    for case in cases:
        about = case.parameters
        cost = f"{_points(about['drop_minute'])} / {_points(about['drop_five_minutes'])}"
        costs.setdefault((about["replicas"], about["scenario"]), {})[about["nodes"]] = cost
    rows = [
        (scenario, str(replicas), *(by_size.get(size, "") for size in sizes))
        for (replicas, scenario), by_size in costs.items()
    ]
    return markdown(("change", "copies", *(f"{size} nodes" for size in sizes)), sorted(rows, key=lambda row: row[1]))


def latency(results: Results) -> str:
    """The latency of calls on real servers by run, in ms."""
    rows = []
    for case in results[LATENCY].cases:
        for call in case.parameters["calls"]:
            names = [name for name in case.operations if name.startswith(f"{call} ")]
            rows.append((case.name, call, *(f"{case.seconds(name).median * 1e3:.2f}" for name in names)))
            headings = [name.removeprefix(f"{call} ") for name in names]
    return markdown(("ms, 512 keys", "call", *headings), rows)


# Marker in the document: the benchmark it needs, and the table.
CLUSTER_TABLES: Final[dict[str, tuple[str, Callable[[Results], str]]]] = {
    "cluster_balance": (BENCHMARK, _table(BALANCE_GROUP)),
    "cluster_runs": (BENCHMARK, _table(RUN_GROUP)),
    "cluster_run_crashes": (BENCHMARK, _table(RUN_CRASH_GROUP)),
    "cluster_changes": (BENCHMARK, changes),
    "cluster_grace": (BENCHMARK, _table(GRACE_GROUP)),
    "cluster_memory": (BENCHMARK, _table(MEMORY_GROUP)),
    "cluster_latency": (LATENCY, latency),
}
