"""The tables of docs/planning-validation.md, each a function of the results; `benchmarks.draw` fills them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.planning.bench_headline import APART as PHASES_APART
from benchmarks.planning.bench_headline import CHUNKS as IN_CHUNKS
from benchmarks.planning.bench_headline import HEADLINE
from benchmarks.planning.bench_headline import WHOLE as WHOLE_PROMPTS
from benchmarks.planning.bench_interference import APART as SEPARATED
from benchmarks.planning.bench_interference import FOR_NOBODY, LENGTHS, NO_PROMPT, WAYS
from benchmarks.planning.bench_parallelism import DECODES, PREFILLS
from benchmarks.planning.bench_predicted import APART, COLOCATED
from benchmarks.planning.bench_predicted_apart import AS_IT_RUNS
from benchmarks.planning.bench_simulator import BATCHES, CROSSOVER, DISTSERVE, FORMS, ROUNDING, SEARCH, T_ALL, T_SINGLE
from benchmarks.render.cells import Cell, Row, cases
from benchmarks.render.tables import NOTHING, Column, Table, markdown, section
from benchmarks.results_reader import Result, Results, parameters_of
from kvstore_serving.planning.queueing import highest_load

SIMULATOR: Final = "bench_simulator"
PARALLELISM: Final = "bench_parallelism"
PREDICTED: Final = "bench_predicted"
PREDICTED_APART: Final = "bench_predicted_apart"
INTERFERENCE: Final = "bench_interference"
HEADLINES: Final = "bench_headline"
INTERVALS: Final = "intervals that hold together with 95 %"


def _off(wait: dict[str, float]) -> float:
    """Return the distance of the simulated figure from the closed form, in standard errors."""
    off, error = abs(wait["off"]), wait["error"]
    return off / error if error else (0.0 if off < ROUNDING else float("inf"))


def inside_intervals(cases: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of waits within `INTERVALS` around the closed forms, and the number of all waits."""
    offs = [_off(wait) for case in cases for wait in case["waits"].values()]
    return sum(off <= T_ALL for off in offs), len(offs)


def _percentile(percentile: int) -> Column:
    def cell(row: Row) -> str:
        wait = row.p["waits"][f"p{percentile}"]
        share = f"{percentile + wait['off'] * 100:.2f} ± {wait['error'] * T_SINGLE * 100:.2f} %"
        return f"{wait['found']:.3f} / {wait['expected']:.3f}: {share}"

    return f"P{percentile}: simulated / exact: share of waits up to the exact", cell


def _mean(row: Row) -> str:
    mean = row.p["waits"]["mean"]
    return f"{mean['found']:.3f} / {mean['expected']:.3f} ± {mean['error'] * T_SINGLE:.3f}"


def _inside(result: Result) -> str:
    forms = parameters_of(result, FORMS)
    alone = sum(_off(wait) <= T_SINGLE for case in forms for wait in case["waits"].values())
    together, of = inside_intervals(forms)
    inside = f"{alone} of {of} figures are within their own 95 % interval, {together} within {INTERVALS}"
    return f"{inside} ({BATCHES} batches)."


# P90 of TTFT, in services -> the utilisation that DistServe's authors allow one device.
_P90_LOADS: Final = {1.5: 0.18, 2: 0.39, 3: 0.59, 5: 0.76}


def p90_loads() -> str:
    """The utilisation up to which 90 % of prompts have their first token in time. It is computed."""
    rows = [
        (f"{services:g} D", f"{published:.2f}", f"{highest_load(services, 90):.3f}")
        for services, published in _P90_LOADS.items()
    ]
    return markdown(("P90 of the time to the first token", "published", "ours"), rows)


def _degrees(name: str) -> Cell:
    """A cell with the degrees of a placement. If there are none, it has the reason or is empty."""

    def cell(row: Row) -> str:
        if (degrees := row.p.get(name)) is None:
            return str(row.p.get("none", "")) if name == "ours" else ""
        return f"({', '.join(map(str, degrees))})"

    return cell


def _rate(name: str) -> Cell:
    return lambda row: "" if row.p.get(name) is None else f"{row.p[name]:.2f}"


