"""Reads blocks with NIXL, which uses RDMA if a network card supports it, and otherwise the best way that UCX finds.

The extra ``llm-kvstore[nixl]`` installs NIXL. The owner registers its pieces of memory. A reader gets their keys, and
its card reads blocks into registered memory of the reader. From there the blocks are copied to their places, and hashed
on the way. Without a card, UCX needs the owner's help, because it makes progress only inside calls. NIXL's thread for
these calls always takes a whole core, so it is not started, and the owner calls `progress` while blocks are lent.

Each process makes one agent on first use, and a forked child makes its own. Before that, a separate process tries the
library, because it is native code that crashes on some machines.
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
    Offsets,
    RemoteBlocks,
    RemoteMemoryError,
    Sums,
    Touched,
    places_inside,
)
from kvstore.wire.transports._trial import trial

NIXL_GROUP_BYTES: Final = 8 << 20  # read at a time (at least one block), while the group before is being copied
SPARE_LANDINGS: Final = 4  # pieces of memory that stay registered for the next reads
READ_TIMEOUT_S: Final = 1.0  # per group, because an owner that is gone may never answer
SPINS: Final = 200  # how often a read in progress is checked before the thread sleeps between checks
NAP_S: Final = 50e-6

_PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")  # one for each GPU platform; each works without a GPU

log = logging.getLogger(__name__)


def nixl_package() -> str:
    """Return the name of the installed NIXL package; empty if there is none."""
    return next((package for package in _PACKAGES if importlib.util.find_spec(package)), "")


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    """The content of a handle to a piece of memory."""

    address: int
    nbytes: int
    metadata: bytes  # the owner's agent, how to reach it, and the key to this piece only


_decode_piece: Final = msgspec.msgpack.Decoder(_Piece).decode


@dataclass(eq=False)
class _Landing:
    """Registered memory for two groups of blocks."""

    memory: npt.NDArray[np.uint8]
    registration: Any


@dataclass(eq=False)
class _Owner:
    """An agent of another process, as this process's agent knows it.

    `pieces`: the loaded pieces, by address. `problem`: why the agent cannot be reached; empty if it can.
    """

    name: str
    problem: str = ""
    pieces: dict[int, _Piece] = field(default_factory=dict)
    reading: threading.Lock = field(default_factory=threading.Lock)  # held during a read, and to change `pieces`


class Nixl:
    """A `Sharing`. Thread-safe."""

    mapped = False

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its thread holds it
        self._kept: list[Any] = []  # must not be freed: made before a fork, or used by reads that did not end
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
        """This process's agent. The caller must hold the lock. Raises `OSError`."""
        if self._agent is None:
            api = importlib.import_module(f"{nixl_package()}._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            try:
                config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
                self._agent = api.nixl_agent(f"kvstore-{uuid.uuid4().hex}", config)
            except Exception as error:  # NIXL's errors have no other common base
                raise OSError(f"NIXL cannot be used: {error}") from error
        return self._agent

    # ---- the owner -------------------------------------------------------------------------------------------

    def offer(self, memory: memoryview, descriptor: Callable[[], int]) -> Handle:
        """Register memory, unless it is registered already. Return its handle. Raises `OSError`."""
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
        """End a registration, so that no process can read this memory with its key any more."""
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        with self._lock:
            found = self._offered.pop(address, None)
            if found is not None:
                self.agent.deregister_memory(found[0])

    def progress(self) -> None:
        """Let UCX serve readers that have no network card or that are connecting. This takes little time."""
        with self._lock:
            if self._agent is not None:
                try:
                    self._agent.get_new_notifs()
                except Exception as error:  # see `agent`; readers without an answer continue in band
                    log.warning("nixl: no progress: %s", error)

    # ---- the reader ------------------------------------------------------------------------------------------

    def remote(
        self, must_stay: bool, touched: Touched | None = None, close: Callable[[int], None] = os.close
    ) -> _NixlMemory:
        return _NixlMemory(self)

    def load(self, piece: _Piece) -> _Owner:
        """Load a piece's key, and return the owner. Raises `RemoteMemoryError`, and `OSError` if there is no agent."""
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
            if before != piece:  # this piece has replaced another one at its address: forget the old key
                with self._lock:
                    agent.remove_remote_agent(name)
                    for each in owner.pieces.values():
                        agent.add_remote_agent(each.metadata)
        return owner

    def _unload(self, name: str) -> None:
        """Remove an owner that no connection reads from any more."""
        with self._lock:
            if self._agent is not None and name not in self._owners:
                try:
                    self._agent.remove_remote_agent(name)
                except Exception as error:  # see `agent`; its process may have gone
                    log.debug("nixl: %s: %s", name, error)

    @contextlib.contextmanager
    def landing(self, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Provide registered memory for two groups of blocks of this size. Raises `RemoteMemoryError`."""
        nbytes = 2 * max(NIXL_GROUP_BYTES // size, 1) * size
        landing = self._take_landing(max(nbytes, 2 * NIXL_GROUP_BYTES))
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

    def begin(self, owner: _Owner, local: Offsets, remote: Offsets, size: int) -> Any:
        """Begin to read blocks from addresses of the owner to addresses of this process. Return the read in progress.
        Raises `RemoteMemoryError`."""
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
                raise RemoteMemoryError(f"the read could not begin: {error}") from error
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
    """Return the `Nixl` of this process, or None if NIXL does not work here; the log says why. Raises `ImportError` if
    NIXL is not installed. The call takes a second."""
    if not nixl_package():
        raise ImportError("NIXL is not installed; run pip install llm-kvstore[nixl]")
    problem = trial(__name__)
    if problem:
        log.warning("nixl is not used: %s", problem)
        return None
    return Nixl()


def _register(agent: Any, address: int, nbytes: int) -> Any:
    return agent.register_memory([(address, nbytes, 0, "")], "DRAM")


def _rows(addresses: Offsets, size: int) -> npt.NDArray[np.uint64]:
    """Return the blocks in NIXL's form: a row of address, size and device number for each block."""
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = addresses, size
    return rows


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


class _NixlBlocks:
    def __init__(self, nixl: Nixl, owner: _Owner, addresses: Offsets, size: int) -> None:
        self._nixl, self._owner, self._addresses, self._size = nixl, owner, addresses, size

    def read(self, out: Any, places: Offsets, in_all: int = 0) -> Sums:
        nixl, size, count = self._nixl, self._size, len(places)
        if self._owner.problem:
            raise RemoteMemoryError(self._owner.problem)
        sums = np.empty(count, dtype=np.uint64)
        with self._owner.reading, nixl.landing(size) as memory:
            group = len(memory) // 2 // size
            offsets = np.arange(2 * group, dtype=np.int64) * size

            def begin(start: int) -> tuple[Any, Offsets]:
                """Begin to read a group into one half of `memory`. The next group goes to the other half."""
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
    """The pieces whose keys one connection has received."""

    waiting = 0

    def __init__(self, nixl: Nixl) -> None:
        self._nixl = nixl
        self._pieces: dict[int, tuple[_Owner, _Piece]] = {}

    def receive(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    def discard(self) -> None:
        """Do nothing, because no descriptor belongs to a piece."""

    def attach(self, number: int, nbytes: int, handle: bytes) -> None:
        try:
            piece = _decode_piece(handle)
        except msgspec.DecodeError as error:
            raise RemoteMemoryError(f"piece {number}: {error}: expected an address and a key") from None
        if number in self._pieces or not 0 < nbytes == piece.nbytes or not 0 < piece.address < 1 << 63:
            raise RemoteMemoryError(f"piece {number} of {nbytes} bytes: it is attached, or its key is for other memory")
        try:
            owner = self._nixl.load(piece)
        except (RemoteMemoryError, OSError) as error:  # the owner may have ended, but its message is valid
            owner = _Owner("", str(error))
        self._pieces[number] = owner, piece

    def attach_ring(self, nbytes: int) -> IdRing:
        raise RemoteMemoryError("a release ring cannot be used: this memory is not mapped")

    def detach(self, number: int) -> None:
        self._pieces.pop(number, None)

    def blocks(self, numbers: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64], size: int) -> RemoteBlocks:
        distinct, which = distinct_files(numbers)
        missing = [number for number in distinct if number not in self._pieces]
        if missing or not distinct:
            raise RemoteMemoryError(f"a block is in piece {missing}, which was not shared")
        found = [self._pieces[number] for number in distinct]
        owner = next((each for each, _ in found if each.problem), found[0][0])
        if not owner.problem and any(each is not owner for each, _ in found):
            raise RemoteMemoryError("blocks of two processes: expected blocks of this connection's peer only")
        places = places_inside(offsets, size, which, [piece.nbytes for _, piece in found])
        starts = np.array([piece.address for _, piece in found], dtype=np.int64)
        return _NixlBlocks(self._nixl, owner, starts[which] + places, size)

    def close(self) -> None:
        self._pieces.clear()


def _try_out() -> None:
    """Try the library: read memory of one agent with another. Raises an error if that fails."""
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
        raise RuntimeError("the bytes that were read differ from those in memory")


if __name__ == "__main__":
    _try_out()
