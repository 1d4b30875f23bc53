"""The engine's paged KV cache, seen as blocks of bytes, and the copies of blocks between it and host memory.

vLLM hands over every layer's cache as a tensor of logical shape (num_blocks, heads, tokens, content), where content
is K and V together, with whatever strides the attention backend asked for. With small kernel blocks the shape is
(num_blocks * r, ...). The content is the backend's own (the CPU backend stores K in tiles of the instruction set), so a
block is opaque here: for every layer, in layer order, the page's bytes in the order they have in memory. This order
gives the longest runs to copy. ``description`` records it, because two engines that share blocks must have it in
common.

A block may be cut into parts of as many layers each, which are copied one by one, while others are still computed.
Then a row is one part, and each block has as many rows, one after the other.

Parts are copied straight between the paged tensors and the rows of a pool, one copy of every byte. ``kvstore._cext``
copies host tensors, within the call. Tensors of a CUDA device are copied on a side stream, as the dense runs of bytes
that ``runs`` finds.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvstore import _cext
from kvstore_client.engine.transfer_in import Rows
from kvstore_client.memory import host_memory
from kvstore_client.vllm.connector.device import Addresses, Fence, Runs, SideStreams, pinned_rows

logger = logging.getLogger(f"vllm.{__name__}")


def _shared_rows(rows: int, row_bytes: int) -> Rows | None:
    try:
        return host_memory(rows, row_bytes, wait=False)
    except OSError as error:
        logger.warning("kvstore: blocks are copied once more on their way to the server on this host: %s", error)
        return None


class Copy(Protocol):
    """A copy under way. The caller keeps it until it is done. Thread-safe."""

    def done(self) -> bool:
        """Whether the copy is done. Never blocks."""

    def wait(self) -> None:
        """Blocks until the copy is done."""

    def order(self) -> None:
        """Have what the calling thread's stream is given from now on wait for the copy. Never blocks."""


