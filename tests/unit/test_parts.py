"""The PARTs of a GET's reply, each made for a group of blocks and sent one after another."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from kvstore._cext import Parts
from kvstore.wire import Part, encode
from kvstore.wire.zmtp import frame, frame_head

RNG = np.random.default_rng(3)
MEMORY = RNG.integers(0, 256, 1 << 20, dtype=np.uint8)


def sent(parts: Parts, count: int) -> list[bytes]:
    """Send `count` parts through a socket that accepts little at a time. Returns the bytes of each part."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    received = bytearray()

    def receive() -> None:
        while data := theirs.recv(1000):
            received.extend(data)

    thread = threading.Thread(target=receive)
    thread.start()
    ends, total = [], 0
    with ours:
        while len(ends) < count:
            try:
                total += parts.send(ours)
            except BlockingIOError:
                continue
            if parts.part_sent:
                ends.append(total)
        with pytest.raises(ValueError, match="all parts are sent"):
            parts.send(ours)
    thread.join()
    theirs.close()
    assert len(received) == total
    return [bytes(received[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(("count", "per_part", "block_bytes"), [(1, 1, 1), (5, 2, 3), (7, 1, 5000), (300, 64, 100)])
@pytest.mark.parametrize("attribute_bytes", [0, 22])
@pytest.mark.parametrize(("request_id", "hit", "miss", "last"), [(1, 0, 0, True), (2**62, 70_000, 2**33, False)])
def test_parts_follow_the_protocol(
    count: int, per_part: int, block_bytes: int, attribute_bytes: int, request_id: int, hit: int, miss: int, last: bool
) -> None:
    positions = RNG.integers(0, 2**32, count, dtype=np.uint32)
    sums = RNG.integers(0, 2**64, count, dtype=np.uint64)
    places = RNG.permutation(len(MEMORY) // block_bytes)[:count].astype(np.int64) * block_bytes
    places[count // 2 :] = np.sort(places[count // 2 :])
    attributes = RNG.bytes(count * attribute_bytes)
    parts = Parts(request_id, positions, sums, MEMORY, places, block_bytes, per_part, last, hit, miss, attributes)
    expected = []
    for start in range(0, count, per_part):
        some = slice(start, min(count, start + per_part))
        header = Part(
            request_id,
            positions[some].tobytes(),
            sums[some].tobytes(),
            last and some.stop == count,
            hit + some.stop,
            miss,
            (count - some.stop) * block_bytes,
            attributes[start * attribute_bytes : some.stop * attribute_bytes],
        )
        blocks = b"".join(MEMORY[at : at + block_bytes].tobytes() for at in places[some].tolist())
        expected.append(frame(encode(header), True) + frame_head(len(blocks), False) + blocks)
    assert sent(parts, len(expected)) == expected


def test_blocks_of_the_wrong_size_are_refused() -> None:
    one = np.zeros(1, dtype=np.uint32), np.zeros(1, dtype=np.uint64)
    for offset in (-1, len(MEMORY) - 9, 2**62):
        with pytest.raises(IndexError, match="a block of 10 bytes"):
            Parts(1, *one, MEMORY, np.array([offset]), 10, 1, True, 0, 0)
    for count, per_part, block_bytes in [(0, 1, 1), (1, 0, 1), (1, 513, 1), (1, 1, 0), (2, 1, 1)]:
        with pytest.raises(ValueError, match="blocks"):
            Parts(1, *one, MEMORY, np.zeros(count, dtype=np.int64), block_bytes, per_part, True, 0, 0)
    with pytest.raises(ValueError, match="attributes"):
        Parts(
            1,
            np.zeros(2, dtype=np.uint32),
            np.zeros(2, dtype=np.uint64),
            MEMORY,
            np.zeros(2, dtype=np.int64),
            1,
            1,
            True,
            0,
            0,
            b"odd",
        )


def test_a_closed_connection_is_an_error() -> None:
    parts = Parts(1, np.zeros(1, np.uint32), np.zeros(1, np.uint64), MEMORY, np.zeros(1, np.int64), 1000, 1, True, 0, 0)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError):
        parts.send(ours)
    with pytest.raises(OSError):
        parts.send(ours)
