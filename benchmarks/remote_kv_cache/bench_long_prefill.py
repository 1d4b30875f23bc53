"""Measures repeated long prompts: computed, from the engine's own cache, from the CPU tier, and from the store after a
restart.

Ten prompts of 10240 tokens (divided by the scale) are sent at once and continued by 2 … 128 tokens, six times. The
first time, they are computed while the store is filled; then they come from the engine's cache, twice. After a restart
of the engine they come from the store once, then twice from the engine's cache. The same is measured with the engine's
prefix cache off, so that the blocks come from the CPU tier. It is also measured without a CPU tier, so that they come
from the store.

Then one prompt of 8192 tokens is measured with a larger model: see first_token.py. Needs vLLM; without it nothing is
measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from benchmarks.remote_kv_cache.first_token import FIRST_TOKEN, STEPS, measure_first_token
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import Case, case_table, console

COMPUTE: Final = "1 compute and fill"
REMOTE: Final = "4 restarted: store"
OUTPUTS: Final = (2, 4, 8, 16, 32, 64, 128)
ROWS: Final = "rows"
PARTS: Final = (ROWS, FIRST_TOKEN)
_PROMPTS: Final = 10
_PROMPT_TOKENS: Final = 10240
_FIRST_TOKEN_PROMPT: Final = 8192
_DEFAULT_STAGING_BYTES: Final = 512 << 20  # the connector's default


@dataclass(frozen=True)
class Mode:
    """How the engine caches. `tier`: the tier that has the blocks of a prompt that the engine has seen before."""

    name: str
    tier: str
    prefix_cache: bool
    cpu_tier: bool

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the six rounds, in order."""
        return (
            COMPUTE,
            f"2 {self.tier}",
            f"3 {self.tier}",
            REMOTE,
            f"5 restarted: {self.tier}",
            f"6 restarted: {self.tier}",
        )


MODES: Final = {
    mode.name: mode
    for mode in (
        Mode("cache on", "engine's cache", prefix_cache=True, cpu_tier=True),
        Mode("cache off", "CPU tier", prefix_cache=False, cpu_tier=True),
        Mode("cache off, no CPU tier", "store", prefix_cache=False, cpu_tier=False),
    )
}


