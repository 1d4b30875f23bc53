"""The benchmark of placements on disk is valid: each candidate keeps blocks, evicts some, and finds the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.persistence_kv_cache.placements import PLACEMENTS, PLAIN, PLAIN_DIRECT, unavailable
from benchmarks.persistence_kv_cache.stores import FULL, Shape, Store, block_key
from benchmarks.remote_kv_cache.shapes import Batch

BLOCKS = 60
BLOCK_BYTES = 8192


@pytest.fixture
def shape() -> Shape:
    return Shape(Batch(BLOCKS, per_call=16), BLOCK_BYTES)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_blocks_left_after_churn_and_reopening_have_the_right_bytes(
    name: str, threads: int, shape: Shape, tmp_path: Path
) -> None:
    missing = unavailable([name], BLOCK_BYTES, tmp_path)
    if missing:
        pytest.skip(missing[name])
    store = Store(name, tmp_path / "store", shape, FULL)
    store.fill(threads)
    for _ in range(3):
        store.replace_third()
    numbers = store.in_random_order()
    assert (numbers >= BLOCKS).any() and (numbers < BLOCKS).any()

    store.close()
    store.open()
    if name not in (PLAIN, PLAIN_DIRECT):
        assert store.placement.keys() == {block_key(int(number)) for number in numbers}
    store.read_all([block_key(int(number)) for number in numbers], threads)
    shape.verify(name, numbers)
    store.close()


def test_a_block_in_another_ones_place_is_noticed(shape: Shape) -> None:
    shape.out[:] = shape.source
    shape.verify("all right", range(BLOCKS))
    with pytest.raises(AssertionError, match="block 2: the bytes read differ"):
        shape.verify("two exchanged", [0, 2, 1, *range(3, BLOCKS)])
