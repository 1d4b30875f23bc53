"""The cluster simulator's charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.cluster_sim.scenarios import CRASH, JOIN, JOIN_AT_ONCE, JOIN_FILLED, LEAVE, RESTART_FILLED, STEADY
from benchmarks.cluster_sim.tables import BENCHMARK, GRACE_GROUP, LATENCY, RUN_GROUP, SCENARIO_GROUP
from benchmarks.render.charts import COLOURS, INK, LIMIT, Panels
from benchmarks.results_reader import CaseResult, Result

_SHOWN: Final = (JOIN_AT_ONCE, JOIN, JOIN_FILLED, LEAVE, CRASH, RESTART_FILLED)
_WINDOW_MINUTES: Final = 5
_POINTS_ALLOWED: Final = 2.0

Line = tuple[str, Sequence[float], Sequence[float]]
Panel = tuple[str, Sequence[Line]]


def _around_a_change(result: Result) -> Iterator[tuple[str, float, list[Line]]]:
    """Draw the hit rate around a change, for the number of nodes nearest to ten, with a panel for each number of
    replicas."""
    cases = [case for case in result.group(SCENARIO_GROUP) if case.parameters["by_minute"]]
    nodes = min({case.parameters["nodes"] for case in cases}, key=lambda count: abs(count - 10))
    for count in sorted({case.parameters["replicas"] for case in cases if case.parameters["nodes"] == nodes}):
        mine = [case for case in cases if (case.parameters["nodes"], case.parameters["replicas"]) == (nodes, count)]
        by_name = {case.parameters["scenario"]: case for case in mine}
        lines = [(name, *_lost(by_name[name], by_name[STEADY])) for name in _SHOWN if name in by_name]
        yield f"{nodes} nodes, {count} replica{'s' * (count > 1)}", result.parameters["changed_at_s"] / 60, lines


def _lost(case: CaseResult, steady: CaseResult) -> tuple[list[int], list[float]]:
    """Return, for each minute, the hit rate minus that of the unchanged cluster, in percentage points, over the
    `_WINDOW_MINUTES` minutes that end with this one."""
    mine, theirs = case.parameters["by_minute"], steady.parameters["by_minute"]
    minutes = list(range(_WINDOW_MINUTES - 1, len(mine["hits"])))
    points = []
    for minute in minutes:
        window = slice(minute - _WINDOW_MINUTES + 1, minute + 1)
        less = sum(mine["hits"][window]) - sum(theirs["hits"][window])
        points.append(100 * less / max(1, sum(mine["references"][window])))
    return minutes, points


def _draw_change(axes: Any, panel: tuple[str, float, list[Line]]) -> None:
    title, changed, lines = panel
    for number, (name, minutes, points) in enumerate(lines):
        colour = COLOURS[number] if number < len(COLOURS) else INK
        axes.plot(minutes, points, label=name, color=colour, linewidth=1.5)
    axes.axvline(changed, color=INK, linewidth=1, linestyle=":", label="the change begins")
    axes.axhline(-_POINTS_ALLOWED, color=LIMIT, linewidth=1, label=f"{_POINTS_ALLOWED:g} points")
    axes.set_xlabel("minute of the trace")
    axes.set_ylabel(f"points of hit rate, {_WINDOW_MINUTES} minutes")
    axes.set_title(title, loc="left", fontsize=11)


def _lines_by(
    cases: Sequence[Mapping[str, Any]], by: str, label: str, x: str, y: str, scale: float = 1.0
) -> list[Line]:
    """Draw the parameter `y` against the parameter `x`, with a line for each value of the parameter `by`."""
    lines = []
    for value in sorted({about[by] for about in cases}):
        mine = [about for about in cases if about[by] == value]
        lines.append((label.format(value), [about[x] for about in mine], [about[y] * scale for about in mine]))
    return lines


def _plot(axes: Any, panel: Panel) -> None:
    title, lines = panel
    for number, (name, places, values) in enumerate(lines):
        axes.plot(places, values, label=name, color=COLOURS[number % len(COLOURS)], marker="o", markersize=3)
    axes.set_title(title, loc="left", fontsize=11)


def _graces(result: Result) -> list[Panel]:
    """Draw the cost of a join against the grace period, with a line for each number of nodes."""
    cases = [case.parameters for case in result.group(GRACE_GROUP)]
    worst = (("worst minute", "drop_minute"), ("worst 5 minutes", "drop_five_minutes"))
    return [(title, _lines_by(cases, "nodes", "{} nodes and one more", "grace_s", what, 100)) for title, what in worst]


def _draw_grace(axes: Any, panel: Panel) -> None:
    _plot(axes, panel)
    axes.axhline(_POINTS_ALLOWED, color=LIMIT, linewidth=1, label=f"{_POINTS_ALLOWED:g} points")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("grace period, s")
    axes.set_ylabel("points of hit rate lost")


def _powers_of_two(axes: Any, panel: Panel, label: str) -> None:
    _plot(axes, panel)
    ticks = panel[1][-1][1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(label)


def _runs(result: Result) -> list[tuple[int, Panel]]:
    """Draw the balance of reads, and the number of shards that are asked, against the length of runs. Only the smallest
    measured blocks are shown."""
    cases = [case.parameters for case in result.group(RUN_GROUP)]
    tokens = min((about["block_tokens"] for about in cases), default=0)
    mine = [about for about in cases if about["block_tokens"] == tokens]
    columns = (("keys", "keys, max / mean"), ("reads", "reads, max / mean"), ("asked_mean", "shards used by a prompt"))
    lines = [(title, _lines_by(mine, "shards", "{} shards", "run", what)) for what, title in columns]
    return [(tokens, panel) for panel in lines if panel[1]]


def _draw_runs(axes: Any, panel: tuple[int, Panel]) -> None:
    axes.set_yscale("log")
    _powers_of_two(axes, panel[1], f"keys in a run, {panel[0]} tokens each")


def _latencies(result: Result) -> Iterator[Panel]:
    """Draw the latency of calls on real servers against the length of runs, with a panel for each kind of call."""
    for call in result.cases[0].parameters["calls"]:
        lines = []
        for case in result.cases:
            names = [name for name in case.operations if name.startswith(f"{call} R=")]
            runs = [int(name.rpartition("=")[2]) for name in names]
            lines.append((case.name, runs, [case.seconds(name).median * 1e3 for name in names]))
        yield f"{call}, ms", lines


def _draw_latency(axes: Any, panel: Panel) -> None:
    _powers_of_two(axes, panel, "keys in a run")
    axes.set_ylim(bottom=0)


CLUSTER_CHARTS: Final = {
    "cluster-hit_rate": Panels(BENCHMARK, _around_a_change, _draw_change, legend=4, width=4.0),
    "cluster-grace": Panels(BENCHMARK, _graces, _draw_grace, legend=4, width=4.0),
    "cluster-runs": Panels(BENCHMARK, _runs, _draw_runs, legend=4, width=4.0),
    "cluster-batch_latency": Panels(LATENCY, _latencies, _draw_latency, legend=4, width=4.0),
}
