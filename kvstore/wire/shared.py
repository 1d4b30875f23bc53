"""Blocks in shared memory: how messages refer to them, and how descriptors travel.

On a Unix socket a shard answers a GET by references: file, offset, checksum. A file is a piece of the shard's memory
that has blocks of the connection's namespace only. Its descriptor comes with the EXTENT message that names it, once a
connection; PARTs then refer to it by number, until RETIRED says that it is gone. In the other direction a client gives
the shard files of its own memory, with SHARE, and its SETs refer to them: the shard copies the blocks from there.
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

MAX_DESCRIPTORS: Final = 200  # in one message; Linux takes 253
MAX_REFERENCES: Final = 1024  # in one PART

REFERENCE: Final = np.dtype([("file", "<u8"), ("offset", "<u8")])  # of a block in a PART
STAGED: Final = np.dtype([("file", "<u8"), ("offset", "<u8"), ("sum", "<u8")])  # of a block in a SET
STAGED_BYTES: Final = 16 << 20  # of blocks that a shard copies in one go: about a millisecond
MAX_FILES: Final = 16  # of the client's memory, on one connection


def staged_blocks(block_bytes: int) -> int:
    """-> the most blocks that one frame of a SET by references may name: the shard copies them in one go."""
    return max(1, min(MAX_FRAME_BLOCKS, STAGED_BYTES // block_bytes))


def send_with_descriptors(sock: socket.socket, views: Sequence[memoryview | bytes], descriptors: Sequence[int]) -> int:
    """Send bytes, the first of which carries the descriptors. -> how many bytes were sent. Raises `OSError`."""
    rights = array.array("i", descriptors)
    return sock.sendmsg(views, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@dataclass(frozen=True, eq=False)
class Loan:
    """Blocks that a PART lent. They may be read until the loan is returned."""

    blocks: RemoteBlocks


class SharedFiles:
    """The files of a shard's memory that a connection was given.

    The shard takes the end of the connection as permission to reuse what it lent: so the socket is closed only when the
    last loan has been returned. The thread that reads the connection uses this object; `returned`, `release` and
    `close` are thread-safe.
    """

    def __init__(self, sock: socket.socket, sharing: Sharing) -> None:
        self.memory = sharing.remote(must_stay=False)
        self._sock = sock
        self._closed = False
        self._lock = threading.RLock()  # a finalizer may return a loan while its thread holds this lock
        self._loans: set[Loan] = set()  # made and not returned
        self._ring: IdRing | None = None  # where GETs are released

    def take(self, message: Extent | Retired | ReleaseRing) -> None:
        """Attach what was just shared, or detach what is gone. Raises like `RemoteMemory.attach`."""
        if isinstance(message, Extent):
            self.memory.attach(message.number, message.nbytes, message.handle)
        elif isinstance(message, ReleaseRing):
            self._ring = self.memory.attach_ring(message.nbytes)
        else:
            for number in np.frombuffer(message.numbers, dtype="<u8").tolist():
                self.memory.detach(number)

    def release(self, request_id: int) -> bool:
        """Put the id of a GET in the release ring. -> False if the shard must be sent a RELEASE instead."""
        return self._ring is not None and self._ring.put(request_id)

    def loan(self, data: bytes, count: int, block_bytes: int) -> Loan:
        """-> the blocks that the references in a PART name; `keep` must follow. Raises `RemoteMemoryError`."""
        references = np.frombuffer(data, dtype=REFERENCE) if len(data) == count * REFERENCE.itemsize else None
        if references is None:
            raise RemoteMemoryError(f"{len(data)} bytes of references to {count} blocks: expected 16 a block")
        return Loan(self.memory.blocks(references["file"], references["offset"], block_bytes))

    def keep(self, loan: Loan) -> None:
        """Keep the socket until a loan is returned."""
        with self._lock:
            self._loans.add(loan)

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
        self.memory.close()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """-> process id (0: of another PID namespace) and user id at the other end of a Unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = np.frombuffer(data, dtype=np.int32).tolist()
    return pid, user
