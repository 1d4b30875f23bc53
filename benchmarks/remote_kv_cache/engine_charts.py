"""The charts of the benchmarks with real engines, in the style of charts.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from benchmarks.bars import COLOURS, INK, LIMIT, STYLE, draw
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.first_token import FIRST_TOKEN, OWN
from benchmarks.remote_kv_cache.test_apart import FIRST
from benchmarks.remote_kv_cache.test_faults import MOST_WAITED_S
from benchmarks.remote_kv_cache.test_hand_over import ALONE, BETWEEN_TOKENS
from benchmarks.remote_kv_cache.test_layer_parts import COMPUTE as COMPUTE_IT
from benchmarks.remote_kv_cache.test_long_prefill import COMPUTE, MODES, REMOTE, ROWS
from benchmarks.remote_kv_cache.test_proxy_links import APART as BY_PROXY
from benchmarks.remote_kv_cache.test_proxy_links import FIRST as FIRST_OF_STREAM
from benchmarks.remote_kv_cache.test_proxy_links import ITSELF, SECOND
from benchmarks.remote_kv_cache.test_request_time import D_QUEUE, PARTS, PERCENTILES
from benchmarks.remote_kv_cache.test_request_time import FIRST as FIRST_OF_D
from benchmarks.remote_kv_cache.test_transfer_in import FILL, READ
from benchmarks.remote_kv_cache.test_transfer_out import BATCH_SIZES, STORED
from benchmarks.results_reader import Results, Spread
from kvstore_serving.load.report import wilson


def draw_lines(
    path: Path,
    title: str,
    x_axis: str,
    y_axis: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[Spread]]],
    band: tuple[str, float, float] | None = None,
    log: bool = False,
) -> None:
    """Draw a line for each series, with the spread of its rounds. band: the label and the two limits of a band. log:
    both axes are logarithmic, the horizontal one in powers of two."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if band is not None:
            axes.axhspan(band[1], band[2], color=LIMIT, alpha=0.15, linewidth=0, label=band[0])
        for (name, (places, spreads)), colour in zip(lines.items(), COLOURS, strict=False):
            middles = [spread.median for spread in spreads]
            below = [spread.median - spread.low for spread in spreads]
            above = [spread.high - spread.median for spread in spreads]
            axes.errorbar(places, middles, [below, above], color=colour, marker="o", markersize=4, label=name)
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_axis)
        axes.set_ylabel(y_axis)
        axes.set_title(title, loc="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def transfer_out(results: Results, path: Path) -> None:
    """The cost of sending, by tokens per step."""
    cases = results["test_transfer_out"].group(BATCH_SIZES)
    if not cases:
        return
    series = {
        f"engine's cache {'on' if on else 'off'}": [c for c in cases if c.parameters["prefix_cache"] is on]
        for on in (True, False)
    }
    draw(
        path,
        "Prefill with nothing cached, every block sent to the store",
        "prompts a second until all blocks are stored, as a share of those without",
        [f"{case.parameters['max_num_batched_tokens']} tokens a step" for case in series["engine's cache on"]],
        {name: [case.to_limit(STORED).inverse for case in chosen] for name, chosen in series.items()},
        WITHOUT,
        1.0,
    )


def transfer_in(results: Results, path: Path) -> None:
    """Prompts a second by hit rate, beside the reference's, both as multiples of the fill run at 0 %."""
    cases = results["test_transfer_in"].cases
    unit = min(cases, key=lambda case: case.parameters["hit_rate_percent"]).seconds(FILL).median
    rates = [case.parameters["hit_rate_percent"] for case in cases]
    draw_lines(
        path,
        f"{cases[0].parameters['prompts']} prompts of {cases[0].parameters['prompt_tokens']} tokens, given twice",
        "prefix hit rate, %",
        "prompts a second, fill run at 0 % = 1",
        {name: (rates, [case.seconds(name).inverse.scaled(unit) for case in cases]) for name in (READ, FILL, WITHOUT)},
    )


def long_prefill(results: Results, path: Path) -> None:
    """Prompts a second by number of output tokens, a line for each tier."""
    cases = results["test_long_prefill"].group(ROWS)
    if not cases:
        return
    cached, uncached = MODES["cache on"], MODES["cache off"]
    lines = (
        ("engine's cache", cached, cached.rows[1]),
        ("CPU tier", uncached, uncached.rows[1]),
        ("store, after a restart", cached, REMOTE),
        ("computed and filled in", cached, COMPUTE),
        (WITHOUT, cached, WITHOUT),
    )
    prompts = cases[0].parameters["prompts"]
    series = {}
    for label, mode, row in lines:
        chosen = [case for case in cases if case.parameters["mode"] == mode.name]
        series[label] = (
            [case.parameters["output_tokens"] for case in chosen],
            [case.seconds(row).inverse.scaled(prompts) for case in chosen],
        )
    draw_lines(path, f"{prompts} long prompts at once", "tokens of output", "prompts a second", series, log=True)


def first_token(results: Results, path: Path) -> None:
    """Seconds to the first token, by tier."""
    for case in results["test_long_prefill"].group(FIRST_TOKEN):
        names = [name for name in case.operations if name != OWN]
        draw(
            path,
            f"Time to the first token: {case.name}",
            "s",
            names,
            {"median, min … max": [case.seconds(name) for name in names]},
            OWN,
            case.seconds(OWN).median,
            log=True,
        )


def hand_over(results: Results, path: Path) -> None:
    """The p99 of the time between tokens while prompts come, by their length and where they are computed."""
    cases = results["test_hand_over"].group(BETWEEN_TOKENS)
    if not cases:
        return
    names = [name for name in cases[0].operations if name != ALONE]
    most = [1.5 * case.seconds(ALONE).median * 1e3 for case in cases]
    draw(
        path,
        "Answers that are being given while prompts come",
        "time between tokens, p99, ms",
        [f"prompts of {case.parameters['prompt_tokens']} tokens" for case in cases],
        {name: [case.seconds(name).scaled(1e3) for case in cases] for name in names},
        "1.5 x without prompts",
        dict.fromkeys(names, most),
        log=True,
    )


def layer_parts(results: Results, path: Path) -> None:
    """When a prompt that is handed over is there, by the rate of the link."""
    result = results["test_layer_parts"]
    rates = [case.parameters["bytes_per_s"] / 1e6 for case in result.cases]
    names = ("whole blocks", "whole blocks, in chunks", "4 parts", "8 parts", COMPUTE_IT)
    draw_lines(
        path,
        f"A prompt of {result.cases[0].parameters['prompt_tokens']} tokens, handed over through a store behind a link",
        "rate of the link, MB/s",
        "there after, s",
        {name: (rates, [case.seconds(name) for case in result.cases]) for name in names},
        log=True,
    )


def proxy_links(results: Results, path: Path) -> None:
    """When a user of the proxy has the first and the second token, by the rate of the links."""
    result = results["test_proxy_links"]
    first, second = (result.group(figure) for figure in (FIRST_OF_STREAM, SECOND))
    rates = [case.parameters["bytes_per_s"] / 1e6 for case in first]
    lines = {
        f"{figure}, {way}": (rates, [case.seconds(way) for case in cases])
        for figure, cases in ((SECOND, second), (FIRST_OF_STREAM, first))
        for way in (BY_PROXY, ITSELF)
    }
    title = f"A prompt of {first[0].parameters['prompt_tokens']} tokens, handed over across two links"
    draw_lines(path, title, "rate of each link, MB/s", "there after, s", lines, log=True)


def request_time(results: Results, path: Path) -> None:
    """The parts of a request's time, by rate; and how long the way took for which share of requests."""
    from matplotlib.figure import Figure

    cases = results["test_request_time"].cases
    parts = [part for part in PARTS if part not in (FIRST_OF_D, D_QUEUE)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        bars, shares = figure.subplots(1, 2, width_ratios=(3, 2))
        names = [case.name for case in cases]
        begin = [0.0] * len(cases)
        for part, colour in zip(parts, COLOURS, strict=False):
            widths = [case.seconds(part).median * 1e3 for case in cases]
            bars.barh(names, widths, left=begin, color=colour, label=part, height=0.5)
            begin = [left + width for left, width in zip(begin, widths, strict=True)]
        bars.set_xlabel("ms, medians")
        bars.set_title("From the request to D's first token", loc="left", fontsize=10)
        bars.invert_yaxis()
        for case, colour in zip(cases, COLOURS[::-1], strict=False):
            milliseconds = [1e3 * each for each in case.parameters["way_percentiles_s"]]
            shares.plot(milliseconds, PERCENTILES, color=colour, label=case.name)
        shares.set_xlabel("ms at most")
        shares.set_ylabel("requests, %")
        shares.set_ylim(0, 105)
        shares.set_title("Way from P to D", loc="left", fontsize=10)
        shares.legend(frameon=False, loc="lower right")
        figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def apart(results: Results, path: Path) -> None:
    """The share of requests that attain, by what was promised; a panel for each rate."""
    cases = [case.parameters for case in results["test_apart"].group(FIRST)]
    _attainment(path, {f"{case['requests_per_s']:g} requests/s": case for case in cases})


def conversation(results: Results, path: Path) -> None:
    """The share of requests that attain, by what was promised, with the trace's prefixes and without."""
    cases = [case.parameters for case in results["test_conversation"].group(FIRST)]
    _attainment(path, {case["prompts"]: case for case in cases})


def _attainment(path: Path, panels_of: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel for the parameters of each case: for each way to serve, the share of requests that attain and Wilson's
    interval of 95 %, by what was promised."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        panels = figure.subplots(1, len(panels_of), sharey=True, squeeze=False)[0]
        for axes, (title, case) in zip(panels, panels_of.items(), strict=True):
            for (way, shares), colour in zip(case["attained"].items(), COLOURS, strict=False):
                scales = [float(scale) for scale in shares]
                axes.plot(scales, [100 * share for share in shares.values()], color=colour, marker="o", markersize=4)
                axes.lines[-1].set_label(way if axes is panels[0] else "_")
                ends = [
                    wilson(round(share * case["requests"]), case["requests"]) or (0, 1) for share in shares.values()
                ]
                low, high = ([100 * each[end] for each in ends] for end in (0, 1))
                axes.fill_between(scales, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.set_title(title, fontsize=10)
            axes.set_ylim(0, 105)
        panels[0].set_ylabel("requests that attain, %")
        figure.supxlabel("what is promised, x an idle engine's times", color=INK, fontsize=10)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def faults(results: Results, path: Path) -> None:
    """How long answers took beside each fault."""
    cases = results["test_faults"].cases
    names = list(dict.fromkeys(fault for case in cases for fault in case.operations))
    draw(
        path,
        "Answers while something fails",
        "from the request to the end of the answer, without the fault's own time, s",
        names,
        {case.name: [case.seconds(fault) if fault in case.operations else None for fault in names] for case in cases},
        "the longest that D waits in hand-overs",
        MOST_WAITED_S,
    )


# As in charts.py.
ENGINE_CHARTS: Final[dict[str, tuple[str, Callable[[Results, Path], None]]]] = {
    "transfer_out": ("test_transfer_out", transfer_out),
    "transfer_in": ("test_transfer_in", transfer_in),
    "long_prefill": ("test_long_prefill", long_prefill),
    "first_token": ("test_long_prefill", first_token),
    "hand_over": ("test_hand_over", hand_over),
    "faults": ("test_faults", faults),
    "layer_parts": ("test_layer_parts", layer_parts),
    "proxy_links": ("test_proxy_links", proxy_links),
    "request_time": ("test_request_time", request_time),
    "apart": ("test_apart", apart),
    "conversation": ("test_conversation", conversation),
}
