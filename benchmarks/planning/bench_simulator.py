"""Compares the planner's simulator with closed forms and with DistServe's published figures, and measures the time of a
search.

* *Closed forms*: a million arrivals at each utilisation, at one device, at a pipeline of two (inter-op), and at two
  devices that share every prompt (intra-op, speed-up 1.7). The simulated and the exact mean wait are compared, and the
  share of waits up to the exact P90 and P99, with intervals from the means of batches. (The mean of the batches' own
  percentiles would be biased, because a batch is short compared with the time for which a queue remembers its state.
  And P90 jumps where nine of ten requests do not wait.)
* *Crossovers*: the rate from which inter-op has a lower mean TTFT than intra-op, by the closed forms, and by simulating
  both a little below and a little above it.
* *DistServe*: the workloads of its paper, with the coefficients that its simulator was shipped with. Of its prompts and
  answers only the mean lengths are known; here, lengths are log-normal with a coefficient of variation of 1, or all
  equal. Each case changes one thing. DistServe shipped no times of OPT-175B, so these are scaled from those of 66B.
* *Search*: a plan for 32 GPUs with all degrees that the profile has, made several times.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np
from rich.table import Table

from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.load.report import Slo
from kvstore_serving.planning import queueing
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.goodput import Crew, Goal, Goodput, crew
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape
from kvstore_serving.planning.plan import make_plan
from kvstore_serving.planning.profile import DecodeTimes, Degree, PrefillTimes, Profile, read_profile
from kvstore_serving.planning.search import NothingFits, Question, best, measured, rate_phases
from kvstore_serving.planning.simulator import Fleet, simulate
from kvstore_serving.planning.workload import Lengths, Synthetic

FORMS: Final = "closed forms"
CROSSOVER: Final = "crossover"
DISTSERVE: Final = "DistServe"
SEARCH: Final = "search"
ARRIVALS: Final = 1_000_000
QUICK_ARRIVALS: Final = 20_000
BATCHES: Final = 40
LOADS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SPEEDUP: Final = 1.7
ROUNDING: Final = 1e-6  # in services: the rounding of times in a run that is a million services long
# All intervals together must hold with a probability of 95 %: of 81 intervals of 95 % each, four would fail by chance.
T_SINGLE: Final = 2.023  # Student's t, 39 degrees of freedom, 95 %
T_ALL: Final = 3.77  # the same, 1 - 0.05 / 81
CROSSOVERS: Final = {1.2: 0.43, 1.5: 0.94, 1.8: 1.43, 1.9: 1.63}
AROUND: Final = 0.04  # how far below and above a crossover both are simulated
CROSSOVER_ARRIVALS: Final = 250_000
SEARCHES: Final = 5
SEARCH_TARGET_S: Final = 60.0
FREE: Final = 1e15  # bytes/s: transfers take no time


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__ or "", 1)
    _closed_forms(benchmark)
    _crossovers(benchmark)
    with crew(lambda done, of: None) as workers:
        for workload in WORKLOADS[:1] if benchmark.quick else WORKLOADS:
            _distserve(benchmark, workers, *workload)
        _search(benchmark, workers)
    benchmark.finish(arrivals=QUICK_ARRIVALS if benchmark.quick else ARRIVALS)


# ---- closed forms ------------------------------------------------------------------------------------------------


def _unit_profile(speedup: float) -> Profile:
    """Return an engine whose prefill takes a second; two devices that share it are `speedup` times as fast."""
    degrees = [
        Degree(tp, PrefillTimes(1 / factor, 0.0, 0.0), [DecodeTimes(1.0, 0.0, 0.0)], {1: 10**9, 2: 10**9})
        for tp, factor in ((1, 1.0), (2, speedup))
    ]
    return Profile("unit", "unit", "none", "made for this", False, 1, degrees, stage_s=0.0)


def _unit_fleet(shape: Shape, speedup: float) -> Fleet:
    pool, placement = NodePool(_unit_profile(speedup), 1, 2), EnginePlacement(prefill=Engines(shape, 1))
    return Fleet([pool], NetworkLinks(), placement, batch_tokens=1)


def waits(case: tuple[str, float, int]) -> dict[str, dict[str, float]]:
    """Return for the mean, P90 and P99 of the wait: the values `found` and `expected`, their difference (`off`), and
    the standard error of this difference over the batches. For percentiles, `off` is the difference of the shares of
    waits up to the expected value."""
    kind, load, arrivals = case
    shape, occupied, form = FORM[kind]
    expected = form(load / occupied).wait_s
    made = Synthetic(Lengths(1), Lengths(1)).make(round(arrivals * 1.25), 7)
    run = simulate(_unit_fleet(shape, SPEEDUP), made, load / occupied)
    waited = run.ttft_s[: len(run.ttft_s) // BATCHES * BATCHES] - min(run.ttft_s)
    batches = waited.reshape(BATCHES, -1)
    off = {"mean": batches.mean(axis=1) - expected.mean}
    found = {"mean": float(waited.mean())}
    for percentile in (90, 99):
        name = f"p{percentile}"
        within = batches <= getattr(expected, name) + ROUNDING
        off[name] = within.mean(axis=1) - percentile / 100
        found[name] = float(np.percentile(waited, percentile))
    return {
        name: {
            "found": found[name],
            "expected": getattr(expected, name),
            "off": float(values.mean()),
            "error": float(values.std(ddof=1)) / math.sqrt(BATCHES),
        }
        for name, values in off.items()
    }


# The seconds for which a prompt of one second occupies the first stage, and the closed form for a rate.
FORM: Final[dict[str, Any]] = {
    "one device": (Shape(1, 1), 1.0, lambda rate: queueing.one_device(1.0, rate)),
    "inter-op, two stages": (Shape(1, 2), 0.5, lambda rate: queueing.inter_op(1.0, rate, 2)),
    "intra-op, K = 1.7": (Shape(2, 1), 1 / SPEEDUP, lambda rate: queueing.intra_op(1.0, rate, SPEEDUP)),
}


def _closed_forms(benchmark: Benchmark) -> None:
    arrivals = QUICK_ARRIVALS if benchmark.quick else ARRIVALS
    cases = [(kind, load, arrivals) for kind in FORM for load in LOADS]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores) as executor, benchmark.steps(f"{arrivals} arrivals", len(cases)) as step:
        for (kind, load, _), found in zip(cases, executor.map(waits, cases), strict=True):
            step()
            benchmark.found(f"{kind}, utilisation {load:g}", group=FORMS, kind=kind, load=load, waits=found)
    table = Table(
        "case", "mean wait", "closed form", "P90", "closed form", "P99", "closed form", title="Waits, services"
    )
    for case in benchmark.cases:
        values = case.parameters["waits"].values()
        table.add_row(case.name, *(f"{each[name]:.4f}" for each in values for name in ("found", "expected")))
    console().print(table)


def crossing(case: tuple[float, int]) -> tuple[float, float]:
    """Return the rate above which inter-op is faster, interpolated between a rate below and a rate above it, and its
    standard error. Inter-op and intra-op get the same arrivals."""
    speedup, arrivals = case
    made = Synthetic(Lengths(1), Lengths(1)).make(arrivals, 7)
    near = queueing.crossover(speedup)
    rates = near * (1 - AROUND), near * (1 + AROUND)
    slower, errors = [], []  # the seconds by which intra-op's first tokens are later
    for rate in rates:
        intra, inter = (
            simulate(_unit_fleet(shape, speedup), made, rate).ttft_s for shape in (Shape(2, 1), Shape(1, 2))
        )
        batches = (intra - inter)[: len(intra) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
        slower.append(float(batches.mean()))
        errors.append(float(batches.std(ddof=1)) / math.sqrt(BATCHES))
    slope = (slower[1] - slower[0]) / (rates[1] - rates[0])
    return rates[0] - slower[0] / slope, max(errors) / slope


def _crossovers(benchmark: Benchmark) -> None:
    arrivals = QUICK_ARRIVALS if benchmark.quick else CROSSOVER_ARRIVALS
    cases = [(speedup, arrivals) for speedup in CROSSOVERS]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        for (speedup, _), (found, error) in zip(cases, executor.map(crossing, cases), strict=True):
            closed, published = queueing.crossover(speedup), CROSSOVERS[speedup]
            console().print(f"K = {speedup:g}: crossover {closed:.3f}, simulated {found:.3f} ± {error:.4f}")
            benchmark.found(f"K = {speedup:g}", group=CROSSOVER, published=published, ours=closed, simulated=found,
                simulated_error=error,
            )  # fmt: skip


# ---- DistServe's figures -----------------------------------------------------------------------------------------

OPT13: Final = "opt-13b-a100-80g"
OPT66: Final = "opt-66b-a100-80g"
OPT175: Final = "opt-175b, scaled from 66B"
# DistServe shipped no times of OPT-175B, only the tokens that fit its memory (max_num_tokens.csv): tp -> pp -> tokens.
# For tp 1 and 6 there are no times of 66B to scale.
_TOKENS_175: Final = {
    2: {3: 26208, 4: 59536, 6: 126160, 8: 192800},
    3: {2: 26208, 3: 76192, 4: 126160, 6: 226112, 8: 326064},
    4: {2: 59520, 3: 126160, 4: 192800, 6: 326064, 8: 459328},
    8: {1: 59520, 2: 192784, 3: 326048, 4: 459328, 6: 725856, 8: 992400},
}
_WEIGHTS_175: Final = 174.6 / 65.7  # parameters of 175B and 66B: scales computing and reading weights
_CACHE_175: Final = 96 * 12288 / (64 * 9216)  # layers times hidden size: scales attention and reading the KV cache
DOCUMENTED: Final = "13B, ShareGPT, its documented example"
# name, profile, nodes, mean prompt and answer, TTFT, TPOT, published placement (prefill tp, pp; decode tp, pp), and
# published goodput for each GPU in requests/s.
WORKLOADS: Final[
    Sequence[tuple[str, str, int, int, int, float, float, tuple[int, int, int, int] | None, float | None]]
] = (
    (DOCUMENTED, OPT13, 1, 755, 200, 0.2, 0.1, (2, 1, 1, 1), 1.56),
    ("13B, ShareGPT", OPT13, 4, 755, 200, 0.25, 0.1, (2, 1, 1, 1), None),
    ("66B, ShareGPT", OPT66, 4, 755, 200, 0.4, 0.1, (4, 1, 2, 2), None),
    ("66B, HumanEval", OPT66, 4, 171, 98, 0.125, 0.2, None, None),
    ("66B, LongBench", OPT66, 4, 1738, 91, 15.0, 0.15, None, None),
    ("175B, ShareGPT, times scaled from 66B", OPT175, 4, 755, 200, 4.0, 0.2, (3, 3, 4, 3), None),
)


def _profile(name: str) -> Profile:
    return _scaled_to_175b(read_profile(OPT66)) if name == OPT175 else read_profile(name)


def _scaled_to_175b(small: Profile) -> Profile:
    """Return OPT-175B with the times of OPT-66B, each scaled by the ratio of the work to compute or the bytes to
    read."""
    degrees = [
        Degree(
            tp,
            PrefillTimes(
                of.prefill.fixed_s * _WEIGHTS_175,
                of.prefill.per_token_s * _WEIGHTS_175,
                of.prefill.per_token_squared_s * _CACHE_175,
            ),
            [
                DecodeTimes(
                    each.fixed_s * _WEIGHTS_175,
                    each.per_context_token_s * _CACHE_175,
                    each.per_request_s * _WEIGHTS_175,
                    each.from_batch,
                )
                for each in of.decode
            ],
            tokens,
        )
        for tp, tokens in _TOKENS_175.items()
        for of in (small.degree(tp),)
    ]
    kv_bytes = round(small.kv_bytes_per_token * _CACHE_175)
    return Profile(OPT175, "facebook/opt-175b", small.gpu, small.source, False, kv_bytes, degrees)


def _distserve(
    benchmark: Benchmark,
    workers: Crew,
    name: str,
    profile: str,
    nodes: int,
    inputs: int,
    outputs: int,
    ttft: float,
    tpot: float,
    published: tuple[int, int, int, int] | None,
    published_rps: float | None,
) -> None:
    pool = NodePool(_profile(profile), nodes, 4 if nodes == 1 else 8)
    asked = Question(
        [pool],
        NetworkLinks("direct", inside_bytes_per_s=FREE, node_bytes_per_s=FREE),
        Synthetic(Lengths(inputs, 1.0), Lengths(outputs, 1.0)),
        Goal(Slo(ttft, tpot), 90, apart=True),
        None,
        seeds=(0, 1, 2),
    )
    variants = {
        "as DistServe counts": asked,
        "both SLOs of one request": replace(asked, goal=replace(asked.goal, apart=False)),
        "and through the store, 100 Gbit/s a node": replace(
            asked,
            goal=replace(asked.goal, apart=False),
            links=NetworkLinks("store", node_bytes_per_s=12.5e9, store_nodes=1000),
        ),
        "and half of each prompt in the store": replace(
            asked,
            goal=replace(asked.goal, apart=False),
            links=NetworkLinks("store", node_bytes_per_s=12.5e9, store_nodes=1000),
            recipe=Synthetic(Lengths(inputs, 1.0), Lengths(outputs, 1.0), hit_rate=0.5),
        ),
        "as DistServe counts, all lengths alike": replace(asked, recipe=Synthetic(Lengths(inputs), Lengths(outputs))),
    }
    for variant, question in variants.items():
        begin = time.perf_counter()
        kept: dict[str, Any] = {"group": DISTSERVE, "workload": name, "variant": variant, "published": published}
        kept["published_rps"] = published_rps
        try:
            phases = rate_phases(replace(question, goal=replace(question.goal, apart=False)), workers)
            answer = best(question, phases, workers)
            kept |= _spell(answer.placement, answer.goodput.per(answer.placement.gpus))
        except NothingFits as error:
            kept["none"] = str(error)
        if published is not None:
            kept["theirs"] = _theirs(question, published, workers)
        benchmark.found(f"{name}: {variant}", seconds_to_search=time.perf_counter() - begin, **kept)
        console().print(name, variant, {key: kept.get(key) for key in ("ours", "ours_rps", "theirs", "none")})


def _theirs(question: Question, published: tuple[int, int, int, int], workers: Crew) -> float:
    """Return the goodput for each GPU of the published degrees, with the best number of decode engines for each prefill
    engine."""
    prefill, decode = Shape(*published[:2]), Shape(*published[2:])
    found = []
    for prefills, decodes in ((1, 1), (1, 2), (2, 1), (1, 3)):
        placement = EnginePlacement(Engines(prefill, prefills), Engines(decode, decodes))
        if question.fleet(placement).nodes is not None:
            found.append(measured(question, placement, workers).value / placement.gpus)
    return max(found)


def _spell(placement: EnginePlacement, goodput: Goodput) -> dict[str, Any]:
    prefill, decode = placement.prefill, placement.decode
    assert prefill is not None
    assert decode is not None
    return {
        "ours": [prefill.shape.tp, prefill.shape.pp, decode.shape.tp, decode.shape.pp],
        "instances": [prefill.instances, decode.instances],
        "ours_rps": goodput.value,
        "ours_ci95": goodput.ci95,
    }


def _search(benchmark: Benchmark, workers: Crew) -> None:
    """Time a whole plan for 32 GPUs."""
    question = Question(
        [NodePool(read_profile(OPT66), 4, 8)],
        NetworkLinks(),
        Synthetic(Lengths(755, 1.0), Lengths(200, 1.0)),
        Goal(Slo(0.4, 0.1), 90),
        10.0,
    )
    seconds = []
    for _ in range(1 if benchmark.quick else SEARCHES):
        begin = time.perf_counter()
        plan = make_plan(question, workers)
        seconds.append(time.perf_counter() - begin)
        told = f"{plan.gpus} GPUs, {plan.goodput_rps:.3g} requests/s"
        console().print(f"a plan for 32 GPUs: {seconds[-1]:.1f} s, {told}")
    benchmark.found("32 GPUs, 66B", group=SEARCH, seconds_to_search=seconds, gpus=32, target_s=SEARCH_TARGET_S)


if __name__ == "__main__":
    main()
