"""The arena and the store: segments change owners, the least recently used blocks are evicted, and the index counts as
memory."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore import huge_pages, wire
from kvstore._index import BlockIndex, lift_ticks
from kvstore.disk.segments import SegmentFiles
from kvstore.huge_pages import HUGE_PAGE_BYTES
from kvstore.store import listing as listing_module
from kvstore.store import namespaces as store_module
from kvstore.store.arena import Arena
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.listing import Listing
from kvstore.store.namespace import NamespaceStore, find_parent
from kvstore.store.namespaces import EMPTY_S, MAX_NAMESPACES, ShardStore
from kvstore.store.rules import NamespaceRule
from kvstore.wire import ErrorCode, WireError
from kvstore_client import Namespace
from tests.support.harness import make_keys, wait_until

SEGMENT = 1 << 20
BLOCK = 1 << 18  # four a segment


def canonical(model: str, block_bytes: int = BLOCK) -> bytes:
    return Namespace(model=model, dtype="uint8", block_tokens=16, block_bytes=block_bytes).canonical()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * SEGMENT, SEGMENT)
    yield arena
    arena.close()


@pytest.fixture
def store() -> Iterator[ShardStore]:
    store = ShardStore(4 * SEGMENT, SEGMENT)
    yield store
    store.arena.close()


def put(
    store: ShardStore, namespace: NamespaceStore, keys: Sequence[bytes], now: float = 0.0, priority: int = 0
) -> np.ndarray:
    """Do what a SET does to a store. Return the slots."""
    joined = b"".join(keys)
    store.memory.make_room(namespace.memory, namespace.memory.index.missing(joined), now)
    slots = namespace.memory.index.reserve(joined, False, store.ticks(len(keys)), priority)
    namespace.memory.index.commit(slots, np.zeros(len(keys), dtype=np.uint64), store.ticks(len(keys)))
    return slots


def present(namespace: NamespaceStore, keys: Sequence[bytes]) -> list[bool]:
    return [bool(flag) for flag in namespace.memory.index.contains(b"".join(keys), 0.0, False, 0)]


def hottest(namespace: NamespaceStore, skip: int = 0, limit: int = 100) -> tuple[list[bytes], int]:
    listing = Listing(namespace, 0.0)
    assert all(listing.steps()) and listing.complete
    keys, _ = listing.keys(skip, limit)
    return [keys[at : at + 16] for at in range(0, len(keys), 16)], listing.total


def hottest_in_the_background(namespace: NamespaceStore) -> list[bytes]:
    listing = Listing(namespace, 0.0)
    for _ in listing.steps():
        pass
    keys, _ = listing.keys(0, 100)
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


# ---- arena ---------------------------------------------------------------------------------------------------------


def test_an_arena_hands_out_each_segment_once(arena: Arena) -> None:
    segments = [arena.take() for _ in range(5)]
    assert segments == [0, 1, 2, 3, None]
    assert arena.free == 0
    arena.give_back(2)
    assert arena.free == 1 and arena.take() == 2


def test_segments_do_not_overlap(arena: Arena) -> None:
    for segment in range(4):
        arena.view(segment)[:] = bytes([segment + 1]) * SEGMENT
    for segment in range(4):
        assert bytes(arena.view(segment)) == bytes([segment + 1]) * SEGMENT


def test_the_remainder_of_the_limit_is_not_used() -> None:
    arena = Arena(3 * SEGMENT + SEGMENT // 2, SEGMENT)
    assert arena.segments == 3 and len(arena.memory) == 3 * SEGMENT
    arena.close()


def test_pre_faulting_keeps_the_bytes_of_a_block(arena: Arena) -> None:
    """A segment that is taken before the pre-faulting thread reaches it keeps its bytes."""
    for segment in range(4):
        assert arena.take() == segment
        arena.view(segment)[:] = bytes([segment + 1]) * SEGMENT
    arena.close()
    assert all(bytes(arena.view(segment)) == bytes([segment + 1]) * SEGMENT for segment in range(4))


def test_a_limit_below_one_segment_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{SEGMENT - 1} bytes have no room for a segment of {SEGMENT}"):
        Arena(SEGMENT - 1, SEGMENT)


# ---- an arena whose segments clients may be given --------------------------------------------------------------------


@pytest.fixture
def shared_arena() -> Iterator[Arena]:
    arena = Arena(4 * SEGMENT, SEGMENT, shared=True)
    arena.lending = True
    yield arena
    arena.close()


def test_a_segment_lent_to_clients_is_read_only_for_them(shared_arena: Arena) -> None:
    segment = shared_arena.take()
    assert segment is not None
    shared_arena.view(segment)[:5] = b"bytes"
    number = shared_arena.export(segment)
    assert number and shared_arena.export(segment) == number
    file = shared_arena.open_to_read(segment)
    with mmap.mmap(file, SEGMENT, prot=mmap.PROT_READ) as seen:
        shared_arena.view(segment)[5:9] = b" too"  # this process writes on
        assert seen[:9] == b"bytes too"
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: mmap.mmap(file, SEGMENT), lambda: os.ftruncate(file, 0)):
        with pytest.raises(OSError):
            change()
    os.close(file)


def test_a_lent_segment_gets_a_new_file_when_returned(shared_arena: Arena) -> None:
    segment = shared_arena.take()
    assert segment is not None
    shared_arena.view(segment)[:] = b"\xa5" * SEGMENT
    number = shared_arena.export(segment)
    file = shared_arena.open_to_read(segment)
    shared_arena.give_back(segment)
    assert os.fstat(file).st_size == 0 and shared_arena.retired == [number]
    assert shared_arena.take() == segment and not any(shared_arena.view(segment))
    assert shared_arena.export(segment) not in (0, number)
    os.close(file)


def test_a_segment_with_another_namespaces_bytes_is_not_lent(shared_arena: Arena) -> None:
    shared_arena.lending = False
    segment = shared_arena.take()
    assert segment is not None
    shared_arena.view(segment)[:] = b"\xa5" * SEGMENT
    shared_arena.give_back(segment)
    assert shared_arena.take() == segment and shared_arena.view(segment)[0] == 0xA5  # it was withheld for a reason
    shared_arena.lending = True
    assert shared_arena.export(segment) == 0
    shared_arena.give_back(segment)
    assert shared_arena.take() == segment and not any(shared_arena.view(segment)) and shared_arena.export(segment)


def test_segments_without_a_descriptor_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.arena._OTHER_FILES", resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 2)
    arena = Arena(4 * SEGMENT, SEGMENT, shared=True)
    arena.lending = True
    segments = [arena.take() for _ in range(4)]
    assert [bool(arena.export(segment)) for segment in segments if segment is not None] == [True, True, False, False]
    for segment in range(4):
        arena.view(segment)[:] = bytes([segment + 1]) * SEGMENT
    assert all(bytes(arena.view(segment)) == bytes([segment + 1]) * SEGMENT for segment in range(4))
    arena.close()


# ---- namespaces ----------------------------------------------------------------------------------------------------


def test_a_namespace_grows_by_segments(store: ShardStore) -> None:
    namespace = store.open(canonical("a"), 16)
    for count, segments in ((1, 1), (3, 1), (1, 2), (8, 4)):
        put(store, namespace, make_keys(count, first=100 * segments + count))
        assert len(namespace.memory.segments) == segments
    assert store.arena.free == 0 and namespace.memory.index.ready == 13


def test_slots_of_one_segment_are_one_view(store: ShardStore) -> None:
    namespace = store.open(canonical("a"), 16)
    slots = put(store, namespace, make_keys(4))
    (view,) = namespace.views(slots)
    assert len(view) == SEGMENT
    first, second = namespace.views(slots[[0, 2]])
    first[:] = b"a" * BLOCK
    second[:] = b"c" * BLOCK
    assert bytes(view) == b"a" * BLOCK + bytes(BLOCK) + b"c" * BLOCK + bytes(BLOCK)


def test_a_full_namespace_evicts_its_own_least_recently_used(store: ShardStore) -> None:
    namespace = store.open(canonical("a"), 16)
    keys = make_keys(20)
    for key in keys:
        put(store, namespace, [key])
    assert present(namespace, keys) == [False] * 4 + [True] * 16
    assert namespace.memory.evicted == 4 and len(namespace.memory.segments) == 4


def test_the_tail_of_a_chain_goes_first(store: ShardStore) -> None:
    namespace = store.open(canonical("a"), 16)
    chain = make_keys(16)
    put(store, namespace, chain)
    put(store, namespace, make_keys(3, first=100))
    assert present(namespace, chain) == [True] * 13 + [False] * 3


def test_a_growing_namespace_takes_the_least_used_segment(store: ShardStore) -> None:
    old, grows = store.open(canonical("old"), 16), store.open(canonical("new"), 16)
    groups = [make_keys(4, first=10 * number) for number in range(4)]
    for keys in groups:
        put(store, old, keys)
    old.memory.index.contains(b"".join(groups[0]), 0.0, True, store.ticks(4))  # its first segment is in use again
    put(store, grows, make_keys(1, first=900))
    assert len(grows.memory.segments) == 1 and len(old.memory.segments) == 3
    assert [all(present(old, keys)) for keys in groups] == [True, False, True, True]
    assert old.memory.evicted == 4 and old.memory.index.ready == 12


def test_priorities_compare_only_the_blocks_of_one_namespace(store: ShardStore) -> None:
    old, grows = store.open(canonical("old"), 16), store.open(canonical("new"), 16)
    important, others, unimportant = (make_keys(4, first=first) for first in (0, 100, 200))
    put(store, old, important, priority=3)
    put(store, old, others)
    for first in (300, 400):
        put(store, old, make_keys(4, first=first))
    put(store, old, make_keys(1, first=500))
    assert all(present(old, important)) and not all(present(old, others))
    put(store, grows, unimportant)
    assert not any(present(old, important)), "recency decides which namespace gives up a segment"


def test_a_growing_namespace_takes_segments_only_from_older_ones(store: ShardStore) -> None:
    first, second = store.open(canonical("first"), 16), store.open(canonical("second"), 16)
    put(store, first, make_keys(8))
    put(store, second, make_keys(8, first=100))
    put(store, second, make_keys(1, first=200))
    assert (len(first.memory.segments), len(second.memory.segments)) == (1, 3)
    second_keys = second.memory.index.ready
    put(store, first, make_keys(4, first=300))  # its own blocks are the oldest of the shard
    assert (len(first.memory.segments), len(second.memory.segments)) == (
        1,
        3,
    ) and second.memory.index.ready == second_keys


def test_an_empty_namespace_gives_its_segments_first(store: ShardStore) -> None:
    empty, full, grows = (store.open(canonical(name), 16) for name in ("empty", "full", "grows"))
    put(store, full, make_keys(8))
    keys = make_keys(8, first=100)
    put(store, empty, keys)
    empty.memory.index.delete(b"".join(keys))
    put(store, grows, make_keys(4, first=200))
    assert len(full.memory.segments) == 2 and len(empty.memory.segments) == 1 and full.memory.index.ready == 8


def test_pinned_blocks_and_blocks_being_read_stay(store: ShardStore) -> None:
    old, grows = store.open(canonical("old"), 16), store.open(canonical("new"), 16)
    groups = [make_keys(4, first=10 * number) for number in range(4)]
    for keys in groups:
        put(store, old, keys)
    old.memory.index.contains(groups[0][0], 0.0, False, 0, 50.0)
    held = old.memory.index.acquire(groups[1][1], 0.0, 0, False)
    put(store, grows, make_keys(1, first=900), now=1.0)
    assert present(old, [groups[0][0], groups[1][1]]) == [True, True]
    assert not any(present(old, groups[2]))
    old.memory.index.release(held)
    put(store, grows, make_keys(12, first=910), now=60.0)  # the pin has expired, the reader is gone
    assert len(old.memory.segments) == 0


def test_nothing_is_evicted_when_everything_is_in_use(store: ShardStore) -> None:
    namespace = store.open(canonical("a"), 16)
    keys = make_keys(16)
    put(store, namespace, keys)
    namespace.memory.index.contains(b"".join(keys), 0.0, False, 0, 50.0)
    slots = put(store, namespace, make_keys(2, first=100), now=1.0)
    assert slots.tolist() == [BlockIndex.NO_SPACE] * 2 and all(present(namespace, keys))


def test_the_indexs_memory_counts(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of small blocks takes much memory, so these blocks do not fill the whole arena."""
    monkeypatch.setattr(store_module, "INDEX_OVERHEAD_BYTES", 0)
    namespace = store.open(canonical("tiny", block_bytes=64), 16)
    put(store, namespace, make_keys(100))
    per_segment = namespace.memory.index.nbytes
    assert per_segment > SEGMENT // 2
    for first in range(0, 60_000, 4096):
        put(store, namespace, make_keys(4096, first=1000 + first))
    used = (store.arena.segments - store.arena.free) * SEGMENT + namespace.memory.index.nbytes
    assert used <= store.limit_bytes + per_segment
    assert store.arena.free > 0 and namespace.memory.evicted > 0


