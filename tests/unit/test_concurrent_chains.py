"""Several clients write one chain at once. When all are done, it is one chain, and its tail is evicted first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore._index import BlockIndex
from kvstore.store.chains import SetCall
from kvstore.store.expected import split
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore.store.tier import Slots
from kvstore_client import Namespace
from tests.support.harness import make_keys
from tests.support.properties import examples

SEGMENT = 1 << 20
SLOTS = 128
BLOCK = SEGMENT // SLOTS
CANONICAL = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=BLOCK).canonical()

every_policy = pytest.mark.parametrize("policy", BlockIndex.POLICIES)


@dataclass
class Writing:
    """A SET whose blocks are arriving."""

    keys: bytes
    slots: Slots
    before: bytes
    part: SetCall


class Shard:
    """The store of one shard, and the steps of a SET: it begins, and then either ends or is given up."""

    def __init__(self, policy: str = "lru") -> None:
        self.store = ShardStore(SEGMENT, SEGMENT, policy)
        self.now = 100.0
        self.calls = 0

    @property
    def namespace(self) -> NamespaceStore:
        return self.store.open(CANONICAL, 16)

    @property
    def index(self) -> BlockIndex:
        return self.namespace.memory.index

    def begin(self, keys: Sequence[bytes], parent: bytes = b"", end: bytes = b"", force: bool = False) -> Writing:
        joined = b"".join(keys)
        before = self.store.chains.find(self.namespace, parent) or b""
        slots = self.store.reserve(self.namespace, joined, force, self.now, 0, before)
        self.calls += 1
        part = SetCall(end or keys[-1], self.calls, np.arange(len(keys), dtype=np.uint32))
        return Writing(joined, slots, before, part)

    def end(self, writing: Writing) -> None:
        namespace, store = self.namespace, self.store
        count = len(writing.slots)
        sums = np.zeros(count, dtype=np.uint64)
        namespace.commit(writing.slots, sums, store.ticks(count), 0.0, writing.before, True, True)
        store.chains.join(namespace, writing.keys, writing.slots, writing.before, writing.part, self.now)
        namespace.contains(writing.keys, self.now, True, store.ticks(count))

    def give_up(self, writing: Writing) -> None:
        self.store.chains.abandon(self.namespace, writing.keys, writing.slots, writing.before)
        self.namespace.abort(writing.slots, writing.keys)

    def set(self, keys: Sequence[bytes], parent: bytes = b"", end: bytes = b"") -> None:
        self.end(self.begin(keys, parent, end))

    def present(self, keys: Sequence[bytes]) -> list[int]:
        """Return the numbers of the keys whose blocks can be read."""
        return [number for number, key in enumerate(keys) if self.index.state_of(key) == BlockIndex.READY]

    def followed(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return for each key the key of the block that its block follows, or b"" if there is none."""
        slots = self.index.acquire(b"".join(keys), self.now, 0, False)
        self.index.release(slots)
        before = self.index.before_of(slots)
        return [self.index.keys_of(before[at : at + 1]) if before[at] >= 0 else b"" for at in range(len(keys))]

    def evict_one(self) -> bytes:
        evicted = bytearray()
        assert self.index.evict(1, self.now, evicted) == 1
        return bytes(evicted)

    def evict_all(self, keys: Sequence[bytes]) -> list[int]:
        """Evict all blocks one by one. Return the numbers of the keys in the order in which their blocks went."""
        return [keys.index(self.evict_one()) for _ in range(self.index.ready)]


@pytest.fixture
def shard(request: pytest.FixtureRequest) -> Iterator[Shard]:
    policy = request.node.callspec.params["policy"] if hasattr(request.node, "callspec") else "lru"
    shard = Shard(policy)
    yield shard
    shard.store.arena.close()


def assert_one_chain(shard: Shard, keys: Sequence[bytes]) -> None:
    """Check that the present blocks are one list in the order of their keys, and are evicted from its tail."""
    present = shard.present(keys)
    there = [keys[number] for number in present]
    assert shard.followed(there) == [b"", *there][: len(there)]
    assert shard.evict_all(keys) == present[::-1]


