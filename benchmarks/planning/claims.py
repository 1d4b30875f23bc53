"""The targets of the planner."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

from benchmarks.planning.bench_interference import APART as SEPARATED
from benchmarks.planning.bench_interference import NO_PROMPT, WHOLE
from benchmarks.planning.bench_predicted import COLOCATED
from benchmarks.planning.bench_predicted_apart import AS_IT_RUNS
from benchmarks.planning.bench_simulator import BATCHES, CROSSOVER, FORMS, SEARCH
from benchmarks.planning.tables import (
    INTERFERENCE,
    INTERVALS,
    PREDICTED,
    PREDICTED_APART,
    SIMULATOR,
    inside_intervals,
)
from benchmarks.render.ledger import Claim, Finding
from benchmarks.results_reader import Result


def _waits(result: Result) -> Finding:
    cases = [case.parameters for case in result.measured_group(FORMS)]
    inside, of = inside_intervals(cases)
    reached = f"{inside} of {of} figures"
    return Finding(reached, "closed forms", inside == of, BATCHES)


def _crossovers(most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        cases = [case.parameters for case in result.measured_group(CROSSOVER)]
        computed, simulated = (
            max(abs(case[name] / case["published"] - 1) for case in cases) for name in ("ours", "simulated")
        )
        told = f"{computed:.1%} at worst of {len(cases)} by the closed forms, {simulated:.1%} simulated"
        return Finding(told, "published loads", max(computed, simulated) <= most, BATCHES)

    return find


def _search(result: Result) -> Finding:
    [case] = result.measured_group(SEARCH)
    seconds, most = case.parameters["seconds_to_search"], case.parameters["target_s"]
    return Finding(f"{median(seconds):.1f} s, {max(seconds):.1f} at worst", "", max(seconds) <= most, len(seconds))


def _predicted(group: str, mean: float, worst: float) -> Callable[[Result], Finding]:
    """Each rate counts as a round, since it is a separate measurement."""

    def find(result: Result) -> Finding:
        errors = [case.parameters["error"] for case in result.measured_group(group)]
        found = sum(errors) / len(errors), max(errors)
        reached = f"{found[0]:.1f} points on average over {len(errors)} rates, {found[1]:.1f} at worst"
        return Finding(reached, "measured attainment", found[0] <= mean and found[1] <= worst, len(errors))

    return find


def _by_length(ratios: dict[int, float]) -> str:
    return ", ".join(f"{tokens} tokens {ratio:.2f} x" for tokens, ratio in ratios.items())


def _longest_gaps(result: Result, way: str) -> dict[int, float]:
    """Return the longest gap for each prompt length."""
    cases = [case.parameters for case in result.measured_group(way)]
    return {case["tokens"]: case["longest_gap_s"] for case in cases}


def _gaps(most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        apart, whole, without = (_longest_gaps(result, way) for way in (SEPARATED, WHOLE, NO_PROMPT))
        ratios = {tokens: gap_s / without[tokens] for tokens, gap_s in apart.items()}
        limits = {tokens: gap_s / without[tokens] for tokens, gap_s in whole.items()}
        return Finding(_by_length(ratios), f"one engine: {_by_length(limits)}", max(ratios.values()) <= most)

    return find


def _first_tokens(most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        whole = {case.parameters["tokens"]: case.parameters["ttft_s"] for case in result.measured_group(WHOLE)}
        cases = [case.parameters for case in result.measured_group(SEPARATED)]
        ratios = {case["tokens"]: case["ttft_s"] / whole[case["tokens"]] for case in cases}
        return Finding(_by_length(ratios), "one engine, whole prompts", max(ratios.values()) <= most)

    return find


# fmt: off
PLANNING_CLAIMS: Final = (
    Claim(
        f"a million simulated arrivals, load 0.1 … 0.9, three cases: mean, P90, P99 within {INTERVALS}",
        SIMULATOR, _waits,
    ),
    Claim("crossover of tensor and pipeline parallelism within 2 % of the published loads",
        SIMULATOR, _crossovers(0.02),
    ),
    Claim("a plan for 32 GPUs with all degrees ≤ 60 s on two cores", SIMULATOR, _search),
    *(
        Claim(
            f"predicted attainment of {engines}: mean error ≤ 5 points, largest error ≤ 10 points",
            benchmark,
            _predicted(way, 5, 10),
        )
        for engines, benchmark, way in (
            ("one engine", PREDICTED, COLOCATED),
            ("P/D", PREDICTED_APART, AS_IT_RUNS),
        )
    ),
    Claim(
        "P/D, one prefill of 128 to 4096 tokens while a batch decodes: longest gap ≤ 1.5 x that without a prompt",
        INTERFERENCE, _gaps(1.5),
    ),
    Claim("P/D, the same prefill: time to first token ≤ 1.1 x that of one engine that prefills whole prompts",
        INTERFERENCE, _first_tokens(1.1),
    ),
)
# fmt: on
