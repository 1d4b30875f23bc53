"""Rendezvous hashing: fair shares, weights, how few keys move after a change, and the places of replicas."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given

from kvstore._cext import group_by_owner, rendezvous
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


def test_a_joining_shard_takes_its_share_and_moves_nothing_else() -> None:
    before, after = equal(4).owners(KEYS), equal(5).owners(KEYS)
    moved = before != after
    assert abs(moved.mean() - 1 / 5) < 0.02
    assert (after[moved] == 4).all(), "a key moved between shards that were there before"


def test_a_leaving_shards_keys_go_to_all_others() -> None:
    before, after = equal(5).owners(KEYS), equal(4).owners(KEYS)
    kept = before != 4
    assert (after[kept] == before[kept]).all()
    inherited = np.bincount(after[~kept], minlength=4) / (~kept).sum()
    assert np.abs(inherited - 1 / 4).max() < 0.03


def test_a_growing_weight_only_gains_keys() -> None:
    before = Placement(names(3), [1.0, 1.0, 1.0]).owners(KEYS)
    after = Placement(names(3), [1.0, 1.0, 2.0]).owners(KEYS)
    assert (after[before != after] == 2).all()


@given(st.permutations(range(6)))
def test_the_order_of_shards_does_not_matter(order: list[int]) -> None:
    weights = [1.0, 2.0, 3.0, 1.5, 1.0, 4.0]
    known = np.array(names(6))
    shuffled = Placement([names(6)[number] for number in order], [weights[number] for number in order])
    keys = KEYS[:500]
    assert (known[order][shuffled.owners(keys)] == known[Placement(names(6), weights).owners(keys)]).all()


_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def score(key: bytes, name: str, weight: float) -> float:
    """Return a key's score by the rule of docs/protocol.md, computed with whole numbers."""
    drawn = mix(mix(int.from_bytes(key[:8], "little")) ^ xxhash.xxh3_64_intdigest(name.encode()))
    return weight / -math.log(((drawn >> 11) + 0.5) * 2.0**-53)


@dataclass(frozen=True)
class Shard:
    name: str
    weight: float
    node: str
    zone: str


def placed(shards: Sequence[Shard]) -> Placement:
    return Placement(*zip(*((s.name, s.weight, s.node, s.zone) for s in shards), strict=True))


def replicas_by_the_rule(key: bytes, shards: Sequence[Shard], count: int) -> list[str]:
    """Return the names of the replicas by the rule of docs/protocol.md."""
    best_first = sorted(shards, key=lambda s: (-score(key, s.name, s.weight), s.name))
    chosen: list[Shard] = []
    while len(chosen) < count:
        elsewhere = [s for s in best_first if s.node not in {c.node for c in chosen}]
        if not elsewhere:
            break
        apart = [s for s in elsewhere if s.zone not in {c.zone for c in chosen}]
        chosen.append((apart or elsewhere)[0])
    return [s.name for s in chosen]


@pytest.mark.parametrize("key_bytes", [8, 13, 16, 64])
def test_a_keys_first_eight_bytes_decide_its_place(key_bytes: int) -> None:
    shards, weights = names(5), [1.0, 2.0, 3.0, 4.0, 5.0]
    keys = np.ascontiguousarray(np.tile(KEYS[:300], 4)[:, :key_bytes])
    expected = [
        max(range(5), key=lambda number, key=key: score(key.tobytes(), shards[number], weights[number])) for key in keys
    ]
    assert Placement(shards, weights).owners(keys).tolist() == expected


