"""What a TLS process has counted, and when it was last seen to run, on a page of memory that the supervisor shares.
Reading it asks no process."""

from __future__ import annotations

import mmap
import os
from typing import Final, NamedTuple

_BYTES: Final = mmap.PAGESIZE


class Counts(NamedTuple):
    """Since the process started."""

    connections: int = 0  # that are open
    handshakes: int = 0  # that were done
    failed: int = 0  # connections that ended before
    seen_ms: int = 0  # when they were written, on the monotonic clock of the host


class CountsPage:
    """The page. One process writes it, others read it; a number is never half written."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: of a page that is there. None: make one. Raises `OSError`."""
        self.fd = os.memfd_create("kvstore-tls-counts", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _BYTES)
        self._numbers = memoryview(mmap.mmap(self.fd, _BYTES)).cast("q")

    def write(self, counts: Counts) -> None:
        """Replace the counts."""
        for at, count in enumerate(counts):
            self._numbers[at] = count

    def read(self) -> Counts:
        """-> the counts."""
        return Counts(*self._numbers[: len(Counts._fields)])