@every_policy
def test_a_block_is_linked_to_its_parent_that_is_being_written(shard: Shard, policy: str) -> None:
    keys = make_keys(40)
    shard.set(keys[:10])
    slow = shard.begin(keys[10:20], keys[9])
    shard.set(keys[10:30], keys[9])  # the first ten of them are being written
    shard.set(keys[30:], keys[29])
    shard.end(slow)
    assert_one_chain(shard, keys)


@every_policy
def test_a_part_waits_for_its_parent_although_others_set_the_parent_too(shard: Shard, policy: str) -> None:
    keys = make_keys(30)
    slow = shard.begin(keys[:10])
    shard.set(keys[10:20], keys[9])
    shard.set(keys[:10])  # stores nothing, because all of its blocks are being written
    shard.set(keys[20:], keys[19])
    shard.end(slow)
    assert_one_chain(shard, keys)


@every_policy
def test_a_part_is_linked_to_a_call_that_ended_while_it_was_arriving(shard: Shard, policy: str) -> None:
    """The last key of each call belongs to another shard."""
    keys = make_keys(30)
    first = shard.begin(keys[:9], end=keys[9])
    second = shard.begin(keys[10:19], keys[9], end=keys[19])
    shard.end(first)
    shard.end(second)
    shard.set(keys[20:], keys[19])
    assert_one_chain(shard, [*keys[:9], *keys[10:19], *keys[20:]])


@every_policy
def test_if_a_write_is_given_up_its_followers_are_linked_to_what_is_there(shard: Shard, policy: str) -> None:
    keys = make_keys(30)
    shard.set(keys[:10])
    slow = shard.begin(keys[10:20], keys[9])
    shard.set(keys[20:], keys[19])
    shard.give_up(slow)
    assert_one_chain(shard, keys)


