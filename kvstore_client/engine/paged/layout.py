"""The engine's paged KV cache, seen as blocks of bytes, and the copies of blocks between it and host memory.

An engine hands over every layer's cache as a tensor of logical shape (num_blocks, heads, tokens, content), where
content is K and V together, with whatever strides the attention backend asked for. With small kernel blocks the shape
is (num_blocks * r, ...). The content is the backend's own (the CPU backend stores K in tiles of the instruction set),
so a block is opaque here: for every layer, in layer order, the page's bytes in the order they have in memory. This
order gives the longest runs to copy. ``description`` records it, because two engines that share blocks must have it in
common.

Layers may have pages of different sizes. In a model with several groups of layers, caches of different groups lie over
each other, since a block belongs to one group at a time; if their pages differ, such as those of attention and of
states, the block has all bytes that any of them covers.

A block may be cut into parts of as many layers each, which are copied one by one, while others are still computed.
Then a row is one part, and each block has as many rows, one after the other.

Parts are copied straight between the paged tensors and the rows of a pool, one copy of every byte. ``kvstore._cext``
copies host tensors: within the call, but for large copies out of the cache, which a thread makes. Tensors of a CUDA
device are copied on a side stream, as the dense runs of bytes that ``runs`` finds.
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
from kvstore_client.engine.paged.cache_pages import dense_runs, kind, merged_caches, pages_of_bytes
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
    """A copy under way. The caller keeps it until it is done. Thread-safe."""

    def done(self) -> bool:
        """Whether the copy is done. Never blocks."""

    def wait(self) -> None:
        """Blocks until the copy is done."""

    def order(self) -> None:
        """Have what the calling thread's stream is given from now on wait for the copy. Devices: never blocks. Host
        tensors: blocks until the copy is done."""


class FinishedCopy:
    """A copy that was complete when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order(self) -> None:
        pass


class DetachedError(RuntimeError):
    """The cache's memory is not there: the engine sleeps."""

    def __init__(self) -> None:
        super().__init__("kvstore: the engine sleeps, so its KV cache is not in memory; expected one that is awake")


def rows_of(slots: Sequence[int], parts: int, part: int) -> list[int]:
    """The rows of the host pool where this one of so many parts of the blocks in these slots is."""
    return [slot * parts + part for slot in slots]


