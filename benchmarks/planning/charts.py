"""The charts of docs/planning.md: `benchmarks.draw` makes them from `PLANNING_CHARTS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib

from benchmarks.bars import COLOURS, INK, LIMIT, STYLE
from benchmarks.planning.tables import PIPELINE, PREDICTED, PREDICTED_APART
from benchmarks.planning.test_predicted import APART, COLOCATED
from benchmarks.planning.test_predicted_apart import AS_IT_RUNS
from benchmarks.results_reader import Results

Chart = Callable[[Results, Path], None]


def _panels(path: Path, count: int, draw: Callable[[list[Any]], None]) -> None:
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(8.0, 3.8 * count), 3.6), layout="constrained")
        draw(list(figure.subplots(1, count, squeeze=False).flat))
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def predicted(results: Results, path: Path) -> None:
    """SLO attainment against rate, predicted and measured."""
    apart = (PREDICTED_APART, AS_IT_RUNS) if PREDICTED_APART in results else (PREDICTED, APART)
    shown = ((PREDICTED, COLOCATED), apart)

    def draw(panels: list[Any]) -> None:
        for axes, (benchmark, way) in zip(panels, shown, strict=True):
            cases = [case.parameters for case in results[benchmark].group(way)]
            rates = [case["rate_rps"] for case in cases]
            measured = [case["measured"] * 100 for case in cases]
            ends = [case["measured_ci95"] or (case["measured"],) * 2 for case in cases]
            bars = [
                [value - low * 100 for value, (low, _) in zip(measured, ends, strict=True)],
                [high * 100 - value for value, (_, high) in zip(measured, ends, strict=True)],
            ]
            axes.plot(rates, [case["predicted"] * 100 for case in cases], color=COLOURS[0], label="predicted")
            axes.errorbar(rates, measured, yerr=bars, fmt="o", capsize=3, color=COLOURS[1], label="measured, 95 %")
            axes.axhline(90, color=INK, linewidth=1, linestyle=":")
            axes.set(xlabel="requests/s", ylabel="% of requests", ylim=(0, 105))
            axes.set_title(way, loc="left", fontsize=11)
            axes.legend(frameon=False, fontsize=8)

    _panels(path, 2, draw)


def knees(results: Results, path: Path) -> None:
    """The time of a step against the share of the KV that is lent, for each rate of the link; dotted: as computed."""
    cases = [case.parameters for case in results[PIPELINE].group("knee")]
    ratios = list(dict.fromkeys(case["ratio"] for case in cases))

    def draw(panels: list[Any]) -> None:
        for axes, ratio in zip(panels, ratios, strict=True):
            mine = [case for case in cases if case["ratio"] == ratio]
            for case, colour in zip(mine, COLOURS, strict=False):
                alphas = [float(alpha) for alpha in case["curve"]]
                label = f"{case['link_bytes_per_s'] / 1e9:.2f} GB/s"
                axes.plot(alphas, [each * 1e3 for each in case["curve"].values()], "o-", color=colour, label=label)
                copying = [alpha * case["kv_bytes"] / case["link_bytes_per_s"] for alpha in alphas]
                expected = [max(case["step_s"], each) * 1e3 for each in copying]
                axes.plot(alphas, expected, ":", color=colour, linewidth=1)
                axes.axvline(case["alpha"], color=LIMIT, linewidth=0.5)
            axes.set(xlabel="share of the KV that is lent", ylabel="ms a step", ylim=(0, None))
            axes.set_title(f"KV {ratio} x weights", loc="left", fontsize=11)
            axes.legend(frameon=False, fontsize=8)

    _panels(path, len(ratios), draw)


PLANNING_CHARTS: Final[dict[str, tuple[str, Chart]]] = {
    "planning-predicted": (PREDICTED, predicted),
    "planning-pipeline": (PIPELINE, knees),
}
