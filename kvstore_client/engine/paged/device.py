"""Makes copies between a CUDA device and host memory, on other streams than the model's.

All copies out of the cache use one side stream, and each load uses a stream of its own. So neither direction waits for
the other, and no load waits for another one. An event on the model's stream orders a copy with the model's work. A copy
out of the cache waits for all work that was queued before it. A copy into the cache waits for all work that was queued
before the ``Fence`` of its load. The fence is needed because the engine may be a step ahead of its GPU. A step that was
queued earlier may still write to blocks that the scheduler has meanwhile freed and given to another request.

One call passes up to `RUNS_PER_CALL` runs of a copy to the driver. This module runs no kernels and allocates no device
memory.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.int64]


class BatchedCopy(Protocol):
    """A function that queues copies. `src`, `dst`, `sizes`: the addresses and sizes in bytes, as int64 tensors in host
    memory. `is_src_access_order_any`: whether the sources may be read before the stream reaches the copy, because no
    queued work writes to them."""

    def __call__(
        self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, /, *, is_src_access_order_any: bool = False
    ) -> None: ...


def _no_adapter() -> NoReturn:
    raise RuntimeError(
        f"kvstore: the KV cache is on a device, but no function copies from and to it; the engine's adapter must set "
        f"batched_copy and host_register in {__name__}"
    )


# Copies from and to a device need two functions of its driver. Engines have them, so an engine's adapter sets both
# variables before it makes a layout of tensors on a device.
#
# batched_copy: returns a function that queues copies on the current stream. For every i, it copies `sizes[i]` bytes
# from address `src[i]` to address `dst[i]`. Where possible, it uses one call to the driver (cuMemcpyBatchAsync, CUDA
# 12.8).
# host_register: returns two functions. The first page-locks memory, given as `(address, bytes)`. It returns False, and
# logs a warning, if the system refuses. The second unlocks the memory at an `address`.
batched_copy: Callable[[], BatchedCopy] = _no_adapter
host_register: Callable[[], tuple[Callable[[int, int], bool], Callable[[int], None]]] = _no_adapter

# Batches of over 50 000 runs are known to have crashed a driver. A call takes microseconds, so smaller batches cost
# almost nothing.
RUNS_PER_CALL = 8192
# Memory is locked in pieces of about this size, because drivers refuse hundreds of GiB in one call.
PINNED_PIECE_BYTES = 16 << 30


class DeviceCopy:
    """A copy on a side stream. The object keeps alive the memory that the copy reads and writes. Thread-safe. The
    methods raise the device's errors."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, keep: object) -> None:
        self._event = event
        self._device = device
        self._keep = keep

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class Runs(NamedTuple):
    """Dense runs of bytes to copy: `sizes[i]` bytes between the addresses `cache[i]` and `rows[i]`."""

    cache: Addresses
    rows: Addresses
    sizes: Addresses


