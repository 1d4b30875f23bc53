"""Prompts that are handed over in whole blocks or in parts of layers, over links of limited rate.

A prefill engine and a decode engine, each on one core, and a store at the end of two links, one for each engine, of one
rate each way; `--round-trip-ms` gives them a delay, too. Both engines are asked at once. *Ready* is when the decode
side has its first token, less what it takes for the same prompt with all blocks in its own cache: when the last byte
was there. Beside it stand the time to compute the prompt (without a store), and the time that a plain socket needs for
its bytes on the link: sooner than the longer of the two nothing can be ready. The prefill engines compute a prompt in
one step, or in chunks, whose blocks are sent as each is computed.

*Beyond* the longer of what this prefill took and the link's time: all that the way through the store adds. Without
parts it is about the link's time once more, since nothing leaves before all is computed; with parts, that of one part.

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
from benchmarks.remote_kv_cache.test_hand_over import hand_over

COMPUTE: Final = "computing it"
LINK: Final = "its bytes on the link, plain socket"
WHOLE_BLOCKS: Final = "whole blocks"
IN_CHUNKS: Final = ", in chunks"
CHUNKED_WHOLE: Final = f"{WHOLE_BLOCKS}{IN_CHUNKS}"
TOKENS: Final = 4096
RATES: Final = (10e6, 20e6, 40e6, 80e6, 200e6, 1e9, 4e9)  # bytes/s each way
DELAYED_RATES: Final = (20e6, 80e6, 200e6)  # those of links with a delay
_CHUNK: Final = 512
_WARM_UP: Final = 1_000_000  # seeds from here on
_LEAD_S: Final = 0.3  # from the order to the request
_FULL: Final = 10e9  # bytes/s: while the engines warm up


@dataclass(frozen=True)
class Mode:
    """How a pair of engines hands over a prompt."""

    parts: int
    step_tokens: int

    @property
    def name(self) -> str:
        """As it is called in the results."""
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
        """endpoints: of the store, over the link of each engine."""
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
        """-> when it is ready, and when the prefill had its token, in seconds from the request."""
        [prefilled], [decoded] = hand_over(self.prefill, self.decode, [(0.0, prompt)], 2)
        self.decode.begin([Arrival(0.0, prompt, 2)], time.perf_counter() + _LEAD_S)
        [again] = self.decode.served()
        answers = [Answer(decoded.token_ids, decoded.cached_tokens, decoded.token_s[0])]
        checks.tokens(self.mode.name, [prompt], answers, plain.generate([prompt], 2).answers, plain)
        checks.cached(self.mode.name, answers, len(prompt), len(prompt))
        return decoded.token_s[0] - again.token_s[0], prefilled.token_s[0]


def measure(benchmark: Benchmark, model: EngineModel, cores: Sequence[int], checks: Checks) -> None:
    """All rounds, rate by rate."""
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
        "--round-trip-ms", type=float, default=0.0, metavar="MS", help="that the links' delay adds (default: 0)"
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
