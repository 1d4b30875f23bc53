"""Measures the prompts a second of an engine if another engine has already computed the prompts. There is a fill run
and a read run at each of eleven prefix hit rates.

All prompts of 1000 tokens are sent at once and continued by 24 tokens. At a hit rate of 30 %, for example, the first
300 tokens of all prompts are the same. One engine fills the store. Another one, which has never seen the prompts, reads
them: all full blocks come from the store or, if several prompts share them, from blocks that an earlier request loaded.
A third engine, without the connector, gives the expected tokens and shows the cost of a fill. Everything is measured
with the engines' own prefix cache on and off. Before each round, the store and the engines' caches are purged.

There are 1000 prompts, divided by the scale. An engine's own cache holds at most 256 of them, and its CPU tier 128.
Needs vLLM; without it nothing is measured.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import ExitStack
from typing import Final

from rich.table import Table

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import (
    BLOCK_TOKENS,
    ENGINE_MODELS,
    EngineModel,
    add_engine_model_option,
    cacheable_tokens,
    full_blocks,
)
from benchmarks.remote_kv_cache.engines import WITHOUT, Engine, Store, add_cpu_bytes_option
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case, console

FILL: Final = "fill run"
READ: Final = "read run"
RATES: Final = tuple(range(0, 101, 10))  # percent
_PROMPTS: Final = 1000
_PROMPT_TOKENS: Final = 1000
_OUTPUT_TOKENS: Final = 24
_WARM_UP: Final = 8  # prompts in an uncounted run
_CACHED: Final = 256  # the largest number of prompts whose blocks fit an engine's own cache
CACHES: Final = {"engine's cache on": True, "engine's cache off": False}


def _prompt_bytes(model: EngineModel) -> int:
    """Return the bytes of the KV of one prompt and its answer."""
    return (full_blocks(_PROMPT_TOKENS + _OUTPUT_TOKENS) + 1) * model.block_bytes


class Engines:
    """The three engines on one server, for all hit rates, and their seconds."""

    def __init__(
        self, stack: ExitStack, model: EngineModel, prompts: int, prefix_cache: bool, cpu_bytes: int, checks: Checks
    ) -> None:
        """The engines end when the stack is closed."""
        self.model = model
        self.checks = checks
        self._prefix_cache = prefix_cache
        prompt_bytes = _prompt_bytes(model)
        endpoint = stack.enter_context(kvstore_server(prompt_bytes * (prompts + _WARM_UP)))
        self.store = stack.enter_context(Store(endpoint))
        arguments = {
            "max_model_len": _PROMPT_TOKENS + 2 * _OUTPUT_TOKENS,
            "enable_prefix_caching": prefix_cache,
            "kv_cache_memory_bytes": min(2 * prompts, _CACHED) * prompt_bytes + (64 << 20),
        }
        connector = {"endpoint": endpoint, "cpu_bytes": cpu_bytes}
        self._plain = stack.enter_context(Engine(model, None, **arguments))
        self._filler = stack.enter_context(Engine(model, connector, **arguments))
        self._reader = stack.enter_context(Engine(model, connector, **arguments))
        for engine in (self._plain, self._filler, self._reader):
            engine.wait_ready()

    def take_turns(self, seed: int, prompts: int, rate: int) -> dict[str, float]:
        """Run new prompts at this hit rate on the engines in turn. Return the seconds of each run."""
        model, checks = self.model, self.checks
        shared_tokens = _PROMPT_TOKENS * rate // 100
        questions = model.prompts(seed, prompts, _PROMPT_TOKENS, shared_tokens)
        common = full_blocks(shared_tokens)
        different = common + (full_blocks(_PROMPT_TOKENS) - common) * (prompts if rate < 100 else 1)
        self.store.purge()
        before = self.store.settle()
        read_before = self.store.read()
        plain = self._plain.generate(questions, _OUTPUT_TOKENS)
        fill = self._filler.generate(questions, _OUTPUT_TOKENS)
        self.store.settle(before + different)
        read = self._reader.generate(questions, _OUTPUT_TOKENS)
        what = f"{rate} % in common, seed {seed}"
        everything = cacheable_tokens(_PROMPT_TOKENS)
        for name, run in ((FILL, fill), (READ, read)):
            checks.tokens(f"{what}, {name}", questions, run.answers, plain.answers, self._plain)
        # Requests that start together do not find the blocks that all of them have yet to compute.
        in_common = common * BLOCK_TOKENS
        checks.cached(f"{what}, {WITHOUT}", plain.answers, 0, in_common if self._prefix_cache else 0)
        checks.cached(f"{what}, {FILL}", fill.answers, 0, in_common)
        checks.cached(f"{what}, {READ}", read.answers, everything, everything)
        came = self.store.read() - read_before
        checks.that(came >= different, f"{what}: the store gave {came} blocks, expected at least {different}")
        return {WITHOUT: plain.seconds, FILL: fill.seconds, READ: read.seconds}


def show(cases: list[Case]) -> None:
    table = Table("prefix hit rate", title="Prompts a second", title_justify="left")
    for heading in (WITHOUT, FILL, READ, "read ÷ fill"):
        table.add_column(heading, justify="right")
    for case in cases:
        rates = (f"{case.parameters['prompts'] / case.median(name):.2f}" for name in (WITHOUT, FILL, READ))
        table.add_row(case.name, *rates, f"{case.ratio(FILL, READ):.2f}")
    console().print(table)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser)
    parser.add_argument("--scale", type=int, help="1000 / SCALE prompts; default: 25; --quick: 125")
    parser.add_argument("--rates", type=int, nargs="+", choices=RATES, help="some of the hit rates, in percent")
    add_cpu_bytes_option(parser)


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=3, add_options=_add_options)
    if benchmark.lacks(missing_module("vllm")):
        return 0
    options = benchmark.options
    scale = options.scale or (125 if benchmark.quick else 25)
    model, prompts = ENGINE_MODELS[options.model or "tiny"], _PROMPTS // scale
    rates = options.rates or (RATES[::5] if benchmark.quick else RATES)
    cpu_bytes = options.cpu_bytes
    if cpu_bytes is None:
        cpu_bytes = min(4 * prompts, _CACHED // 2) * _prompt_bytes(model)  # half of it may wait to be sent
    checks = Checks()
    parameters = {"prompts": prompts, "prompt_tokens": _PROMPT_TOKENS, "output_tokens": _OUTPUT_TOKENS}
    with benchmark.steps("", len(CACHES) * benchmark.rounds * len(rates)) as step:
        for group, prefix_cache in CACHES.items():
            step(f"{group}: starting three engines", 0)
            seconds: dict[int, dict[str, list[float]]] = {rate: {WITHOUT: [], FILL: [], READ: []} for rate in rates}
            with ExitStack() as stack:
                engines = Engines(stack, model, prompts, prefix_cache, cpu_bytes, checks)
                engines.take_turns(0, _WARM_UP, 0)
                seeds = iter(range(1, benchmark.rounds * len(rates) + 1))
                for number in range(benchmark.rounds):
                    for rate in random.Random(number).sample(rates, len(rates)):
                        step(f"{group}, round {number + 1}: {rate} % in common", 0)
                        for name, value in engines.take_turns(next(seeds), prompts, rate).items():
                            seconds[rate][name].append(value)
                        step()
            for rate in rates:
                benchmark.add(
                    f"{rate} %, {group}",
                    seconds[rate],
                    references=(READ,),
                    group=group,
                    hit_rate_percent=rate,
                    **parameters,
                )
    show(benchmark.cases)
    scaled = _PROMPTS / prompts
    return conclude(benchmark, checks, model=model.to_json(), scale=scaled, cpu_bytes=cpu_bytes, **parameters)


if __name__ == "__main__":
    sys.exit(main())
