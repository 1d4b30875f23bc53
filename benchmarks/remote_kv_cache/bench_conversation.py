"""Replays a trace of conversations, with and without their shared prefixes, on two colocated engines and with P/D.

`kvstore load` sends the requests of a real trace (Mooncake's format) that fit the model to `kvstore proxy`. The times
of the trace are shortened to give a load that all ways to serve can handle. Behind the proxy are two engines with one
core each: two without a store, each with its own cache; two with one store; or a prefill and a decode engine.
Everything is repeated with prompts of the same lengths that share nothing.

An answer *attains* if its first token and its time per token are both within a multiple of an idle engine's times for
the mean prompt. *Not computed* is the share of the prompts' tokens that the engines found in their own cache or in the
store.

Needs vLLM, two cores and --trace; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.remote_kv_cache.bench_apart import APART, EACH, FIGURES, FIRST, GAP, SCALES, show
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, EngineModel, save_model
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import environment, kvstore_server
from benchmarks.remote_kv_cache.served import engine, proxy
from kvstore_serving.load.trace import TraceLine, read_trace
from kvstore_serving.planning.metrics_page import metrics_of

OWN: Final = "two engines, no store"
STORE: Final = "two engines, one store"
WAYS: Final = (OWN, STORE, APART)
SHARED: Final = "prefixes as in the trace"
UNSHARED: Final = "nothing shared"
MOST_INPUT: Final = 2048
MOST_OUTPUT: Final = 32

_REQUESTS: Final = 64  # counted requests in a round
_WARM_UP: Final = 16  # requests before them, so that there are prefixes to share
_IDLE_REQUESTS: Final = 7
_BUSY: Final = 0.45  # share of the time for which an engine is busy if it computes every prompt
_OPTIONS: Final = (
    "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", "64M", "--enable-prompt-tokens-details",
)  # fmt: skip
_HITS: Final = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
_ASKED: Final = "vllm:prefix_cache_queries_total"


@dataclass(frozen=True)
class Way:
    """One way to serve. `url`: the address of its proxy. `prefill`: the engines that compute prompts."""

    url: str
    prefill: Sequence[str]

    def tokens(self) -> tuple[float, float]:
        """Return how many prompt tokens have been found in a cache so far, and how many have been looked up."""
        found = asked = 0.0
        for url in self.prefill:
            for sample in asyncio.run(metrics_of(url)):
                found += sample.value if sample.name in _HITS else 0.0
                asked += sample.value if sample.name == _ASKED else 0.0
        return found, asked


def _ways(model: EngineModel, weights: Path, scratch: Path, stack: ExitStack) -> dict[str, Way]:
    """Start all ways. All run at the same time; those without requests use no CPU."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    endpoint = stack.enter_context(kvstore_server(4 << 30))

    def engines(name: str, store: str | None) -> list[str]:
        logs = [scratch / f"{name}-{core}.log" for core in cores]
        return [
            stack.enter_context(engine(weights, core, log, store, *_OPTIONS))
            for core, log in zip(cores, logs, strict=True)
        ]

    def front(prefill: Sequence[str], decode: Sequence[str], policy: str) -> str:
        return stack.enter_context(proxy(endpoint, prefill, decode, policy))

    plain, stored = engines("plain", None), engines("stored", endpoint)
    return {
        OWN: Way(front(plain, plain, "colocate"), plain),
        STORE: Way(front(stored, stored, "colocate"), stored),
        APART: Way(front(stored[:1], stored[1:], "split"), stored[:1]),
    }


def _write_traces(lines: Sequence[TraceLine], scratch: Path) -> dict[str, Path]:
    """Write the requests of a round as two traces: one unchanged, and one without shared prefixes."""
    new = count()

    def written(name: str, found: Iterable[TraceLine]) -> Path:
        file = scratch / f"{name}.jsonl"
        file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in found))
        return file

    return {
        SHARED: written("shared", lines),
        UNSHARED: written(
            "unshared", (msgspec.structs.replace(line, hash_ids=[next(new) for _ in line.hash_ids]) for line in lines)
        ),
    }