@dataclass(frozen=True)
class Workload:
    """The prompts, which are new in each round and for each number of output tokens."""

    model: EngineModel
    prompt_tokens: int
    outputs: Sequence[int]
    rounds: int

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Return (round, output tokens), in the order in which they are measured."""
        return [(number, output_tokens) for number in range(self.rounds) for output_tokens in self.outputs]

    @property
    def batch_bytes(self) -> int:
        """The bytes of the KV cache of one batch of prompts and their continuations."""
        return _PROMPTS * (full_blocks(self.prompt_tokens + max(self.outputs)) + 1) * self.model.block_bytes

    def prompts(self, number: int, output_tokens: int) -> list[list[int]]:
        return self.model.prompts(number * 1000 + output_tokens, _PROMPTS, self.prompt_tokens)

    def warm_up(self) -> list[list[int]]:
        """Return the prompts that warm up an engine. They are the same for all engines, so a restarted one loads them
        from the store."""
        return self.model.prompts(-1, _PROMPTS, 4 * BLOCK_TOKENS)

    def engine(self, connector: dict[str, object] | None, prefix_cache: bool) -> Engine:
        """Start an engine."""
        return Engine(
            self.model,
            connector,
            max_model_len=self.prompt_tokens + max(self.outputs) + 2,
            kv_cache_memory_bytes=2 * self.batch_bytes + (64 << 20),
            enable_prefix_caching=prefix_cache,
        )


class Rows:
    """The rounds of each mode, one mode after the other. Answers are checked against those of an engine without the
    connector."""

    def __init__(self, workload: Workload, plain: Engine, cpu_bytes: int, step: Callable[[str], object]) -> None:
        """plain: the engine without the connector and without prefix cache. step: called with the name of each
        measurement."""
        self._workload = workload
        self._plain = plain
        self._cpu_bytes = cpu_bytes
        self._step = step
        self.checks = Checks()
        plain.generate(workload.warm_up(), 2)
        self._right = {}
        for batch in workload.batches:
            self._right[batch] = plain.generate(workload.prompts(*batch), batch[1])
            step(f"{WITHOUT}, {batch[1]} tokens of output")

    def measure(self, mode: Mode) -> list[Case]:
        """Measure a case for each number of output tokens."""
        workload = self._workload
        seconds = {batch: [self._right[batch].seconds] for batch in workload.batches}
        with kvstore_server(workload.batch_bytes * (len(workload.batches) + 1)) as endpoint, Store(endpoint) as store:
            connector: dict[str, object] = {"endpoint": endpoint}
            if mode.cpu_tier:
                connector["cpu_bytes"] = self._cpu_bytes
            elif 2 * workload.batch_bytes > _DEFAULT_STAGING_BYTES:
                connector["staging_bytes"] = 2 * workload.batch_bytes
            for rows in (mode.rows[:3], mode.rows[3:]):
                with workload.engine(connector, mode.prefix_cache) as engine:
                    engine.generate(workload.warm_up(), 2)
                    for batch in workload.batches:
                        for row in rows:
                            seconds[batch].append(self._row(mode, row, batch, engine, store))
        cases = []
        for output_tokens in workload.outputs:
            taken = [seconds[number, output_tokens] for number in range(workload.rounds)]
            columns = {name: [row[column] for row in taken] for column, name in enumerate((WITHOUT, *mode.rows))}
            cases.append(
                Case(
                    name=f"{mode.name}, {output_tokens} tokens of output",
                    seconds=columns,
                    references=(COMPUTE,),
                    parameters={
                        "group": ROWS,
                        "mode": mode.name,
                        "model": workload.model.to_json(),
                        "prompts": _PROMPTS,
                        "prompt_tokens": workload.prompt_tokens,
                        "scale": _PROMPT_TOKENS / workload.prompt_tokens,
                        "output_tokens": output_tokens,
                        "connector": {name: value for name, value in connector.items() if name != "endpoint"},
                    },
                )
            )
        return cases

    def _row(self, mode: Mode, row: str, batch: tuple[int, int], engine: Engine, store: Store) -> float:
        """Send the prompts, wait until the store is quiet again, and check that the blocks came from the tier that the
        row names."""
        tokens = self._workload.prompt_tokens
        prompts = self._workload.prompts(*batch)
        before, read_before = store.settle(), store.read()
        run = engine.generate(prompts, batch[1])
        store.settle(before + _PROMPTS * full_blocks(tokens) if row == COMPUTE else 0)
        what = f"{mode.name}, {batch[1]} tokens of output, {row}"
        cached = 0 if row == COMPUTE else cacheable_tokens(tokens)
        self.checks.tokens(what, prompts, run.answers, self._right[batch].answers, self._plain)
        self.checks.cached(what, run.answers, cached, cached)
        came = store.read() - read_before
        expected = _PROMPTS * cached // BLOCK_TOKENS if row.endswith("store") else 0
        self.checks.that(came == expected, f"{what}: the store gave {came} blocks, expected {expected}")
        self._step(what)
        return run.seconds


def show(cases: Sequence[Case]) -> None:
    """Print one table for each mode, with a column for each number of output tokens."""
    for mode in MODES.values():
        chosen = [case for case in cases if case.parameters["mode"] == mode.name]
        if not chosen:
            continue
        title = f"Prompts a second, {mode.name}"
        table = Table("tokens of output", title=title, title_justify="left")
        for case in chosen:
            table.add_column(str(case.parameters["output_tokens"]), justify="right")
        for row in (WITHOUT, *mode.rows):
            table.add_row(row, *(f"{_PROMPTS / case.median(row):.2f}" for case in chosen))
        console().print(table)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser)
    parser.add_argument("--scale", type=int, help="prompts have 10240 / SCALE tokens; default: 5; --quick: 40")
    parser.add_argument("--outputs", type=int, nargs="+", metavar="N", help=f"default: {OUTPUTS}; --quick: two of them")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE", help="some")
    add_cpu_bytes_option(parser)
    add_engine_model_option(parser, "--first-token-model", "mid")
    parser.add_argument("--first-token-scale", type=int, help="8192 / SCALE tokens; default: 1; --quick: 16")
    parser.add_argument("--first-token-rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of it")


def _measure_rows(benchmark: Benchmark) -> Checks:
    options, quick = benchmark.options, benchmark.quick
    workload = Workload(
        model=ENGINE_MODELS[options.model or "tiny"],
        prompt_tokens=_PROMPT_TOKENS // (options.scale or (40 if quick else 5)),
        outputs=options.outputs or (OUTPUTS[:1] + OUTPUTS[-1:] if quick else OUTPUTS),
        rounds=1 if quick else benchmark.rounds,
    )
    cpu_bytes = 2 * workload.batch_bytes if options.cpu_bytes is None else options.cpu_bytes
    turns = len(workload.batches) * (1 + sum(len(MODES[name].rows) for name in options.modes))
    with workload.engine(None, prefix_cache=False) as plain, benchmark.steps("starting", turns) as step:
        measured = Rows(workload, plain, cpu_bytes, step)
        for name in options.modes:
            benchmark.cases += measured.measure(MODES[name])
    show(benchmark.cases)
    return measured.checks


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=1, add_options=_add_options)
    if benchmark.lacks(missing_module("vllm")):
        return 0
    options, quick = benchmark.options, benchmark.quick
    checks = Checks()
    if ROWS in options.parts:
        checks = _measure_rows(benchmark)
    if FIRST_TOKEN in options.parts:
        model = ENGINE_MODELS[options.first_token_model or ("tiny" if quick else "mid")]
        tokens = _FIRST_TOKEN_PROMPT // (options.first_token_scale or (16 if quick else 1))
        rounds = 1 if quick else options.first_token_rounds
        with benchmark.steps("first token", STEPS * rounds) as step:
            case = measure_first_token(
                model,
                tokens,
                rounds,
                options.cpu_bytes,
                checks,
                step,
            )
        benchmark.cases.append(case)
        console().print(case_table(case))
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
