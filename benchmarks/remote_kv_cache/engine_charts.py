"""The charts of benchmarks with real engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.remote_kv_cache.bench_apart import FIRST
from benchmarks.remote_kv_cache.bench_faults import MOST_WAITED_S
from benchmarks.remote_kv_cache.bench_hand_over import ALONE, BETWEEN_TOKENS
from benchmarks.remote_kv_cache.bench_layer_parts import COMPUTE as COMPUTE_IT
from benchmarks.remote_kv_cache.bench_long_prefill import COMPUTE, MODES, REMOTE, ROWS
from benchmarks.remote_kv_cache.bench_proxy_links import APART as BY_PROXY
from benchmarks.remote_kv_cache.bench_proxy_links import FIRST as FIRST_OF_STREAM
from benchmarks.remote_kv_cache.bench_proxy_links import ITSELF, SECOND
from benchmarks.remote_kv_cache.bench_request_time import D_QUEUE, PARTS, PERCENTILES
from benchmarks.remote_kv_cache.bench_request_time import FIRST as FIRST_OF_D
from benchmarks.remote_kv_cache.bench_transfer_in import CACHES, FILL, READ
from benchmarks.remote_kv_cache.bench_transfer_out import BATCH_SIZES, STORED
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.first_token import FIRST_TOKEN, OWN
from benchmarks.render.cells import Row, Rows, cases, operations
from benchmarks.render.charts import COLOURS, INK, ROUNDS, Bars, Chart, Lines, figure, of
from benchmarks.render.tables import Item
from benchmarks.results_reader import Result, Spread
from kvstore_serving.load.report import wilson

_CACHED, _UNCACHED = MODES["cache on"], MODES["cache off"]


def _seconds(row: Row) -> Spread:
    return row.s


def _of_cache(on: bool) -> Rows:
    return cases(BATCH_SIZES, where=lambda row: row.p["prefix_cache"] is on)


def _stored(row: Row, item: Item) -> Spread:
    """The value of the case with this number of tokens a step, with the engine's own cache on or off."""
    tokens, on = row.p["max_num_batched_tokens"], str(item).endswith("on")
    [same] = [each for each in _of_cache(on)(row.result) if each.p["max_num_batched_tokens"] == tokens]
    return same.at(STORED).share


def _to_fill(row: Row) -> Spread:
    """The prompts a second of an engine with its cache on, as multiples of those of the fill run at the lowest hit
    rate."""
    of_engine = row.result.group(next(iter(CACHES)))
    lowest = min(of_engine, key=lambda case: int(case.parameters["hit_rate_percent"]))
    return row.s.inverse.scaled(lowest.seconds(FILL).median)


def _of_mode(mode: str, name: str) -> tuple[Rows, Callable[[Row], Spread]]:
    rows = operations(ROWS, names=(name,), where=lambda row: row.p["mode"] == mode)
    return rows, lambda row: row.s.inverse.scaled(row.p["prompts"])


def _megabytes(row: Row) -> float:
    return float(row.p["bytes_per_s"] / 1e6)


def _fault_rows(result: Result) -> list[Row]:
    names = dict.fromkeys(fault for case in result.cases for fault in case.operations)
    return [Row(result, result.cases[0], name) for name in names]


def _request_time(result: Result, path: Path) -> None:
    """The parts of a request's time by rate, and the distribution of the time from P to D."""
    parts = [part for part in PARTS if part not in (FIRST_OF_D, D_QUEUE)]
    with figure(path, 8, 3.2) as drawn:
        bars, shares = drawn.subplots(1, 2, width_ratios=(3, 2))
        names = [case.name for case in result.cases]
        begin = [0.0] * len(names)
        for part, colour in zip(parts, COLOURS, strict=False):
            widths = [case.seconds(part).median * 1e3 for case in result.cases]
            bars.barh(names, widths, left=begin, color=colour, label=part, height=0.5)
            begin = [left + width for left, width in zip(begin, widths, strict=True)]
        bars.set_xlabel("ms, medians")
        bars.set_title("From the request to D's first token", loc="left", fontsize=10)
        bars.invert_yaxis()
        for case, colour in zip(result.cases, COLOURS[::-1], strict=False):
            milliseconds = [1e3 * each for each in case.parameters["way_percentiles_s"]]
            shares.plot(milliseconds, PERCENTILES, color=colour, label=case.name)
        shares.set_xlabel("ms at most")
        shares.set_ylabel("requests, %")
        shares.set_ylim(0, 105)
        shares.set_title("Way from P to D", loc="left", fontsize=10)
        shares.legend(frameon=False, loc="lower right")
        drawn.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)