def _prefill_degrees(result: Result) -> str:
    """The mean time to the first token by rate, a table for each number of GPUs."""
    tables = []
    for of in dict.fromkeys((case.parameters["profile"], case.parameters["gpus"]) for case in result.group(PREFILLS)):
        mine = cases(PREFILLS, where=lambda row, of=of: (row.p["profile"], row.p["gpus"]) == of)
        degrees = [(name, lambda row, name=name: _ttft(row.p["ttft_s"], name)) for name in mine(result)[0].p["ttft_s"]]
        tables.append(Table(mine, ("`{p[profile]}`, {p[gpus]} GPUs: prompts/s", "{p[rate_rps]:g}"), *degrees)(result))
    return "\n\n".join(tables)


def _ttft(times: dict[str, float | None], degrees: str) -> str:
    """The TTFT in milliseconds; the shortest one is bold."""
    if (mine := times[degrees]) is None:
        return "too many"
    best = mine == min(each for each in times.values() if each is not None)
    return f"**{mine * 1e3:.0f}**" if best else f"{mine * 1e3:.0f}"


def _predicted(results: Results) -> str:
    """Attainment, predicted and measured."""
    if PREDICTED not in results:
        return NOTHING
    rows, said = [], ""
    for benchmark, way in ((PREDICTED, COLOCATED), (PREDICTED, APART), (PREDICTED_APART, AS_IT_RUNS)):
        cases = parameters_of(results[benchmark], way) if benchmark in results else []
        for case in cases:
            rows.append(
                (
                    way, f"{case['rate_rps']:.2f}", f"{case['predicted']:.0%}", f"{case['measured']:.0%}",
                    f"{case['error']:.1f}", _pair(case, "ttft"), _pair(case, "tpot"),
                )
            )  # fmt: skip
        if cases:
            errors = [case["error"] for case in cases]
            said += f"\n\n{way}: mean error {sum(errors) / len(errors):.1f} points, largest {max(errors):.1f}."
    headings = (
        "engines", "req/s", "predicted", "measured", "error, points", "TTFT p50: predicted / measured, ms",
        "TPOT p50: predicted / measured, ms",
    )  # fmt: skip
    return markdown(headings, rows) + said


def _pair(case: dict[str, Any], name: str) -> str:
    measured = case[f"measured_{name}_s"]
    return f"{case[f'predicted_{name}_s'] * 1e3:.0f} / {'' if measured is None else f'{measured * 1e3:.0f}'}"


def _interference(result: Result) -> str:
    """The longest gap of requests that decode, and the prompt's own TTFT, by prompt length."""
    rows = []
    for way in (*WAYS, SEPARATED, FOR_NOBODY, NO_PROMPT):
        cases = {case["tokens"]: case for case in parameters_of(result, way)}
        if cases:
            alone = f"{min(case['gap_alone_s'] for case in cases.values()) * 1e3:.0f}"
            cells = [
                f"{cases[n]['longest_gap_s'] * 1e3:.0f}"
                + ("" if way == NO_PROMPT else f" / {cases[n]['ttft_s'] * 1e3:.0f}")
                for n in LENGTHS
                if n in cases
            ]
            rows.append((way, alone, *cells))
    return markdown(("longest gap / the prompt's TTFT, ms", "gap alone", *(f"{n} tokens" for n in LENGTHS)), rows)


# DistServe's highest published figures: the rate, and the tightness of SLOs, as multiples of those of vLLM of 2023.
_HEADLINE: Final = (7.4, 12.6)


