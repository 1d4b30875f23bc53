"""The caller's memory as rows of bytes, without a copy. It may be a NumPy array, a CPU torch tensor, or any buffer."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockFrames, ReusableMemory
from kvstore_client.errors import BlockSizeMismatch
from kvstore_client.memory import SharedRegion, any_regions, region_of

if TYPE_CHECKING:

    class Buffer(Protocol):
        """As `collections.abc.Buffer`, which exists since Python 3.12."""

        def __buffer__(self, flags: int, /) -> memoryview: ...

    class Tensor(Protocol):
        """What type checkers take for a torch tensor, because torch may not be installed."""

        def data_ptr(self) -> int: ...

        def numpy(self) -> Any: ...

    Memory: TypeAlias = Buffer | npt.NDArray[Any] | Tensor  # in CPU memory
    Blocks: TypeAlias = npt.NDArray[Any] | Tensor | Iterable[Memory]
else:
    Memory = Blocks = Any  # a program that asks for type hints needs no more packages

Rows: TypeAlias = "npt.NDArray[np.uint8]"
KEPT_BUFFERS: Final = 64 << 20
_FIRST: Final = np.zeros(1, dtype=np.int64)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # not imported here, because there are tensors only if torch was imported already
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_bytes(tensor: Any, what: str) -> npt.NDArray[np.uint8]:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise ValueError(f"{what} is a tensor on {tensor.device}: expected one in CPU memory")
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} is a sparse or a lazily conjugated tensor: copy it to contiguous memory")
    if tensor.ndim and tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"{what} is not contiguous (strides {tensor.stride()}); copy it to contiguous memory")
    return cast("npt.NDArray[np.uint8]", tensor.view(torch.uint8).numpy())


def as_array(value: Any, what: str) -> npt.NDArray[Any]:
    """Return `value` as a NumPy array over the same memory. Raises `TypeError` if it has no buffer, and `ValueError` if
    it is a tensor outside CPU memory."""
    if _is_tensor(value):
        return _tensor_bytes(value, what)
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.frombuffer(value, dtype=np.uint8)
    except (TypeError, ValueError, BufferError, AttributeError) as error:
        raise TypeError(
            f"{what} is of type {type(value).__name__}: expected an array, a CPU tensor or a buffer: {error}"
        ) from None


def as_rows(value: Any, block_bytes: int, what: str) -> Rows:
    """Return `value` as an `(n, block_bytes)` array of uint8 over the same memory. Each row must be contiguous, but
    gaps between rows are allowed.

    Raises `BlockSizeMismatch` if the rows have another size, and `ValueError` if a row is not contiguous.
    """
    array = as_array(value, what)
    if array.ndim == 0:
        raise ValueError(f"{what} is a scalar: expected an array of (n, {block_bytes}) bytes")
    if array.ndim == 1:
        data = _flat_bytes(array, what)
        if data.size % block_bytes:
            raise BlockSizeMismatch(f"{what} has {data.size} bytes: expected a multiple of block_bytes={block_bytes}")
        return data.reshape(-1, block_bytes)
    row_bytes = array.nbytes // len(array) if len(array) else block_bytes
    if row_bytes != block_bytes:
        raise BlockSizeMismatch(f"{what} has rows of {row_bytes} bytes: expected block_bytes={block_bytes}")
    if not len(array):
        return np.empty((0, block_bytes), dtype=np.uint8)
    if not array[0].flags.c_contiguous:
        raise ValueError(
            f"{what}: the bytes of a row are not contiguous (strides {array.strides}); copy the rows to contiguous "
            "memory"
        )
    return array.reshape(len(array), -1).view(np.uint8)


def _flat_bytes(array: npt.NDArray[Any], what: str) -> npt.NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} is not contiguous (strides {array.strides}); copy it to contiguous memory")
    return array.view(np.uint8)


def writable_rows(value: Any, block_bytes: int) -> Rows:
    """Like `as_rows`, for memory that receives blocks. Also raises `TypeError` for a list of blocks, and `ValueError`
    for read-only memory and for rows that share memory."""
    if isinstance(value, list | tuple):
        raise TypeError(
            f"out is of type {type(value).__name__}: expected one array, CPU tensor or buffer of (n, {block_bytes}) "
            "bytes, which receives all blocks"
        )
    rows = as_rows(value, block_bytes, "out")
    if not rows.flags.writeable:
        raise ValueError("out is read-only: expected writable memory for the blocks")
    if len(rows) > 1 and abs(rows.strides[0]) < block_bytes:  # an expanded tensor, for example
        raise ValueError(
            f"out: its rows begin {abs(rows.strides[0])} bytes apart and have {block_bytes} bytes, so several share "
            "memory: expected separate memory for each row, as after contiguous() or copy()"
        )
    return rows


class ResultMemory:
    """Memory for results, which is used again when nothing refers to it any more. Thread-safe.

    The memory of the last result is kept. If it is larger than `KEPT_BUFFERS`, the kernel may reclaim its pages while
    the memory is not in use.
    """

    def __init__(self) -> None:
        self._kept: deque[ReusableMemory] = deque(maxlen=1)

    def take(self, nbytes: int) -> Rows:
        """Return an `(nbytes,)` array of uint8 with arbitrary content. Nothing else refers to its memory."""
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = None
        # A small result must not keep a large piece of memory in use.
        if memory is None or memory.in_use or not nbytes <= len(memory) <= max(KEPT_BUFFERS, 2 * nbytes):
            memory = ReusableMemory(nbytes, lend=nbytes > KEPT_BUFFERS)
        rows = np.frombuffer(memory, np.uint8, nbytes)
        self._kept.append(memory)
        return rows


class BlockSource:
    """The blocks of a SET in the caller's memory. Nothing is copied, so this memory must not change while a view of the
    blocks is in use. Raises `TypeError`, `ValueError` or `BlockSizeMismatch` for unsuitable blocks."""

    def __init__(self, blocks: Any, block_bytes: int) -> None:
        self._flat: memoryview | None = None
        self._address: npt.NDArray[np.int64] | None = None  # the address of `_flat`, or those of all `_views`
        self._views: Sequence[memoryview] = ()
        self.block_bytes = block_bytes
        if _is_tensor(blocks) or isinstance(blocks, np.ndarray):
            rows = as_rows(blocks, block_bytes, "blocks")
            self.count = len(rows)
            if rows.flags.c_contiguous:
                self._flat = memoryview(rows.reshape(-1))
            else:
                self._views = [memoryview(row) for row in rows]
            return
        if isinstance(blocks, bytes | bytearray | memoryview | str) or not isinstance(blocks, Iterable):
            raise TypeError(f"blocks is of type {type(blocks).__name__}: expected a sequence of buffers, or an array")
        self._views = [self._one(number, block) for number, block in enumerate(blocks)]
        self.count = len(self._views)

    def _one(self, number: int, block: Any) -> memoryview:
        if isinstance(block, bytes | bytearray):
            view = memoryview(block)
        else:
            view = memoryview(
                _flat_bytes(np.atleast_1d(as_array(block, f"block {number}")), f"block {number}").reshape(-1)
            )
        if len(view) != self.block_bytes:
            raise BlockSizeMismatch(
                f"block {number} has {len(view)} bytes: expected block_bytes={self.block_bytes} of the namespace"
            )
        return view

    def addresses(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the addresses of these blocks in this process's memory."""
        if self._address is None:
            views = self._views if self._flat is None else [self._flat]
            addresses = [np.frombuffer(view, np.uint8).__array_interface__["data"][0] for view in views]
            self._address = np.array(addresses, dtype=np.int64)
        return self._address[0] + numbers * self.block_bytes if self._flat is not None else self._address[numbers]

    def only_region(self) -> SharedRegion | None:
        """Return the one region that holds all blocks and that a server on this host can read, or None."""
        if not self.count or not any_regions():
            return None
        addresses = self.addresses(_FIRST if self._flat is not None else np.arange(self.count))
        first = int(addresses.min())
        last = first + (self.count - 1) * self.block_bytes if self._flat is not None else int(addresses.max())
        return region_of(first, last + self.block_bytes - first)

    def view(self, number: int) -> memoryview:
        """Return a view of one block."""
        if self._flat is None:
            return self._views[number]
        return self._flat[number * self.block_bytes : (number + 1) * self.block_bytes]

    def frames(
        self, head: bytes, numbers: npt.NDArray[np.int64], per_frame: int, sums: npt.NDArray[np.uint64] | None
    ) -> BlockFrames:
        """Return these blocks in the form that is sent: see `BlockFrames`."""
        if self._flat is not None:
            return BlockFrames(head, self._flat, self.block_bytes, per_frame, sums, numbers)
        return BlockFrames(head, map(self._views.__getitem__, numbers.tolist()), self.block_bytes, per_frame, sums)

    def views(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return a view of each of these blocks, in this order. If they are adjacent in one array, return one view."""
        if self._flat is not None and numbers[-1] - numbers[0] == len(numbers) - 1:
            first, block_bytes = numbers[0], self.block_bytes
            if list(numbers) == list(range(first, first + len(numbers))):
                return [self._flat[first * block_bytes : (first + len(numbers)) * block_bytes]]
        return [self.view(number) for number in numbers]
