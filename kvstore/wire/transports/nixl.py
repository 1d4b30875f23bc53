"""Blocks read with NIXL: with RDMA where there is a network card for it, else with what UCX finds.

The extra ``llm-kvstore[nixl]`` brings the library. The owner registers its pieces; a reader gets their keys, and has
its card read blocks into memory of its own that is registered as well, from which they are copied to where they belong
and hashed on the way. A UCX that has no such card needs the owner's help: it makes progress only inside calls. NIXL has
a thread for that, which takes a whole core even while nothing happens, so it is not started; the owner calls `progress`
while blocks are lent.

Agents are made on first use, one a process: a child that was forked makes its own. Before that, another process tries
the library: it is native code, and on some machines it crashes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import resource
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore._cext import IdRing, LentBlocks, copy_blocks, distinct_files
from kvstore.wire.remote_memory import (
    Handle,
    Places,
    RemoteBlocks,
    RemoteMemoryError,
    Sums,
    Touched,
    places_inside,
)
from kvstore.wire.transports._trial import trial

GROUP_BYTES: Final = 8 << 20  # read at a time, or one block: the next ones arrive while these are copied
SPARE_LANDINGS: Final = 4  # kept registered for the next reads
READ_TIMEOUT_S: Final = 1.0  # for a group; an owner that is gone may never answer, and the call waits for so long
SPINS: Final = 200  # looks at a read that is under way, before the thread sleeps between them
NAP_S: Final = 50e-6

_PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")  # by the version of CUDA; without a GPU each of them works

log = logging.getLogger(__name__)


def nixl_package() -> str:
    """-> the name of the installed package of NIXL; empty: there is none."""
    return next((package for package in _PACKAGES if importlib.util.find_spec(package)), "")


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    """What a handle says of a piece of memory."""

    address: int
    nbytes: int
    metadata: bytes  # the owner's agent, how to reach it, and the key to this piece alone


_decode_piece: Final = msgspec.msgpack.Decoder(_Piece).decode


@dataclass(eq=False)
class _Landing:
    """Registered memory for two groups of blocks."""

    memory: npt.NDArray[np.uint8]
    registration: Any


@dataclass(eq=False)
class _Owner:
    """An agent of another process, as this process's agent knows it. `pieces`: by address, what was loaded. `problem`:
    why it cannot be reached."""

    name: str
    problem: str = ""
    pieces: dict[int, _Piece] = field(default_factory=dict)
    reading: threading.Lock = field(default_factory=threading.Lock)  # held for a read, and to change `pieces`


class Nixl:
    """A `Sharing`. Thread-safe."""

    mapped = False

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its thread holds it
        self._kept: list[Any] = []  # what must not be freed: of a process that forked, or of reads that did not end
        self._forget()
        os.register_at_fork(after_in_child=self._after_fork)

    def _forget(self) -> None:
        self._agent: Any = None
        self._offered: dict[int, tuple[Any, Handle]] = {}  # by address
        self._owners: weakref.WeakValueDictionary[str, _Owner] = weakref.WeakValueDictionary()
        self._landings: list[_Landing] = []

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its thread holds it
        self._kept.append((self._agent, self._offered, self._landings))  # ending the parent's agent could hang
        self._forget()

    @property
    def agent(self) -> Any:
        """This process's agent; for who holds the lock. Raises `OSError`."""
        if self._agent is None:
            api = importlib.import_module(f"{nixl_package()}._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            try:
                config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
                self._agent = api.nixl_agent(f"kvstore-{uuid.uuid4().hex}", config)
            except Exception as error:  # NIXL's errors have no base but this
                raise OSError(f"NIXL cannot be used: {error}") from error
        return self._agent

    # ---- the owner -------------------------------------------------------------------------------------------

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        """Register memory, unless it is registered already. Raises `OSError`."""
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        with self._lock:
            if address not in self._offered:
                agent = self.agent
                try:
                    registration = _register(agent, address, len(memory))
                    metadata = agent.get_partial_agent_metadata(registration, True, ["UCX"])
                except Exception as error:  # see `agent`
                    raise OSError(f"{len(memory)} bytes cannot be registered: {error}") from error
                data = msgspec.msgpack.encode(_Piece(address, len(memory), metadata))
                self._offered[address] = registration, Handle(data)
            return self._offered[address][1]

    def withdraw(self, memory: memoryview) -> None:
        """End a registration: nobody can read this memory with its key any more."""
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        with self._lock:
            found = self._offered.pop(address, None)
            if found is not None:
                self.agent.deregister_memory(found[0])

    def progress(self) -> None:
        """Let UCX answer those who read without a network card, or connect. Short."""
        with self._lock:
            if self._agent is not None:
                try:
                    self._agent.get_new_notifs()
                except Exception as error:  # see `agent`; readers that wait in vain go on in band
                    log.warning("nixl: no progress: %s", error)

    # ---- the reader ------------------------------------------------------------------------------------------

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> _NixlMemory:
        return _NixlMemory(self)

    def load(self, piece: _Piece) -> _Owner:
        """Learn the key to a piece. -> its owner. Raises `RemoteMemoryError`, and `OSError` when there is no agent."""
        with self._lock:
            agent = self.agent
            try:
                name = _text(agent.add_remote_agent(piece.metadata))
            except Exception as error:  # see `agent`
                raise RemoteMemoryError(f"its key cannot be used: {error}") from error
            owner = self._owners.get(name)
            if owner is None:
                owner = self._owners[name] = _Owner(name)
                weakref.finalize(owner, self._unload, name).atexit = False
        with owner.reading:
            before = owner.pieces.get(piece.address, piece)
            owner.pieces[piece.address] = piece
            if before != piece:  # where a piece was, there is another one: forget the old key
                with self._lock:
                    agent.remove_remote_agent(name)
                    for each in owner.pieces.values():
                        agent.add_remote_agent(each.metadata)
        return owner

    def _unload(self, name: str) -> None:
        """Nobody reads an owner's pieces any more."""
        with self._lock:
            if self._agent is not None and name not in self._owners:
                try:
                    self._agent.remove_remote_agent(name)
                except Exception as error:  # see `agent`; its process may have gone
                    log.debug("nixl: %s: %s", name, error)

    @contextlib.contextmanager
    def landing(self, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Registered memory for two groups of blocks of this size. Raises `RemoteMemoryError`."""
        nbytes = 2 * max(GROUP_BYTES // size, 1) * size
        landing = self._take_landing(max(nbytes, 2 * GROUP_BYTES))
        try:
            yield landing.memory
        except BaseException:  # a read that did not end may still write there
            self._kept.append(landing)
            raise
        with self._lock:
            if len(self._landings) < SPARE_LANDINGS:
                self._landings.append(landing)
            else:
                self.agent.deregister_memory(landing.registration)

    def _take_landing(self, nbytes: int) -> _Landing:
        with self._lock:
            for landing in self._landings:
                if nbytes <= len(landing.memory):
                    self._landings.remove(landing)
                    return landing
            memory = np.empty(nbytes, dtype=np.uint8)
            try:
                return _Landing(memory, _register(self.agent, memory.ctypes.data, nbytes))
            except Exception as error:  # see `agent`
                raise RemoteMemoryError(f"{nbytes} bytes cannot be registered: {error}") from error

    def begin(self, owner: _Owner, local: Places, remote: Places, size: int) -> Any:
        """Begin to read blocks from the owner's addresses to addresses here. -> the read. Raises
        `RemoteMemoryError`."""
        with self._lock:
            agent = self.agent
            try:
                read = agent.initialize_xfer(
                    "READ",
                    agent.get_xfer_descs(_rows(local, size), "DRAM"),
                    agent.get_xfer_descs(_rows(remote, size), "DRAM"),
                    owner.name,
                )
                agent.transfer(read)
            except Exception as error:  # see `agent`
                raise RemoteMemoryError(f"reading began in vain: {error}") from error
            return read

    def finish(self, read: Any) -> None:
        """Wait for a read. Raises `RemoteMemoryError`."""
        agent, deadline, looks = self._agent, time.monotonic() + READ_TIMEOUT_S, 0
        try:
            while (state := agent.check_xfer_state(read)) == "PROC":
                looks += 1
                if looks % SPINS == 0 and time.monotonic() > deadline:
                    raise RemoteMemoryError(f"blocks were not read within {READ_TIMEOUT_S:g} s")
                time.sleep(0 if looks < SPINS else NAP_S)
        except RemoteMemoryError:
            raise
        except Exception as error:  # see `agent`
            raise RemoteMemoryError(f"reading failed: {error}") from error
        if state != "DONE":
            raise RemoteMemoryError("reading failed")
        agent.release_xfer_handle(read)


@functools.cache
def sharing() -> Nixl | None:
    """-> what this process uses; None: NIXL does not work here, as the log says. Raises `ImportError` if it is not
    installed. Takes a second."""
    if not nixl_package():
        raise ImportError("NIXL is not installed; expected pip install llm-kvstore[nixl]")
    problem = trial(__name__)
    if problem:
        log.warning("nixl is not used: %s", problem)
        return None
    return Nixl()


def _register(agent: Any, address: int, nbytes: int) -> Any:
    return agent.register_memory([(address, nbytes, 0, "")], "DRAM")


def _rows(addresses: Places, size: int) -> npt.NDArray[np.uint64]:
    """Blocks as NIXL takes them: address, size, number of the device."""
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = addresses, size
    return rows


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


class _NixlBlocks:
    def __init__(self, nixl: Nixl, owner: _Owner, addresses: Places, size: int) -> None:
        self._nixl, self._owner, self._addresses, self._size = nixl, owner, addresses, size

    def read(self, out: Any, places: Places, in_all: int = 0) -> Sums:
        nixl, size, count = self._nixl, self._size, len(places)
        if self._owner.problem:
            raise RemoteMemoryError(self._owner.problem)
        sums = np.empty(count, dtype=np.uint64)
        with self._owner.reading, nixl.landing(size) as memory:
            group = len(memory) // 2 // size
            offsets = np.arange(2 * group, dtype=np.int64) * size

            def begin(start: int) -> tuple[Any, Places]:
                """Have a group read to one half of the landing, the other half for the one after it."""
                addresses = self._addresses[start : start + group]
                half = offsets[start // group % 2 * group :][: len(addresses)]
                return nixl.begin(self._owner, half + memory.ctypes.data, addresses, size), half

            coming = begin(0) if count else None
            for start in range(0, count, group):
                assert coming is not None
                read, half = coming
                coming = begin(start + group) if start + group < count else None
                nixl.finish(read)
                part = slice(start, start + len(half))
                which = np.zeros(len(half), dtype=np.int64)
                sums[part] = copy_blocks([memory.data], which, half, size, out, places[part], in_all=in_all)
        return sums

    def some(self, part: slice) -> RemoteBlocks:
        return _NixlBlocks(self._nixl, self._owner, self._addresses[part], self._size)

    def lent(self) -> LentBlocks | None:
        return None


class _NixlMemory:
    """The pieces that one connection was given the keys to."""

    waiting = 0

    def __init__(self, nixl: Nixl) -> None:
        self._nixl = nixl
        self._pieces: dict[int, tuple[_Owner, _Piece]] = {}

    def receive(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    def discard(self) -> None:
        """No descriptor belongs to a piece."""

    def attach(self, number: int, nbytes: int, handle: bytes) -> None:
        try:
            piece = _decode_piece(handle)
        except msgspec.DecodeError as error:
            raise RemoteMemoryError(f"piece {number}: {error}: expected an address and a key") from None
        if number in self._pieces or not 0 < nbytes == piece.nbytes or not 0 < piece.address < 1 << 63:
            raise RemoteMemoryError(f"piece {number} of {nbytes} bytes: it is attached, or its key is of other memory")
        try:
            owner = self._nixl.load(piece)
        except (RemoteMemoryError, OSError) as error:  # its process may have ended: no fault of the message's
            owner = _Owner("", str(error))
        self._pieces[number] = owner, piece

    def attach_ring(self, nbytes: int) -> IdRing:
        raise RemoteMemoryError("a release ring: this memory is not mapped")

    def detach(self, number: int) -> None:
        self._pieces.pop(number, None)

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        distinct, which = distinct_files(numbers)
        missing = [number for number in distinct if number not in self._pieces]
        if missing or not distinct:
            raise RemoteMemoryError(f"a block in piece {missing}, which was not shared")
        found = [self._pieces[number] for number in distinct]
        owner = next((each for each, _ in found if each.problem), found[0][0])
        if not owner.problem and any(each is not owner for each, _ in found):
            raise RemoteMemoryError("blocks of two processes: expected those of the one that this connection goes to")
        places = places_inside(offsets, size, which, [piece.nbytes for _, piece in found])
        starts = np.array([piece.address for _, piece in found], dtype=np.int64)
        return _NixlBlocks(self._nixl, owner, starts[which] + places, size)

    def close(self) -> None:
        self._pieces.clear()


def _try_out() -> None:
    """Read some memory of one agent with another. Raises what goes wrong."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    owner, reader = Nixl(), Nixl()
    blocks = np.arange(4 * 4096, dtype=np.uint64).view(np.uint8).reshape(-1, 4096)
    handle = owner.offer(blocks.reshape(-1).data, lambda: -1)
    memory = reader.remote(must_stay=False)
    memory.attach(1, blocks.nbytes, handle.data)
    numbers, offsets = np.ones(len(blocks), np.uint64), np.arange(len(blocks), dtype=np.uint64) * 4096
    found, out = memory.blocks(numbers, offsets, 4096), np.zeros_like(blocks)
    reading = threading.Thread(target=found.read, args=(out, np.arange(len(blocks), dtype=np.int64)))
    reading.start()
    while reading.is_alive():
        owner.progress()
        reading.join(0.001)
    if not (out == blocks).all():
        raise RuntimeError("what was read is not what was there")


if __name__ == "__main__":
    _try_out()
