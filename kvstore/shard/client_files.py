"""Memory that a client on this host shares, from which the shard copies blocks: source -> slot.

A file must be sealed against shrinking, so that reading it never fails. The client may change what is in it at any
time; then the checksum, which is computed on the way, does not match what the client said, and the SET is refused. The
pages that were read count as resident memory of this process, so the mappings let go of them again and again.

Used by the loop's thread only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import copy_blocks, distinct_files
from kvstore.pages import FileMap
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import ErrorCode, Share, WireError
from kvstore.wire.shared import MAX_FILES, STAGED
from kvstore.wire.zmtp import ZMTPError

MAX_PAGE_BYTES: Final = 64 << 10
TOUCHED_BYTES: Final = 32 << 20  # of clients' memory that this process has read, before it lets go of the pages


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


class Touched:
    """What the shard has read of the memory of all its clients since it last let go of the pages."""

    def __init__(self) -> None:
        self._bytes = 0
        self._maps: set[FileMap] = set()

    def add(self, maps: list[FileMap], nbytes: int) -> None:
        """So many bytes of these were read."""
        self._maps.update(maps)
        self._bytes += nbytes
        if self._bytes >= TOUCHED_BYTES:
            touched, self._maps, self._bytes = self._maps, set(), 0
            for each in touched:
                each.forget_pages()

    def forget(self, maps: list[FileMap]) -> None:
        """These mappings end."""
        self._maps.difference_update(maps)


class ClientFiles:
    """The files that one client has shared. `touched`: of all clients."""

    def __init__(self, touched: Touched) -> None:
        self._touched = touched
        self._maps: dict[int, FileMap] = {}  # by number
        self._descriptors: deque[int] = deque()  # that have come, and whose message has not been read

    def take(self, descriptors: list[int]) -> None:
        """Keep descriptors that have come on the connection. Raises `ZMTPError` if there are several."""
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > 1:  # who keeps to the protocol waits for the answer to each SHARE
            self.close()
            raise ZMTPError("several descriptors came at once: expected one, with the bytes of a SHARE")

    def share(self, request: Share) -> None:
        """Map the file whose descriptor came last. Raises `WireError`."""
        if not self._descriptors:
            raise WireError(ErrorCode.PROTOCOL, "SHARE without a descriptor: expected one with its bytes", request.id)
        descriptor = self._descriptors.popleft()
        try:
            if request.number in self._maps or len(self._maps) >= MAX_FILES:
                raise WireError(
                    ErrorCode.LIMIT,
                    f"SHARE of file {request.number}: expected a number not in use, and {MAX_FILES} files at most",
                    request.id,
                )
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            size = os.fstat(descriptor).st_size
            huge = os.fstat(descriptor).st_blksize > MAX_PAGE_BYTES  # reading it may fail when no huge page is free
            if not seals & fcntl.F_SEAL_SHRINK or size != request.nbytes or huge:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"SHARE of a file of {size} bytes with seals {seals:#x}: expected {request.nbytes} bytes, sealed "
                    "against shrinking, and not from the reserve of huge pages",
                    request.id,
                )
            self._maps[request.number] = FileMap(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:  # no memfd, or it cannot be mapped
            raise WireError(ErrorCode.PROTOCOL, f"SHARE of a file that cannot be used: {error}", request.id) from None
        finally:
            close_foreign(descriptor)

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
            numbers, which = distinct_files(some["file"])
            try:
                maps = [self._maps[number] for number in numbers]
                found = copy_blocks(
                    [each.memory for each in maps],
                    which,
                    some["offset"].astype(np.int64),
                    block_bytes,
                    namespace.arena.memory,
                    namespace.memory.offsets(slots[wanted]),
                    in_all=count * block_bytes,
                )
            except KeyError as error:
                raise WireError(ErrorCode.PROTOCOL, f"a block in file {error}, which was not shared") from None
            except IndexError as error:
                raise WireError(ErrorCode.PROTOCOL, f"a block outside its file: {error}") from None
            self._touched.add(maps, len(some) * block_bytes)
            wrong = np.flatnonzero(found != some["sum"])
            if len(wrong):
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"{len(wrong)} blocks do not match the checksums that were given: memory must not change while its "
                    "blocks are being set",
                )
        sums: npt.NDArray[np.uint64] = entries["sum"].copy()
        return sums

    def close(self) -> None:
        """The connection has ended."""
        while self._descriptors:
            close_foreign(self._descriptors.popleft())
        self._touched.forget(list(self._maps.values()))
        self._maps.clear()
