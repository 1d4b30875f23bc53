"""Rendezvous hashing: fair shares, weights, and how little moves."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from kvstore.cluster.placement import Placement

KEYS = np.random.Generator(np.random.SFC64(1)).integers(0, 256, (50_000, 16), dtype=np.uint8)


def names(count: int) -> list[str]:
    return [f"host-{number // 4}:7070/{number % 4}" for number in range(count)]


def equal(count: int) -> Placement:
    return Placement(names(count), [1.0] * count)


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_equal_shards_get_equal_shares(count: int) -> None:
    shares = np.bincount(equal(count).owners(KEYS), minlength=count) / len(KEYS)
    assert np.abs(shares - 1 / count).max() < 0.02


def test_a_share_follows_the_weight() -> None:
    weights = [1.0, 2.0, 5.0]
    shares = np.bincount(Placement(names(3), weights).owners(KEYS), minlength=3) / len(KEYS)
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 0.01


def test_the_unit_of_weights_does_not_matter() -> None:
    weights = np.array([1.0, 2.0, 5.0])
    assert (Placement(names(3), weights).owners(KEYS) == Placement(names(3), weights * 2.0**40).owners(KEYS)).all()


def test_a_shard_that_joins_takes_its_share_and_moves_nothing_else() -> None:
    before, after = equal(4).owners(KEYS), equal(5).owners(KEYS)
    moved = before != after
    assert abs(moved.mean() - 1 / 5) < 0.02
    assert (after[moved] == 4).all(), "a key moved between shards that were there before"


def test_a_shard_that_leaves_gives_its_keys_to_all_others() -> None:
    before, after = equal(5).owners(KEYS), equal(4).owners(KEYS)
    kept = before != 4
    assert (after[kept] == before[kept]).all()
    inherited = np.bincount(after[~kept], minlength=4) / (~kept).sum()
    assert np.abs(inherited - 1 / 4).max() < 0.03


def test_a_growing_weight_only_attracts() -> None:
    before = Placement(names(3), [1.0, 1.0, 1.0]).owners(KEYS)
    after = Placement(names(3), [1.0, 1.0, 2.0]).owners(KEYS)
    assert (after[before != after] == 2).all()


@settings(deadline=None)
@given(st.permutations(range(6)))
def test_the_order_of_shards_does_not_matter(order: list[int]) -> None:
    weights = [1.0, 2.0, 3.0, 1.5, 1.0, 4.0]
    known = np.array(names(6))
    shuffled = Placement([names(6)[number] for number in order], [weights[number] for number in order])
    keys = KEYS[:500]
    assert (known[order][shuffled.owners(keys)] == known[Placement(names(6), weights).owners(keys)]).all()


def test_a_key_goes_where_its_first_eight_bytes_say() -> None:
    """The rule of docs/protocol.md, one key at a time in whole numbers, by another path than NumPy's."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    def score(key: bytes, name: str, weight: float) -> float:
        word = int.from_bytes(key[:8], "little")
        drawn = mix(mix(word) ^ xxhash.xxh3_64_intdigest(name.encode()))
        return weight / -math.log(((drawn >> 11) + 0.5) * 2.0**-53)

    shards, weights = names(5), [1.0, 2.0, 3.0, 4.0, 5.0]
    placement = Placement(shards, weights)
    for key_bytes in (8, 16, 13):
        keys = np.ascontiguousarray(KEYS[:300, :key_bytes])
        expected = [
            max(range(5), key=lambda number, key=key: score(key.tobytes(), shards[number], weights[number]))
            for key in keys
        ]
        assert placement.owners(keys).tolist() == expected


def test_one_shard_owns_everything() -> None:
    assert not equal(1).owners(KEYS).any()
    assert len(equal(3).owners(KEYS[:0])) == 0


@pytest.mark.parametrize(
    ("shards", "weights", "part"),
    [(["a"], [], "1 names and 0 weights"), ([], [], "at least 1"), (["a", "b"], [1.0, 0.0], "more than 0")],
)
def test_a_shard_without_a_weight_is_refused(shards: list[str], weights: list[float], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Placement(shards, weights)
