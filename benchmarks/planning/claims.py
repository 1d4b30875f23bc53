"""The targets of the planner, and of the KV pipeline."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

from benchmarks.ledger import Claim, Finding
from benchmarks.planning.tables import INTERVALS, PIPELINE, PREDICTED, PREDICTED_APART, SIMULATOR, inside_intervals
from benchmarks.planning.test_predicted import COLOCATED
from benchmarks.planning.test_predicted_apart import AS_IT_RUNS
from benchmarks.planning.test_simulator import BATCHES, CROSSOVER, FORMS, SEARCH
from benchmarks.results_reader import CaseResult, Result

_MODULE: Final = "benchmarks.planning"
_PIPELINE_MODULE: Final = "benchmarks.kv_pipeline"


def _group(result: Result, group: str) -> list[CaseResult]:
    """Raises `KeyError` if it was not measured."""
    cases = result.group(group)
    if not cases:
        raise KeyError(group)
    return cases


def _waits(result: Result) -> Finding:
    cases = [case.parameters for case in _group(result, FORMS)]
    inside, of = inside_intervals(cases)
    reached = f"{inside} of {of} figures"
    return Finding(reached, "closed forms", inside == of, BATCHES)


def _crossovers(most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        cases = [case.parameters for case in _group(result, CROSSOVER)]
        computed, simulated = (
            max(abs(case[name] / case["published"] - 1) for case in cases) for name in ("ours", "simulated")
        )
        told = f"{computed:.1%} at worst of {len(cases)} by the closed forms, {simulated:.1%} simulated"
        return Finding(told, "published loads", max(computed, simulated) <= most, BATCHES)

    return find


def _search(result: Result) -> Finding:
    [case] = _group(result, SEARCH)
    seconds, most = case.parameters["seconds_to_search"], case.parameters["target_s"]
    return Finding(f"{median(seconds):.1f} s, {max(seconds):.1f} at worst", "", max(seconds) <= most, len(seconds))


def _predicted(group: str, mean: float, worst: float) -> Callable[[Result], Finding]:
    """Rounds of these are the rates: each is a measurement of its own."""

    def find(result: Result) -> Finding:
        errors = [case.parameters["error"] for case in _group(result, group)]
        found = sum(errors) / len(errors), max(errors)
        reached = f"{found[0]:.1f} points in the mean of {len(errors)} rates, {found[1]:.1f} at worst"
        return Finding(reached, "measured attainment", found[0] <= mean and found[1] <= worst, len(errors))

    return find


def _knees(most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        told, good = [], True
        cases = [case.parameters for case in _group(result, "knee")]
        for ratio in dict.fromkeys(case["ratio"] for case in cases):
            off = [abs(case["knee"] / case["alpha"] - 1) for case in cases if case["ratio"] == ratio]
            near = sum(each <= most for each in off)
            told.append(f"KV {ratio} x weights: {near} of {len(off)} rates, {max(off):.0%} at worst")
            good = good and near >= 4
        return Finding("; ".join(told), "alpha* from the link and the step of the same run", good)

    return find


def _step(most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        cases = [case.parameters for case in _group(result, "knee")]
        worst = {case["ratio"]: 0.0 for case in cases}
        for case in cases:
            worst[case["ratio"]] = max(worst[case["ratio"]], case["worst_to_max"])
        told = ", ".join(f"KV {ratio} x weights {each:.2f} x" for ratio, each in worst.items())
        return Finding(told, "the longer of copying and computing", max(worst.values()) <= most)

    return find


PLANNING_CLAIMS: Final = (
    Claim(
        _MODULE,
        "simulated waits of a million arrivals, utilisation 0.1 … 0.9, three cases: mean, P90 and P99 within "
        f"{INTERVALS}",
        SIMULATOR,
        "",
        _waits,
    ),
    Claim(
        _MODULE,
        "crossover of tensor and pipeline parallelism, within 2 % of the published loads",
        SIMULATOR,
        "",
        _crossovers(0.02),
    ),
    Claim(_MODULE, "a plan for 32 GPUs, all degrees, ≤ 60 s on two cores", SIMULATOR, "", _search),
    Claim(
        _MODULE,
        "attainment predicted for one engine: ≤ 5 points off in the mean, ≤ 10 at worst",
        PREDICTED,
        "",
        _predicted(COLOCATED, 5, 10),
    ),
    Claim(
        _MODULE,
        "attainment predicted for prefill and decode apart: ≤ 5 points off in the mean, ≤ 10 at worst",
        PREDICTED_APART,
        "",
        _predicted(AS_IT_RUNS, 5, 10),
    ),
    Claim(
        _PIPELINE_MODULE,
        "KV pipeline: the knee within 10 % of alpha* at 4 rates of the link or more, for three ratios of KV to weights",
        PIPELINE,
        "",
        _knees(0.10),
    ),
    Claim(
        _PIPELINE_MODULE,
        "KV pipeline, one layer ahead: a step ≤ 1.05 x the longer of copying and computing",
        PIPELINE,
        "",
        _step(1.05),
    ),
)
