"""Blocks of GETs are received directly into their rows, in pieces of any size. Invalid bytes are never written to
memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore._cext import BlockFrames, Landing, Receiver, send_views
from kvstore.wire import zmtp
from tests.support.vectors import PARTS, vector

BLOCK = 96
GUARD = 0xEE
BUDGET = 1 << 20
MOST_BYTES = 1 << 20


class Broken(Exception):
    """Raised when the connection must be closed."""


class Sink:
    """Keeps the messages that it receives."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.landed_ids: list[int] = []

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        if size > MOST_BYTES:
            raise Broken(f"a frame of {size} bytes")
        return zmtp.discard_views(size) if size > 4096 else None

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        self.messages.append(bytes(data or b""))

    def bytes_after_frame(self) -> int:
        return 0

    def go_on(self) -> bool:
        return True

    def command(self, name: bytes, body: bytes) -> None:
        self.messages.append(name)

    def landed(self, landing: Landing) -> None:
        self.landed_ids.append(landing.id)

    def misplaced(self, size: int, expected: int) -> NoReturn:
        raise Broken(f"{size} bytes: expected {expected}")


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, Receiver, Sink]]:
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    sink = Sink()
    with theirs, ours:
        yield theirs, Receiver(ours, sink), sink


def block_of(position: int) -> bytes:
    return bytes((position * 7 + at) % 251 for at in range(BLOCK))


def part(
    request: int,
    positions: Sequence[int],
    last: bool,
    *,
    sums: Sequence[int] | None = None,
    payload: bytes | None = None,
    more: bool | None = None,
    between: bytes = b"",
    **fields: Any,
) -> bytes:
    blocks = [block_of(position) for position in positions]
    if sums is None:
        sums = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    header = wire.encode(
        wire.Part(
            request,
            np.array(positions, dtype="<u4").tobytes(),
            np.array(sums, dtype="<u8").tobytes(),
            last,
            **fields,
        )
    )
    data = b"".join(blocks) if payload is None else payload
    follows = bool(data) if more is None else more
    return zmtp.frame(header, follows) + between + (zmtp.frame(data, False) if follows else b"")


def rows_of(count: int) -> npt.NDArray[np.uint8]:
    return np.full((count, BLOCK), GUARD, dtype=np.uint8)


def landing_of(request: int, rows: npt.NDArray[np.uint8], count: int, most: int = 8) -> Landing:
    """Return a `Landing` for `count` blocks, in the rows from 1 on."""
    return Landing(request, rows, np.arange(1, count + 1), BLOCK, True, most)


def feed(sender: socket.socket, receiver: Receiver, data: bytes, cuts: Sequence[int]) -> None:
    """Send the bytes in pieces, and receive each of them."""
    at = 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        sender.sendall(data[at:cut])
        at = cut
        receiver.receive(BUDGET)


@given(
    order=st.permutations(range(12)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    absent=st.sets(st.integers(0, 11), max_size=4),
    wrong=st.sets(st.integers(0, 11), max_size=3),
    others=st.lists(st.integers(0, 12), max_size=4),
    pings=st.sets(st.integers(0, 6), max_size=3),
    cuts=st.lists(st.integers(0, 10_000), max_size=20),
    following=st.integers(0, 2**40),
)
def test_blocks_land_in_any_order_between_other_messages(
    order: list[int],
    sizes: list[int],
    absent: set[int],
    wrong: set[int],
    others: list[int],
    pings: set[int],
    cuts: list[int],
    following: int,
) -> None:
    sent = [position for position in order if position not in absent]
    parts: list[bytes] = []
    expected_messages = []
    ping = zmtp.command(b"PING", bytes(300))
    while sent:
        some, sent = sent[: sizes[len(parts) % len(sizes)]], sent[sizes[len(parts) % len(sizes)] :]
        sums = [xxhash.xxh3_64_intdigest(block_of(at)) ^ (at in wrong) for at in some]
        between = ping if len(parts) in pings else b""  # a command may come between the frames of a message
        expected_messages += [b"PING"] * bool(between)
        parts.append(part(7, some, not sent, sums=sums, following=following, between=between))
    if not parts:
        parts.append(part(7, [], True))
    for number, at in enumerate(sorted(others, reverse=True)):
        reply = wire.encode(wire.Pong(1000 + number)) if number % 2 else wire.encode(wire.SetReply(9, 1, 1, 0, 0, 0, 0))
        parts.insert(min(at, len(parts) - 1), zmtp.frame(reply, False))
        expected_messages.append(reply)
    rows = rows_of(14)
    with connection() as (sender, receiver, sink):
        landing = landing_of(7, rows, 12)
        receiver.land(landing)
        feed(sender, receiver, b"".join(parts), cuts)
        assert sink.landed_ids == [7]
        assert sorted(sink.messages) == sorted(expected_messages)
    right, bad = landing.outcomes()
    for position in range(12):
        there = position not in absent
        assert bool(right[position]) == (there and position not in wrong)
        assert bool(bad[position]) == (there and position in wrong)
        assert bytes(rows[position + 1]) == (block_of(position) if there else bytes([GUARD]) * BLOCK)
    assert (rows[0] == GUARD).all() and (rows[13] == GUARD).all()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=300)
    | st.text(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=300)),
    lambda inside: st.lists(inside, max_size=20) | st.dictionaries(st.text(max_size=5), inside, max_size=20),
    max_leaves=30,
)