def test_room_is_what_fits_without_eviction(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = store.open(canonical("a"), 16)
    assert store.room_bytes == 4 * SEGMENT
    put(store, namespace, make_keys(6))
    assert store.room_bytes == 2 * SEGMENT
    put(store, namespace, make_keys(8, first=100))
    assert (store.room_bytes, namespace.memory.evicted) == (0, 0)
    store.memory.shrink(0.0)
    assert store.room_bytes == SEGMENT
    monkeypatch.setattr(store_module, "INDEX_OVERHEAD_BYTES", 0)  # from here on the index takes memory of the limit
    assert store.room_bytes == 0


def test_a_namespace_with_one_key_length_refuses_another(store: ShardStore) -> None:
    name = canonical("a")
    namespace = store.open(name, 16)
    put(store, namespace, make_keys(2))
    for ask in (store.find, store.open):
        with pytest.raises(WireError) as caught:
            ask(name, 32)
        assert caught.value.code is ErrorCode.KEY_SIZE
        assert "32 bytes" in str(caught.value) and "16 bytes" in str(caught.value)
    namespace.memory.index.delete(b"".join(make_keys(2)))
    assert store.find(name, 32) is None
    assert store.open(name, 32).key_bytes == 32
    assert len(list(store)) == 1 and store.arena.free == 4


def test_a_block_larger_than_a_segment_is_refused(store: ShardStore) -> None:
    with pytest.raises(WireError) as caught:
        store.check_namespace(canonical("a", SEGMENT + 1))
    assert caught.value.code is ErrorCode.OUT_OF_MEMORY
    assert str(SEGMENT + 1) in str(caught.value) and str(SEGMENT) in str(caught.value)
    assert store.check_namespace(canonical("a", SEGMENT)) == SEGMENT


def test_namespaces_are_bounded_and_empty_ones_are_forgotten(store: ShardStore) -> None:
    kept = store.open(canonical("kept"), 16)
    put(store, kept, make_keys(1))
    for number in range(MAX_NAMESPACES + 5):
        store.open(canonical(f"empty {number}"), 16)
    assert len(list(store)) == MAX_NAMESPACES and store.find(canonical("kept"), 16) is kept


def test_info_reports_a_namespaces_contents(store: ShardStore) -> None:
    namespace = store.open(canonical("a"), 16)
    put(store, namespace, make_keys(5))
    namespace.memory.index.contains(make_keys(1)[0], 0.0, False, 0, 5.0)
    info = namespace.info(1.0)
    assert info.id == wire.namespace_id(canonical("a")).hex() and info.namespace == canonical("a").decode()
    assert (info.blocks, info.writing, info.segments, info.slots) == (5, 0, 2, 8)
    assert (info.memory_bytes, info.pinned, info.block_bytes) == (2 * SEGMENT, 1, BLOCK)


# ---- namespaces that are empty -------------------------------------------------------------------------------------


def test_a_namespace_that_stays_empty_is_forgotten_and_frees_its_segments(store: ShardStore) -> None:
    namespace, keys = store.open(canonical("a"), 16), make_keys(5)
    put(store, namespace, keys)
    namespace.created, namespace.hits, namespace.misses = 5, 3, 2
    store.expire(0.0)
    store.expire(2 * EMPTY_S)
    assert store.get(canonical("a")) is namespace, "it holds blocks"
    namespace.delete(b"".join(keys), 0.0)
    store.expire(3 * EMPTY_S)
    store.expire(3 * EMPTY_S + EMPTY_S / 2)
    assert store.get(canonical("a")) is namespace, "it was empty for a moment only"
    store.expire(4 * EMPTY_S)
    assert store.get(canonical("a")) is None and not list(store)
    assert store.arena.free == store.arena.segments
    assert (store.created, store.hits, store.misses) == (5, 3, 2), "the shard's counters keep what it counted"


def test_a_namespace_used_again_restarts_its_wait(store: ShardStore) -> None:
    namespace, keys = store.open(canonical("a"), 16), make_keys(1)
    store.expire(0.0)
    put(store, namespace, keys)
    store.expire(EMPTY_S)
    namespace.delete(keys[0], 0.0)
    store.expire(EMPTY_S + 1)
    assert store.get(canonical("a")) is namespace
    waits: list[str] = []

    def wake() -> None:
        waits.append("woken")

    namespace.waiters.add(keys[0], wake)
    store.expire(3 * EMPTY_S)
    assert store.get(canonical("a")) is namespace, "somebody waits for a block of it"
    namespace.promises.make(keys, bytes(1), "client", 6 * EMPTY_S, lambda _: None)
    namespace.waiters.discard(keys[0], wake)
    store.expire(5 * EMPTY_S)
    assert store.get(canonical("a")) is namespace, "a block of it was promised"
    store.expire(6 * EMPTY_S)
    assert not namespace.promises
    store.expire(7 * EMPTY_S)
    assert store.get(canonical("a")) is None


def test_expired_or_evicted_blocks_leave_no_namespace_behind() -> None:
    store = ShardStore(4 * SEGMENT, SEGMENT, rules=[NamespaceRule("short", ttl_seconds=1)])
    short, old, grows = (store.open(canonical(name), 16) for name in ("short", "old", "grows"))
    slots = short.memory.index.reserve(make_keys(1)[0], False, store.ticks(1))
    assert slots[0] == BlockIndex.NO_SPACE, "no segment yet"
    store.memory.make_room(short.memory, 1, 0.0)
    slots = short.memory.index.reserve(make_keys(1)[0], False, store.ticks(1))
    short.memory.index.commit(slots, np.zeros(1, dtype=np.uint64), store.ticks(1), 1.0)
    put(store, old, make_keys(4))
    for at in range(4):
        put(store, grows, make_keys(4, first=100 + 4 * at))
    assert old.memory.evicted == 4
    store.expire(2.0)
    store.expire(2.0 + EMPTY_S)
    assert [namespace.canonical for namespace in store] == [grows.canonical]
    assert store.memory.evicted == short.memory.evicted + old.memory.evicted == 5
    store.arena.close()


# ---- recency -------------------------------------------------------------------------------------------------------


def put_on_disk(disk: DiskBlocks, keys: Sequence[bytes], tick: int) -> None:
    """Do to the index of blocks what writing them to disk does."""
    slots = disk.index.reserve(b"".join(keys), False, tick)
    disk.index.commit(slots, np.zeros(len(keys), dtype=np.uint64), tick)


def test_an_empty_namespace_has_no_hottest_blocks(store: ShardStore) -> None:
    namespace = store.open(canonical("m"), 16)
    assert hottest(namespace) == ([], 0) == hottest(namespace, 3)


def test_the_hottest_blocks_come_in_order_of_use(store: ShardStore) -> None:
    namespace, keys = store.open(canonical("m"), 16), make_keys(9)
    put(store, namespace, keys[:5])
    put(store, namespace, keys[5:])
    order = keys[5:] + keys[:5]
    assert hottest(namespace) == (order, 9)
    for skip in range(10):
        for limit in range(10):
            assert hottest(namespace, skip, limit) == (order[skip : skip + limit], 9)


def test_a_block_counts_as_used_when_its_followers_were(store: ShardStore) -> None:
    namespace, keys = store.open(canonical("m"), 16), make_keys(9)
    index = namespace.memory.index
    put(store, namespace, keys[:5])
    index.link(b"".join(keys[:3]))
    index.link(keys[4], keys[1])
    put(store, namespace, keys[5:])
    index.contains(keys[2], 0.0, True, store.ticks(1))
    assert hottest(namespace) == ([*keys[:3], *keys[5:], *keys[3:5]], 9)
    index.contains(keys[4], 0.0, True, store.ticks(1))
    assert hottest(namespace)[0][:4] == [keys[0], keys[1], keys[4], keys[2]]
    listing = Listing(namespace, 0.0)
    assert all(listing.steps())
    assert listing.keys(0, 4) == (
        b"".join([keys[0], keys[1], keys[4], keys[2]]),
        b"".join([keys[0], keys[0], *keys[1:2] * 2]),
    )


def test_ticks_are_raised_above_those_of_all_followers() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 50, 400):
        slots = np.sort(rng.choice(10 * count, count, replace=False)).astype(np.int32)
        parents = np.array([rng.integers(-1, row) if row else -1 for row in range(count)])
        rows = rng.permutation(count)  # the position in the list of each block of the tree
        before = np.full(count, -1, dtype=np.int32)
        before[rows] = np.where(parents < 0, rng.choice([-1, 10 * count + 5]), slots[rows[parents]])
        ticks = rng.integers(0, 100, count).astype(np.uint64) << np.uint64(16)
        lifted = ticks.copy()
        lift_ticks(slots, before.copy(), lifted)
        expected = ticks.tolist()
        for child in range(count - 1, 0, -1):  # a parent's number is lower than its children's
            if parents[child] >= 0:
                above, below = rows[parents[child]], rows[child]
                expected[above] = max(expected[above], expected[below] + 1)
        assert lifted.tolist() == expected
    circle = np.array([7, 8], dtype=np.int32)
    lift_ticks(circle, circle[::-1].copy(), np.zeros(2, dtype=np.uint64))  # a circle: the walk must still end
    with pytest.raises(ValueError, match="2 slots with 1 before them and 2 ticks"):
        lift_ticks(circle, circle[:1].copy(), np.zeros(2, dtype=np.uint64))


