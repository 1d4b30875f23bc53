"""Presents the engine's paged KV cache as blocks of bytes, and copies these blocks from and to host memory.

An engine passes the cache of every layer as a tensor. The tensor's logical shape is (num_blocks, heads, tokens,
content), where content is K and V together. The strides are chosen by the attention backend. If the kernel's blocks are
smaller than the engine's, the shape is (num_blocks * r, ...).

The content has the backend's own format. For example, the CPU backend stores K in tiles of the instruction set. So this
module treats a block as opaque bytes. A block has the bytes of the page of every layer, in layer order. Within a page,
the bytes are in memory order, which gives the longest runs to copy. `description` records this order, because engines
that share blocks must use the same one.

Layers may have pages of different sizes. In a model with several groups of layers, caches of different groups overlay
each other, because a block belongs to only one group at a time. If the pages of these groups differ, as those of
attention and of states do, the block has all bytes that any of the pages covers.

A block may be cut into slices, each with the same number of layers. Each slice can be copied while later ones are still
being computed. A row then has one slice, and the slices of a block are in consecutive rows.

Slices are copied directly between the paged tensors and the rows of a pool, so every byte is copied once. Host tensors
are copied by `kvstore._cext`. It copies within the call, except for large copies out of the cache, which a thread
makes. Tensors of a CUDA device are copied on a side stream, as the dense runs of bytes that `runs` finds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvstore import _cext
from kvstore_client.engine.jobs import Rows
from kvstore_client.engine.paged.cache_pages import check_caches, dense_runs, kind, merged_caches, pages_of_bytes
from kvstore_client.engine.paged.device import Addresses, Fence, Runs, SideStreams, pinned_rows
from kvstore_client.engine.paged.host_copies import AT_ONCE_BYTES, HostCopies
from kvstore_client.memory import host_memory

log = logging.getLogger("kvstore_client")


def _shared_rows(rows: int, row_bytes: int) -> Rows | None:
    try:
        return host_memory(rows, row_bytes, wait=False)
    except OSError as error:
        log.warning("kvstore: blocks are copied once more on their way to the server on this host: %s", error)
        return None


class Copy(Protocol):
    """A copy in progress. The caller keeps it until it is done. Thread-safe."""

    def done(self) -> bool:
        """Return whether the copy is done. Never blocks."""

    def wait(self) -> None:
        """Block until the copy is done."""

    def order(self) -> None:
        """Make all work that is queued on the calling thread's stream from now on wait for the copy. For a device, this
        never blocks. For host tensors, it blocks until the copy is done."""


class FinishedCopy:
    """A copy that was complete when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order(self) -> None:
        pass


class DetachedError(RuntimeError):
    """The cache's memory is not available, because the engine sleeps."""

    def __init__(self) -> None:
        super().__init__("kvstore: the engine sleeps, so its KV cache is not in memory; expected one that is awake")


def rows_of(slots: Sequence[int], slices: int, slice_index: int) -> list[int]:
    """Return the rows of the host pool that have slice `slice_index` of the blocks in these slots. `slices`: the number
    of slices of a block."""
    return [slot * slices + slice_index for slot in slots]