def land(header: bytes, payload: bytes, block_bytes: int) -> tuple[Sink, npt.NDArray[np.uint8]]:
    """Receive one PART of request 3, for two blocks."""
    rows = np.zeros((2, block_bytes), dtype=np.uint8)
    with connection() as (sender, receiver, sink):
        receiver.land(Landing(3, rows, np.arange(2), block_bytes, True, 8))
        feed(sender, receiver, zmtp.frame(header, True) + zmtp.frame(payload, False), [])
    return sink, rows


@pytest.mark.parametrize("name", PARTS)
def test_a_part_lands_with_more_or_fewer_fields(name: str) -> None:
    sink, rows = land(vector(name), b"block001block000", 8)
    assert (sink.landed_ids, sink.messages) == ([3], [])
    assert rows.tobytes() == b"block000block001"


@given(fields=st.integers(0, 10), later=st.lists(VALUES, max_size=8), wide=st.sampled_from([0, 2, 4]))
def test_a_part_lands_if_the_codec_reads_it(fields: int, later: list[Any], wide: int) -> None:
    """The PART may have fewer fields than in this release, or any values after them."""
    values = msgspec.msgpack.decode(vector("part_of_10_fields"))[:fields] + (later if fields == 10 else [])
    header = b"".join(map(msgspec.msgpack.encode, values))
    if wide or len(values) > 15:
        header = bytes([0xDD if wide == 4 else 0xDC]) + len(values).to_bytes(wide or 2, "big") + header
    else:
        header = bytes([0x90 | len(values)]) + header
    try:
        reads = isinstance(wire.decode_reply(header), wire.Part)
    except wire.WireError:
        reads = False
    assert reads == (fields >= 5)
    if reads:
        sink, rows = land(header, b"block001block000", 8)
        assert sink.landed_ids == [3] and rows.tobytes() == b"block000block001"
    else:
        sink, rows = land(header, b"", 8)
        assert not sink.landed_ids


@given(cut=st.integers(0, 200), junk=st.binary(max_size=30), later=st.lists(VALUES, max_size=3))
def test_an_incomplete_part_header_does_not_land(cut: int, junk: bytes, later: list[Any]) -> None:
    """The header is cut off or has bytes after it. If its blocks are still received directly, the codec must be able to
    read it, too."""
    values = msgspec.msgpack.decode(vector("part_of_10_fields")) + later
    header = msgspec.msgpack.encode(values)[:cut] + junk
    sink, _ = land(header, b"block001block000", 8)
    if sink.landed_ids:
        assert isinstance(wire.decode_reply(header), wire.Part)


@given(
    cut=st.integers(0, 4 * BLOCK + 700),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
    another=st.booleans(),
    between=st.sampled_from([b"", zmtp.command(b"PING", bytes(10)), zmtp.command(b"PING", bytes(400))]),
)
def test_forgotten_requests_are_not_written_and_disturb_nothing(
    cut: int, cuts: list[int], another: bool, between: bytes
) -> None:
    first = part(1, [0, 1], False, between=between) + part(1, [2, 3], True)
    cut = min(cut, len(first))
    rows, others = rows_of(6), rows_of(6)
    with connection() as (sender, receiver, sink):
        landing = landing_of(1, rows, 4)
        receiver.land(landing)
        if another:
            receiver.land(landing_of(2, others, 4))
        feed(sender, receiver, first[:cut], [])
        receiver.forget(1)
        was = rows.copy()
        feed(sender, receiver, first[cut:] + part(2, [3, 0, 1, 2], True), cuts)
        assert np.array_equal(rows, was)
        assert sink.landed_ids == ([1] if cut == len(first) else []) + ([2] if another else [])
    if another:
        assert [bytes(row) for row in others[1:5]] == [block_of(position) for position in range(4)]


