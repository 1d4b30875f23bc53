"""Memory that a client on this host shares, from which the shard copies blocks: source -> slot.

A file must be sealed against shrinking, so that reading it never fails. The client may change what is in it at any
time; then the checksum, which is computed on the way, does not match what the client said, and the SET is refused. In a
namespace whose checksums are MACs, the readers find that out.

Used by the loop's thread only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import threading
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import ErrorCode, Share, WireError
from kvstore.wire.remote_memory import RemoteMemoryError, Sharing, Touched
from kvstore.wire.shared import MAX_FILES, STAGED
from kvstore.wire.zmtp import ZMTPError

_closing: SimpleQueue[int] = SimpleQueue()


def _close_all() -> None:
    while True:
        with contextlib.suppress(OSError):
            os.close(_closing.get())


@functools.cache
def _closer() -> threading.Thread:
    thread = threading.Thread(target=_close_all, name="kvstore-close", daemon=True)
    thread.start()
    return thread


def close_foreign(descriptor: int) -> None:
    """Close a descriptor that a client sent. If it is no memfd but, say, a socket that lingers, that may take long, so
    another thread does it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        _closer()
        _closing.put(descriptor)
    else:
        os.close(descriptor)


class ClientFiles:
    """The files that one client has shared. `touched`: of all clients."""

    def __init__(self, sharing: Sharing, touched: Touched) -> None:
        self._memory = sharing.remote(must_stay=True, touched=touched, close=close_foreign)
        self._numbers: set[int] = set()

    def take(self, descriptors: list[int]) -> None:
        """Keep descriptors that have come on the connection. Raises `ZMTPError` if there are several."""
        self._memory.receive(descriptors)
        if self._memory.waiting > 1:  # who keeps to the protocol waits for the answer to each SHARE
            self.close()
            raise ZMTPError("several descriptors came at once: expected one, with the bytes of a SHARE")

    def share(self, request: Share) -> None:
        """Attach the file that came last. Raises `WireError`."""
        if len(self._numbers) >= MAX_FILES:
            self._memory.discard()
            raise WireError(ErrorCode.LIMIT, f"SHARE of file {request.number}: expected {MAX_FILES} files at most")
        try:
            self._memory.attach(request.number, request.nbytes, request.handle)
        except (RemoteMemoryError, OSError, ValueError, OverflowError) as error:  # no memfd, or it cannot be mapped
            problem = f"SHARE of file {request.number}, which cannot be used: {error}"
            raise WireError(ErrorCode.PROTOCOL, problem) from None
        self._numbers.add(request.number)

    def copy(self, namespace: NamespaceStore, slots: Slots, frame: bytes, count: int) -> npt.NDArray[np.uint64]:
        """Copy the blocks that a frame of a SET names to their slots; a negative slot: the block is not wanted.
        `count`: blocks of the whole SET.

        -> the checksums that the client gave. Raises `WireError` when one does not match, or the frame is wrong.
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
                    f"{len(wrong)} blocks do not match the checksums that were given: memory must not change while its "
                    "blocks are being set",
                )
        sums: npt.NDArray[np.uint64] = entries["sum"].copy()
        return sums

    def close(self) -> None:
        """The connection has ended."""
        self._memory.close()
