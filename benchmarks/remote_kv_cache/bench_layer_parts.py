"""Compares hand-overs of prompts in whole blocks and in layer slices ("parts"), over links of limited rate.

A prefill engine and a decode engine have one core each. The store is at the end of two links, one for each engine, with
the same rate each way; `--round-trip-ms` adds a delay. Both engines get the request at the same time. *Ready* is the
time until the last byte has arrived: the decode engine's time to first token, minus its time for the same prompt with
all blocks in its own cache. It is compared with the time to compute the prompt (without a store), and with the time
that a plain socket takes to send the prompt's bytes over the link. A prompt cannot be ready sooner than the longer of
the two. The prefill engines compute a prompt in one step, or in chunks, and send the blocks of each chunk as soon as it
is computed.

*Beyond* is how much later a prompt is ready than after the longer of this prefill and the link's time: all that the
hand-over through the store adds. Without parts it is about the link's time, because nothing is sent before everything
is computed. With parts it is about the time to send one part.

Needs vLLM, two cores, root and iproute2; without them nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.remote_kv_cache.bench_hand_over import hand_over
from benchmarks.remote_kv_cache.engine_checks import Checks, conclude
from benchmarks.remote_kv_cache.engine_models import (
    BLOCK_TOKENS,
    ENGINE_MODELS,
    EngineModel,
    add_engine_model_option,
)
from benchmarks.remote_kv_cache.engine_process import Answer, Arrival
from benchmarks.remote_kv_cache.engines import Engine
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.limited_link import LimitedLink, unavailable
from benchmarks.remote_kv_cache.plain import plain_socket_at
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import case_table, console

COMPUTE: Final = "computing it"
LINK: Final = "its bytes on the link, plain socket"
WHOLE_BLOCKS: Final = "whole blocks"
IN_CHUNKS: Final = ", in chunks"
CHUNKED_WHOLE: Final = f"{WHOLE_BLOCKS}{IN_CHUNKS}"
TOKENS: Final = 4096
RATES: Final = (10e6, 20e6, 40e6, 80e6, 200e6, 1e9, 4e9)  # bytes/s each way
DELAYED_RATES: Final = (20e6, 80e6, 200e6)  # the rates of links with a delay
_CHUNK: Final = 512
_WARM_UP: Final = 1_000_000  # the first seed of warm-up prompts
_LEAD_S: Final = 0.3  # the time from the command to the request
_FULL: Final = 10e9  # bytes/s: the rate while the engines warm up


@dataclass(frozen=True)
class Mode:
    """How a pair of engines hands over a prompt."""

    parts: int
    step_tokens: int

    @property
    def name(self) -> str:
        """Its name in the results."""
        what = WHOLE_BLOCKS if self.parts == 1 else f"{self.parts} parts"
        return what if self.step_tokens >= TOKENS else f"{what}{IN_CHUNKS}"


MODES: Final = tuple(Mode(parts, 2 * TOKENS) for parts in (1, 2, 4, 8)) + tuple(Mode(parts, _CHUNK) for parts in (1, 4))


def _arguments(model: EngineModel, step_tokens: int) -> dict[str, Any]:
    return {
        "max_model_len": TOKENS + 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": step_tokens,
        "kv_cache_memory_bytes": 4 * (TOKENS // BLOCK_TOKENS + 2) * model.block_bytes,
    }


class Pair:
    """A prefill and a decode engine."""

    def __init__(
        self, mode: Mode, model: EngineModel, endpoints: Sequence[str], stack: ExitStack, cores: Sequence[int]
    ) -> None:
        """endpoints: the store's endpoints over the links of both engines."""
        self.mode = mode
        self.prefill, self.decode = (
            stack.enter_context(
                Engine(
                    model,
                    {"endpoint": endpoint, "layer_parts": mode.parts, "timeout_s": 20},
                    cores=[core],
                    **_arguments(model, mode.step_tokens),
                )
            )
            for endpoint, core in zip(endpoints, cores, strict=False)
        )

    def hand_over(self, prompt: list[int], checks: Checks, plain: Engine) -> tuple[float, float]:
        """Hand over a prompt. Return the seconds from the request until the prompt is ready, and until the prefill
        engine has its token."""
        [prefilled], [decoded] = hand_over(self.prefill, self.decode, [(0.0, prompt)], 2)
        self.decode.begin([Arrival(0.0, prompt, 2)], time.perf_counter() + _LEAD_S)
        [again] = self.decode.served()
        answers = [Answer(decoded.token_ids, decoded.cached_tokens, decoded.token_s[0])]
        checks.tokens(self.mode.name, [prompt], answers, plain.generate([prompt], 2).answers, plain)
        checks.cached(self.mode.name, answers, len(prompt), len(prompt))
        return decoded.token_s[0] - again.token_s[0], prefilled.token_s[0]


