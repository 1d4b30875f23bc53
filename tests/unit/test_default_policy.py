"""The default policy sees requests, whatever calls they are made in, and believes what it has observed."""

from __future__ import annotations

import functools

import pytest

from benchmarks.eviction.baselines import Arc, S3Fifo
from benchmarks.eviction.simulator import ServerCache, replay
from benchmarks.eviction.synthetic import make_trace
from benchmarks.eviction.traces import Trace
from tests.unit.test_policies import Cache

# What is sampled depends on the hashes of keys, which are others in every index: of one, the hit rate has a standard
# deviation of 0.001.
INDEXES = 3
NOISE = 0.003


def in_parts(cache: Cache, names: list[int], most: int) -> None:
    """Use a chain as a connector does: look it up, then set what is missing in calls of `most` blocks."""
    present = cache.left(*names)
    cache.use(*present)
    missing = names[len(present) :]
    parent = present[-1] if present else None
    for start in range(0, len(missing), most):
        part = missing[start : start + most]
        cache.set(*part, parent=parent, ends_chain=True)
        parent = part[-1]


def test_the_end_of_a_call_is_not_the_end_of_the_chain() -> None:
    cache, name = Cache("default", 1000), 1_000_000
    for turn in range(3000):  # the same prompts again and again; the last block, a partial one, is never the same
        first = 12 * (turn * 7 % 60)
        in_parts(cache, [*range(first, first + 12), name], 4)
        name += 1
    new = [*range(50_000, 50_012), name]
    in_parts(cache, new, 4)
    for later in range(1, 30):
        in_parts(cache, [*range(12 * later, 12 * later + 12), name + later], 4)
    while cache.left(name):
        assert cache.index.evict(1, 0.0) == 1
    assert cache.left(*new) == new[:-1], "blocks 4, 8 and 12 of it are as good as the others"


def test_what_was_used_often_goes_first_where_it_is_known_not_to_return() -> None:
    cache, live, new = Cache("default", 600), [], 0
    for turn in range(6000):  # documents of 10 blocks, each asked about 8 times, 60 of them in turn
        if len(live) < 60:
            live.append([new, 0])
            new += 10
        document = live[turn * 37 % len(live)]
        cache.request(*range(document[0], document[0] + 10))
        document[1] += 1
        if document[1] == 8:
            live.remove(document)
    spent = 1_000_000
    for start in range(spent, spent + 100, 10):
        for use in range(8):
            cache.request(*range(start, start + 10))
            cache.request(*range(2_000_000 + 20 * use + start, 2_000_020 + 20 * use + start))
    wanted = [block for first, uses in live[:20] for block in range(first, first + 10) if uses < 6]
    here = cache.left(*wanted)
    assert here
    cache.index.evict(100, 0.0)
    assert len(cache.left(*range(spent, spent + 100))) < len(cache.left(*here)) / len(here) * 100


@functools.cache
def trace_and_others(name: str) -> tuple[Trace, int, list[float]]:
    """A trace, room for a fiftieth of its blocks, and the hit rates of other policies, which do not see calls."""
    trace = make_trace(name).first(6000)
    capacity = trace.distinct // 50
    return trace, capacity, [replay(trace, Arc(capacity)), replay(trace, S3Fifo(capacity))]


@pytest.mark.parametrize("name", ["agents", "zipf-1.0", "daily"])
@pytest.mark.parametrize("call_blocks", [None, 16])
def test_it_hits_about_as_often_as_the_best_of_others(name: str, call_blocks: int | None) -> None:
    """The short form of `python -m benchmarks.eviction --synthetic all --calls whole,16,64`."""
    trace, capacity, others = trace_and_others(name)
    rates = {}
    for policy, indexes in (("lru", 1), ("default", INDEXES)):
        rates[policy] = 0.0
        for _ in range(indexes):
            with ServerCache(policy, trace.keys, capacity, call_blocks=call_blocks) as server:
                rates[policy] += replay(trace, server) / indexes
    assert rates["default"] >= max(rates["lru"], *others) - 0.003 - NOISE
