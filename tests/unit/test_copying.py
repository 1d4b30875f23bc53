"""Gather and scatter, compared with NumPy."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import _cext

DTYPES = [np.uint8, np.uint16, np.float32, np.complex64, np.complex128, np.dtype("V3"), np.dtype(">i8")]


@st.composite
def layer_layouts(draw):
    """Draw the logical shape and dtype of an array, and the number of layers."""
    inner = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    shape = (draw(st.integers(1, 6)), *inner)
    return shape, draw(st.sampled_from(DTYPES)), draw(st.integers(1, 4))


def lay_out(draw, shape, dtype):
    """Return a writable array of that shape whose memory is permuted, stepped, reversed and unaligned as drawn."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([-2, -1, 1, 1, 1, 2])) for _ in shape]
    stored = tuple(shape[axis] * abs(steps[axis]) for axis in order)
    dtype = np.dtype(dtype)
    offset = draw(st.integers(0, 3))
    raw = bytearray(offset + int(np.prod(stored)) * dtype.itemsize)
    array = np.frombuffer(raw, dtype, offset=offset).reshape(stored)
    array = array.transpose(np.argsort(order))
    view = array[tuple(slice(None, None, step) for step in steps)]
    assert view.shape == shape
    return view


def fill(rng, view):
    data = rng.integers(0, 256, (view.size, view.dtype.itemsize), dtype=np.uint8)
    view[...] = data.view(view.dtype).reshape(view.shape)


def packed(views, ids):
    """Return the expected result of gather: for each id, the bytes of its block in every layer, in C order."""
    return [b"".join(view[i : i + 1].tobytes() for view in views) for i in ids]


def row_bytes(views):
    return sum(view[:1].size * view.dtype.itemsize for view in views)


def int64(*ids):
    return np.array(ids, np.int64)


@given(layer_layouts(), st.integers(0, 2**32), st.data())
def test_gather_packs_blocks_of_any_layout_as_numpy_does(layout, seed, data):
    shape, dtype, layer_count = layout
    rng = np.random.default_rng(seed)
    views = [lay_out(data.draw, shape, dtype) for _ in range(layer_count)]
    for view in views:
        fill(rng, view)
    ids = np.array(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=8)), np.int64)
    size = row_bytes(views)
    gap = data.draw(st.integers(0, 5))
    room = np.full((len(ids), size + gap), 0xAB, np.uint8)
    out = room[:, :size]
    if data.draw(st.booleans()):
        out = out[::-1]
    _cext.gather(views, ids, out)
    assert [row.tobytes() for row in out] == packed(views, ids)
    assert (room[:, size:] == 0xAB).all()


@given(layer_layouts(), st.integers(0, 2**32), st.data())
def test_scatter_undoes_gather_and_leaves_other_blocks_alone(layout, seed, data):
    shape, dtype, layer_count = layout
    rng = np.random.default_rng(seed)
    views = [lay_out(data.draw, shape, dtype) for _ in range(layer_count)]
    for view in views:
        fill(rng, view)
    ids = np.array(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=6, unique=True)), np.int64)
    before = packed(views, range(shape[0]))
    src = rng.integers(0, 256, (len(ids), row_bytes(views)), dtype=np.uint8)
    src.flags.writeable = False
    _cext.scatter(src, views, ids)
    expected = list(before)
    for row, block in enumerate(ids):
        expected[block] = src[row].tobytes()
    assert packed(views, range(shape[0])) == expected


@given(layer_layouts(), st.integers(0, 2**32), st.data())
def test_slots_select_rows_of_a_pool(layout, seed, data):
    shape, dtype, layer_count = layout
    rng = np.random.default_rng(seed)
    views = [lay_out(data.draw, shape, dtype) for _ in range(layer_count)]
    for view in views:
        fill(rng, view)
    ids = np.array(data.draw(st.permutations(range(shape[0]))), np.int64)
    size, gap = row_bytes(views), data.draw(st.integers(0, 5))
    pool = np.full((shape[0] + 3, size + gap), 0xAB, np.uint8)
    slots = np.array(data.draw(st.permutations(range(len(pool)))), np.int64)[: len(ids)]
    before = packed(views, ids)
    _cext.gather(views, ids, pool[:, :size], slots)
    assert [pool[slot, :size].tobytes() for slot in slots] == before
    assert (np.delete(pool, slots, axis=0) == 0xAB).all()
    assert (pool[:, size:] == 0xAB).all()
    pool.flags.writeable = False
    _cext.scatter(pool[:, :size], views, ids[::-1], slots)
    assert packed(views, ids[::-1]) == before


