"""Memory that a client on this host shares with the shard, which copies blocks from there to its slots.

A file must be sealed against shrinking, so that reading it never fails. Files of the shard's own user and of root are
mapped. Files of other users are read by system calls, so that no user can make the shard pay for the pages of a file
(`UNMAPPED`). The client may change a file's content at any time. Then the checksum that is computed during the copy
differs from the checksum that the client gave, and the SET is refused. If the namespace's checksums are MACs, the shard
cannot check them, but readers notice the change.

Used by the loop's thread only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import threading
from queue import SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import ErrorCode, Share, WireError
from kvstore.wire.remote_memory import RemoteMemoryError, Sharing, Touched
from kvstore.wire.shared import MAX_FILES, STAGED
from kvstore.wire.zmtp import ZMTPError

MOST_TO_CLOSE: Final = 256  # the most descriptors that wait to be closed


class _Closer:
    """Closes descriptors on a thread of its own, because this may take long, for example for a file on a network."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[int] = SimpleQueue()
        self._begun = self._ended = 0
        self._thread: threading.Thread | None = None

    @property
    def behind(self) -> bool:
        """True if too many descriptors wait to be closed, so that no more may be accepted."""
        return self._begun - self._ended >= MOST_TO_CLOSE

    def close(self, descriptor: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-close", daemon=True)
            self._thread.start()
        self._begun += 1
        self._queue.put(descriptor)

    def _run(self) -> None:
        while True:
            descriptor = self._queue.get()
            with contextlib.suppress(OSError):
                self.close_now(descriptor)
            self._ended += 1

    close_now = staticmethod(os.close)


_closer = _Closer()


def close_foreign(descriptor: int) -> None:
    """Close a descriptor that a client sent. If it is no memfd, a thread closes it, because that may take long."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        _do_not_linger(descriptor)
        _closer.close(descriptor)
    else:
        os.close(descriptor)


def _do_not_linger(descriptor: int) -> None:
    """If the descriptor is a socket, turn lingering off. With lingering, the client could make the close wait for
    unsent bytes."""
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        with socket.socket(fileno=os.dup(descriptor)) as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def can_take_files() -> bool:
    """Return whether clients may send descriptors: False if many earlier ones still wait to be closed."""
    return not _closer.behind


class ClientFiles:
    """The files that one client has shared. `touched`: the object that the files of all clients use."""

    def __init__(self, sharing: Sharing, touched: Touched) -> None:
        self._memory = sharing.remote(must_stay=True, touched=touched, close=close_foreign)
        self._numbers: set[int] = set()
        self.copied_bytes = 0  # bytes of SETs that were copied from these files

    def take(self, descriptors: list[int]) -> None:
        """Keep the descriptors that have come on the connection. Raises `ZMTPError` if more than one waits, or if too
        many earlier ones are still open."""
        self._memory.receive(descriptors)
        if not can_take_files():
            self.close()
            raise ZMTPError(f"a descriptor came while {MOST_TO_CLOSE} earlier ones wait to be closed: expected no more")
        if self._memory.waiting > 1:  # by the protocol, a client waits for the answer to each SHARE
            self.close()
            raise ZMTPError("several descriptors came at once: expected one, with the bytes of a SHARE")

    def share(self, request: Share) -> None:
        """Attach the file whose descriptor was received last. Raises `WireError`."""
        if len(self._numbers) >= MAX_FILES:
            self._memory.discard()
            raise WireError(ErrorCode.LIMIT, f"SHARE of file {request.number}: expected {MAX_FILES} files at most")
        try:
            self._memory.attach(request.number, request.nbytes, request.handle)
        except (RemoteMemoryError, OSError, ValueError, OverflowError) as error:  # no memfd, or mapping fails
            problem = f"SHARE of file {request.number}, which cannot be used: {error}"
            raise WireError(ErrorCode.PROTOCOL, problem) from None
        self._numbers.add(request.number)

    def copy(self, namespace: NamespaceStore, slots: Slots, frame: bytes, count: int) -> npt.NDArray[np.uint64]:
        """Copy to their slots the blocks that a frame of a SET names. A block whose slot is negative is not wanted.
        `count`: the number of blocks in the whole SET.

        Return the checksums that the client gave. Raises `WireError` if a checksum does not match, or if the frame is
        wrong.
        """
        entries = np.frombuffer(frame, dtype=STAGED)
        block_bytes = namespace.block_bytes
        wanted = slots >= 0
        some = entries if wanted.all() else entries[wanted]
        if len(some):
            try:
                blocks = self._memory.blocks(some["file"], some["offset"], block_bytes)
                places = namespace.memory.offsets(slots[wanted])
                found = blocks.read(namespace.arena.memory, places, count * block_bytes)
            except RemoteMemoryError as error:
                raise WireError(ErrorCode.PROTOCOL, str(error)) from None
            wrong = np.flatnonzero(found != some["sum"])
            if len(wrong) and not namespace.opaque_sums:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"{len(wrong)} blocks do not match the checksums of the SET: memory must not change while its "
                    "blocks are being set",
                )
        self.copied_bytes += len(entries) * block_bytes
        sums: npt.NDArray[np.uint64] = entries["sum"].copy()
        return sums

    def close(self) -> None:
        """Release everything, because the connection has ended."""
        self._memory.close()
