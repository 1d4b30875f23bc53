"""The targets of the KV pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from benchmarks.kv_pipeline.bench_pipeline import KNEE
from benchmarks.kv_pipeline.bench_tokens import RESIDENT, TOKENS
from benchmarks.kv_pipeline.rig import FETCHED, RATIOS
from benchmarks.kv_pipeline.tables import (
    PIPELINE,
    PIPELINE_TOKENS,
    best_batch,
    planned_batch,
    planned_step,
    rates_by_batch,
)
from benchmarks.render.ledger import Claim, Finding
from benchmarks.results_reader import Result

Find = Callable[[Result], Finding]


def _by_ratio(
    within: Callable[[dict[str, Any]], float], most: float, spec: str, unit: str, limit: str, need: int | None
) -> Find:
    """Count the rates of the link at which a figure is within a bound, for each ratio of KV to weights. need: the
    required number; all if None."""

    def find(result: Result) -> Finding:
        cases = [case.parameters for case in result.measured_group(KNEE)]
        told, good = [], True
        for ratio in dict.fromkeys(case["ratio"] for case in cases):
            found = [within(case) for case in cases if case["ratio"] == ratio]
            near = sum(each <= most for each in found)
            told.append(f"KV {ratio} x weights: {near} of {len(found)} rates, {max(found):{spec}}{unit} at worst")
            good = good and near >= (len(found) if need is None else need)
        if need is not None and {case["ratio"] for case in cases} != set(RATIOS):
            raise KeyError("a ratio was not measured")
        return Finding("; ".join(told), limit, good)

    return find


def _knees(most: float) -> Find:
    limit = "alpha* from the link and the step of the same run"
    return _by_ratio(lambda case: abs(case["knee"] / case["alpha"] - 1), most, ".0%", "", limit, 4)


def _step(most: float) -> Find:
    limit = "the longer of copying and computing"
    return _by_ratio(lambda case: case["worst_to_max"], most, ".2f", " x", limit, None)


def _tokens(bound: float, gain: float) -> Find:
    def find(result: Result) -> Finding:
        told, gains = [], []
        for case in (each.parameters for each in result.measured_group(TOKENS)):
            by_batch = rates_by_batch(case, FETCHED)
            step_s, alone = by_batch[RESIDENT]
            batch, rate = best_batch(by_batch, bound * step_s)
            gains.append(rate / alone)
            told.append(f"{case['link_bytes_per_s'] / 1e9:.2f} GB/s: batch {batch}, {rate / alone:.2f} x")
        good = sum(each >= gain for each in gains) >= 3
        return Finding("; ".join(told), f"batch {RESIDENT}, nothing lent", good)

    return find


def _as_planned(most: float) -> Find:
    def find(result: Result) -> Finding:
        told, good = [], True
        for case in (each.parameters for each in result.measured_group(TOKENS)):
            _, batch = planned_batch(case)
            off = rates_by_batch(case, FETCHED)[batch][0] / planned_step(case, batch) - 1
            told.append(f"{case['link_bytes_per_s'] / 1e9:.2f} GB/s: batch {batch}, step {off:+.0%}")
            good = good and off <= most
        return Finding("; ".join(told), "the step of the plan", good)

    return find


# fmt: off
PIPELINE_CLAIMS: Final = (
    Claim(
        "KV pipeline: the knee within 10 % of alpha* at 4 or more rates of the link, for three ratios of KV to weights",
        PIPELINE, _knees(0.10),
    ),
    Claim("KV pipeline, one layer ahead: a step ≤ 1.05 x the longer of copying and computing", PIPELINE, _step(1.05)),
    Claim("KV pipeline, fixed resident bytes: TPOT ≤ 1.25 x and tokens/s ≥ 1.05 x at 3 or more rates of the link",
        PIPELINE_TOKENS, _tokens(1.25, 1.05),
    ),
    Claim(
        "KV pipeline, fixed resident bytes: a step of the batch that `plan pipeline` computes ≤ 1.1 x the planned one",
        PIPELINE_TOKENS, _as_planned(0.1),
    ),
)
# fmt: on
