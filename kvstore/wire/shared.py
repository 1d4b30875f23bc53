"""Blocks in shared memory: how messages refer to them, and how descriptors travel.

On a Unix socket a shard answers a GET with references: a file, an offset and a checksum for each block. A file is a
piece of the shard's memory that has only blocks of the connection's namespace. Its descriptor comes once per
connection, with the EXTENT message that gives the file a number. PARTs then refer to the file by this number, until
RETIRED says that the file is gone. In the other direction, a client shares files of its own memory with SHARE. Its SETs
refer to these files, and the shard copies the blocks from there.
"""

from __future__ import annotations

import array
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore._cext import IdRing
from kvstore.wire.messages import MAX_FRAME_BLOCKS, Extent, ReleaseRing, Retired
from kvstore.wire.remote_memory import RemoteBlocks, RemoteMemoryError, Sharing

MAX_DESCRIPTORS: Final = 200  # in one message; Linux allows 253
MAX_REFERENCES: Final = 1024  # in one PART

REFERENCE: Final = np.dtype([("file", "<u8"), ("offset", "<u8")])  # the entry of one block in a PART
STAGED: Final = np.dtype([("file", "<u8"), ("offset", "<u8"), ("sum", "<u8")])  # of one block in a SET
STAGED_BYTES: Final = 16 << 20  # the most that a shard copies at a time, which takes about a millisecond
MAX_FILES: Final = 16  # the most files of the client's memory on one connection


def staged_blocks(block_bytes: int) -> int:
    """Return the largest number of blocks in one frame of a SET by references. It is limited because the shard copies a
    whole frame at once."""
    return max(1, min(MAX_FRAME_BLOCKS, STAGED_BYTES // block_bytes))


def send_with_descriptors(sock: socket.socket, views: Sequence[memoryview | bytes], descriptors: Sequence[int]) -> int:
    """Send bytes, with the descriptors attached to the first byte. Return how many bytes were sent. Raises
    `OSError`."""
    rights = array.array("i", descriptors)
    return sock.sendmsg(views, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@dataclass(frozen=True, eq=False)
class Loan:
    """Blocks that a PART lent. They may be read until the loan is returned."""

    blocks: RemoteBlocks


class SharedFiles:
    """The files of a shard's memory that the shard has shared on one connection.

    The shard takes the end of the connection as permission to reuse the memory that it lent. So the socket is closed
    only when the last loan has been returned. Only the thread that reads the connection may use this object, except
    that `returned`, `release` and `close` are thread-safe.
    """

    def __init__(self, sock: socket.socket, sharing: Sharing) -> None:
        self.memory = sharing.remote(must_stay=False)
        self._sock = sock
        self._closed = False
        self._lock = threading.RLock()  # a finalizer may return a loan while its thread holds this lock
        self._loans: set[Loan] = set()  # loans that are not returned yet
        self._ring: IdRing | None = None  # for the ids of GETs that are released

    def take(self, message: Extent | Retired | ReleaseRing) -> None:
        """Attach memory that was just shared, or detach memory that is gone. Raises the errors of
        `RemoteMemory.attach`."""
        if isinstance(message, Extent):
            self.memory.attach(message.number, message.nbytes, message.handle)
        elif isinstance(message, ReleaseRing):
            self._ring = self.memory.attach_ring(message.nbytes)
        else:
            for number in np.frombuffer(message.numbers, dtype="<u8").tolist():
                self.memory.detach(number)

    def release(self, request_id: int) -> bool:
        """Put the id of a GET in the release ring. Return False if a RELEASE must be sent instead."""
        return self._ring is not None and self._ring.put(request_id)

    def loan(self, data: bytes, count: int, block_bytes: int) -> Loan:
        """Return the blocks to which the references in a PART point. Call `keep` next. Raises `RemoteMemoryError`."""
        references = np.frombuffer(data, dtype=REFERENCE) if len(data) == count * REFERENCE.itemsize else None
        if references is None:
            raise RemoteMemoryError(f"{len(data)} bytes of references to {count} blocks: expected 16 per block")
        return Loan(self.memory.blocks(references["file"], references["offset"], block_bytes))

    def keep(self, loan: Loan) -> None:
        """Keep the socket open until a loan is returned."""
        with self._lock:
            self._loans.add(loan)

    def returned(self, loan: Loan) -> None:
        """Record that a loan is no longer read. Does nothing if the loan was returned before."""
        with self._lock:
            self._loans.discard(loan)
            if self._closed and not self._loans:
                self._sock.close()

    def close(self, forked: bool = False) -> None:
        """Record that the connection has ended: the socket is closed when the last loan is returned.
        `forked`: close the socket at once, because in a child process the loans belong to the parent."""
        with self._lock:
            self._closed = True
            if forked or not self._loans:
                self._sock.close()
        self.memory.close()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and the user at the other end of a Unix socket. The id of a process in another PID
    namespace is 0."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = np.frombuffer(data, dtype=np.int32).tolist()
    return pid, user