@every_policy
@pytest.mark.parametrize("parts", [1, 2])
def test_when_the_missing_blocks_are_set_after_all_the_chain_is_whole(shard: Shard, policy: str, parts: int) -> None:
    keys, branches = make_keys(20), [make_keys(5, first=100 * number) for number in range(1, 4)]
    shard.set(keys[:10])
    slow = shard.begin(keys[10:], keys[9])
    for branch in branches:
        shard.set(branch, keys[19])
    shard.give_up(slow)
    assert [shard.followed(branch)[0] for branch in branches] == [keys[9]] * 3
    for start in range(10, 20, 10 // parts):
        shard.set(keys[start : start + 10 // parts], keys[start - 1])
    assert [shard.followed(branch)[0] for branch in branches] == [keys[19]] * 3
    every = [*keys, *branches[0], *branches[1], *branches[2]]
    assert shard.evict_all(every)[-20:] == list(range(19, -1, -1)), "all branches go before what they share"


@every_policy
def test_a_replaced_block_keeps_its_place(shard: Shard, policy: str) -> None:
    keys, branch = make_keys(20), make_keys(5, first=100)
    shard.set(keys)
    shard.set(branch, keys[9])
    replacing = shard.begin(keys[5:10], keys[4], force=True)
    assert shard.followed(keys[10:11]) == [keys[9]]
    shard.end(replacing)
    assert shard.followed(branch)[0] == keys[9]
    gone = shard.evict_all([*keys, *branch])
    assert gone[-10:] == list(range(9, -1, -1)) and [number for number in gone if number < 20] == [*range(19, -1, -1)]


@every_policy
def test_a_block_that_goes_while_it_is_being_replaced_leaves_its_place_to_the_new_one(
    shard: Shard, policy: str
) -> None:
    keys = make_keys(20)
    shard.set(keys)
    replacing = shard.begin(keys[5:10], keys[4], force=True)
    assert shard.index.delete(b"".join(keys[5:10])) == 5
    assert shard.followed(keys[10:11]) == [keys[9]]
    shard.end(replacing)
    assert_one_chain(shard, keys)


@every_policy
@pytest.mark.parametrize("arrives", [True, False])
def test_blocks_may_be_evicted_while_blocks_before_them_are_being_written(
    shard: Shard, policy: str, arrives: bool
) -> None:
    """A block that is being written is never evicted. Blocks before it go only if no other block can."""
    keys, other = make_keys(20), make_keys(5, first=100)
    shard.set(other)
    shard.set(keys[:5])
    slow = shard.begin(keys[5:10], keys[4])
    shard.set(keys[5:], keys[4])
    assert {shard.evict_one() for _ in range(15)} == {*keys[10:], *other}
    assert [shard.evict_one() for _ in range(2)] == [keys[4], keys[3]]
    if arrives:
        shard.end(slow)
        assert shard.present(keys) == [*range(3), *range(5, 10)]
        shard.set(keys[3:6], keys[2])
    else:
        shard.give_up(slow)
    assert_one_chain(shard, keys)


class Writers(RuleBasedStateMachine):
    """Clients write two chains with a common beginning, in parts of their own, in any order of their steps. When all
    are done, each block follows the one before it, and eviction removes only tails."""

    @initialize(policy=st.sampled_from(BlockIndex.POLICIES), stride=st.integers(1, 2), gaps=st.booleans())
    def begin_all(self, policy: str, stride: int, gaps: bool) -> None:
        """stride: 2 if only every second key belongs to this shard. gaps: whether writes are given up and blocks are
        removed meanwhile. Then the chains are whole after each client has set its blocks once more."""
        keys = make_keys(36)
        self.shard = Shard(policy)
        self.chains = [keys[:24], [*keys[:12], *keys[24:]]]
        self.stride, self.gaps = stride, gaps
        self.places = [0] * 4  # of each client: the number of keys of its chain that it has set
        self.writing: dict[int, tuple[Writing, int]] = {}  # client -> what it is writing, and where it then will be

    def mine(self, chain: Sequence[bytes], begin: int, end: int) -> Sequence[bytes]:
        """Return the keys of a part of a chain that belong to this shard."""
        return chain[begin + begin % self.stride : end : self.stride]

    def begin_part(self, client: int, count: int, force: bool) -> None:
        chain, at = self.chains[client % 2], self.places[client]
        end = min(at + count, len(chain))
        part = self.mine(chain, at, end)
        if part:
            parent = chain[at - 1] if at else b""
            self.writing[client] = self.shard.begin(part, parent, chain[end - 1], force), end
        else:
            self.places[client] = end

    def end_part(self, client: int) -> None:
        writing, self.places[client] = self.writing.pop(client)
        self.shard.end(writing)

    @rule(client=st.integers(0, 3), count=st.integers(2, 10), force=st.sampled_from([False, False, False, True]))
    def begin(self, client: int, count: int, force: bool) -> None:
        if client not in self.writing and self.places[client] < 24:
            self.begin_part(client, count, force)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_part(data.draw(st.sampled_from(sorted(self.writing))))

    @precondition(lambda self: self.gaps and self.writing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The client will try again."""
        writing, _ = self.writing.pop(data.draw(st.sampled_from(sorted(self.writing))))
        self.shard.give_up(writing)

    @precondition(lambda self: self.gaps)
    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        self.shard.index.evict(count, self.shard.now)

    @precondition(lambda self: self.gaps)
    @rule(number=st.integers(0, 23), client=st.integers(0, 1))
    def delete(self, number: int, client: int) -> None:
        self.shard.index.delete(self.chains[client][number])

    @invariant()
    def links_agree(self) -> None:
        """Each link is known to the block that follows and to the one that is followed."""
        index = self.shard.index
        written = [writing.slots for writing, _ in self.writing.values()]
        slots = np.unique(np.concatenate([index.ready_slots(0, True), *written]))
        pairs = [split(keys, 16) for keys in index.links_of(slots[slots >= 0])]
        assert set(Counter(zip(*pairs, strict=True)).values()) <= {2}

    def finish(self, clients: range) -> None:
        for client in clients:
            while self.places[client] < 24:
                if client not in self.writing:
                    self.begin_part(client, 7, False)
                if client in self.writing:
                    self.end_part(client)

    def teardown(self) -> None:
        if hasattr(self, "shard"):
            try:
                self.check()
            finally:
                self.shard.store.arena.close()

    def check(self) -> None:
        self.finish(range(4))
        if self.gaps:
            self.places = [0] * 4
            self.finish(range(4))
        for chain in self.chains:
            mine = self.mine(chain, 0, 24)
            assert self.shard.present(mine) == list(range(len(mine)))
            assert self.shard.followed(mine) == [b"", *mine][: len(mine)]
        while self.shard.index.ready:
            key = self.shard.evict_one()
            for chain in self.chains:
                if key in chain:
                    assert not self.shard.present(chain[chain.index(key) :]), "a block went before one that follows it"
        assert not self.shard.index.writing


TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=examples(1), stateful_step_count=50)
