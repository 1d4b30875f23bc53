"""Transient blocks in an index and a store: how often each may be read, when it is removed, and which memory it
takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvstore._index import BlockIndex
from kvstore.store.listing import Listing
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import EMPTY_S, ShardStore
from tests.support.harness import make_keys
from tests.support.properties import examples
from tests.unit.test_store import BLOCK, SEGMENT, canonical, present

KEYS = make_keys(10)
PER_SEGMENT = 4
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


@dataclass
class Block:
    """A READY block of the model."""

    sum: int
    reads: int  # reads that are left; 0: an ordinary block
    expires: int  # 0: never
    readers: int = 0


@dataclass
class Write:
    keys: list[bytes]
    slots: np.ndarray
    sums: np.ndarray
    reads: int
    ttl: int
    keeps: list[bool] = field(default_factory=list)  # keys that it writes


class Machine(RuleBasedStateMachine):
    """Sets of both kinds, successful and failed reads, expiry, removal and eviction, compared with a model."""

    @initialize(policy=st.sampled_from(BlockIndex.POLICIES), transient=st.integers(1, 2))
    def start(self, policy: str, transient: int) -> None:
        self.index = BlockIndex(16, PER_SEGMENT, policy)
        self.index.attach()
        for _ in range(transient):
            self.index.attach(True)
        self.index.attach()
        self.now, self.tick, self.sums = 1, 1, itertools.count(1)
        self.blocks: dict[bytes, Block] = {}
        self.writes: list[Write] = []
        self.reads: list[tuple[np.ndarray, list[Block]]] = []

    def ticks(self) -> int:
        self.tick += 100
        return self.tick

    def writing(self, key: bytes) -> bool:
        return any(key in write.keys for write in self.writes)

    @rule(keys=some_keys, reads=st.sampled_from([0, 0, 1, 2, 255]), ttl=st.integers(1, 6))
    def reserve(self, keys: list[bytes], reads: int, ttl: int) -> None:
        room = self.index.spare if reads else self.index.free
        expected = []
        for key in keys:
            there = self.blocks.get(key)
            if self.writing(key) or (there is not None and not (reads == 0 and there.reads)):
                expected.append("existed")
                continue
            expected.append("slot" if room else "none")
            room -= room > 0
        missing = self.index.missing(b"".join(keys), reads)
        slots = self.index.reserve(b"".join(keys), False, self.ticks(), 0, reads)
        names = {BlockIndex.EXISTED: "existed", BlockIndex.NO_SPACE: "none"}
        assert [names.get(slot, "slot") for slot in slots.tolist()] == expected
        assert missing >= expected.count("slot") + expected.count("none")
        mine = slots >= 0
        sums = np.array([next(self.sums) for _ in range(int(mine.sum()))], dtype=np.uint64)
        kept = [key for key, slot in zip(keys, slots, strict=True) if slot >= 0]
        if kept:
            self.writes.append(Write(kept, slots[mine], sums, reads, ttl))

    @rule(number=st.integers(0, 5), parent=st.sampled_from([b"", *KEYS]))
    def commit(self, number: int, parent: bytes) -> None:
        if number >= len(self.writes):
            return
        write = self.writes.pop(number)
        expires = self.now + write.ttl if write.reads else 0
        self.index.commit(write.slots, write.sums, self.ticks(), float(expires), parent)
        for key, checksum in zip(write.keys, write.sums.tolist(), strict=True):
            self.blocks[key] = Block(checksum, write.reads, expires)

    @rule(number=st.integers(0, 5))
    def abort(self, number: int) -> None:
        if number < len(self.writes):
            self.index.abort(self.writes.pop(number).slots)

    @rule(keys=some_keys, reads=st.integers(1, 255), ttl=st.integers(1, 6))
    def renew(self, keys: list[bytes], reads: int, ttl: int) -> None:
        self.index.renew(b"".join(keys), reads, float(self.now), float(self.now + ttl))
        for block in (self.blocks[key] for key in keys if key in self.blocks):
            if block.reads:
                block.reads, block.expires = max(block.reads, reads), max(block.expires, self.now + ttl)

    @rule(keys=some_keys)
    def begin_read(self, keys: list[bytes]) -> None:
        slots = self.index.acquire(b"".join(keys), float(self.now), self.ticks(), True, True)
        sums, read = self.index.checksums(slots), []
        for key, slot, checksum in zip(keys, slots.tolist(), sums.tolist(), strict=True):
            block = self.blocks.get(key)
            may = block is not None and (not block.reads or block.readers < block.reads)
            assert (slot >= 0) == may
            if block is not None and may:
                assert checksum == block.sum
                block.readers += 1
                read.append(block)
        self.reads.append((slots[slots >= 0], read))

    @rule(number=st.integers(0, 5), complete=st.booleans())
    def end_read(self, number: int, complete: bool) -> None:
        if number >= len(self.reads):
            return
        slots, read = self.reads.pop(number)
        assert self.index.checksums(slots).tolist() == [block.sum for block in read], "other bytes under a reader"
        self.index.release(slots, complete)
        for block in read:
            block.readers -= 1
            if complete and block.reads:
                block.reads -= 1
                if not block.reads:
                    self.blocks = {key: other for key, other in self.blocks.items() if other is not block}

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        assert self.index.delete(b"".join(keys)) == sum(self.blocks.pop(key, None) is not None for key in keys)

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == len(self.blocks)
        self.blocks.clear()

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.blocks = {key: block for key, block in self.blocks.items() if not 0 < block.expires <= self.now}
        self.index.expire_transient(float(self.now))

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        evicted = bytearray()
        self.index.evict(count, float(self.now), evicted)
        for at in range(0, len(evicted), 16):
            block = self.blocks.pop(bytes(evicted[at : at + 16]))
            assert not block.reads and not block.readers, "a block that must stay was evicted"

    @rule(keys=some_keys)
    def link(self, keys: list[bytes]) -> None:
        self.index.link(b"".join(keys), KEYS[0])

    @rule(transient=st.booleans())
    def change_segments(self, transient: bool) -> None:
        ordinal = self.index.unused_transient()
        if ordinal >= 0:
            assert self.index.detach(ordinal) == 0
            self.index.attach(transient)

    @invariant()
    def the_counts_are_those_of_the_model(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        transient = {key for key, block in self.blocks.items() if block.reads}
        assert index.ready == len(self.blocks)
        assert index.transient == len(transient)
        assert index.slots == index.free + index.spare + index.ready + index.writing + index.gone
        slots = index.ready_slots()
        listed = {bytes(index.keys_of(slots[at : at + 1])) for at in range(len(slots))}
        assert listed == self.blocks.keys() - transient, "a transient block is listed"
        assert len(index.ready_slots(0, True)) == index.ready, "a purge would leave blocks"
        victims = index.keys_of(index.victims(100, float(self.now)))
        assert not {victims[at : at + 16] for at in range(0, len(victims), 16)} & transient
        assert index.before_of(index.ready_slots(0, True)).max(initial=-1) < index.slots + 4 * PER_SEGMENT

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.reads:
            self.end_read(0, False)
        while self.writes:
            self.abort(0)
        self.pass_time(300)
        assert self.index.spare == self.index.transient_slots, "a slot leaked"
        self.the_counts_are_those_of_the_model()


def test_an_index_with_transient_blocks_behaves_as_the_model() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples(2), stateful_step_count=60))


# ---- the store -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[ShardStore]:
    """Return a store of four segments of four blocks; one segment may hold transient blocks."""
    store = ShardStore(4 * SEGMENT, SEGMENT, transient_bytes=1)
    yield store
    store.arena.close()


def put(
    store: ShardStore,
    namespace: NamespaceStore,
    keys: Sequence[bytes],
    reads: int = 0,
    now: float = 0.0,
    ttl_s: float = 60,
) -> np.ndarray:
    slots = store.reserve(namespace, b"".join(keys), False, now, reads=reads)
    sums = np.zeros(len(keys), dtype=np.uint64)
    namespace.memory.index.commit(slots, sums, store.ticks(len(keys)), now + ttl_s if reads else 0.0)
    return slots


def test_transient_blocks_beyond_their_limit_are_refused_without_eviction(store: ShardStore) -> None:
    keys = make_keys(40)
    namespace = store.open(canonical("a"), 16)
    put(store, namespace, keys[:12])
    assert put(store, namespace, keys[20:26], 1).tolist()[4:] == [BlockIndex.NO_SPACE] * 2
    assert all(present(namespace, keys[:12]))
    assert all(present(namespace, keys[20:24]))
    put(store, namespace, keys[12:16])  # now the room for ordinary blocks is full
    assert all(present(namespace, keys[20:24]))
    assert namespace.memory.evicted == 4


def test_the_first_transient_block_takes_the_oldest_segment(store: ShardStore) -> None:
    keys = make_keys(40)
    first, second = store.open(canonical("a"), 16), store.open(canonical("b"), 16)
    put(store, first, keys[:12])
    put(store, second, keys[:4])
    put(store, second, keys[20:22], 1)
    assert sum(present(first, keys[:12])) == 8 and all(present(second, keys[:4]))
    assert store.memory.transient_segments == 1


def test_an_empty_transient_segment_goes_to_a_namespace_in_need(store: ShardStore) -> None:
    keys = make_keys(4)
    first, second = store.open(canonical("a"), 16), store.open(canonical("b"), 16)
    put(store, first, keys, 1, ttl_s=5)
    assert (put(store, second, keys, 1, now=4) == BlockIndex.NO_SPACE).all()
    assert (put(store, second, keys, 1, now=5) >= 0).all(), "their time is over"
    assert store.memory.transient_segments == 1


def test_a_segment_that_stays_empty_is_returned(store: ShardStore) -> None:
    keys = make_keys(5)
    namespace = store.open(canonical("a"), 16)
    put(store, namespace, keys[:1])
    put(store, namespace, keys[1:], 1)
    index = namespace.memory.index
    assert index.release(index.acquire(b"".join(keys[1:]), 1.0, 0, False, True), True) == 4
    for now in (1.0, EMPTY_S):
        store.expire(now)
        assert store.memory.transient_segments == 1
    store.expire(1 + EMPTY_S)
    assert store.memory.transient_segments == 0 and store.arena.free == 3


@pytest.mark.parametrize(("given", "segments"), [(0, 0), (1, 1), (SEGMENT, 1), (SEGMENT + 1, 2), (9 * SEGMENT, 3)])
def test_the_limit_is_whole_segments_and_spares_one(given: int, segments: int) -> None:
    store = ShardStore(4 * SEGMENT, SEGMENT, transient_bytes=given)
    try:
        namespace = store.open(canonical("a"), 16)
        keys = make_keys(16)
        assert int((put(store, namespace, keys, 1) >= 0).sum()) == segments * (SEGMENT // BLOCK)
        assert (put(store, namespace, make_keys(1, first=100)) >= 0).all(), "there is room for an ordinary one"
    finally:
        store.arena.close()


def test_an_ordinary_block_replaces_a_transient_one_and_stays_ordinary(store: ShardStore) -> None:
    keys = make_keys(2)
    namespace = store.open(canonical("a"), 16)
    put(store, namespace, keys, 1)
    assert (put(store, namespace, keys[:1]) >= 0).all()
    assert (put(store, namespace, keys[:1], 1) == BlockIndex.EXISTED).all()
    index = namespace.memory.index
    for _ in range(3):
        index.release(index.acquire(b"".join(keys), 1.0, 0, False, True), True)
    assert present(namespace, keys) == [True, False]
    assert (index.transient, index.spare) == (0, index.transient_slots)


def test_lists_of_a_namespaces_blocks_omit_transient_ones(store: ShardStore) -> None:
    keys = make_keys(6)
    namespace = store.open(canonical("a"), 16)
    put(store, namespace, keys[:3])
    put(store, namespace, keys[3:], 1)
    listing = Listing(namespace, 0.0)
    assert all(listing.steps()) and listing.total == 3
    assert {listing.keys(at, 1)[0] for at in range(3)} == set(keys[:3])


def test_transient_blocks_without_own_segments_have_no_room() -> None:
    index = BlockIndex(16, 4)
    index.attach()
    assert index.reserve(KEYS[0], False, 1, 0, 1).tolist() == [BlockIndex.NO_SPACE]
    for reads, force in ((256, False), (-1, False), (1, True)):
        with pytest.raises(ValueError, match="reads is"):
            index.reserve(KEYS[0], force, 1, 0, reads)
    with pytest.raises(ValueError, match="reads is 0, expected 1 to 255"):
        index.renew(KEYS[0], 0, 0.0, 1.0)
