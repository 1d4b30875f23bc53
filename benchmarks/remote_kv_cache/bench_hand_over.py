"""Compares disaggregated prefill/decode, each engine on one core, with two colocated engines.

*Between tokens*: long prompts arrive at engines that are generating answers. The results are the 99th percentile and
the maximum of the time between two tokens of these answers. It is measured without long prompts, and on two colocated
engines that share all requests and compute a prompt in one step or in chunks. With P/D it is measured on the decode
engine, while a prefill engine on the other core computes the prompts and hands them over through the store. A last
engine has the prompts in its own cache, as if the hand-over took no time. Steps get longer as answers get longer, so
all cases run for the same time.

*To the first token*: one request is handed over on idle engines, which get it at the same time. The first result is the
time of the prefill, and the second one is the time until the decode engine has its first token. The third one is the
decode engine's time for the same prompt with all blocks in its own cache. The time that the hand-over adds is measured
by bench_request_time, from the engines' traces.

Every engine computes with one thread. Copies between the cache and host memory, which a GPU would make itself, use the
same core. Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from rich.table import Table

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

BETWEEN_TOKENS: Final = "between tokens"
FIRST_TOKEN: Final = "to the first token"
ALONE: Final = "without arrivals"
WHOLE: Final = "two engines, prompts in one step"
CHUNKS: Final = "two engines, prompts in chunks"
APART: Final = "prefill and decode apart"
KNOWN: Final = "prompts in the engine's own cache"
PREFILLED: Final = "the prefill"
HANDED_OVER: Final = "handed over"
OWN_CACHE: Final = "in the decode side's own cache"
LENGTHS: Final = (128, 1024, 4096)
PREFILL: Final = "do_remote_decode"
DECODE: Final = "do_remote_prefill"

_ANSWERS: Final = 4  # answers that are being generated
_ANSWER_PROMPT: Final = 64
_ARRIVING_TOKENS: Final = 6 * max(LENGTHS)  # tokens of all prompts of a round
_AT_ONCE: Final = 16  # requests
_CHUNK: Final = 512
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts
_MOST_TOKENS: Final = 3000
_LEAD_S: Final = 0.3  # the time from the command to the first arrival
_SETTLED_S: Final = 0.5  # after this time all answers have begun


def _gaps(answers: Sequence[Served], end_s: float) -> list[float]:
    """Return the times between tokens while prompts arrived."""
    return [
        later - sooner
        for answer in answers
        for sooner, later in zip(answer.token_s, answer.token_s[1:], strict=False)
        if sooner > _SETTLED_S and later <= end_s
    ]


def hand_over(
    prefill: Engine, decode: Engine, asked: Sequence[tuple[float, list[int]]], answer_tokens: int
) -> tuple[list[Served], list[Served]]:
    """Send each prompt at its time to both engines. Return the results of all requests, from either engine."""
    begin = time.perf_counter() + _LEAD_S
    decode.begin([Arrival(at, prompt, answer_tokens, DECODE) for at, prompt in asked], begin)
    prefill.begin([Arrival(at, prompt, 1, PREFILL) for at, prompt in asked], begin)
    return prefill.served(), decode.served()


def arrivals(seed: int, rate: float, requests: int) -> list[float]:
    """Return the arrival times of requests in seconds: the first one is 0, and the others are random (a Poisson process
    with `rate` requests a second)."""
    chooser = random.Random(seed)
    times: list[float] = np.cumsum([0.0, *(chooser.expovariate(rate) for _ in range(requests - 1))]).tolist()
    return times


class Rig:
    """The engines, each on one core, and the requests to them."""

    def __init__(self, model: EngineModel, endpoint: str, stack: ExitStack, cores: Sequence[int]) -> None:
        self.model = model
        # The prompts of a round stay in an engine's own cache, in addition to the blocks that it computes.
        blocks = _ANSWERS * full_blocks(_MOST_TOKENS) + full_blocks(_ARRIVING_TOKENS + 2 * max(LENGTHS)) + 64
        arguments: dict[str, Any] = {
            "max_model_len": 2 * max(LENGTHS),
            "max_num_seqs": _AT_ONCE,
            "kv_cache_memory_bytes": blocks * model.block_bytes,
        }
        connector = {"endpoint": endpoint, "cpu_bytes": blocks * model.block_bytes}

        def engine(core: int, tokens: int, connector: dict[str, Any] | None) -> Engine:
            return stack.enter_context(
                Engine(model, connector, cores=[cores[core]], max_num_batched_tokens=tokens, **arguments)
            )

        self.prefill, self.decode = engine(0, _CHUNK, connector), engine(1, _CHUNK, connector)
        self.chunked = [engine(core, _CHUNK, None) for core in range(2)]
        self.whole = [engine(core, 2 * max(LENGTHS), None) for core in range(2)]
        for each in (self.prefill, self.decode, *self.chunked, *self.whole):
            each.generate(model.prompts(_WARM_UP, 2, 300), 4)
        self.prefill_s = {tokens: self._prefill_s(tokens) for tokens in LENGTHS}

    def _prefill_s(self, tokens: int) -> float:
        [prompt] = self.model.prompts(_WARM_UP + tokens, 1, tokens)
        return self.chunked[0].generate([prompt], 1).seconds

    def between_tokens(self, mode: str, seed: int, tokens: int) -> list[float]:
        """Return the times between tokens, in seconds."""
        answers = [
            Arrival(0.0, prompt, _MOST_TOKENS, endless=True)
            for prompt in self.model.prompts(seed, _ANSWERS, _ANSWER_PROMPT)
        ]
        apart_s = 1.25 * self.prefill_s[tokens]  # a load that one engine can handle
        prompts = self.model.prompts(seed + 1, _ARRIVING_TOKENS // tokens, tokens)
        times = [_SETTLED_S + number * apart_s for number in range(len(prompts))]
        if mode == KNOWN:
            self.decode.generate(prompts, 1)
        begin = time.perf_counter() + _LEAD_S
        if mode == ALONE:
            end_s = times[-1] + apart_s
            self.decode.begin(answers, begin, end_s)
            return _gaps(self.decode.served(), end_s)

        def coming(output_tokens: int, side: str = "") -> list[Arrival]:
            return [Arrival(at, prompt, output_tokens, side) for at, prompt in zip(times, prompts, strict=True)]

        if mode in (APART, KNOWN):
            self.decode.begin([*answers, *coming(2, DECODE if mode == APART else "")], begin)
            if mode == APART:
                self.prefill.begin(coming(1, PREFILL), begin)
                self.prefill.served()
            served = self.decode.served()
            end_s = max(each.token_s[-1] for each in served[_ANSWERS:])
            return _gaps(served[:_ANSWERS], end_s)
        engines = self.whole if mode == WHOLE else self.chunked
        gaps: list[float] = []
        for number, engine in enumerate(engines):
            engine.begin([*answers[number::2], *coming(2)[number::2]], begin)
        for engine in engines:
            served = engine.served()
            mine = _ANSWERS // 2
            gaps += _gaps(served[:mine], max(each.token_s[-1] for each in served[mine:]))
        return gaps

    def first_token(self, seed: int, tokens: int, checks: Checks) -> dict[str, float]:
        """Send one request. Return its times."""
        prompts = self.model.prompts(seed, 1, tokens)
        begin = time.perf_counter() + _LEAD_S
        self.decode.begin([Arrival(0.0, prompts[0], 8, DECODE)], begin)
        self.prefill.begin([Arrival(0.0, prompts[0], 1, PREFILL)], begin)
        [prefilled], [decoded] = self.prefill.served(), self.decode.served()
        begin = time.perf_counter() + _LEAD_S
        self.decode.begin([Arrival(0.0, prompts[0], 8)], begin)
        [again] = self.decode.served()
        answers = [Answer(each.token_ids, each.cached_tokens, each.token_s[0]) for each in (decoded,)]
        right = self.chunked[0].generate(prompts, 8).answers
        checks.tokens(f"{tokens} tokens", prompts, answers, right, self.chunked[0])
        checks.cached(f"{tokens} tokens", answers, tokens, tokens)  # the whole prompt is handed over
        return {PREFILLED: prefilled.token_s[0], HANDED_OVER: decoded.token_s[0], OWN_CACHE: again.token_s[0]}


def measure(benchmark: Benchmark, rig: Rig, parts: Sequence[str], checks: Checks) -> None:
    """Run the rounds of both parts, for each length of prompts."""
    modes = (ALONE, WHOLE, CHUNKS, APART, KNOWN)
    rounds = benchmark.rounds
    seeds = iter(range(1, 1_000_000, 2))
    with benchmark.steps("rounds", rounds * len(LENGTHS) * len(parts)) as step:
        for tokens in LENGTHS:
            between: dict[str, list[float]] = {mode: [] for mode in modes}
            longest: dict[str, list[float]] = {mode: [] for mode in modes}
            first: dict[str, list[float]] = {name: [] for name in (PREFILLED, HANDED_OVER, OWN_CACHE)}
            for number in range(rounds):
                if FIRST_TOKEN in parts:
                    for name, seconds in rig.first_token(next(seeds), tokens, checks).items():
                        first[name].append(seconds)
                    step()
                if BETWEEN_TOKENS in parts:
                    for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
                        gaps = rig.between_tokens(mode, next(seeds), tokens)
                        between[mode].append(float(np.percentile(gaps, 99)))
                        longest[mode].append(max(gaps))
                    step()
            longest_s = {mode: float(np.median(found)) for mode, found in longest.items() if found}
            for part, seconds_of, limits in (
                (FIRST_TOKEN, first, {}),
                (BETWEEN_TOKENS, between, dict.fromkeys(modes[1:], ALONE)),
            ):
                if part in parts:
                    benchmark.add(
                        f"{part}, prompts of {tokens} tokens",
                        seconds_of,
                        limits=limits,
                        model=rig.model.to_json(),
                        prompt_tokens=tokens,
                        prefill_s=rig.prefill_s[tokens],
                        group=part,
                        longest_s=longest_s if part == BETWEEN_TOKENS else {},
                    )


def show(cases: Sequence[Case]) -> None:
    for case in cases:
        table = Table(
            "", "median", "least", "most", "x without arrivals", "longest", title=case.name, title_justify="left"
        )
        for name, seconds in case.seconds.items():
            share = f"{case.ratio(name, case.limits[name]):.2f}" if name in case.limits else ""
            longest_s = case.parameters["longest_s"].get(name)
            longest = time_text(longest_s) if longest_s is not None else ""
            table.add_row(
                name, *(time_text(each) for each in (case.median(name), min(seconds), max(seconds))), share, longest
            )
        console().print(table)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser)
    parser.add_argument("--parts", nargs="+", choices=(FIRST_TOKEN, BETWEEN_TOKENS), help="default: both")


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # each engine has one core
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=_add_options)
    cores = sorted(os.sched_getaffinity(0))
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 0
    checks = Checks()
    model = ENGINE_MODELS[benchmark.options.model or "tiny"]
    parts = benchmark.options.parts or (FIRST_TOKEN, BETWEEN_TOKENS)
    tokens = benchmark.rounds * len(LENGTHS) * (_ARRIVING_TOKENS + 2 * max(LENGTHS))
    with ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(full_blocks(tokens) * model.block_bytes // 2))
        measure(benchmark, Rig(model, endpoint, stack, cores), parts, checks)
    show(benchmark.cases)
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
