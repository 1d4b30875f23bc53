"""Tests whether a store makes an engine slower. Stored prompts are loaded over links of limited rate.

*One after another*: prompts of 5000 tokens on an engine that has just started, over a link of 1 MB/s and one of 200
MB/s, compared with an engine without the connector. *All at once*: 50 prompts of 1000 tokens, 900 of them in the store,
over 200 MB/s. One engine chooses the faster of loading and computing, one always loads, and one has no connector. All
times are times to the first token. Needs vLLM, root and iproute2; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import BLOCK_TOKENS, ENGINE_MODELS, EngineModel, add_engine_model_option
from benchmarks.remote_kv_cache.engine_process import Run
from benchmarks.remote_kv_cache.engines import WITHOUT, Engine, Store
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import case_table, console

SLOW: Final = "store over 1 MB/s"
FAST: Final = "store over 200 MB/s"
RATES: Final = {SLOW: 1e6, FAST: 200e6}
SOONER: Final = "what is sooner"
ALWAYS: Final = "always load"
MEAN: Final = "mean"
P99: Final = "p99"
ONE_AFTER_ANOTHER: Final = "one after another"
ALL_AT_ONCE: Final = "all at once"
PARTS: Final = (ONE_AFTER_ANOTHER, ALL_AT_ONCE)
_FULL: Final = 10e9  # bytes/s: the rate while the store is filled
_LONG, _SHORT, _SHARE = 5000, 1000, 0.9
_OUTPUT_TOKENS: Final = 4
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts; Python's generator ignores the sign of a seed


class Measuring:
    """The engines on one server behind one link."""

    def __init__(
        self, stack: ExitStack, checks: Checks, model: EngineModel, tokens: int, prompts: int, rounds: int
    ) -> None:
        self.model, self.tokens, self.prompts = model, tokens, prompts
        self.checks = checks
        self.link = stack.enter_context(LimitedLink(_FULL))
        room = prompts * (rounds + 1) * (tokens // BLOCK_TOKENS + 2) * model.block_bytes
        self.endpoint = stack.enter_context(
            kvstore_server(
                room,
                flags=("--host", self.link.address, "--insecure", "--unix-socket", "off"),
                prefix=self.link.command,
            )
        )
        self.arguments: dict[str, Any] = {
            "max_model_len": tokens + 2 * _OUTPUT_TOKENS,
            "kv_cache_memory_bytes": 2 * prompts * (tokens // BLOCK_TOKENS + 2) * model.block_bytes + (64 << 20),
        }
        self.store = stack.enter_context(Store(self.endpoint))
        self.plain = stack.enter_context(Engine(model, None, **self.arguments))
        self.filler = stack.enter_context(self.engine())
        for engine in (self.plain, self.filler):
            engine.generate(model.prompts(_WARM_UP, 1, tokens), _OUTPUT_TOKENS)

    def engine(self, **options: Any) -> Engine:
        """Start a new engine with the connector."""
        return Engine(self.model, {"endpoint": self.endpoint, "always_load": False, **options}, **self.arguments)

    def fill(self, prompts: list[list[int]]) -> None:
        """Fill the store with the blocks of these prompts."""
        self.link.set_rate(_FULL)
        before = self.store.settle()
        self.filler.generate(prompts, 1)
        self.store.settle(before + sum(len(prompt) // BLOCK_TOKENS for prompt in prompts))


def one_after_another(measuring: Measuring, number: int) -> dict[str, float]:
    """Send the prompts to engines that have just started. Return the seconds of all prompts, by engine."""
    model, seconds = measuring.model, dict[str, float]()
    prompts = model.prompts(number, measuring.prompts, measuring.tokens)

    def time_of(name: str, engine: Engine) -> list[Run]:
        engine.generate(model.prompts(_WARM_UP + 1 + number, 1, 64), _OUTPUT_TOKENS)
        runs = [engine.generate([prompt], _OUTPUT_TOKENS) for prompt in prompts]
        seconds[name] = sum(run.seconds for run in runs)
        return runs

    with Engine(model, None, **measuring.arguments) as engine:
        right = time_of(WITHOUT, engine)
    measuring.fill(prompts)
    for name, rate in RATES.items():
        measuring.link.set_rate(rate)
        with measuring.engine() as engine:
            runs = time_of(name, engine)
        for prompt, run, expected in zip(prompts, runs, right, strict=True):
            measuring.checks.tokens(name, [prompt], run.answers, expected.answers, measuring.plain)
    return seconds


def all_at_once(measuring: Measuring, engines: dict[str, Engine], number: int) -> dict[str, float]:
    """Send all prompts at once. Return mean and p99 of the times to the first token, by engine."""
    stored = measuring.model.prompts(1000 + number, measuring.prompts, int(measuring.tokens * _SHARE))
    rest = measuring.model.prompts(2000 + number, measuring.prompts, measuring.tokens - len(stored[0]))
    prompts = [head + tail for head, tail in zip(stored, rest, strict=True)]
    measuring.fill(stored)
    measuring.link.set_rate(RATES[FAST])
    seconds, right = dict[str, float](), None
    for name, engine in engines.items():
        answers = engine.generate(prompts, _OUTPUT_TOKENS).answers
        right = right or answers
        measuring.checks.tokens(name, prompts, answers, right, measuring.plain)
        times = sorted(answer.first_token_s for answer in answers)
        seconds[f"{name}, {MEAN}"] = statistics.fmean(times)
        seconds[f"{name}, {P99}"] = times[min(len(times) - 1, int(0.99 * len(times)))]
    return seconds


def _case(benchmark: Benchmark, name: str, rounds: list[dict[str, float]], measuring: Measuring, limit: str) -> None:
    columns = {column: [each[column] for each in rounds] for column in rounds[0]}
    limits = {
        column: f"{limit}, {column.rpartition(', ')[2]}" if name == ALL_AT_ONCE else limit
        for column in columns
        if not column.startswith(limit)
    }
    model, prompts, tokens = measuring.model.to_json(), measuring.prompts, measuring.tokens
    benchmark.add(name, columns, limits=limits, group=name, model=model, prompts=prompts, prompt_tokens=tokens)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="some of it")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=_add_options)
    if benchmark.lacks(missing_module("vllm"), unavailable()):
        return 0
    model = ENGINE_MODELS[benchmark.options.model or "tiny"]
    rounds = benchmark.rounds
    checks = Checks()
    for part in benchmark.options.parts:
        first = part == ONE_AFTER_ANOTHER
        tokens, prompts = (_LONG, 8) if first else (_SHORT, 50)
        if benchmark.quick:
            tokens, prompts = tokens // 4, prompts // 4
        with ExitStack() as stack, benchmark.steps(part, rounds) as step:
            measuring = Measuring(stack, checks, model, tokens, prompts, rounds)
            engines = {WITHOUT: measuring.plain}
            if not first:
                engines |= {
                    # The engines save nothing, so that the second one does not find blocks of the first one.
                    name: stack.enter_context(measuring.engine(always_load=name == ALWAYS, kv_role="kv_consumer"))
                    for name in (SOONER, ALWAYS)
                }
                for engine in engines.values():
                    engine.generate(model.prompts(_WARM_UP - 1, 1, tokens), _OUTPUT_TOKENS)
            taken = []
            for number in range(rounds):
                taken.append(one_after_another(measuring, number) if first else all_at_once(measuring, engines, number))
                step()
            _case(benchmark, part, taken, measuring, WITHOUT)
        console().print(case_table(benchmark.cases[-1]))
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
