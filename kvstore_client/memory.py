"""Memory that a server on this host copies blocks from, without a copy by the client.

A `set` whose blocks lie in such memory only tells the server where they are. Blocks in any other memory are first
copied into memory of this kind, a few at a time.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import itertools
import os
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.pages import FileMap, collapse, populate

# The server reads it through a mapping of its own, which must never fail.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_STEP_BYTES: Final = 8 << 20

_numbers = itertools.count(1)


class _Registry:
    """All regions that `host_memory` made and that are still in use. Thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # their addresses, in order
        self._regions: dict[int, weakref.ref[SharedRegion]] = {}  # by address
        # Regions that are gone: no Python code runs in a finalizer, where Ctrl-C would be lost.
        self._gone: deque[weakref.ref[SharedRegion]] = deque()
        self.new_lock()

    def new_lock(self) -> None:
        """Also in a child process: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def add(self, region: SharedRegion) -> None:
        with self._lock:
            self._forget_gone()
            self._regions[region.address] = weakref.ref(region, self._gone.append)
            self._starts = sorted(self._regions)

    @property
    def used(self) -> bool:
        """Whether there is any region."""
        return bool(self._starts)

    def find(self, address: int, nbytes: int) -> SharedRegion | None:
        with self._lock:
            self._forget_gone()
            at = bisect.bisect_right(self._starts, address) - 1
            region = self._regions[self._starts[at]]() if at >= 0 else None
        return region if region is not None and address + nbytes <= region.address + region.nbytes else None

    def _forget_gone(self) -> None:
        """Before anything else: another region may have the address of one that is gone."""
        if self._gone:
            self._gone.clear()
            self._regions = {start: region for start, region in self._regions.items() if region() is not None}
            self._starts = sorted(self._regions)


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.new_lock)


class SharedRegion:
    """A piece of memory that can be given to a server: a sealed memfd, mapped. Thread-safe."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """descriptor: of such memory that another process made, to be closed with this; None: it is made. Raises
        `OSError`, too, if that memory is not what this process needs."""
        self.number = next(_numbers)  # no other region of this process ever has it
        self.nbytes = nbytes
        made = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("kvstore-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, self.descriptor)
        if made:
            os.ftruncate(self.descriptor, nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        elif os.fstat(self.descriptor).st_size != nbytes or fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) != _SEALS:
            raise OSError(errno.EBADF, "this is not the memory that was offered")
        mapped = FileMap(self.descriptor, nbytes, writable=True)
        self.memory, self.address = mapped.memory, mapped.address

    def populate(self) -> None:
        """Take the pages now, huge ones where the kernel gives them: page faults would take half of the server's
        speed."""
        for start in range(0, self.nbytes, _STEP_BYTES):
            size = min(_STEP_BYTES, self.nbytes - start)
            with contextlib.suppress(OSError):  # an older kernel, or no huge page is free: pages come when touched
                collapse(self.address + start, size)
                populate(self.address + start, size)


class _Rows(np.ndarray):
    """An array over a region, which lives as long as the array or a view of it."""

    region: SharedRegion


def host_memory(rows: int, row_bytes: int, *, wait: bool = True) -> npt.NDArray[np.uint8]:
    """-> an array of `(rows, row_bytes)` uint8, zeros, in memory that servers on this host copy blocks from.

    Use it as the source of `set`, and as the destination of reads like any other array. Its pages are taken now, and
    are huge where the kernel gives them; that takes a second for some GiB. `wait=False`: a thread takes them, in the
    background. Raises `OSError` if the kernel has none of them. A child process shares the memory with its parent.
    """
    region = SharedRegion(max(1, rows * row_bytes))
    if wait:
        region.populate()
    else:
        threading.Thread(target=region.populate, name="kvstore-pages", daemon=True).start()
    return _array(region, rows, row_bytes)


def memory_of_process(process: int, descriptor: int, rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """-> the array that `host_memory` made in another process of this host, by the descriptor of its region there.

    Both processes read and write it; it lasts as long as one of them has it. Raises `OSError` if this process may not
    open it, or if it is other memory or of another size.
    """
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return _array(SharedRegion(max(1, rows * row_bytes), opened), rows, row_bytes)


def _array(region: SharedRegion, rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    array = np.frombuffer(region.memory, dtype=np.uint8)[: rows * row_bytes].reshape(rows, row_bytes)
    _registry.add(region)
    found = array.view(_Rows)
    found.region = region
    return found


def any_regions() -> bool:
    """Whether there is memory from `host_memory`."""
    return _registry.used


def region_of(address: int, nbytes: int) -> SharedRegion | None:
    """-> the region that holds these bytes; None: they are in other memory."""
    return _registry.find(address, nbytes)
