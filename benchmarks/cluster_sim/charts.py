"""The cluster simulator's charts: `benchmarks.draw` makes them from `CLUSTER_CHARTS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from benchmarks.bars import COLOURS, INK, LIMIT, STYLE
from benchmarks.cluster_sim.scenarios import CRASH, JOIN, JOIN_AT_ONCE, JOIN_FILLED, LEAVE, RESTART_FILLED, STEADY
from benchmarks.cluster_sim.tables import BENCHMARK, GRACE_GROUP, LATENCY, RUN_GROUP, SCENARIO_GROUP
from benchmarks.results_reader import CaseResult, Results

_SHOWN: Final = (JOIN_AT_ONCE, JOIN, JOIN_FILLED, LEAVE, CRASH, RESTART_FILLED)
_WINDOW_MINUTES: Final = 5
_POINTS_ALLOWED: Final = 2.0


def _panels(path: Path, count: int, draw: Callable[[Sequence[Any]], None], height: float = 3.6) -> None:
    """A figure of `count` panels side by side, with the legend of the first panel."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(8.0, 4.0 * count), height), layout="constrained")
        panels = list(figure.subplots(1, count, squeeze=False).flat)
        draw(panels)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def hit_rate(results: Results, path: Path) -> None:
    """Hit rate around a change, for the number of nodes nearest to ten; a panel for each number of replicas."""
    cases = [case for case in results[BENCHMARK].group(SCENARIO_GROUP) if case.parameters["by_minute"]]
    nodes = min({case.parameters["nodes"] for case in cases}, key=lambda count: abs(count - 10))
    mine = [case for case in cases if case.parameters["nodes"] == nodes]
    replicas = sorted({case.parameters["replicas"] for case in mine})
    changed = results[BENCHMARK].parameters["changed_at_s"] / 60

    def draw(panels: Sequence[Any]) -> None:
        for axes, count in zip(panels, replicas, strict=True):
            by_name = {case.parameters["scenario"]: case for case in mine if case.parameters["replicas"] == count}
            steady = by_name[STEADY]
            for number, name in enumerate(name for name in _SHOWN if name in by_name):
                minutes, points = _lost(by_name[name], steady)
                colour = COLOURS[number] if number < len(COLOURS) else INK
                axes.plot(minutes, points, label=name, color=colour, linewidth=1.5)
            axes.axvline(changed, color=INK, linewidth=1, linestyle=":", label="the change begins")
            axes.axhline(-_POINTS_ALLOWED, color=LIMIT, linewidth=1, label=f"{_POINTS_ALLOWED:g} points")
            axes.set_xlabel("minute of the trace")
            axes.set_ylabel(f"points of hit rate, {_WINDOW_MINUTES} minutes")
            axes.set_title(f"{nodes} nodes, {count} replica{'s' * (count > 1)}", loc="left", fontsize=11)

    _panels(path, len(replicas), draw)


def _lost(case: CaseResult, steady: CaseResult) -> tuple[list[int], list[float]]:
    """By minute, the points of hit rate lost against the unchanged cluster, over the minutes that end with this one."""
    mine, theirs = case.parameters["by_minute"], steady.parameters["by_minute"]
    minutes = list(range(_WINDOW_MINUTES - 1, len(mine["hits"])))
    points = []
    for minute in minutes:
        window = slice(minute - _WINDOW_MINUTES + 1, minute + 1)
        less = sum(mine["hits"][window]) - sum(theirs["hits"][window])
        points.append(100 * less / max(1, sum(mine["references"][window])))
    return minutes, points


def grace(results: Results, path: Path) -> None:
    """The cost of a join by grace period; a line for each number of nodes."""
    cases = results[BENCHMARK].group(GRACE_GROUP)

    def draw(panels: Sequence[Any]) -> None:
        for axes, what, title in zip(
            panels, ("drop_minute", "drop_five_minutes"), ("worst minute", "worst 5 minutes"), strict=True
        ):
            for number, nodes in enumerate(sorted({case.parameters["nodes"] for case in cases})):
                mine = [case.parameters for case in cases if case.parameters["nodes"] == nodes]
                axes.plot(
                    [about["grace_s"] for about in mine],
                    [about[what] * 100 for about in mine],
                    label=f"{nodes} nodes and one more",
                    color=COLOURS[number % len(COLOURS)],
                    marker="o",
                    markersize=3,
                )
            axes.axhline(_POINTS_ALLOWED, color=LIMIT, linewidth=1, label=f"{_POINTS_ALLOWED:g} points")
            axes.set_ylim(bottom=0)
            axes.set_xlabel("grace period, s")
            axes.set_ylabel("points of hit rate lost")
            axes.set_title(title, loc="left", fontsize=11)

    _panels(path, 2, draw)


def runs(results: Results, path: Path) -> None:
    """Balance of reads and shards asked, by run, for the smallest blocks that were measured."""
    cases = results[BENCHMARK].group(RUN_GROUP)
    tokens = min(case.parameters["block_tokens"] for case in cases)
    mine = [case.parameters for case in cases if case.parameters["block_tokens"] == tokens]
    columns = (("keys", "keys, max / mean"), ("reads", "reads, max / mean"), ("asked_mean", "shards asked by a prompt"))

    def draw(panels: Sequence[Any]) -> None:
        for axes, (what, label) in zip(panels, columns, strict=True):
            for number, count in enumerate(sorted({about["shards"] for about in mine})):
                some = [about for about in mine if about["shards"] == count]
                axes.plot(
                    [about["run"] for about in some],
                    [about[what] for about in some],
                    label=f"{count} shards",
                    color=COLOURS[number % len(COLOURS)],
                    marker="o",
                    markersize=3,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([about["run"] for about in some], [str(about["run"]) for about in some])
            axes.set_xlabel(f"keys in a run, each of {tokens} tokens")
            axes.set_title(label, loc="left", fontsize=11)

    _panels(path, len(columns), draw)


def latency(results: Results, path: Path) -> None:
    """Latency of calls on real servers by run; a panel for each call."""
    cases = results[LATENCY].cases
    calls = cases[0].parameters["calls"]

    def draw(panels: Sequence[Any]) -> None:
        for axes, call in zip(panels, calls, strict=True):
            for number, case in enumerate(cases):
                names = [name for name in case.operations if name.startswith(f"{call} R=")]
                axes.plot(
                    [int(name.rpartition("=")[2]) for name in names],
                    [case.seconds(name).median * 1e3 for name in names],
                    label=case.name,
                    color=COLOURS[number % len(COLOURS)],
                    marker="o",
                    markersize=3,
                )
            ticks = [int(name.rpartition("=")[2]) for name in names]
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("keys in a run")
            axes.set_title(f"{call}, ms", loc="left", fontsize=11)

    _panels(path, len(calls), draw)


# File: the benchmark it needs, and the chart.
CLUSTER_CHARTS: Final[dict[str, tuple[str, Callable[[Results, Path], None]]]] = {
    "cluster-hit_rate": (BENCHMARK, hit_rate),
    "cluster-grace": (BENCHMARK, grace),
    "cluster-runs": (BENCHMARK, runs),
    "cluster-batch_latency": (LATENCY, latency),
}
