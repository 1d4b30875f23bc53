"""The eviction policies: what all of them promise, and the purpose of each.

`test_index.py` checks the exact order of the policy `lru`. Here, a model knows which blocks may be evicted, and leaves
their order to the policy.
"""

import runpy
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import Cython.Build
import hypothesis.strategies as st
import numpy as np
import pytest
import setuptools
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore._index import BlockIndex
from kvstore._policies import POLICIES
from tests.support.harness import ROOT
from tests.support.properties import examples

READY = BlockIndex.READY
every_policy = pytest.mark.parametrize("policy", BlockIndex.POLICIES)


def test_the_settings_list_the_existing_policies() -> None:
    assert POLICIES == BlockIndex.POLICIES


def test_a_new_policy_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build adds a new policy's file to the lists for the extension and for the settings."""
    shutil.copytree(ROOT / "cext" / "policies", tmp_path / "cext" / "policies")
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "cext" / "policies" / "fifo.pxi").write_text("cdef class FirstIn(Policy):\n    pass\n")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(Cython.Build, "cythonize", lambda *_, **__: [])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "setup.py"))
    listed = (tmp_path / "cext" / "policies" / "all.pxi").read_text()
    assert 'include "fifo.pxi"\n' in listed and '"fifo": FirstIn' in listed
    assert runpy.run_path(str(tmp_path / "kvstore" / "_policies.py"))["POLICIES"] == (*POLICIES[:1], "fifo", "lru")


def keys_of(names: Sequence[int]) -> bytes:
    return b"".join(name.to_bytes(4, "big") + bytes(12) for name in names)


class Cache:
    """An index, used as in a shard: missing blocks are set, after evictions if needed."""

    def __init__(self, policy: str, slots: int) -> None:
        self.index = BlockIndex(16, slots, policy)
        self.index.attach()
        self.tick = 1

    def ticks(self, n: int) -> int:
        self.tick += n
        return self.tick - n

    def set(
        self, *names: int, priority: int = 0, expires: float = 0.0, parent: int | None = None, ends_chain: bool = False
    ) -> list[int]:
        n, keys = len(names), keys_of(names)
        above = b"" if parent is None else keys_of([parent])
        room = self.index.missing(keys) - self.index.free
        if room > 0:
            self.index.evict(room, 0.0)
        slots = self.index.reserve(keys, False, self.ticks(n), priority)
        self.index.commit(slots, np.array(names, np.uint64), self.ticks(n), expires, above, ends_chain)
        if BlockIndex.EXISTED in slots:
            self.use(*names)
        return [int(slot) for slot in slots]

    def use(self, *names: int, pin_until: float = 0.0) -> None:
        self.index.contains(keys_of(names), 0.0, True, self.ticks(len(names)), pin_until)

    def request(self, *names: int) -> int:
        """Read the leading blocks that are present and set the rest. Return the number of hits."""
        hits = self.index.match_prefix(keys_of(names), 0.0, True, self.ticks(len(names)))
        if hits < len(names):
            self.set(*names[hits:], parent=names[hits - 1] if hits else None, ends_chain=True)
        return hits

    def left(self, *names: int) -> list[int]:
        return [name for name in names if self.index.state_of(keys_of([name])) == READY]

    def order(self, *names: int) -> list[int]:
        """Return the names in the order in which they are evicted one by one."""
        gone: list[int] = []
        while left := self.left(*names):
            assert self.index.evict(1, 0.0) == 1
            gone += set(left) - set(self.left(*names))
        return gone


# -- what every policy promises ------------------------------------------------------------------------------


@every_policy
def test_a_chains_tail_goes_before_its_head(policy: str) -> None:
    cache = Cache(policy, 64)
    cache.set(*range(40))
    assert cache.order(*range(40)) == list(range(39, -1, -1))


@every_policy
def test_a_chain_used_whole_still_goes_tail_first(policy: str) -> None:
    cache = Cache(policy, 64)
    cache.set(*range(40))
    for _ in range(5):
        cache.use(*range(40))
    assert cache.order(*range(40)) == list(range(39, -1, -1))


