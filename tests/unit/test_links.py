"""The chains of an index: a block stays as long as blocks that follow it stay, and no block stays for ever."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore._index import BlockIndex
from tests.support.harness import make_keys
from tests.support.properties import examples
from tests.unit.test_policies import Cache, every_policy, keys_of


class Chains(Cache):
    """A cache in which each set is a part of a chain."""

    def set_part(self, *names: int, before: int | None = None) -> None:
        self.set(*names, parent=before)
        self.index.link(keys_of(names), b"" if before is None else keys_of([before]))

    def evict(self, count: int, now: float = 0.0) -> list[int]:
        keys = bytearray()
        self.index.evict(count, now, keys)
        return [int.from_bytes(keys[at : at + 4], "big") for at in range(0, len(keys), 16)]

    def victims(self, count: int, now: float = 0.0) -> list[int]:
        keys = self.index.keys_of(self.index.victims(count, now))
        return [int.from_bytes(keys[at : at + 4], "big") for at in range(0, len(keys), 16)]


@every_policy
def test_a_chains_tail_goes_first_however_its_sets_were_split(policy: str) -> None:
    cache = Chains(policy, 64)
    for start in range(0, 60, 10):
        cache.set_part(*range(start, start + 10), before=start - 1 if start else None)
    assert cache.victims(60) == list(range(59, -1, -1))
    assert cache.evict(25) == list(range(59, 34, -1))
    assert [cache.evict(1) for _ in range(35)] == [[name] for name in range(34, -1, -1)]


@every_policy
def test_the_older_of_two_chains_makes_room_from_its_tail(policy: str) -> None:
    cache = Chains(policy, 100)
    for start in range(0, 50, 10):
        cache.set_part(*range(start, start + 10), before=start - 1 if start else None)
    for start in range(1000, 1050, 10):
        cache.set_part(*range(start, start + 10), before=start - 1 if start > 1000 else None)
    gone = cache.evict(30)
    for first in (0, 1000):
        left = cache.left(*range(first, first + 50))
        assert left == list(range(first, first + len(left)))
    assert len(gone) == 30


@every_policy
@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 16, 32])
def test_a_used_chain_outlives_older_ones_set_in_parts(policy: str, most: int) -> None:
    """On a slow link, a client sets a batch in parts of a few blocks."""

    def set_in_parts(first: int, count: int, most: int) -> None:
        for start in range(first, first + count, most):
            part = range(start, min(start + most, first + count))
            cache.set_part(*part, before=start - 1 if start > first else None)

    for most_before in range(1, 17):
        cache = Chains(policy, 64)
        for first in (0, 100, 200):
            set_in_parts(first, 16, most_before)
        cache.use(*range(16))
        set_in_parts(1000, 32, most)
        assert cache.left(*range(16)) == [*range(16)]
        left = cache.left(*range(100, 116))
        assert left in ([], [100]), "the first block goes last, perhaps after the last one of a later chain"
        assert cache.left(*range(200, 216)) == [*range(200, 216 - len(left))]


@every_policy
def test_a_shared_prefix_stays_until_both_branches_are_gone(policy: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(1, 2, 3)
    cache.set_part(11, 12, before=3)
    cache.set_part(21, 22, before=3)
    gone = cache.evict(4)
    assert sorted(gone) == [11, 12, 21, 22]
    assert cache.evict(3) == [3, 2, 1]


@every_policy
def test_a_used_block_keeps_the_blocks_before_it(policy: str) -> None:
    cache = Chains(policy, 128)
    cache.set_part(1, 2, 3, 4)
    for name in range(100, 180):
        cache.set_part(name)
        cache.use(4)
    cache.evict(70)
    assert cache.left(1, 2, 3, 4) == [1, 2, 3, 4]


@every_policy
def test_a_block_behind_a_gap_is_joined_when_the_gap_is_filled(policy: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(3, 4, before=2)  # 2 is not there
    cache.set_part(1, 2)
    assert cache.index.link(keys_of([3]), keys_of([2])) == 1
    assert cache.evict(4) == [4, 3, 2, 1]


@every_policy
def test_a_block_that_skipped_a_gap_is_linked_again_when_the_gap_is_filled(policy: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(1, 5, 6)
    cache.set_part(2, 3, before=1)
    assert cache.index.link(keys_of([5]), keys_of([3])) == 1
    assert cache.index.link(keys_of([5]), keys_of([2])) == 0, "3 comes between"
    assert cache.index.link(keys_of([2]), keys_of([6])) == 0, "it would close a circle"
    assert cache.evict(5) == [6, 5, 3, 2, 1]


@every_policy
@pytest.mark.parametrize("removal", ["delete", "drop", "expire", "replace"])
def test_blocks_after_a_removed_one_stay_and_can_be_evicted(policy: str, removal: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(1)
    if removal == "expire":
        cache.set(2, parent=1, expires=5.0)
        cache.index.link(keys_of([2]), keys_of([1]))
    else:
        cache.set_part(2, before=1)
    cache.set_part(3, before=2)
    index = cache.index
    slots = index.acquire(keys_of([2]), 0.0, 0, False)
    index.release(slots)
    if removal == "delete":
        index.delete(keys_of([2]))
    elif removal == "drop":
        index.drop(slots)
    elif removal == "expire":
        index.expire(6.0, 100)
    else:
        slots = index.reserve(keys_of([2]), True, cache.ticks(1))
        index.commit(slots, np.zeros(1, np.uint64), cache.ticks(1))
    assert cache.left(1, 3) == [1, 3]
    assert sorted(cache.evict(3, 6.0)) == ([1, 2, 3] if removal == "replace" else [1, 3])


@every_policy
def test_circles_are_never_made(policy: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(1, 2, 3)
    assert cache.index.link(keys_of([3, 1])) == 0
    assert cache.index.link(keys_of([2]), keys_of([2])) == 0
    cache.set_part(4)
    assert cache.index.link(keys_of([4, 1])) == 1
    assert cache.index.link(keys_of([3, 4])) == 0
    assert cache.evict(4) == [3, 2, 1, 4]


def test_a_search_for_circles_is_bounded() -> None:
    cache = Chains("lru", 40_000)
    for start in range(0, 40_000, 8000):
        cache.set_part(*range(start + 1, start + 8001), before=start or None)
    assert cache.index.link(keys_of([40_000]), keys_of([5])) == 0, "it is linked already"
    cache.index.delete(keys_of([1]))
    cache.set_part(1)
    assert cache.index.link(keys_of([40_000, 2])) == 0, "so far up nobody looks"
    assert len(cache.evict(40_000)) == 40_000


def test_a_block_has_a_bounded_number_of_followers() -> None:
    cache = Chains("lru", 5000)
    cache.set_part(1)
    linked = sum(cache.index.link(keys_of([name]), keys_of([1])) for name in range(2, 5001) if cache.set(name))
    assert linked == 4096
    cache.index.delete(keys_of([1]))
    assert len(cache.evict(5000)) == 4999


@every_policy
def test_a_read_or_pinned_block_keeps_its_chain_if_others_can_go(policy: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(1, 2, 3)
    held = cache.index.acquire(keys_of([3]), 0.0, 0, False)
    cache.set_part(10, 11)
    assert cache.victims(5) == [11, 10], "the chain stays while another one can go"
    cache.index.guard(keys_of([3]))
    assert cache.evict(5) == [11, 10], "a set that continues it gets nothing of it"
    cache.index.guard(b"")
    assert cache.evict(1) == [2], "if nothing else can go, the last one that can"
    assert cache.evict(5) == [1]
    cache.index.release(held)
    cache.use(3, pin_until=5.0)
    assert cache.evict(3, 1.0) == []
    assert cache.evict(3, 6.0) == [3]


@every_policy
def test_a_follower_of_higher_priority_keeps_the_blocks_before_it(policy: str) -> None:
    cache = Chains(policy, 16)
    cache.set_part(1)
    cache.set(2, priority=3, parent=1)
    cache.index.link(keys_of([2]), keys_of([1]))
    cache.set_part(3)
    assert cache.evict(1) == [3]
    assert cache.evict(2) == [2, 1]


class AnyOrder(RuleBasedStateMachine):
    """In any order of operations, no block is evicted while a block that follows it is there, and all blocks can be
    evicted in the end."""

    @initialize(policy=st.sampled_from(BlockIndex.POLICIES))
    def begin(self, policy: str) -> None:
        self.cache = Chains(policy, 24)
        self.follows: dict[int, int] = {}  # block -> the block that it follows, for blocks that are present
        self.now = self.pinned_until = 0.0

    def gone(self, names: list[int]) -> None:
        for name in names:
            self.follows.pop(name, None)
            for other in [other for other, above in self.follows.items() if above == name]:
                del self.follows[other]

    def drop_what_is_gone(self) -> None:
        names = {*self.follows, *self.follows.values()}
        self.gone([name for name in names if name not in self.cache.left(*names)])

    def is_above(self, name: int, of: int) -> bool:
        while of != name and of in self.follows:
            of = self.follows[of]
        return of == name

    def may_follow(self, name: int, above: int) -> bool:
        """Return whether a block is linked to another one. If it is linked already, that one must come between."""
        if name not in self.follows:
            return not self.is_above(name, above)
        now = self.follows[name]
        return now != above and self.is_above(now, above) and not self.is_above(name, above)

    @rule(names=st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True), before=st.integers(0, 39))
    def set_part(self, names: list[int], before: int) -> None:
        index = self.cache.index
        while (room := index.missing(keys_of(names)) - index.free) > 0:
            before_it = index.ready
            self.evict(room)
            if index.ready == before_it:
                return
        self.cache.set(*names)
        self.cache.index.link(keys_of(names), keys_of([before]))
        self.drop_what_is_gone()
        above = next(iter(self.cache.left(before)), None)
        for name in self.cache.left(*names):
            if above is not None and self.may_follow(name, above):
                self.follows[name] = above
            above = name

    @rule(names=st.lists(st.integers(0, 39), max_size=6, unique=True), pin=st.booleans())
    def use(self, names: list[int], pin: bool) -> None:
        self.cache.use(*names, pin_until=self.now + 1.0 if pin else 0.0)
        if pin:
            self.pinned_until = self.now + 1.2  # rounded up to eighths

    @rule(names=st.lists(st.integers(0, 39), max_size=4))
    def delete(self, names: list[int]) -> None:
        self.cache.index.delete(keys_of(names))
        self.gone(names)

    @rule(seconds=st.floats(0.1, 2.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        self.drop_what_is_gone()
        expected = self.cache.victims(count, self.now)
        evicted = self.cache.evict(count, self.now)
        assert evicted[: len(expected)] == expected
        for name in evicted:
            if name not in expected:
                assert self.now < self.pinned_until, "blocks go before others only where these are pinned"
            elif name in self.follows.values():
                raise AssertionError(f"{name} went while a block that follows it was there")
            self.gone([name])

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            ready = self.cache.index.ready
            assert len(self.cache.evict(ready, self.now + 10)) == ready and self.cache.index.ready == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(1), stateful_step_count=40)


@pytest.mark.parametrize("priority", [0, 3])
@pytest.mark.parametrize("policy", BlockIndex.POLICIES)
def test_if_every_chain_end_is_pinned_earlier_blocks_go(policy: str, priority: int) -> None:
    """The policy is asked for more blocks after it has named its last one; it once read beyond the end of its lists."""
    index, count = BlockIndex(16, 256, policy), 256
    index.attach()
    keys = make_keys(count)
    for at in range(0, count, 2):
        pair = b"".join(keys[at : at + 2])
        slots = index.reserve(pair, False, 2 * at + 1, priority)
        index.commit(slots, np.zeros(2, dtype=np.uint64), 2 * at + 3)
        index.link(pair, b"", slots)
    assert all(index.contains(b"".join(keys[1::2]), 100.0, False, 0, 160.0))
    assert [index.evict(8, 100.0) for _ in range(count // 16)] == [8] * (count // 16)
    assert index.evict(8, 100.0) == 0 and all(index.contains(b"".join(keys[1::2]), 100.0, False, 0))
