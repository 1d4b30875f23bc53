"""Memory of the process at the other end of a connection: how blocks move by reference.

Messages always travel on the connection's socket. Blocks travel in one of two ways: *in band*, in the messages that
name them, as over TCP; or *by reference*: a message says where a block is in the sender's memory, and the receiver
reads it there. What reads it is a `RemoteMemory`, made by a `Sharing`: `DESCRIPTORS` for two processes of one host, a
`Transport` for processes of different hosts. docs/transports.md has the contract for others, and
`tests/unit/test_remote_memory.py` holds every implementation to it.
"""

from __future__ import annotations

import abc
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore._cext import IdRing, LentBlocks, all_inside, copy_blocks, distinct_files, read_blocks
from kvstore.pages import FileMap
from kvstore.plugins import TRANSPORTS

TOUCHED_BYTES: Final = 32 << 20  # of others' memory that this process has read, before it lets go of the pages
MAX_PAGE_BYTES: Final = 64 << 10
MAX_OPEN: Final = 4096  # files of others that a process keeps open, one descriptor each

Places = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]


class RemoteMemoryError(Exception):
    """The other side names memory that it has not shared, or that is not what it says it is; or its memory cannot be
    read any more."""


class Handle(NamedTuple):
    """What the other side needs to attach a piece of memory: bytes for a message, and descriptors that go with them,
    which the holder of the handle closes."""

    data: bytes = b""
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors: they were sent, or will not be."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RemoteBlocks(Protocol):
    """Blocks in the other side's memory, whose places were checked."""

    def read(self, out: Any, places: Places, in_all: int = 0) -> Sums:
        """Read the blocks to `out`, as `copy_blocks` does. Returns when all bytes are there. -> the checksums of what
        was read. Raises `RemoteMemoryError`; then `out` may hold anything in these places."""

    def some(self, part: slice) -> RemoteBlocks:
        """Some of the blocks."""

    def lent(self) -> LentBlocks | None:
        """The blocks where they are; None: this process cannot address them, and must read them."""


class RemoteMemory(Protocol):
    """The memory that the other side of one connection has shared. One thread at a time; `RemoteBlocks` in any."""

    @property
    def waiting(self) -> int:
        """How many descriptors have come whose message has not been read."""

    def receive(self, descriptors: list[int]) -> None:
        """Take over descriptors that came beside bytes."""

    def discard(self) -> None:
        """Close the descriptor of a message that is refused, if it has one."""

    def attach(self, number: int, nbytes: int, handle: bytes) -> None:
        """The other side shares a piece of memory under a number. Raises `RemoteMemoryError`, and `OSError` or
        `ValueError` if it cannot be attached. If the process it belongs to cannot be reached, it may be
        attached all the same: then reading it fails."""

    def attach_ring(self, nbytes: int) -> IdRing:
        """The other side shares a release ring. Only where memory is mapped. Raises like `attach`."""

    def detach(self, number: int) -> None:
        """The piece is not referred to any more. Does nothing if there is none of that number."""

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        """-> the blocks of `size` bytes at these offsets of these pieces. Raises `RemoteMemoryError` if one is outside
        its piece, or its piece is not attached."""

    def close(self) -> None:
        """The connection has ended. Blocks that were found before can still be read, if the memory is still there."""


class Sharing(Protocol):
    """A way to share memory between the two sides of a connection. Thread-safe.

    mapped: whether each side can address the other's memory. Only then can blocks be borrowed, and loans be returned
    through a ring.
    """

    mapped: bool

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        """Offer a piece of this process's memory to the other side. `descriptor()` makes a new descriptor of the file
        it is in. Raises `OSError`."""

    def withdraw(self, memory: memoryview) -> None:
        """Nobody may read this memory any more: there will be other memory at its place."""

    def progress(self) -> None:
        """Let reads by the other side go on that need this process. Called by the owner while blocks are lent."""

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> RemoteMemory:
        """The other side's memory. `must_stay`: attach only what the other side cannot take away. `touched`: who is to
        know what was read; None: nobody. `close`: closes descriptors that came from there."""


class Transport(NamedTuple):
    """How clients read the memory of shards on other hosts. Both sides must have the transport of the same name."""

    name: str
    sharing: Sharing  # what this process uses

    @classmethod
    def of(cls, name: str | None) -> Transport | None:
        """-> the transport of this name; None: without a name, or it does not work here. Raises `ValueError` if there
        is none of the name, `ImportError` if something has to be installed first."""
        sharing = TRANSPORTS.find(name)() if name else None
        return None if not name or sharing is None else cls(name, sharing)


