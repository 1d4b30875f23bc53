"""The ZMTP receiver over a real socket pair: in whatever pieces the bytes arrive, it gives exactly the frames that were
sent."""

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from kvstore._cext import Receiver
from kvstore.wire import zmtp
from kvstore.wire.zmtp import ZMTPError

BUDGET = 1 << 30


class Sink:
    """Collects frames. Frames of at least `direct_from` bytes are received into `cuts` views of a buffer."""

    def __init__(self, direct_from: int = 1 << 60, cuts: int = 1) -> None:
        self.direct_from = direct_from
        self.cuts = cuts
        self.frames: list[tuple[bytes, bool]] = []
        self.commands: list[tuple[bytes, bytes]] = []
        self.begun: list[tuple[int, bool]] = []
        self._direct: bytearray | None = None

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        self.begun.append((size, more))
        if size < self.direct_from:
            return None
        self._direct = bytearray(size)
        whole = memoryview(self._direct)
        bounds = np.linspace(0, size, self.cuts + 1).astype(int).tolist()
        return [whole[start:end] for start, end in itertools.pairwise(bounds) if start < end]

    def go_on(self) -> bool:
        return True

    def bytes_after_frame(self) -> int:
        return 0

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        if data is None:
            assert self._direct is not None, "a frame that was to be collected came without its bytes"
            data, self._direct = self._direct, None
        self.frames.append((bytes(data), more))

    def command(self, name: bytes, body: bytes) -> None:
        self.commands.append((name, body))


