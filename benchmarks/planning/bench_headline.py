"""Simulates DistServe's headline: how many more requests disaggregated prefill/decode serves than colocated engines.

Its paper claims up to 7.4 times the rate, or 12.6 times tighter SLOs, compared with vLLM of 2023, which prefilled whole
prompts between decode steps. Here both are simulated with published times (A100-80G). The best P/D placement has
DistServe's times. The best placement of colocated engines has vLLM's times of 2023 and whole prompts, or DistServe's
times and chunked prefill, as engines do today. For each workload of the paper:

* *rate*: the goodput of each placement, divided by its GPUs.
* *SLO scale*: the smallest factor for both SLOs with which each placement still meets them. All placements get the same
  rate for each GPU: the highest at which the engine with whole prompts meets the SLOs times `SCALE`.

Transfers take no time and the two SLOs are counted separately, as DistServe counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from benchmarks.planning.bench_simulator import DOCUMENTED, FREE, OPT13, OPT66, WORKLOADS
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.goodput import Crew, Goal, attained, crew
from kvstore_serving.planning.placement import EnginePlacement
from kvstore_serving.planning.profile import read_profile
from kvstore_serving.planning.search import NothingFits, Question, best, best_colocated, rate_phases
from kvstore_serving.planning.workload import Lengths, Synthetic

HEADLINE: Final = "headline"
APART: Final = "apart"
WHOLE: Final = "whole prompts"
CHUNKS: Final = "prompts in chunks"
CHUNK: Final = 512  # tokens
SCALE: Final = 2.0
LEAST: Final = 1 / 32
STEPS: Final = 8  # steps of a bisection on a logarithmic scale, which finds the factor to 2 %
PLACES: Final = {OPT13: (1, 4), OPT66: (2, 8)}  # the nodes for each profile, and the GPUs of each node


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__ or "", 1, timed=False)
    with crew(lambda done, of: None) as workers:
        some = [each for each in WORKLOADS if each[1] in PLACES and each[0] != DOCUMENTED]
        for name, profile, _, inputs, outputs, ttft, tpot, *_ in some[:1] if benchmark.quick else some:
            _compare(benchmark, workers, name, profile, *PLACES[profile], inputs, outputs, ttft, tpot)
    benchmark.finish(chunk_tokens=CHUNK, scale=SCALE)


def _compare(
    benchmark: Benchmark,
    workers: Crew,
    name: str,
    profile: str,
    nodes: int,
    gpus: int,
    inputs: int,
    outputs: int,
    ttft_s: float,
    tpot_s: float,
) -> None:
    asked = Question(
        [NodePool(read_profile(profile), nodes, gpus)],
        NetworkLinks("direct", inside_bytes_per_s=FREE, node_bytes_per_s=FREE),
        Synthetic(Lengths(inputs, 1.0), Lengths(outputs, 1.0)),
        Goal(Slo(ttft_s, tpot_s), 90, apart=True),
        None,
        chunk_tokens=CHUNK,
        seeds=(0,),
    )
    old = replace(asked, pools=[NodePool(read_profile(f"{profile}-vllm"), nodes, gpus)], chunk_tokens=0)
    ways = {APART: asked, WHOLE: old, CHUNKS: asked}
    looser = Goal(Slo(SCALE * ttft_s, SCALE * tpot_s), 90, apart=True)
    found: dict[str, EnginePlacement] = {}
    rates: dict[str, float] = {}
    for way, question in ways.items():
        try:
            phases = rate_phases(question, workers)
            answer = best(question, phases, workers) if way == APART else best_colocated(question, phases, workers)
        except NothingFits as error:
            console().print(f"{name}, {way}: {error}")
            continue
        if answer is not None:
            found[way] = answer.placement
            rates[way] = answer.goodput.value / answer.placement.gpus
    scales: dict[str, float] = {}
    common = None
    if WHOLE in found:
        at = replace(old, goal=looser)
        [served] = workers.goodputs([(at.fleet(found[WHOLE]), at.recipe, looser, 1.0, 0)])
        common = served / found[WHOLE].gpus
        if common:  # otherwise it meets not even the looser SLOs at any rate
            for way, placement in found.items():
                scale = _tightest(ways[way], placement, common * placement.gpus)
                scales |= {way: scale} if scale is not None else {}
    degrees = {way: _spell(placement) for way, placement in found.items()}
    console().print(f"{name}: requests/s a GPU {rates}, SLO scale at {common} {scales}, {degrees}")
    benchmark.found(name, group=HEADLINE, rate_rps=rates, slo_scale=scales, scale_rps=common, degrees=degrees)


def _tightest(question: Question, placement: EnginePlacement, rate_rps: float) -> float | None:
    """Return the smallest factor of both SLOs, at least `LEAST`, with which a placement meets them at a rate. Return
    None if it does not even meet the SLOs times `SCALE`."""
    low, high = LEAST, SCALE
    slo, fleet = question.goal.slo, question.fleet(placement)

    def holds(factor: float) -> bool:
        goal = replace(question.goal, slo=Slo(factor * slo.ttft_s, factor * slo.tpot_s))
        return attained(fleet, question.recipe, goal, rate_rps, question.seeds[0])

    if not holds(high):
        return None
    for _ in range(STEPS):
        factor = math.sqrt(low * high)
        low, high = (low, factor) if holds(factor) else (factor, high)
    return high


def _spell(placement: EnginePlacement) -> dict[str, list[int]]:
    return {
        phase: [engines.shape.tp, engines.shape.pp, engines.instances] for phase, engines in placement.named.items()
    }


if __name__ == "__main__":
    main()
