"""Charts of hit rate against capacity, with a panel for each trace. `benchmarks.draw` makes them from
`EVICTION_CHARTS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.eviction.tables import BENCHMARK, DEFAULT, OPTIMUM, TEXTBOOK, TRACE_GROUP
from benchmarks.render.charts import COLOURS, LIMIT, Chart, figure, of
from benchmarks.results_reader import CaseResult, Result

_COLUMNS: Final = 3
_OTHERS: Final = 12  # panels


def draw(path: Path, cases: Sequence[CaseResult]) -> None:
    """Draw a panel for each case. The optimum is drawn as the limit, and textbook policies are dashed."""
    columns = min(_COLUMNS, len(cases))
    rows = -(-len(cases) // columns)
    with figure(path, *((8, 4.5) if columns == 1 else (4 * columns, 3 * rows + 0.6))) as drawn:
        panels = list(drawn.subplots(rows, columns, squeeze=False).flat)
        for axes, case in zip(panels, cases, strict=False):
            _panel(axes, case)
        for axes in panels[len(cases) :]:
            axes.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)


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
    axes.set_xlabel("capacity, share of the trace's distinct blocks")
    axes.set_ylabel("hit rate")
    axes.set_title(case.name, loc="left", fontsize=11)


def _some(first: int, last: int) -> Chart:
    """Return the chart of the traces from `first` to `last`, or of all traces if there are none in this range."""

    def chart(result: Result, path: Path) -> None:
        cases = result.group(TRACE_GROUP)
        draw(path, cases[first:last] or cases)

    return of(BENCHMARK, chart)


EVICTION_CHARTS: Final = {"eviction": _some(0, 1), "eviction_others": _some(1, 1 + _OTHERS)}
