"""How blocks move by reference: one process reads memory of the process at the other end of a connection.

Messages always travel on the connection's socket. Blocks travel in one of two ways. *In band*, as over TCP, they are in
the messages that name them. *By reference*, a message says where a block is in the sender's memory, and the receiver
reads it there. The reader is a `RemoteMemory`, which a `Sharing` makes. Two processes of one host use `DESCRIPTORS`;
processes of different hosts use a `Transport`. docs/transports.md has the contract for other transports, and
`tests/unit/test_remote_memory.py` tests every implementation against it.
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
from kvstore.huge_pages import FileMap
from kvstore.plugins import TRANSPORTS

TOUCHED_BYTES: Final = 32 << 20  # after reading this much memory of others, a process releases its pages
MAX_PAGE_BYTES: Final = 64 << 10
MAX_OPEN: Final = 4096  # the most files of other processes that a process keeps open, with one descriptor each

Offsets = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]


class RemoteMemoryError(Exception):
    """The other side named memory that it has not shared, memory that differs from its description, or memory that can
    no longer be read."""


class Handle(NamedTuple):
    """What the other side needs to attach a piece of memory: bytes for a message, and descriptors that go with them.
    The holder of the handle closes the descriptors."""

    data: bytes = b""
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors after they were sent, or if they are not to be sent."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RemoteBlocks(Protocol):
    """Blocks in the other side's memory, at places that were checked."""

    def read(self, out: Any, places: Offsets, in_all: int = 0) -> Sums:
        """Read the blocks to `out`, as `copy_blocks` does, until all bytes have arrived. Return the checksums of the
        bytes that were read. If it raises `RemoteMemoryError`, these places of `out` may hold any bytes."""

    def some(self, part: slice) -> RemoteBlocks:
        """Return some of the blocks."""

    def lent(self) -> LentBlocks | None:
        """Return the blocks in place, or None if this process cannot address them and must read them."""


class RemoteMemory(Protocol):
    """The memory that the other side of one connection has shared. Only one thread at a time may use it; `RemoteBlocks`
    can be used in any thread."""

    @property
    def waiting(self) -> int:
        """The number of descriptors that have arrived, but whose messages have not been read yet."""

    def receive(self, descriptors: list[int]) -> None:
        """Take ownership of descriptors that arrived with bytes from the socket."""

    def discard(self) -> None:
        """Close the descriptor of a message that is refused, if it has one."""

    def attach(self, number: int, nbytes: int, handle: bytes) -> None:
        """Attach, under this number, a piece of memory that the other side shares.

        Raises `RemoteMemoryError`, and `OSError` or `ValueError` if it cannot be attached. A piece whose process cannot
        be reached may be attached nevertheless, but reading it fails.
        """

    def attach_ring(self, nbytes: int) -> IdRing:
        """Return a release ring that the other side shares. This needs mapped memory. Raises the errors of `attach`."""

    def detach(self, number: int) -> None:
        """Detach a piece to which no message refers any more. Does nothing if no piece has this number."""

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        """Return the blocks of `size` bytes at these offsets of these pieces. Raises `RemoteMemoryError` if a block is
        outside its piece, or its piece is not attached."""

    def close(self) -> None:
        """Release the memory, because the connection has ended. Blocks that `blocks` returned can still be read while
        the memory exists."""


class Sharing(Protocol):
    """A way to share memory between the two sides of a connection. Thread-safe.

    `mapped`: whether each side can address the other's memory. Only then can blocks be borrowed, and loans be returned
    through a ring.
    """

    mapped: bool

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        """Offer a piece of this process's memory to the other side. `descriptor()` makes a new descriptor of the file
        that holds this memory. Raises `OSError`."""

    def withdraw(self, memory: memoryview) -> None:
        """End the offer of this memory. After this call, no process can read it any more, because other data will take
        its place."""

    def progress(self) -> None:
        """Advance those reads of the other side that need this process. The memory's owner calls this while blocks are
        lent."""

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> RemoteMemory:
        """Return an object that reads the other side's memory.

        `must_stay`: attach only memory that the other side cannot take away.
        `touched`: counts the bytes that were read; may be None.
        `close`: the function that closes descriptors from the other side.
        """


class Transport(NamedTuple):
    """How clients read the memory of shards on other hosts. Both sides must use the transport of the same name."""

    name: str
    sharing: Sharing  # the implementation that this process uses

    @classmethod
    def of(cls, name: str | None) -> Transport | None:
        """Return the transport of this name, or None if there is no name or the transport does not work here. Raises
        `ValueError` for an unknown name, and `ImportError` if a package must be installed first."""
        sharing = TRANSPORTS.find(name)() if name else None
        return None if not name or sharing is None else cls(name, sharing)


