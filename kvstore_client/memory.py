"""Memory of a client that a server on this host can read, so that the client need not copy blocks for a `set`.

For blocks in such memory, a `set` sends only their addresses. Blocks in any other memory are first copied into memory
of this kind, a few at a time.
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

from kvstore.huge_pages import FileMap, collapse, populate

# The server reads the memory through a mapping of its own. The seals fix the memory's size, so that no read can fail.
_REGION_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_STEP_BYTES: Final = 8 << 20

_numbers = itertools.count(1)


class _Registry:
    """The regions that `host_memory` made and that are still in use. Thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # the regions' addresses, in order
        self._regions: dict[int, weakref.ref[SharedRegion]] = {}  # by address
        # References to freed regions. A finalizer only appends to it, because Ctrl-C during Python code of a finalizer
        # would be lost.
        self._gone: deque[weakref.ref[SharedRegion]] = deque()
        self.new_lock()

    def new_lock(self) -> None:
        """Make a new lock. A child process needs one, because a thread of the parent may hold the old one."""
        self._lock = threading.Lock()

    def add(self, region: SharedRegion) -> None:
        with self._lock:
            self._forget_gone()
            self._regions[region.address] = weakref.ref(region, self._gone.append)
            self._starts = sorted(self._regions)

    @property
    def used(self) -> bool:
        """Whether any region is in use."""
        return bool(self._starts)

    def find(self, address: int, nbytes: int) -> SharedRegion | None:
        with self._lock:
            self._forget_gone()
            at = bisect.bisect_right(self._starts, address) - 1
            region = self._regions[self._starts[at]]() if at >= 0 else None
        return region if region is not None and address + nbytes <= region.address + region.nbytes else None

    def _forget_gone(self) -> None:
        """Forget freed regions. This is done before each use, because a new region may have a freed one's address."""
        if self._gone:
            self._gone.clear()
            self._regions = {start: region for start, region in self._regions.items() if region() is not None}
            self._starts = sorted(self._regions)


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.new_lock)


class SharedRegion:
    """A piece of memory that can be shared with a server: a sealed memfd that is mapped here. Thread-safe."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """Map the memfd `descriptor`, which another process made for such memory. This object closes the descriptor.
        If `descriptor` is None, make a new memfd. Raises `OSError`, for example if the given memfd has another size or
        lacks the seals."""
        self.number = next(_numbers)  # never used again in this process
        self.nbytes = nbytes
        made = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("kvstore-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, self.descriptor)
        if made:
            os.ftruncate(self.descriptor, nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _REGION_SEALS)
        elif (
            os.fstat(self.descriptor).st_size != nbytes
            or fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) != _REGION_SEALS
        ):
            raise OSError(errno.EBADF, "this memory has another size than expected, or lacks the seals")
        mapped = FileMap(self.descriptor, nbytes, writable=True)
        self.memory, self.address = mapped.memory, mapped.address

    def populate(self) -> None:
        """Have the kernel allocate the pages now, as huge pages if possible. Otherwise, page faults would halve the
        server's speed."""
        for start in range(0, self.nbytes, _STEP_BYTES):
            size = min(_STEP_BYTES, self.nbytes - start)
            with contextlib.suppress(OSError):  # an older kernel, or no free huge page: allocated at first access
                collapse(self.address + start, size)
                populate(self.address + start, size)


class _Rows(np.ndarray):
    """An array in a region. It keeps the region alive, and so does every view of it."""

    region: SharedRegion


def host_memory(rows: int, row_bytes: int, *, wait: bool = True) -> npt.NDArray[np.uint8]:
    """Allocate memory from which servers on this host can copy blocks.

    Use it as the source of `set`. It can also be the destination of reads, like any other array. A child process shares
    it with its parent.

    * `rows`: The number of rows, one for each block.
    * `row_bytes`: The size of a row in bytes: the namespace's `block_bytes`.
    * `wait`: Whether to allocate all pages before returning, which takes about a second for a few GiB. If False, a
      thread allocates the pages in the background. Huge pages are used if the kernel has them.

    Returns: A `(rows, row_bytes)` array of uint8, filled with zeros.

    Raises: `OSError` if the kernel refuses to allocate the memory.
    """
    region = SharedRegion(max(1, rows * row_bytes))
    if wait:
        region.populate()
    else:
        threading.Thread(target=region.populate, name="kvstore-pages", daemon=True).start()
    return _array(region, rows, row_bytes)


def memory_of_process(process: int, descriptor: int, rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Open the array that `host_memory` made in another process of this host.

    Both processes can read and write it. The memory is freed when neither process uses it any more.

    * `process`: The other process's id.
    * `descriptor`: The file descriptor of the array's region in that process.
    * `rows`: The number of rows that the array has in that process.
    * `row_bytes`: The size of a row in bytes in that process.

    Returns: A `(rows, row_bytes)` array of uint8.

    Raises: `OSError` if this process may not open the memory, or if it is not memory of this size from `host_memory`.
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
    """Return whether any memory from `host_memory` is in use."""
    return _registry.used


def region_of(address: int, nbytes: int) -> SharedRegion | None:
    """Return the region that holds the `nbytes` bytes at `address`, or None if they are in other memory."""
    return _registry.find(address, nbytes)
