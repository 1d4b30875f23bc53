"""Compares one engine, two colocated engines, and disaggregated prefill/decode, for requests at random times at a given
rate.

Each engine has one core. Requests of 1000 tokens of prompt and 200 of answer arrive as a Poisson process (open loop: a
slow engine does not delay later requests). Two colocated engines get them alternately. With P/D, both engines get the
request at the same time, and the prompt is handed over through the store. The user gets the first token from the engine
that has it first, as from `kvstore proxy`. *First token* and *per token* (the mean after the first) are measured for
each request. An answer *attains* if both are within the SLO, a multiple of an idle engine's times. In a round, all ways
to serve get the same arrival times.

Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from rich.table import Table

from benchmarks.remote_kv_cache.bench_hand_over import arrivals, hand_over
from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import (
    ENGINE_MODELS,
    EngineModel,
    add_engine_model_option,
    full_blocks,
)
from benchmarks.remote_kv_cache.engine_process import Answer, Arrival, Served
from benchmarks.remote_kv_cache.engines import Engine
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case, console, time_text

ONE: Final = "one engine"
TWO: Final = "two engines"
APART: Final = "prefill and decode apart"
WAYS: Final = (ONE, TWO, APART)
FIRST: Final = "first token, p90"
EACH: Final = "per token, p90"
GAP: Final = "between tokens, p99"
FIGURES: Final = (FIRST, EACH, GAP)
PROMPT_TOKENS: Final = 1000
ANSWER_TOKENS: Final = 200
RATES: Final = (1.0, 2.0, 3.0, 4.0)  # requests/s
SCALES: Final = (2.0, 3.0, 5.0, 8.0)  # the SLOs, as multiples of an idle engine's times

_REQUESTS: Final = 24  # a round
_CHUNK: Final = 512
_MOST_AT_ONCE: Final = 32
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts
_LEAD_S: Final = 0.3  # the time from the command to the first request


@dataclass
class Taken:
    """The times of the requests of all rounds, in seconds."""

    first_s: list[float] = field(default_factory=list)
    each_s: list[float] = field(default_factory=list)

    def attaining(self, first_s: float, each_s: float) -> float:
        """Return the share of requests whose two times are at most these."""
        held = (np.array(self.first_s) <= first_s) & (np.array(self.each_s) <= each_s)
        return float(held.mean())


def shown(prefilled: Served, decoded: Served) -> Served:
    """Return the answer to a request that was handed over. The first token is that of the engine that has it first."""
    first_s = min(prefilled.token_s[0], decoded.token_s[0])
    return replace(decoded, token_s=[first_s, *decoded.token_s[1:]])


class Rig:
    """The engines, and the requests to them."""

    def __init__(self, model: EngineModel, endpoint: str, stack: ExitStack, cores: Sequence[int]) -> None:
        self._model = model
        blocks = (_MOST_AT_ONCE + 8) * (full_blocks(PROMPT_TOKENS + ANSWER_TOKENS) + 1)
        arguments: dict[str, Any] = {
            "max_model_len": PROMPT_TOKENS + ANSWER_TOKENS + 32,
            "max_num_seqs": _MOST_AT_ONCE,
            "max_num_batched_tokens": _CHUNK,
            "kv_cache_memory_bytes": blocks * model.block_bytes,
        }
        connector = {"endpoint": endpoint, "save_decode": False}

        def engine(core: int, connector: dict[str, Any] | None) -> Engine:
            return stack.enter_context(Engine(model, connector, cores=[cores[core]], **arguments))

        self.plain = [engine(core, None) for core in range(2)]
        self.prefill, self.decode = engine(0, connector), engine(1, connector)
        for number, each in enumerate((*self.plain, self.prefill, self.decode)):
            each.generate(model.prompts(_WARM_UP + number, 2, 300), 4)
        self.serve(APART, _WARM_UP + 10, [0.0])
        [alone] = self.serve(ONE, _WARM_UP + 11, [0.0])
        self.idle_first_s = alone.token_s[0]
        self.idle_each_s = (alone.token_s[-1] - alone.token_s[0]) / (ANSWER_TOKENS - 1)

    def serve(self, way: str, seed: int, times: Sequence[float]) -> list[Served]:
        """Send requests at these times. Return their results."""
        prompts = self.prompts(seed, len(times))
        asked = list(zip(times, prompts, strict=True))
        if way == APART:
            answers = hand_over(self.prefill, self.decode, asked, ANSWER_TOKENS)
            return [shown(*each) for each in zip(*answers, strict=True)]
        begin = time.perf_counter() + _LEAD_S
        engines = self.plain[: 1 if way == ONE else 2]
        served: list[Served] = [Served([], [], 0)] * len(asked)
        for number, engine in enumerate(engines):
            engine.begin([Arrival(at, prompt, ANSWER_TOKENS) for at, prompt in asked[number :: len(engines)]], begin)
        for number, engine in enumerate(engines):
            served[number :: len(engines)] = engine.served()
        return served

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """Return the prompts of a round."""
        return self._model.prompts(seed, count, PROMPT_TOKENS)


def measure(benchmark: Benchmark, rig: Rig, model: EngineModel, checks: Checks) -> None:
    """Run all rounds, rate by rate."""
    rounds, requests = benchmark.rounds, _REQUESTS // (4 if benchmark.quick else 1)
    seeds = iter(range(1, 1_000_000))
    with benchmark.steps("rounds", rounds * len(RATES)) as step:
        for rate in RATES:
            taken = {way: Taken() for way in WAYS}
            figures: dict[str, dict[str, list[float]]] = {figure: {way: [] for way in WAYS} for figure in FIGURES}
            for number in range(rounds):
                seed = next(seeds)
                times = arrivals(seed, rate, requests)
                answers: dict[str, list[Served]] = {}
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    answers[way] = served = rig.serve(way, seed, times)
                    first = [each.token_s[0] - at for each, at in zip(served, times, strict=True)]
                    mean = [(each.token_s[-1] - each.token_s[0]) / (ANSWER_TOKENS - 1) for each in served]
                    gaps = np.concatenate([np.diff(each.token_s) for each in served])
                    taken[way].first_s += first
                    taken[way].each_s += mean
                    for figure, seconds in (
                        (FIRST, np.percentile(first, 90)),
                        (EACH, np.percentile(mean, 90)),
                        (GAP, np.percentile(gaps, 99)),
                    ):
                        figures[figure][way].append(float(seconds))
                right = [Answer(each.token_ids, each.cached_tokens, 0.0) for each in answers[ONE]]
                for way in WAYS[1:]:
                    told = [Answer(each.token_ids, each.cached_tokens, 0.0) for each in answers[way]]
                    checks.tokens(f"{way}, {rate} requests/s", rig.prompts(seed, requests), told, right, rig.plain[0])
                step()
            attained = {
                way: {
                    f"{scale:g}": each.attaining(scale * rig.idle_first_s, scale * rig.idle_each_s) for scale in SCALES
                }
                for way, each in taken.items()
            }
            for figure, seconds_of in figures.items():
                benchmark.add(
                    f"{rate:g} requests/s, {figure}",
                    seconds_of,
                    model=model.to_json(),
                    group=figure,
                    requests_per_s=rate,
                    requests=requests * rounds,
                    prompt_tokens=PROMPT_TOKENS,
                    answer_tokens=ANSWER_TOKENS,
                    idle_first_s=rig.idle_first_s,
                    idle_each_s=rig.idle_each_s,
                    attained=attained,
                )


def show(cases: Sequence[Case]) -> None:
    """Print a column for each way. `found`: the parameter that has the shares of the prompts' tokens that were found in
    a cache."""
    ways = list(cases[0].seconds)
    table = Table("", *ways)
    for case in cases:
        table.add_row(case.name, *(time_text(case.median(way)) for way in ways))
        if case.parameters["group"] == FIGURES[-1]:
            if found := case.parameters.get("found"):
                table.add_row("  not computed", *(f"{found[way]:.0%}" for way in ways))
            for scale in SCALES:
                shares = (f"{case.parameters['attained'][way][f'{scale:g}']:.0%}" for way in ways)
                table.add_row(f"  attain {scale:g} x an idle engine's times", *shares)
    console().print(table)


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # each engine has one core
    benchmark = Benchmark(__spec__.name, __doc__, rounds=5, add_options=add_engine_model_option)
    cores = sorted(os.sched_getaffinity(0))
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 0
    checks = Checks()
    model = ENGINE_MODELS[benchmark.options.model or "tiny"]
    requests = (benchmark.rounds * len(RATES) + 1) * _REQUESTS
    with ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(requests * model.block_bytes * (full_blocks(PROMPT_TOKENS) + 1)))
        measure(benchmark, Rig(model, endpoint, stack, cores), model, checks)
    show(benchmark.cases)
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
