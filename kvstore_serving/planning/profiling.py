"""Measures the profile of a running engine, through its OpenAI-compatible API.

* Prefill: several prompts of one length are sent at once, each for an answer of one token. The time ends when the last
  answer has its token.
* Decode: several requests with contexts of one length are sent at once. The time is the median gap between tokens while
  all of the requests decode.
* Contention: a prefill is measured while another engine of the same node decodes, and a decoding step while that engine
  prefills. Each result is a multiple of the time without the other engine. Both times are measured in turns.

Every prompt is new, so that no cache shortens its computation. The times include the engine's other work for a request,
such as HTTP, because users experience that, too.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore_serving.load.client import Client, RequestBodies
from kvstore_serving.load.prompts import HASHED_TOKENS, Prompts
from kvstore_serving.load.records import Planned, RequestOutcome
from kvstore_serving.load.run import run_load
from kvstore_serving.planning.fitting import TimeSample, fit_decode, fit_prefill
from kvstore_serving.planning.metrics_page import MetricsError, metrics_of
from kvstore_serving.planning.profile import Contention, Degree

# The load on the other engine while contention is measured. It is given by the number of requests at once, the tokens
# of each prompt and of each answer, and the time for the requests to begin.
BESIDE_REQUESTS: Final = 4
BESIDE_PROMPT: Final = 16
BESIDE_TOKENS: Final = 256
BESIDE_START_S: Final = 0.5


class MeasureError(Exception):
    """The engine did not do what was requested; the message says what."""


@dataclass(frozen=True)
class ProfileGrid:
    """What is measured. Each measurement is repeated `rounds` times.

    lengths: the lengths of prompts, and of the contexts of requests that decode
    prefill_batches: the numbers of prompts at once
    decode_batches: the numbers of requests that decode at once
    decode_tokens: the number of tokens that each of these requests generates
    """

    lengths: Sequence[int]
    prefill_batches: Sequence[int]
    decode_batches: Sequence[int]
    decode_tokens: int = 32
    rounds: int = 3
    vocabulary: int = 1024
    timeout_s: float = 600.0

    @property
    def runs(self) -> int:
        """The number of times that requests are sent."""
        return self.rounds * len(self.lengths) * (len(self.prefill_batches) + len(self.decode_batches))


@dataclass
class Measured:
    """The measured times, which are medians over the rounds."""

    prefill: list[TimeSample] = field(default_factory=list)
    decode: list[TimeSample] = field(default_factory=list)

    def degree(self, tp: int, pp: int, kv_tokens: int) -> Degree:
        """Return the fitted times. Raises `TooFew`."""
        return Degree(tp, fit_prefill(self.prefill), [fit_decode(self.decode)], {pp: kv_tokens})


async def measure(url: str, model: str, sweep: ProfileGrid, progress: Callable[[int, int], None]) -> Measured:
    """Measure an engine that has no other load. Raises `MeasureError`."""
    engine = _Engine(url, model, sweep, progress)
    async with engine.client:
        for length in sweep.lengths[:1]:  # the first requests warm up the engine, which may compile
            await engine.prefill(1, length)
        return await engine.measure()


async def measure_contention(
    url: str, beside: str, model: str, sweep: ProfileGrid, progress: Callable[[int, int], None]
) -> Contention:
    """Measure how much longer an engine takes while another engine of its node works. `beside`: the other engine's URL.
    Prompts and batches are from the middle of the sweep. Raises `MeasureError`."""
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
    """Return the number of tokens that a vLLM engine's memory holds, from its metrics. Returns None if the metrics do
    not have it."""
    try:
        for sample in await metrics_of(url):
            if sample.name == "vllm:cache_config_info":
                return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    except (MetricsError, ValueError, KeyError):
        return None
    return None


class _Engine:
    def __init__(self, url: str, model: str, sweep: ProfileGrid, progress: Callable[[int, int], None]) -> None:
        self._bodies = RequestBodies(model, "completions")
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
        for _ in range(sweep.rounds):  # in turns, so that a busy moment of the machine affects all of them
            for batch, length in prefills:
                times.setdefault(("prefill", batch, length), []).append(await self.prefill(batch, length))
            for batch, length in decodes:
                times.setdefault(("decode", batch, length), []).append(await self.decode(batch, length))
        for (phase, batch, length), seconds in times.items():
            median = float(np.median(seconds))
            if phase == "prefill":
                found.prefill.append(TimeSample(batch, length, median))
            else:
                found.decode.append(TimeSample(batch, length + sweep.decode_tokens / 2, median))
        return found

    async def prefill(self, batch: int, length: int) -> float:
        """Return the seconds until all prompts have their first token."""
        outcomes = await self._send(batch, length, 1)
        return max(each.arrivals_s[0] for each in outcomes) - min(each.sent_s for each in outcomes)

    async def decode(self, batch: int, length: int) -> float:
        """Return the seconds of a decoding step."""
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
            tokens *= 2  # the first request had all its tokens before the last request had its first
        raise MeasureError(
            f"{batch} requests of {length} tokens did not decode at the same time, with answers of {tokens // 2} "
            "tokens: does the engine accept this many requests at once?"
        )

    @asynccontextmanager
    async def busy(self, batch: int, length: int, output: int) -> AsyncIterator[None]:
        """Keep the engine busy by sending `batch` requests at once again and again. Raises `MeasureError` if the engine
        was not busy."""
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

    async def _send(
        self, batch: int, length: int, output: int, stop: asyncio.Event | None = None
    ) -> list[RequestOutcome]:
        planned = [self._planned(index, length, output) for index in range(batch)]
        run = await run_load(planned, self.client, self._prompts, self._bodies, stop=stop or asyncio.Event())
        for outcome in run.outcomes:
            if outcome.error:
                raise MeasureError(
                    f"{batch} prompt(s) of {length} tokens, with answers of {output} tokens: "
                    f"{outcome.error}: {outcome.message}"
                )
        self._done += 1
        self._progress(min(self._done, self._sweep.runs), self._sweep.runs)
        return run.outcomes

    def _planned(self, index: int, length: int, output: int) -> Planned:
        blocks = -(-length // HASHED_TOKENS)
        first, self._next_id = self._next_id, self._next_id + blocks
        return Planned(index, 0.0, range(first, first + blocks), length, output)
