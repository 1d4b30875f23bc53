"""The tables of docs/planning.md, each a function of the results; `benchmarks.draw` fills them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.markdown import markdown
from benchmarks.planning.test_headline import APART as PHASES_APART
from benchmarks.planning.test_headline import CHUNKS as IN_CHUNKS
from benchmarks.planning.test_headline import HEADLINE
from benchmarks.planning.test_headline import WHOLE as WHOLE_PROMPTS
from benchmarks.planning.test_interference import APART as SEPARATED
from benchmarks.planning.test_interference import FOR_NOBODY, LENGTHS, NO_PROMPT, WAYS
from benchmarks.planning.test_parallelism import DECODES, PREFILLS
from benchmarks.planning.test_predicted import APART, COLOCATED
from benchmarks.planning.test_predicted_apart import AS_IT_RUNS
from benchmarks.planning.test_simulator import BATCHES, CROSSOVER, DISTSERVE, FORMS, ROUNDING, SEARCH, T_ALL, T_SINGLE
from benchmarks.results_reader import Results, parameters_of
from kvstore_serving.planning.queueing import highest_load

SIMULATOR: Final = "test_simulator"
PARALLELISM: Final = "test_parallelism"
PREDICTED: Final = "test_predicted"
PREDICTED_APART: Final = "test_predicted_apart"
INTERFERENCE: Final = "test_interference"
HEADLINES: Final = "test_headline"
INTERVALS: Final = "intervals that hold together with 95 %"


def _off(wait: dict[str, float]) -> float:
    """How many standard errors the simulated figure is from the closed form."""
    off, error = abs(wait["off"]), wait["error"]
    return off / error if error else (0.0 if off < ROUNDING else float("inf"))


def inside_intervals(cases: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """-> how many of the waits are within `INTERVALS` around the closed forms, and how many there are."""
    offs = [_off(wait) for case in cases for wait in case["waits"].values()]
    return sum(off <= T_ALL for off in offs), len(offs)


def closed_forms(results: Results) -> str:
    """The waits of a million arrivals beside the closed forms."""
    cases = parameters_of(results, SIMULATOR, FORMS)
    rows = []
    for case in cases:
        waits = case["waits"]
        mean = waits["mean"]
        cells = [f"{mean['found']:.3f} / {mean['expected']:.3f} ± {mean['error'] * T_SINGLE:.3f}"]
        for percentile in (90, 99):
            wait = waits[f"p{percentile}"]
            share = f"{percentile + wait['off'] * 100:.2f} ± {wait['error'] * T_SINGLE * 100:.2f} %"
            cells.append(f"{wait['found']:.3f} / {wait['expected']:.3f}: {share}")
        rows.append((case["kind"], f"{case['load']:g}", *cells))
    alone = sum(_off(wait) <= T_SINGLE for case in cases for wait in case["waits"].values())
    together, of = inside_intervals(cases)
    headings = (
        "case",
        "utilisation",
        "mean: simulated / exact",
        *(f"P{percentile}: simulated / exact: waits at most the exact" for percentile in (90, 99)),
    )
    return (
        f"{markdown(headings, rows)}\n\n{alone} of {of} figures are within their own 95 % interval, {together} within "
        f"{INTERVALS} ({BATCHES} batches)."
    )


def crossovers(results: Results) -> str:
    """Where inter-op becomes the faster one."""
    rows = [
        (
            f"{float(case.name.removeprefix('K = ')):g}",
            f"{case.parameters['published']:.2f}",
            f"{case.parameters['ours']:.3f}",
            f"{case.parameters['simulated']:.3f} ± {case.parameters['simulated_error'] * T_SINGLE:.3f}",
        )
        for case in results[SIMULATOR].group(CROSSOVER)
    ]
    return markdown(("speed-up K of two devices", "published R D", "closed forms", "simulated"), rows)


# TTFT in services for 90 % of prompts -> the utilisation that DistServe's authors allow one device.
_P90_LOADS: Final = {1.5: 0.18, 2: 0.39, 3: 0.59, 5: 0.76}


def p90_loads() -> str:
    """The utilisation up to which 90 % of prompts have their first token in time: computed."""
    rows = [
        (f"{services:g} D", f"{published:.2f}", f"{highest_load(services, 90):.3f}")
        for services, published in _P90_LOADS.items()
    ]
    return markdown(("P90 of the time to the first token", "published", "ours"), rows)


def distserve(results: Results) -> str:
    """DistServe's workloads."""
    rows = []
    for case in parameters_of(results, SIMULATOR, DISTSERVE):
        published = case["published"]
        ours = case.get("ours")
        rows.append(
            (
                case["workload"],
                case["variant"],
                "" if published is None else _degrees(published),
                _rate(case["published_rps"]),
                _rate(case.get("theirs")),
                case.get("none", "") if ours is None else _degrees(ours),
                _rate(case.get("ours_rps")),
            )
        )
    headings = ("workload", "counted", "published degrees", "published", "simulated", "our degrees", "simulated")
    return markdown(headings, rows)


def _degrees(degrees: list[int]) -> str:
    return f"({', '.join(map(str, degrees))})"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.2f}"