@every_policy
def test_pinned_and_referenced_blocks_stay_and_all_others_can_go(policy: str) -> None:
    cache = Cache(policy, 100)
    for first in range(0, 100, 10):
        cache.set(*range(first, first + 10))
    cache.use(*range(0, 50))
    cache.use(*range(20, 30), pin_until=10.0)
    slots = cache.index.acquire(keys_of(range(55, 60)), 0.0, cache.ticks(5))
    assert cache.index.evict(1000, 5.0) == 85
    assert cache.left(*range(100)) == [*range(20, 30), *range(55, 60)]
    assert cache.index.evict(1000, 5.0) == 0
    cache.index.release(slots)
    assert cache.index.evict(1000, 5.0) == 5
    assert cache.index.evict(1000, 10.0) == 10
    assert cache.index.free == 100


@every_policy
def test_higher_priorities_go_only_after_all_lower_ones(policy: str) -> None:
    cache = Cache(policy, 40)
    for priority in (3, 1, 0, 2):
        cache.set(*range(10 * priority, 10 * priority + 10), priority=priority)
    cache.use(*range(10))
    for priority in range(4):
        assert cache.index.evict(10, 0.0) == 10
        assert cache.left(*range(40)) == list(range(10 * priority + 10, 40))


@every_policy
def test_expired_blocks_free_their_slots_without_being_victims(policy: str) -> None:
    cache = Cache(policy, 20)
    cache.set(*range(10), expires=5.0)
    cache.set(*range(10, 20))
    cache.use(*range(20), pin_until=4.0)
    assert set(cache.index.keys_of(cache.index.victims(100, 6.0))[3::16]) == set(range(10, 20))
    assert cache.index.evict(100, 6.0) == 20


@every_policy
def test_victims_are_the_blocks_evicted_next(policy: str) -> None:
    cache = Cache(policy, 200)
    rng = np.random.default_rng(3)
    for _ in range(300):
        first = int(rng.zipf(1.3)) % 100 * 8
        cache.request(*range(first, first + int(rng.integers(1, 9))))
        if rng.random() < 0.1:
            cache.use(first, pin_until=100.0)
        if rng.random() < 0.2:
            n = int(rng.integers(1, 30))
            victims = cache.index.victims(n, 0.0)
            assert len(set(victims.tolist())) == len(victims)
            keys = bytearray()
            expected = cache.index.keys_of(victims)
            assert cache.index.evict(n, 0.0, keys) == len(victims)
            assert keys == expected


@pytest.mark.exclusive
@every_policy
def test_old_pinned_blocks_do_not_slow_down_evictions(policy: str) -> None:
    cache = Cache(policy, 300_000)
    for first in range(0, 300_000, 1000):
        cache.set(*range(first, first + 1000))
    cache.use(*range(299_000), pin_until=1000.0)
    cache.use(*range(299_000, 300_000))
    started = time.monotonic()
    for name in range(10_000):  # skipping 299 000 blocks each time would take minutes
        cache.set(1_000_000 + name)
    assert time.monotonic() - started < 10
    assert len(cache.left(*range(299_000))) == 299_000


@pytest.mark.parametrize(("policy", "most"), [("lru", 141), ("default", 166)])
def test_an_index_takes_bounded_memory_per_block(policy: str, most: int) -> None:
    index = BlockIndex(16, 10_000, policy)
    for segment in range(150):
        index.attach()
        assert index.nbytes <= most * index.slots + 30_000, segment
    for ordinal in range(150):
        index.detach(ordinal)
        assert ordinal == 149 or index.nbytes <= 2 * most * index.slots + 300_000, ordinal
    assert index.nbytes < 300_000, "all but the bitmap"


@every_policy
def test_blocks_left_after_detaching_a_segment_are_evicted_as_before(policy: str) -> None:
    index = BlockIndex(16, 10, policy)
    for _ in range(3):
        index.attach()
    slots = index.reserve(keys_of(range(30)), False, 1)
    index.commit(slots, np.zeros(30, np.uint64), 31)
    assert index.detach(1) == 10
    keys = bytearray()
    assert index.evict(100, 0.0, keys) == 20
    gone = np.frombuffer(keys, np.uint8).reshape(-1, 16)[:, 3].tolist()
    assert gone == sorted(set(range(30)) - {i for i, s in enumerate(slots.tolist()) if 10 <= s < 20}, reverse=True)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy is 'fifo', expected one of default, lru"):
        BlockIndex(16, 8, "fifo")


@dataclass
class Block:
    slot: int
    priority: int
    expires: float
    tick: int
    refs: int = 0
    pin_until: float = 0.0


