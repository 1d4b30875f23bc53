"""Hit rate against capacity, a panel for each trace: `benchmarks.draw` makes the charts from `EVICTION_CHARTS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from benchmarks.bars import COLOURS, LIMIT, STYLE
from benchmarks.eviction.tables import BENCHMARK, DEFAULT, OPTIMUM, TEXTBOOK, TRACE_GROUP
from benchmarks.results_reader import CaseResult, Results

_COLUMNS: Final = 3
_OTHERS: Final = 12  # panels


def draw(path: Path, cases: Sequence[CaseResult]) -> None:
    """Draw a panel for each case. The optimum is the limit; textbook policies are dashed."""
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(cases))
    rows = -(-len(cases) // columns)
    with matplotlib.rc_context(STYLE):
        size = (8, 4.5) if columns == 1 else (4 * columns, 3 * rows + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, case in zip(panels, cases, strict=False):
            _panel(axes, case)
        for axes in panels[len(cases) :]:
            axes.set_axis_off()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _panel(axes: Any, case: CaseResult) -> None:
    capacities, rates = case.parameters["capacities"], case.parameters["hit_rate"]
    others = [name for name in rates if name != OPTIMUM]
    for name, rate in rates.items():
        colour = LIMIT if name == OPTIMUM else COLOURS[others.index(name) % len(COLOURS)]
        width = 2.0 if name in (DEFAULT, OPTIMUM) else 1.2
        style = "--" if name in TEXTBOOK else "-"
        axes.plot(capacities, rate, style, label=name, color=colour, marker="o", markersize=3, linewidth=width)
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{share:g} %" for share in capacities])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, of the trace's different blocks")
    axes.set_ylabel("hit rate")
    axes.set_title(case.name, loc="left", fontsize=11)


def eviction(results: Results, path: Path) -> None:
    """The chart of the first trace."""
    draw(path, results[BENCHMARK].group(TRACE_GROUP)[:1])


def eviction_others(results: Results, path: Path) -> None:
    """The chart of the next traces, or of the first if it is the only one."""
    cases = results[BENCHMARK].group(TRACE_GROUP)
    draw(path, cases[1 : 1 + _OTHERS] or cases)


# File: the benchmark it needs, and the chart.
EVICTION_CHARTS: Final[dict[str, tuple[str, Callable[[Results, Path], None]]]] = {
    "eviction": (BENCHMARK, eviction),
    "eviction_others": (BENCHMARK, eviction_others),
}
