"""Blocks in shared memory: how messages refer to them, and how descriptors travel.

On a Unix socket a shard answers a GET by references: file, offset, checksum. A file is a piece of the shard's memory
that has blocks of the connection's namespace only. Its descriptor comes with the EXTENT message that names it, once a
connection; PARTs then refer to it by number, until RETIRED says that it is gone. In the other direction a client gives
the shard files of its own memory, with SHARE, and its SETs refer to them: the shard copies the blocks from there.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import IdRing, distinct_files
from kvstore.pages import FileMap
from kvstore.wire.messages import MAX_FRAME_BLOCKS

MAX_DESCRIPTORS: Final = 200  # in one message; Linux takes 253
MAX_REFERENCES: Final = 1024  # in one PART

REFERENCE: Final = np.dtype([("file", "<u8"), ("offset", "<u8")])  # of a block in a PART
STAGED: Final = np.dtype([("file", "<u8"), ("offset", "<u8"), ("sum", "<u8")])  # of a block in a SET
STAGED_BYTES: Final = 16 << 20  # of blocks that a shard copies in one go: about a millisecond
MAX_FILES: Final = 16  # of the client's memory, on one connection


def staged_blocks(block_bytes: int) -> int:
    """-> the most blocks that one frame of a SET by references may name: the shard copies them in one go."""
    return max(1, min(MAX_FRAME_BLOCKS, STAGED_BYTES // block_bytes))


class SharedMemoryError(Exception):
    """A message refers to memory that was not shared, or a descriptor is not what it should be."""


def send_with_descriptors(sock: socket.socket, views: Sequence[memoryview | bytes], descriptors: Sequence[int]) -> int:
    """Send bytes, the first of which carries the descriptors. -> how many bytes were sent. Raises `OSError`."""
    rights = array.array("i", descriptors)
    return sock.sendmsg(views, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@dataclass(frozen=True, eq=False)
class Loan:
    """Blocks that a PART lent: block i is the bytes at `offsets[i]` of `maps[which[i]]`. Valid until it is returned."""

    maps: list[memoryview]
    which: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


class SharedFiles:
    """The files of a shard's memory that a connection was given, mapped to read.

    The shard takes the end of the connection as permission to reuse what it lent: so the socket is closed only when the
    last loan has been returned. The thread that reads the connection uses this object; `returned` and `close` are
    thread-safe.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.descriptors: deque[int] = deque()  # that have come, and whose message has not been read
        self._sock = sock
        self._closed = False
        self._lock = threading.RLock()  # a finalizer may return a loan while its thread holds this lock
        self._maps: dict[int, memoryview] = {}  # by number
        self._loans: set[Loan] = set()  # made and not returned
        self.ring: IdRing | None = None  # where GETs are released

    def add(self, number: int, nbytes: int) -> None:
        """Map the file that was just named. Raises `SharedMemoryError`, and `OSError` if it cannot be mapped."""
        if not self.descriptors:
            raise SharedMemoryError(f"file {number} came without its descriptor")
        descriptor = self.descriptors.popleft()
        try:
            if number in self._maps or not 0 < nbytes == os.fstat(descriptor).st_size:
                raise SharedMemoryError(f"file {number} of {nbytes} bytes: its descriptor is of another file")
            self._maps[number] = FileMap(descriptor, nbytes).memory
        finally:
            os.close(descriptor)

    def add_ring(self, nbytes: int) -> None:
        """Map the release ring that was just named. Raises like `add`."""
        if not self.descriptors:
            raise SharedMemoryError("a release ring came without its descriptor")
        descriptor = self.descriptors.popleft()
        try:
            if self.ring is not None or not IdRing.NBYTES == nbytes == os.fstat(descriptor).st_size:
                raise SharedMemoryError(f"a release ring of {nbytes} bytes: expected one, of {IdRing.NBYTES} bytes")
            self.ring = IdRing(mmap.mmap(descriptor, nbytes))
        finally:
            os.close(descriptor)

    def retire(self, numbers: bytes) -> None:
        """Forget files. Their mapping ends when nothing refers to it any more."""
        for number in np.frombuffer(numbers, dtype="<u8").tolist():
            self._maps.pop(number, None)

    def lend(self, data: bytes, count: int, block_bytes: int) -> Loan:
        """-> the blocks that the references in a PART name. Raises `SharedMemoryError`."""
        references = np.frombuffer(data, dtype=REFERENCE) if len(data) == count * REFERENCE.itemsize else None
        if references is None:
            raise SharedMemoryError(f"{len(data)} bytes of references to {count} blocks: expected 16 a block")
        numbers, which = distinct_files(references["file"])
        try:
            maps = [self._maps[number] for number in numbers]
        except KeyError as error:
            raise SharedMemoryError(f"a block in file {error}, which was not shared") from None
        offsets = references["offset"].astype(np.int64)
        if count and not (offsets.min() >= 0 and offsets.max() <= min(map(len, maps)) - block_bytes):
            raise SharedMemoryError(f"a block of {block_bytes} bytes outside its file")
        loan = Loan(maps, which, offsets)
        with self._lock:
            self._loans.add(loan)
        return loan

    def returned(self, loan: Loan) -> None:
        """A loan is not read any more. Does nothing if it was returned before."""
        with self._lock:
            self._loans.discard(loan)
            if self._closed and not self._loans:
                self._sock.close()

    def close(self, forked: bool = False) -> None:
        """The connection has ended: close the socket when the last loan is returned; in a child process, where the
        loans are the parent's, at once."""
        with self._lock:
            self._closed = True
            if forked or not self._loans:
                self._sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self._maps.clear()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """-> process id (0: of another PID namespace) and user id at the other end of a Unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = np.frombuffer(data, dtype=np.int32).tolist()
    return pid, user