def measure(benchmark: Benchmark, model: EngineModel, cores: Sequence[int], checks: Checks) -> None:
    """Run all rounds, rate by rate."""
    rounds, round_trip_s = benchmark.rounds, benchmark.options.round_trip_ms / 1e3
    rates = DELAYED_RATES if round_trip_s else RATES
    nbytes = TOKENS * model.token_bytes
    seeds = iter(range(1, 1_000_000))
    with ExitStack() as stack, benchmark.steps("rounds", rounds * len(rates)) as step:
        link = stack.enter_context(LimitedLink(_FULL, links=2, round_trip_s=round_trip_s))
        sock = stack.enter_context(plain_socket_at(link.address, link.command, 1, nbytes))
        row = np.ones((1, nbytes), dtype=np.uint8)
        everywhere = stack.enter_context(
            kvstore_server(
                nbytes * (rounds * len(rates) + 2) * len(MODES),
                flags=("--host", "0.0.0.0", "--insecure", "--unix-socket", "off"),
                prefix=link.command,
            )
        )
        plain = stack.enter_context(Engine(model, None, cores=[cores[0]], **_arguments(model, 2 * TOKENS)))
        endpoints = [f"tcp://{address}:{everywhere.rpartition(':')[2]}" for address in link.addresses]
        pairs = [Pair(mode, model, endpoints, stack, cores) for mode in MODES]
        for number, pair in enumerate(pairs):
            [prompt] = model.prompts(_WARM_UP + number, 1, TOKENS)
            pair.hand_over(prompt, Checks(), plain)
        for rate in rates:
            link.set_rate(rate)
            taken: dict[str, list[float]] = {name: [] for name in (COMPUTE, *(mode.name for mode in MODES), LINK)}
            beyond: dict[str, list[float]] = {mode.name: [] for mode in MODES}
            for number in range(rounds):
                [prompt] = model.prompts(_WARM_UP + next(seeds), 1, TOKENS)
                taken[COMPUTE].append(plain.generate([prompt], 1).seconds)
                began = time.perf_counter()
                sock.set(row, 0, 1)
                taken[LINK].append(time.perf_counter() - began)
                for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                    [prompt] = model.prompts(next(seeds), 1, TOKENS)
                    ready, prefilled = pair.hand_over(prompt, checks, plain)
                    taken[pair.mode.name].append(ready)
                    beyond[pair.mode.name].append(ready - max(prefilled, taken[LINK][-1]))
                step()
            benchmark.add(
                f"a link of {rate / 1e6:.0f} MB/s",
                taken,
                moved=dict.fromkeys(taken, nbytes),
                model=model.to_json(),
                prompt_tokens=TOKENS,
                bytes_per_s=rate,
                round_trip_s=round_trip_s,
                parts={mode.name: mode.parts for mode in MODES},
                link_s=float(np.median(taken[LINK])),
                beyond_s={name: float(np.median(found)) for name, found in beyond.items()},
            )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_model_option(parser)
    parser.add_argument(
        "--round-trip-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="the delay that the links add to a round trip (default: 0)",
    )


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # each engine has one core
    benchmark = Benchmark(__spec__.name, __doc__, rounds=7, add_options=_add_options)
    cores = sorted(os.sched_getaffinity(0))
    delays = benchmark.options.round_trip_ms > 0
    if benchmark.lacks(missing_module("vllm"), missing_cores(), unavailable(delays)):
        return 0
    checks = Checks()
    measure(benchmark, ENGINE_MODELS[benchmark.options.model or "tiny"], cores, checks)
    for case in benchmark.cases:
        console().print(case_table(case))
    return conclude(benchmark, checks)


if __name__ == "__main__":
    sys.exit(main())
