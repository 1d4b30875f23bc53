"""The payload of SETs is received directly into its place, in pieces of any size, and never outside that place."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore._cext import Landing, Payload, Receiver
from kvstore.wire import zmtp

BLOCK = 100
GUARD = 0xEE
ROOM = 64


class Sink:
    """Receives messages that have, after their first frame, a payload of `count` blocks with `per_frame` blocks in each
    frame."""

    def __init__(self, count: int, per_frame: int) -> None:
        self.memory = np.full(ROOM * BLOCK, GUARD, dtype=np.uint8)
        self.places = np.random.default_rng(count).permutation(ROOM)[:count].astype(np.int64) * BLOCK
        self.payload = Payload(self.memory, self.places, BLOCK, per_frame)
        self.per_frame = per_frame
        self.events: list[tuple[str, int, bool]] = []
        self.frame = 0
        self.paused = False

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | Payload | None:
        left = len(self.places) - self.payload.arrived
        if self.frame == 1 and size == min(left, self.per_frame) * BLOCK and left:
            return self.payload
        self.events.append(("frame", size, more))
        return None

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        self.events.append(("end", -1 if data is None else len(data), more))
        self.frame = 1 if more else 0

    def bytes_after_frame(self) -> int:
        return 0

    def go_on(self) -> bool:
        return not self.paused

    def command(self, name: bytes, body: bytes) -> None:
        self.events.append((name.decode(), len(body), False))

    def landed(self, landing: Landing) -> None:
        raise AssertionError

    def misplaced(self, size: int, expected: int) -> NoReturn:
        raise AssertionError


@contextlib.contextmanager
def connection(count: int, per_frame: int) -> Iterator[tuple[socket.socket, Receiver, Sink]]:
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    sink = Sink(count, per_frame)
    with theirs, ours:
        yield theirs, Receiver(ours, sink), sink


def block_of(number: int) -> bytes:
    return bytes((number * 7 + at) % 251 for at in range(BLOCK))


def payload_frames(count: int, per_frame: int, between: bytes = b"") -> bytes:
    frames = b""
    for start in range(0, count, per_frame):
        blocks = b"".join(map(block_of, range(start, min(count, start + per_frame))))
        frames += between + zmtp.frame(blocks, True)
    return frames


def check_memory(sink: Sink, blocks: int) -> None:
    expected = np.full(ROOM * BLOCK, GUARD, dtype=np.uint8)
    for number, at in enumerate(sink.places.tolist()[:blocks]):
        expected[at : at + BLOCK] = np.frombuffer(block_of(number), dtype=np.uint8)
    assert (sink.memory == expected).all()


def feed(theirs: socket.socket, receiver: Receiver, data: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        theirs.sendall(data[start:end])
        receiver.receive(1 << 20)


@given(
    count=st.integers(1, 40),
    per_frame=st.integers(1, 12),
    ping=st.booleans(),
    cuts=st.lists(st.integers(0, 5000), max_size=8),
)
def test_a_payload_arrives_in_its_places_in_any_pieces(count: int, per_frame: int, ping: bool, cuts: list[int]) -> None:
    between = zmtp.command(b"PING", bytes(2)) if ping else b""
    with connection(count, per_frame) as (theirs, receiver, sink):
        sums = zmtp.frame(bytes(8 * count), False)
        message = zmtp.frame(b"keys", True) + payload_frames(count, per_frame, between) + sums
        feed(theirs, receiver, message + zmtp.frame(b"next", False), cuts)
        check_memory(sink, count)
        assert sink.payload.arrived == count
        frames = [event for event in sink.events if event[0] != "PING"]
        assert frames == [
            ("frame", 4, True),
            ("end", 4, True),
            ("frame", 8 * count, False),
            ("end", 8 * count, False),
            ("frame", 4, False),
            ("end", 4, False),
        ]
        assert len(sink.events) - len(frames) == (-(-count // per_frame) if ping else 0)


@pytest.mark.parametrize("blocks", [2, 6, 7])
def test_a_message_that_ends_with_its_payload_is_reported(blocks: int) -> None:
    """The message ends within its payload or with the last payload frame, so the checksums are missing."""
    with connection(7, 2) as (theirs, receiver, sink):
        frames = zmtp.frame(b"keys", True) + payload_frames(blocks, 2)
        last = len(frames) - (blocks - 1) % 2 * BLOCK - BLOCK
        head = last - (2 if ((blocks - 1) % 2 + 1) * BLOCK < 256 else 9)
        feed(theirs, receiver, frames[:head] + bytes([frames[head] & ~1]) + frames[head + 1 :], [])
        assert sink.payload.arrived == blocks
        assert sink.events[-1] == ("end", -1, False)
        theirs.sendall(zmtp.frame(b"next", False))
        receiver.receive(1 << 20)
        assert sink.events[-1] == ("end", 4, False)
        check_memory(sink, blocks)


@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 1, 3 * BLOCK])
def test_a_frame_of_another_size_is_passed_to_the_sink(size: int) -> None:
    with connection(7, 2) as (theirs, receiver, sink):
        feed(theirs, receiver, zmtp.frame(b"keys", True) + payload_frames(4, 2) + zmtp.frame(bytes(size), True), [])
        assert sink.events[-2:] == [("frame", size, True), ("end", size, True)]
        assert sink.payload.arrived == 4
        check_memory(sink, 4)


def test_the_time_slice_ends_between_frames() -> None:
    with connection(8, 1) as (theirs, receiver, sink):
        receiver.slice_end = time.monotonic()  # it is over
        theirs.sendall(zmtp.frame(b"keys", True) + payload_frames(8, 1) + zmtp.frame(bytes(64), False))
        slices = 0
        while sink.payload.arrived < 8 or receiver.paused:
            receiver.receive(1 << 20)
            slices += 1
            assert sink.payload.arrived <= slices
        assert slices >= 8
        check_memory(sink, 8)
        assert sink.events[-1] == ("end", 64, False)


def test_places_outside_the_memory_are_refused() -> None:
    memory = bytearray(10 * BLOCK)
    for offset in (-1, 9 * BLOCK + 1, 2**62):
        with pytest.raises(IndexError, match="a block of 100 bytes"):
            Payload(memory, np.array([0, offset]), BLOCK, 1)
    with pytest.raises(ValueError, match="1 at least"):
        Payload(memory, np.array([0]), 0, 1)
    with pytest.raises(ValueError, match="1 at least"):
        Payload(memory, np.array([0]), 1, 0)
    with pytest.raises((BufferError, ValueError)):
        Payload(bytes(memory), np.array([0]), BLOCK, 1)