def _load(url: str, model: EngineModel, seed: int, scratch: Path, *arguments: str) -> list[dict[str, Any]]:
    """Send requests. Return the result lines of those that are counted."""
    output = scratch / "requests.jsonl"
    command = [sys.executable, "-m", "kvstore_cli", "load", "--url", url, "--model", "m", "--seed", str(seed)]
    command += ["--vocab", str(model.vocab_size), "--slo-ttft", "1", "--slo-tpot", "1", "--json"]
    command += ["--output", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    if wrong := [line for line in lines if line["error"]]:
        raise RuntimeError(f"{len(wrong)} of {len(lines)} requests failed, the first one with {wrong[0]['message']}")
    return [line for line in lines if line["counted"]]


@dataclass
class Served:
    """The results of the requests of all rounds that were served in one way."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {figure: [] for figure in FIGURES})
    found_tokens: float = 0.0
    asked_tokens: float = 0.0

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add the results of one more round."""
        self.lines += lines
        later = [line["tpot_s"] for line in lines if line["tpot_s"] is not None]
        gaps = [gap for line in lines for gap in line["itl_s"]]
        self.seconds[FIRST].append(float(np.percentile([line["ttft_s"] for line in lines], 90)))
        self.seconds[EACH].append(float(np.percentile(later, 90)))
        self.seconds[GAP].append(float(np.percentile(gaps, 99)))

    def attaining(self, first_s: float, each_s: float) -> float:
        """Return the share of requests whose two times are at most these."""
        held = [line["ttft_s"] <= first_s and (line["tpot_s"] or 0.0) <= each_s for line in self.lines]
        return float(np.mean(held))


def measure(benchmark: Benchmark, model: EngineModel, rounds: Sequence[Sequence[TraceLine]], scratch: Path) -> None:
    """Run all rounds, each with all ways and both traces."""
    served = {kind: {way: Served() for way in WAYS} for kind in (SHARED, UNSHARED)}
    seeds = count(1)  # a new one each time, so that nothing is cached from before
    with ExitStack() as stack, benchmark.steps("starting engines", len(rounds) * len(WAYS) * len(served)) as step:
        ways = _ways(model, save_model(model), scratch, stack)
        mean = round(float(np.mean([line.input_length for lines in rounds for line in lines])))
        idle = Served()
        idle.add(
            _load(
                ways[OWN].url, model, next(seeds), scratch, "--rate", "0.7", "--requests", str(_IDLE_REQUESTS),
                "--warmup", "2", "--input-tokens", str(mean), "--output-tokens", str(MOST_OUTPUT),
            )
        )  # fmt: skip
        idle_first_s, idle_each_s = (
            float(np.median([line[name] for line in idle.lines])) for name in ("ttft_s", "tpot_s")
        )
        span_s = (rounds[-1][-1].timestamp - rounds[0][0].timestamp) / 1000
        speed = _BUSY / idle_first_s / (sum(map(len, rounds)) / span_s)
        for number, lines in enumerate(rounds):
            for kind, trace in _write_traces(lines, scratch).items():
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    step(f"{kind}: {way}", 0)
                    found, asked = ways[way].tokens()
                    of_way = served[kind][way]
                    of_way.add(
                        _load(
                            ways[way].url, model, next(seeds), scratch, "--trace", str(trace), "--speed", str(speed),
                            "--warmup", str(_WARM_UP), "--max-output-tokens", str(MOST_OUTPUT),
                        )
                    )  # fmt: skip
                    now_found, now_asked = ways[way].tokens()
                    of_way.found_tokens += now_found - found
                    of_way.asked_tokens += now_asked - asked
                    step()
    for kind, of_ways in served.items():
        parameters: dict[str, Any] = {
            "model": model.to_json(),
            "prompts": kind,
            "requests": len(of_ways[OWN].lines),
            "mean_prompt_tokens": mean,
            "speed": speed,
            "idle_first_s": idle_first_s,
            "idle_each_s": idle_each_s,
            "found": {way: each.found_tokens / each.asked_tokens for way, each in of_ways.items()},
            "attained": {
                way: {f"{scale:g}": each.attaining(scale * idle_first_s, scale * idle_each_s) for scale in SCALES}
                for way, each in of_ways.items()
            },
        }
        for figure in FIGURES:
            seconds = {way: each.seconds[figure] for way, each in of_ways.items()}
            benchmark.add(f"{kind}, {figure}", seconds, **parameters, group=figure)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in Mooncake's format, .jsonl or .jsonl.gz")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=3, add_options=_add_options)
    no_trace = "it needs --trace FILE" if benchmark.options.trace is None else ""
    if benchmark.lacks(missing_module("vllm"), missing_cores(), no_trace):
        return 0
    requests = _WARM_UP + _REQUESTS // (10 if benchmark.quick else 1)
    trace = read_trace(benchmark.options.trace)
    rows = zip(trace.at_s, trace.input_tokens, trace.output_tokens, trace.hash_ids, strict=True)
    fitting = (TraceLine(at_s * 1000, *row) for at_s, *row in rows if row[0] <= MOST_INPUT)
    lines = list(islice(fitting, requests * benchmark.rounds))
    if len(lines) < requests * benchmark.rounds:
        benchmark.say(
            f"{benchmark.options.trace}: {len(lines)} requests of at most {MOST_INPUT} tokens; {benchmark.rounds} "
            f"rounds need {requests * benchmark.rounds}"
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        rounds = [lines[begin : begin + requests] for begin in range(0, len(lines), requests)]
        measure(benchmark, ENGINE_MODELS["tiny"], rounds, Path(folder))
    show(benchmark.cases)
    benchmark.finish(most_input_tokens=MOST_INPUT, most_output_tokens=MOST_OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
