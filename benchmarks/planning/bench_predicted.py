"""Compares the simulator's predictions with real engines: the SLO attainment at rates that were not used for the
profile.

A profile of `vllm serve` on one core is measured first (`kvstore plan profile`). Then requests are sent at a rate, at
random times, to one colocated engine, and to a prefill and a decode engine with a store and the proxy between them.
Each engine has its own core. The simulator gets the same requests at the same times. SLOs are multiples of an idle
engine's times.

Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, EngineModel, save_model
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import environment, kvstore_server
from benchmarks.remote_kv_cache.report import console
from benchmarks.remote_kv_cache.served import engine, proxy

COLOCATED: Final = "one engine"
APART: Final = "prefill and decode apart"
INPUT: Final = 512
OUTPUT: Final = 32
REQUESTS: Final = 120
WARM_UP: Final = 10
STEP: Final = ("--max-num-batched-tokens", "2048")
NO_CACHE: Final = "--no-enable-prefix-caching"
# The rates to compare, as shares of an engine's capacity by its profile.
SHARES: Final = (0.3, 0.5, 0.65, 0.8, 0.95, 1.1)
SCALE_TTFT: Final = 3.0  # SLOs, as multiples of an idle engine's times
SCALE_TPOT: Final = 2.0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-size", choices=sorted(ENGINE_MODELS), default="mid")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each rate; default: %(default)s")


def plan(*arguments: str) -> dict[str, Any]:
    """Run a command of `kvstore plan`. Return its result."""
    command = [sys.executable, "-m", "kvstore_cli", "plan", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", 1, _options)
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 1
    model = ENGINE_MODELS["tiny" if benchmark.quick else benchmark.options.model_size]
    requests = 20 if benchmark.quick else benchmark.options.requests
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        weights = save_model(model)
        profile = scratch / "profile.json"
        with engine(weights, first, scratch / "engine.log", None, *STEP, NO_CACHE) as url:
            found = measure_profile(benchmark, url, model, profile)
            [degree] = found["degrees"]
            ttft, tpot, capacity = idle(degree)
            slo = SCALE_TTFT * ttft, SCALE_TPOT * tpot
            compare(benchmark, COLOCATED, url, profile, [capacity * share for share in SHARES], slo, requests)
        endpoint = stack.enter_context(kvstore_server(1 << 30))
        urls = [
            stack.enter_context(engine(weights, core, scratch / f"{core}.log", endpoint, *STEP))
            for core in (first, second)
        ]
        front = stack.enter_context(proxy(endpoint, urls[:1], urls[1:], "split"))
        apart = 1 / degree_prefill(degree)  # the prompts that a prefill engine can compute in a second
        compare(
            benchmark, APART, front, profile, [apart * share for share in SHARES], slo, requests,
            "--prefill", "1,1,1", "--decode", "1,1,1",
        )  # fmt: skip
        benchmark.finish(
            profile=found, input_tokens=INPUT, output_tokens=OUTPUT, requests=requests, model=model.to_json()
        )
    return 0


def degree_prefill(degree: dict[str, Any]) -> float:
    """Return the seconds of one prefill."""
    prefill = degree["prefill"]
    squares = prefill["per_token_squared_s"] * INPUT**2
    return float(prefill["fixed_s"] + prefill["per_token_s"] * INPUT + squares)


def idle(degree: dict[str, Any]) -> tuple[float, float, float]:
    """Return TTFT and TPOT of a single request, and the requests a second that keep one engine busy."""
    prefill, step = degree_prefill(degree), degree["decode"][0]
    tpot = step["fixed_s"] + step["per_request_s"] + step["per_context_token_s"] * INPUT
    many = 8  # concurrent requests of a busy engine
    each = (step["fixed_s"] + many * (step["per_request_s"] + step["per_context_token_s"] * INPUT)) / many
    return prefill, tpot, 1 / (prefill + OUTPUT * each)


def measure_profile(benchmark: Benchmark, url: str, model: EngineModel, path: Path, *options: str) -> dict[str, Any]:
    """Measure an engine with `kvstore plan profile` and these options. Return the profile."""
    sweep = ["--rounds", "1", "--lengths", "128,512", "--prefill-batches", "1,2", "--decode-batches", "1,4"]
    if not benchmark.quick:
        sweep = ["--rounds", "3", "--lengths", "128,512,1024"]
        sweep += ["--prefill-batches", "1,2", "--decode-batches", "1,2,4,8"]
    found = plan(
        "profile", "--url", url, "--model", "m", "--kv-bytes-per-token", str(model.token_bytes), "--output", str(path),
        "--gpu", "one core", "--vocab", str(model.vocab_size), *sweep, *options,
    )  # fmt: skip
    [degree] = found["degrees"]
    console().print(degree["prefill"], degree["decode"])
    return found


def compare(
    benchmark: Benchmark,
    way: str,
    url: str,
    profile: Path,
    rates: Sequence[float],
    slo: tuple[float, float],
    requests: int,
    *placement: str,
) -> None:
    """Send requests at these rates, and keep the predicted and measured figures."""
    found = plan(
        "verify", "--profile", str(profile), "--url", url, "--model", "m", "--input-tokens", str(INPUT),
        "--output-tokens", str(OUTPUT), "--requests", str(requests), "--warmup", str(WARM_UP),
        "--slo-ttft", str(slo[0]), "--slo-tpot", str(slo[1]), "--vocab", "4096",
        *(word for rate in rates for word in ("--rate", f"{rate:.4g}")),
        *placement,
    )  # fmt: skip
    for each in found["compared"]:
        console().print(
            f"{way}, {each['rate_rps']:.3g} req/s: predicted {each['predicted']:.1%}, measured {each['measured']:.1%}"
        )
        benchmark.found(f"{way}, {each['rate_rps']:.3g} req/s", group=way, **each)
    console().print(f"{way}: mean error {found['mean_error']:.1f} points, worst {found['worst_error']:.1f}")


if __name__ == "__main__":
    sys.exit(main())
