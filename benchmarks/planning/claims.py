"""The targets of the planner."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

from benchmarks.planning.tables import (
    INTERFERENCE,
    INTERVALS,
    PREDICTED,
    PREDICTED_APART,
    SIMULATOR,
    inside_intervals,
)
from benchmarks.planning.test_interference import APART as SEPARATED
from benchmarks.planning.test_interference import NO_PROMPT, WHOLE
from benchmarks.planning.test_predicted import COLOCATED
from benchmarks.planning.test_predicted_apart import AS_IT_RUNS
from benchmarks.planning.test_simulator import BATCHES, CROSSOVER, FORMS, SEARCH
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
    """Rounds of these are the rates: each is a measurement of its own."""

    def find(result: Result) -> Finding:
        errors = [case.parameters["error"] for case in result.measured_group(group)]
        found = sum(errors) / len(errors), max(errors)
        reached = f"{found[0]:.1f} points in the mean of {len(errors)} rates, {found[1]:.1f} at worst"
        return Finding(reached, "measured attainment", found[0] <= mean and found[1] <= worst, len(errors))

    return find


def _by_length(ratios: dict[int, float]) -> str:
    return ", ".join(f"{tokens} tokens {ratio:.2f} x" for tokens, ratio in ratios.items())


def _longest_gaps(result: Result, way: str) -> dict[int, float]:
    """By the prompt's length."""
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
        "simulated waits of a million arrivals, utilisation 0.1 … 0.9, three cases: mean, P90 and P99 within "
        f"{INTERVALS}",
        SIMULATOR, _waits,
    ),
    Claim("crossover of tensor and pipeline parallelism, within 2 % of the published loads",
        SIMULATOR, _crossovers(0.02),
    ),
    Claim("a plan for 32 GPUs, all degrees, ≤ 60 s on two cores", SIMULATOR, _search),
    *(
        Claim(
            f"attainment predicted for {engines}: ≤ 5 points off in the mean, ≤ 10 at worst",
            benchmark,
            _predicted(way, 5, 10),
        )
        for engines, benchmark, way in (
            ("one engine", PREDICTED, COLOCATED),
            ("prefill and decode apart", PREDICTED_APART, AS_IT_RUNS),
        )
    ),
    Claim(
        "one prefill of 128 to 4096 tokens beside a batch that decodes, apart: the batch's longest gap ≤ 1.5 x the "
        "longest of as long without a prompt",
        INTERFERENCE, _gaps(1.5),
    ),
    Claim("the same, apart: the prompt's first token ≤ 1.1 x as late as from one engine that prefills whole prompts",
        INTERFERENCE, _first_tokens(1.1),
    ),
)
# fmt: on