class FinishedCopy:
    """A copy that was complete when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order(self) -> None:
        pass


class BlockLayout:
    """Copies the parts of blocks between KV cache tensors and rows of ``part_bytes`` bytes: ``parts`` of them a block,
    1 unless that was asked for.

    The tensors belong to the engine and live as long as it does. For host tensors, the caller orders the copies with
    the model's own reads and writes; for tensors of a device see each method.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, ranges: int = 1, *, parts: int = 1
    ) -> None:
        """kv_caches: layer name -> tensor, as given to ``register_kv_caches``. Layers that share one cache appear
        once in a block. ranges: a part has so many ranges of heads, one after the other, each as a block of its own
        would be. parts: of consecutive layers, as many in each. Raises ValueError when there is no cache, when the
        pages of the layers have different shapes or cannot be cut into these ranges, when the layers cannot be cut
        into these parts, or when the tensors lie neither on the CPU nor on one CUDA device."""
        distinct: dict[tuple[object, ...], torch.Tensor] = {}
        sharing: dict[str, int] = {}  # layer name -> the number of its cache
        for name in sorted(kv_caches, key=_layer_order):
            tensor = kv_caches[name]
            cache = (tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype)
            distinct.setdefault(cache, tensor)
            sharing[name] = list(distinct).index(cache)
        whole = list(distinct.values())
        if not whole:
            raise ValueError("kvstore: the engine registered no KV cache, there is nothing to store")
        if len(whole) % parts:
            raise ValueError(
                f"kvstore: layer_parts is {parts}, but a block has the caches of {len(whole)} layers on this rank; "
                "expected a divisor of that"
            )
        layers = len(whole) // parts
        by_part = [
            [piece for cut in zip(*(_cut(tensor, ranges) for tensor in some), strict=True) for piece in cut]
            for some in (whole[first : first + layers] for first in range(0, len(whole), layers))
        ]
        tensors = list(itertools.chain.from_iterable(by_part))

        self.num_blocks = num_blocks
        self.parts = parts
        # All layers that read or write a part.
        self.layers = [
            frozenset(name for name, cache in sharing.items() if cache // layers == part) for part in range(parts)
        ]
        paged = [[_pages_of_bytes(tensor, num_blocks) for tensor in some] for some in by_part]
        pages = list(itertools.chain.from_iterable(paged))
        shapes = {tuple(page.shape[1:]) for page in pages}
        if len(shapes) > 1:
            raise ValueError(
                f"kvstore: the layers' KV cache pages differ in shape ({sorted(shapes)}); "
                "only models whose layers all have the same page are supported"
            )
        devices = {tensor.device for tensor in tensors}
        self._device = devices.pop()
        if devices or self._device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"kvstore: the KV cache lies on {', '.join(sorted(map(str, (*devices, self._device))))}; "
                "it must lie on the CPU or on one CUDA device"
            )
        # A host tensor and its array share memory, so scatter writes into the engine's cache.
        self._arrays = [[page.numpy() for page in some] for some in paged] if self._device.type == "cpu" else None
        self._streams = SideStreams(self._device) if self._device.type == "cuda" else None
        self._runs = [_runs_of(some) for some in paged]

        self.part_bytes = int(self._runs[0].sizes.sum())
        self.dtype = str(tensors[0].dtype).removeprefix("torch.")
        order = "".join("bhnc"[axis] for axis in _memory_order(tensors[0])) if tensors[0].ndim == 4 else "raw"
        inner = "x".join(str(size) for size in tensors[0].shape[1:])
        self.description = f"{len(whole)}x{order}({inner})"

    @property
    def block_bytes(self) -> int:
        """The size of all parts of a block."""
        return self.part_bytes * self.parts

    def pool(self, rows: int, shared: bool = False) -> Rows:
        """Uninitialized host memory of shape (rows, part_bytes), uint8: page-locked if the cache lies on a device,
        else pages that nobody has touched yet. `shared`: memory from which a server on this host copies blocks by
        itself, if the system has such memory."""
        memory = _shared_rows(rows, self.part_bytes) if shared else None
        if self._streams is not None:
            return pinned_rows(rows, self.part_bytes, self._device, memory)
        return np.empty((rows, self.part_bytes), dtype=np.uint8) if memory is None else memory

    def fence(self) -> Fence | None:
        """Called by the model's thread before other threads may call ``swap_in``, for each load. -> what its copies
        wait for: all work queued on the model's stream by now, such as writes of earlier steps to blocks that were
        given to another request since. Never blocks; None for host tensors."""
        return self._streams.fence() if self._streams is not None else None

    def swap_out(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], part: int = 0) -> Copy:
        """Copy this part of block ``block_ids[i]`` to ``pool[slots[i]]``, after all work queued on the calling thread's
        stream: the model's thread calls this behind the part's last layer. Host tensors: done on return. Devices: never
        blocks if the pool is page-locked memory from ``pool``.

        Until the copy is done, the blocks must not change and the slots must not be used. Raises IndexError for a block
        or a slot that does not exist and ValueError for a pool that does not fit, before any byte moves. If a slot is
        given twice, it is undefined which block it holds.
        """
        if self._streams is not None:
            return self._streams.copy_out(self.runs(block_ids, pool, slots, part), keep=pool)
        assert self._arrays is not None
        _cext.gather(self._arrays[part], _int64(block_ids), pool, slots=_int64(slots))
        return FinishedCopy()

    def swap_in(
        self, pool: Rows, slots: Sequence[int], block_ids: Sequence[int], after: Fence | None = None, part: int = 0
    ) -> Copy:
        """Copy ``pool[slots[i]]`` to this part of block ``block_ids[i]``. Called by any thread. Host tensors: done on
        return. Devices: after the ``fence``; without one, after all work that was queued, for which the call waits.

        From the fence until the copy is done, nobody else may use these blocks or change the slots. Raises as
        ``swap_out``. One slot may be copied to several blocks.
        """
        if self._streams is not None:
            return self._streams.copy_in(self.runs(block_ids, pool, slots, part), pool, after)
        assert self._arrays is not None
        _cext.scatter(pool, self._arrays[part], _int64(block_ids), slots=_int64(slots))
        return FinishedCopy()

    def runs(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], part: int = 0) -> Runs:
        """Where the bytes of this part of these blocks lie, in the cache and in the rows of the pool, as few dense runs
        as possible. Raises as ``swap_out``."""
        if pool.dtype != np.uint8 or pool.shape[1:] != (self.part_bytes,) or (len(pool) and pool.strides[1] != 1):
            raise ValueError(
                f"kvstore: the pool must be dense rows of {self.part_bytes} bytes, got shape {pool.shape} "
                f"of {pool.dtype}, strides {pool.strides}"
            )
        if len(block_ids) != len(slots):
            raise ValueError(f"kvstore: {len(block_ids)} blocks cannot be copied from or to {len(slots)} slots")
        ids = _checked(block_ids, self.num_blocks, "block")
        places = _checked(slots, len(pool), "slot")
        runs = self._runs[part]
        cache = runs.addresses + ids[:, np.newaxis] * runs.strides
        rows = runs.offsets + (pool.ctypes.data + places[:, np.newaxis] * pool.strides[0])
        return Runs(cache.ravel(), rows.ravel(), np.tile(runs.sizes, len(ids)))