NAMES = st.integers(0, 29)
BATCH = st.lists(NAMES, min_size=1, max_size=8, unique=True)


class PolicyMachine(RuleBasedStateMachine):
    """The model has blocks by name. Expired blocks are dropped as soon as their time is over. The slots of deleted
    blocks may still be read."""

    @initialize(policy=st.sampled_from(BlockIndex.POLICIES), slots_per_segment=st.integers(1, 12))
    def create(self, policy: str, slots_per_segment: int) -> None:
        self.policy = policy
        self.per_segment = slots_per_segment
        self.index = BlockIndex(16, slots_per_segment, policy)
        self.attached = {self.index.attach()}
        self.blocks: dict[int, Block] = {}
        self.read: list[int] = []  # slots, one for each reference
        self.now = 0.0
        self.tick = 1

    def ticks(self, n: int) -> int:
        self.tick += n
        return self.tick - n

    def held(self, block: Block) -> bool:
        return block.refs > 0 or block.pin_until > self.now

    def touch(self, names: Sequence[int], batch: int, tick: int) -> None:
        for i, name in enumerate(names):
            if name in self.blocks:
                self.blocks[name].tick = tick + batch - 1 - i

    @rule(
        names=BATCH,
        priority=st.sampled_from([0, 0, 1, 3]),
        seconds=st.sampled_from([0.0, 0.0, 2.0]),
        parent=st.none() | NAMES,
        ends_chain=st.booleans(),
    )
    def set(self, names: list[int], priority: int, seconds: float, parent: int | None, ends_chain: bool) -> None:
        tick = self.ticks(len(names))
        slots = self.index.reserve(keys_of(names), False, tick, priority)
        self.touch(names, len(names), tick)
        tick = self.ticks(len(names))
        expires = self.now + seconds if seconds else 0.0
        above = b"" if parent is None else keys_of([parent])
        self.index.commit(slots, np.array(names, np.uint64), tick, expires, above, ends_chain)
        for i, (name, slot) in enumerate(zip(names, slots.tolist(), strict=True)):
            assert (slot == BlockIndex.EXISTED) == (name in self.blocks)
            if slot >= 0:
                assert slot not in self.read and slot not in [b.slot for b in self.blocks.values()]
                self.blocks[name] = Block(slot, priority, expires, tick + len(names) - 1 - i)

    @rule(names=BATCH, pin=st.sampled_from([0.0, 0.0, 1.0, 5.0]))
    def use(self, names: list[int], pin: float) -> None:
        tick = self.ticks(len(names))
        present = self.index.contains(keys_of(names), self.now, True, tick, self.now + pin)
        assert list(present) == [name in self.blocks for name in names]
        self.touch(names, len(names), tick)
        for name in names:
            if name in self.blocks and pin:
                self.blocks[name].pin_until = max(self.blocks[name].pin_until, self.now + pin)

    @rule(names=BATCH)
    def acquire(self, names: list[int]) -> None:
        tick = self.ticks(len(names))
        slots = self.index.acquire(keys_of(names), self.now, tick).tolist()
        self.touch(names, len(names), tick)
        for name, slot in zip(names, slots, strict=True):
            assert slot == (self.blocks[name].slot if name in self.blocks else -1)
            if slot >= 0:
                self.blocks[name].refs += 1
                self.read.append(slot)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.read), min_size=1, unique=True))
        self.index.release(slots)
        for slot in slots:
            self.read.remove(slot)
            for block in self.blocks.values():
                block.refs -= block.slot == slot

    @rule(names=BATCH)
    def delete(self, names: list[int]) -> None:
        gone = [name for name in names if self.blocks.pop(name, None)]
        assert self.index.delete(keys_of(names)) == len(gone)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.blocks.clear()

    @rule(n=st.integers(0, 12), peek=st.booleans(), sweep=st.booleans())
    def evict(self, n: int, peek: bool, sweep: bool) -> None:
        if sweep:
            self.index.expire(self.now, 1000)
        victims = self.index.keys_of(self.index.victims(n, self.now)) if peek else None
        evictable = {name: block for name, block in self.blocks.items() if not self.held(block)}
        keys = bytearray()
        count = self.index.evict(n, self.now, keys)
        names = [int.from_bytes(keys[i : i + 4], "big") for i in range(0, len(keys), 16)]
        assert len(names) == len(set(names)) == count
        live = [name for name in names if name in self.blocks]
        assert set(live) <= evictable.keys()
        if sweep:
            assert names == live
            assert count == min(n, len(evictable))
            assert victims is None or victims == keys
        else:
            assert count == n or len(live) == len(evictable)
            assert victims is None or victims[: 16 * len(live)] == keys_of(live)
        highest = max((self.blocks[name].priority for name in live), default=0)
        for name in live:
            del self.blocks[name]
            del evictable[name]
        assert all(block.priority >= highest for block in evictable.values())

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        assert self.index.pinned(self.now) <= self.index.ready
        self.blocks = {n: b for n, b in self.blocks.items() if not b.expires or b.expires > self.now}

    @precondition(lambda self: len(self.attached) < 3)
    @rule()
    def attach(self) -> None:
        self.attached.add(self.index.attach())

    @rule(ordinal=st.integers(0, 2))
    def detach(self, ordinal: int) -> None:
        if ordinal in self.attached and not any(slot // self.per_segment == ordinal for slot in self.read):
            self.index.detach(ordinal)
            self.attached.remove(ordinal)
            self.blocks = {n: b for n, b in self.blocks.items() if b.slot // self.per_segment != ordinal}

    @precondition(lambda self: not self.read)
    @rule()
    def restart(self) -> None:
        """Restore all present blocks with restore() into a new index with the same segments."""
        index, slots = self.index, self.index.ready_slots()
        slots = slots[np.argsort(index.ticks_of(slots), kind="stable")]
        fresh = BlockIndex(16, self.per_segment, self.policy)
        for _ in range(max(self.attached, default=-1) + 1):
            fresh.attach()
        for ordinal in set(range(max(self.attached, default=0))) - self.attached:
            fresh.detach(ordinal)
        fresh.pinned(self.now)
        answer = fresh.restore(
            index.keys_of(slots),
            slots,
            index.checksums(slots),
            index.ticks_of(slots),
            index.expires_of(slots),
            index.priorities_of(slots),
        )
        assert answer.tolist() == slots.tolist()
        self.index = fresh
        for block in self.blocks.values():
            block.pin_until = 0.0
        assert fresh.ready == len(self.blocks)

    @invariant()
    def agrees_with_the_model(self) -> None:
        index, blocks = self.index, self.blocks
        names = sorted(blocks)
        slots = [blocks[name].slot for name in names]
        assert index.keys_of(slots) == keys_of(names)
        assert index.checksums(slots).tolist() == names
        assert index.ticks_of(slots).tolist() == [blocks[name].tick for name in names]
        assert index.priorities_of(slots).tolist() == [blocks[name].priority for name in names]
        assert index.expires_of(slots).tolist() == [blocks[name].expires for name in names]
        assert index.ready_slots().tolist() == sorted(slots)
        assert index.pinned(self.now) == sum(block.pin_until > self.now for block in blocks.values())
        assert index.writing == 0
        assert index.ready >= len(blocks)
        assert index.free + index.ready + index.gone == index.slots == len(self.attached) * self.per_segment


PolicyMachine.TestCase.settings = settings(max_examples=examples(2), stateful_step_count=40)
TestPolicyMachine = PolicyMachine.TestCase


# -- default -------------------------------------------------------------------------------------------------


def flooded(policy: str, rounds: int) -> tuple[Cache, list[int]]:
    """Use a hundred blocks with 300 slots, each block once between two floods of 600 other blocks. Return the hits of
    each round."""
    cache, name, hits = Cache(policy, 300), 10_000, []
    for _ in range(rounds):
        hits.append(sum(cache.request(*range(first, first + 10)) for first in range(0, 100, 10)))
        for _ in range(60):
            cache.request(*range(name, name + 10))
            name += 10
    return cache, hits


def test_blocks_that_return_after_each_flood_survive_it() -> None:
    cache, hits = flooded("default", 30)
    assert min(hits[4:]) >= 95
    assert len(cache.left(*range(100))) >= 95, "and the flood is gone"
    assert sum(flooded("lru", 30)[1]) == 0


def test_an_evicted_block_that_returns_outlives_blocks_set_first_time() -> None:
    for forgotten in (False, True):
        cache, _ = flooded("default", 30)
        if forgotten:
            cache.index.delete(keys_of(range(100)))
        cache.index.evict(300, 0.0)
        for first in [*range(1000, 1100, 10), *range(0, 100, 10)]:
            cache.request(*range(first, first + 10))
        cache.index.evict(100, 0.0)
        assert (len(cache.left(*range(100))) >= 95) is not forgotten, "what was deleted is not remembered"


def test_a_shared_head_outlives_tails_never_requested_again() -> None:
    cache = Cache("default", 400)
    rng = np.random.default_rng(1)
    heads = [range(100 * i, 100 * i + 20) for i in range(10)]
    tail, hits, references = 10_000, 0, 0
    for _ in range(1000):
        head = heads[int(rng.integers(10))]
        hits += cache.request(*head, *range(tail, tail + 40))
        references += 20
        tail += 40
    assert hits > 0.95 * references
    assert len(cache.left(*[name for head in heads for name in head])) == 200


def test_formerly_popular_blocks_give_way_to_popular_ones() -> None:
    cache = Cache("default", 500)
    rng = np.random.default_rng(5)
    tail, hits = 100_000, [0, 0, 0]
    for era in range(3):
        for turn in range(1500):
            first = 10_000 * era + 20 * int(rng.integers(20))
            hit = cache.request(*range(first, first + 20), *range(tail, tail + 5))
            tail += 5
            if turn >= 500:
                hits[era] += hit
    assert min(hits) > 0.9 * 1000 * 20


def test_no_block_outlives_its_predecessor_in_the_chain() -> None:
    rng = np.random.default_rng(11)
    cache = Cache("default", 150)
    above: dict[int, int] = {}
    chains: list[list[int]] = [[0]]
    name, orphans, evicted = 1, 0, 0
    for turn in range(2500):
        chain = list(chains[int(rng.integers(len(chains)))])
        chain = chain[: int(rng.integers(1, len(chain) + 1))]
        for _ in range(int(rng.integers(1, 12))):
            above[name] = chain[-1]
            chain.append(name)
            name += 1
        chain = chain[:60]
        cache.request(*chain)
        chains = [*chains[-30:], chain] if turn % 3 else chains[-20:]
        chains = chains or [chain]
        if turn % 50 == 49:
            here = set(cache.left(*range(name)))
            orphans += sum(above[block] not in here for block in here if block in above)
            evicted += len(here)
    assert orphans <= 0.002 * evicted
    here = set(cache.left(*range(name)))
    while here:
        assert all(above[block] in here for block in here if block in above)
        cache.index.evict(1, 0.0)
        here = set(cache.left(*here))


def test_a_chain_set_around_an_existing_block_goes_tail_first() -> None:
    cache = Cache("default", 100)
    cache.set(5)
    cache.set(*range(50, 60))
    cache.set(*range(10))
    order = cache.order(*range(10))
    assert order == list(range(9, -1, -1))


def test_chain_ends_and_followers_of_rare_blocks_go_first() -> None:
    cache = Cache("default", 1000)
    rng = np.random.default_rng(2)
    name = 1_000_000
    for _ in range(3000):  # popular and rare chains, whose last, partial block is always new
        first = 10 * min(int(rng.zipf(1.5)), 500)
        cache.request(*range(first, first + 10), name)
        name += 1
    cache.request(*range(50_000, 50_010), name)
    left = cache.left(*range(50_000, 50_010), name)
    assert left == [*range(50_000, 50_010), name]
    for later in range(1, 11):  # young blocks are evicted last, whatever they are
        cache.request(*range(10, 20), name + later)
    cache.index.evict(300, 0.0)
    assert cache.left(name) == []
    assert cache.left(*range(50_000, 50_010)) != []


def test_a_new_block_can_be_read_before_it_may_be_evicted() -> None:
    cache = Cache("default", 1600)
    for _ in range(5):  # a cache full of blocks that return; new blocks never return
        for first in range(0, 1500, 10):
            cache.request(*range(first, first + 10))
            cache.request(1_000_000 + cache.index.ready + first)
    new = range(2_000_000, 2_000_050)
    cache.request(*new)
    for first in range(0, 40, 10):
        cache.request(*range(3_000_000 + first, 3_000_010 + first))
    assert cache.left(*new) == list(new)
    cache.index.evict(500, 0.0)
    assert cache.left(*new) == list(new)


def test_several_touches_by_one_request_are_one_use() -> None:
    def order(touches: int) -> list[int]:
        cache = Cache("default", 640)
        for name in range(64):
            cache.set(*range(10 * name, 10 * name + 10))
        for _ in range(touches):
            cache.use(*range(0, 10))
        for name in (11, 12):  # two uses, at some distance
            cache.use(*range(10 * name, 10 * name + 10))
        for _ in range(20):
            cache.use(*range(200, 300))
        for name in (11, 12):
            cache.use(*range(10 * name, 10 * name + 10))
        cache.index.evict(640 - 20, 0.0)
        return cache.left(*range(640))

    assert order(1) == order(9) == list(range(110, 130))


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 16, 40, 64])
def test_a_tiny_cache_hits_about_as_often_as_lru(slots: int) -> None:
    hits = {}
    for policy in ("lru", "default"):
        cache = Cache(policy, slots)
        rng = np.random.default_rng(3)
        hits[policy] = sum(cache.request(int(rng.zipf(1.3)) % 300) for _ in range(20_000))
    assert hits["default"] > 0.95 * hits["lru"]


