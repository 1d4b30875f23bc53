"""Measures the parts of the time of handed-over requests: the prefill engine's queue, the prefill, the way to
the decode engine, that engine's queue, and its first token.

Requests of 1000 tokens arrive as a Poisson process at a prefill engine P and a decode engine D, each on one core; both
get each request at the same time. The times come from the trace files of both engines (docs/tracing.md). *Waits at P*
and *waits at D* last until the engine gives the request blocks; the *prefill* follows. *Way to D* lasts from the end of
the prefill until all blocks are in D's cache, and *first step of D* from then until D's first token. Both include an
engine's work for other requests during that time. D waits for blocks while P computes. So the parts of P and the way to
D follow each other, and *waits at D* overlaps them. The hand-over adds only the way to D, because a colocated engine
waits and computes as well.

Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.remote_kv_cache.bench_hand_over import arrivals, hand_over
from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import (
    ENGINE_MODELS,
    EngineModel,
    add_engine_model_option,
    full_blocks,
)
from benchmarks.remote_kv_cache.engine_process import Answer, Served
from benchmarks.remote_kv_cache.engines import Engine
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case, console, time_text
from kvstore_client.engine.trace_file import read_trace

P_QUEUE: Final = "waits at P"
COMPUTED: Final = "prefill"
WAY: Final = "way to D"
D_QUEUE: Final = "waits at D"
D_STEP: Final = "first step of D"
FIRST: Final = "first token"
PARTS: Final = (P_QUEUE, COMPUTED, WAY, D_QUEUE, D_STEP, FIRST)
PROMPT_TOKENS: Final = 1000
RATES: Final = {"tiny": (1.0, 3.0), "mid": (0.1, 0.3)}  # requests/s for each model
PERCENTILES: Final = tuple(range(0, 101, 5))

_ANSWER_TOKENS: Final = 20
_REQUESTS: Final = {"tiny": 24, "mid": 8}  # requests in a round, for each model
_CHUNK: Final = 512
_MOST_AT_ONCE: Final = 32
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts
_APART_S: Final = 0.1  # both engines get a request within this time

Seconds = npt.NDArray[np.float64]


def requests_of(path: Path, row: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return, for each request id, the begin and the end of its slices on this row, by name."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for part in read_trace(path):
        if part.row == row and part.ended_us is not None:
            found.setdefault(part.trace_id, {})[part.name] = part.began_us / 1e6, part.ended_us / 1e6
    return found


def times_of(
    requests: dict[str, dict[str, tuple[float, float]]], names: Sequence[str], began: float, ended: float, count: int
) -> list[tuple[Seconds, Seconds]]:
    """Return for each name the begins and the ends of these slices, for the `count` requests that arrived between two
    times, in order of arrival."""
    some = sorted((each for each in requests.values() if began <= each["queue"][0] <= ended), key=_came)
    if len(some) != count or any(name not in each for each in some for name in names):
        raise AssertionError(f"{len(some)} requests of {len(requests)} with {', '.join(names)}: expected {count}")
    times = np.array([[each[name] for name in names] for each in some])
    return [(times[:, number, 0], times[:, number, 1]) for number in range(len(names))]


def _came(request: dict[str, tuple[float, float]]) -> float:
    return request["queue"][0]


class Rig:
    """Both engines, and their trace files."""

    def __init__(self, model: EngineModel, endpoint: str, stack: ExitStack, cores: Sequence[int], folder: Path) -> None:
        self.model = model
        blocks = (_MOST_AT_ONCE + 8) * (full_blocks(PROMPT_TOKENS + _ANSWER_TOKENS) + 1)
        arguments: dict[str, Any] = {
            "max_model_len": PROMPT_TOKENS + _ANSWER_TOKENS + 32,
            "max_num_seqs": _MOST_AT_ONCE,
            "max_num_batched_tokens": _CHUNK,
            "kv_cache_memory_bytes": blocks * model.block_bytes,
        }
        self.files = [folder / "p.json", folder / "d.json"]
        self.prefill, self.decode = (
            stack.enter_context(
                Engine(
                    model,
                    {"endpoint": endpoint, "save_decode": False, "trace_file": str(file)},
                    cores=[cores[core]],
                    **arguments,
                )
            )
            for core, file in enumerate(self.files)
        )
        self.alone = stack.enter_context(Engine(model, None, cores=[cores[1]], **arguments))
        for number, each in enumerate((self.prefill, self.decode, self.alone)):
            each.generate(model.prompts(_WARM_UP + number, 2, 300), 4)
        self.serve(_WARM_UP + 10, [0.0])

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """Return the prompts of a round."""
        return self.model.prompts(seed, count, PROMPT_TOKENS)

    def serve(self, seed: int, times: Sequence[float]) -> list[Served]:
        """Send requests at these times. Return their results."""
        asked = list(zip(times, self.prompts(seed, len(times)), strict=True))
        return hand_over(self.prefill, self.decode, asked, _ANSWER_TOKENS)[1]


def measure(benchmark: Benchmark, rig: Rig, checks: Checks) -> tuple[int, dict[float, list[list[float]]]]:
    """Run all rounds. Return the number of requests in a round, and for each rate and round the TTFT of each
    request."""
    requests = _REQUESTS[rig.model.name] // (4 if benchmark.quick else 1)
    rates = RATES[rig.model.name]
    seeds = iter(range(1, 1_000_000))
    first: dict[float, list[list[float]]] = {rate: [] for rate in rates}
    with benchmark.steps("rounds", benchmark.rounds * len(rates)) as step:
        for rate in rates:
            for _ in range(benchmark.rounds):
                seed = next(seeds)
                times = arrivals(seed, rate, requests)
                served = rig.serve(seed, times)
                first[rate].append([each.token_s[0] - at for each, at in zip(served, times, strict=True)])
                told = [Answer(each.token_ids, each.cached_tokens, 0.0) for each in served]
                prompts = rig.prompts(seed, requests)
                right = rig.alone.generate(prompts, _ANSWER_TOKENS).answers
                checks.tokens(f"handed over, {rate:g} requests/s", prompts, told, right, rig.alone)
                step()
    rig.serve(_WARM_UP + 11, [0.0])
    return requests, first


def parts_of(files: Sequence[Path], first: Seconds) -> dict[str, Seconds]:
    """Return the parts of each request, in order of arrival. first: their times to the first token. One more request
    must have arrived after them, because an engine that becomes idle has not written its last request yet."""
    p, d = (requests_of(file, row) for file, row in zip(files, "PD", strict=True))
    count = len(first)
    came = sorted(map(_came, d.values()))[-count - 1 : -1]
    if len(came) < count:
        raise AssertionError(f"{len(d)} requests came to D: expected more than {count}")
    window = came[0] - _APART_S, came[-1] + _APART_S
    (p_came, p_began), (_, p_ended) = times_of(p, ("queue", "prefill"), *window, count)
    (d_came, d_began), (_, d_loaded) = times_of(d, ("queue", "load"), *window, count)
    return {
        P_QUEUE: p_began - p_came,
        COMPUTED: p_ended - p_began,
        WAY: np.maximum(0.0, d_loaded - p_ended),
        D_QUEUE: d_began - d_came,
        D_STEP: np.maximum(0.0, first - (d_loaded - d_came)),
        FIRST: first,
    }


def conclude_parts(
    benchmark: Benchmark,
    model: EngineModel,
    files: Sequence[Path],
    requests: int,
    first: dict[float, list[list[float]]],
) -> None:
    """Make the cases from the engines' trace files."""
    found = parts_of(files, np.array(list(first.values())).reshape(-1))
    for number, (rate, of_rounds) in enumerate(first.items()):
        rounds = len(of_rounds)
        some = {
            name: each.reshape(len(first), rounds, requests)[number] if len(each) else each
            for name, each in found.items()
        }
        medians = {name: np.median(each, axis=1).tolist() for name, each in some.items()}
        benchmark.add(
            f"{rate:g} requests/s",
            medians,
            model=model.to_json(),
            requests_per_s=rate,
            requests=requests * rounds,
            prompt_tokens=PROMPT_TOKENS,
            p90_s={name: float(np.percentile(each, 90)) for name, each in some.items()},
            way_percentiles_s=[float(np.percentile(some[WAY], each)) for each in PERCENTILES],
        )


def show(cases: Sequence[Case]) -> None:
    table = Table("", *PARTS)
    for case in cases:
        table.add_row(case.name, *(time_text(case.median(name)) for name in PARTS))
        table.add_row("  p90", *(time_text(case.parameters["p90_s"][name]) for name in PARTS))
    console().print(table)


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # each engine has one core
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=add_engine_model_option)
    cores = sorted(os.sched_getaffinity(0))
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 0
    checks = Checks()
    model = ENGINE_MODELS[benchmark.options.model or "tiny"]
    most = (benchmark.rounds * len(RATES[model.name]) + 1) * _REQUESTS[model.name]
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as stack:
            endpoint = stack.enter_context(kvstore_server(most * model.block_bytes * (full_blocks(PROMPT_TOKENS) + 1)))
            rig = Rig(model, endpoint, stack, cores, Path(folder))
            requests, first = measure(benchmark, rig, checks)
        conclude_parts(benchmark, model, rig.files, requests, first)
    show(benchmark.cases)
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
