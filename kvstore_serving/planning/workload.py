"""What is asked of a fleet: prompts and outputs of some lengths, when they come, and how much of them a store has.

A workload is made once, with its random numbers, and then played at several rates: its times are those of one request
a second, and are divided by the rate. So two rates differ in nothing but the rate, and attainment falls as it rises.
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
    """Requests in the order of their arrival. Arrays of one length: `at` at one request a second in the mean, from 0;
    tokens of prompts (`inputs`) and of answers (`outputs`), each at least 1; `hits`: the leading tokens of a prompt
    that the store has, less than the prompt; `kept_tokens`: the most that the store held for that, None: not known."""

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
        """What its requests are like."""
        inputs, outputs, hits = (float(each.mean()) for each in (self.inputs, self.outputs, self.hits))
        return Means(inputs, outputs, hits, self.kept_tokens)

    def part(self, number: int, of: int, count: int) -> Workload:
        """-> `count` requests from one of `of` equal parts, at their share of the whole's rate: a busy part stays
        busier than the others. A part that is shorter than that comes again."""
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
    """Mean tokens of prompts, of answers, and of prompts that the store has. `kept_tokens`: see `Workload`."""

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
        """Tokens of a prompt that are computed."""
        return self.inputs - self.hits


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths of a synthetic load: log-normal with this mean and coefficient of variation (standard deviation / mean);
    0: all alike."""

    mean: float
    cv: float = 0.0

    def draw(self, random: np.random.Generator, count: int) -> Counts:
        """-> `count` lengths, at least 1."""
        if not self.cv:
            return np.full(count, max(1, round(self.mean)), dtype=np.int64)
        variance = math.log1p(self.cv**2)
        drawn = random.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        lengths: Counts = np.maximum(1, np.rint(drawn)).astype(np.int64)
        return lengths


class Synthetic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="synthetic"):
    """Independent requests.

    arrival_cv: the coefficient of variation of the gaps between arrivals, which are gamma distributed; 1: Poisson, 0:
    equal gaps, more than 1: bursts. hit_rate: of every prompt, the store has this share."""

    inputs: Lengths
    outputs: Lengths
    arrival_cv: float = 1.0
    hit_rate: float = 0.0

    @property
    def source(self) -> str:
        """In words."""
        kind = f"{self.inputs.mean:g} to {self.outputs.mean:g} tokens"
        return kind + (f", {self.hit_rate:.0%} of each prompt in the store" if self.hit_rate else "")

    def make(self, count: int, seed: int) -> Workload:
        """-> `count` requests."""
        random = np.random.default_rng(seed)
        inputs, outputs = self.inputs.draw(random, count), self.outputs.draw(random, count)
        gaps = random.gamma(1 / self.arrival_cv**2, self.arrival_cv**2, count) if self.arrival_cv else np.ones(count)
        hits = np.minimum(np.floor(inputs * self.hit_rate).astype(np.int64), inputs - 1)
        return Workload(np.cumsum(gaps) - gaps[0], inputs, outputs, hits, self.source)

    @property
    def means(self) -> Means:
        """What its requests are like."""
        return Means(self.inputs.mean, self.outputs.mean, self.inputs.mean * self.hit_rate)


class Replayed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace"):
    """A trace, with its own bursts, lengths and shared prefixes.

    kept_tokens: the tokens that the store holds, of which the least recently used go; None: it holds all. hits: whether
    there is a store at all. limit: the first so many requests. parts: seeds stand for so many parts of the trace; 0 is
    the one in the middle, because the store is empty in the first. block_tokens, time_unit: see `read_trace`."""

    path: str
    limit: int | None = None
    kept_tokens: int | None = None
    hits: bool = True
    parts: int = 1
    block_tokens: int | None = None
    time_unit: TimeUnit | None = None

    def read(self) -> Trace:
        """-> what it replays. Raises `TraceError`."""
        return _read(Path(self.path), self.limit, self.block_tokens, self.time_unit)

    @property
    def source(self) -> str:
        """In words."""
        return f"trace {Path(self.path).name}"

    def make(self, count: int, seed: int) -> Workload:
        """-> `count` requests of one part. Raises `TraceError`, and `ValueError` for a trace without a rate."""
        return _whole(self).part((seed + self.parts // 2) % self.parts, self.parts, count)

    @property
    def means(self) -> Means:
        """What the requests of the whole trace are like. Raises what `make` raises."""
        return _whole(self).means

    @property
    def requests(self) -> int:
        """Of the whole trace. Raises what `make` raises."""
        return len(_whole(self))


Recipe = Synthetic | Replayed
"""How workloads are made: `make(count, seed)`."""


def without_hits(recipe: Recipe) -> Recipe:
    """-> the same requests, of which the store has nothing."""
    if isinstance(recipe, Replayed):
        return msgspec.structs.replace(recipe, hits=False)
    return msgspec.structs.replace(recipe, hit_rate=0.0)


@functools.lru_cache(maxsize=4)
def _whole(recipe: Replayed) -> Workload:
    """Raises `TraceError`, and `ValueError` for a trace of less than two requests at two times."""
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
    """-> the requests a second of a trace at its own speed. Raises `TraceError`, and `ValueError` if it has none."""
    return _rate(path, _read(path, limit, block_tokens, time_unit))


def _rate(path: Path | str, trace: Trace) -> float:
    if trace.at_s[-1] <= 0:
        raise ValueError(f"{path}: {len(trace)} requests: expected two or more, at different times, for a rate")
    return (len(trace) - 1) / trace.at_s[-1]


def found_tokens(
    prompts: Iterable[tuple[Sequence[int], int]], recipe: Recipe, block_tokens: int = HASHED_TOKENS
) -> tuple[Counts, int]:
    """-> the leading tokens of each prompt (its hash ids, and its tokens) that a store has which drops the least
    recently used first, less than the prompt; and the most tokens that it held."""
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
        for each in reversed(hash_ids):  # tails go before heads
            kept[each] = None
            kept.move_to_end(each)
        while most is not None and len(kept) > most:
            kept.popitem(last=False)
        held = max(held, len(kept))
    return np.array(found, dtype=np.int64), held * block_tokens
