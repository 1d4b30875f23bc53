"""A ring of numbers in memory that two processes map."""

from __future__ import annotations

import mmap
import os
import random
import signal

import pytest

from kvstore._cext import IdRing

ROOM = 496


def shared() -> mmap.mmap:
    return mmap.mmap(-1, IdRing.NBYTES)


def test_numbers_are_taken_once_and_in_order() -> None:
    memory = shared()
    writer, reader = IdRing(memory), IdRing(memory)
    assert reader.take() == []
    for start in range(0, 5000, 100):
        assert all(writer.put(number) for number in range(start, start + 100))
        assert reader.take() == list(range(start, start + 100))
        assert reader.take() == []
    assert writer.put(2**64 - 1) and reader.take() == [2**64 - 1]


def test_a_full_ring_refuses_more_and_loses_nothing() -> None:
    memory = shared()
    writer, reader = IdRing(memory), IdRing(memory)
    assert [writer.put(number) for number in range(600)] == [True] * ROOM + [False] * (600 - ROOM)
    assert reader.take() == list(range(ROOM))
    assert writer.put(7) and reader.take() == [7]


def test_put_reports_a_waiting_reader_that_still_gets_the_number() -> None:
    memory = shared()
    writer, reader = IdRing(memory), IdRing(memory)
    assert reader.take(waits=True) == []
    assert not writer.put(1)
    assert reader.take() == [1]
    assert writer.put(2) and reader.take() == [2]


@pytest.mark.parametrize("seed", range(20))
def test_invalid_state_from_the_other_side_is_bounded(seed: int) -> None:
    rng = random.Random(seed)
    memory = shared()
    writer, reader = IdRing(memory), IdRing(memory)
    for _ in range(200):
        memory[:] = rng.choice([rng.randbytes(IdRing.NBYTES), rng.randbytes(8) + bytes(IdRing.NBYTES - 8)])
        assert len(reader.take()) <= ROOM
        writer.put(rng.getrandbits(64))
    memory[:] = bytes(IdRing.NBYTES)
    fresh = IdRing(memory)
    reader.take()
    assert fresh.put(5) and len(reader.take()) <= ROOM


def test_two_processes_pass_on_every_number() -> None:
    memory, count = shared(), 200_000
    child = os.fork()
    if not child:
        writer = IdRing(memory)
        for number in range(count):
            while not writer.put(number):
                pass
        os._exit(0)
    try:
        reader, expected = IdRing(memory), 0
        while expected < count:
            got = reader.take()
            assert got == list(range(expected, expected + len(got)))
            expected += len(got)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="100 bytes of memory: expected 4096"):
        IdRing(bytearray(100))
    with pytest.raises((ValueError, BufferError)):
        IdRing(bytes(IdRing.NBYTES))