class BlockLayout:
    """Copies the slices of blocks between KV cache tensors and rows. A row has `slice_bytes` bytes. A block has
    `slices` slices, by default 1.

    The tensors belong to the engine and exist as long as it does, always at the same address. Their memory may be freed
    and allocated again meanwhile; see `detach`. For host tensors, the caller must order the copies with the model's own
    reads and writes. For tensors of a device, see each method.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, ranges: int = 1, *, slices: int = 1
    ) -> None:
        """Raises TypeError if `kv_caches` is no mapping to tensors. Raises ValueError if there are no tensors, if they
        are not all on the CPU or all on one CUDA device, or if pages overlap in part. It is also raised if the layers
        cannot be cut into these ranges or slices.

        kv_caches: the tensor of each layer, by layer name, as passed to `register_kv_caches`. Its first dimension is a
            multiple of `num_blocks`. If K and V have a tensor each, both have a name. If several layers share a cache,
            a block has it once.
        ranges: the number of consecutive ranges of heads in a slice. Each has the bytes of a block of only these heads.
        slices: the number of slices of a block. Each has the same number of consecutive layers.
        """
        views, viewing = _views(kv_caches)
        whole, numbers = merged_caches(views, num_blocks)
        sharing = {name: numbers[view] for name, view in viewing.items()}  # the number of each layer's cache
        if len(whole) % slices:
            raise ValueError(
                f"kvstore: layer_parts is {slices}, but a block has the caches of {len(whole)} layers on this rank; "
                "expected a divisor of this number"
            )
        layers = len(whole) // slices
        by_slice = [
            [piece for cut in zip(*(_cut(tensor, ranges) for tensor in some), strict=True) for piece in cut]
            for some in (whole[first : first + layers] for first in range(0, len(whole), layers))
        ]
        tensors = list(itertools.chain.from_iterable(by_slice))

        self.num_blocks = num_blocks
        self.slices = slices
        # For each slice, all layers that read or write it.
        self.layers = [
            frozenset(name for name, cache in sharing.items() if cache // layers == slice_index)
            for slice_index in range(slices)
        ]
        paged = [[pages_of_bytes(tensor, num_blocks) for tensor in some] for some in by_slice]
        devices = {tensor.device for tensor in tensors}
        self._device = devices.pop()
        if devices or self._device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"kvstore: the KV cache lies on {', '.join(sorted(map(str, (*devices, self._device))))}; "
                "it must lie on the CPU or on one CUDA device"
            )
        self._strips = [_strips(some) for some in paged] if self._device.type == "cpu" else None
        self._host_copies = HostCopies()  # starts its thread when it is first used
        self._streams = SideStreams(self._device) if self._device.type == "cuda" else None
        self._runs = [_runs_of(some) for some in paged]
        self._access = threading.Condition()
        self._detached = False
        self._starting = 0  # calls that are starting or making a copy

        sizes = {int(runs.sizes.sum()) for runs in self._runs}
        if len(sizes) > 1:
            raise ValueError(
                f"kvstore: layer_parts is {slices}, but the layers of this model differ in their pages, so slices with "
                f"the same number of layers have {', '.join(map(str, sorted(sizes)))} bytes. Leave out layer_parts"
            )
        [self.slice_bytes] = sizes
        # The first range of heads of each layer is enough, because all ranges of a page are alike.
        kinds = Counter(kind(_cut(tensor, ranges)[0]) for tensor in views)
        self.dtype = "/".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in views))
        self.description = "+".join(f"{count}x{kind}" for kind, count in kinds.items())
        if len(whole) < len(views):
            self.description += f"@{len(whole)}"

    @property
    def block_bytes(self) -> int:
        """The size of all slices of a block together, in bytes."""
        return self.slice_bytes * self.slices

    @property
    def on_gpu(self) -> bool:
        """Whether the cache is on a device."""
        return self._streams is not None

    def pool(self, rows: int, shared: bool = False) -> Rows:
        """Return uninitialized host memory of shape (rows, slice_bytes) and type uint8. If the cache is on a device,
        the memory is page-locked; otherwise its pages are untouched. `shared`: whether to use memory from which a
        server on this host can itself copy blocks, if the system supports it."""
        memory = _shared_rows(rows, self.slice_bytes) if shared else None
        if memory is not None:
            return self.locked(memory)
        if self._streams is not None:
            return pinned_rows(rows, self.slice_bytes, self._device)
        return np.empty((rows, self.slice_bytes), dtype=np.uint8)

    def locked(self, pool: Rows) -> Rows:
        """Return the same memory, which must come from `host_memory`. It is page-locked if the cache is on a device."""
        return pool if self._streams is None else pinned_rows(len(pool), self.slice_bytes, self._device, pool)

    def detach(self) -> None:
        """Prepare for the cache's memory to be freed. This waits for copies that have begun. When it returns, no copy
        by a device or into host tensors is in progress, and none begins before `attach`."""
        with self._access:
            self._detached = True
            self._access.wait_for(lambda: not self._starting)
        if self._streams is not None:
            torch.cuda.synchronize(self._device)

    def attach(self) -> None:
        """Allow copies again, because the cache's memory is back. Its content does not matter."""
        with self._access:
            self._detached = False

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        with self._access:
            if self._detached:
                raise DetachedError
            self._starting += 1
        try:
            yield
        finally:
            with self._access:
                self._starting -= 1
                self._access.notify_all()

    def fence(self) -> Fence | None:
        """Return the fence of a load, or None for host tensors. The load's copies then wait for all work that is queued
        on the model's stream now. This work may include writes of earlier steps to blocks that now belong to another
        request. For each load, the model's thread must call this before other threads call `swap_in`. Never blocks."""
        return self._streams.fence() if self._streams is not None else None

    def swap_out(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], slice_index: int = 0) -> Copy:
        """Copy this slice of block `block_ids[i]` to `pool[slots[i]]`, after all work queued on the calling thread's
        stream. The model's thread calls this after the slice's last layer. For host tensors, a copy of up to
        `AT_ONCE_BYTES` is done on return, and a larger one runs in the background. For a device, this never blocks if
        the pool is page-locked memory from `pool`.

        Until the copy is done, the blocks must not change and the slots must not be used. Raises IndexError for a block
        or a slot that does not exist, ValueError for a pool of another shape, and DetachedError after `detach`. After
        an error, nothing was copied. If a slot is given twice, it is undefined which block it gets.
        """
        with self._attached():
            if self._streams is not None:
                return self._streams.copy_out(self.runs(block_ids, pool, slots, slice_index), keep=pool)
            self._check_rows(pool)
            ids, places = self._checked_indices(block_ids, pool, slots)
            if len(ids) * self.slice_bytes > AT_ONCE_BYTES:
                return self._host_copies.start(functools.partial(self._gather, ids, pool, places, slice_index))
            self._gather(ids, pool, places, slice_index)
            return FinishedCopy()

    def _gather(self, block_ids: Addresses, pool: Rows, slots: Addresses, slice_index: int) -> None:
        for strip, rows in self._by_strip(pool, slice_index):
            _cext.gather(strip, block_ids, rows, slots=slots)

    def swap_in(
        self,
        pool: Rows,
        slots: Sequence[int],
        block_ids: Sequence[int],
        after: Fence | None = None,
        slice_index: int = 0,
    ) -> Copy:
        """Copy `pool[slots[i]]` to this slice of block `block_ids[i]`. Any thread may call this. For host tensors, the
        copy is done on return. For a device, the copy waits for the fence `after`. Without a fence, the call itself
        waits for all queued work.

        From the fence until the copy is done, no other code may use these blocks or change the slots. Raises the same
        errors as `swap_out`. A slot may be copied to several blocks.
        """
        with self._attached():
            if self._streams is not None:
                return self._streams.copy_in(self.runs(block_ids, pool, slots, slice_index), pool, after)
            self._check_rows(pool)
            for strip, rows in self._by_strip(pool, slice_index):
                _cext.scatter(rows, strip, _int64(block_ids), slots=_int64(slots))
            return FinishedCopy()

    def runs(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], slice_index: int = 0) -> Runs:
        """Return the addresses of this slice of these blocks, both in the cache and in the rows of the pool, as the
        fewest dense runs. Raises the same errors as `swap_out`, except DetachedError."""
        self._check_rows(pool)
        ids, places = self._checked_indices(block_ids, pool, slots)
        runs = self._runs[slice_index]
        cache = runs.addresses + ids[:, np.newaxis] * runs.strides
        rows = runs.offsets + (pool.ctypes.data + places[:, np.newaxis] * pool.strides[0])
        return Runs(cache.ravel(), rows.ravel(), np.tile(runs.sizes, len(ids)))

    def _checked_indices(
        self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int]
    ) -> tuple[Addresses, Addresses]:
        if len(block_ids) != len(slots):
            raise ValueError(f"kvstore: {len(block_ids)} blocks cannot be copied from or to {len(slots)} slots")
        return _checked(block_ids, self.num_blocks, "block"), _checked(slots, len(pool), "slot")

    def _by_strip(self, pool: Rows, slice_index: int) -> Iterator[tuple[Sequence[Rows], Rows]]:
        """For each strip of the slice, yield its pages and the columns of the pool that have their bytes."""
        assert self._strips is not None
        for strip in self._strips[slice_index]:
            yield strip.pages, pool[:, strip.first : strip.end]

    def _check_rows(self, pool: Rows) -> None:
        if pool.dtype != np.uint8 or pool.shape[1:] != (self.slice_bytes,) or (len(pool) and pool.strides[1] != 1):
            raise ValueError(
                f"kvstore: the pool has shape {pool.shape}, type {pool.dtype} and strides {pool.strides}; expected "
                f"dense rows of {self.slice_bytes} bytes, of type uint8"
            )


