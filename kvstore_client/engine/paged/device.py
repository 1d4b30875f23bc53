"""Copies between a CUDA device and host memory, on streams beside the model's.

Copies out have a side stream, and each load has one of its own, so that neither direction waits for the other, and no
load for another one. A copy is ordered with the model's work by an event on the model's stream: a copy out waits for
all work queued before it, a copy in for all work queued before the ``Fence`` of its load. The fence is needed because
the engine may be a step ahead of its GPU: a step that was queued earlier may still write to blocks that the scheduler
has freed and given away since.

One call hands the driver up to `RUNS_PER_CALL` runs of a copy. No kernel of ours runs, and no device memory is taken.
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
    """``src``, ``dst``, ``sizes``: int64 tensors in host memory; addresses and bytes. ``is_src_access_order_any``: the
    sources may be read before the stream comes to the copy, because nothing that is queued writes to them."""

    def __call__(
        self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, /, *, is_src_access_order_any: bool = False
    ) -> None: ...


def _no_adapter() -> NoReturn:
    raise RuntimeError(
        f"kvstore: the KV cache lies on a device, and nothing copies from and to it; the engine's adapter must set "
        f"batched_copy and host_register in {__name__}"
    )


# What copies from and to a device need of its driver. Engines have it, so an engine's adapter sets both, before it
# makes a layout of tensors on a device.
#
# batched_copy: -> the function that queues, on the current stream, copies of ``sizes[i]`` bytes from address ``src[i]``
# to ``dst[i]`` for every i: in one call to the driver where possible (cuMemcpyBatchAsync, CUDA 12.8).
# host_register: -> two functions: one page-locks memory given as ``(address, bytes)`` and returns False, with a
# warning, if the system refuses; the other undoes that for an ``address``.
batched_copy: Callable[[], BatchedCopy] = _no_adapter
host_register: Callable[[], tuple[Callable[[int, int], bool], Callable[[int], None]]] = _no_adapter

# Batches of over 50 000 runs are known to have crashed a driver. A call costs microseconds, so more calls cost nothing.
RUNS_PER_CALL = 8192
# Memory is locked in pieces of about this size: drivers refuse hundreds of GiB in one call.
PIECE_BYTES = 16 << 30


class DeviceCopy:
    """A copy on a side stream. It keeps the memory that it reads and writes alive. Thread-safe. The methods raise the
    device's errors."""

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
    """Dense runs of bytes to copy: ``sizes[i]`` bytes between the addresses ``cache[i]`` and ``rows[i]``."""

    cache: Addresses
    rows: Addresses
    sizes: Addresses


class Fence(NamedTuple):
    """Copies that come after it, on `stream`, wait for all work that was queued before it."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


class SideStreams:
    """The copies of one device. Thread-safe. Copies out are made in the order of the calls, and so are those in of one
    fence."""

    def __init__(self, device: torch.device) -> None:
        self._copy_batch = batched_copy()
        self._device = device
        self._out = torch.cuda.Stream(device)

    def fence(self) -> Fence:
        """Called by the model's thread. -> what makes copies in wait for all work queued on its stream up to now."""
        return Fence(torch.cuda.Stream(self._device), self._event_of_the_current_stream())

    def copy_out(self, runs: Runs, keep: object) -> DeviceCopy:
        """Copy from the cache to the rows, after all work queued on the calling thread's stream. ``keep``: an object
        that must outlive the copy, such as the array of the rows."""
        return self._copy(
            self._out, self._event_of_the_current_stream(), runs.cache, runs.rows, runs.sizes, keep, False
        )

    def copy_in(self, runs: Runs, keep: object, after: Fence | None) -> DeviceCopy:
        """Copy from the rows to the cache, after the fence. Without one, blocks until the device is idle."""
        # Not torch.cuda.device(): on leaving it, a thread that never chose a device would open a context on device 0.
        torch.cuda.set_device(self._device)
        if after is None:
            torch.cuda.synchronize(self._device)
            after = self.fence()
        # Nothing queued writes to the rows: what was copied or received there was complete before the load began.
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
        """any_order: no work queued on any stream writes to what is read, so it may be read early."""
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
    """Uninitialized page-locked memory of shape (rows, row_bytes), freed when the last view of it is gone. `pool`:
    memory of that shape, at the beginning of a page, to be locked; None: it is made. Raises ValueError if the system
    refuses to lock that much: copies from and to other memory are slow, and copies out would block the model.

    torch's own pinned memory is not used: its size is rounded up to a power of two, up to twice what is needed.
    """
    size = rows * row_bytes
    memory = None if pool is None else pool.base
    if pool is None or memory is None:
        # Memory is locked in whole pages, so these pages must hold nothing else.
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
    """Page-lock memory with `register(address, bytes)`, which returns whether it could. -> the addresses to unlock.
    Raises ValueError, with nothing locked, if some of it cannot be locked.

    A piece ends where a row and a page end: a copy from or to a row must not touch two pieces.
    """
    locked: list[int] = []
    whole = math.lcm(row_bytes, mmap.PAGESIZE)
    piece = max(1, PIECE_BYTES // whole) * whole
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