class Fence(NamedTuple):
    """A point in the model's work. Copies after the fence, on `stream`, wait for all work that was queued before it."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


class SideStreams:
    """Makes the copies of one device. Thread-safe. Copies out of the cache are made in the order of the calls. So are
    copies into the cache with the same fence."""

    def __init__(self, device: torch.device) -> None:
        self._copy_batch = batched_copy()
        self._device = device
        self._out = torch.cuda.Stream(device)

    def fence(self) -> Fence:
        """Return a fence that makes copies into the cache wait for all work queued so far on the calling thread's
        stream. Call this from the model's thread."""
        return Fence(torch.cuda.Stream(self._device), self._event_of_the_current_stream())

    def copy_out(self, runs: Runs, keep: object) -> DeviceCopy:
        """Copy from the cache to the rows, after all work queued on the calling thread's stream. `keep`: an object that
        must live until the copy has ended, such as the array of the rows."""
        return self._copy(
            self._out, self._event_of_the_current_stream(), runs.cache, runs.rows, runs.sizes, keep, False
        )

    def copy_in(self, runs: Runs, keep: object, after: Fence | None) -> DeviceCopy:
        """Copy from the rows to the cache, after the fence `after`. If it is None, this call first blocks until the
        device is idle. `keep` is as for `copy_out`."""
        # torch.cuda.device() is not used, because it would open a context on device 0 when it ends in a thread that
        # never chose a device.
        torch.cuda.set_device(self._device)
        if after is None:
            torch.cuda.synchronize(self._device)
            after = self.fence()
        # No queued work writes to the rows, because the bytes in them were complete before the load began.
        return self._copy(after.stream, after.event, runs.rows, runs.cache, runs.sizes, keep, True)

    def _event_of_the_current_stream(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _copy(
        self,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event,
        src: Addresses,
        dst: Addresses,
        sizes: Addresses,
        keep: object,
        any_order: bool,
    ) -> DeviceCopy:
        """`any_order`: whether the sources may be read early, because no work queued on any stream writes to them."""
        batch = [torch.from_numpy(array) for array in (src, dst, sizes)]
        done = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps instead of spinning
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            for first in range(0, len(sizes), RUNS_PER_CALL):
                some = [array[first : first + RUNS_PER_CALL] for array in batch]
                self._copy_batch(*some, is_src_access_order_any=any_order)
            done.record(stream)
        return DeviceCopy(done, self._device, (batch, keep))


def pinned_rows(
    rows: int, row_bytes: int, device: torch.device, pool: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
    """Return uninitialized page-locked memory of shape (rows, row_bytes). It is freed when its last view is gone.
    `pool`: memory of that shape to lock, at the beginning of a page. If it is None, memory is allocated. Raises
    ValueError if the system refuses to lock that much memory. Copies from and to memory that is not locked are slow,
    and copies out of the cache would block the model.

    torch's own pinned memory is not used, because torch rounds its size up to a power of two, which may double it.
    """
    size = rows * row_bytes
    memory = None if pool is None else pool.base
    if pool is None or memory is None:
        # Memory is locked in whole pages, so no other data may be in these pages.
        memory = np.empty(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE, dtype=np.uint8)
        first = -memory.ctypes.data % mmap.PAGESIZE
        pool = memory[first : first + size].reshape(rows, row_bytes)
    register, unregister = host_register()
    torch.cuda.set_device(device)
    locked = lock_in_pieces(pool.ctypes.data, size, row_bytes, register, unregister)
    # The array that owns the memory outlives all its views, and its finalizer runs before the memory is freed.
    finalizer = weakref.finalize(memory, _unlock, locked, unregister)
    finalizer.atexit = False  # when the process ends, the driver unlocks its memory
    return pool


def lock_in_pieces(
    address: int, size: int, row_bytes: int, register: Callable[[int, int], bool], unregister: Callable[[int], None]
) -> list[int]:
    """Page-lock memory with `register(address, bytes)`, which returns whether it succeeded. Return the addresses to
    unlock. If some memory cannot be locked, unlock the rest and raise ValueError.

    A piece ends where both a row and a page end, because a copy from or to a row must not touch two pieces.
    """
    locked: list[int] = []
    whole = math.lcm(row_bytes, mmap.PAGESIZE)
    piece = max(1, PINNED_PIECE_BYTES // whole) * whole
    for start in range(address, address + size, piece):
        if not register(start, min(piece, address + size - start)):
            _unlock(locked, unregister)
            raise ValueError(
                f"kvstore: the system does not page-lock {size / 2**30:.1f} GiB of host memory, which copies to and "
                f"from the GPU need; it refused after {(start - address) / 2**30:.1f} GiB. Lower cpu_bytes or "
                "staging_bytes, or raise the limit of locked memory (ulimit -l unlimited; in a container, also its "
                "memory limit)"
            )
        locked.append(start)
    return locked


def _unlock(addresses: Sequence[int], unregister: Callable[[int], None]) -> None:
    for address in addresses:
        unregister(address)