def test_a_block_being_written_is_not_among_the_hottest(store: ShardStore) -> None:
    namespace, keys = store.open(canonical("m"), 16), make_keys(3)
    put(store, namespace, keys[:2])
    namespace.memory.index.reserve(keys[2], False, store.ticks(1))
    assert hottest(namespace) == (keys[:2], 2)


def test_a_paged_list_omits_blocks_gone_since(store: ShardStore) -> None:
    namespace, keys = store.open(canonical("m"), 16), make_keys(9)
    put(store, namespace, keys)
    listing = Listing(namespace, 0.0)
    assert all(listing.steps())
    namespace.memory.index.delete(b"".join(keys[3:6]))
    parts = [listing.keys(skip, 2)[0] for skip in (0, 2, 3, 5, 6)]
    assert b"".join(parts) == b"".join(keys[:3] + keys[6:]) and listing.total == 6


def test_a_long_list_is_sorted_without_stopping_the_caller(monkeypatch: pytest.MonkeyPatch, store: ShardStore) -> None:
    monkeypatch.setattr(listing_module, "SORT_AT_ONCE", 3)
    namespace, keys = store.open(canonical("m"), 16), make_keys(9)
    put(store, namespace, keys)
    assert hottest_in_the_background(namespace) == keys


def test_the_list_covers_both_tiers_with_a_blocks_older_use(store: ShardStore, tmp_path: Path) -> None:
    namespace, keys = store.open(canonical("m"), 16), make_keys(9)
    space = SegmentFiles(tmp_path, SEGMENT, 3)
    space.open()
    removed: list[bytes] = []
    namespace.disk = disk = DiskBlocks(
        space,
        namespace.canonical,
        BLOCK,
        BLOCK,
        BlockIndex(16, SEGMENT // BLOCK),
        lambda blocks, keys: removed.append(keys),
    )
    for _ in range(3):
        segment = space.take()
        assert segment is not None
        disk.attach(segment)
    put_on_disk(disk, keys[:2], store.ticks(2))  # on disk only
    put(store, namespace, keys[2:4])
    put(store, namespace, keys[4:6])
    put_on_disk(disk, keys[2:4], store.ticks(2))  # written late
    put_on_disk(disk, keys[6:9], store.ticks(3))  # blocks of an earlier run, on their way to memory
    assert hottest(namespace)[1] == 9
    namespace.memory.index.reserve(keys[6], False, store.ticks(1))
    put(store, namespace, keys[7:8])
    assert hottest(namespace) == ([*keys[6:9], *keys[4:6], *keys[2:4], *keys[:2]], 9)
    assert hottest(namespace, 2, 3) == ([keys[8], *keys[4:6]], 9)
    namespace.memory.index.delete(b"".join(keys))
    disk.delete(b"".join(keys))
    assert removed == [b"".join(keys)], "the persistent index is told"
    assert not namespace.memory.index.gone and not disk.index.gone, "a reader was left behind"


def test_a_keys_parent_is_found_in_the_requested_chain() -> None:
    keys = make_keys(5)
    chain = b"".join(keys)
    assert find_parent(chain, b"".join(keys[2:4]), 16) == (keys[1], False)
    assert find_parent(chain, b"".join(keys[2:]), 16) == (keys[1], True)
    assert find_parent(chain, keys[0], 16) == (b"", False)
    for other_chain, other_keys in (
        (b"", keys[0]),
        (chain, b""),
        (chain[:-1], keys[1]),
        (bytes(24), bytes(8) + keys[0]),
    ):
        assert find_parent(other_chain, other_keys, 16) == (b"", False)
    astride = chain[8:24]  # the end of one key and the beginning of the next
    assert find_parent(chain, astride, 16)[0] == b""


def test_the_arena_never_makes_the_kernel_wait_for_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """MADV_COLLAPSE makes the kernel wait, and nothing can be mapped meanwhile: with it, a shard next to busy engines
    stopped for seconds."""
    advised: list[int] = []

    class Recorder:
        def madvise(self, address: int, nbytes: int, advice: int) -> int:
            advised.append(advice)
            return int(libc.madvise(address, nbytes, advice))

        def __getattr__(self, name: str) -> object:
            return getattr(libc, name)

    libc = huge_pages._libc
    monkeypatch.setattr(huge_pages, "_libc", Recorder())
    arena = Arena(4 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, shared=True)
    wait_until(lambda: all(arena._populated), what="its pages are touched ahead")
    arena.close()
    assert advised and huge_pages._MADV_COLLAPSE not in advised
