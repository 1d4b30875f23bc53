"""Measures the profile of a running engine, through its OpenAI-compatible API.

* Prefill: so many prompts of one length at once, with one token of answer each; the time is that until the last token.
* Decode: so many requests of one context at once; the time is the median gap between tokens while all of them decode.

* Contention: a prefill while another engine of the same node decodes, and decoding while that one prefills, each as a
  multiple of the time alone, which is measured in turn with it.

Every prompt is new, so that no cache shortens it. What an engine takes for a request beside its computing, such as
HTTP, is in the times: that is what users see.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore_serving.load.client import Bodies, Client
from kvstore_serving.load.prompts import HASHED_TOKENS, Prompts
from kvstore_serving.load.records import Outcome, Planned
from kvstore_serving.load.run import run_load
from kvstore_serving.planning.fitting import Sample, fit_decode, fit_prefill
from kvstore_serving.planning.metrics_page import MetricsError, metrics_of
from kvstore_serving.planning.profile import Contention, Degree

# What keeps the other engine busy while contention is measured: it decodes so many requests, of short prompts and so
# many tokens each, and is given so long to begin.
BESIDE_REQUESTS: Final = 4
BESIDE_PROMPT: Final = 16
BESIDE_TOKENS: Final = 256
BESIDE_START_S: Final = 0.5


class MeasureError(Exception):
    """The engine did not do what was asked; the message says what."""


@dataclass(frozen=True)
class Sweep:
    """What is measured: prompts of these `lengths`, so many at once (`prefill_batches`); and requests with contexts of
    these lengths, of which so many decode at once (`decode_batches`) for `decode_tokens` tokens. Each `rounds`
    times."""

    lengths: Sequence[int]
    prefill_batches: Sequence[int]
    decode_batches: Sequence[int]
    decode_tokens: int = 32
    rounds: int = 3
    vocabulary: int = 1024
    timeout_s: float = 600.0

    @property
    def runs(self) -> int:
        """How many times requests are sent."""
        return self.rounds * len(self.lengths) * (len(self.prefill_batches) + len(self.decode_batches))


@dataclass
class Measured:
    """What was measured: medians over the rounds."""

    prefill: list[Sample] = field(default_factory=list)
    decode: list[Sample] = field(default_factory=list)

    def degree(self, tp: int, pp: int, kv_tokens: int) -> Degree:
        """-> the fitted times. Raises `TooFew`."""
        return Degree(tp, fit_prefill(self.prefill), [fit_decode(self.decode)], {pp: kv_tokens})


async def measure(url: str, model: str, sweep: Sweep, progress: Callable[[int, int], None]) -> Measured:
    """Measure an engine that does nothing else. Raises `MeasureError`."""
    engine = _Engine(url, model, sweep, progress)
    async with engine.client:
        for length in sweep.lengths[:1]:  # the first requests compile and warm up
            await engine.prefill(1, length)
        return await engine.measure()


async def measure_contention(
    url: str, beside: str, model: str, sweep: Sweep, progress: Callable[[int, int], None]
) -> Contention:
    """Measure what an engine takes more while another one of its node, at `beside`, works: prompts and batches from the
    middle of the sweep. Raises `MeasureError`."""
    engine, other = (_Engine(each, model, sweep, lambda done, of: None) for each in (url, beside))
    length = sweep.lengths[len(sweep.lengths) // 2]
    batch = sweep.decode_batches[len(sweep.decode_batches) // 2]
    prefills, decodes = [], []
    async with engine.client, other.client:
        await other.prefill(1, length)
        for number in range(sweep.rounds):
            alone = await engine.prefill(1, length)
            async with other.busy(BESIDE_REQUESTS, BESIDE_PROMPT, BESIDE_TOKENS):
                prefills.append(await engine.prefill(1, length) / alone)
            alone = await engine.decode(batch, length)
            async with other.busy(1, length, 1):
                decodes.append(await engine.decode(batch, length) / alone)
            progress(number + 1, sweep.rounds)
    return Contention(max(1.0, float(np.median(prefills))), max(1.0, float(np.median(decodes))))


async def kv_tokens(url: str) -> int | None:
    """-> the tokens that a vLLM engine's memory holds, from its metrics; None if they do not say."""
    try:
        for sample in await metrics_of(url):
            if sample.name == "vllm:cache_config_info":
                return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    except (MetricsError, ValueError, KeyError):
        return None
    return None


