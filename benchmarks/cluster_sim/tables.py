"""The tables of the cluster simulator for the terminal and the documents. Each is a function of the simulator's
results.

`benchmarks.draw` fills its document from `CLUSTER_TABLES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table as ConsoleTable

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
from benchmarks.remote_kv_cache.report import Case
from benchmarks.render.cells import Cell, cases, text
from benchmarks.render.tables import Table, console, markdown, section
from benchmarks.results_reader import Result

BENCHMARK: Final = "cluster_sim"
LATENCY: Final = "batch_latency"
BALANCE_GROUP: Final = "balance"
RUN_GROUP: Final = "runs"
RUN_CRASH_GROUP: Final = "crash by run"
SCENARIO_GROUP: Final = "scenario"
GRACE_GROUP: Final = "grace"
MEMORY_GROUP: Final = "memory"
# For these scenarios the result keeps every minute, because the chart needs it.
LINES: Final = (STEADY, JOIN_AT_ONCE, JOIN, JOIN_FILLED, LEAVE, CRASH, RESTART, RESTART_FILLED)

_BALANCE: Final = Table(
    cases(BALANCE_GROUP), ("shards", "{p[shards]}"), ("keys, max / mean", "{p[max_to_mean]:.3f}"),
    ("moved when a shard joins, %", "{p[moved_by_join]:pt.2f}"), ("fair share, %", "{p[fair]:pt.2f}"),
)  # fmt: skip
_RUNS: Final = Table(
    cases(RUN_GROUP), ("block", "{p[block_tokens]} tokens"), ("shards", "{p[shards]}"), ("R", "{p[run]}"),
    ("keys, max / mean", "{p[keys]:.2f}"), ("reads, max / mean", "{p[reads]:.2f}"),
    ("shards used, mean", "{p[asked_mean]:.1f}"), ("p95", "{p[asked_p95]:.0f}"),
)  # fmt: skip
_WORST: Final = (
    ("worst minute, points", "{p[drop_minute]:pt.2f}"),
    ("worst 5 minutes, points", "{p[drop_five_minutes]:pt.2f}"),
)
_NODES: Final = ("nodes", "{p[nodes]}")
_REPAIRED: Final = ("repaired", "{p[repaired]}")
_RUN_CRASHES: Final = Table(cases(RUN_CRASH_GROUP), ("R", "{p[run]}"), _NODES, *_WORST)
_GRACES: Final = Table(cases(GRACE_GROUP), _NODES, ("grace, s", "{p[grace_s]:g}"), *_WORST, _REPAIRED)


def _if_moved(template: str) -> Cell:
    """Return a cell with the cost of a change. It is empty if nothing changes."""
    return lambda row: text(template, row) if row.p["moved"] else ""


def _scenarios(group: str) -> Table:
    return Table(
        cases(group), _NODES, ("replicas", "{p[replicas]}"), ("memory", "{p[capacity]:g} %"),
        ("scenario", "{p[scenario]}"), ("hit rate", "{p[hit_rate]:.4f}"),
        ("moved, %", _if_moved("{p[moved][0]:pt.2f}")),
        ("worst minute", _if_moved("{p[drop_minute]:pt.2f}")),
        ("worst 5 minutes", _if_moved("{p[drop_five_minutes]:pt.2f}")),
        _REPAIRED, ("copied", "{p[copied]}"), ("reads, max / mean", "{p[reads_max_to_mean]:.2f}"),
    )  # fmt: skip


_CHANGES: Final = "Changes, and the points of hit rate that they cost"
_TITLED: Final = (
    ("Random keys over equal shards", _BALANCE),
    ("Keys of a chain in runs of R", _RUNS),
    ("The cost of the crash of a node, by length of runs", _RUN_CRASHES),
    (_CHANGES, _scenarios(SCENARIO_GROUP)),
    ("A node joins, 1 replica, nothing is copied: by grace period", _GRACES),
    (_CHANGES, _scenarios(MEMORY_GROUP)),
)


def console_tables(measured: Sequence[Case]) -> list[ConsoleTable]:
    """Return all findings for the terminal."""
    result = Result({"cases": [case.to_json() for case in measured]})
    found = [(title, *described.headings_and_rows(result)) for title, described in _TITLED]
    return [console(title, headings, rows, left=("scenario",)) for title, headings, rows in found if rows]


def _changes(result: Result) -> str:
    """Return the table of the cost of changes by size of the cluster. A cell has the worst minute and the worst five
    minutes, in points of hit rate."""
    changed = cases(SCENARIO_GROUP, where=lambda row: bool(row.p["moved"]))(result)
    if not changed:
        return ""
    sizes = sorted({row.p["nodes"] for row in changed})
    costs: dict[tuple[int, str], dict[int, str]] = {}
    for row in changed:
        cost = text("{p[drop_minute]:pt.2f} / {p[drop_five_minutes]:pt.2f}", row)
        costs.setdefault((row.p["replicas"], row.p["scenario"]), {})[row.p["nodes"]] = cost
    rows = [
        (scenario, str(replicas), *(by_size.get(size, "") for size in sizes))
        for (replicas, scenario), by_size in costs.items()
    ]
    return markdown(("change", "copies", *(f"{size} nodes" for size in sizes)), sorted(rows, key=lambda row: row[1]))


def _latency(result: Result) -> str:
    """Return the table of the latency of calls on real servers, by length of runs, in ms."""
    rows = []
    for row in cases()(result):
        for call in row.p["calls"]:
            names = [name for name in row.data.operations if name.startswith(f"{call} ")]
            rows.append((row.case, call, *(text("{s:ms.2f}", row.at(name)) for name in names)))
            headings = [name.removeprefix(f"{call} ") for name in names]
    return markdown(("ms, 512 keys", "call", *headings), rows)


CLUSTER_TABLES: Final = {
    "cluster_balance": section(BENCHMARK, _BALANCE),
    "cluster_runs": section(BENCHMARK, _RUNS),
    "cluster_run_crashes": section(BENCHMARK, _RUN_CRASHES),
    "cluster_changes": section(BENCHMARK, _changes),
    "cluster_grace": section(BENCHMARK, _GRACES),
    "cluster_memory": section(BENCHMARK, _scenarios(MEMORY_GROUP)),
    "cluster_latency": section(LATENCY, _latency),
}
