"""The memory of results is reused only when no code refers to it any more."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.wire import frame_blocks
from kvstore.wire.dealer import FrameBuffers
from kvstore_client._links.buffers import KEPT_BUFFERS, ResultMemory

SIZE = 1 << 16


def lazily_freed_bytes(where: int) -> int:
    """Return how much of the memory at this address the kernel may reclaim."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first <= where < last
        elif inside and line.startswith("LazyFree:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such memory")


def address(memory: object) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data  # type: ignore[call-overload,no-any-return] # any buffer


def test_unreferenced_memory_is_reused() -> None:
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
def test_referenced_memory_is_never_reused(view: object) -> None:
    memory = ResultMemory()
    taken = memory.take(SIZE)
    where, held = address(taken), view(taken)  # type: ignore[operator] # each is a function
    del taken
    for _ in range(3):
        assert address(memory.take(SIZE)) != where
    del held


def test_a_tensor_keeps_its_memory() -> None:
    torch = pytest.importorskip("torch")
    memory = ResultMemory()
    tensor = torch.frombuffer(memory.take(SIZE), dtype=torch.uint8)[:4]
    where = tensor.data_ptr()
    assert address(memory.take(SIZE)) != where


def test_large_memory_is_reused_and_the_kernel_may_take_it_meanwhile() -> None:
    memory = ResultMemory()
    taken = memory.take(KEPT_BUFFERS + SIZE)
    taken[:] = 1
    where = address(taken)
    assert lazily_freed_bytes(where) == 0
    del taken
    assert lazily_freed_bytes(where) >= KEPT_BUFFERS // 2  # as far as the kernel has counted it
    taken = memory.take(KEPT_BUFFERS + SIZE)
    assert address(taken) == where
    taken[:] = 2
    assert lazily_freed_bytes(where) == 0
    assert (taken == 2).all()


def test_a_small_result_does_not_keep_large_memory() -> None:
    memory = ResultMemory()
    memory.take(KEPT_BUFFERS + SIZE)
    small = memory.take(SIZE)
    assert len(small.base.obj) == SIZE  # type: ignore[union-attr] # the view of its memory


def test_a_child_process_does_not_share_the_memory() -> None:
    memory = ResultMemory()
    taken = memory.take(SIZE)
    taken[:] = 1
    child = os.fork()
    if not child:
        taken[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (taken == 1).all()


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


def test_a_frames_buffer_is_reused_once_none_of_its_blocks_is_left() -> None:
    buffers = FrameBuffers(SIZE, 2)
    size = frame_blocks(SIZE) * SIZE
    first, second, third = (buffers.take(size) for _ in range(3))
    blocks = [first[at : at + SIZE].toreadonly() for at in range(0, size, SIZE)]
    where, last = address(first), np.frombuffer(blocks.pop(), dtype=np.uint8)
    del first, second, third, blocks
    assert address(buffers.take(size)) != where  # one block is still referenced
    del last
    assert address(buffers.take(size)) == where
    assert len(buffers._buffers) == 2  # the third was not kept