def prefill_degrees(results: Results) -> str:
    """The mean time to the first token by rate, a table for each number of GPUs."""
    cases = parameters_of(results, PARALLELISM, PREFILLS)
    tables = []
    for profile, gpus in dict.fromkeys((case["profile"], case["gpus"]) for case in cases):
        mine = [case for case in cases if (case["profile"], case["gpus"]) == (profile, gpus)]
        rows = []
        for case in mine:
            times = case["ttft_s"].values()
            best = min((each for each in times if each is not None), default=None)
            cells = ("too many" if each is None else _best(f"{each * 1e3:.0f}", each == best) for each in times)
            rows.append((f"{case['rate_rps']:g}", *cells))
        tables.append(markdown((f"`{profile}`, {gpus} GPUs: prompts/s", *mine[0]["ttft_s"]), rows))
    return "\n\n".join(tables)


def _best(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def decode_degrees(results: Results) -> str:
    """The time per token and the tokens a second of full batches."""
    rows = [
        (
            f"`{case['profile']}`", f"({case['tp']}, {case['pp']})", f"{case['tpot_s'] * 1e3:.0f}",
            f"{case['tokens_per_s']:.0f}", f"{case['tokens_per_s'] / (case['tp'] * case['pp']):.0f}",
        )
        for case in parameters_of(results, PARALLELISM, DECODES)
    ]  # fmt: skip
    return markdown(("profile", "(tp, pp)", "time per token, ms", "tokens/s", "tokens/s and GPU"), rows)


def search_time(results: Results) -> str:
    """How long a search takes."""
    rows = [
        (
            case.name,
            f"{median(case.parameters['seconds_to_search']):.1f} s",
            f"{max(case.parameters['seconds_to_search']):.1f} s",
            f"{case.parameters['target_s']:g} s",
        )
        for case in results[SIMULATOR].group(SEARCH)
    ]
    return markdown(("search", "took, median", "at most", "target"), rows)


def predicted(results: Results) -> str:
    """Attainment, predicted and measured."""
    rows, said = [], ""
    for benchmark, way in ((PREDICTED, COLOCATED), (PREDICTED, APART), (PREDICTED_APART, AS_IT_RUNS)):
        cases = parameters_of(results, benchmark, way) if benchmark in results else []
        for case in cases:
            rows.append(
                (
                    way, f"{case['rate_rps']:.2f}", f"{case['predicted']:.0%}", f"{case['measured']:.0%}",
                    f"{case['error']:.1f}", _pair(case, "ttft"), _pair(case, "tpot"),
                )
            )  # fmt: skip
        if cases:
            errors = [case["error"] for case in cases]
            said += f"\n\n{way}: mean error {sum(errors) / len(errors):.1f} points, worst {max(errors):.1f}."
    headings = (
        "engines", "req/s", "predicted", "measured", "off, points", "TTFT p50: predicted / measured, ms",
        "TPOT p50: predicted / measured, ms",
    )  # fmt: skip
    return markdown(headings, rows) + said


def _pair(case: dict[str, Any], name: str) -> str:
    measured = case[f"measured_{name}_s"]
    return f"{case[f'predicted_{name}_s'] * 1e3:.0f} / {'' if measured is None else f'{measured * 1e3:.0f}'}"


def interference(results: Results) -> str:
    """The longest wait of requests that decode, and the prompt's own time, by the prompt's length."""
    rows = []
    for way in (*WAYS, SEPARATED, FOR_NOBODY, NO_PROMPT):
        cases = {case["tokens"]: case for case in parameters_of(results, INTERFERENCE, way)}
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


# DistServe's headline: so many times the rate, and so many times tighter SLOs, than vLLM of 2023, at most.
_HEADLINE: Final = (7.4, 12.6)


def headline(results: Results) -> str:
    """Prefill and decode apart beside engines that do both, simulated with published times."""
    rows = [("published, at most", "", "", "", *(f"{each:g} x" for each in _HEADLINE), "")]
    for case in results[HEADLINES].group(HEADLINE):
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
        "requests/s a GPU", "apart", "vLLM of 2023, whole prompts", "DistServe's times, prompts in chunks",
        "rate, to vLLM of 2023", "tighter SLOs, to vLLM of 2023", "rate, to chunks",
    )  # fmt: skip
    return markdown(headings, rows)


PLANNING_TABLES: Final[dict[str, tuple[str, Callable[[Results], str]]]] = {
    "closed_forms": (SIMULATOR, closed_forms),
    "crossovers": (SIMULATOR, crossovers),
    "distserve": (SIMULATOR, distserve),
    "prefill_degrees": (PARALLELISM, prefill_degrees),
    "decode_degrees": (PARALLELISM, decode_degrees),
    "search_time": (SIMULATOR, search_time),
    "predicted": (PREDICTED, predicted),
    "headline": (HEADLINES, headline),
    "interference": (INTERFERENCE, interference),
}
# Of nothing that is measured.
PLANNING_COMPUTED: Final[dict[str, Callable[[], str]]] = {"p90_loads": p90_loads}