class Touched:
    """Counts the bytes that a process has read from others' files since it last released their pages. Until the process
    releases them, the pages count as its own memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._maps: set[FileMap] = set()

    def add(self, maps: list[FileMap], blocks: int, size: int) -> None:
        """Count `blocks` blocks of this size that were read from these files. Whole pages are counted, because the
        blocks may not be adjacent."""
        self._maps.update(maps)
        self._bytes += blocks * (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        if self._bytes >= TOUCHED_BYTES:
            touched, self._maps, self._bytes = self._maps, set(), 0
            for each in touched:
                each.forget_pages()

    def forget(self, maps: Iterable[FileMap]) -> None:
        """Forget these mappings before they are unmapped."""
        self._maps.difference_update(maps)


def places_inside(
    offsets: npt.NDArray[np.uint64], size: int, which: npt.NDArray[np.int64], pieces: Sequence[int]
) -> Offsets:
    """Return the offsets of blocks of `size` bytes. Block i is in piece number `which[i]`, and `pieces` has the pieces'
    sizes. Raises `RemoteMemoryError` if a block is not inside its piece."""
    places = offsets.astype(np.int64)
    if not all_inside(places, size, which, np.array(pieces, dtype=np.int64)):
        raise RemoteMemoryError(f"a block of {size} bytes is outside its piece of memory")
    return places


class _MappedBlocks:
    def __init__(
        self, maps: list[FileMap], which: Offsets, offsets: Offsets, size: int, touched: Touched | None
    ) -> None:
        self._maps, self._which, self._offsets, self._size, self._touched = maps, which, offsets, size, touched

    def read(self, out: Any, places: Offsets, in_all: int = 0) -> Sums:
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
    """A file that another process shares. It is open but not mapped, and is closed when nothing refers to it. Raises
    `RemoteMemoryError` when too many are open. Thread-safe."""

    _count: ClassVar[int] = 0
    _counting: ClassVar[threading.RLock] = threading.RLock()  # a finalizer may run while its thread holds it

    def __init__(self, descriptor: int, nbytes: int) -> None:
        with self._counting:
            if _OpenFile._count >= MAX_OPEN:
                raise RemoteMemoryError(f"this process has {MAX_OPEN} files of other processes open, its limit")
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
    def __init__(self, files: list[_OpenFile], which: Offsets, offsets: Offsets, size: int) -> None:
        self._files, self._which, self._offsets, self._size = files, which, offsets, size

    def read(self, out: Any, places: Offsets, in_all: int = 0) -> Sums:
        memory = np.asarray(out)
        if memory.ndim > 1:
            memory, places = memory.reshape(-1), places * self._size
        sums = np.empty(len(places), dtype=np.uint64)
        for number, file in enumerate(self._files):
            of_it = np.flatnonzero(self._which == number)
            found = np.empty(len(of_it), dtype=np.uint64)
            status = read_blocks(file.descriptor, memory, places[of_it], self._offsets[of_it], self._size, None, found)
            if status.any():
                raise RemoteMemoryError("a block could not be read: its file is too short or damaged")
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
        self._descriptors: deque[int] = deque()  # descriptors whose messages have not been read yet
        self._files: dict[int, _File] = {}  # by number

    @abc.abstractmethod
    def _opened(self, descriptor: int, nbytes: int) -> _File:
        """Return the object that is kept for a file. The caller owns the descriptor."""

    @abc.abstractmethod
    def _blocks(self, files: list[_File], which: Offsets, places: Offsets, size: int) -> RemoteBlocks: ...

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
        self._files.pop(number, None)  # it is closed when nothing refers to it any more

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        distinct, which = distinct_files(numbers)
        try:
            files = [self._files[number] for number in distinct]
        except KeyError as error:
            raise RemoteMemoryError(f"a block is in file {error}, which was not shared") from None
        places = places_inside(offsets, size, which, [each.nbytes for each in files])
        return self._blocks(files, which, places, size)

    def close(self) -> None:
        while self._descriptors:
            self._close(self._descriptors.popleft())
        self._files.clear()


class _MappedFiles(_Files[FileMap]):
    """Files that are mapped to be read."""

    def __init__(self, must_stay: bool, touched: Touched | None, close: Callable[[int], None]) -> None:
        super().__init__(must_stay, close)
        self._touched = touched

    def _opened(self, descriptor: int, nbytes: int) -> FileMap:
        return FileMap(descriptor, nbytes)

    def _blocks(self, files: list[FileMap], which: Offsets, places: Offsets, size: int) -> RemoteBlocks:
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
    """Files that are read by system calls."""

    def _opened(self, descriptor: int, nbytes: int) -> _OpenFile:
        return _OpenFile(descriptor, nbytes)

    def _blocks(self, files: list[_OpenFile], which: Offsets, places: Offsets, size: int) -> RemoteBlocks:
        return _CopiedBlocks(files, which, places, size)


class _Descriptors:
    """Files of shared memory, whose descriptors travel over a Unix socket together with the message that names them."""

    mapped = True

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        return Handle(descriptors=(descriptor(),))

    def withdraw(self, memory: memoryview) -> None:
        """Do nothing, because the file was truncated to 0 bytes."""

    def progress(self) -> None:
        """Do nothing, because a process that has mapped a file reads it without help."""

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> RemoteMemory:
        return _MappedFiles(must_stay, touched, close)


class _Unmapped(_Descriptors):
    """The same files, read by system calls, for a side that does not trust the other one. Reading a hole of a mapped
    file would add a page to the file, and the page would count as the reader's memory. A system call adds no page, but
    is slower."""

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> RemoteMemory:
        return _OpenFiles(must_stay, close)


DESCRIPTORS: Final = _Descriptors()
UNMAPPED: Final = _Unmapped()