class BlockLayout:
    """Copies the parts of blocks between KV cache tensors and rows of ``part_bytes`` bytes: ``parts`` of them a block,
    1 unless that was asked for.

    The tensors belong to the engine and live as long as it does, at one address; their memory may be taken away and be
    given back in between, see ``detach``. For host tensors, the caller orders the copies with the model's own reads and
    writes; for tensors of a device see each method.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, ranges: int = 1, *, parts: int = 1
    ) -> None:
        """kv_caches: layer name -> tensor, as given to ``register_kv_caches``. Layers that share one cache appear
        once in a block. ranges: a part has so many ranges of heads, one after the other, each as a block of its own
        would be. parts: of consecutive layers, as many in each. Raises ValueError when there is no cache, when the
        pages of the layers overlap in part or cannot be cut into these ranges, when the layers cannot be cut
        into these parts, or when the tensors lie neither on the CPU nor on one CUDA device."""
        views: dict[tuple[object, ...], torch.Tensor] = {}
        viewing: dict[str, int] = {}  # layer name -> the number of its view
        for name in sorted(kv_caches, key=_layer_order):
            tensor = kv_caches[name]
            view = (tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype)
            views.setdefault(view, tensor)
            viewing[name] = list(views).index(view)
        if not views:
            raise ValueError("kvstore: the engine registered no KV cache, there is nothing to store")
        whole, numbers = merged_caches(list(views.values()), num_blocks)
        sharing = {name: numbers[view] for name, view in viewing.items()}  # layer name -> the number of its cache
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
        paged = [[pages_of_bytes(tensor, num_blocks) for tensor in some] for some in by_part]
        devices = {tensor.device for tensor in tensors}
        self._device = devices.pop()
        if devices or self._device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"kvstore: the KV cache lies on {', '.join(sorted(map(str, (*devices, self._device))))}; "
                "it must lie on the CPU or on one CUDA device"
            )
        self._strips = [_strips(some) for some in paged] if self._device.type == "cpu" else None
        self._host_copies = HostCopies()  # has no thread before it is used
        self._streams = SideStreams(self._device) if self._device.type == "cuda" else None
        self._runs = [_runs_of(some) for some in paged]
        self._access = threading.Condition()
        self._detached = False
        self._starting = 0  # calls that begin a copy, or make one

        sizes = {int(runs.sizes.sum()) for runs in self._runs}
        if len(sizes) > 1:
            raise ValueError(
                f"kvstore: layer_parts is {parts}, but the layers of this model differ in their pages, so parts of as "
                f"many layers have {', '.join(map(str, sorted(sizes)))} bytes; expected one size. Leave out layer_parts"
            )
        [self.part_bytes] = sizes
        # One layer of each range of heads says it for all: the ranges of a page are alike.
        kinds = Counter(kind(_cut(tensor, ranges)[0]) for tensor in views.values())
        self.dtype = "/".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in views.values()))
        self.description = "+".join(f"{count}x{kind}" for kind, count in kinds.items())
        if len(whole) < len(views):
            self.description += f"@{len(whole)}"

    @property
    def block_bytes(self) -> int:
        """The size of all parts of a block."""
        return self.part_bytes * self.parts

    @property
    def on_gpu(self) -> bool:
        """Whether the cache lies on a device."""
        return self._streams is not None

    def pool(self, rows: int, shared: bool = False) -> Rows:
        """Uninitialized host memory of shape (rows, part_bytes), uint8: page-locked if the cache lies on a device,
        else pages that nobody has touched yet. `shared`: memory from which a server on this host copies blocks by
        itself, if the system has such memory."""
        memory = _shared_rows(rows, self.part_bytes) if shared else None
        if memory is not None:
            return self.locked(memory)
        if self._streams is not None:
            return pinned_rows(rows, self.part_bytes, self._device)
        return np.empty((rows, self.part_bytes), dtype=np.uint8)

    def locked(self, pool: Rows) -> Rows:
        """The same memory, from `host_memory`: page-locked if the cache lies on a device."""
        return pool if self._streams is None else pinned_rows(len(pool), self.part_bytes, self._device, pool)

    def detach(self) -> None:
        """The cache's memory is about to be taken away. When this returns, no copy is under way that a device makes, or
        into host tensors, and none begins before ``attach``. Waits for those that have begun."""
        with self._access:
            self._detached = True
            self._access.wait_for(lambda: not self._starting)
        if self._streams is not None:
            torch.cuda.synchronize(self._device)

    def attach(self) -> None:
        """The cache's memory is there again, with anything in it."""
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
        """Called by the model's thread before other threads may call ``swap_in``, for each load. -> what its copies
        wait for: all work queued on the model's stream by now, such as writes of earlier steps to blocks that were
        given to another request since. Never blocks; None for host tensors."""
        return self._streams.fence() if self._streams is not None else None

    def swap_out(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], part: int = 0) -> Copy:
        """Copy this part of block ``block_ids[i]`` to ``pool[slots[i]]``, after all work queued on the calling thread's
        stream: the model's thread calls this behind the part's last layer. Host tensors: done on return up to
        `AT_ONCE_BYTES`, else in the background. Devices: never blocks if the pool is page-locked memory from ``pool``.

        Until the copy is done, the blocks must not change and the slots must not be used. Raises IndexError for a block
        or a slot that does not exist, ValueError for a pool that does not fit, and DetachedError, before any byte
        moves. If a slot is given twice, it is undefined which block it holds.
        """
        with self._attached():
            if self._streams is not None:
                return self._streams.copy_out(self.runs(block_ids, pool, slots, part), keep=pool)
            self._check_rows(pool)
            ids, places = self._checked_indices(block_ids, pool, slots)
            if len(ids) * self.part_bytes > AT_ONCE_BYTES:
                return self._host_copies.start(functools.partial(self._gather, ids, pool, places, part))
            self._gather(ids, pool, places, part)
            return FinishedCopy()

    def _gather(self, block_ids: Addresses, pool: Rows, slots: Addresses, part: int) -> None:
        for strip, rows in self._by_strip(pool, part):
            _cext.gather(strip, block_ids, rows, slots=slots)

    def swap_in(
        self, pool: Rows, slots: Sequence[int], block_ids: Sequence[int], after: Fence | None = None, part: int = 0
    ) -> Copy:
        """Copy ``pool[slots[i]]`` to this part of block ``block_ids[i]``. Called by any thread. Host tensors: done on
        return. Devices: after the ``fence``; without one, after all work that was queued, for which the call waits.

        From the fence until the copy is done, nobody else may use these blocks or change the slots. Raises as
        ``swap_out``. One slot may be copied to several blocks.
        """
        with self._attached():
            if self._streams is not None:
                return self._streams.copy_in(self.runs(block_ids, pool, slots, part), pool, after)
            self._check_rows(pool)
            for strip, rows in self._by_strip(pool, part):
                _cext.scatter(rows, strip, _int64(block_ids), slots=_int64(slots))
            return FinishedCopy()

    def runs(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], part: int = 0) -> Runs:
        """Where the bytes of this part of these blocks lie, in the cache and in the rows of the pool, as few dense runs
        as possible. Raises as ``swap_out``."""
        self._check_rows(pool)
        ids, places = self._checked_indices(block_ids, pool, slots)
        runs = self._runs[part]
        cache = runs.addresses + ids[:, np.newaxis] * runs.strides
        rows = runs.offsets + (pool.ctypes.data + places[:, np.newaxis] * pool.strides[0])
        return Runs(cache.ravel(), rows.ravel(), np.tile(runs.sizes, len(ids)))

    def _checked_indices(
        self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int]
    ) -> tuple[Addresses, Addresses]:
        if len(block_ids) != len(slots):
            raise ValueError(f"kvstore: {len(block_ids)} blocks cannot be copied from or to {len(slots)} slots")
        return _checked(block_ids, self.num_blocks, "block"), _checked(slots, len(pool), "slot")

    def _by_strip(self, pool: Rows, part: int) -> Iterator[tuple[Sequence[Rows], Rows]]:
        """Pages of one shape, and the columns of the pool for them; for all of a part."""
        assert self._strips is not None
        for strip in self._strips[part]:
            yield strip.pages, pool[:, strip.first : strip.end]

    def _check_rows(self, pool: Rows) -> None:
        if pool.dtype != np.uint8 or pool.shape[1:] != (self.part_bytes,) or (len(pool) and pool.strides[1] != 1):
            raise ValueError(
                f"kvstore: the pool must be dense rows of {self.part_bytes} bytes, got shape {pool.shape} "
                f"of {pool.dtype}, strides {pool.strides}"
            )


class _Strip(NamedTuple):
    """Pages of one shape that follow each other in a row, and the bytes of the row that they are."""

    pages: list[Rows]
    first: int
    end: int


def _strips(pages: Sequence[torch.Tensor]) -> list[_Strip]:
    """Those of a part. A host tensor and its array share memory, so scatter writes into the engine's cache."""
    strips: list[_Strip] = []
    end = 0
    for _, some in itertools.groupby(pages, lambda page: page.shape[1:]):
        arrays = [page.numpy() for page in some]
        first, end = end, end + sum(array[0].nbytes for array in arrays)
        strips.append(_Strip(arrays, first, end))
    return strips


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
        starts, size = dense_runs(page)
        for start in starts:
            address, stride = page.data_ptr() + int(start), page.stride(0)
            if runs and runs[-1][:2] == (address - runs[-1][2], stride):
                runs[-1] = (runs[-1][0], stride, runs[-1][2] + size)
            else:
                runs.append((address, stride, size))
    addresses, strides, sizes = np.array(runs, dtype=np.int64).T
    return _PartRuns(addresses, strides, np.cumsum(sizes) - sizes, sizes)


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