@contextmanager
def connected(sink: Sink) -> Iterator[tuple[socket.socket, Receiver]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        yield theirs, Receiver(ours, sink)


def feed(sender: socket.socket, receiver: Receiver, data: bytes, cuts: list[int], budget: int = BUDGET) -> None:
    """Send `data` in pieces that end at `cuts`, and receive after each piece."""
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(bounds):
        for at in range(start, end, 1 << 16):
            sender.sendall(data[at : min(end, at + (1 << 16))])
            before = -1
            while receiver.received != before:
                before = receiver.received
                assert receiver.receive(budget)


def payload(size: int, seed: int) -> bytes:
    return np.random.Generator(np.random.SFC64(seed)).bytes(size)


def encoded(frames: list[tuple[bytes, bool]]) -> bytes:
    return b"".join(zmtp.frame_head(len(data), more) + data for data, more in frames)


_sizes = st.integers(0, 300) | st.integers(0, 20_000) | st.sampled_from([8191, 8192, 8193, 16_384, 100_000, 300_000])


@given(
    sizes=st.lists(st.tuples(_sizes, st.booleans()), max_size=12),
    cuts=st.lists(st.integers(0, 1 << 22), max_size=20),
    direct_from=st.sampled_from([0, 1, 256, 8193, 1 << 60]),
    views=st.integers(1, 5),
    budget=st.sampled_from([1, 1000, BUDGET]),
)
@example(sizes=[(300_000, False)] * 3, cuts=[], direct_from=1, views=4, budget=BUDGET)
@example(sizes=[(0, True), (0, False)], cuts=[1, 2, 3], direct_from=0, views=1, budget=1)
def test_frames_arrive_as_sent(
    sizes: list[tuple[int, bool]], cuts: list[int], direct_from: int, views: int, budget: int
) -> None:
    frames = [(payload(size, number), more) for number, (size, more) in enumerate(sizes)]
    sink = Sink(direct_from, views)
    with connected(sink) as (sender, receiver):
        feed(sender, receiver, encoded(frames), cuts, budget)
        assert sink.frames == frames
        assert sink.begun == [(len(data), more) for data, more in frames]
        sender.close()
        assert not receiver.receive(BUDGET)


class MessageSink(Sink):
    """A `Sink` that takes small messages as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = 0

    def message(self, header: bytes, second: bytes | None) -> None:
        self.whole += 1
        self.frames.append((header, second is not None))
        if second is not None:
            self.frames.append((second, False))


@given(
    messages=st.lists(st.lists(_sizes, min_size=1, max_size=3), max_size=8),
    commands=st.sets(st.integers(0, 8)),
    cuts=st.lists(st.integers(0, 1 << 22), max_size=20),
    budget=st.sampled_from([1, 1000, BUDGET]),
)
@example(messages=[[30, 16_384]] * 3, commands=set(), cuts=[], budget=BUDGET)
@example(messages=[[0, 0], [0]], commands={0, 1}, cuts=[1, 2, 3], budget=1)
@example(messages=[[300, 255]] * 2, commands=set(), cuts=[308, 309, 310], budget=1)
def test_whole_messages_contain_the_sent_frames(
    messages: list[list[int]], commands: set[int], cuts: list[int], budget: int
) -> None:
    data, frames = b"", []
    for number, sizes in enumerate(messages):
        if number in commands:
            data += zmtp.command(b"PING", payload(20, number))
        message = [(payload(size, 10 * number + at), at < len(sizes) - 1) for at, size in enumerate(sizes)]
        frames += message
        data += encoded(message)
    sink = MessageSink()
    with connected(sink) as (sender, receiver):
        feed(sender, receiver, data, cuts, budget)
    assert sink.frames == frames
    assert len(sink.commands) == len([number for number in commands if number < len(messages)])


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (zmtp.frame(b"a", False), 1),
        (zmtp.frame(b"a", True) + zmtp.frame(b"b" * 8192, False), 1),
        (zmtp.frame(b"a", True) + zmtp.frame(b"b", True) + zmtp.frame(b"c", False), 0),
        (zmtp.frame(b"a", True) + zmtp.command(b"PING", bytes(2)) + zmtp.frame(b"b", False), 0),
        (zmtp.frame(b"a", True) + zmtp.frame(b"b" * 16_385, False), 0),
    ],
)
def test_a_message_of_one_or_two_small_frames_is_delivered_once(data: bytes, whole: int) -> None:
    sink = MessageSink()
    with connected(sink) as (sender, receiver):
        feed(sender, receiver, data + zmtp.frame(b"last", False), [len(data)])
    assert sink.whole == whole + 1
    assert sink.frames[-1] == (b"last", False)


@pytest.mark.parametrize("flags", [8, 0x10, 0x80])
def test_reserved_flags_in_a_messages_second_frame_are_refused(flags: int) -> None:
    sink = MessageSink()
    with connected(sink) as (sender, receiver):
        sender.sendall(zmtp.frame(b"a", True) + bytes([flags, 1]) + b"b")
        with pytest.raises(ZMTPError, match="reserved bits"):
            receiver.receive(BUDGET)


@pytest.mark.parametrize("sink", [Sink, MessageSink])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("size", [2**64 - 1, 2**64 - 9, 2**64 - 50, 2**64 - 16_384, 2**63, 2**63 - 1, 2**32])
@pytest.mark.parametrize("second", [False, True])
def test_a_huge_announced_size_is_reported_and_never_counted_as_received(
    sink: type[Sink], more: bool, size: int, second: bool
) -> None:
    class Refusing(sink):  # type: ignore[misc,valid-type] # a class that is a parameter
        def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
            self.begun.append((size, more))
            if size > 1 << 20:
                raise ZMTPError("too large")
            return None

    head = bytes([2 | more]) + size.to_bytes(8, "big")
    data = zmtp.frame(b"first", True) + head if second else head
    taken = Refusing()
    with connected(taken) as (sender, receiver):
        sender.sendall(data + bytes(8000))
        with pytest.raises(ZMTPError, match="too large"):
            receiver.receive(BUDGET)
    assert taken.begun[-1] == (size, more)
    assert taken.frames == ([(b"first", True)] if second else [])


def test_a_paused_sink_leaves_later_messages_in_the_buffer() -> None:
    class Slow(MessageSink):
        def go_on(self) -> bool:
            return len(self.frames) % 2 == 0

    sink = Slow()
    with connected(sink) as (sender, receiver):
        sender.sendall(zmtp.frame(b"x", False) * 5)
        assert receiver.receive(BUDGET)
        assert (len(sink.frames), receiver.paused) == (1, True)
        assert receiver.receive(BUDGET)
        assert (len(sink.frames), receiver.paused) == (3, True)
        assert receiver.receive(BUDGET)
        assert (len(sink.frames), receiver.paused) == (5, True)  # it may not be the last one
        assert receiver.receive(BUDGET)
        assert (len(sink.frames), receiver.paused) == (5, False)
        sender.sendall(zmtp.frame(b"y", False))
        assert receiver.receive(BUDGET)
        assert (len(sink.frames), receiver.paused) == (6, False)


@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=10), size=st.integers(0, 600))
def test_commands_between_frames_are_recognised(cuts: list[int], size: int) -> None:
    data = (
        zmtp.ready(b"DEALER")
        + zmtp.frame(b"first", True)
        + zmtp.command(b"PING", payload(size, 1))
        + zmtp.frame(b"second", False)
    )
    sink = Sink()
    with connected(sink) as (sender, receiver):
        feed(sender, receiver, data, cuts)
    assert sink.frames == [(b"first", True), (b"second", False)]
    assert [name for name, _ in sink.commands] == [b"READY", b"PING"]
    assert sink.commands[1][1] == payload(size, 1)
    assert zmtp.socket_type(sink.commands[0][1]) == b"DEALER"


@pytest.mark.parametrize("cut", [0, 1, 100, 4096, 9000, 149_999])
def test_a_frame_whose_rest_is_discarded_leaves_memory_unchanged(cut: int) -> None:
    frame = payload(150_000, 1)
    sink = Sink(direct_from=1)
    with connected(sink) as (sender, receiver):
        head = zmtp.frame_head(len(frame), False)
        sender.sendall(head + frame[:cut])
        receiver.receive(BUDGET)
        direct = sink._direct
        if direct is None:
            assert cut == 0
            return
        before = bytes(direct)
        receiver.discard_rest()
        feed(sender, receiver, frame[cut:] + zmtp.frame(b"next", False), [70_000])
    assert bytes(direct) == before
    assert sink.frames[-1] == (b"next", False)


def fails(data: bytes) -> str:
    sink = Sink()
    with connected(sink) as (sender, receiver):
        sender.sendall(data)
        with pytest.raises(ZMTPError) as caught:
            receiver.receive(BUDGET)
    assert not sink.begun, "the sink was asked for memory for a frame that is none"
    return str(caught.value)


@pytest.mark.parametrize("flags", [0x08, 0x10, 0x20, 0x40, 0x80, 0xFF])
def test_reserved_bits_are_refused(flags: int) -> None:
    assert f"{flags:#04x}" in fails(bytes([flags, 0]))


def test_an_overlong_command_is_refused_before_reading() -> None:
    message = fails(b"\x06" + struct.pack(">Q", zmtp.MAX_COMMAND_BYTES + 1))
    assert str(zmtp.MAX_COMMAND_BYTES + 1) in message and str(zmtp.MAX_COMMAND_BYTES) in message


@pytest.mark.parametrize("body", [b"", b"\x05", b"\xffREADY"])
def test_a_command_without_a_name_is_refused(body: bytes) -> None:
    assert "no name" in fails(bytes([4, len(body)]) + body)


def test_the_sink_may_refuse_a_frame_of_any_size() -> None:
    class Refusing(Sink):
        def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
            raise ZMTPError(f"no room for {size}")

    with connected(Refusing()) as (sender, receiver):
        sender.sendall(b"\x02" + struct.pack(">Q", 2**64 - 1))
        with pytest.raises(ZMTPError, match=str(2**64 - 1)):
            receiver.receive(BUDGET)


# ---- greeting and READY --------------------------------------------------------------------------------------------


def test_our_own_greeting_is_accepted() -> None:
    assert len(zmtp.greeting()) == zmtp.GREETING_BYTES
    zmtp.check_greeting(zmtp.greeting())


def changed(position: int, value: bytes) -> bytes:
    greeting = bytearray(zmtp.greeting())
    greeting[position : position + len(value)] = value
    return bytes(greeting)


@pytest.mark.parametrize(
    ("greeting", "part"),
    [
        (changed(0, b"\x00"), "no ZMTP greeting"),
        (changed(9, b"\x00"), "no ZMTP greeting"),
        (changed(10, b"\x02"), "version 2.1: expected 3.0"),
        (changed(12, b"PLAIN"), "b'PLAIN': expected b'NULL'"),
        (changed(12, b"NULLX"), "b'NULLX'"),
    ],
    ids=["signature", "end of signature", "version", "mechanism", "longer mechanism"],
)
def test_a_foreign_greeting_is_refused(greeting: bytes, part: str) -> None:
    with pytest.raises(ZMTPError) as caught:
        zmtp.check_greeting(greeting)
    assert part in str(caught.value)


def test_a_newer_minor_version_is_welcome() -> None:
    zmtp.check_greeting(changed(10, b"\x03\x09"))
    zmtp.check_greeting(changed(1, bytes(8)))  # libzmq may fill the signature's padding with anything


@given(st.binary(min_size=64, max_size=64))
def test_any_greeting_is_accepted_or_refused(data: bytes) -> None:
    _no_other_error(lambda: zmtp.check_greeting(data))


@given(st.binary(max_size=300))
@example(b"\x0bSocket-Type\x00\x00\x00\xff")
@example(b"\x0b")
def test_any_ready_names_at_most_one_socket_type(body: bytes) -> None:
    assert isinstance(zmtp.socket_type(body), bytes)


@given(st.binary(max_size=2000))
def test_any_bytes_decode_to_frames_or_a_zmtp_error(data: bytes) -> None:
    class Bounded(Sink):
        def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
            if size > 10_000:
                raise ZMTPError("too large")
            return super().begin_frame(size, more)

    with connected(Bounded(direct_from=100, cuts=2)) as (sender, receiver):
        _no_other_error(lambda: feed(sender, receiver, data, [5, 50, 500]))


def _no_other_error(call: Callable[[], None]) -> None:
    try:
        call()
    except ZMTPError as error:
        assert str(error)


# ---- sending -------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 130))
def test_advance_keeps_unsent_bytes(views: list[bytes], sent: int) -> None:
    whole = b"".join(views)
    sent = min(sent, len(whole))
    assert b"".join(zmtp.advance(views, sent)) == whole[sent:]
    assert bool(b"".join(zmtp.advance(views, sent))) == (sent < len(whole))


def test_waiting_for_late_events_uses_no_cpu() -> None:
    """The receiver polls before it sleeps only as long as the events that it waits for come quickly."""
    sink = Sink()
    with connected(sink) as (sender, receiver):
        for _ in range(20):  # in quick succession, so that it polls
            sender.sendall(zmtp.frame(b"x", False))
            receiver.receive(BUDGET, -1, 0.05)
        used = time.thread_time()
        for _ in range(10):
            receiver.receive(BUDGET, -1, 0.05)
        assert time.thread_time() - used < 0.1, "of 0.5 s"