def _attainment(title: Callable[[Mapping[str, Any]], str]) -> Callable[[Result, Path], None]:
    """Return a panel for each case of the first figure. It shows, for each way to serve, the share of requests that
    meet the SLO, by SLO, with Wilson's 95 % interval. If several cases have the same title, the last one counts."""

    def draw(result: Result, path: Path) -> None:
        panels_of = {title(case.parameters): case.parameters for case in result.group(FIRST)}
        with figure(path, 8, 3.2) as drawn:
            panels = drawn.subplots(1, len(panels_of), sharey=True, squeeze=False)[0]
            for axes, (name, case) in zip(panels, panels_of.items(), strict=True):
                for (way, shares), colour in zip(case["attained"].items(), COLOURS, strict=False):
                    scales, attained = [float(scale) for scale in shares], [100 * share for share in shares.values()]
                    axes.plot(scales, attained, color=colour, marker="o", markersize=4)
                    axes.lines[-1].set_label(way if axes is panels[0] else "_")
                    of = case["requests"]
                    ends = [wilson(round(share * of), of) or (0, 1) for share in shares.values()]
                    low, high = ([100 * each[end] for each in ends] for end in (0, 1))
                    axes.fill_between(scales, low, high, color=colour, alpha=0.15, linewidth=0)
                axes.set_title(name, fontsize=10)
                axes.set_ylim(0, 105)
            panels[0].set_ylabel("requests that attain, %")
            drawn.supxlabel("SLO, x an idle engine's times", color=INK, fontsize=10)
            drawn.legend(loc="outside lower center", ncols=3, frameon=False)

    return draw


# fmt: off
ENGINE_CHARTS: Final[dict[str, Chart]] = {
    "transfer_out": Bars(
        "bench_transfer_out", "Prefill with nothing cached, every block sent to the store",
        "prompts a second until all blocks are stored, as a share of those without the connector", _of_cache(True),
        "{p[max_num_batched_tokens]} tokens a step", ("engine's cache on", "engine's cache off"), WITHOUT, _stored,
    ),
    "transfer_in": Lines(
        "bench_transfer_in", "{p[prompts]} prompts of {p[prompt_tokens]} tokens, given twice", "prefix hit rate, %",
        "prompts a second (fill run at 0 % = 1)",
        {
            f"{name}, {cache}": (operations(cache, names=(name,)), _to_fill)
            for name in (READ, FILL, WITHOUT) for cache in CACHES
        },
        lambda row: float(row.p["hit_rate_percent"]),
    ),
    "long_prefill": Lines(
        "bench_long_prefill", "{p[prompts]} long prompts at once", "tokens of output", "prompts a second",
        {
            "engine's cache": _of_mode(_CACHED.name, _CACHED.rows[1]),
            "CPU tier": _of_mode(_UNCACHED.name, _UNCACHED.rows[1]),
            "store, after a restart": _of_mode(_CACHED.name, REMOTE),
            "computed and filled in": _of_mode(_CACHED.name, COMPUTE),
            WITHOUT: _of_mode(_CACHED.name, WITHOUT),
        },
        lambda row: float(row.p["output_tokens"]), log=True,
    ),
    "first_token": Bars(
        "bench_long_prefill", "Time to the first token: {case}", "s",
        operations(FIRST_TOKEN, where=lambda row: row.name != OWN), "{name}", ROUNDS, OWN, lambda row, item: row.s,
        lambda row, item: row.at(OWN).s.median, one_limit=True, log=True,
    ),
    "hand_over": Bars(
        "bench_hand_over", "Answers generated while prompts arrive", "time between tokens, p99, ms",
        cases(BETWEEN_TOKENS), "prompts of {p[prompt_tokens]} tokens",
        lambda row: [name for name in row.data.operations if name != ALONE], "1.5 x without prompts",
        lambda row, item: row.at(item).s.scaled(1e3), lambda row, item: 1.5 * row.at(ALONE).s.median * 1e3, log=True,
    ),
    "faults": Bars(
        "bench_faults", "Answers while something fails",
        "from the request to the end of the answer, without the duration of the fault, s", _fault_rows, "{name}",
        lambda row: row.result.cases, "D's longest wait in hand-overs", lambda row, item: row.at(item).s,
        MOST_WAITED_S,
    ),
    "layer_parts": Lines(
        "bench_layer_parts", "A prompt of {p[prompt_tokens]} tokens, handed over through a store behind a link",
        "rate of the link, MB/s", "ready after, s",
        {
            name: (operations(names=(name,)), _seconds)
            for name in ("whole blocks", "whole blocks, in chunks", "4 parts", "8 parts", COMPUTE_IT)
        },
        _megabytes, log=True,
    ),
    "proxy_links": Lines(
        "bench_proxy_links", "A prompt of {p[prompt_tokens]} tokens, handed over across two links",
        "rate of each link, MB/s", "ready after, s",
        {
            f"{figure_of}, {way}": (operations(figure_of, names=(way,)), _seconds)
            for figure_of in (SECOND, FIRST_OF_STREAM)
            for way in (BY_PROXY, ITSELF)
        },
        _megabytes, log=True,
    ),
    "request_time": of("bench_request_time", _request_time),
    "apart": of("bench_apart", _attainment(lambda case: f"{case['requests_per_s']:g} requests/s")),
    "conversation": of("bench_conversation", _attainment(lambda case: str(case["prompts"]))),
}
# fmt: on
