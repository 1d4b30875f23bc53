"""Simulates, with published times, whether one engine's GPUs are better used for tensor or for pipeline parallelism.

*Prefill engines*: the mean time to the first token by the rate of prompts. *Decode engines*: the time per token and the
tokens a second of full batches. DistServe argues with both figures. These are computed with the coefficients that its
simulator was shipped with.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from benchmarks.planning.bench_simulator import FREE, OPT13, OPT66
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape
from kvstore_serving.planning.profile import read_profile
from kvstore_serving.planning.simulator import Fleet, simulate
from kvstore_serving.planning.workload import Lengths, Synthetic

PREFILLS: Final = "prefill engines"
DECODES: Final = "decode engines"
PREFILL_TOKENS: Final = 512
# profile, shapes with the same number of GPUs, prompts a second
PREFILL_DEGREES: Final = (
    (OPT13, (Shape(2, 1), Shape(1, 2)), (2, 6, 10, 14, 17, 20, 24)),
    (OPT13, (Shape(4, 1), Shape(2, 2), Shape(1, 4)), (4, 10, 20, 25, 30, 40, 48)),
    (OPT66, (Shape(4, 1), Shape(2, 2)), (1, 2, 4, 6, 7, 8, 9)),
)
SATURATED: Final = 0.995  # share of the time for which it is busy
DECODE_CONTEXT: Final = 256  # tokens at the beginning
DECODE_TOKENS: Final = 128
DECODE_BATCH: Final = 128  # requests in each stage of a pipeline
DECODE_DEGREES: Final = (
    (OPT13, (Shape(1, 1), Shape(2, 1), Shape(4, 1), Shape(1, 2), Shape(1, 4), Shape(2, 2))),
    (OPT66, (Shape(4, 1), Shape(8, 1), Shape(2, 2), Shape(2, 4), Shape(4, 2))),
)


def _prefill_degrees(benchmark: Benchmark) -> None:
    """Simulate the time to first token by rate, for engines that use the same number of GPUs in different ways."""
    made = Synthetic(Lengths(PREFILL_TOKENS), Lengths(1)).make(2_000 if benchmark.quick else 40_000, 11)
    for profile, shapes, rates in PREFILL_DEGREES:
        pool = NodePool(read_profile(profile), 1, shapes[0].gpus)
        for rate in rates:
            ttft_s = {}
            for shape in shapes:
                run = simulate(Fleet([pool], NetworkLinks(), EnginePlacement(prefill=Engines(shape, 1))), made, rate)
                ttft_s[str((shape.tp, shape.pp))] = (
                    float(run.ttft_s.mean()) if run.busy["prefill"] < SATURATED else None
                )
            name = f"{profile}, {shapes[0].gpus} GPUs, {rate} prompts/s"
            _keep(benchmark, name, group=PREFILLS, profile=profile, gpus=shapes[0].gpus, rate_rps=rate, ttft_s=ttft_s)


def _decode_degrees(benchmark: Benchmark) -> None:
    """Simulate the time per token and the tokens a second of engines with full batches."""
    for profile, shapes in DECODE_DEGREES:
        for shape in shapes:
            pool, batch = NodePool(read_profile(profile), 1, shape.gpus), DECODE_BATCH * shape.pp
            links = NetworkLinks(node_bytes_per_s=FREE, store_bytes_per_s=FREE)
            fleet = Fleet([pool], links, EnginePlacement(decode=Engines(shape, 1)), max_batch=batch)
            made = Synthetic(Lengths(DECODE_CONTEXT), Lengths(DECODE_TOKENS + 1)).make(batch, 13)
            run = simulate(fleet, made, 1e9, warm_up=0)  # all at once
            _keep(
                benchmark, f"{profile}, {shape.tp}, {shape.pp}", group=DECODES, profile=profile, tp=shape.tp,
                pp=shape.pp, tpot_s=float(np.median(run.tpot_s)), tokens_per_s=batch * DECODE_TOKENS / run.duration_s,
            )  # fmt: skip


def _keep(benchmark: Benchmark, name: str, **parameters: Any) -> None:
    console().print(name, {key: value for key, value in parameters.items() if key.endswith("_s")})
    benchmark.found(name, **parameters)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__ or "", 1, timed=False)
    _prefill_degrees(benchmark)
    _decode_degrees(benchmark)
    benchmark.finish()


if __name__ == "__main__":
    main()
