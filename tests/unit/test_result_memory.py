"""The memory of results: used again when nobody can see it, and never before."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore_client._links.buffers import KEPT_BYTES, ResultMemory

SIZE = 1 << 16


def address(memory: object) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data  # type: ignore[call-overload,no-any-return] # any buffer


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    memory = ResultMemory()
    first = memory.take(SIZE)
    where = address(first)
    del first
    assert address(memory.take(SIZE // 2)) == where
    assert address(memory.take(SIZE)) == where
    assert len(memory.take(2 * SIZE)) == 2 * SIZE


@pytest.mark.parametrize(
    "view",
    [
        lambda taken: taken,
        lambda taken: taken[10:20],
        lambda taken: taken.reshape(-1, 16)[3],
        lambda taken: memoryview(taken)[5:6],
        lambda taken: memoryview(taken.reshape(-1)).toreadonly()[8:16],
        lambda taken: np.frombuffer(memoryview(taken)[1:9], dtype=np.uint8),
        lambda taken: taken.view(np.uint64)[:1],
        lambda taken: iter(memoryview(taken)),
    ],
)
def test_memory_that_anything_refers_to_is_left_alone(view: object) -> None:
    memory = ResultMemory()
    held = view(memory.take(SIZE))  # type: ignore[operator] # each is a function
    where = address(memory._kept[0])
    for _ in range(3):
        assert address(memory.take(SIZE)) != where
    del held


def test_a_tensor_keeps_its_memory() -> None:
    torch = pytest.importorskip("torch")
    memory = ResultMemory()
    tensor = torch.frombuffer(memory.take(SIZE), dtype=torch.uint8)[:4]
    where = tensor.data_ptr()
    assert address(memory.take(SIZE)) != where


def test_large_memory_is_not_kept() -> None:
    memory = ResultMemory()
    memory.take(KEPT_BYTES + 1)
    assert not memory._kept


def test_threads_never_share_memory() -> None:
    memory = ResultMemory()
    failures: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            mine = memory.take(SIZE)
            mine[:] = number
            if (mine != number).any():
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