@pytest.mark.parametrize("block_bytes", [4096, 4096 + 24, 917_504, 3 << 20])
def test_large_calls_move_the_same_bytes(block_bytes):
    count = max(2, (40 << 20) // block_bytes)  # above the size from which stores bypass the caches
    rng = np.random.default_rng(5)
    source = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    ids = rng.permutation(count)
    out = np.zeros((count, block_bytes + 8), np.uint8)[:, :block_bytes]
    _cext.gather([source], ids, out)
    assert np.array_equal(out, source[ids])
    back = np.zeros_like(source)
    _cext.scatter(out, [back], ids)
    assert np.array_equal(back, source)


def test_layers_with_separate_keys_and_values_are_packed_block_by_block():
    layers = [np.random.default_rng(i).integers(0, 2**16, (2, 600, 16, 4, 64), dtype=np.uint16) for i in range(4)]
    views = [layer.swapaxes(0, 1) for layer in layers]
    ids = np.random.default_rng(9).permutation(600)
    out = np.zeros((600, 4, 2, 16, 4, 64), np.uint16)
    _cext.gather(views, ids, out)
    assert np.array_equal(out, np.stack([view[ids] for view in views], axis=1))
    back = [np.zeros_like(layer) for layer in layers]
    _cext.scatter(out, [layer.swapaxes(0, 1) for layer in back], ids)
    assert all(np.array_equal(a, b) for a, b in zip(back, layers, strict=True))


def test_a_flat_buffer_is_accepted_as_rows():
    views = [np.arange(40, dtype=np.uint16).reshape(10, 4)]
    out = bytearray(24)
    _cext.gather(views, int64(7, 0, 3), out)
    assert bytes(out) == views[0][[7, 0, 3]].tobytes()
    _cext.scatter(bytes(24), views, int64(7, 0, 3))
    assert not views[0][[7, 0, 3]].any()
    assert views[0][[1, 2, 4, 5, 6, 8, 9]].all()


def test_layers_may_differ_in_their_number_of_blocks():
    views = [np.arange(10, dtype=np.uint8).reshape(10, 1), np.arange(5, dtype=np.uint8).reshape(5, 1)]
    out = np.zeros((1, 2), np.uint8)
    _cext.gather(views, int64(4), out)
    assert out.tolist() == [[4, 4]]
    with pytest.raises(IndexError, match=r"block_ids\[0\] is 5, but views\[1\] has 5 blocks"):
        _cext.gather(views, int64(5), out)


def test_read_only_and_broadcast_views_can_be_gathered():
    source = np.arange(12, dtype=np.uint8).reshape(3, 4)
    source.flags.writeable = False
    out = np.zeros((2, 4), np.uint8)
    _cext.gather([source], int64(2, 0), out)
    assert np.array_equal(out, source[[2, 0]])
    _cext.gather([np.broadcast_to(source[1], (100, 4))], int64(99, 50), out)
    assert np.array_equal(out, source[[1, 1]])


def test_read_only_destinations_are_refused():
    frozen = np.zeros((2, 4), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        _cext.gather([np.ones((3, 4), np.uint8)], int64(0, 1), frozen)
    with pytest.raises(ValueError, match=r"views\[1\] is read-only"):
        _cext.scatter(np.ones((1, 8), np.uint8), [np.zeros((2, 4), np.uint8), frozen], int64(0))


@pytest.mark.parametrize("bad", [-1, 6, 2**62, -(2**63)])
def test_an_id_out_of_range_is_named_and_nothing_is_written(bad):
    view = np.arange(24, dtype=np.uint8).reshape(6, 4)
    before = view.copy()
    out = np.full((3, 4), 0xAB, np.uint8)
    with pytest.raises(IndexError, match=rf"block_ids\[2\] is {bad}, but views\[0\] has 6 blocks"):
        _cext.gather([view], int64(0, 5, bad), out)
    assert (out == 0xAB).all()
    with pytest.raises(IndexError, match=rf"block_ids\[2\] is {bad}"):
        _cext.scatter(out, [view], int64(0, 5, bad))
    assert np.array_equal(view, before)


@pytest.mark.parametrize("bad", [-1, 5, 2**62, -(2**63)])
@pytest.mark.parametrize("pool", [np.full((5, 4), 0xAB, np.uint8), np.full(20, 0xAB, np.uint8)], ids=["rows", "flat"])
def test_a_slot_out_of_range_is_named_and_nothing_is_written(pool, bad):
    view = np.arange(24, dtype=np.uint8).reshape(6, 4)
    before = view.copy()
    with pytest.raises(IndexError, match=rf"slots\[1\] is {bad}, but out has 5 rows \(0 .. 4\)"):
        _cext.gather([view], int64(0, 5), pool, slots=int64(4, bad))
    assert (pool == 0xAB).all()
    with pytest.raises(IndexError, match=rf"slots\[1\] is {bad}, but src has 5 rows"):
        _cext.scatter(pool, [view], int64(0, 5), slots=int64(4, bad))
    assert np.array_equal(view, before)


def test_slots_of_the_wrong_shape_are_refused():
    view, pool = np.zeros((6, 4), np.uint8), np.zeros((5, 4), np.uint8)
    for slots in (int64(0), int64(0, 1, 2)):
        with pytest.raises(ValueError, match=f"got {len(slots)} slots for 2 blocks"):
            _cext.gather([view], int64(0, 1), pool, slots=slots)
    for wrong in (np.arange(2, dtype=np.int32), np.zeros((2, 1), np.int64)):
        with pytest.raises(TypeError, match="slots must be a 1-D int64 array"):
            _cext.scatter(pool, [view], int64(0, 1), slots=wrong)
    for wrong in (np.zeros((5, 3), np.uint8), np.zeros((5, 8), np.uint8)[:, ::2], np.zeros(21, np.uint8)):
        with pytest.raises(ValueError, match="must be rows of 4 bytes each"):
            _cext.gather([view], int64(0, 1), wrong, slots=int64(0, 1))


def test_the_last_block_for_a_slot_wins_and_slots_may_repeat():
    view = np.arange(6, dtype=np.uint8).reshape(3, 2)
    pool = np.zeros((2, 2), np.uint8)
    _cext.gather([view], int64(0, 1, 2), pool, slots=int64(1, 0, 1))
    assert pool.tolist() == [[2, 3], [4, 5]]
    _cext.scatter(pool, [view], int64(0, 1), slots=int64(1, 1))
    assert view.tolist() == [[4, 5], [4, 5], [4, 5]]


def test_ids_may_be_strided_and_must_be_int64():
    view = np.arange(6, dtype=np.uint8).reshape(6, 1)
    out = np.zeros((3, 1), np.uint8)
    _cext.gather([view], np.arange(6)[::-2], out)
    assert out.ravel().tolist() == [5, 3, 1]
    for wrong in (np.arange(3, dtype=np.int32), np.arange(3.0), np.zeros((3, 1), np.int64)):
        with pytest.raises(TypeError, match="1-D int64"):
            _cext.gather([view], wrong, out)
    with pytest.raises(TypeError, match="block_ids must give a buffer"):
        _cext.gather([view], [0, 1, 2], out)


def test_the_last_of_two_rows_for_one_block_wins():
    view = np.zeros((3, 2), np.uint8)
    _cext.scatter(np.array([[1, 1], [2, 2], [3, 3]], np.uint8), [view], int64(1, 0, 1))
    assert view.tolist() == [[2, 2], [3, 3], [0, 0]]


def test_an_empty_batch_moves_nothing():
    view = np.arange(8, dtype=np.uint8).reshape(2, 4)
    _cext.gather([view], int64(), np.zeros((0, 4), np.uint8))
    _cext.scatter(np.zeros((0, 4), np.uint8), [view], int64())
    _cext.gather([view[:, :0]], int64(1, 0), np.zeros((2, 0), np.uint8))
    assert view.ravel().tolist() == list(range(8))


def test_rows_of_the_wrong_shape_are_refused():
    views = [np.zeros((2, 4), np.uint8)] * 2
    for wrong in (
        np.zeros((1, 8), np.uint8),
        np.zeros((2, 7), np.uint8),
        np.zeros((2, 16), np.uint8)[:, ::2],
        np.zeros((8, 2), np.uint8).T,
        np.zeros(17, np.uint8),
        np.zeros((), np.uint8),
    ):
        with pytest.raises(ValueError, match="must be 2 rows of 8 bytes each"):
            _cext.gather(views, int64(0, 1), wrong)
        with pytest.raises(ValueError, match="must be 2 rows of 8 bytes each"):
            _cext.scatter(wrong, views, int64(0, 1))


def test_layers_of_different_shapes_are_refused():
    out = np.zeros((1, 8), np.uint8)
    for wrong in (np.zeros((2, 5), np.uint8), np.zeros((2, 4), np.uint16), np.zeros((2, 2, 2), np.uint8)):
        with pytest.raises(ValueError, match=r"views\[1\] has blocks of shape"):
            _cext.gather([np.zeros((2, 4), np.uint8), wrong], int64(0), out)
    with pytest.raises(ValueError, match="views is empty"):
        _cext.gather([], int64(0), out)
    with pytest.raises(ValueError, match="first axis"):
        _cext.gather([np.zeros((), np.uint8)], int64(0), out)
    with pytest.raises(TypeError, match=r"views\[0\] must give a buffer"):
        _cext.gather([None], int64(0), out)


def test_refused_calls_release_every_buffer():
    room = bytearray(64)
    for _ in range(3):
        with pytest.raises(IndexError):
            _cext.gather([np.zeros((2, 64), np.uint8)], int64(9), room)
    room.append(0)  # a bytearray that is still exported would refuse to grow


def test_calls_from_many_threads_do_not_interfere():
    source = np.random.default_rng(2).integers(0, 256, (64, 40_000), dtype=np.uint8)
    agreed = []

    def work(seed):
        ids = np.random.default_rng(seed).permutation(64)
        out = np.zeros_like(source)
        _cext.gather([source], ids, out)
        agreed.append(np.array_equal(out, source[ids]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [True] * 8
