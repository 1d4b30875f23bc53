"""Compares the simulator's predictions for disaggregated prefill/decode with real engines, from a profile of engines
that run as a pair.

Like `bench_predicted`, but the engine is profiled with the connector, while a store receives its blocks and the other
engine runs (`kvstore plan profile --beside`). So the profile includes how much these processes slow each other. The
store, the proxy and the load generator share the decode engine's core.

Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.planning.bench_predicted import (
    INPUT,
    OUTPUT,
    SCALE_TPOT,
    SCALE_TTFT,
    STEP,
    compare,
    degree_prefill,
    idle,
    measure_profile,
)
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, save_model
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.served import engine, proxy

AS_IT_RUNS: Final = "apart, profiled beside each other"
REQUESTS: Final = 150
SHARES: Final = (0.3, 0.5, 0.65, 0.8, 0.95)  # request rates, as shares of a prefill engine's highest rate


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each rate; default: %(default)s")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", 1, _options)
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 1
    model = ENGINE_MODELS["tiny" if benchmark.quick else "mid"]
    weights = save_model(model)
    requests = 20 if benchmark.quick else benchmark.options.requests
    prefill_core, decode_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {decode_core})  # and of all processes started later, except the prefill engine
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        endpoint = stack.enter_context(kvstore_server(2 << 30))
        urls = [
            stack.enter_context(engine(weights, core, scratch / f"{core}.log", endpoint, *STEP))
            for core in (prefill_core, decode_core)
        ]
        profile = scratch / "profile.json"
        found = measure_profile(benchmark, urls[0], model, profile, "--beside", urls[1])
        [degree] = found["degrees"]
        ttft, tpot, _ = idle(degree)
        front = stack.enter_context(proxy(endpoint, urls[:1], urls[1:], "split"))
        rates = [share / degree_prefill(degree) for share in SHARES]
        slo = SCALE_TTFT * ttft, SCALE_TPOT * tpot
        placement = ("--prefill", "1,1,1", "--decode", "1,1,1", "--gpus-per-node", "2")
        compare(benchmark, AS_IT_RUNS, front, profile, rates, slo, requests, *placement)
    benchmark.finish(profile=found, input_tokens=INPUT, output_tokens=OUTPUT, requests=requests, model=model.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
