"""Blocks are copied out of shared memory and hashed in the same pass. Every code path gives the same bytes and
checksums."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore._cext import (
    _copy_and_hash_with,
    _xxh3_variants,
    all_inside,
    copy_blocks,
    distinct_files,
    first_of_each,
    references_to,
    slot_offsets,
)

GUARD = 0xA5
BYTES = np.random.default_rng(7).integers(0, 256, 70_000, dtype=np.uint8)
# Sizes near those at which the code takes another path: stripes, blocks, and the remainder after them.
SIZES = st.one_of(
    st.integers(1, 5000),
    st.builds(lambda blocks, more: blocks * 1024 + more, st.integers(1, 60), st.integers(-66, 66)),
)


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins at a cache line."""
    memory = np.full(nbytes + 64, GUARD, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


@pytest.mark.parametrize("variant", _xxh3_variants())
@pytest.mark.parametrize("stream", [False, True])
@given(size=SIZES, start=st.integers(0, 130), place=st.integers(0, 130))
def test_every_code_path_copies_exactly_the_block_and_returns_its_checksum(
    variant: str, stream: bool, size: int, start: int, place: int
) -> None:
    source = aligned(size + start)[start:]
    source[:] = BYTES[:size]
    out = aligned(size + place + 100)
    found = _copy_and_hash_with(source, out, place, stream, variant)
    assert found == xxhash.xxh3_64_intdigest(source)
    assert np.array_equal(out[place : place + size], source)
    assert (out[:place] == GUARD).all() and (out[place + size :] == GUARD).all()


@given(
    block_bytes=st.sampled_from([1, 100, 4096, 16384]),
    which=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    data=st.data(),
)
def test_blocks_come_from_the_named_files_and_offsets(block_bytes: int, which: list[int], data: st.DataObject) -> None:
    files = [np.roll(BYTES, number) for number in range(3)]
    count = len(which)
    offsets = data.draw(st.lists(st.integers(0, len(BYTES) - block_bytes), min_size=count, max_size=count))
    places = data.draw(st.permutations(range(count)))
    rows = np.zeros((count, block_bytes), dtype=np.uint8)
    flat = np.zeros(count * block_bytes, dtype=np.uint8)
    numbers = [np.array(each, dtype=np.int64) for each in (which, offsets, places)]
    sums = copy_blocks(files, numbers[0], numbers[1], block_bytes, rows, numbers[2])
    copy_blocks(files, numbers[0], numbers[1], block_bytes, flat, numbers[2] * block_bytes)
    for file, offset, place, found in zip(which, offsets, places, sums, strict=True):
        block = files[file][offset : offset + block_bytes]
        assert np.array_equal(rows[place], block) and found == xxhash.xxh3_64_intdigest(block.tobytes())
    assert np.array_equal(rows.reshape(-1), flat)


@pytest.mark.parametrize(
    ("file", "offset", "place"), [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]
)
def test_a_block_outside_its_file_or_destination_is_refused_before_copying(file: int, offset: int, place: int) -> None:
    source, out = np.ones(8192, dtype=np.uint8), np.zeros((1, 8192), dtype=np.uint8)
    numbers = [np.array([each], dtype=np.int64) for each in (file, offset, place)]
    with pytest.raises(IndexError):
        copy_blocks([source], numbers[0], numbers[1], 8192, out, numbers[2])
    assert not out.any()


@given(st.lists(st.sampled_from([3, 2**63 + 5, 2**64 - 1, 0]), max_size=40))
def test_distinct_files_keep_their_first_seen_order(numbers: list[int]) -> None:
    distinct, places = distinct_files(np.array(numbers, dtype=np.uint64))
    assert distinct == list(dict.fromkeys(numbers))
    assert [distinct[place] for place in places] == numbers


@given(st.lists(st.integers(0, 20), max_size=60), st.sampled_from([1, 16, 32, 300]))
def test_the_first_occurrence_of_each_key_is_found(numbers: list[int], key_bytes: int) -> None:
    keys = np.array([[number] * key_bytes for number in numbers], dtype=np.uint8).reshape(len(numbers), key_bytes)
    assert first_of_each(keys).tolist() == [numbers.index(number) for number in numbers]


def _int64(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def test_slots_are_found_in_a_namespaces_segments() -> None:
    starts = _int64(3000, 0, 1000)
    slots = np.array([0, 1, 2, 3, 5, 6, 8], dtype=np.int32)
    assert slot_offsets(slots, starts, 3, 100).tolist() == [3000, 3100, 3200, 0, 200, 1000, 1200]
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match=f"slots.0. is {wrong}: expected one of 3 segments"):
            slot_offsets(np.array([wrong], dtype=np.int32), starts, 3, 100)


def test_references_name_files_and_report_segments_the_client_lacks() -> None:
    numbers = np.array([7, 0, 9, 8], dtype=np.uint64)
    told = np.array([7, 0, 5, 8], dtype=np.uint64)
    entries, strange = references_to(_int64(0, 250, 999, 1000, 2010, 2020, 3000), 1000, numbers, told)
    assert entries.tolist() == [[7, 0], [7, 250], [7, 999], [0, 0], [9, 10], [9, 20], [8, 0]]
    assert strange == [1, 2]
    for wrong in (-1, 4000):
        with pytest.raises(IndexError, match=f"offsets.0. is {wrong}"):
            references_to(_int64(wrong), 1000, numbers, told)


@pytest.mark.parametrize(
    ("offsets", "which", "inside"),
    [((), (), True), ((0, 36, 0), (0, 0, 1), True), ((37,), (0,), False), ((-1,), (0,), False), ((0,), (2,), False)],
)
def test_blocks_outside_their_pieces_are_detected(
    offsets: tuple[int, ...], which: tuple[int, ...], inside: bool
) -> None:
    assert all_inside(_int64(*offsets), 64, _int64(*which), _int64(100, 64, 63)) is inside


def test_a_block_in_a_missing_piece_is_an_error() -> None:
    for wrong in (-1, 1):
        with pytest.raises(IndexError, match=f"which.0. is {wrong}"):
            all_inside(_int64(0), 64, _int64(wrong), _int64(100))
    with pytest.raises(ValueError, match="which has 1 items, expected 2"):
        all_inside(_int64(0, 1), 64, _int64(0), _int64(100))