class Touched:
    """What a process has read of others' files since it last let go of the pages: while it has them, they count as its
    own memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._maps: set[FileMap] = set()

    def add(self, maps: list[FileMap], blocks: int, size: int) -> None:
        """So many blocks of this size were read from these. What counts is whole pages, as blocks may lie apart."""
        self._maps.update(maps)
        self._bytes += blocks * (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        if self._bytes >= TOUCHED_BYTES:
            touched, self._maps, self._bytes = self._maps, set(), 0
            for each in touched:
                each.forget_pages()

    def forget(self, maps: Iterable[FileMap]) -> None:
        """These mappings end."""
        self._maps.difference_update(maps)


def places_inside(
    offsets: npt.NDArray[np.uint64], size: int, which: npt.NDArray[np.int64], pieces: Sequence[int]
) -> Places:
    """-> the offsets of blocks of `size` bytes, block i in the piece number `which[i]`, whose sizes are `pieces`.
    Raises `RemoteMemoryError` if one is not inside."""
    places = offsets.astype(np.int64)
    if not all_inside(places, size, which, np.array(pieces, dtype=np.int64)):
        raise RemoteMemoryError(f"a block of {size} bytes outside its piece of memory")
    return places


class _MappedBlocks:
    def __init__(self, maps: list[FileMap], which: Places, offsets: Places, size: int, touched: Touched | None) -> None:
        self._maps, self._which, self._offsets, self._size, self._touched = maps, which, offsets, size, touched

    def read(self, out: Any, places: Places, in_all: int = 0) -> Sums:
        memories = [each.memory for each in self._maps]
        sums = copy_blocks(memories, self._which, self._offsets, self._size, out, places, in_all=in_all)
        if self._touched is not None:
            self._touched.add(self._maps, len(places), self._size)
        return sums

    def some(self, part: slice) -> RemoteBlocks:
        return _MappedBlocks(self._maps, self._which[part], self._offsets[part], self._size, self._touched)

    def lent(self) -> LentBlocks:
        return LentBlocks([each.memory for each in self._maps], self._which, self._offsets, self._size)


class _OpenFile:
    """A file that another process shares: open, and not mapped, as long as something refers to it. Raises
    `RemoteMemoryError` when there are too many. Thread-safe."""

    _count: ClassVar[int] = 0
    _counting: ClassVar[threading.RLock] = threading.RLock()  # a finalizer may run while its thread holds it

    def __init__(self, descriptor: int, nbytes: int) -> None:
        with self._counting:
            if _OpenFile._count >= MAX_OPEN:
                raise RemoteMemoryError(f"{MAX_OPEN} files of other processes are open here: expected no more")
            self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
            _OpenFile._count += 1
        self.nbytes = nbytes
        weakref.finalize(self, self._close, self.descriptor).atexit = False

    @classmethod
    def _close(cls, descriptor: int) -> None:
        with cls._counting:
            os.close(descriptor)
            _OpenFile._count -= 1


class _CopiedBlocks:
    def __init__(self, files: list[_OpenFile], which: Places, offsets: Places, size: int) -> None:
        self._files, self._which, self._offsets, self._size = files, which, offsets, size

    def read(self, out: Any, places: Places, in_all: int = 0) -> Sums:
        memory = np.asarray(out)
        if memory.ndim > 1:
            memory, places = memory.reshape(-1), places * self._size
        sums = np.empty(len(places), dtype=np.uint64)
        for number, file in enumerate(self._files):
            of_it = np.flatnonzero(self._which == number)
            found = np.empty(len(of_it), dtype=np.uint64)
            status = read_blocks(file.descriptor, memory, places[of_it], self._offsets[of_it], self._size, None, found)
            if status.any():
                raise RemoteMemoryError("a block could not be read: its file is shorter, or broken")
            sums[of_it] = found
        return sums

    def some(self, part: slice) -> RemoteBlocks:
        return _CopiedBlocks(self._files, self._which[part], self._offsets[part], self._size)

    def lent(self) -> None:
        return None


_File = TypeVar("_File", FileMap, _OpenFile)


class _Files(abc.ABC, Generic[_File]):
    """Files whose descriptors came over a Unix socket."""

    def __init__(self, must_stay: bool, close: Callable[[int], None]) -> None:
        self._must_stay = must_stay
        self._close = close
        self._descriptors: deque[int] = deque()  # that have come, and whose message has not been read
        self._files: dict[int, _File] = {}  # by number

    @abc.abstractmethod
    def _opened(self, descriptor: int, nbytes: int) -> _File:
        """What is kept of a file. The descriptor is the caller's."""

    @abc.abstractmethod
    def _blocks(self, files: list[_File], which: Places, places: Places, size: int) -> RemoteBlocks: ...

    @property
    def waiting(self) -> int:
        return len(self._descriptors)

    def receive(self, descriptors: list[int]) -> None:
        self._descriptors.extend(descriptors)

    def discard(self) -> None:
        if self._descriptors:
            self._close(self._descriptors.popleft())

    def _take(self) -> int:
        if not self._descriptors:
            raise RemoteMemoryError("it came without a descriptor")
        return self._descriptors.popleft()

    def attach(self, number: int, nbytes: int, handle: bytes) -> None:
        descriptor = self._take()
        try:
            if number in self._files:
                raise RemoteMemoryError(f"file {number} is attached already: expected another number")
            status = os.fstat(descriptor)
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) if self._must_stay else 0
            huge = self._must_stay and status.st_blksize > MAX_PAGE_BYTES  # reading may fail when no huge page is free
            unsealed = self._must_stay and not seals & fcntl.F_SEAL_SHRINK
            if handle or not 0 < nbytes == status.st_size or unsealed or huge:
                sealed = ", sealed against shrinking, and not from the reserve of huge pages" if self._must_stay else ""
                raise RemoteMemoryError(
                    f"a file of {status.st_size} bytes with seals {seals:#x}: expected {nbytes} bytes{sealed}"
                )
            self._files[number] = self._opened(descriptor, nbytes)
        finally:
            self._close(descriptor)

    def attach_ring(self, nbytes: int) -> IdRing:
        descriptor = self._take()
        try:
            if not IdRing.NBYTES == nbytes == os.fstat(descriptor).st_size:
                raise RemoteMemoryError(f"a release ring of {nbytes} bytes: expected {IdRing.NBYTES} bytes")
            return IdRing(FileMap(descriptor, nbytes, writable=True).memory)
        finally:
            self._close(descriptor)

    def detach(self, number: int) -> None:
        self._files.pop(number, None)  # it is let go of when nothing refers to it any more

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        distinct, which = distinct_files(numbers)
        try:
            files = [self._files[number] for number in distinct]
        except KeyError as error:
            raise RemoteMemoryError(f"a block in file {error}, which was not shared") from None
        places = places_inside(offsets, size, which, [each.nbytes for each in files])
        return self._blocks(files, which, places, size)

    def close(self) -> None:
        while self._descriptors:
            self._close(self._descriptors.popleft())
        self._files.clear()


