"""Compares two ways to load the beginning of a prompt: before the step that computes the rest, and during it.

`KVStoreConnector` starts a request when all its blocks are there. `LayeredConnector` starts it at once, and the model
waits for each layer's blocks, which are kept in layer slices. Prompts with a stored beginning and a new rest are sent
to one engine at a time, over links of limited rate. The times are times to the first token, without the engine's own
prefix cache. Needs vLLM, root and iproute2; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import BLOCK_TOKENS, ENGINE_MODELS, EngineModel, add_engine_model_option
from benchmarks.remote_kv_cache.engines import WITHOUT, Engine, Store
from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import case_table, console

RATES: Final = (80e6, 1e9)
STORED: Final = 2048
RESTS: Final = (256, 1024)
BEFORE: Final = "load, then compute"
_FULL: Final = 10e9  # bytes/s: the rate while the store is filled
_WARM_UP: Final = 1_000_000


@dataclass(frozen=True)
class Mode:
    """A way to load. `parts`: the number of layer slices of a block."""

    layered: bool
    parts: int

    @property
    def name(self) -> str:
        """Its name in the results."""
        if not self.layered:
            return BEFORE if self.parts == 1 else f"{BEFORE}, {self.parts} parts"
        return f"layer by layer, {self.parts} parts"


MODES: Final = (Mode(False, 1), Mode(True, 2), Mode(True, 4))


def _engine(mode: Mode, model: EngineModel, endpoint: str, arguments: dict[str, Any]) -> Engine:
    options = {"endpoint": endpoint, "layer_parts": mode.parts, "timeout_s": 30, "always_load": True}
    if not mode.layered:
        return Engine(model, options, **arguments)
    connector = {
        "kv_connector": "LayeredConnector",
        "kv_connector_module_path": "benchmarks.remote_kv_cache.layered_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    return Engine(model, connector, **arguments)


def measure(benchmark: Benchmark, model: EngineModel, checks: Checks) -> None:
    """Run all rounds, rate by rate."""
    rests = RESTS[:1] if benchmark.quick else RESTS
    rates = RATES[:1] if benchmark.quick else RATES
    longest = STORED + max(rests) + BLOCK_TOKENS
    arguments: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 3 * (longest // BLOCK_TOKENS) * model.block_bytes + (64 << 20),
    }
    modes = [mode for mode in MODES if model.num_hidden_layers % mode.parts == 0]
    rounds = benchmark.rounds
    room = (rounds * len(rates) * len(rests) + 2) * len(modes) * 2 * (longest // BLOCK_TOKENS + 1) * model.block_bytes
    seeds = iter(range(1, 1_000_000))
    with ExitStack() as stack, benchmark.steps("rounds", rounds * len(rates) * len(rests)) as step:
        link = stack.enter_context(LimitedLink(_FULL))
        endpoint = stack.enter_context(
            kvstore_server(
                min(room, 8 << 30),
                flags=("--host", link.address, "--insecure", "--unix-socket", "off"),
                prefix=link.command,
            )
        )
        store = stack.enter_context(Store(endpoint))
        plain = stack.enter_context(Engine(model, None, **arguments))
        engines = {mode: stack.enter_context(_engine(mode, model, endpoint, arguments)) for mode in modes}
        for engine in (plain, *engines.values()):
            engine.generate(model.prompts(_WARM_UP, 1, STORED), 1)
        for rate in rates:
            for rest in rests:
                taken: dict[str, list[float]] = {WITHOUT: [], **{mode.name: [] for mode in modes}}
                for number in range(rounds):
                    [head, tail] = model.prompts(next(seeds), 2, max(STORED, rest))
                    head, prompt = head[:STORED], head[:STORED] + tail[:rest]
                    right = plain.generate([prompt], 1)
                    taken[WITHOUT].append(right.answers[0].first_token_s)
                    for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
                        store.purge()
                        link.set_rate(_FULL)
                        before = store.settle()
                        engines[mode].generate([head], 1)
                        store.settle(before + STORED // BLOCK_TOKENS * mode.parts)
                        link.set_rate(rate)
                        [answer] = engines[mode].generate([prompt], 1).answers
                        taken[mode.name].append(answer.first_token_s)
                        checks.tokens(mode.name, [prompt], [answer], right.answers, plain)
                        checks.cached(mode.name, [answer], STORED, STORED)
                    step()
                benchmark.add(
                    f"{rate / 1e6:.0f} MB/s, {rest} new tokens",
                    taken,
                    limits={mode.name: BEFORE for mode in modes if mode.layered},
                    model=model.to_json(),
                    stored_tokens=STORED,
                    new_tokens=rest,
                    bytes_per_s=rate,
                )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser, default="tiny")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=_add_options)
    if benchmark.lacks(missing_module("vllm"), unavailable()):
        return 0
    checks = Checks()
    measure(benchmark, ENGINE_MODELS[benchmark.options.model or "tiny"], checks)
    for case in benchmark.cases:
        console().print(case_table(case))
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