@pytest.mark.parametrize("spread", [0, 3, 30, 300])
def test_no_shard_that_could_win_is_skipped(spread: int) -> None:
    """The owner is compared with the shard of the highest score by the rule. Weights are equal, or up to 600 orders of
    magnitude apart."""
    chance = random.Random(spread)
    for count in (2, 5, 64, 257):
        weights = [10.0 ** chance.uniform(-spread, spread) for _ in range(count)]
        expected = [
            max(range(count), key=lambda number, key=key: score(key.tobytes(), names(count)[number], weights[number]))
            for key in KEYS[: 4000 // count]
        ]
        assert Placement(names(count), weights).owners(KEYS[: 4000 // count]).tolist() == expected


def test_rows_need_not_be_contiguous() -> None:
    assert (equal(7).owners(KEYS[::3, 1:]) == equal(7).owners(np.ascontiguousarray(KEYS[::3, 1:]))).all()
    assert (equal(7).owners(KEYS[:, ::2]) == equal(7).owners(np.ascontiguousarray(KEYS[:, ::2]))).all()


def test_equal_scores_go_to_the_first_name() -> None:
    """With equal seeds all scores are equal, so the ranks decide, which follow the order of names."""
    same, ones = np.full(4, 77, dtype=np.uint64), np.ones(4)
    numbers, zones = np.arange(4), np.zeros(4, dtype=np.int64)
    for best in range(4):
        ranks = (numbers - best) % 4
        assert (rendezvous(KEYS[:100], same, ones, ranks, numbers, zones, 1)[:, 0] == best).all()


def test_a_million_keys_over_64_equal_shards_are_even() -> None:
    keys = np.random.Generator(np.random.SFC64(2)).integers(0, 256, (1_000_000, 8), dtype=np.uint8)
    shares = np.bincount(equal(64).owners(keys), minlength=64)
    assert shares.max() / shares.mean() <= 1.05


def test_weights_of_64_shards_are_met_within_a_twentieth() -> None:
    keys = np.random.Generator(np.random.SFC64(3)).integers(0, 256, (1_000_000, 8), dtype=np.uint8)
    weights = np.array([1.0, 2.0, 3.0, 4.0] * 16)
    shares = np.bincount(Placement(names(64), weights).owners(keys), minlength=64) / len(keys)
    by_weight = shares.reshape(-1, 4).sum(axis=0) / (weights[:4] * 16 / weights.sum())
    assert np.abs(by_weight - 1).max() <= 0.01
    assert np.abs(shares / (weights / weights.sum()) - 1).max() <= 0.05


def test_one_shard_owns_everything() -> None:
    assert not equal(1).owners(KEYS).any()
    assert len(equal(3).owners(KEYS[:0])) == 0


@pytest.mark.parametrize(
    ("shards", "weights", "part"),
    [
        (["a"], [], "1 names and 0 weights"),
        ([], [], "at least 1"),
        (["a", "b"], [1.0, 0.0], "above 0"),
        (["a", "b"], [1.0, math.inf], "finite"),
        (["a", "b"], [1.0, math.nan], "finite"),
    ],
)
def test_a_shard_without_a_weight_is_refused(shards: list[str], weights: list[float], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Placement(shards, weights)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 names and 1 nodes"):
        Placement(["a", "b"], [1.0, 1.0], ["a"])
    with pytest.raises(ValueError, match="2 names and 3 zones"):
        Placement(["a", "b"], [1.0, 1.0], zones=["a", "b", "c"])
    with pytest.raises(ValueError, match="0 replicas"):
        equal(2).replicas(KEYS, 0)
    with pytest.raises(ValueError, match="key_bytes >= 8"):
        equal(2).owners(KEYS[:, :7])
    numbers, ones = np.arange(2), np.ones(2)
    with pytest.raises(ValueError, match="fewer nodes"):
        rendezvous(KEYS, numbers.astype(np.uint64), ones, numbers, np.zeros(2, dtype=np.int64), numbers, 2)
    with pytest.raises(ValueError, match="weights has 3 items, expected 2"):
        rendezvous(KEYS, numbers.astype(np.uint64), np.ones(3), numbers, numbers, numbers, 1)
    with pytest.raises(ValueError, match="ranks must be a vector"):
        rendezvous(KEYS, numbers.astype(np.uint64), ones, ones, numbers, numbers, 1)


# ---- replicas ----------------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> list[Shard]:
    """Return 1 to 8 nodes with 1 to 3 shards each, in up to 4 zones, of unequal weights."""
    shards = []
    for number in range(draw(st.integers(1, 8))):
        zone, weight = f"zone-{draw(st.integers(0, 3))}", draw(st.sampled_from([1.0, 1.5, 4.0]))
        for shard in range(draw(st.integers(1, 3))):
            shards.append(Shard(f"node-{number}/{shard}", weight, f"node-{number}", zone))
    return shards


def chosen_names(shards: Sequence[Shard], keys: npt.NDArray[np.uint8], count: int) -> list[list[str]]:
    return [[shards[number].name for number in row] for row in placed(shards).replicas(keys, count).tolist()]


@given(clusters(), st.integers(1, 5), st.integers(0, 1000))
def test_replicas_follow_the_rule(shards: list[Shard], count: int, start: int) -> None:
    keys = KEYS[start : start + 20]
    expected = [replicas_by_the_rule(key.tobytes(), shards, count) for key in keys]
    assert chosen_names(shards, keys, count) == expected


@given(clusters(), st.integers(1, 5))
def test_replicas_are_on_different_nodes_and_zones(shards: list[Shard], count: int) -> None:
    by_name = {shard.name: shard for shard in shards}
    keys = KEYS[:200]
    replicas = placed(shards).replicas(keys, count)
    columns = min(count, len({shard.node for shard in shards}))
    zones = min(columns, len({shard.zone for shard in shards}))
    assert replicas.shape == (200, columns)
    assert (replicas[:, 0] == placed(shards).owners(keys)).all()
    for row in chosen_names(shards, keys, count):
        assert len({by_name[name].node for name in row}) == columns
        assert len({by_name[name].zone for name in row}) >= zones


@given(clusters(), st.integers(1, 4), st.data())
def test_a_joining_or_leaving_node_changes_only_its_own_replicas(
    shards: list[Shard], count: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted({shard.node for shard in shards})))
    rest = [shard for shard in shards if shard.node != gone]
    if not rest:
        return
    columns = min(count, len({shard.node for shard in rest}))  # with fewer nodes, one column is new for all keys
    keys = KEYS[:300]
    for with_it, without in zip(chosen_names(shards, keys, columns), chosen_names(rest, keys, columns), strict=True):
        others = [name for name in with_it if not name.startswith(f"{gone}/")]
        if len(others) == len(with_it):
            assert with_it == without
        else:
            assert set(others) <= set(without), "a replica moved between nodes that were there all along"


def test_without_nodes_every_shard_counts_as_one() -> None:
    rows = equal(3).replicas(KEYS[:100], 3)
    assert (np.sort(rows, axis=1) == np.arange(3)).all()
    assert equal(3).replicas(KEYS[:100], 5).shape == (100, 3)
    assert equal(1).replicas(KEYS[:100], 2).tolist() == [[0]] * 100
    assert equal(3).replicas(KEYS[:0], 2).shape == (0, 2)


def test_threads_place_concurrently_and_agree() -> None:
    placement = equal(64)
    found: list[npt.NDArray[np.intp]] = []
    threads = [threading.Thread(target=lambda: found.append(placement.replicas(KEYS, 3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all((each == placement.replicas(KEYS, 3)).all() for each in found)


# ---- grouping ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=600))))
def test_positions_by_owner_equal_a_stable_sort(drawn: tuple[int, list[int]]) -> None:
    count, owners = drawn[0], np.array(drawn[1], dtype=np.intp)
    order, bounds = group_by_owner(owners, count)
    expected = np.argsort(owners, kind="stable")
    assert (order == expected).all()
    assert (bounds == np.searchsorted(owners[expected], np.arange(count + 1))).all()


@pytest.mark.parametrize(("owners", "wrong"), [([0, 3], 3), ([0, -1], -1)])
def test_an_invalid_owner_is_refused(owners: list[int], wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"owners\[1\] is {wrong}: expected 0 to 2"):
        group_by_owner(np.array(owners, dtype=np.intp), 3)
    with pytest.raises(ValueError, match=r"owners (must be|has)"):
        group_by_owner(np.array([0.0]), 3)
