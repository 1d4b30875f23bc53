"""The counts of a TLS process and the time when it last ran, on a page of memory that it shares with the supervisor.
The supervisor reads the page and needs no request to the process."""

from __future__ import annotations

import mmap
import os
from typing import Final, NamedTuple

_BYTES: Final = mmap.PAGESIZE


class Counts(NamedTuple):
    """Counts since the process started."""

    connections: int = 0  # connections that are open now
    handshakes: int = 0  # handshakes that were completed
    failed: int = 0  # connections that ended before their handshake was completed
    seen_ms: int = 0  # when the counts were written, by the host's monotonic clock


class CountsPage:
    """A page of memory with counts. One process writes the page, and others read it. A reader never sees a number that
    is half written."""

    def __init__(self, fd: int | None = None) -> None:
        """Use the page of the descriptor `fd`, or make a page if `fd` is None. Raises `OSError`."""
        self.fd = os.memfd_create("kvstore-tls-counts", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _BYTES)
        self._numbers = memoryview(mmap.mmap(self.fd, _BYTES)).cast("q")

    def write(self, counts: Counts) -> None:
        """Replace the counts."""
        for at, count in enumerate(counts):
            self._numbers[at] = count

    def read(self) -> Counts:
        """Return the counts."""
        return Counts(*self._numbers[: len(Counts._fields)])