def test_time_wraps_around_unnoticed() -> None:
    """The policy's time, a 32-bit count of references, starts 65 536 before its overflow."""
    cache = Cache("default", 1000)
    name = 10_000
    for turn in range(1200):
        hits = cache.request(*range(20 * (turn % 5), 20 * (turn % 5) + 20), *range(name, name + 100))
        name += 100
        assert hits == (20 if turn >= 5 else 0), turn
    assert cache.tick > 2 * 65_536


def test_segments_come_and_go_under_load() -> None:
    index = BlockIndex(16, 50, "default")
    rng = np.random.default_rng(9)
    attached: list[int] = []
    hits, tick, references = 0, 1, 0
    for turn in range(4000):
        if turn % 40 == 0:
            if len(attached) < 2 or (len(attached) < 40 and rng.random() < 0.6):
                attached.append(index.attach())
            else:
                index.detach(attached.pop(int(rng.integers(len(attached)))))
        first = 20 * (int(rng.zipf(1.4)) % 500)
        keys = keys_of(range(first, first + 10))
        run = index.match_prefix(keys, 0.0, True, tick)
        hits += run
        references += 10
        rest = keys[16 * run :]
        index.evict(max(0, 10 - run - index.free), 0.0)
        slots = index.reserve(rest, False, tick + 10)
        index.commit(slots, np.zeros(10 - run, np.uint64), tick + 20, ends_chain=True)
        tick += 30
        assert index.ready + index.free == index.slots == 50 * len(attached)
    assert hits > 0.5 * references
    assert index.evict(10_000, 0.0) > 0
    assert index.free == index.slots


