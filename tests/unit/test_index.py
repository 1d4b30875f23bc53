"""BlockIndex, compared with a model in plain Python in random sequences of every operation, and tests of single
features.

The model does the same with dicts and one list in order of recency. The index chooses the free slot for a write, so the
model takes the slot from the result and only checks that it was free.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore._index import BlockIndex
from tests.support.properties import examples

FREE, WRITING, READY, GONE = BlockIndex.FREE, BlockIndex.WRITING, BlockIndex.READY, BlockIndex.GONE
EXISTED, DUPLICATE, NO_SPACE = BlockIndex.EXISTED, BlockIndex.DUPLICATE, BlockIndex.NO_SPACE
ABSENT, COMING = BlockIndex.ABSENT, BlockIndex.COMING
NEVER = 2**63 - 1


def key(name: int, key_bytes: int = 16) -> bytes:
    return name.to_bytes(2, "big") + bytes(key_bytes - 2)


def chain(*names: int) -> bytes:
    return b"".join(key(name) for name in names)


def sums_of(slots: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.arange(len(slots), dtype=np.uint64) + 7


# -- against the model ---------------------------------------------------------------------------------------


@dataclass
class Block:
    """A slot in use: its state and, for a WRITING slot, the slot that it will replace."""

    name: int
    state: int
    checksum: int = 0
    refs: int = 0
    pin_until: float = 0.0
    tick: int = 0
    batch: int = -1
    replaces: int | None = None
    priority: int = 0


@dataclass
class Model:
    slots_per_segment: int
    blocks: dict[int, Block] = field(default_factory=dict)
    attached: set[int] = field(default_factory=set)
    recency: list[int] = field(default_factory=list)  # READY slots, least recently used first

    def slots(self) -> set[int]:
        return {o * self.slots_per_segment + i for o in self.attached for i in range(self.slots_per_segment)}

    def free(self) -> set[int]:
        return self.slots() - self.blocks.keys()

    def slot(self, name: int, state: int) -> int | None:
        found = [s for s, b in self.blocks.items() if b.name == name and b.state == state]
        assert len(found) <= 1
        return found[0] if found else None

    def ready(self, name: int) -> int | None:
        return self.slot(name, READY)

    def writing(self, name: int) -> int | None:
        return self.slot(name, WRITING)

    def present(self, name: int) -> bool:
        return self.ready(name) is not None or self.writing(name) is not None

    def touch(self, slots: Sequence[int | None], batch: int, tick: int) -> None:
        for i in range(len(slots) - 1, -1, -1):
            slot = slots[i]
            if slot is not None:
                self.blocks[slot].tick = tick + batch - 1 - i
                self.blocks[slot].batch = tick
                self.recency.remove(slot)
                self.recency.append(slot)

    def pin(self, name: int, now: float, pin_until: float) -> None:
        slot = self.ready(name)
        if slot is None:
            slot = self.writing(name)
        assert slot is not None
        if pin_until > now:
            self.blocks[slot].pin_until = max(self.blocks[slot].pin_until, pin_until)

    def retire(self, slot: int) -> None:
        self.recency.remove(slot)
        for block in self.blocks.values():
            if block.replaces == slot:
                block.replaces = None
        if self.blocks[slot].refs:
            self.blocks[slot].state = GONE
        else:
            del self.blocks[slot]

    def held(self, slot: int, now: float) -> bool:
        return self.blocks[slot].refs > 0 or self.blocks[slot].pin_until > now

    def evict(self, n: int, now: float) -> int:
        count = 0
        for priority in range(4):
            for spare in (True, False):
                batch = None
                for slot in self.by_priority(priority):
                    if count == n:
                        return count
                    if self.held(slot, now):
                        batch = self.blocks[slot].batch
                    elif not (spare and self.blocks[slot].batch == batch):
                        self.retire(slot)
                        count += 1
        return count

    def by_priority(self, priority: int) -> list[int]:
        return [slot for slot in self.recency if self.blocks[slot].priority == priority]


NAMES = st.integers(0, 9)
BATCH = st.lists(NAMES, max_size=6)
PINS = st.sampled_from([0.0, 0.0, 1.0, 3.0])


class IndexMachine(RuleBasedStateMachine):
    @initialize(key_bytes=st.sampled_from([8, 11, 16, 32, 64]), slots_per_segment=st.integers(1, 5))
    def create(self, key_bytes: int, slots_per_segment: int) -> None:
        self.now = 0.0
        self.tick = 1
        self.index = BlockIndex(key_bytes, slots_per_segment)
        self.model = Model(slots_per_segment)
        self.attach()

    def keys(self, names: Sequence[int]) -> bytes:
        return b"".join(key(name, self.index.key_bytes) for name in names)

    def next_tick(self, n: int) -> int:
        self.tick += n
        return self.tick - n

    @precondition(lambda self: len(self.model.attached) < 4)
    @rule()
    def attach(self) -> None:
        ordinal = self.index.attach()
        assert ordinal not in self.model.attached
        assert ordinal <= len(self.model.attached), "a detached ordinal is used again first"
        self.model.attached.add(ordinal)

    @rule(ordinal=st.integers(0, 4))
    def detach(self, ordinal: int) -> None:
        first = ordinal * self.model.slots_per_segment
        inside = [s for s in range(first, first + self.model.slots_per_segment) if s in self.model.blocks]
        blocks = [self.model.blocks[s] for s in inside]
        if ordinal not in self.model.attached or any(b.state != READY or b.refs for b in blocks):
            with pytest.raises(ValueError, match="segment"):
                self.index.detach(ordinal)
            return
        assert self.index.detach(ordinal) == len(inside)
        for slot in inside:
            self.model.retire(slot)
        self.model.attached.remove(ordinal)

    @rule(names=BATCH, refresh=st.booleans(), pin=PINS)
    def contains(self, names: list[int], refresh: bool, pin: float) -> None:
        tick = self.next_tick(len(names))
        answer = self.index.contains(self.keys(names), self.now, refresh, tick, self.now + pin)
        assert list(answer) == [self.model.present(name) for name in names]
        for name in names:
            if self.model.present(name):
                self.model.pin(name, self.now, self.now + pin)
        if refresh:
            self.model.touch([self.model.ready(name) for name in names], len(names), tick)

    @rule(names=BATCH, refresh=st.booleans(), pin=PINS)
    def match_prefix(self, names: list[int], refresh: bool, pin: float) -> None:
        tick = self.next_tick(len(names))
        length = 0
        while length < len(names) and self.model.present(names[length]):
            length += 1
        assert self.index.match_prefix(self.keys(names), self.now, refresh, tick, self.now + pin) == length
        for name in names[:length]:
            self.model.pin(name, self.now, self.now + pin)
        if refresh:
            self.model.touch([self.model.ready(name) for name in names[:length]], len(names), tick)

    @rule(names=BATCH)
    def missing(self, names: list[int]) -> None:
        absent = {name for name in names if not self.model.present(name)}
        assert self.index.missing(self.keys(names)) == len(absent)

    @rule(names=BATCH, force=st.booleans(), priority=st.sampled_from([0, 0, 0, 1, 3]))
    def reserve(self, names: list[int], force: bool, priority: int) -> None:
        model = self.model
        tick = self.next_tick(len(names))
        slots = self.index.reserve(self.keys(names), force, tick, priority).tolist()
        touched: list[int | None] = []
        seen: set[int] = set()
        for name, slot in zip(names, slots, strict=True):
            ready, writing = model.ready(name), model.writing(name)
            wanted = writing is None and (ready is None or force)
            touched.append(None)
            if name in seen:
                assert slot == DUPLICATE
            elif not wanted:
                assert slot == EXISTED
                touched[-1] = ready
            elif not model.free():
                assert slot == NO_SPACE
            else:
                assert slot in model.free()
                model.blocks[slot] = Block(name, WRITING, replaces=ready, priority=priority)
                touched[-1] = ready
            seen.add(name)
        model.touch(touched, len(names), tick)

    @rule(data=st.data(), abort=st.booleans())
    def finish(self, data: st.DataObject, abort: bool) -> None:
        writing = [s for s, b in self.model.blocks.items() if b.state == WRITING]
        slots = data.draw(st.lists(st.sampled_from([*writing, -1]), unique=True, max_size=6))
        chosen = [s for s in slots if s >= 0]
        if abort:
            assert self.index.abort(slots) == len(chosen)
            for slot in chosen:
                del self.model.blocks[slot]
            return
        tick = self.next_tick(len(slots))
        sums = sums_of(slots)
        assert self.index.commit(np.array(slots, np.int32), sums, tick) == len(chosen)
        for slot in reversed(chosen):
            block = self.model.blocks[slot]
            if block.replaces is not None:
                block.pin_until = max(block.pin_until, self.model.blocks[block.replaces].pin_until)
                self.model.retire(block.replaces)
            block.state = READY
            block.checksum = int(sums[slots.index(slot)])
            self.model.recency.append(slot)
        self.model.touch([s if s >= 0 else None for s in slots], len(slots), tick)

    @rule(names=BATCH, refresh=st.booleans())
    def acquire(self, names: list[int], refresh: bool) -> None:
        tick = self.next_tick(len(names))
        ready = [self.model.ready(name) for name in names]
        expected = []
        for name, slot in zip(names, ready, strict=True):
            expected.append(-2 if slot is None and self.model.present(name) else -1 if slot is None else slot)
            if slot is not None:
                self.model.blocks[slot].refs += 1
        assert self.index.acquire(self.keys(names), self.now, tick, refresh).tolist() == expected
        if refresh:
            self.model.touch(ready, len(names), tick)

    @rule(data=st.data(), more=st.booleans())
    def acquire_slot_or_release(self, data: st.DataObject, more: bool) -> None:
        blocks = self.model.blocks
        if more:
            readable = [s for s, b in blocks.items() if b.state in (READY, GONE)]
            slots = data.draw(st.lists(st.sampled_from([*readable, -1]), max_size=4))
            assert self.index.acquire_slot(slots) == sum(s >= 0 for s in slots)
            for slot in slots:
                if slot >= 0:
                    blocks[slot].refs += 1
            return
        references = [s for s, b in blocks.items() for _ in range(b.refs)]
        order = data.draw(st.permutations(references))
        slots = [*order[: data.draw(st.integers(0, len(order)))], -1]
        freed = 0
        for slot in slots[:-1]:
            blocks[slot].refs -= 1
            if blocks[slot].state == GONE and blocks[slot].refs == 0:
                del blocks[slot]
                freed += 1
        assert self.index.release(slots) == freed

    @rule(names=BATCH)
    def delete(self, names: list[int]) -> None:
        gone = {slot for name in names if (slot := self.model.ready(name)) is not None}
        assert self.index.delete(self.keys(names)) == len(gone)
        for slot in gone:
            self.model.retire(slot)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from([*sorted(self.model.slots()), -1]), max_size=4))
        gone = {s for s in slots if s in self.model.recency}
        assert self.index.drop(np.array(slots, np.int32)) == len(gone)
        for slot in gone:
            self.model.retire(slot)

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == len(self.model.recency)
        for slot in list(self.model.recency):
            self.model.retire(slot)

    @rule(n=st.integers(0, 8))
    def evict(self, n: int) -> None:
        evictable = sum(not self.model.held(s, self.now) for s in self.model.recency)
        keys = bytearray(b"before")
        victims = self.index.victims(n, self.now).tolist()
        names = self.index.keys_of(victims)
        count = self.index.evict(n, self.now, keys)
        assert keys == b"before" + names
        assert count == len(victims) == min(n, evictable) == self.model.evict(n, self.now)
        assert not set(victims) & self.model.blocks.keys()

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def misuse_raises_and_changes_nothing(self, data: st.DataObject) -> None:
        """Pass a wrong slot number after valid ones. The invariants then show whether the call changed anything."""
        model, index = self.model, self.index
        beyond = st.sampled_from([max(model.slots(), default=0) + 1000, 2**31 - 64])
        writing = [s for s, b in model.blocks.items() if b.state == WRITING]
        others = sorted(model.slots() - set(writing))
        bad = data.draw(st.sampled_from(others) | beyond if others else beyond)
        call: Callable[[], Any]
        for call in (
            lambda: index.commit([*writing, bad], sums_of([*writing, bad]), self.tick),
            lambda: index.abort([*writing, bad]),
        ):
            with pytest.raises(ValueError, match=f"slot {bad} "):
                call()
        read = [s for s, b in model.blocks.items() for _ in range(b.refs)]
        unread = sorted(model.slots() - set(read))
        bad = data.draw(st.sampled_from(unread) | beyond if unread else beyond)
        with pytest.raises(ValueError, match=f"slot {bad} "):
            index.release([*read, bad])
        bad = data.draw(st.sampled_from(sorted(model.free())) | beyond if model.free() else beyond)
        for call in (
            lambda: index.acquire_slot([*read, bad]),
            lambda: index.checksums([*read, bad]),
            lambda: index.keys_of([*read, bad]),
        ):
            with pytest.raises(ValueError, match=f"slot {bad} "):
                call()

    @invariant()
    def agrees_with_the_model(self) -> None:
        index, model = self.index, self.model
        states = [b.state for b in model.blocks.values()]
        assert index.ready == states.count(READY) == len(model.recency)
        assert index.writing == states.count(WRITING)
        assert index.gone == states.count(GONE)
        assert index.free == len(model.free())
        assert (index.slots, index.segments) == (len(model.slots()), len(model.attached))
        for name in range(10):
            expected = FREE if not model.present(name) else WRITING if model.ready(name) is None else READY
            assert index.state_of(self.keys([name])) == expected
        used = sorted(model.blocks)
        assert index.keys_of(used) == self.keys([model.blocks[s].name for s in used])
        assert index.checksums(used).tolist() == [model.blocks[s].checksum for s in used]
        assert index.pinned(self.now) == sum(model.blocks[s].pin_until > self.now for s in model.recency)
        ticks = [model.blocks[s].tick for s in model.recency]
        assert ticks == sorted(ticks)
        in_line = [model.blocks[s].tick for p in range(4) for s in model.by_priority(p)]
        assert index.oldest_tick() == (in_line[0] if in_line else NEVER)
        ready = sorted(model.recency)
        assert index.ticks_of(ready).tolist() == [model.blocks[s].tick for s in ready]
        assert index.priorities_of(used).tolist() == [model.blocks[s].priority for s in used]
        middle = sorted(ticks)[len(ticks) // 2] if ticks else 0
        assert index.ready_slots().tolist() == ready
        assert index.ready_slots(middle).tolist() == [s for s in ready if model.blocks[s].tick >= middle]
        numbers = sorted(model.slots() | {-1, 10**6})
        assert index.states_of(numbers).tolist() == [model.blocks[s].state if s in used else FREE for s in numbers]
        for ordinal in model.attached:
            first = ordinal * model.slots_per_segment
            inside = {s: b for s, b in model.blocks.items() if first <= s < first + model.slots_per_segment}
            newest = max((b.tick for b in inside.values() if b.state == READY), default=0)
            busy = any(b.state != READY or model.held(s, self.now) for s, b in inside.items())
            assert index.segment_recency(ordinal, self.now) == (newest, busy)


IndexMachine.TestCase.settings = settings(max_examples=examples(1.5), stateful_step_count=40)
TestIndexMachine = IndexMachine.TestCase


# -- by behaviour --------------------------------------------------------------------------------------------


class Filled:
    """An index whose blocks are set and committed in one call. It counts ticks as a shard does."""

    def __init__(self, slots_per_segment: int = 8, segments: int = 1, key_bytes: int = 16) -> None:
        self.index = BlockIndex(key_bytes, slots_per_segment)
        self.tick = 1
        for _ in range(segments):
            self.index.attach()

    def ticks(self, n: int) -> int:
        self.tick += n
        return self.tick - n

    def set(self, *names: int, force: bool = False) -> list[int]:
        slots = self.index.reserve(chain(*names), force, self.ticks(len(names)))
        self.index.commit(slots, sums_of(slots), self.ticks(len(names)))
        return [int(slot) for slot in slots]

    def touch(self, *names: int, pin_until: float = 0.0) -> None:
        self.index.contains(chain(*names), 0.0, True, self.ticks(len(names)), pin_until)

    def acquire(self, *names: int) -> list[int]:
        return [int(slot) for slot in self.index.acquire(chain(*names), 0.0, self.ticks(len(names)))]

    def left(self, *names: int) -> list[int]:
        return [name for name in names if self.index.state_of(key(name)) == READY]


def test_a_chains_tail_is_evicted_before_its_head() -> None:
    store = Filled()
    store.set(1, 2, 3)
    store.set(4, 5)
    gone: list[int] = []
    for _ in range(5):
        before = store.left(1, 2, 3, 4, 5)
        assert store.index.evict(1, 0.0) == 1
        gone += set(before) - set(store.left(1, 2, 3, 4, 5))
    assert gone == [3, 2, 1, 5, 4]


def test_a_touched_chain_outlives_one_set_after_it() -> None:
    store = Filled()
    store.set(1, 2)
    store.set(3, 4)
    store.touch(1, 2)
    store.index.evict(2, 0.0)
    assert store.left(1, 2, 3, 4) == [1, 2]


def test_setting_an_existing_block_again_counts_as_use() -> None:
    store = Filled()
    store.set(1)
    store.set(2)
    assert store.set(1) == [EXISTED]
    store.index.evict(1, 0.0)
    assert store.left(1, 2) == [1]


def test_the_head_of_a_pinned_chain_outlives_other_chains() -> None:
    store = Filled()
    store.set(1, 2, 3)
    store.index.contains(key(3), 0.0, False, 0, 10.0)
    store.set(4, 5)
    assert store.index.evict(2, 0.0) == 2
    assert store.left(1, 2, 3, 4, 5) == [1, 2, 3]


def test_only_blocks_below_a_pinned_one_go_before_other_chains() -> None:
    store = Filled()
    store.set(1, 2, 3)
    store.index.contains(key(2), 0.0, False, 0, 10.0)
    store.set(4)
    assert store.index.evict(1, 0.0) == 1
    assert store.left(1, 2, 3, 4) == [1, 2, 4]
    assert store.index.evict(1, 0.0) == 1
    assert store.left(1, 2, 3, 4) == [1, 2]


def test_blocks_above_a_pinned_one_go_when_nothing_else_is_left() -> None:
    store = Filled()
    store.set(1, 2, 3)
    store.index.contains(key(3), 0.0, False, 0, 10.0)
    assert store.index.evict(8, 0.0) == 2
    assert store.left(1, 2, 3) == [3]


@pytest.mark.parametrize("policy", BlockIndex.POLICIES)
def test_a_missing_or_unready_parent_is_ignored(policy: str) -> None:
    index = BlockIndex(16, 8, policy)
    index.attach()
    first = index.reserve(chain(1, 2), False, 1)
    second = index.reserve(key(3), False, 3)
    for parent in (key(9), key(1), key(3)):
        slots = index.reserve(key(4), False, 4)
        assert index.commit(slots, [7], 5, parent=parent, ends_chain=True) == 1
        assert index.delete(key(4)) == 1
    index.commit(first, [1, 2], 6, parent=key(1))
    assert index.commit(second, [3], 8, parent=key(2)) == 1
    assert index.evict(8, 0.0) == 3


@pytest.mark.parametrize("policy", BlockIndex.POLICIES)
def test_a_parent_of_the_wrong_size_is_refused_without_any_commit(policy: str) -> None:
    index = BlockIndex(16, 8, policy)
    index.attach()
    slots = index.reserve(key(1), False, 1)
    with pytest.raises(ValueError, match="parent is 2 keys"):
        index.commit(slots, [1], 2, parent=chain(2, 3))
    with pytest.raises(ValueError, match="expected a multiple of key_bytes=16"):
        index.commit(slots, [1], 2, parent=b"short")
    assert (index.ready, index.writing) == (0, 1)


def test_a_block_and_its_parent_can_be_replaced_together() -> None:
    index = BlockIndex(16, 8, "default")
    index.attach()
    index.commit(index.reserve(chain(1, 2), False, 1), [1, 2], 3)
    slots = index.reserve(chain(1, 2), True, 5)
    assert index.commit(slots, [3, 4], 7, parent=key(1)) == 2
    assert (index.ready, index.free) == (2, 6)
    assert index.evict(8, 0.0) == 2


def test_a_pinned_block_is_not_evicted_until_its_pin_expires() -> None:
    store = Filled()
    store.set(1)
    store.touch(1, pin_until=5.0)
    assert (store.index.evict(1, 4.9), store.index.pinned(4.9)) == (0, 1)
    assert (store.index.pinned(5.0), store.index.evict(1, 5.0)) == (0, 1)


def test_a_pin_is_never_shortened() -> None:
    store = Filled()
    store.set(1)
    store.touch(1, pin_until=5.0)
    store.touch(1, pin_until=2.0)
    assert store.index.evict(1, 3.0) == 0
    assert store.index.evict(1, 5.0) == 1


def test_a_pin_on_an_unready_block_holds_for_the_committed_one() -> None:
    store = Filled()
    slots = store.index.reserve(key(1), False, store.ticks(1))
    assert store.index.match_prefix(key(1), 0.0, False, 0, 5.0) == 1
    store.index.commit(slots, sums_of(slots), store.ticks(1))
    assert store.index.evict(1, 1.0) == 0
    store.set(1, force=True)
    assert store.index.evict(1, 1.0) == 0
    assert store.index.evict(1, 6.0) == 1


@pytest.mark.parametrize("remove", ["delete", "drop", "clear", "replace"])
def test_a_referenced_blocks_slot_is_reused_only_after_release(remove: str) -> None:
    store = Filled(slots_per_segment=2)
    index = store.index
    store.set(1)
    [slot] = store.acquire(1)
    assert index.evict(1, 0.0) == 0
    if remove == "delete":
        assert index.delete(key(1)) == 1
    elif remove == "drop":
        assert index.drop([slot]) == 1
    elif remove == "clear":
        assert index.clear() == 1
    else:
        assert store.set(1, force=True) == [1]
        index.delete(key(1))
    assert (index.gone, index.state_of(key(1))) == (1, FREE)
    assert (index.keys_of([slot]), index.checksums([slot]).tolist()) == (key(1), [7])
    assert store.set(2, 3) == [1, NO_SPACE]
    with pytest.raises(ValueError, match="in use"):
        index.detach(0)
    assert (index.release([slot]), index.gone) == (1, 0)
    assert store.set(3) == [slot]


def test_a_deletion_does_not_count_a_just_expired_block() -> None:
    store = Filled()
    for name, expires in ((1, 1.0), (2, 2.0), (3, 0.0)):
        slots = store.index.reserve(key(name), False, store.ticks(1))
        store.index.commit(slots, sums_of(slots), store.ticks(1), expires)
    assert store.index.delete(chain(1, 2, 3), 1.5) == 2
    assert store.index.ready == 0


def test_each_reader_of_a_key_holds_its_own_reference() -> None:
    store = Filled()
    store.set(1)
    assert store.acquire(1, 1, 2) == [0, 0, ABSENT]
    assert store.index.acquire_slot(0) == 1
    store.index.delete(key(1))
    assert [store.index.release(slots) for slots in ([0], [0, -1], [0])] == [0, 0, 1]
    with pytest.raises(ValueError, match="slot 0 is free"):
        store.index.release([0])


def test_a_forced_set_keeps_the_old_block_readable_until_commit() -> None:
    store = Filled()
    index = store.index
    [old] = store.set(1)
    slots = index.reserve(key(1), True, store.ticks(1))
    assert slots.tolist() == [1]
    assert store.acquire(1) == [old]
    assert index.reserve(key(1), True, store.ticks(1)).tolist() == [EXISTED]
    assert index.commit(slots, np.array([99], np.uint64), store.ticks(1)) == 1
    assert store.acquire(1) == [1]
    assert index.checksums([1, old, -1]).tolist() == [99, 7, 0]
    assert (index.ready, index.gone, index.release([old])) == (1, 1, 1)


def test_an_aborted_forced_set_leaves_the_old_block() -> None:
    store = Filled()
    [old] = store.set(1)
    slots = store.index.reserve(key(1), True, store.ticks(1))
    assert store.index.abort(slots) == 1
    assert (store.acquire(1), store.index.ready, store.index.writing) == ([old], 1, 0)


def test_a_forced_set_continues_when_the_old_block_is_deleted() -> None:
    store = Filled()
    store.set(1)
    slots = store.index.reserve(key(1), True, store.ticks(1))
    assert store.index.delete(key(1)) == 1
    assert (store.index.state_of(key(1)), store.acquire(1)) == (WRITING, [-2])
    store.index.commit(slots, sums_of(slots), store.ticks(1))
    assert store.acquire(1) == [1]


def test_an_aborted_write_leaves_nothing() -> None:
    store = Filled()
    slots = store.index.reserve(chain(1, 2), False, store.ticks(2))
    assert store.index.contains(chain(1, 2, 3), 0.0, False, 0) == b"\1\1\0"
    assert store.acquire(1) == [-2]
    assert store.index.abort(slots) == 2
    assert store.index.contains(chain(1, 2, 3), 0.0, False, 0) == b"\0\0\0"
    assert (store.index.free, store.index.writing, store.index.oldest_tick()) == (8, 0, NEVER)


def test_a_batch_on_a_fresh_segment_is_contiguous() -> None:
    store = Filled(slots_per_segment=100)
    assert store.set(*range(60)) == list(range(60))
    store.index.evict(1, 0.0)
    assert store.index.attach() == 1
    assert store.set(*range(100, 150)) == list(range(100, 150))


def test_a_chain_evicted_whole_is_reused_in_ascending_order() -> None:
    store = Filled(slots_per_segment=200)
    store.set(*range(200))
    store.touch(*range(100, 200))
    store.index.evict(70, 0.0)
    assert store.set(*range(300, 370)) == list(range(30, 100))


def test_a_batch_larger_than_the_space_left_fills_it() -> None:
    store = Filled(slots_per_segment=2)
    assert store.set(1, 2, 1, 3, 3) == [0, 1, DUPLICATE, NO_SPACE, DUPLICATE]


def test_a_detached_segment_number_is_attached_again_empty() -> None:
    store = Filled(slots_per_segment=2, segments=3)
    store.set(1, 2)
    assert store.index.detach(2) == 2
    assert (store.index.slots, store.left(1, 2)) == (4, [])
    with pytest.raises(ValueError, match="segment 2 is not attached"):
        store.index.segment_recency(2, 0.0)
    with pytest.raises(ValueError, match="slot 4 is in no attached segment"):
        store.index.keys_of([4])
    assert (store.index.drop([4]), store.index.attach()) == (0, 2)
    assert store.set(3) == [4]


def test_an_index_without_segments_has_no_space() -> None:
    index = BlockIndex(16, 4)
    assert index.reserve(chain(1), False, 1).tolist() == [NO_SPACE]
    assert (index.evict(5, 0.0), index.clear(), index.slots) == (0, 0, 0)


def test_empty_batches_do_nothing() -> None:
    store = Filled()
    index = store.index
    assert (index.contains(b"", 0.0, True, 0), index.match_prefix(b"", 0.0, True, 0)) == (b"", 0)
    assert index.reserve(b"", False, 0).shape == index.acquire(b"", 0.0, 0).shape == (0,)
    assert [index.missing(b""), index.delete(b""), index.evict(0, 0.0)] == [0] * 3
    assert [index.commit([], [], 0), index.abort([]), index.release([]), index.drop([])] == [0] * 4
    assert (index.keys_of([]), index.checksums([]).dtype) == (b"", np.dtype(np.uint64))


@pytest.mark.parametrize("buffer", [bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8).reshape(-1, 16)])
def test_keys_are_any_contiguous_buffer(buffer: Callable[[bytes], Any]) -> None:
    store = Filled()
    store.set(1, 2)
    assert store.index.contains(buffer(chain(1, 9, 2)), 0.0, False, 0) == b"\1\0\1"


@pytest.mark.parametrize("key_bytes", [8, 9, 16, 20, 32, 63, 64])
def test_every_byte_of_a_key_matters(key_bytes: int) -> None:
    index = BlockIndex(key_bytes, 512)
    index.attach()
    keys = [bytes(key_bytes)] + [(1 << bit).to_bytes(key_bytes, "big") for bit in range(key_bytes * 8)]
    keys = keys[:512]
    slots = index.reserve(b"".join(keys), False, 1)
    assert slots.tolist() == list(range(len(keys)))
    assert index.keys_of(slots) == b"".join(keys)


@pytest.mark.parametrize(
    "call",
    [
        lambda i, k: i.contains(k, 0.0, True, 9),
        lambda i, k: i.match_prefix(k, 0.0, True, 9),
        lambda i, k: i.missing(k),
        lambda i, k: i.reserve(k, True, 9),
        lambda i, k: i.acquire(k, 0.0, 9),
        lambda i, k: i.delete(k),
        lambda i, k: i.state_of(k),
    ],
)
def test_keys_of_a_wrong_length_raise_and_change_nothing(call: Callable[[BlockIndex, bytes], Any]) -> None:
    store = Filled()
    store.set(1, 2)
    before = store.index.segment_recency(0, 0.0)
    with pytest.raises(ValueError, match=r"keys are 31 bytes.*key_bytes=16"):
        call(store.index, chain(1, 2)[:31])
    assert (store.index.segment_recency(0, 0.0), store.left(1, 2)) == (before, [1, 2])


def test_state_of_takes_exactly_one_key() -> None:
    for keys in (b"", chain(1, 2)):
        with pytest.raises(ValueError, match="expected one"):
            Filled().index.state_of(keys)


@pytest.mark.parametrize("slot", [8, 1000, 2**31 - 1, 2**31, 2**32, 2**63])
def test_slots_out_of_range_raise_and_change_nothing(slot: int) -> None:
    store = Filled()
    index = store.index
    writing = index.reserve(key(1), False, 1).tolist()
    calls: list[Callable[[], Any]] = [
        lambda: index.commit([*writing, slot], [1, 2], 9),
        lambda: index.abort([*writing, slot]),
        lambda: index.release([slot]),
        lambda: index.acquire_slot(slot),
        lambda: index.drop([slot]),
        lambda: index.checksums([slot]),
        lambda: index.keys_of([slot]),
        lambda: index.keys_of(np.array([slot], np.uint64)),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError), match="slot"):
            call()
    assert (index.writing, index.ready, index.free) == (1, 0, 7)


def test_a_slot_named_twice_is_refused_whole() -> None:
    store = Filled()
    slots = store.index.reserve(chain(1, 2), False, 1).tolist()
    with pytest.raises(ValueError, match=f"slot {slots[0]} is named twice"):
        store.index.commit([*slots, slots[0]], [1, 2, 3], 9)
    with pytest.raises(ValueError, match=f"slot {slots[1]} is named twice"):
        store.index.abort([slots[1], slots[1]])
    assert store.index.commit(slots, [1, 2], 9) == 2


def test_sums_must_be_one_per_slot() -> None:
    store = Filled()
    slots = store.index.reserve(chain(1, 2), False, 1)
    with pytest.raises(ValueError, match="2 slots with 1 sums"):
        store.index.commit(slots, np.zeros(1, np.uint64), 9)
    with pytest.raises(TypeError, match="sums must be a vector of uint64"):
        store.index.commit(slots, np.zeros(2), 9)
    assert store.index.writing == 2


@pytest.mark.parametrize("slots", [[0.5], np.zeros((2, 2), np.int32), [None], "ab", np.zeros(1, np.float32)])
def test_slots_that_are_not_integers_are_refused(slots: Any) -> None:
    with pytest.raises(TypeError, match="slots must be a vector of int32"):
        Filled().index.release(slots)


def test_strided_and_wider_slot_arrays_are_converted() -> None:
    store = Filled()
    slots = store.index.reserve(chain(1, 2, 3), False, 1)
    wide = np.repeat(slots, 2)[::2]
    assert store.index.commit(wide, np.arange(6, dtype=np.uint64)[::2], 9) == 3
    assert store.index.checksums(slots.astype(np.int64)[::-1]).tolist() == [4, 2, 0]


@pytest.mark.parametrize(
    ("key_bytes", "slots_per_segment"), [(7, 4), (65, 4), (-16, 4), (16, 0), (16, -1), (16, 2**31)]
)
def test_impossible_sizes_are_refused(key_bytes: int, slots_per_segment: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        BlockIndex(key_bytes, slots_per_segment)


def test_the_index_takes_under_200_bytes_a_slot_and_frees_them() -> None:
    index = BlockIndex(16, 1000)
    for segment in range(50):
        index.attach()
        assert index.nbytes <= 200 * index.slots, segment
    for ordinal in range(50):
        index.detach(ordinal)
    assert index.nbytes < 16_384


def test_detaching_and_attaching_under_churn_keeps_every_other_block() -> None:
    """The table grows, shrinks and deletes by backward shifts, at a size with long clusters."""
    rng = np.random.default_rng(5)
    index = BlockIndex(16, 64)
    tick = 1
    present: dict[bytes, int] = {}
    attached: list[int] = []
    for _ in range(400):
        if len(attached) < 40 and rng.random() < 0.6:
            attached.append(index.attach())
        elif attached:
            ordinal = attached.pop(int(rng.integers(len(attached))))
            lost = [k for k, s in present.items() if s // 64 == ordinal]
            assert index.detach(ordinal) == len(lost)
            for lost_key in lost:
                del present[lost_key]
        keys = [rng.bytes(16) for _ in range(50)]
        slots = index.reserve(b"".join(keys), False, tick)
        assert int((slots >= 0).sum()) == min(50, len(attached) * 64 - len(present))
        index.commit(slots, np.zeros(50, np.uint64), tick + 50)
        tick += 100
        present |= {k: s for k, s in zip(keys, slots.tolist(), strict=True) if s >= 0}
        doomed = [k for k in present if rng.random() < 0.02]
        assert index.delete(b"".join(doomed)) == len(doomed)
        for doomed_key in doomed:
            del present[doomed_key]
        assert index.acquire(b"".join(present), 0.0, tick, False).tolist() == list(present.values())
        index.release(list(present.values()))
        assert index.ready == len(present)


def test_keys_are_not_leaked_references() -> None:
    """A refused call must release its buffers: a bytearray that is still exported cannot be resized."""
    store = Filled()
    keys, slots = bytearray(chain(1, 2)[:31]), np.array([5], np.int32)
    references = sys.getrefcount(slots)
    with pytest.raises(ValueError, match="31 bytes"):
        store.index.reserve(keys, False, 1)
    with pytest.raises(ValueError, match="slot 5"):
        store.index.commit(slots, np.zeros(1, np.uint64), 1)
    keys.append(0)
    assert store.index.missing(keys) == 2
    keys.append(0)
    assert sys.getrefcount(slots) == references


# -- expiry, restore -----------------------------------------------------------------------------------------


def with_expiry(*names: int, expires: float, priority: int = 0) -> Filled:
    store = Filled()
    slots = store.index.reserve(chain(*names), False, store.ticks(len(names)), priority)
    store.index.commit(slots, sums_of(slots), store.ticks(len(names)), expires)
    return store


@pytest.mark.parametrize(
    "call",
    [
        lambda i: list(i.contains(chain(1, 2), 5.0, True, 9, 20.0)) == [0, 0],
        lambda i: i.match_prefix(chain(1, 2), 5.0, True, 9, 20.0) == 0,
        lambda i: i.acquire(chain(1, 2), 5.0, 9).tolist() == [ABSENT, ABSENT],
        lambda i: i.pinned(5.0) == i.missing(chain(1, 2)) - 2 == 0,
        lambda i: i.pinned(5.0) == 0 and i.reserve(chain(1, 2), False, 9).min() >= 0,
        lambda i: i.pinned(5.0) == i.state_of(key(1)) == FREE,
        lambda i: i.pinned(5.0) == i.delete(chain(1, 2)) == 0,
        lambda i: i.pinned(5.0) == i.ready_slots().size == 0,
        lambda i: i.segment_recency(0, 5.0) == (0, False),
        lambda i: i.victims(2, 5.0).size == 0,
        lambda i: i.expire(5.0, 100) == 2,
        lambda i: i.evict(2, 5.0) == 2,
    ],
)
def test_an_expired_block_counts_as_deleted_pinned_or_not(call: Callable[[BlockIndex], bool]) -> None:
    store = with_expiry(1, 2, expires=5.0)
    assert store.index.match_prefix(chain(1, 2), 4.75, True, store.ticks(2), 10.0) == 2
    assert call(store.index)


def test_expiry_is_at_most_an_eighth_second_late_and_never_early() -> None:
    store = with_expiry(1, expires=5.01)
    assert store.index.expires_of([0, -1]).tolist() == [5.125, 0.0]
    assert store.index.contains(key(1), 5.1, False, 0) == b"\1"
    assert store.index.contains(key(1), 5.125, False, 0) == b"\0"


def test_a_blocks_expiry_can_be_changed() -> None:
    store = with_expiry(1, 2, 3, expires=5.0)
    assert store.index.set_expiry(chain(1, 9, 2), 4.0, 50.0) == b"\1\0\1"
    assert store.index.set_expiry(key(2), 4.0, 0.0) == b"\1"
    assert store.index.contains(chain(1, 2, 3), 5.0, False, 0) == b"\1\1\0"
    assert store.index.set_expiry(key(3), 5.0, 50.0) == b"\0", "it is too late"
    assert store.index.expire(60.0, 100) == 1 and store.index.contains(chain(1, 2), 60.0, False, 0) == b"\0\1"
    slots = store.index.reserve(key(1), False, store.ticks(1))
    assert store.index.set_expiry(key(1), 60.0, 70.0) == b"\0", "it is being written"
    store.index.commit(slots, [9], store.ticks(1))
    assert store.index.expire(1e6, 100) == 0, "nothing expires any more"


def test_an_expired_block_that_is_read_keeps_its_slot_until_released() -> None:
    store = with_expiry(1, expires=5.0)
    slots = store.acquire(1)
    assert store.index.expire(6.0, 100) == 1
    assert (store.index.gone, store.index.free) == (1, 7)
    assert store.index.release(slots) == 1


def test_time_never_goes_back() -> None:
    store = with_expiry(1, expires=5.0)
    store.index.pinned(5.0)
    assert store.index.contains(key(1), 1.0, False, 0) == b"\0"


def test_a_sweep_checks_a_bounded_number_of_slots_and_wraps_around() -> None:
    store = Filled(slots_per_segment=4, segments=3)
    store.index.detach(1)
    slots = store.index.reserve(chain(*range(8)), False, 1)
    store.index.commit(slots, sums_of(slots), 9, 1.0)
    assert [store.index.expire(2.0, 3) for _ in range(4)] == [3, 3, 2, 0]
    assert store.index.free == 8


def test_a_write_that_replaces_an_expired_block_continues() -> None:
    store = with_expiry(1, expires=5.0)
    slots = store.index.reserve(key(1), True, store.ticks(1))
    assert store.index.acquire(key(1), 6.0, store.ticks(1)).tolist() == [COMING]
    store.index.commit(slots, [9], store.ticks(1))
    assert store.acquire(1) == slots.tolist()
    assert store.index.expires_of(slots).tolist() == [0.0]


def test_a_restored_index_answers_and_evicts_like_the_old_one() -> None:
    old = with_expiry(1, 2, 3, expires=50.0, priority=1)
    old.set(4, 5)
    old.touch(1)
    index, slots = old.index, old.index.ready_slots()
    slots = slots[np.argsort(index.ticks_of(slots))]
    columns = [index.checksums(slots), index.ticks_of(slots), index.expires_of(slots), index.priorities_of(slots)]
    new = BlockIndex(16, 4)
    for _ in range(2):
        new.attach()
    assert new.restore(index.keys_of(slots), slots, *columns).tolist() == slots.tolist()
    again = [new.checksums(slots), new.ticks_of(slots), new.expires_of(slots), new.priorities_of(slots)]
    assert [column.tolist() for column in again] == [column.tolist() for column in columns]
    assert new.ready_slots().tolist() == index.ready_slots().tolist()
    assert new.victims(5, 0.0).tolist() == index.victims(5, 0.0).tolist()
    assert (new.ready, new.free) == (5, 3)
    assert new.reserve(chain(*range(6, 12)), False, 99).tolist().count(NO_SPACE) == 3


def test_a_row_that_cannot_be_restored_is_skipped() -> None:
    store = Filled()
    store.set(1)
    writing = store.index.reserve(key(2), False, store.ticks(1)).tolist()
    rows = [(1, 4), (2, 4), (3, 0), (3, writing[0]), (3, 8), (3, -1), (3, 4), (3, 5), (6, 4), (7, 6)]
    zeros = np.zeros(len(rows), np.uint64)
    answer = store.index.restore(
        chain(*(name for name, _ in rows)), [slot for _, slot in rows], zeros, zeros, zeros, zeros.astype(np.uint8)
    )
    assert answer.tolist() == [-1] * 6 + [4, -1, -1, 6]
    assert (store.index.ready, store.index.free) == (3, 4)
    assert store.left(1, 2, 3, 6, 7) == [1, 3, 7]


def test_mismatched_columns_are_refused_as_a_whole() -> None:
    index, zeros = Filled().index, np.zeros(2, np.uint64)
    good: list[Any] = [[0, 1], zeros, zeros, [0.0, 0.0], [0, 0]]
    for i, name in enumerate(["slots", "sums", "ticks", "expires", "priorities"]):
        with pytest.raises(ValueError, match=f"2 keys with 1 {name}"):
            index.restore(chain(1, 2), *good[:i], good[i][:1], *good[i + 1 :])
    for priorities in ([0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="priorities range from"):
            index.restore(chain(1, 2), *good[:4], priorities)
    with pytest.raises(ValueError, match="priority is 4"):
        index.reserve(key(1), False, 1, 4)
    assert (index.ready, index.free) == (0, 8)
    assert index.restore(chain(1, 2), *good).tolist() == [0, 1]


def test_evicted_keys_are_only_appended_to_a_growable_bytearray() -> None:
    store = Filled()
    store.set(1)
    keys = bytearray()
    with memoryview(keys), pytest.raises(BufferError):
        store.index.evict(1, 0.0, keys)
    with pytest.raises(TypeError, match="bytearray"):
        store.index.evict(1, 0.0, b"")  # type: ignore[arg-type]
    assert store.left(1) == [1]


# ---- slots taken from their writer ---------------------------------------------------------------------------------


def test_a_disowned_slot_frees_its_key_at_once_and_itself_later() -> None:
    index = BlockIndex(16, 4)
    index.attach()
    key = bytes(16)
    [slot] = index.reserve(key, False, 1)
    assert index.disown([slot, -1, 3]) == 1
    assert index.state_of(key) == BlockIndex.FREE and (index.writing, index.gone, index.free) == (0, 1, 3)
    [other] = index.reserve(key, False, 2)
    assert other not in (slot, -1)
    index.commit([other], [7], 3)
    assert index.release([slot]) == 1 and (index.gone, index.free) == (0, 3)
    assert index.state_of(key) == BlockIndex.READY and index.checksums([other]).tolist() == [7]


def test_the_old_block_stays_when_its_replacement_is_disowned() -> None:
    index = BlockIndex(16, 4)
    index.attach()
    key = bytes(16)
    index.commit(index.reserve(key, False, 1), [1], 2)
    slots = index.reserve(key, True, 3)
    assert index.disown(slots) == 1 and index.disown(slots) == 0
    assert index.state_of(key) == BlockIndex.READY and index.ready == 1
    index.release(slots)
    assert (index.free, index.gone, index.writing) == (3, 0, 0)
    with pytest.raises(ValueError, match="expected writing"):
        index.commit(slots, [2], 4)
