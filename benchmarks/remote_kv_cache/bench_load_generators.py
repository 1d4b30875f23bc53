"""Compares the times that `kvstore load` measures with those of vLLM's own benchmark, which sends the same requests.

There is one engine (`vllm serve`, on one core, without a prefix cache) and one trace of Poisson arrivals. The two
generators, on the other core, replay the trace one after the other. The figures that both report are compared round by
round. If they differ by more than a figure varies between rounds, one of the generators has an error.

Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.remote_kv_cache import vllm_bench
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, EngineModel, save_model
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import environment
from benchmarks.remote_kv_cache.report import case_table, console
from benchmarks.remote_kv_cache.served import engine

OURS: Final = "kvstore load"
THEIRS: Final = "vllm bench serve"
# Figure -> its place in the report of `kvstore load`, and its name in the result of vLLM's benchmark.
FIGURES: Final = {
    "first token, median": (("ttft_s", "p50"), "median_ttft_ms"),
    "first token, p99": (("ttft_s", "p99"), "p99_ttft_ms"),
    "per token, median": (("tpot_s", "p50"), "median_tpot_ms"),
    "between tokens, p99": (("itl_s", "p99"), "p99_itl_ms"),
}
RATE: Final = 3.0  # requests/s
_REQUESTS: Final = 48  # requests in a round


def write_trace(file: Path, seed: int, requests: int) -> None:
    """Write requests with prompts of 100 to 1000 tokens, which have nothing in common, and answers of 8 to 64
    tokens."""
    chooser = random.Random(seed)
    at_s, hashes = 0.0, 0
    lines = []
    for _ in range(requests):
        tokens = chooser.randint(100, 1000)
        own = list(range(hashes, hashes + -(-tokens // vllm_bench.CHUNK)))
        hashes += len(own)
        line = {"timestamp": round(at_s * 1000), "input_length": tokens, "output_length": chooser.randint(8, 64)}
        lines.append(json.dumps({**line, "hash_ids": own}) + "\n")
        at_s += chooser.expovariate(RATE)
    file.write_text("".join(lines), encoding="utf-8")


def _run(command: Sequence[str], core: int) -> str:
    """Run a command. Return its output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def _ours(url: str, model: EngineModel, trace: Path, seed: int, core: int) -> dict[str, float]:
    """Run `kvstore load`. Return its figures in seconds."""
    command = [sys.executable, "-m", "kvstore_cli", "load", "--url", url, "--model", "m", "--trace", str(trace)]
    command += ["--vocab", str(model.vocab_size), "--seed", str(seed), "--slo-ttft", "9", "--slo-tpot", "9", "--json"]
    report = json.loads(_run(command, core))
    if report["failed"]:
        raise RuntimeError(f"{report['failed']} requests of {OURS} failed")
    return {figure: float(report[place[0]][place[1]]) for figure, (place, _) in FIGURES.items()}


def _theirs(url: str, weights: Path, trace: Path, seed: int, core: int, requests: int) -> dict[str, float]:
    """Run vLLM's benchmark. Return its figures in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", vllm_bench.__name__, "--ignore-eos", "--seed", str(seed)]
        command += vllm_bench.bench_arguments(url, "m", weights, trace, requests, result)
        _run(command, core)
        told = json.loads(result.read_text(encoding="utf-8"))
    if told["failed"]:
        raise RuntimeError(f"{told['failed']} requests of {THEIRS} failed")
    return {figure: float(told[name]) / 1e3 for figure, (_, name) in FIGURES.items()}


def measure(benchmark: Benchmark, model: EngineModel, cores: Sequence[int], folder: Path) -> None:
    """Run all rounds."""
    requests = _REQUESTS // (4 if benchmark.quick else 1)
    weights, log = save_model(model), folder / "engine.log"
    seconds: dict[str, dict[str, list[float]]] = {figure: {OURS: [], THEIRS: []} for figure in FIGURES}
    options = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "512")
    turns = 2 * benchmark.rounds + 1
    with engine(weights, cores[0], log, None, *options) as url, benchmark.steps("warming up", turns) as step:
        trace = folder / "trace.jsonl"
        ways: dict[str, Callable[[int], dict[str, float]]] = {
            OURS: lambda seed: _ours(url, model, trace, seed, cores[1]),
            THEIRS: lambda seed: _theirs(url, weights, trace, seed, cores[1], requests),
        }
        write_trace(trace, 0, requests)
        ways[OURS](0)
        step()
        for number in range(1, benchmark.rounds + 1):
            write_trace(trace, number, requests)
            for name in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                step(name, 0)
                for figure, value in ways[name](number).items():
                    seconds[figure][name].append(value)
                step()
    shape, limits = model.to_json(), {OURS: THEIRS}
    for figure, of_tools in seconds.items():
        benchmark.add(figure, of_tools, limits=limits, model=shape, requests=requests, requests_per_s=RATE)


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7)
    cores = sorted(os.sched_getaffinity(0))
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measure(benchmark, ENGINE_MODELS["tiny"], cores, Path(folder))
    for case in benchmark.cases:
        console().print(case_table(case))
    benchmark.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