def test_blocks_pinned_at_their_turn_can_go_after_their_pins() -> None:
    cache = Cache("default", 100)
    cache.set(*range(100))
    cache.use(*range(50), pin_until=10.0)
    cache.use(*range(50, 60), pin_until=20.0)
    assert cache.index.evict(100, 5.0) == 40
    assert cache.index.evict(100, 5.0) == 0
    assert cache.index.evict(100, 10.0) == 50
    assert cache.index.evict(100, 15.0) == 0
    cache.index.delete(keys_of(range(50, 55)))
    assert cache.index.evict(100, 20.0) == 5
    assert cache.index.free == 100


def test_namespaces_are_compared_by_their_least_recently_used_block() -> None:
    cache = Cache("default", 100)
    for _ in range(5):
        cache.request(*range(20))
        cache.request(*range(100, 140))
    cache.request(*range(200, 240))
    oldest = min(cache.index.ticks_of(cache.index.ready_slots()))
    assert cache.index.oldest_tick() == oldest
    [first] = cache.index.victims(1, 0.0)
    assert cache.index.ticks_of([first])[0] > oldest, "which is not the one that goes next"


def test_restored_blocks_go_oldest_first_after_new_ones() -> None:
    index = BlockIndex(16, 300, "default")
    index.attach()
    zeros = np.zeros(100, np.uint64)
    ticks = np.arange(100, dtype=np.uint64)
    index.restore(keys_of(range(100)), range(100), zeros, ticks, zeros.astype(float), zeros.astype(np.uint8))
    slots = index.reserve(keys_of(range(200, 300)), False, 200)
    index.commit(slots, zeros, 300)
    index.evict(100, 0.0)
    assert index.victims(100, 0.0).tolist() == list(range(100))
