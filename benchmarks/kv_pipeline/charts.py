"""The charts of the KV pipeline in docs/planning-validation.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.kv_pipeline.bench_pipeline import KNEE
from benchmarks.kv_pipeline.bench_pushed import BY_ARM
from benchmarks.kv_pipeline.bench_tokens import BOUNDS, RESIDENT, TOKENS
from benchmarks.kv_pipeline.rig import ARMS, FETCHED
from benchmarks.kv_pipeline.tables import PIPELINE, PIPELINE_PUSHED, PIPELINE_TOKENS, rates_by_batch
from benchmarks.render.charts import COLOURS, LIMIT, Panels
from benchmarks.results_reader import Result

Cases = Sequence[dict[str, Any]]


def _by_ratio(group: str) -> Callable[[Result], list[Cases]]:
    """The cases of each ratio of KV to weights."""

    def panels(result: Result) -> list[Cases]:
        cases = [case.parameters for case in result.group(group)]
        ratios = dict.fromkeys(case["ratio"] for case in cases)
        return [[case for case in cases if case["ratio"] == ratio] for ratio in ratios]

    return panels


def _finish(axes: Any, cases: Cases) -> None:
    axes.set_title(f"KV {cases[0]['ratio']} x weights", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)


def _draw_knees(axes: Any, cases: Cases) -> None:
    """The time of a step against the share of the KV that is lent, for each rate of the link; dotted: the computed
    time."""
    for case, colour in zip(cases, COLOURS, strict=False):
        alphas = [float(alpha) for alpha in case["curve"]]
        label = f"{case['link_bytes_per_s'] / 1e9:.2f} GB/s"
        axes.plot(alphas, [each * 1e3 for each in case["curve"].values()], "o-", color=colour, label=label)
        copying = [alpha * case["kv_bytes"] / case["link_bytes_per_s"] for alpha in alphas]
        axes.plot(alphas, [max(case["step_s"], each) * 1e3 for each in copying], ":", color=colour, linewidth=1)
        axes.axvline(case["alpha"], color=LIMIT, linewidth=0.5)
    axes.set(xlabel="share of the KV that is lent", ylabel="time of a step, ms", ylim=(0, None))
    _finish(axes, cases)


def _draw_pushed(axes: Any, cases: Cases) -> None:
    """The time of a step against the rate of the link, with KV fetched and with the query sent to it."""
    for share, style in zip(sorted({case["alpha"] for case in cases}), ("o--", "o-"), strict=False):
        for (arm, way), colour in zip(ARMS.items(), COLOURS, strict=False):
            mine = [case for case in cases if case["alpha"] == share and arm in case["step_s"]]
            rates = [case["link_bytes_per_s"] / 1e6 for case in mine]
            steps = [case["step_s"][arm] / case["alone_s"] for case in mine]
            axes.plot(rates, steps, style, color=colour, label=f"{way}, {share:.3g} lent")
    axes.axhline(1, color=LIMIT, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="link, MB/s", ylabel="time of a step, x that without lending")
    _finish(axes, cases)


def _draw_tokens(axes: Any, panel: tuple[bool, Cases]) -> None:
    """Tokens a second, or the time between tokens, against the batch, with the same resident bytes."""
    rates, cases = panel
    for case, colour in zip(cases, COLOURS, strict=False):
        for (arm, way), style in zip(ARMS.items(), ("o-", ":"), strict=True):
            found = rates_by_batch(case, arm)
            values = [rate if rates else seconds * 1e3 for seconds, rate in found.values()]
            label = f"{case['link_bytes_per_s'] / 1e9:.2f} GB/s, {way}"
            axes.plot(list(found), values, style, color=colour, label=label)
    axes.set(xlabel="batch", ylabel="tokens/s" if rates else "TPOT, ms", ylim=(0, None))
    if rates:
        axes.legend(frameon=False, fontsize=7, ncols=2)
        return
    for case, colour in zip(cases, COLOURS, strict=False):
        for bound in BOUNDS:
            limit_ms = bound * rates_by_batch(case, FETCHED)[RESIDENT][0] * 1e3
            axes.axhline(limit_ms, color=colour, linewidth=0.5, linestyle="--")


def _tokens(result: Result) -> list[tuple[bool, Cases]]:
    cases = [case.parameters for case in result.group(TOKENS)]
    return [(rates, cases) for rates in (True, False)]


PIPELINE_CHARTS: Final = {
    "planning-pipeline": Panels(PIPELINE, _by_ratio(KNEE), _draw_knees),
    "planning-pushed": Panels(PIPELINE_PUSHED, _by_ratio(BY_ARM), _draw_pushed),
    "planning-tokens": Panels(PIPELINE_TOKENS, _tokens, _draw_tokens),
}