def _headline(result: Result) -> str:
    """Disaggregated prefill/decode against colocated engines, simulated with published times."""
    rows = [("published, at most", "", "", "", *(f"{each:g} x" for each in _HEADLINE), "")]
    for case in result.group(HEADLINE):
        rates, scales = case.parameters["rate_rps"], case.parameters["slo_scale"]
        old, new = (f"{rates[way]:.2f}" if way in rates else "at no rate" for way in (WHOLE_PROMPTS, IN_CHUNKS))
        cells = [
            f"{rates[PHASES_APART] / rates[WHOLE_PROMPTS]:.1f} x" if WHOLE_PROMPTS in rates else "",
            f"{scales[WHOLE_PROMPTS] / scales[PHASES_APART]:.1f} x"
            if {WHOLE_PROMPTS, PHASES_APART} <= scales.keys()
            else "",
            f"{rates[PHASES_APART] / rates[IN_CHUNKS]:.1f} x" if IN_CHUNKS in rates else "",
        ]
        rows.append((case.name, f"{rates[PHASES_APART]:.2f}", old, new, *cells))
    headings = (
        "requests/s a GPU", "P/D", "vLLM of 2023, whole prompts", "DistServe's times, chunked prefill",
        "rate / vLLM of 2023", "tighter SLOs than vLLM of 2023", "rate / chunked prefill",
    )  # fmt: skip
    return markdown(headings, rows)


PLANNING_TABLES: Final = {
    "closed_forms": section(
        SIMULATOR,
        Table(
            cases(FORMS), ("case", "{p[kind]}"), ("utilisation", "{p[load]:g}"), ("mean: simulated / exact", _mean),
            _percentile(90), _percentile(99),
        ),
        _inside,
    ),
    "crossovers": section(SIMULATOR, Table(
        cases(CROSSOVER),
        ("speed-up K of two devices", lambda row: f"{float(row.case.removeprefix('K = ')):g}"),
        ("published R D", "{p[published]:.2f}"), ("closed forms", "{p[ours]:.3f}"),
        ("simulated", lambda row: f"{row.p['simulated']:.3f} ± {row.p['simulated_error'] * T_SINGLE:.3f}"),
    )),
    "distserve": section(SIMULATOR, Table(
        cases(DISTSERVE), ("workload", "{p[workload]}"), ("counted", "{p[variant]}"),
        ("published degrees", _degrees("published")), ("published", _rate("published_rps")),
        ("simulated", _rate("theirs")), ("our degrees", _degrees("ours")), ("simulated", _rate("ours_rps")),
    )),
    "prefill_degrees": section(PARALLELISM, _prefill_degrees),
    "decode_degrees": section(PARALLELISM, Table(
        cases(DECODES), ("profile", "`{p[profile]}`"), ("(tp, pp)", "({p[tp]}, {p[pp]})"),
        ("time per token, ms", "{p[tpot_s]:ms.0f}"), ("tokens/s", "{p[tokens_per_s]:.0f}"),
        ("tokens/s and GPU", lambda row: f"{row.p['tokens_per_s'] / (row.p['tp'] * row.p['pp']):.0f}"),
    )),
    "search_time": section(SIMULATOR, Table(
        cases(SEARCH), ("search", "{case}"),
        ("median", lambda row: f"{median(row.p['seconds_to_search']):.1f} s"),
        ("longest", lambda row: f"{max(row.p['seconds_to_search']):.1f} s"), ("target", "{p[target_s]:g} s"),
    )),
    "headline": section(HEADLINES, _headline),
    "interference": section(INTERFERENCE, _interference),
}  # fmt: skip
# These use two results; the first must exist. The last column is the guide's name for the engines of a prediction.
_TRUST: Final = (
    (PREDICTED, COLOCATED, "one engine"),
    (PREDICTED_APART, AS_IT_RUNS, "P/D, profiled with the store and the other engine"),
    (PREDICTED, APART, "P/D, profiled alone and without a store"),
)


def _trust(results: Results) -> str:
    """The mean and the largest error of predictions."""
    rows = []
    for benchmark, way, engines in _TRUST:
        errors = [case["error"] for case in parameters_of(results[benchmark], way)] if benchmark in results else []
        if errors:
            mean = f"{sum(errors) / len(errors):.1f} points"
            rows.append((engines, mean, f"{max(errors):.1f} points", f"{len(errors)}"))
    return markdown(("engines", "mean error", "largest error", "rates"), rows) if rows else NOTHING


PLANNING_OVERVIEWS: Final = {"predicted": _predicted, "trust": _trust}
# These use no results: they are computed.
PLANNING_COMPUTED: Final[dict[str, Callable[[], str]]] = {"p90_loads": p90_loads}
