"""The contract in docs/transports.md, which every way to move blocks by reference must meet."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvstore.plugins import TRANSPORTS
from kvstore.wire.remote_memory import DESCRIPTORS, Handle, RemoteMemory, RemoteMemoryError, Sharing
from kvstore.wire.transports.nixl import Nixl, nixl_package
from tests.support.fabric import Fabric

PIECE = 1 << 20
BLOCK = 5000


class Owner:
    """A process's pieces of memory, which it offers to the other side."""

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self._files: list[int] = []

    def piece(self, seed: int, nbytes: int = PIECE) -> tuple[memoryview, Handle]:
        file = os.memfd_create("piece", os.MFD_ALLOW_SEALING)
        self._files.append(file)
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = memoryview(mmap.mmap(file, nbytes))
        memory[:] = np.random.default_rng(seed).bytes(nbytes)
        return memory, self.sharing.offer(memory, lambda: os.dup(file))

    def close(self) -> None:
        for file in self._files:
            os.close(file)


@pytest.fixture(params=["descriptors", "fabric", "nixl"])
def sharing(request: pytest.FixtureRequest) -> Iterator[Sharing]:
    if request.param == "descriptors":
        yield DESCRIPTORS
        return
    if request.param == "nixl":
        if not nixl_package():
            pytest.skip("NIXL is not installed")
        yield TRANSPORTS.find("nixl")()
        return
    fabric = Fabric()
    try:
        yield fabric
    finally:
        fabric.close()


@pytest.fixture
def owner(sharing: Sharing) -> Iterator[Owner]:
    """An owner with a NIXL agent of its own, so that NIXL takes it for another process. It makes progress while it
    lends."""
    if sharing is DESCRIPTORS or isinstance(sharing, Fabric):
        owner = Owner(sharing)
        yield owner
        owner.close()
        return
    other, ended = Nixl(), threading.Event()

    def progress() -> None:
        while not ended.wait(0.001):
            other.progress()

    thread = threading.Thread(target=progress)
    thread.start()
    owner = Owner(other)
    yield owner
    owner.close()
    ended.set()
    thread.join()


@pytest.fixture(params=[True, False], ids=["must stay", "may go"])
def remote(sharing: Sharing, request: pytest.FixtureRequest) -> Iterator[RemoteMemory]:
    remote = sharing.remote(must_stay=request.param)
    yield remote
    remote.close()


def attach(remote: RemoteMemory, number: int, handle: Handle, nbytes: int = PIECE) -> None:
    if handle.descriptors:
        remote.receive([os.dup(each) for each in handle.descriptors])
    remote.attach(number, nbytes, handle.data)


