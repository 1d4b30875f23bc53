"""Checksums and prefix keys, compared with the xxhash package and with plain Python code."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import _cext
from tests.support.properties import examples

VARIANTS = _cext._xxh3_variants()
SEEDS = [0, 1, 0x9E3779B185EBCA87, 2**64 - 1]
NOISE = np.random.default_rng(7).integers(0, 256, 3 << 20, dtype=np.uint8)
LONG = [1024 * k + d for k in (2, 3, 16) for d in (-1, 0, 1, 63, 64, 65)] + [
    262_143,
    262_144,
    900_001,
    NOISE.size,
]


def reference_keys(tokens, block_tokens, seed=b"", parent=None):
    key = xxhash.xxh3_128_digest(seed) if parent is None else bytes(parent)
    keys = []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        block = tokens[start : start + block_tokens]
        key = xxhash.xxh3_128_digest(key + b"".join(int(token).to_bytes(4, "little") for token in block))
        keys.append(key)
    return keys


def as_bytes(keys):
    return [key.tobytes() for key in keys]


# ---- xxh3 itself ----


def test_scalar_code_is_always_available_for_comparison():
    assert VARIANTS[0] == "scalar"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_variant_agrees_with_xxhash_at_every_length(variant, seed):
    for length in [*range(1101), *LONG]:
        data = NOISE[:length].tobytes()
        assert _cext._xxh3_64(data, seed, variant) == xxhash.xxh3_64_intdigest(data, seed), length
        assert _cext._xxh3_128(data, seed, variant) == xxhash.xxh3_128_digest(data, seed), length


@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_do_not_depend_on_alignment(variant):
    for offset in range(65):
        data = NOISE[offset : offset + 5000]
        assert _cext._xxh3_64(data, 0, variant) == xxhash.xxh3_64_intdigest(data.tobytes())


def test_published_constants_are_unchanged():
    # Stored data contain these checksums, so a change here changes the format.
    assert _cext.checksum(b"") == 0x2D06800538D394C2
    assert _cext._xxh3_128(b"", 0, "scalar").hex() == "99aa06d3014798d86001c324468d497f"


# ---- checksum ----


@given(st.binary(max_size=3000))
def test_checksum_is_xxh3_64(data):
    assert _cext.checksum(data) == xxhash.xxh3_64_intdigest(data)


def test_checksum_takes_any_contiguous_buffer():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    expected = xxhash.xxh3_64_intdigest(array.tobytes())
    frozen = array.copy()
    frozen.flags.writeable = False
    for buffer in (array, frozen, array.tobytes(), bytearray(array.tobytes()), memoryview(array)):
        assert _cext.checksum(buffer) == expected


def test_checksum_refuses_strided_arrays_and_objects_without_a_buffer():
    with pytest.raises(ValueError, match="C-contiguous"):
        _cext.checksum(NOISE[:100:2])
    with pytest.raises(TypeError, match="must give a buffer"):
        _cext.checksum("text")
    with pytest.raises(TypeError, match="must give a buffer"):
        _cext.checksum(None)


@given(st.lists(st.binary(max_size=500), max_size=20))
def test_checksum_into_gives_one_sum_for_each_buffer(buffers):
    out = np.zeros(len(buffers), np.uint64)
    _cext.checksum_into(buffers, out)
    assert out.tolist() == [xxhash.xxh3_64_intdigest(buffer) for buffer in buffers]


def test_checksum_into_writes_nothing_when_one_buffer_is_unusable():
    out = np.full(2, 7, np.uint64)
    with pytest.raises(TypeError, match="buffer"):
        _cext.checksum_into([b"fine", 3], out)
    with pytest.raises(ValueError, match="C-contiguous"):
        _cext.checksum_into([b"fine", NOISE[:100:2]], out)
    assert out.tolist() == [7, 7]


def test_sums_must_be_writable_contiguous_uint64_one_per_block():
    frozen = np.zeros(2, np.uint64)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        _cext.checksum_into([b"a", b"b"], frozen)
    with pytest.raises(TypeError, match="uint64"):
        _cext.checksum_into([b"a", b"b"], np.zeros(2, np.int64))
    with pytest.raises(TypeError, match="uint64"):
        _cext.checksum_into([b"a", b"b"], np.zeros(2, ">u8"))
    with pytest.raises(ValueError, match="expected one for each of 2"):
        _cext.checksum_into([b"a", b"b"], np.zeros(3, np.uint64))
    with pytest.raises(ValueError, match="C-contiguous"):
        _cext.checksum_into([b"a", b"b"], np.zeros(4, np.uint64)[::2])


@given(st.integers(1, 2000), st.integers(0, 6))
def test_checksum_blocks_sums_each_block(block_bytes, count):
    base = NOISE[: block_bytes * count]
    out = np.zeros(count, np.uint64)
    _cext.checksum_blocks(base, block_bytes, out)
    blocks = base.reshape(count, block_bytes)
    assert out.tolist() == [xxhash.xxh3_64_intdigest(block.tobytes()) for block in blocks]


def test_blocks_must_fill_their_buffer():
    sums = np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match="not a multiple of block_bytes=64"):
        _cext.checksum_blocks(bytes(100), 64, sums)
    with pytest.raises(ValueError, match="block_bytes must be at least 1"):
        _cext.checksum_blocks(bytes(100), 0, sums)
    with pytest.raises(ValueError, match="expected one for each of 2"):
        _cext.checksum_blocks(bytes(128), 64, sums)


@given(st.integers(1, 2000), st.lists(st.integers(0, 20_000), max_size=6))
def test_checksum_at_sums_blocks_at_any_address(block_bytes, offsets):
    found = _cext.checksum_at(NOISE, np.array(offsets, np.int64), block_bytes)
    blocks = [NOISE[at : at + block_bytes].tobytes() for at in offsets]
    assert found.tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]


@pytest.mark.parametrize("offset", [-1, 37, 1 << 62])
def test_blocks_to_sum_must_lie_inside_their_buffer(offset):
    with pytest.raises(IndexError, match=rf"offsets\[1\] is {offset}: a block of 64 bytes"):
        _cext.checksum_at(bytes(100), np.array([36, offset], np.int64), 64)
    with pytest.raises(ValueError, match="block_bytes must be at least 1"):
        _cext.checksum_at(bytes(100), np.array([0], np.int64), 0)
    with pytest.raises(TypeError, match="offsets must be a 1-D int64 array"):
        _cext.checksum_at(bytes(100), np.array([0], np.int32), 64)


# ---- prefix keys ----

token = st.integers(0, 2**31 - 1)


@given(st.lists(token, max_size=200), st.integers(1, 40), st.binary(max_size=40))
def test_prefix_keys_follow_the_documented_layout(tokens, block_tokens, seed):
    expected = reference_keys(tokens, block_tokens, seed)
    for dtype in (np.int32, np.int64):
        keys = _cext.prefix_keys(np.array(tokens, dtype), block_tokens, seed)
        assert keys.shape == (len(tokens) // block_tokens, 16)
        assert keys.dtype == np.uint8
        assert as_bytes(keys) == expected


@pytest.mark.parametrize("block_tokens", [1024, 1025, 5000])
def test_prefix_keys_of_large_blocks_follow_the_same_layout(block_tokens):
    tokens = np.random.default_rng(1).integers(0, 2**32, 3 * block_tokens + 5)
    assert as_bytes(_cext.prefix_keys(tokens, block_tokens)) == reference_keys(tokens, block_tokens)


def test_prefix_keys_are_the_same_in_every_release():
    keys = _cext.prefix_keys(np.arange(100), 16)
    assert keys[-1].tobytes().hex() == "aa3ec9ef2e48837194033a359ead26bb"


@given(st.lists(token, max_size=100), st.lists(token, max_size=60), st.integers(1, 16), st.binary(max_size=8))
def test_a_chain_continues_from_its_parent(head, tail, block_tokens, seed):
    head = head[: len(head) // block_tokens * block_tokens]
    first = _cext.prefix_keys(np.array(head, np.int64), block_tokens, seed)
    parent = first[-1] if len(first) else None
    rest = _cext.prefix_keys(np.array(tail, np.int32), block_tokens, seed, parent)
    whole = _cext.prefix_keys(np.array(head + tail, np.int64), block_tokens, seed)
    assert np.array_equal(np.concatenate([first, rest]), whole)


@given(st.lists(token, min_size=8, max_size=100), st.sampled_from([-3, -2, -1, 2, 3]))
def test_prefix_keys_read_strided_and_unaligned_tokens(tokens, step):
    for dtype in (np.int32, np.int64):
        spread = np.array(tokens, dtype)[::step]
        assert as_bytes(_cext.prefix_keys(spread, 4)) == reference_keys(spread.tolist(), 4)
        raw = bytearray(1) + np.array(tokens, dtype).tobytes()
        unaligned = np.frombuffer(raw, dtype, offset=1)
        assert as_bytes(_cext.prefix_keys(unaligned, 4)) == reference_keys(tokens, 4)


def test_one_token_changes_its_own_key_and_all_later_keys_only():
    tokens = np.arange(64)
    before = _cext.prefix_keys(tokens, 8)
    tokens[30] += 1
    after = _cext.prefix_keys(tokens, 8)
    assert (before == after).all(axis=1).tolist() == [True] * 3 + [False] * 5


def test_repeated_blocks_have_different_keys():
    keys = as_bytes(_cext.prefix_keys(np.zeros(1600, np.int32), 16))
    assert len(set(keys)) == 100
    assert all(a != b for a, b in pairwise(keys))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("dtype", "value"), [(np.int32, -1), (np.int64, -1), (np.int64, 2**32), (np.int64, -(2**63))])
def test_the_first_token_out_of_range_is_named(dtype, value, step):
    tokens = np.zeros(100, dtype)[::step]
    tokens[21] = value
    tokens[40] = value
    with pytest.raises(ValueError, match=rf"tokens\[21\] is {value};"):
        _cext.prefix_keys(tokens, 4)


def test_a_bad_token_in_the_partial_last_block_is_not_read():
    tokens = np.array([1, 2, 3, 4, -1])
    assert as_bytes(_cext.prefix_keys(tokens, 4)) == reference_keys([1, 2, 3, 4], 4)


def test_the_largest_token_is_accepted():
    tokens = np.full(4, 2**32 - 1)
    assert as_bytes(_cext.prefix_keys(tokens, 4)) == reference_keys(tokens.tolist(), 4)


def test_prefix_keys_refuse_wrong_arrays_parents_and_block_sizes():
    tokens = np.arange(16)
    for wrong in (
        tokens.astype(np.float64),
        tokens.astype(np.uint32),
        tokens.astype(">i8"),
        tokens.reshape(4, 4),
    ):
        with pytest.raises(TypeError, match="1-D int32 or int64"):
            _cext.prefix_keys(wrong, 4)
    with pytest.raises(TypeError, match="tokens must give a buffer"):
        _cext.prefix_keys([1, 2, 3, 4], 4)
    for size in (0, 15, 17):
        with pytest.raises(ValueError, match=f"exactly 16 bytes, got {size}"):
            _cext.prefix_keys(tokens, 4, parent=bytes(size))
    for block_tokens in (0, -1):
        with pytest.raises(ValueError, match="block_tokens must be at least 1"):
            _cext.prefix_keys(tokens, block_tokens)


@settings(max_examples=examples(0.2))
@given(st.integers(0, 3), st.integers(1, 5))
def test_too_few_tokens_give_no_keys(count, more):
    assert _cext.prefix_keys(np.arange(count), count + more).shape == (0, 16)


def test_hashing_runs_in_many_threads_at_once():
    tokens = np.arange(160_000)
    keys = _cext.prefix_keys(tokens, 16)
    total = xxhash.xxh3_64_intdigest(NOISE.data)
    agreed = []

    def work():
        agreed.append(np.array_equal(_cext.prefix_keys(tokens, 16), keys) and _cext.checksum(NOISE) == total)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [True] * 8