class _MappedFiles(_Files[FileMap]):
    """They are mapped to be read."""

    def __init__(self, must_stay: bool, touched: Touched | None, close: Callable[[int], None]) -> None:
        super().__init__(must_stay, close)
        self._touched = touched

    def _opened(self, descriptor: int, nbytes: int) -> FileMap:
        return FileMap(descriptor, nbytes)

    def _blocks(self, files: list[FileMap], which: Places, places: Places, size: int) -> RemoteBlocks:
        return _MappedBlocks(files, which, places, size, self._touched)

    def detach(self, number: int) -> None:
        if self._touched is not None and number in self._files:
            self._touched.forget([self._files[number]])
        super().detach(number)

    def close(self) -> None:
        if self._touched is not None:
            self._touched.forget(self._files.values())
        super().close()


class _OpenFiles(_Files[_OpenFile]):
    """They are read by system calls."""

    def _opened(self, descriptor: int, nbytes: int) -> _OpenFile:
        return _OpenFile(descriptor, nbytes)

    def _blocks(self, files: list[_OpenFile], which: Places, places: Places, size: int) -> RemoteBlocks:
        return _CopiedBlocks(files, which, places, size)


class _Descriptors:
    """Files of shared memory, whose descriptors travel over a Unix socket beside the message that names them."""

    mapped = True

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        return Handle(descriptors=(descriptor(),))

    def withdraw(self, memory: memoryview) -> None:
        """The file was cut to nothing."""

    def progress(self) -> None:
        """Who has mapped a file reads it alone."""

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> RemoteMemory:
        return _MappedFiles(must_stay, touched, close)


class _Unmapped(_Descriptors):
    """The same files, where the other side is not trusted: they are read by system calls. Reading a hole of a mapped
    file would give it a page, at the expense of who reads; a system call does not. It is slower."""

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> RemoteMemory:
        return _OpenFiles(must_stay, close)


DESCRIPTORS: Final = _Descriptors()
UNMAPPED: Final = _Unmapped()
