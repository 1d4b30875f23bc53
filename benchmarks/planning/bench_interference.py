"""Measures the effect of a prefill on requests that decode. Prompts of increasing length arrive while a batch decodes.

It measures the longest gap between two tokens of the batch, and the prompt's own time to first token. Each engine has
one core. The first engine prefills whole prompts, the second one prefills in small chunks, and the third one has vLLM's
priority scheduling, in which the batch has priority over the prompt. They are compared with P/D: a prefill and a decode
engine with the store between them. This is DistServe's figure 2, with real engines. Two more runs explain the gap of
P/D. In the first, the prefill engine computes a prompt but hands it to no engine, so only the effect of two busy cores
on each other remains. In the second, no prompt arrives during the same time. Both run in the same rounds as P/D and
whole prompts.

Needs vLLM and two cores; without them nothing is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.planning.bench_predicted import NO_CACHE
from benchmarks.remote_kv_cache.engine_models import ENGINE_MODELS, save_model
from benchmarks.remote_kv_cache.harness import Benchmark, missing_cores, missing_module
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.report import console
from benchmarks.remote_kv_cache.served import engine, proxy
from kvstore_serving.load.client import Client, RequestBodies
from kvstore_serving.load.prompts import HASHED_TOKENS, Prompts
from kvstore_serving.load.records import Planned
from kvstore_serving.load.run import body_of

WHOLE: Final = "whole prompts"
CHUNKS: Final = "chunks of 128 tokens"
PRIORITY: Final = "priority for the batch"
APART: Final = "prefill and decode apart"
FOR_NOBODY: Final = "apart, the prompt handed to nobody"
NO_PROMPT: Final = "apart, as long without a prompt"
LENGTHS: Final = (128, 512, 1024, 2048, 4096)
BATCH: Final = 4
CONTEXT: Final = 256
ROUNDS: Final = 5
BEFORE: Final = 24  # tokens of each answer of the batch before the prompt comes
ANSWER: Final = 2048  # tokens of the batch's answers; they are aborted when the prompt has its first token
BUDGET: Final = "8192"  # tokens in a step: a whole prompt fits
WAYS: Final[dict[str, Sequence[str]]] = {
    WHOLE: ("--max-num-batched-tokens", BUDGET),
    CHUNKS: ("--max-num-batched-tokens", "128"),
    PRIORITY: ("--max-num-batched-tokens", BUDGET, "--scheduling-policy", "priority"),
}

Seconds = tuple[float, float, float]
Way = Callable[[int], Coroutine[Any, Any, Seconds]]  # length of the prompt -> the figures of a round


class Asking:
    """Requests to one address. Every prompt is new."""

    def __init__(self, url: str, vocabulary: int, priority: bool) -> None:
        self._prompts, self._next_id = Prompts(vocabulary, 5), 0
        self._url, self._priority = url, priority

    async def round(self, length: int, elsewhere: str = "", nothing_s: float = 0.0) -> Seconds:
        """Return in seconds: the longest gap of the batch while the prompt is computed, its median gap before, and the
        prompt's time to first token.

        elsewhere: the address to which the prompt is sent, if it is not the batch's. nothing_s: if above 0, send no
        prompt and wait for this many seconds instead."""
        async with Client(self._url, "completions", timeout_s=300.0, api_key=None, whole_output=True) as client:
            came: list[list[float]] = [[] for _ in range(BATCH)]
            batch = [asyncio.create_task(self._send(client, CONTEXT, ANSWER, 0, times)) for times in came]
            while min(map(len, came)) < BEFORE and not any(task.done() for task in batch):
                await asyncio.sleep(0.01)
            times: list[float] = []
            if nothing_s:
                times.append(time.perf_counter())
                await asyncio.sleep(nothing_s)
                times.append(time.perf_counter())
            elif elsewhere:
                async with Client(elsewhere, "completions", timeout_s=300.0, api_key=None, whole_output=True) as other:
                    await self._send(other, length, 1, 1, times)
            else:
                await self._send(client, length, 1, 1, times)
            ended = [task for task in batch if task.done()]
            for task in batch:
                task.cancel()
            await asyncio.gather(*batch, return_exceptions=True)
        for task in ended:
            task.result()
            raise RuntimeError(f"the batch ended before the prompt of {length} tokens: its answers are too short")
        begin, end = times[0], times[1]
        pairs = [pair for each in came for pair in itertools.pairwise(each[1:])]
        beside = [after - before for before, after in pairs if after > begin and before < end]
        alone = [after - before for before, after in pairs if after <= begin]
        return max(beside), median(alone), end - begin

    async def _send(self, client: Client, length: int, output: int, priority: int, times: list[float]) -> None:
        """Send a request. times: the times of sending and of each part of the answer are added to it, even if the call
        is cancelled. Raises `RuntimeError` if the request fails."""
        extra = f'{{"priority": {priority}}}' if self._priority else "{}"
        bodies = RequestBodies("m", "completions", extra=extra)
        blocks = -(-length // HASHED_TOKENS)
        planned = Planned(0, 0.0, range(self._next_id, self._next_id + blocks), length, output)
        self._next_id += blocks
        body = await body_of(planned, self._prompts, bodies, lambda: asyncio.sleep(0))

        def clock() -> float:
            times.append(time.perf_counter())
            return times[-1]

        outcome = await client.send(planned, body, clock)
        if outcome.error:
            raise RuntimeError(f"a prompt of {length} tokens: {outcome.error}: {outcome.message}")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__ or "", ROUNDS)
    if benchmark.lacks(missing_module("vllm"), missing_cores()):
        return 1
    model = ENGINE_MODELS["tiny" if benchmark.quick else "mid"]
    weights = save_model(model)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    ways = () if benchmark.quick else (CHUNKS, PRIORITY)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for way in ways:
            with engine(weights, first, scratch / "engine.log", None, *WAYS[way], NO_CACHE) as url:
                _measure(benchmark, {way: Asking(url, model.vocab_size, way == PRIORITY).round})
        with ExitStack() as stack:
            url = stack.enter_context(engine(weights, first, scratch / "whole.log", None, *WAYS[WHOLE], NO_CACHE))
            beside: dict[str, Way] = {WHOLE: Asking(url, model.vocab_size, False).round}
            if not benchmark.quick:
                endpoint = stack.enter_context(kvstore_server(1 << 30))
                urls = [
                    stack.enter_context(engine(weights, core, scratch / f"{core}.log", endpoint, *WAYS[WHOLE]))
                    for core in (first, second)
                ]
                front = stack.enter_context(proxy(endpoint, urls[:1], urls[1:], "split"))
                beside |= _ways_apart(Asking(front, model.vocab_size, False), urls[0])
            _measure(benchmark, beside)
    benchmark.finish(batch=BATCH, context=CONTEXT, model=model.to_json())
    return 0


def _ways_apart(asking: Asking, prefill: str) -> dict[str, Way]:
    took_s = dict.fromkeys(LENGTHS, 0.0)

    async def apart(length: int) -> Seconds:
        found = await asking.round(length)
        took_s[length] = found[2]
        return found

    return {
        APART: apart,
        FOR_NOBODY: lambda length: asking.round(length, elsewhere=prefill),
        NO_PROMPT: lambda length: asking.round(length, nothing_s=took_s[length]),
    }


def _measure(benchmark: Benchmark, ways: dict[str, Way]) -> None:
    """Run all rounds, each with all ways."""
    lengths = LENGTHS[:1] if benchmark.quick else LENGTHS
    for warm_up in ways.values():
        asyncio.run(warm_up(lengths[0]))
    found: dict[tuple[str, int], list[Seconds]] = {(way, length): [] for way in ways for length in lengths}
    for _ in range(benchmark.rounds):
        for length in lengths:
            for way, round_of in ways.items():
                found[way, length].append(asyncio.run(round_of(length)))
    for (way, length), rounds in found.items():
        gap, alone, ttft = (median(column) for column in zip(*rounds, strict=True))
        console().print(
            f"{way}, {length}: gap {gap * 1e3:.0f} ms, alone {alone * 1e3:.1f} ms, TTFT {ttft * 1e3:.0f} ms"
        )
        benchmark.found(
            f"{way}, {length}", group=way, tokens=length, longest_gap_s=gap, gap_alone_s=alone, ttft_s=ttft,
            rounds=[list(each) for each in rounds],
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
