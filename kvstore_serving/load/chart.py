"""Charts of runs: the distributions of TTFT and TPOT with their SLOs, the distribution of latency, and a timeline.

For several rates, each chart has a line for each rate, and a further chart shows attainment against rate. The module
matplotlib is imported when a chart is drawn, and needs no screen.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore_serving.files import replace_file
from kvstore_serving.load.records import RequestOutcome
from kvstore_serving.load.report import LoadReport
from kvstore_serving.load.sweep import TARGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHART_FORMATS: Final = (".svg", ".png")


def draw(path: Path, runs: Sequence[tuple[LoadReport, Sequence[RequestOutcome]]]) -> None:
    """Draw the runs of one sweep, or a single run, into a file. Raises `OSError`, or `ValueError` if the file's format
    is not supported."""
    if path.suffix not in CHART_FORMATS:
        raise ValueError(f"{path}: expected a file name that ends with {' or '.join(CHART_FORMATS)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    axes_of: dict[str, Axes] = figure.subplot_mosaic("FPL;TTA")  # TTFT, TPOT, latency; timeline, attainment
    ttft, tpot, latency = (axes_of[name] for name in "FPL")
    slo = runs[0][0].slo
    for report, outcomes in runs:
        done = [outcome for outcome in outcomes if outcome.planned.counted and not outcome.error]
        label = f"{report.sent_rps:.3g} req/s"
        _distribution(ttft, [value for each in done if (value := each.ttft_s) is not None], label)
        _distribution(tpot, [value for each in done if (value := each.tpot_s) is not None], label)
        _distribution(latency, [each.latency_s for each in done], label)
    for axes, limit_s in ((ttft, slo.ttft_s), (tpot, slo.tpot_s)):
        axes.axvline(limit_s, color="black", linestyle="--", label=f"SLO {limit_s:g} s")
        axes.legend()
    for axes, name in ((ttft, "TTFT"), (tpot, "TPOT"), (latency, "overall latency")):
        axes.set(title=name, xlabel="seconds", ylabel="share of completed requests", ylim=(0, 1))
    report, outcomes = runs[-1]
    _timeline(axes_of["T"], report, [outcome for outcome in outcomes if outcome.planned.counted])
    _attainment(axes_of["A"], [report for report, _ in runs])
    figure.suptitle(f"{report.model}, {report.source}")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a chart into a file of one of the `CHART_FORMATS`. Raises `OSError`."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:])
    replace_file(path, content.getvalue())


def _distribution(axes: Axes, values: list[float], label: str) -> None:
    if values:
        axes.ecdf(np.asarray(values), label=label)


def _timeline(axes: Axes, report: LoadReport, counted: Sequence[RequestOutcome]) -> None:
    """Draw the TTFT of each request at the time when it was sent. Failed requests are drawn at the bottom."""
    answered = [(each.sent_s, ttft) for each in counted if not each.error and (ttft := each.ttft_s) is not None]
    axes.plot([sent for sent, _ in answered], [ttft for _, ttft in answered], ".", label="completed")
    failed = [each.sent_s for each in counted if each.error]
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", color="red", label="failed")
    axes.axhline(report.slo.ttft_s, color="black", linestyle="--", label="SLO")
    axes.set(title=f"TTFT over time, {report.sent_rps:.3g} req/s", xlabel="sent, seconds", ylabel="TTFT, seconds")
    axes.legend()


def _attainment(axes: Axes, reports: Sequence[LoadReport]) -> None:
    """Draw joint attainment and its interval against the rate."""
    shown = [report for report in reports if report.attainment.joint is not None and report.attainment.ci95]
    rates = [report.sent_rps for report in shown]
    joint = [report.attainment.joint or 0.0 for report in shown]
    bars = np.array([report.attainment.ci95 for report in shown]).reshape(-1, 2).T
    errors = np.abs(bars - np.asarray(joint)) if shown else None
    axes.errorbar(rates, joint, yerr=errors, marker="o", capsize=4, label="TTFT and TPOT")
    axes.axhline(TARGET, color="black", linestyle=":", label=f"{TARGET:.0%}")
    axes.set(title="SLO attainment, 95 % interval", xlabel="requests/s", ylabel="share of requests", ylim=(0, 1.05))
    axes.set_xlim(left=0)
    axes.legend()
