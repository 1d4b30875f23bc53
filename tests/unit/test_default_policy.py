"""The default policy recognises requests however they are split into calls, and adapts to what it has observed."""

from __future__ import annotations

import functools

import pytest

from benchmarks.eviction.baselines import Arc, S3Fifo
from benchmarks.eviction.simulator import ServerCache, replay
from benchmarks.eviction.synthetic import make_trace
from benchmarks.eviction.traces import Trace
from tests.unit.test_policies import Cache

# The policy samples keys by their hashes, which differ in every index, so the hit rate of one index has a standard
# deviation of 0.001. The measured rates are ten times as far from the limit, except for one trace, which several
# indexes replay.
INDEXES = {"agents": 1, "zipf-1.0": 3, "daily": 1}
NOISE = 0.003


def in_parts(cache: Cache, names: list[int], most: int) -> None:
    """Use a chain as a connector does: look up the chain, then set the missing blocks in calls of at most `most`
    blocks."""
    present = cache.left(*names)
    cache.use(*present)
    missing = names[len(present) :]
    parent = present[-1] if present else None
    for start in range(0, len(missing), most):
        part = missing[start : start + most]
        cache.set(*part, parent=parent, ends_chain=True)
        parent = part[-1]


def test_the_end_of_a_call_is_not_taken_for_a_chains_end() -> None:
    cache, name = Cache("default", 1000), 1_000_000
    for turn in range(3000):  # the same prompts recur; only the last, partial block is always new
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


def test_often_used_blocks_go_first_if_known_not_to_return() -> None:
    cache, live, new = Cache("default", 600), [], 0
    for turn in range(6000):  # 60 documents of 10 blocks in rotation, each used 8 times
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
    """Return a trace, a capacity of a fiftieth of its blocks, and the hit rates of other policies, which ignore the
    division into calls."""
    trace = make_trace(name).first(6000)
    capacity = trace.distinct // 50
    with ServerCache("lru", trace.keys, capacity) as server:
        return trace, capacity, [replay(trace, cache) for cache in (server, Arc(capacity), S3Fifo(capacity))]


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("call_blocks", [None, 16])
def test_its_hit_rate_is_near_the_best_other_policys(name: str, call_blocks: int | None) -> None:
    """The test is a short form of `python -m benchmarks.eviction --synthetic all --calls whole,16,64`."""
    trace, capacity, others = trace_and_others(name)
    rate = 0.0
    for _ in range(INDEXES[name]):
        with ServerCache("default", trace.keys, capacity, call_blocks=call_blocks) as server:
            rate += replay(trace, server) / INDEXES[name]
    assert rate >= max(others) - 0.003 - NOISE