def _cut(tensor: torch.Tensor, ranges: int) -> list[torch.Tensor]:
    """The ranges of heads of a layer's cache. Raises ValueError if it has no heads to cut."""
    if ranges == 1:
        return [tensor]
    if tensor.ndim != 4 or tensor.shape[1] % ranges:
        raise ValueError(
            f"kvstore: a KV cache tensor of shape {tuple(tensor.shape)} cannot be cut into {ranges} ranges of heads; "
            "expected (blocks, heads, tokens, content), and a multiple of so many heads. Leave out head_shards"
        )
    return list(tensor.chunk(ranges, dim=1))


class _PartRuns(NamedTuple):
    """The dense runs of one part of a block, in the order of its bytes: their ``addresses`` in block 0, the ``strides``
    to the next block, their ``offsets`` in a row and their ``sizes``, all in bytes."""

    addresses: Addresses
    strides: Addresses
    offsets: Addresses
    sizes: Addresses


def _runs_of(pages: Sequence[torch.Tensor]) -> _PartRuns:
    """The runs of all pages. Adjoining runs, such as those of layers that lie side by side, become one."""
    runs: list[tuple[int, int, int]] = []  # address, stride, size
    for page in pages:
        starts, size = _dense_runs(page)
        for start in starts:
            address, stride = page.data_ptr() + int(start), page.stride(0)
            if runs and runs[-1][:2] == (address - runs[-1][2], stride):
                runs[-1] = (runs[-1][0], stride, runs[-1][2] + size)
            else:
                runs.append((address, stride, size))
    addresses, strides, sizes = np.array(runs, dtype=np.int64).T
    return _PartRuns(addresses, strides, np.cumsum(sizes) - sizes, sizes)


def _dense_runs(page: torch.Tensor) -> tuple[Addresses, int]:
    """Where the dense runs of one page of bytes start, and their size, which is the same for all."""
    axes: list[tuple[int, int]] = []  # size, stride; the innermost last
    for size, stride in zip(page.shape[1:], page.stride()[1:], strict=True):
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size > 1:
            axes.append((size, stride))
    run = axes.pop()[0] if axes and axes[-1][1] == 1 else 1
    starts = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        starts = (starts[:, np.newaxis] + np.arange(size) * stride).ravel()
    return starts, run


def _int64(indices: Sequence[int]) -> Addresses:
    return np.asarray(indices, dtype=np.int64)


def _checked(indices: Sequence[int], count: int, what: str) -> Addresses:
    checked = _int64(indices)
    wrong = checked[(checked < 0) | (checked >= count)]
    if len(wrong):
        raise IndexError(f"kvstore: {what} {wrong[0]} is not there, they are 0 .. {count - 1}; nothing was copied")
    return checked


def _layer_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 10 after layer 9: digits compare as numbers."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name) if part]


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The block axis, then those of size 1, whose strides say nothing, then the others from the largest stride to the
    smallest."""
    inner = sorted(range(1, tensor.ndim), key=lambda axis: (tensor.shape[axis] > 1, -tensor.stride(axis), axis))
    return [0, *inner]


def _pages_of_bytes(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view (num_blocks, ...) of bytes, inner axes in memory order; a dense page becomes one axis. Raises ValueError
    for a tensor whose bytes cannot be viewed like that."""
    if tensor.shape[0] % num_blocks:
        raise ValueError(
            f"kvstore: a KV cache tensor has shape {tuple(tensor.shape)}, "
            f"which does not divide into {num_blocks} blocks"
        )
    ordered = tensor.permute(_memory_order(tensor))
    if ordered.stride(-1) != 1:
        raise ValueError(
            f"kvstore: a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "has no contiguous axis, its bytes cannot be viewed"
        )
    pages = ordered.view(torch.uint8)
    if tensor.shape[0] != num_blocks:
        pages = pages.unflatten(0, (num_blocks, -1))
    try:
        return pages.view(num_blocks, -1)
    except RuntimeError:  # strides with gaps, or the heads' axis outside the blocks': the copies walk the axes
        return pages