PAYLOAD = block_of(0) + block_of(1)
REFUSED = {
    "a position that was not asked for": part(1, [0, 4], True),
    "the highest position": part(1, [0, 2**32 - 1], True),
    "a position twice in a part": part(1, [1, 1], True),
    "a block that came before": part(1, [0], False) + part(1, [1, 0], True),
    "more blocks than a part may have": part(1, [0, 1, 2, 3], True),
    "fewer checksums than blocks": part(1, [0, 1], True, sums=[1]),
    "no blocks, but not the last part": part(1, [], False),
    "blocks without their payload": part(1, [0, 1], True, more=False),
    "a payload without blocks": part(1, [], True, payload=PAYLOAD),
    "attributes": part(1, [0, 1], True, attributes=b"x" * 26),
    "references": part(1, [0, 1], True, references=b"x" * 32),
}
MISPLACED = {
    "a payload that is too short": part(1, [0, 1], True, payload=PAYLOAD[:-1]),
    "a payload that is too long": part(1, [0, 1], True, payload=PAYLOAD + b"x"),
    "a payload after which more frames follow": part(1, [0, 1], True)[: -len(PAYLOAD) - 2] + zmtp.frame(PAYLOAD, True),
    "another message in the place of the payload": part(1, [0, 1], True)[: -len(PAYLOAD) - 2]
    + zmtp.frame(wire.encode(wire.Pong(5)), False),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("cut", [0, 1, 30, 10_000])
def test_a_part_of_the_wrong_size_goes_to_the_sink(what: str, cut: int) -> None:
    rows = rows_of(6)
    with connection() as (sender, receiver, sink):
        landing = Landing(1, rows, np.arange(1, 5), BLOCK, True, 3)
        receiver.land(landing)
        feed(sender, receiver, REFUSED[what], [cut])
        assert sink.messages and not sink.landed_ids
    expected = rows_of(6)
    if what == "a block that came before":
        expected[1] = np.frombuffer(block_of(0), dtype=np.uint8)
    assert np.array_equal(rows, expected)
    assert int(landing.outcomes()[0].sum()) == (what == "a block that came before")


@pytest.mark.parametrize("what", MISPLACED)
def test_a_frame_in_place_of_the_payload_ends_the_connection(what: str) -> None:
    rows = rows_of(6)
    with connection() as (sender, receiver, _):
        receiver.land(landing_of(1, rows, 4))
        with pytest.raises(Broken):
            feed(sender, receiver, MISPLACED[what], [])
    assert (rows == GUARD).all()


@given(data=st.binary(max_size=200), flags=st.integers(0, 3), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_noise_is_never_written(data: bytes, flags: int, cuts: list[int]) -> None:
    rows = rows_of(6)
    with connection() as (sender, receiver, _):
        receiver.land(landing_of(1, rows, 4))
        with contextlib.suppress(Broken, zmtp.ZMTPError):
            feed(sender, receiver, bytes([flags, len(data)]) + data, cuts)
    assert (rows == GUARD).all()


@given(at=st.integers(0, 400), bits=st.integers(1, 255))
def test_a_flipped_bit_never_gives_a_valid_block(at: int, bits: int) -> None:
    data = bytearray(part(1, [0, 1, 2], True))
    data[at % len(data)] ^= bits
    rows = rows_of(6)
    with connection() as (sender, receiver, _):
        landing = landing_of(1, rows, 4)
        receiver.land(landing)
        with contextlib.suppress(Broken, zmtp.ZMTPError):
            feed(sender, receiver, bytes(data), [])
            receiver.forget(1)
    right, _ = landing.outcomes()
    for position in np.flatnonzero(right).tolist():
        assert any(bytes(rows[position + 1]) == block_of(other) for other in range(4))
    assert (rows[0] == GUARD).all() and (rows[5] == GUARD).all()


def test_receiving_waits_for_blocks_until_it_is_woken() -> None:
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        with connection() as (sender, receiver, sink):
            receiver.land(landing_of(1, rows_of(6), 4))
            begin = time.monotonic()
            assert receiver.receive(BUDGET, wake, 0.05) and time.monotonic() - begin > 0.04
            os.eventfd_write(wake, 1)
            assert receiver.receive(BUDGET, wake, 60.0) and not sink.landed_ids
            later = threading.Timer(0.05, sender.sendall, [part(1, [0, 1, 2, 3], True)])
            later.start()
            assert receiver.receive(BUDGET, wake, 60.0) and sink.landed_ids == [1]
            later = threading.Timer(0.05, sender.sendall, [zmtp.frame(b"small", False)])
            later.start()
            begin = time.monotonic()
            assert receiver.receive(BUDGET, wake, 60.0) and time.monotonic() - begin < 30, "another message has come"
            assert sink.messages == [b"small"]
    finally:
        os.close(wake)


def test_places_and_rows_are_checked() -> None:
    rows = rows_of(3)
    with pytest.raises(IndexError, match="places"):
        Landing(1, rows, np.array([0, 3]), BLOCK, True, 8)
    with pytest.raises(IndexError, match="places"):
        Landing(1, rows, np.array([-1]), BLOCK, True, 8)
    with pytest.raises(ValueError, match="rows"):
        Landing(1, rows, np.array([0]), BLOCK + 1, True, 8)
    with pytest.raises(ValueError, match="read-only"):
        Landing(1, np.frombuffer(bytes(3 * BLOCK), np.uint8).reshape(3, BLOCK), np.array([0]), BLOCK, True, 8)


# ---- sending -------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 40),
    block_bytes=st.sampled_from([1, 31, 255, 256, 5000]),
    per_frame=st.integers(1, 50),
    head=st.binary(max_size=300),
    as_rows=st.booleans(),
)
def test_blocks_are_sent_in_frames_followed_by_their_checksums(
    count: int, block_bytes: int, per_frame: int, head: bytes, as_rows: bool
) -> None:
    blocks = [bytes((number + at) % 256 for at in range(block_bytes)) for number in range(count)]
    expected = head
    for at in range(0, count, per_frame):
        expected += zmtp.frame(b"".join(blocks[at : at + per_frame]), True)
    sums = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], dtype="<u8")
    expected += zmtp.frame(sums.tobytes(), False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        if as_rows:  # in another order, in memory with more rows
            order = np.random.default_rng(count).permutation(count + 3)[:count].astype(np.int64)
            rows = np.zeros((count + 3, block_bytes), dtype=np.uint8)
            rows[order] = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(count, block_bytes)
            frames = BlockFrames(head, rows, block_bytes, per_frame, None, order)
        else:
            frames = BlockFrames(head, blocks, block_bytes, per_frame)
        received = b""
        while not frames.send(ours):
            received += theirs.recv(1000)
        ours.shutdown(socket.SHUT_WR)
        while data := theirs.recv(1 << 16):
            received += data
    assert received == expected and frames.sent == len(expected)


def test_sending_waits_for_room_up_to_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        frames = BlockFrames(b"", [bytes(8 << 20)], 8 << 20, 1)
        begin = time.monotonic()
        assert not frames.send(ours, 0.1) and time.monotonic() - begin > 0.09
        received: list[int] = []
        reader = threading.Thread(target=lambda: received.extend(map(len, iter(lambda: theirs.recv(1 << 20), b""))))
        reader.start()
        deadline = time.monotonic() + 30
        while not frames.send(ours, 1.0):
            assert time.monotonic() < deadline
        ours.close()
        reader.join()
        assert frames.sent == sum(received) > 8 << 20
        with pytest.raises(OSError):
            frames.send(ours)
        theirs.close()


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="block 1 holds 5 bytes"):
        BlockFrames(b"", [bytes(4), bytes(5)], 4, 1)
    with pytest.raises(ValueError, match="expected 1 at least"):
        BlockFrames(b"", [], 4, 1)
    rows = np.zeros((3, 4), dtype=np.uint8)
    for number in (-1, 3, 1 << 62):
        with pytest.raises(IndexError, match="expected one of 3"):
            BlockFrames(b"", rows, 4, 1, None, np.array([0, number]))
    with pytest.raises(ValueError, match="expected 1 at least"):
        BlockFrames(b"", rows, 4, 1, None, np.zeros(0, dtype=np.int64))
    with pytest.raises(TypeError, match="numbers"):
        BlockFrames(b"", rows, 4, 1, None, np.zeros(1, dtype=np.int32))


def test_views_are_sent_as_far_as_room_allows() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert send_views(ours, [b"ab", memoryview(b"cd"), np.frombuffer(b"ef", np.uint8)]) == 6
        assert theirs.recv(100) == b"abcdef"
        with pytest.raises(BlockingIOError):
            while send_views(ours, [bytes(1 << 20)]):
                pass
    with pytest.raises(OSError):
        send_views(ours, [b"closed"])
