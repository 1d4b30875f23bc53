"""The caller's memory seen as rows of bytes: the same memory, no copy, and clear errors for buffers that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore_client import BlockSizeMismatch
from kvstore_client._links.buffers import BlockSource, as_rows, writable_rows

BLOCK = 64


def numbered(count: int) -> np.ndarray:
    return np.arange(count * BLOCK, dtype=np.uint32).astype(np.uint8).reshape(count, BLOCK)


def same_memory(rows: np.ndarray, owner: np.ndarray) -> bool:
    return np.shares_memory(rows, owner)


@pytest.mark.parametrize(
    "shape", [(6, BLOCK), (6, 2, BLOCK // 2), (6 * BLOCK,), (6, BLOCK, 1), (6, 1, 4, 1, BLOCK // 4)]
)
def test_an_array_is_rows_over_its_own_memory(shape: tuple[int, ...]) -> None:
    array = numbered(6).reshape(shape)
    rows = as_rows(array, BLOCK, "out")
    assert rows.shape == (6, BLOCK) and same_memory(rows, array)
    assert (rows == numbered(6)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.complex128, np.bool_])
def test_any_item_type_is_bytes(dtype: Any) -> None:
    array = np.zeros((3, BLOCK // np.dtype(dtype).itemsize), dtype=dtype)
    rows = as_rows(array, BLOCK, "out")
    assert rows.shape == (3, BLOCK) and rows.dtype == np.uint8 and same_memory(rows, array)


def test_rows_may_lie_apart() -> None:
    table = np.zeros((8, 3 * BLOCK), dtype=np.uint8)
    for array in (table[:, BLOCK : 2 * BLOCK], table[::2, :BLOCK], table[::-1, :BLOCK]):
        rows = writable_rows(array, BLOCK)
        assert same_memory(rows, table) and rows.shape == (len(array), BLOCK)
        rows[1] = 7
        assert (array[1] == 7).all()
        table[:] = 0


def test_wider_rows_may_lie_apart() -> None:
    table = np.zeros((8, 3, BLOCK // 4), dtype=np.float32)
    rows = writable_rows(table[:, 1], BLOCK)
    rows[5] = 255
    assert np.isnan(table[5, 1]).all() and not table[5, 0].any()


@pytest.mark.parametrize("make", [bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_a_flat_buffer_is_rows(make: Any) -> None:
    rows = as_rows(make(numbered(4).tobytes()), BLOCK, "out")
    assert (rows == numbered(4)).all()


def test_no_rows_are_accepted() -> None:
    assert as_rows(np.empty((0, BLOCK), dtype=np.uint8), BLOCK, "out").shape == (0, BLOCK)
    assert as_rows(bytearray(), BLOCK, "out").shape == (0, BLOCK)


@pytest.mark.parametrize(
    ("value", "error", "parts"),
    [
        (np.zeros((3, 63), dtype=np.uint8), BlockSizeMismatch, ["63", "64"]),
        (np.zeros((3, 64), dtype=np.uint16), BlockSizeMismatch, ["128", "64"]),
        (np.zeros(65, dtype=np.uint8), BlockSizeMismatch, ["65", "64"]),
        (np.array(1, dtype=np.uint8), ValueError, ["scalar"]),
        (np.zeros((3, 8, 16), dtype=np.uint8)[:, :, ::2], ValueError, ["not contiguous"]),
        (np.zeros(128, dtype=np.uint8)[::2], ValueError, ["not contiguous"]),
        (12, TypeError, ["int", "expected an array"]),
    ],
)
def test_memory_that_does_not_fit_is_refused(value: Any, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        as_rows(value, BLOCK, "out")
    assert all(part in str(caught.value) for part in ["out", *parts])


def test_a_block_size_mismatch_is_a_value_error() -> None:
    assert issubclass(BlockSizeMismatch, ValueError)


def test_read_only_memory_is_refused_as_a_destination() -> None:
    array = numbered(2)
    array.flags.writeable = False
    for value in (array, bytes(2 * BLOCK)):
        with pytest.raises(ValueError, match="read-only"):
            writable_rows(value, BLOCK)


# ---- blocks to send ------------------------------------------------------------------------------------------------


def sent(source: BlockSource) -> bytes:
    return b"".join(bytes(view) for view in source.views(range(source.count)))


def test_blocks_of_one_array_are_sent_in_one_piece() -> None:
    array = numbered(6)
    source = BlockSource(array, BLOCK)
    (view,) = source.views(range(1, 5))
    assert view == memoryview(array[1:5]).cast("B") and np.shares_memory(np.asarray(view), array)
    assert len(source.views([0, 2])) == 2 and source.views([2, 1])[0] == array[2].tobytes()


def test_sequences_of_any_buffers_are_blocks() -> None:
    array = numbered(6)
    blocks = [
        array[0].tobytes(),
        bytearray(array[1].tobytes()),
        memoryview(array[2].tobytes()),
        array[3],
        array[4].reshape(2, 4, 8),
        array[5].view(np.float32),
    ]
    for sequence in (blocks, tuple(blocks), (block for block in blocks)):
        source = BlockSource(sequence, BLOCK)
        assert source.count == 6 and sent(source) == array.tobytes()


def test_separate_blocks_are_sent_each_from_its_place() -> None:
    table = np.zeros((4, 2 * BLOCK), dtype=np.uint8)
    table[:, :BLOCK] = numbered(4)
    source = BlockSource(table[:, :BLOCK], BLOCK)
    assert source.count == 4 and sent(source) == numbered(4).tobytes()
    assert all(np.shares_memory(np.asarray(view), table) for view in source.views(range(4)))


@pytest.mark.parametrize(
    ("blocks", "error", "parts"),
    [
        ([bytes(BLOCK), bytes(BLOCK - 1)], BlockSizeMismatch, ["block 1", "63", "64"]),
        ([np.zeros(BLOCK, dtype=np.uint16)], BlockSizeMismatch, ["block 0", "128", "64"]),
        (np.zeros((2, BLOCK + 1), dtype=np.uint8), BlockSizeMismatch, ["65", "64"]),
        (bytes(BLOCK), TypeError, ["is of type bytes", "sequence"]),
        (7, TypeError, ["is of type int"]),
        ([np.zeros(2 * BLOCK, dtype=np.uint8)[::2]], ValueError, ["block 0", "not contiguous"]),
        ([None], TypeError, ["block 0", "NoneType"]),
    ],
)
def test_invalid_blocks_are_refused(blocks: Any, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        BlockSource(blocks, BLOCK)
    assert all(part in str(caught.value) for part in parts)


# ---- tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"])
def test_a_cpu_tensor_is_rows_over_its_own_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    tensor = torch.zeros(3, 2, BLOCK // 2 // kind.itemsize, dtype=kind)
    rows = writable_rows(tensor, BLOCK)
    assert rows.shape == (3, BLOCK) and rows.ctypes.data == tensor.data_ptr()
    source = BlockSource(tensor, BLOCK)
    rows[1] = 0x3F
    assert sent(source) == bytes(BLOCK) + b"\x3f" * BLOCK + bytes(BLOCK)


def test_tensor_rows_may_lie_apart() -> None:
    torch = pytest.importorskip("torch")
    table = torch.zeros(4, 2, BLOCK // 2, dtype=torch.bfloat16)
    rows = writable_rows(table[:, 1], BLOCK)
    rows[2] = 0x3F
    assert table[2, 1].all() and not table[:, 0].any() and not table[1].any()


def test_a_sequence_of_tensors_is_blocks() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.full((BLOCK // 2,), number, dtype=torch.bfloat16) for number in range(3)]
    source = BlockSource(tensors, BLOCK)
    assert sent(source) == b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)


def test_a_tensor_that_requires_gradients_is_ordinary_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, BLOCK // 4, requires_grad=True)
    assert as_rows(tensor, BLOCK, "out").ctypes.data == tensor.data_ptr()


def test_a_tensor_on_another_device_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="meta: expected one in CPU memory"):
        as_rows(torch.zeros(2, BLOCK, device="meta"), BLOCK, "out")


def test_a_tensor_with_another_row_size_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(BlockSizeMismatch, match="rows of 128 bytes: expected block_bytes=64"):
        as_rows(torch.zeros(2, BLOCK, dtype=torch.bfloat16), BLOCK, "out")


def test_a_tensor_whose_rows_are_apart_is_refused_as_an_array_is() -> None:
    torch = pytest.importorskip("torch")
    wide = torch.zeros(BLOCK // 4, 4)
    for value in (wide.t(), torch.eye(4).to_sparse(), torch.zeros(4, 8, dtype=torch.complex64).conj()):
        with pytest.raises(ValueError, match=r"out is .*copy it to contiguous memory"):
            as_rows(value, BLOCK, "out")
    with pytest.raises(ValueError, match="block 0 is not contiguous"):
        BlockSource([wide.t()], BLOCK)


@pytest.mark.parametrize("apart", [0, 1, BLOCK - 1, -1])
def test_rows_that_share_memory_receive_no_blocks(apart: int) -> None:
    table = np.zeros(4 * BLOCK, dtype=np.uint8)[2 * BLOCK :]
    array = np.lib.stride_tricks.as_strided(table, (2, BLOCK), (apart, 1))
    with pytest.raises(ValueError, match=f"its rows begin {abs(apart)} bytes apart and have {BLOCK} bytes, so several"):
        writable_rows(array, BLOCK)
    assert len(as_rows(array, BLOCK, "blocks")) == 2, "they can be read"
    assert len(writable_rows(array[:1], BLOCK)) == 1


def test_an_expanded_tensor_receives_no_blocks() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="so several share memory: expected separate memory for each row"):
        writable_rows(torch.zeros(1, BLOCK // 4).expand(3, BLOCK // 4), BLOCK)
    assert len(writable_rows(torch.zeros(3, BLOCK // 4), BLOCK)) == 3
    with pytest.raises(ValueError, match="out is read-only"):
        writable_rows(np.broadcast_to(np.zeros(BLOCK, np.uint8), (3, BLOCK)), BLOCK)