def numbers(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def places(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_blocks_are_read_with_checksums_of_the_read_bytes(owner: Owner, remote: RemoteMemory) -> None:
    (first, one), (second, two) = owner.piece(1), owner.piece(2)
    attach(remote, 7, one)
    attach(remote, 2**40, two)
    expected = [first[0:BLOCK], second[PIECE - BLOCK :], first[12_345 : 12_345 + BLOCK]]
    blocks = remote.blocks(numbers(7, 2**40, 7), numbers(0, PIECE - BLOCK, 12_345), BLOCK)
    out = np.zeros((5, BLOCK), dtype=np.uint8)
    sums = blocks.read(out, places(4, 0, 2))
    assert [bytes(out[row]) for row in (4, 0, 2)] == [bytes(each) for each in expected]
    assert not out[[1, 3]].any()
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(each) for each in expected]
    flat = np.zeros(2 * BLOCK, dtype=np.uint8)
    assert blocks.some(slice(1, 3)).read(flat, places(BLOCK, 0)).tolist() == sums[1:].tolist()
    assert bytes(flat) == bytes(expected[2]) + bytes(expected[1])
    for handle in (one, two):
        handle.close()


def test_the_owners_writes_are_seen_by_the_next_read(owner: Owner, remote: RemoteMemory) -> None:
    memory, handle = owner.piece(1)
    attach(remote, 1, handle)
    handle.close()
    blocks, out = remote.blocks(numbers(1), numbers(64), BLOCK), np.zeros((1, BLOCK), dtype=np.uint8)
    blocks.read(out, places(0))
    memory[64 : 64 + BLOCK] = bytes([9]) * BLOCK
    blocks.read(out, places(0))
    assert (out == 9).all()


def test_addressable_blocks_are_lent_in_place(sharing: Sharing, owner: Owner, remote: RemoteMemory) -> None:
    memory, handle = owner.piece(1)
    attach(remote, 1, handle)
    handle.close()
    lent = remote.blocks(numbers(1, 1), numbers(0, BLOCK), BLOCK).lent()
    assert (lent is not None) == sharing.mapped
    if lent is not None:
        views = lent.views()
        assert [bytes(view) for view in views] == [bytes(memory[:BLOCK]), bytes(memory[BLOCK : 2 * BLOCK])]
        memory[0] ^= 1
        assert views[0][0] == memory[0] and views[0].readonly


@pytest.mark.parametrize(
    ("number", "offset", "size"),
    [(1, PIECE - BLOCK + 1, BLOCK), (1, 2**63, BLOCK), (1, 2**64 - 1, BLOCK), (1, 0, PIECE + 1), (2, 0, BLOCK)],
)
def test_a_missing_block_is_refused_before_anything_is_read(
    number: int, offset: int, size: int, owner: Owner, remote: RemoteMemory
) -> None:
    _, handle = owner.piece(1)
    attach(remote, 1, handle)
    handle.close()
    with pytest.raises(RemoteMemoryError, match="a block"):
        remote.blocks(numbers(1, number), numbers(0, offset), size)


def test_a_piece_of_wrong_size_or_used_number_is_refused(owner: Owner, remote: RemoteMemory) -> None:
    _, handle = owner.piece(1)
    attach(remote, 1, handle)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RemoteMemoryError):
        attach(remote, 1, handle)
    with pytest.raises(RemoteMemoryError):
        attach(remote, 2, handle, PIECE + 1)
    with pytest.raises(RemoteMemoryError):
        remote.attach(3, PIECE, b"no such key")
    if owner.sharing.mapped:  # NIXL's own threads may open descriptors at any time
        assert len(os.listdir("/proc/self/fd")) == open_before
    handle.close()


def test_a_detached_piece_is_read_only_by_earlier_lookups(owner: Owner, remote: RemoteMemory) -> None:
    memory, handle = owner.piece(1)
    attach(remote, 1, handle)
    handle.close()
    found = remote.blocks(numbers(1), numbers(0), BLOCK)
    remote.detach(1)
    remote.detach(1)
    with pytest.raises(RemoteMemoryError):
        remote.blocks(numbers(1), numbers(0), BLOCK)
    out = np.zeros((1, BLOCK), dtype=np.uint8)
    found.read(out, places(0))
    remote.close()
    found.read(out, places(0))
    assert bytes(out) == bytes(memory[:BLOCK])


def test_many_threads_read_concurrently(owner: Owner, remote: RemoteMemory) -> None:
    memory, handle = owner.piece(1)
    attach(remote, 1, handle)
    handle.close()
    wrong: list[int] = []

    def read(start: int) -> None:
        out = np.zeros((1, BLOCK), dtype=np.uint8)
        for at in range(start, start + 200):
            blocks = remote.blocks(numbers(1), numbers(at), BLOCK)
            blocks.read(out, places(0))
            if bytes(out) != bytes(memory[at : at + BLOCK]):
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(start * 1000,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_that_the_owner_could_truncate_is_refused_where_it_must_stay() -> None:
    """Reading truncated memory would end the process. Only memory from files can be truncated."""
    file = os.memfd_create("piece", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, PIECE)
    remote = DESCRIPTORS.remote(must_stay=True)
    remote.receive([os.dup(file)])
    with pytest.raises(RemoteMemoryError, match="sealed against shrinking"):
        remote.attach(1, PIECE, b"")
    with pytest.raises(RemoteMemoryError, match="without a descriptor"):
        remote.attach(1, PIECE, b"")
    os.close(file)
