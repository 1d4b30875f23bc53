"""Page-locked host memory for a device: how it is locked in pieces, how large it is, and when it is released.

On the CPU, a stand-in for the driver records its calls, and the tests check what was requested.
"""

from __future__ import annotations

import gc
import mmap
import threading
import warnings

import numpy as np
import pytest

from kvstore_client.memory import host_memory, region_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    torch = pytest.importorskip("torch")
    from kvstore_client.engine.paged import device as device_module
    from kvstore_client.engine.paged.device import pinned_rows
    from kvstore_client.engine.paged.layout import Rows
    from tests.gpu.paged_caches import UNTOUCHED, ordered, random_bytes

ROW_BYTES = 1536


class Locks:
    """Records which memory is locked. Like a driver, it refuses memory that is locked already; it also refuses calls
    beyond `most_calls`."""

    def __init__(self, device: str) -> None:
        self.locked: dict[int, int] = {}
        self.most_calls = 1 << 30
        self._register, self._unregister = device_module.host_register() if device == "cuda" else (None, None)

    def register(self, address: int, size: int) -> bool:
        if len(self.locked) >= self.most_calls:
            return False
        if self._register is None:
            can = not any(address < start + bytes_ and start < address + size for start, bytes_ in self.locked.items())
        else:
            can = self._register(address, size)
        if can:
            self.locked[address] = size
        return can

    def unregister(self, address: int) -> None:
        if self._unregister is not None:
            self._unregister(address)
        del self.locked[address]


@pytest.fixture
def locks(device: str, monkeypatch: pytest.MonkeyPatch) -> Locks:
    locks = Locks(device)
    monkeypatch.setattr(device_module, "host_register", lambda: (locks.register, locks.unregister))
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return locks


def on(device: str) -> torch.device:
    return torch.device(device, 0)


def is_locked(memory: Rows) -> bool:
    return bool(torch.from_numpy(memory).is_pinned())


def test_the_requested_number_of_rows_is_locked(device: str, locks: Locks) -> None:
    pool = pinned_rows(11, ROW_BYTES, on(device))
    assert pool.shape == (11, ROW_BYTES) and pool.ctypes.data % mmap.PAGESIZE == 0
    assert locks.locked == {pool.ctypes.data: pool.nbytes}
    if device == "cuda":
        assert is_locked(pool) and is_locked(pool[-1])


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
def test_rows_are_unlocked_with_their_last_view(device: str, locks: Locks, shared: bool) -> None:
    rows = host_memory(11, ROW_BYTES) if shared else None
    pool = pinned_rows(11, ROW_BYTES, on(device), rows)
    row: Rows = pool[3]
    row[...] = 7
    del rows, pool
    gc.collect()
    assert locks.locked
    if device == "cuda":
        assert is_locked(row)
    assert (row == 7).all()
    del row
    gc.collect()
    assert not locks.locked


def test_the_last_view_may_belong_to_another_thread(device: str, locks: Locks) -> None:
    """The thread that drops the last view has not used the device."""
    views = [pinned_rows(11, ROW_BYTES, on(device))[5]]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert not locks.locked


def test_a_thread_that_has_not_used_the_device_makes_rows(device: str, locks: Locks) -> None:
    made: list[Rows] = []
    thread = threading.Thread(target=lambda: made.append(pinned_rows(11, ROW_BYTES, on(device))))
    thread.start()
    thread.join()
    assert locks.locked == {made[0].ctypes.data: 11 * ROW_BYTES}


def test_released_memory_can_be_locked_again(device: str, locks: Locks) -> None:
    """The same memory is locked again: it outlives the array over it."""
    buffer = mmap.mmap(-1, 8 * mmap.PAGESIZE)

    def lock() -> Rows:
        return pinned_rows(8, mmap.PAGESIZE, on(device), _over(buffer))

    for _ in range(3):
        pool = lock()
        with pytest.raises(ValueError, match="does not page-lock"):
            lock()
        assert list(locks.locked) == [pool.ctypes.data]
        del pool
        gc.collect()
        assert not locks.locked


def _over(buffer: mmap.mmap) -> Rows:
    return np.frombuffer(buffer, dtype=np.uint8).reshape(8, mmap.PAGESIZE)


def test_a_refusal_leaves_nothing_locked(device: str, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "PINNED_PIECE_BYTES", 1)
    locks.most_calls = 3
    with pytest.raises(ValueError, match=r"does not page-lock .* Lower cpu_bytes"):
        pinned_rows(64, ROW_BYTES, on(device))
    assert not locks.locked
    locks.most_calls = 100
    assert len(pinned_rows(64, ROW_BYTES, on(device))) == 64


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
def test_rows_in_many_pieces_are_copied_byte_by_byte(
    device: str, locks: Locks, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """No row crosses two pieces, and all rows are locked."""
    monkeypatch.setattr(device_module, "PINNED_PIECE_BYTES", 45_000)
    cache = ordered(device, num_blocks=100)
    layout = cache.layout()
    assert layout.slice_bytes == ROW_BYTES
    pool = layout.pool(100, shared=shared)
    if device == "cpu":
        pool = pinned_rows(100, ROW_BYTES, on(device), pool if shared else None)
    whole = np.lcm(ROW_BYTES, mmap.PAGESIZE)
    assert list(locks.locked.values()) == [3 * whole] * 4 + [100 * ROW_BYTES - 12 * whole]
    assert all((start - pool.ctypes.data) % ROW_BYTES == 0 for start in locks.locked)
    if device == "cuda":
        assert all(map(is_locked, pool))
    assert (region_of(pool.ctypes.data, pool.nbytes) is not None) == shared
    pool[...] = UNTOUCHED
    layout.swap_out(range(100), pool, range(99, -1, -1)).wait()
    assert np.array_equal(pool[::-1], cache.blocks())
    pool[...] = random_bytes(3, pool.size).reshape(pool.shape)
    layout.swap_in(pool, range(100), range(100), layout.fence()).wait()
    assert np.array_equal(cache.blocks(), pool)


def test_the_driver_locks_memory_once_and_unlocks_it(cuda: str) -> None:
    """The test calls the driver's real functions, without the records of the other tests."""
    register, unregister = device_module.host_register()
    buffer = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    rows = _over(buffer)
    for _ in range(2):
        assert not is_locked(rows)
        assert register(rows.ctypes.data, rows.nbytes) is True and is_locked(rows)
        assert register(rows.ctypes.data, rows.nbytes) is False and is_locked(rows), "it is locked already"
        unregister(rows.ctypes.data)
    assert not is_locked(rows)
