"""The index of the CPU tier: which slot has which block, and which blocks may be evicted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore._index import BlockIndex
from kvstore_client.engine.paged.host_tier import HostTier
from tests.support.harness import environment, make_keys


def put(tier: HostTier, keys: Sequence[bytes]) -> list[int]:
    """Put blocks into the tier. Return their slots."""
    slots = tier.reserve(keys)
    tier.commit(slots[slots >= 0])
    return [int(slot) for slot in slots]


def present(tier: HostTier, keys: Sequence[bytes]) -> list[bool]:
    return [slot >= 0 for slot in tier.find(keys).tolist()]


def test_the_package_and_its_index_need_no_engine() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import kvstore_client.engine.paged.host_tier, kvstore_client.engine.guard, kvstore_client.engine.lookup, "
        "kvstore_client.engine.transfer_out"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=60)


def test_a_new_tier_answers_every_call() -> None:
    tier = HostTier(4, keep=True)
    keys = make_keys(3)
    assert tier.find(keys).tolist() == [-1, -1, -1] and tier.acquire(keys).tolist() == [-1, -1, -1]
    assert tier.find([]).tolist() == [] and tier.reserve([]).tolist() == []
    tier.touch(keys)
    tier.release([])
    tier.commit([])
    tier.abort(np.empty(0, dtype=np.int32))
    tier.clear()
    assert tier.blocks == 0 and tier.busy == 0


def test_keys_may_be_the_rows_of_an_array() -> None:
    tier, keys = HostTier(4, keep=True), make_keys(3)
    array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(3, 16)
    assert tier.find(array).tolist() == [-1, -1, -1] and tier.reserve(array[:0]).tolist() == []
    slots = tier.reserve(array)
    tier.commit(slots)
    tier.touch(array)
    assert tier.find(array).tolist() == tier.find(keys).tolist() == slots.tolist()
    assert tier.acquire(array[::2]).tolist() == slots[::2].tolist()


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        (np.zeros(16, np.uint8), r"shape \(16,\) and type uint8"),
        (np.zeros((2, 16), np.int64), "type int64"),
        ([np.zeros(16, np.uint8)], "list whose first item is of type ndarray"),
        (["key"], "list whose first item is of type str"),
        (b"key", "bytes whose first item is of type int"),
    ],
)
def test_keys_of_a_wrong_type_are_named(keys: Any, given: str) -> None:
    tier = HostTier(4, keep=True)
    for call in (tier.find, tier.acquire, tier.touch, tier.reserve):
        with pytest.raises(TypeError, match=given):
            call(keys)


def test_a_block_can_be_read_only_once_it_is_written() -> None:
    tier = HostTier(4, keep=True)
    [key] = make_keys(1)
    slots = tier.reserve([key])
    assert present(tier, [key]) == [False] and (tier.blocks, tier.busy) == (0, 1)
    tier.commit(slots)
    assert tier.find([key]).tolist() == slots.tolist() and (tier.blocks, tier.busy) == (1, 0)


def test_each_slot_is_handed_out_once() -> None:
    tier = HostTier(8, keep=True)
    slots = [*tier.reserve(make_keys(5)).tolist(), *tier.reserve(make_keys(3, first=5)).tolist()]
    assert sorted(slots) == list(range(8))


def test_a_present_or_incoming_block_gets_no_second_slot() -> None:
    tier = HostTier(4, keep=True)
    first, second, third = make_keys(3)
    put(tier, [first])
    tier.reserve([second])
    slots = tier.reserve([first, second, third, third]).tolist()
    assert [slot >= 0 for slot in slots] == [False, False, True, False]
    assert all(HostTier.is_known(slots[index]) for index in (0, 1, 3))


def test_a_block_refused_for_lack_of_room_is_not_known() -> None:
    tier = HostTier(2, keep=True)
    tier.reserve(make_keys(2))
    [slot] = tier.reserve(make_keys(1, first=2)).tolist()
    assert slot < 0 and not HostTier.is_known(slot)


def test_the_least_recently_used_chain_is_evicted_tail_first() -> None:
    tier = HostTier(6, keep=True, policy="lru")
    old, new = make_keys(3), make_keys(3, first=3)
    put(tier, old)
    put(tier, new)
    put(tier, make_keys(2, first=6))
    assert present(tier, old) == [True, False, False] and present(tier, new) == [True, True, True]


def test_a_used_chain_outlives_an_unused_one() -> None:
    tier = HostTier(6, keep=True, policy="lru")
    old, new = make_keys(3), make_keys(3, first=3)
    put(tier, old)
    put(tier, new)
    tier.touch(old)
    put(tier, make_keys(3, first=6))
    assert present(tier, old) == [True, True, True] and present(tier, new) == [False, False, False]


def test_a_lookup_does_not_count_as_use() -> None:
    tier = HostTier(2, keep=True, policy="lru")
    old, new = make_keys(2)
    put(tier, [old])
    put(tier, [new])
    assert present(tier, [old]) == [True]
    put(tier, make_keys(1, first=2))
    assert present(tier, [old, new]) == [False, True]


def test_touching_a_chain_ends_at_its_first_gap() -> None:
    tier = HostTier(3, keep=True, policy="lru")
    head, gap, tail = make_keys(3)
    other = make_keys(1, first=3)
    put(tier, [tail])
    put(tier, other)
    put(tier, [head])
    tier.touch([head, gap, tail])
    put(tier, make_keys(1, first=4))
    assert present(tier, [head, tail, *other]) == [True, False, True]


def test_a_slot_being_read_is_never_reused() -> None:
    tier = HostTier(2, keep=True, policy="lru")
    keys = make_keys(2)
    put(tier, keys)
    held = tier.acquire(keys[:1])
    assert [slot >= 0 for slot in put(tier, make_keys(2, first=2))] == [True, False]
    assert present(tier, keys) == [True, False]
    tier.release(held)
    put(tier, make_keys(1, first=4))
    assert present(tier, keys) == [False, False]


def test_a_dropped_blocks_slot_is_free_after_its_last_reader() -> None:
    tier = HostTier(1, keep=False)
    [key] = make_keys(1)
    slots = put(tier, [key])
    tier.hold(slots)
    tier.hold(slots)
    tier.drop(slots)
    assert present(tier, [key]) == [False] and tier.busy == 1
    tier.release(slots)
    assert tier.busy == 1 and tier.reserve(make_keys(1, first=1)).tolist()[0] < 0
    tier.release(slots)
    assert tier.busy == 0 and tier.reserve(make_keys(1, first=1)).tolist() == slots


def test_a_key_can_be_rewritten_while_its_dropped_slot_is_read() -> None:
    tier = HostTier(2, keep=False)
    [key] = make_keys(1)
    old = put(tier, [key])
    tier.hold(old)
    tier.drop(old)
    new = put(tier, [key])
    assert new != old and tier.find([key]).tolist() == new
    tier.release(old)
    assert tier.find([key]).tolist() == new


def test_slots_of_abandoned_writes_are_free_again() -> None:
    tier = HostTier(2, keep=True)
    keys = make_keys(3)
    slots = tier.reserve(keys)
    tier.abort(slots)  # one of them was refused
    assert tier.busy == 0 and present(tier, keys) == [False, False, False]
    assert (tier.reserve(keys[1:]) >= 0).all()


def test_clearing_forgets_readable_blocks_and_spares_those_in_use() -> None:
    tier = HostTier(3, keep=True)
    keys = make_keys(3)
    put(tier, keys[:2])
    held = tier.acquire(keys[:1])
    writing = tier.reserve(keys[2:])
    tier.clear()
    assert present(tier, keys) == [False, False, False] and (tier.blocks, tier.busy) == (0, 2)
    tier.release(held)
    tier.commit(writing)
    assert present(tier, keys) == [False, False, True] and tier.busy == 0


def test_releasing_more_than_was_taken_is_an_error() -> None:
    tier = HostTier(2, keep=True)
    slots = put(tier, make_keys(1))
    with pytest.raises(ValueError, match="reader"):
        tier.release(slots)


@pytest.mark.parametrize("policy", BlockIndex.POLICIES)
def test_every_eviction_policy_works_here_too(policy: str) -> None:
    tier = HostTier(100, keep=True, policy=policy)
    hot = make_keys(10)
    put(tier, hot)
    for first in range(1000, 2000, 10):  # a scan of ten times the tier's size, while some blocks are used all the time
        tier.touch(hot)
        put(tier, make_keys(10, first=first))
    assert all(present(tier, hot)) and tier.blocks == 100


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="lfu"):
        HostTier(4, keep=True, policy="lfu").reserve(make_keys(1))


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_a_chain_saved_in_parts_keeps_its_head(policy: str) -> None:
    tier = HostTier(64, keep=True, policy=policy)
    chain, other = make_keys(48), make_keys(40, first=1000)
    for keys in (chain, other):
        for start in range(0, len(keys), 8):
            part = keys[start : start + 8]
            tier.commit(tier.reserve(part))
            tier.link(part, [keys[start - 1] if start else None, *part[:-1]])
    left = tier.find(chain) >= 0
    assert left.sum() == 64 - 40 and left[:24].all()
