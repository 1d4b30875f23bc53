"""The load on a fleet: the lengths of prompts and answers, the times of requests, and how much of each prompt a store
has.

A workload is made once, with its random numbers, and then simulated at several rates. Its times are for a rate of one
request a second, and are divided by the simulated rate. So two simulations differ only in the rate, and attainment
falls as the rate rises.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.trace import TimeUnit, Trace, read_trace

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, as arrays of equal length.

    at: the times of requests in seconds, from 0, with a mean of one request a second
    inputs, outputs: the numbers of tokens of each prompt and answer, at least 1
    hits: the number of leading tokens of each prompt that the store has, which is less than `inputs`
    kept_tokens: the most tokens that the store held for these hits; None if not known
    """

    at: Floats
    inputs: Counts
    outputs: Counts
    hits: Counts
    source: str
    kept_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.at)

    @property
    def means(self) -> Means:
        """The means over its requests."""
        inputs, outputs, hits = (float(each.mean()) for each in (self.inputs, self.outputs, self.hits))
        return Means(inputs, outputs, hits, self.kept_tokens)

    def part(self, number: int, of: int, count: int) -> Workload:
        """Return `count` requests from part `number` of `of` equal parts. Times keep their scale, so a busy part stays
        busier than the others. A part with fewer requests is repeated."""
        first, last = len(self) * number // of, len(self) * (number + 1) // of
        at = self.at[first:last] - self.at[first]
        again = -(-count // len(at))
        period = at[-1] + (at[-1] / (len(at) - 1) if at[-1] > 0 else len(at))
        times = np.concatenate([at + number * period for number in range(again)])[:count]
        inputs, outputs, hits = (
            np.tile(each[first:last], again)[:count] for each in (self.inputs, self.outputs, self.hits)
        )
        return Workload(times, inputs, outputs, hits, self.source, self.kept_tokens)


@dataclass(frozen=True)
class Means:
    """The mean numbers of tokens of prompts, of answers, and of the part of prompts that the store has. `kept_tokens`:
    see `Workload`."""

    inputs: float
    outputs: float
    hits: float
    kept_tokens: int | None = None

    @property
    def hit_rate(self) -> float:
        """The share of prompts' tokens that the store has."""
        return self.hits / self.inputs

    @property
    def new(self) -> float:
        """The mean number of a prompt's tokens that are computed."""
        return self.inputs - self.hits


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lengths of a synthetic load, which are log-normal with this mean and coefficient of variation (standard
    deviation / mean). If the coefficient is 0, all lengths are equal."""

    mean: float
    cv: float = 0.0

    def draw(self, random: np.random.Generator, count: int) -> Counts:
        """Return `count` lengths of at least 1."""
        if not self.cv:
            return np.full(count, max(1, round(self.mean)), dtype=np.int64)
        variance = math.log1p(self.cv**2)
        drawn = random.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        lengths: Counts = np.maximum(1, np.rint(drawn)).astype(np.int64)
        return lengths


class Synthetic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="synthetic"):
    """A synthetic load of independent requests.

    arrival_cv: the coefficient of variation of the gaps between arrivals, which are gamma distributed. It is 0 for
    equal gaps, 1 for a Poisson process, and more than 1 for bursts.
    hit_rate: the share of every prompt that the store has
    """

    inputs: Lengths
    outputs: Lengths
    arrival_cv: float = 1.0
    hit_rate: float = 0.0

    @property
    def source(self) -> str:
        """The load in words."""
        kind = f"{self.inputs.mean:g} to {self.outputs.mean:g} tokens"
        return kind + (f", {self.hit_rate:.0%} of each prompt in the store" if self.hit_rate else "")

    def make(self, count: int, seed: int) -> Workload:
        """Return `count` requests."""
        random = np.random.default_rng(seed)
        inputs, outputs = self.inputs.draw(random, count), self.outputs.draw(random, count)
        gaps = random.gamma(1 / self.arrival_cv**2, self.arrival_cv**2, count) if self.arrival_cv else np.ones(count)
        hits = np.minimum(np.floor(inputs * self.hit_rate).astype(np.int64), inputs - 1)
        return Workload(np.cumsum(gaps) - gaps[0], inputs, outputs, hits, self.source)

    @property
    def means(self) -> Means:
        """The means over its requests."""
        return Means(self.inputs.mean, self.outputs.mean, self.inputs.mean * self.hit_rate)


class Replayed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace"):
    """A load that replays a trace, with the trace's own bursts, lengths and shared prefixes.

    kept_tokens: the number of tokens that the store holds; it drops the least recently used tokens. None if it holds
    all
    hits: whether there is a store
    limit: the number of requests that are used, from the first one on
    parts: the number of parts that the trace is cut into, one for each seed; seed 0 gets the middle part, because in
    the first part the store is empty
    block_tokens, time_unit: see `read_trace`
    """

    path: str
    limit: int | None = None
    kept_tokens: int | None = None
    hits: bool = True
    parts: int = 1
    block_tokens: int | None = None
    time_unit: TimeUnit | None = None

    def read(self) -> Trace:
        """Return the trace that is replayed. Raises `TraceError`."""
        return _read(Path(self.path), self.limit, self.block_tokens, self.time_unit)

    @property
    def source(self) -> str:
        """The load in words."""
        return f"trace {Path(self.path).name}"

    def make(self, count: int, seed: int) -> Workload:
        """Return `count` requests of one part. Raises `TraceError`, or `ValueError` for a trace without a rate."""
        return _whole(self).part((seed + self.parts // 2) % self.parts, self.parts, count)

    @property
    def means(self) -> Means:
        """The means over the requests of the whole trace. Raises the same errors as `make`."""
        return _whole(self).means

    @property
    def requests(self) -> int:
        """The number of requests of the whole trace. Raises the same errors as `make`."""
        return len(_whole(self))


Recipe = Synthetic | Replayed
"""How workloads are made: `make(count, seed)`."""


def without_hits(recipe: Recipe) -> Recipe:
    """Return the same load without hits: the store has no part of any prompt."""
    if isinstance(recipe, Replayed):
        return msgspec.structs.replace(recipe, hits=False)
    return msgspec.structs.replace(recipe, hit_rate=0.0)


@functools.lru_cache(maxsize=4)
def _whole(recipe: Replayed) -> Workload:
    """Return the whole trace. Raises `TraceError`, or `ValueError` unless it has two requests at different times."""
    trace = recipe.read()
    at = np.array(trace.at_s) * _rate(recipe.path, trace)
    inputs, outputs = np.array(trace.input_tokens), np.array(trace.output_tokens)
    prompts = zip(trace.hash_ids, trace.input_tokens, strict=True)
    found, held = found_tokens(prompts, recipe, trace.block_tokens)
    return Workload(at, inputs, outputs, found, recipe.source, held)


@functools.lru_cache(maxsize=1)
def _read(path: Path, limit: int | None, block_tokens: int | None, time_unit: TimeUnit | None) -> Trace:
    return read_trace(path, limit, block_tokens=block_tokens, time_unit=time_unit)


def rate_of(
    path: Path, limit: int | None = None, block_tokens: int | None = None, time_unit: TimeUnit | None = None
) -> float:
    """Return the rate of a trace at its own speed, in requests a second. Raises `TraceError`, or `ValueError` if the
    trace has no rate."""
    return _rate(path, _read(path, limit, block_tokens, time_unit))


def _rate(path: Path | str, trace: Trace) -> float:
    if trace.at_s[-1] <= 0:
        raise ValueError(f"{path}: {len(trace)} requests have no rate: expected two or more, at different times")
    return (len(trace) - 1) / trace.at_s[-1]


def found_tokens(
    prompts: Iterable[tuple[Sequence[int], int]], recipe: Recipe, block_tokens: int = HASHED_TOKENS
) -> tuple[Counts, int]:
    """Return the number of leading tokens of each prompt that a store has, and the most tokens that the store held. The
    first number is always less than the number of the prompt's tokens. The store drops the least recently used tokens.
    `prompts`: the hash ids and the number of tokens of each prompt."""
    most: int | None = None
    kept: OrderedDict[int, None] = OrderedDict()
    held = 0
    found: list[int] = []
    if isinstance(recipe, Replayed):
        if not recipe.hits:
            return np.zeros(sum(1 for _ in prompts), dtype=np.int64), 0
        most = None if recipe.kept_tokens is None else recipe.kept_tokens // block_tokens
    for hash_ids, tokens in prompts:
        leading = 0
        while leading < len(hash_ids) and hash_ids[leading] in kept:
            leading += 1
        found.append(min(leading * block_tokens, tokens - 1))
        for each in reversed(hash_ids):  # the ends of prompts are dropped before their beginnings
            kept[each] = None
            kept.move_to_end(each)
        while most is not None and len(kept) > most:
            kept.popitem(last=False)
        held = max(held, len(kept))
    return np.array(found, dtype=np.int64), held * block_tokens
