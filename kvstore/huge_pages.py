"""Maps huge pages of memory where possible, and touches pages before they are used. Thread-safe."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20
MAP_FIXED: Final = 0x10
_PAGE_BYTES: Final = 4096
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _raise_errno() -> None:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def map_at(address: int, nbytes: int, protection: int, flags: int, file: int) -> None:
    """Map memory at an address that this process has reserved. Raises `OSError`."""
    if _libc.mmap(address, nbytes, protection, flags | MAP_FIXED, file, 0) == _MAP_FAILED:
        _raise_errno()


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call madvise for memory that has no `mmap.mmap` object of its own. Raises `OSError`."""
    if _libc.madvise(address, nbytes, advice) != 0:
        _raise_errno()


def populate(address: int, nbytes: int) -> None:
    """Touch every page without changing its content. Raises `OSError`: EINVAL before Linux 5.14."""
    advise(address, nbytes, _MADV_POPULATE_WRITE)


def collapse(address: int, nbytes: int) -> None:
    """Back this memory with huge pages, even if the system's settings do not allow huge pages for shared memory. The
    content of the memory does not change.

    Only whole huge pages within the range are used, and only as many as the kernel can find. Raises `OSError` if the
    kernel cannot do this: EINVAL before Linux 6.1.
    """
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    for place in range(start, address + nbytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        populate(place, _PAGE_BYTES)  # the kernel collapses a range only if one of its pages exists
        advise(place, HUGE_PAGE_BYTES, _MADV_COLLAPSE)


class Range:
    """A range of addresses that begins at the boundary of a huge page. The kernel maps a file's huge pages only at
    these boundaries.

    `memory`: the whole range, which reads as zeros until something else is mapped there. The range is unmapped when the
    last view of it is gone. Raises `OSError` or `OverflowError` when there is no room for the range.
    """

    def __init__(self, nbytes: int, flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        start = self.address - address
        self.memory = memoryview(self._map)[start : start + nbytes]


class FileMap(Range):
    """A file of shared memory, mapped from its beginning. `memory` is read-only unless `writable`."""

    def __init__(self, file: int, nbytes: int, writable: bool = False) -> None:
        super().__init__(nbytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        map_at(self.address, nbytes, protection, mmap.MAP_SHARED, file)
        if not writable:
            self.memory = self.memory.toreadonly()

    def forget_pages(self) -> None:
        """Release the pages that were read. They are mapped again when they are read again."""
        advise(self.address, self.nbytes, mmap.MADV_DONTNEED)
