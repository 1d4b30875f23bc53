"""The charts of the KV pipeline in docs/planning.md: `benchmarks.draw` makes them from `PIPELINE_CHARTS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.bars import COLOURS, LIMIT, draw_panels
from benchmarks.kv_pipeline.rig import ARMS, FETCHED
from benchmarks.kv_pipeline.tables import PIPELINE, PIPELINE_PUSHED, PIPELINE_TOKENS, rates_by_batch
from benchmarks.kv_pipeline.test_pipeline import KNEE
from benchmarks.kv_pipeline.test_pushed import BY_ARM
from benchmarks.kv_pipeline.test_tokens import BOUNDS, RESIDENT, TOKENS
from benchmarks.results_reader import Results

Chart = Callable[[Results, Path], None]


def knees(results: Results, path: Path) -> None:
    """The time of a step against the share of the KV that is lent, for each rate of the link; dotted: as computed."""
    cases = [case.parameters for case in results[PIPELINE].group(KNEE)]
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

    draw_panels(path, len(ratios), draw)


def pushed(results: Results, path: Path) -> None:
    """The time of a step against the rate of the link, with KV that comes and with attention that goes."""
    cases = [case.parameters for case in results[PIPELINE_PUSHED].group(BY_ARM)]
    ratios = list(dict.fromkeys(case["ratio"] for case in cases))
    shares = sorted({case["alpha"] for case in cases})

    def draw(panels: list[Any]) -> None:
        for axes, ratio in zip(panels, ratios, strict=True):
            for share, style in zip(shares, ("o--", "o-"), strict=False):
                of_share = [case for case in cases if (case["ratio"], case["alpha"]) == (ratio, share)]
                for (arm, way), colour in zip(ARMS.items(), COLOURS, strict=False):
                    mine = [case for case in of_share if arm in case["step_s"]]
                    rates = [case["link_bytes_per_s"] / 1e6 for case in mine]
                    steps = [case["step_s"][arm] / case["alone_s"] for case in mine]
                    axes.plot(rates, steps, style, color=colour, label=f"{way}, {share:.3g} lent")
            axes.axhline(1, color=LIMIT, linewidth=1)
            axes.set(xscale="log", yscale="log", xlabel="link, MB/s", ylabel="step, of that with nothing lent")
            axes.set_title(f"KV {ratio} x weights", loc="left", fontsize=11)
            axes.legend(frameon=False, fontsize=8)

    draw_panels(path, len(ratios), draw)


def tokens(results: Results, path: Path) -> None:
    """Tokens a second, and the time between them, against the batch, with the same resident bytes."""
    cases = [case.parameters for case in results[PIPELINE_TOKENS].group(TOKENS)]

    def draw(panels: list[Any]) -> None:
        for axes, number in zip(panels, (1, 0), strict=True):
            for case, colour in zip(cases, COLOURS, strict=False):
                for (arm, way), style in zip(ARMS.items(), ("o-", ":"), strict=True):
                    found = {batch: pair[number] for batch, pair in rates_by_batch(case, arm).items()}
                    label = f"{case['link_bytes_per_s'] / 1e9:.2f} GB/s, {way}"
                    scale = 1.0 if number else 1e3
                    axes.plot(list(found), [each * scale for each in found.values()], style, color=colour, label=label)
            axes.set(xlabel="batch", ylabel="tokens/s" if number else "TPOT, ms", ylim=(0, None))
        for case, colour in zip(cases, COLOURS, strict=False):
            for bound in BOUNDS:
                limit_ms = bound * rates_by_batch(case, FETCHED)[RESIDENT][0] * 1e3
                panels[1].axhline(limit_ms, color=colour, linewidth=0.5, linestyle="--")
        panels[0].legend(frameon=False, fontsize=7, ncols=2)

    draw_panels(path, 2, draw)


PIPELINE_CHARTS: Final[dict[str, tuple[str, Chart]]] = {
    "planning-pipeline": (PIPELINE, knees),
    "planning-pushed": (PIPELINE_PUSHED, pushed),
    "planning-tokens": (PIPELINE_TOKENS, tokens),
}