class _Engine:
    def __init__(self, url: str, model: str, sweep: Sweep, progress: Callable[[int, int], None]) -> None:
        self._bodies = Bodies(model, "completions")
        self.client = Client(url, "completions", timeout_s=sweep.timeout_s, api_key=None, whole_output=True)
        self._sweep = sweep
        self._prompts = Prompts(sweep.vocabulary, secrets.randbits(32))  # no cache has prompts of an earlier profile
        self._next_id = 0
        self._progress = progress
        self._done = 0

    async def measure(self) -> Measured:
        sweep, found = self._sweep, Measured()
        prefills = [(batch, length) for length in sweep.lengths for batch in sweep.prefill_batches]
        decodes = [(batch, length) for length in sweep.lengths for batch in sweep.decode_batches]
        times: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(sweep.rounds):  # in turn, so that a busy moment of the machine falls on all of them
            for batch, length in prefills:
                times.setdefault(("prefill", batch, length), []).append(await self.prefill(batch, length))
            for batch, length in decodes:
                times.setdefault(("decode", batch, length), []).append(await self.decode(batch, length))
        for (phase, batch, length), seconds in times.items():
            median = float(np.median(seconds))
            if phase == "prefill":
                found.prefill.append(Sample(batch, length, median))
            else:
                found.decode.append(Sample(batch, length + sweep.decode_tokens / 2, median))
        return found

    async def prefill(self, batch: int, length: int) -> float:
        """-> seconds until all prompts have their first token."""
        outcomes = await self._send(batch, length, 1)
        return max(each.arrivals_s[0] for each in outcomes) - min(each.sent_s for each in outcomes)

    async def decode(self, batch: int, length: int) -> float:
        """-> seconds of a step."""
        tokens = self._sweep.decode_tokens
        for _ in range(3):
            outcomes = await self._send(batch, length, tokens)
            begin = max(each.arrivals_s[0] for each in outcomes)
            end = min(each.arrivals_s[-1] for each in outcomes)
            gaps = [
                after - before
                for each in outcomes
                for before, after in zip(each.arrivals_s, each.arrivals_s[1:], strict=False)
                if before >= begin and after <= end
            ]
            if len(gaps) >= batch:
                return float(np.median(gaps))
            tokens *= 2  # the first had all their tokens before the last had its first
        raise MeasureError(
            f"{batch} requests of {length} tokens did not decode at the same time, with {tokens // 2} tokens of answer "
            "each: does the engine take so many at once?"
        )

    @asynccontextmanager
    async def busy(self, batch: int, length: int, output: int) -> AsyncIterator[None]:
        """Keep the engine busy with requests, so many at once, again and again. Raises `MeasureError` if it was not."""
        stop = asyncio.Event()

        async def work() -> None:
            while not stop.is_set():
                await self._send(batch, length, output, stop)

        working = asyncio.create_task(work())
        await asyncio.wait({working}, timeout=BESIDE_START_S)
        try:
            yield
        finally:
            stop.set()
            await working

    async def _send(self, batch: int, length: int, output: int, stop: asyncio.Event | None = None) -> list[Outcome]:
        planned = [self._planned(index, length, output) for index in range(batch)]
        run = await run_load(planned, self.client, self._prompts, self._bodies, stop=stop or asyncio.Event())
        for outcome in run.outcomes:
            if outcome.error:
                raise MeasureError(
                    f"{batch} prompt(s) of {length} tokens, {output} of answer: {outcome.error}: {outcome.message}"
                )
        self._done += 1
        self._progress(min(self._done, self._sweep.runs), self._sweep.runs)
        return run.outcomes

    def _planned(self, index: int, length: int, output: int) -> Planned:
        blocks = -(-length // HASHED_TOKENS)
        first, self._next_id = self._next_id, self._next_id + blocks
        return Planned(index, 0.0, range(first, first + blocks), length, output)
