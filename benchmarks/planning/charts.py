"""The charts of docs/planning-validation.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.planning.bench_interference import APART as SEPARATED
from benchmarks.planning.bench_interference import LENGTHS, NO_PROMPT, WAYS
from benchmarks.planning.bench_predicted import APART, COLOCATED
from benchmarks.planning.bench_predicted_apart import AS_IT_RUNS
from benchmarks.planning.tables import INTERFERENCE, PREDICTED, PREDICTED_APART
from benchmarks.render.charts import COLOURS, INK, LIMIT, Chart, Drawn, Panels
from benchmarks.results_reader import Result, Results

_GAP: Final = "longest_gap_s"
_WHAT: Final = {_GAP: "longest gap of the batch, ms", "ttft_s": "the prompt's TTFT, ms"}


def _predicted(results: Results, path: Path) -> None:
    """SLO attainment against rate, predicted and measured."""
    apart = (PREDICTED_APART, AS_IT_RUNS) if PREDICTED_APART in results else (PREDICTED, APART)
    shown = [(way, results[benchmark]) for benchmark, way in ((PREDICTED, COLOCATED), apart)]
    Panels(PREDICTED, lambda result: shown, _draw_predicted)(results, path)


def _draw_predicted(axes: Any, panel: tuple[str, Result]) -> None:
    way, result = panel
    cases = [case.parameters for case in result.group(way)]
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


def _draw_interference(axes: Any, panel: tuple[str, Result]) -> None:
    """The longest gap of a batch that decodes, or the prompt's own TTFT, by prompt length."""
    from matplotlib.ticker import FixedLocator, NullLocator

    what, result = panel
    for way, colour in zip((*WAYS, SEPARATED), COLOURS, strict=False):
        cases = [case.parameters for case in result.group(way)]
        ends = [[each[0 if what == _GAP else 2] * 1e3 for each in case["rounds"]] for case in cases]
        lengths, found = [case["tokens"] for case in cases], [case[what] * 1e3 for case in cases]
        axes.plot(lengths, found, "o-", color=colour, label=way)
        axes.fill_between(lengths, list(map(min, ends)), list(map(max, ends)), color=colour, alpha=0.2)
    if what == _GAP:
        without = [case.parameters for case in result.group(NO_PROMPT)]
        gaps = [case[what] * 1e3 for case in without]
        axes.plot([case["tokens"] for case in without], gaps, "--", color=LIMIT, label=NO_PROMPT)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel=_WHAT[what])
    axes.xaxis.set_major_locator(FixedLocator(LENGTHS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(length) for length in LENGTHS])
    axes.legend(frameon=False, fontsize=8)


PLANNING_CHARTS: Final[dict[str, Chart]] = {
    "planning-predicted": Drawn(PREDICTED, _predicted),
    "planning-interference": Panels(
        INTERFERENCE, lambda result: [(what, result) for what in _WHAT], _draw_interference
    ),
}
