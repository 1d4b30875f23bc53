"""A third way to move blocks by reference: within one process, by a thread that acts as a network card.

It has the properties of RDMA that mapped memory lacks. The other side's memory is registered under a key and cannot be
addressed. Another agent reads that memory; the read completes later, or fails.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore._cext import IdRing, LentBlocks, copy_blocks, distinct_files
from kvstore.wire.remote_memory import (
    Handle,
    Offsets,
    RemoteBlocks,
    RemoteMemoryError,
    Sums,
    Touched,
    places_inside,
)


@dataclass
class _Read:
    """A read that the card must make."""

    memories: list[memoryview]
    which: Offsets
    offsets: Offsets
    size: int
    out: Any
    places: Offsets
    sums: Sums | None = None
    completed: threading.Event = field(default_factory=threading.Event)


class Fabric:
    """A `Sharing`. `reads`: the number of blocks moved so far. `broken`: whether reads fail. `progress_s`: the seconds
    that each progress call takes."""

    mapped = False

    def __init__(self) -> None:
        self.reads = 0
        self.broken = False
        self.progress_s = 0.0
        self._registered: dict[bytes, memoryview] = {}
        self._queue: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._card = threading.Thread(target=self._run, name="fabric")
        self._card.start()

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        key = secrets.token_bytes(8)
        self._registered[key] = memory
        return Handle(data=key)

    def withdraw(self, memory: memoryview) -> None:
        """Forget its keys."""
        for key in [key for key, each in self._registered.items() if each.obj is memory.obj and each == memory]:
            del self._registered[key]

    def progress(self) -> None:
        """Do nothing, because the card works by itself."""
        time.sleep(self.progress_s)

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> _FabricMemory:
        return _FabricMemory(self)

    def find(self, key: bytes) -> memoryview | None:
        """Return the memory that is registered under a key."""
        return self._registered.get(key)

    def read(self, read: _Read) -> Sums:
        """Make the card read blocks, and wait until it has read them."""
        self._queue.put(read)
        read.completed.wait()
        if read.sums is None:
            raise RemoteMemoryError("the fabric is broken")
        return read.sums

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            if not self.broken:
                read.sums = copy_blocks(read.memories, read.which, read.offsets, read.size, read.out, read.places)
                self.reads += len(read.places)
            read.completed.set()

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._card.join()


class _FabricBlocks:
    def __init__(self, fabric: Fabric, memories: list[memoryview], which: Offsets, offsets: Offsets, size: int) -> None:
        self._fabric, self._memories, self._which, self._offsets, self._size = fabric, memories, which, offsets, size

    def read(self, out: Any, places: Offsets, in_all: int = 0) -> Sums:
        return self._fabric.read(_Read(self._memories, self._which, self._offsets, self._size, out, places))

    def some(self, part: slice) -> RemoteBlocks:
        return _FabricBlocks(self._fabric, self._memories, self._which[part], self._offsets[part], self._size)

    def lent(self) -> LentBlocks | None:
        return None


class _FabricMemory:
    waiting = 0

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._attached: dict[int, memoryview] = {}

    def receive(self, descriptors: list[int]) -> None:
        raise AssertionError("no descriptors travel here")

    def discard(self) -> None:
        """Do nothing: there is none."""

    def attach(self, number: int, nbytes: int, handle: bytes) -> None:
        memory = self._fabric.find(handle)
        if memory is None or len(memory) != nbytes or number in self._attached:
            raise RemoteMemoryError(f"piece {number} of {nbytes} bytes: its key is of other memory, or it is attached")
        self._attached[number] = memory

    def attach_ring(self, nbytes: int) -> IdRing:
        raise RemoteMemoryError("a release ring: this memory is not mapped")

    def detach(self, number: int) -> None:
        self._attached.pop(number, None)

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        distinct, which = distinct_files(numbers)
        missing = [number for number in distinct if number not in self._attached]
        if missing:
            raise RemoteMemoryError(f"a block in piece {missing[0]}, which was not shared")
        memories = [self._attached[number] for number in distinct]
        places = places_inside(offsets, size, which, [len(memory) for memory in memories])
        return _FabricBlocks(self._fabric, memories, which, places, size)

    def close(self) -> None:
        self._attached.clear()