def _views(kv_caches: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Return the distinct views of the layers' caches, in layer order, and for each layer the number of its view.
    Raises TypeError if these are not tensors by layer name, and ValueError if there are none."""
    check_caches(kv_caches)
    views: dict[tuple[object, ...], torch.Tensor] = {}
    viewing: dict[str, int] = {}
    for name in sorted(kv_caches, key=_layer_order):
        tensor = kv_caches[name]
        view = (tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype)
        views.setdefault(view, tensor)
        viewing[name] = list(views).index(view)
    if not views:
        raise ValueError("kvstore: the engine registered no KV cache, so there is nothing to store")
    return list(views.values()), viewing


class _Strip(NamedTuple):
    """Consecutive pages of the same shape. Their bytes are those from `first` to `end` of a row."""

    pages: list[Rows]
    first: int
    end: int


def _strips(pages: Sequence[torch.Tensor]) -> list[_Strip]:
    """Return the strips of a slice. A host tensor and its array share memory, so `_cext.scatter` writes into the
    engine's cache."""
    strips: list[_Strip] = []
    end = 0
    for _, some in itertools.groupby(pages, lambda page: page.shape[1:]):
        arrays = [page.numpy() for page in some]
        first, end = end, end + sum(array[0].nbytes for array in arrays)
        strips.append(_Strip(arrays, first, end))
    return strips


def _cut(tensor: torch.Tensor, ranges: int) -> list[torch.Tensor]:
    """Return a layer's cache cut into ranges of heads. Raises ValueError if the cache cannot be cut in this way."""
    if ranges == 1:
        return [tensor]
    if tensor.ndim != 4 or tensor.shape[1] % ranges:
        raise ValueError(
            f"kvstore: a KV cache tensor of shape {tuple(tensor.shape)} cannot be cut into {ranges} ranges of heads; "
            "expected (blocks, heads, tokens, content), with a multiple of that number of heads. Leave out head_shards"
        )
    return list(tensor.chunk(ranges, dim=1))


class _SliceRuns(NamedTuple):
    """The dense runs of one slice of a block, in the order of its bytes. `addresses` are those in block 0, `strides`
    are the distances to the next block, and `offsets` are the positions in a row. All values are in bytes."""

    addresses: Addresses
    strides: Addresses
    offsets: Addresses
    sizes: Addresses


def _runs_of(pages: Sequence[torch.Tensor]) -> _SliceRuns:
    """Return the runs of all pages. Adjoining runs, such as those of layers that are adjacent in memory, become one
    run."""
    runs: list[tuple[int, int, int]] = []  # address, stride, size
    for page in pages:
        starts, size = dense_runs(page)
        for start in starts:
            address, stride = page.data_ptr() + int(start), page.stride(0)
            if runs and runs[-1][:2] == (address - runs[-1][2], stride):
                runs[-1] = (runs[-1][0], stride, runs[-1][2] + size)
            else:
                runs.append((address, stride, size))
    addresses, strides, sizes = np.array(runs, dtype=np.int64).T
    return _SliceRuns(addresses, strides, np.cumsum(sizes) - sizes, sizes)


def _int64(indices: Sequence[int]) -> Addresses:
    return np.asarray(indices, dtype=np.int64)


def _checked(indices: Sequence[int], count: int, what: str) -> Addresses:
    checked = _int64(indices)
    wrong = checked[(checked < 0) | (checked >= count)]
    if len(wrong):
        raise IndexError(f"kvstore: {what} {wrong[0]} does not exist, expected 0 to {count - 1}; nothing was copied")
    return checked


def _layer_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares digits as numbers, so that layer 10 comes after layer 9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name) if part]
