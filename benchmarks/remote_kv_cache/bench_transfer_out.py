"""Measures how much sending blocks slows an engine that finds no blocks in the store. The result is the number of
prompts a second with the connector, as a share of that without it.

Four different prompts are sent at once, with one token of output and empty caches. There are eight limits of tokens a
step, each with the engine's own prefix cache on and off. Then the prefill of a larger model is measured with the
engine's default settings; its target is 0.97 of the throughput without the connector. Four engines run at the same time
and get the prompts in turn. One has the connector. One has the connector with a CPU tier, but no server listens at its
endpoint, so it swaps out and sends nothing. Two have no connector; they show how much equal engines differ. The time
"until stored" ends when the server has every block, and the time "until answered" ends with the last answer.

The prompts have 8192 tokens divided by the scale. Needs vLLM; without it nothing is measured.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, EngineModel, add_engine_model_option, full_blocks
from benchmarks.remote_kv_cache.engines import WITHOUT, Engine, Store, add_cpu_bytes_option
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import free_port, kvstore_server
from benchmarks.remote_kv_cache.report import Case, console

AGAIN: Final = "another engine without"
ANSWERED: Final = "with, until answered"
STORED: Final = "with, until stored"
SWAPPED: Final = "swapping out only"
BATCH_TOKENS: Final = (1024, 768, 512, 384, 256, 128, 64, 32)
BATCH_SIZES: Final = "batch sizes"
PREFILL: Final = "prefill"
PARTS: Final = (BATCH_SIZES, PREFILL)
TARGET: Final = 0.97
_PROMPTS: Final = 4
_PROMPT_TOKENS: Final = 8192
_OUTPUT_TOKENS: Final = 1
_SEQUENCES: Final = 32  # the most in a step, because an engine refuses to have more sequences than tokens in a step


@dataclass(frozen=True)
class Setting:
    """Engines and their prompts. `arguments`: the arguments of all engines."""

    group: str
    name: str
    model: EngineModel
    prompt_tokens: int
    rounds: int
    prefix_cache: bool
    arguments: dict[str, Any]


def settings(options: argparse.Namespace, quick: bool, rounds: int) -> list[Setting]:
    """Return the settings that the options select. The 8 x 2 settings of the published design come first."""
    model = ENGINE_MODELS[options.model or "tiny"]
    tokens = _PROMPT_TOKENS // (options.scale or (32 if quick else 8))
    found = [
        Setting(
            group=BATCH_SIZES,
            name=f"{batch} tokens a step, engine's cache {'on' if prefix_cache else 'off'}",
            model=model,
            prompt_tokens=tokens,
            rounds=rounds,
            prefix_cache=prefix_cache,
            arguments={"max_num_batched_tokens": batch, "max_num_seqs": _SEQUENCES},
        )
        for prefix_cache in (True, False)
        for batch in (BATCH_TOKENS[:: len(BATCH_TOKENS) - 1] if quick else BATCH_TOKENS)
    ]
    model = ENGINE_MODELS[options.prefill_model or ("tiny" if quick else "mid")]
    tokens = _PROMPT_TOKENS // (options.prefill_scale or (32 if quick else 4))
    found.append(
        Setting(
            group=PREFILL,
            name=f"{_PROMPTS} prompts of {tokens} tokens, {model.name} model, default settings",
            model=model,
            prompt_tokens=tokens,
            rounds=rounds if quick else options.prefill_rounds,
            prefix_cache=True,
            arguments={},
        )
    )
    return [setting for setting in found if setting.group in options.parts]


def measure(setting: Setting, cpu_bytes: int, checks: Checks, step: Callable[[], object]) -> Case:
    """Start a server and the engines, and send the prompts to each engine in turn. step: called after each turn."""
    model = setting.model
    blocks = _PROMPTS * full_blocks(setting.prompt_tokens)  # in one round
    arguments = {
        "max_model_len": setting.prompt_tokens + 2 * _OUTPUT_TOKENS,
        "enable_prefix_caching": setting.prefix_cache,
        "kv_cache_memory_bytes": 2 * blocks * model.block_bytes + (64 << 20),
        **setting.arguments,
    }
    seconds: dict[str, list[float]] = {WITHOUT: [], AGAIN: [], SWAPPED: [], ANSWERED: [], STORED: []}
    with ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks * model.block_bytes * (setting.rounds + 1)))
        store = stack.enter_context(Store(endpoint))
        plain = stack.enter_context(Engine(model, None, **arguments))
        connector = {"endpoint": endpoint, "cpu_bytes": cpu_bytes}
        sending = stack.enter_context(Engine(model, connector, **arguments))
        no_store = {"endpoint": f"127.0.0.1:{free_port()}", "cpu_bytes": cpu_bytes}
        swapping = stack.enter_context(Engine(model, no_store, **arguments))
        again = stack.enter_context(Engine(model, None, **arguments))
        engines = plain, sending, swapping, again
        for engine in engines:
            engine.wait_ready()
        for number in range(setting.rounds + 1):
            prompts = model.prompts(number, _PROMPTS, setting.prompt_tokens)
            runs = {}
            stored_s = 0.0
            for engine in random.Random(number).sample(engines, len(engines)):
                runs[engine] = run = engine.generate(prompts, _OUTPUT_TOKENS)
                if engine is sending:
                    stored_s = store.wait_created((number + 1) * blocks) - run.begin
                step()
            if number:
                seconds[WITHOUT].append(runs[plain].seconds)
                seconds[AGAIN].append(runs[again].seconds)
                seconds[SWAPPED].append(runs[swapping].seconds)
                seconds[ANSWERED].append(runs[sending].seconds)
                seconds[STORED].append(stored_s)
            what = f"{setting.name}, round {number}"
            checks.tokens(what, prompts, runs[sending].answers, runs[plain].answers, plain)
            checks.tokens(f"{what}, {SWAPPED}", prompts, runs[swapping].answers, runs[plain].answers, plain)
            checks.cached(f"{what}, with", runs[sending].answers, 0, 0)
            checks.cached(f"{what}, without", runs[plain].answers, 0, 0)
    return Case(
        name=setting.name,
        seconds=seconds,
        limits={AGAIN: WITHOUT, SWAPPED: WITHOUT, ANSWERED: WITHOUT, STORED: WITHOUT},
        references=(AGAIN, SWAPPED, ANSWERED, STORED),
        parameters={
            "group": setting.group,
            "model": model.to_json(),
            "prompts": _PROMPTS,
            "prompt_tokens": setting.prompt_tokens,
            "scale": _PROMPT_TOKENS / setting.prompt_tokens,
            "output_tokens": _OUTPUT_TOKENS,
            "prefix_cache": setting.prefix_cache,
            "blocks_stored": blocks,
            **setting.arguments,
        },
    )


def show(cases: list[Case]) -> None:
    table = Table("prompts a second", title="Sending at hit rate 0", title_justify="left")
    rates, shares = (WITHOUT, SWAPPED, ANSWERED, STORED), (AGAIN, SWAPPED, ANSWERED, STORED)
    for heading in (*rates, *(f"{name} ÷ without" for name in shares)):
        table.add_column(heading, justify="right")
    for case in cases:
        told = [f"{_PROMPTS / case.median(name):.2f}" for name in rates]
        table.add_row(case.name, *told, *(f"{case.ratio(WITHOUT, name):.3f}" for name in shares))
    console().print(table)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser)
    parser.add_argument("--scale", type=int, help="prompts have 8192 / SCALE tokens; default: 8; --quick: 32")
    add_engine_model_option(parser, "--prefill-model", "mid")
    parser.add_argument("--prefill-scale", type=int, help="the same for the prefill; default: 4; --quick: 32")
    parser.add_argument("--prefill-rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of it")
    add_cpu_bytes_option(parser, 512 << 20)


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=5, add_options=_add_options)
    if benchmark.lacks(missing_module("vllm")):
        return 0
    checks = Checks()
    options = benchmark.options
    planned = settings(options, benchmark.quick, benchmark.rounds)
    with benchmark.steps("", sum(4 * (setting.rounds + 1) for setting in planned)) as step:
        for setting in planned:
            step(setting.name, 0)
            benchmark.cases.append(measure(setting, options.cpu_bytes, checks, step))
    show(benchmark.cases)
    return conclude(benchmark, checks, cpu_bytes=options.cpu_bytes)


if __name__ == "__main__":
    sys.exit(main())
