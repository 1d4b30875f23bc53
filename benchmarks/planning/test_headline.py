"""How much more do prefill and decode apart serve than engines that do both? DistServe's headline, simulated.

Its paper says up to 7.4 times the rate, or 12.6 times tighter SLOs, than vLLM of 2023, which prefilled whole prompts
between steps of decoding. Here both are simulated with published times (A100-80G): the best placement apart with
DistServe's, and the best placement of engines that do both, with vLLM's of 2023 and whole prompts, and with DistServe's
times and prompts in chunks, as engines do today. For each workload of the paper:

* *rate*: the goodput a GPU of each.
* *SLO scale*: both SLOs are multiplied by the smallest factor that each still holds, at the same rate a GPU: that at
  which the engine with whole prompts just holds them at `SCALE`.

Transfers take no time and SLOs count apart, as DistServe counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from benchmarks.planning.test_simulator import DOCUMENTED, FREE, OPT13, OPT66, WORKLOADS
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import Links, Pool
from kvstore_serving.planning.goodput import Crew, Goal, attained, crew
from kvstore_serving.planning.placement import Placement
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
STEPS: Final = 8  # of a bisection of its logarithm: the factor is known to 2 %
PLACES: Final = {OPT13: (1, 4), OPT66: (2, 8)}  # nodes, and GPUs of each, by profile


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
        [Pool(read_profile(profile), nodes, gpus)],
        Links("direct", inside_bytes_per_s=FREE, node_bytes_per_s=FREE),
        Synthetic(Lengths(inputs, 1.0), Lengths(outputs, 1.0)),
        Goal(Slo(ttft_s, tpot_s), 90, apart=True),
        None,
        chunk_tokens=CHUNK,
        seeds=(0,),
    )
    old = replace(asked, pools=[Pool(read_profile(f"{profile}-vllm"), nodes, gpus)], chunk_tokens=0)
    ways = {APART: asked, WHOLE: old, CHUNKS: asked}
    looser = Goal(Slo(SCALE * ttft_s, SCALE * tpot_s), 90, apart=True)
    found: dict[str, Placement] = {}
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
        if common:  # else it holds twice the SLOs at no rate
            for way, placement in found.items():
                scale = _tightest(ways[way], placement, common * placement.gpus)
                scales |= {way: scale} if scale is not None else {}
    degrees = {way: _spell(placement) for way, placement in found.items()}
    console().print(f"{name}: requests/s a GPU {rates}, SLO scale at {common} {scales}, {degrees}")
    benchmark.found(name, group=HEADLINE, rate_rps=rates, slo_scale=scales, scale_rps=common, degrees=degrees)


def _tightest(question: Question, placement: Placement, rate_rps: float) -> float | None:
    """-> the smallest factor of both SLOs that a placement holds at a rate, `LEAST` or more; None: it does not hold the
    looser ones."""
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


def _spell(placement: Placement) -> dict[str, list[int]]:
    return {
        phase: [engines.shape.tp, engines.shape.pp, engines.instances] for phase, engines in placement.named.items()
    }


if __name__ == "__main__":
    main()
