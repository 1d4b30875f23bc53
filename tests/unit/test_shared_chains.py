"""The shards of a node agree where a chain ends: two stores tell each other which chains they have cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvstore._index import BlockIndex
from kvstore.store.chains import CUT_S, Cut, SetCall
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore_client import Namespace
from tests.support.harness import make_keys

SEGMENT = 1 << 20
SLOTS = 16
BLOCK = SEGMENT // SLOTS
CANONICAL = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=BLOCK).canonical()

# The first shard has the first block of each pair, and the second shard has the other.
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


class Shard:
    """The store of one shard, and what a SET does to it."""

    def __init__(self, which: slice) -> None:
        self.store = ShardStore(SEGMENT, SEGMENT, shared=True)
        self.which = which
        self.now = 100.0

    @property
    def namespace(self) -> NamespaceStore:
        return self.store.open(CANONICAL, 16)

    def set(self, keys: Sequence[bytes], call: int, parent: bytes = b"") -> int:
        """Set this shard's part of a call. Return the number of refused blocks."""
        store, namespace, chains = self.store, self.namespace, self.store.chains
        offsets = np.arange(len(keys), dtype=np.uint32)[self.which]
        mine = b"".join(keys[self.which])
        before = chains.find(namespace, parent)
        if chains.is_cut(namespace, parent, self.now):
            slots = store.refuse(namespace, mine, self.now)
        else:
            slots = store.reserve(namespace, mine, False, self.now, 0, before or b"")
        written = np.zeros(len(slots), dtype=np.uint64)
        namespace.memory.index.commit(slots, written, store.ticks(len(slots)))
        chains.join(namespace, mine, slots, before or b"", SetCall(keys[-1], call, offsets), self.now)
        while chains.heard:
            chains.cut(namespace, chains.heard.popleft(), self.now)
        return int((slots == BlockIndex.NO_SPACE).sum())

    def told(self) -> list[Cut]:
        """Return the messages for the other shards."""
        cuts = [Cut(namespace, call, offset) for (namespace, call), offset in self.store.chains.cuts.items()]
        self.store.chains.cuts.clear()
        return cuts

    def hear(self, cuts: Sequence[Cut]) -> None:
        for cut in cuts:
            assert self.store.chains.cut(self.namespace, cut, self.now)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether the shard has each of the blocks that it owns."""
        return [self.namespace.memory.index.state_of(key) == BlockIndex.READY for key in keys[self.which]]


@pytest.fixture
def shards() -> Iterator[tuple[Shard, Shard]]:
    both = Shard(EVEN), Shard(ODD)
    yield both
    for shard in both:
        shard.store.arena.close()


def set_on(shards: Sequence[Shard], keys: Sequence[bytes], call: int, parent: bytes = b"") -> None:
    for shard in shards:
        assert shard.set(keys, call, parent) == 0


def test_followers_of_an_evicted_block_go_on_the_other_shard_too(shards: tuple[Shard, Shard]) -> None:
    one, two = shards
    keys, others = make_keys(24), make_keys(20, first=100)
    set_on(shards, keys[:12], 1)
    set_on(shards, keys[12:], 2, keys[11])
    one.set(others, 3)  # 10 blocks for 4 free slots: 6 blocks of call 2 are evicted
    assert one.has(keys) == [True] * 6 + [False] * 6
    assert two.has(keys) == [True] * 12
    two.hear(one.told())
    assert two.has(keys) == [True] * 6 + [False] * 6
    one.set(make_keys(4, first=200), 4)
    (cut,) = one.told()
    assert cut == Cut(one.namespace.id, 1, 8)
    two.hear([cut])
    assert one.has(keys)[:6] == [True] * 4 + [False] * 2 and two.has(keys)[:6] == [True] * 4 + [False] * 2
    assert two.told() == [], "what was cut for another shard is not told on"
    assert two.namespace.memory.evicted == 8


def test_a_cut_removes_following_calls_but_no_other_chain(shards: tuple[Shard, Shard]) -> None:
    _, two = shards
    keys, branch = make_keys(16), make_keys(4, first=100)
    set_on(shards, keys[:8], 1)
    set_on(shards, keys[8:], 2, keys[7])
    set_on(shards, [*keys[:4], *branch], 3)  # shares the first four
    two.hear([Cut(two.namespace.id, 1, 6)])
    assert two.has(keys) == [True] * 3 + [False] * 5
    assert two.has(branch) == [True] * 2
    two.hear([Cut(two.namespace.id, 9, 0), Cut(two.namespace.id, 2, 0)])
    assert two.has(keys) == [True] * 3 + [False] * 5


def test_read_or_pinned_blocks_stay_and_so_do_their_predecessors(shards: tuple[Shard, Shard]) -> None:
    _, two = shards
    keys = make_keys(16)
    set_on(shards, keys, 1)
    index = two.namespace.memory.index
    held = index.acquire(keys[11], two.now, 0, False)
    two.hear([Cut(two.namespace.id, 1, 4)])
    assert two.has(keys) == [True] * 6 + [False] * 2
    index.release(held)
    assert index.contains(keys[7], two.now, False, 0, two.now + 5) == b"\1"
    two.hear([Cut(two.namespace.id, 1, 4)])
    assert two.has(keys) == [True] * 4 + [False] * 4


def test_a_part_that_arrives_after_its_calls_cut_is_dropped(shards: tuple[Shard, Shard]) -> None:
    _, two = shards
    keys = make_keys(8)
    two.hear([Cut(two.namespace.id, 1, 4)])
    two.set(keys, 1)
    assert two.has(keys) == [True, True, False, False]


def test_behind_a_cut_blocks_are_refused_but_a_new_call_is_not(shards: tuple[Shard, Shard]) -> None:
    _, two = shards
    keys = make_keys(16)
    two.set(keys[:8], 1)
    two.hear([Cut(two.namespace.id, 1, 4)])
    assert two.set(keys[8:], 2, keys[7]) == 4
    assert two.told() == [Cut(two.namespace.id, 2, 1)], "the others learn that this call is cut, too"
    two.set(keys[4:8], 3, keys[3])  # the lost blocks are computed again
    assert two.set(keys[8:], 4, keys[7]) == 0
    assert two.has(keys) == [True] * 8
    two.hear([Cut(two.namespace.id, 4, 6)])
    assert two.has(keys) == [True] * 7 + [False]
    more = make_keys(4, first=50)
    assert two.set(more, 5, keys[15]) == 2
    two.now += CUT_S
    assert two.set(more, 6, keys[15]) == 0


@pytest.mark.parametrize("elsewhere", ["nothing", "replicas", "moved"])
def test_blocks_with_possible_copies_elsewhere_are_not_cut(shards: tuple[Shard, Shard], elsewhere: str) -> None:
    one, two = shards
    keys = make_keys(24)
    set_on(shards, keys, 1)
    for shard in shards:
        shard.namespace.replicas += elsewhere == "replicas"
        shard.namespace.listed = elsewhere == "moved"
    one.set(make_keys(20, first=100), 2)
    told = one.told()
    assert bool(told) == (elsewhere == "nothing")
    two.hear([Cut(two.namespace.id, 1, 4)])
    assert sum(two.has(keys)) == (2 if elsewhere == "nothing" else 12)


def test_many_blocks_are_cut_in_steps(monkeypatch: pytest.MonkeyPatch, shards: tuple[Shard, Shard]) -> None:
    monkeypatch.setattr("kvstore.store.chains.CUT_BLOCKS", 3)
    _, two = shards
    keys = make_keys(16)
    set_on(shards, keys[:8], 1)
    set_on(shards, keys[8:], 2, keys[7])
    cut = Cut(two.namespace.id, 1, 2)
    pieces = 1
    while not two.store.chains.cut(two.namespace, cut, two.now):
        pieces += 1
    assert two.has(keys) == [True] + [False] * 7 and pieces == 3


def test_the_lowest_cut_offset_of_a_call_is_reported(shards: tuple[Shard, Shard]) -> None:
    one, _ = shards
    keys = make_keys(6)
    index = one.namespace.memory.index
    set_on(shards, keys, 1)
    cuts: list[tuple[int, int, bytes]] = []
    held = index.acquire(keys[4], one.now, 0, False)
    assert index.evict(1, one.now, cuts=cuts) == 1, "the last block that is not held"
    index.release(held)
    assert index.evict(2, one.now, cuts=cuts) == 2
    assert [(call, offset) for call, offset, _ in cuts] == [(1, 0)]


def test_a_single_shard_remembers_no_calls() -> None:
    store = ShardStore(SEGMENT, SEGMENT)
    assert store.open(CANONICAL, 16).memory.cuts is None and not store.chains.shared
    store.arena.close()
