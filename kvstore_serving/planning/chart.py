"""The chart of a plan: attainment against rate, the parts of a request's time, and what changes the goodput.

matplotlib is imported when a chart is drawn, and needs no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_serving.load.chart import save
from kvstore_serving.planning.document import Placed, PlanDocument, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, plan: PlanDocument) -> None:
    """Draw a plan into a file. Raises `OSError`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    attained, parts, changes = figure.subplots(1, 3)
    placed = plan.placement
    name = f"P/D: {_spell(placed.prefill)} prefill, {_spell(placed.decode)} decode"
    _line(attained, plan.curve, plan.gpus, name)
    other = plan.colocated
    if other.placement is not None:
        _line(attained, other.curve, other.gpus, f"colocated: {_spell(other.placement)}")
    attained.axhline(plan.percentile, color="black", linestyle=":", label=f"{plan.percentile:g} %")
    attained.set(title="SLO attainment", xlabel="requests/s a GPU", ylabel="% of requests", ylim=(0, 105))
    attained.legend(fontsize=8)
    names = list(plan.time_s)
    parts.barh(names, [plan.time_s[name] * 1000 for name in names])
    parts.set(title="A request's mean time at the goodput", xlabel="ms")
    parts.invert_yaxis()
    changes.barh([each.change for each in plan.sensitivity], [each.ratio for each in plan.sensitivity])
    changes.axvline(1, color="black", linestyle=":")
    changes.set(title="Goodput if one thing changes", xlabel="relative to the plan's")
    changes.invert_yaxis()
    figure.suptitle(
        f"{', '.join(plan.profiles)}; {plan.workload}; TTFT {plan.slo.ttft_s:g} s, TPOT {plan.slo.tpot_s:g} s"
    )
    save(figure, path)


def _spell(placed: Placed) -> str:
    return f"{placed.instances} x (tp {placed.tp}, pp {placed.pp})"


def _line(axes: Axes, curve: Sequence[Point], gpus: int, label: str) -> None:
    axes.plot([each.rate_rps / gpus for each in curve], [each.attainment * 100 for each in curve], "o-", label=label)
