"""ZMTP 3.1, the protocol of ZeroMQ, over sockets of our own: what lets a block go straight to its place.

libzmq receives every frame into a message of its own, from where it must be copied to its slot or its destination.
Over loopback on two cores that copy (and the page faults of its allocations) makes a transfer 1.2 to 1.9 times as long
as a plain socket's: `python -m benchmarks.remote_kv_cache.baseline.test_zmq_transfer`. So the data path speaks ZMTP
itself: any libzmq peer (DEALER to a shard, ROUTER to a client) interoperates, and is tested to, but between kvstore's
own ends

    set = source -> kernel -> slot,   get = slot -> kernel -> destination

are all the copies there are, and no queue exists that this project does not bound.

`Receiver` turns a non-blocking socket into frames. The owner (a `FrameSink`) says for every frame where its bytes
go, before any is read. Not thread-safe: one thread at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Protocol

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

SIGNATURE: Final = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
GREETING_BYTES: Final = 64
MAX_COMMAND_BYTES: Final = 4096

_BUFFER_BYTES: Final = 16 * 1024
_READ_AHEAD_BYTES: Final = 512  # behind a large frame: enough for the next header, little to copy
_DIRECT_BYTES: Final = 8 * 1024  # a remainder larger than this is read in place
_BUFFERED_COST: Final = 256  # of a turn's budget: a buffer of the smallest messages is as much work as a large frame
_LOW_WATER_BYTES: Final = 2 << 20  # how much must have arrived before the reader of large frames is woken


class ZMTPError(Exception):
    """The peer does not speak ZMTP 3 as we need it; the connection cannot go on."""


def greeting() -> bytes:
    """What each side sends first: signature, version 3.1, mechanism NULL."""
    return SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def check_greeting(data: bytes) -> None:
    """Raise `ZMTPError` unless `data` (64 bytes) opens a ZMTP 3 connection with mechanism NULL."""
    if data[0] != 0xFF or data[9] != 0x7F:
        raise ZMTPError(f"no ZMTP greeting: it begins with {data[:10].hex()}")
    if data[10] < 3:
        raise ZMTPError(f"ZMTP version {data[10]}.{data[11]}: expected 3.0 or later")
    mechanism = data[12:32].rstrip(b"\0")
    if mechanism != b"NULL":
        raise ZMTPError(f"security mechanism {mechanism!r}: expected b'NULL'")


def ready(socket_type: bytes) -> bytes:
    """The READY command that ends the NULL handshake."""
    return command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", b""))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def command(name: bytes, body: bytes) -> bytes:
    """A command frame."""
    data = bytes([len(name)]) + name + body
    if len(data) > 255:
        return bytes([COMMAND | LONG]) + len(data).to_bytes(8, "big") + data
    return bytes([COMMAND, len(data)]) + data


def split_command(data: bytes) -> tuple[bytes, bytes]:
    """Name and body of a command frame's data."""
    if not data or len(data) < 1 + data[0]:
        raise ZMTPError(f"a command of {len(data)} bytes holds no name")
    return data[1 : 1 + data[0]], data[1 + data[0] :]


def socket_type(body: bytes) -> bytes:
    """The Socket-Type property of a READY command's body, or b"" when it names none."""
    at = 0
    while at < len(body):
        name = body[at + 1 : at + 1 + body[at]]
        at += 1 + body[at]
        size = int.from_bytes(body[at : at + 4], "big")
        value = body[at + 4 : at + 4 + size]
        at += 4 + size
        if name.lower() == b"socket-type":
            return value
    return b""


def frame_head(size: int, more: bool) -> bytes:
    """The bytes before a frame's data."""
    if size > 255:
        return (b"\x03" if more else b"\x02") + size.to_bytes(8, "big")
    return bytes((MORE if more else 0, size))


def frame(data: bytes, more: bool) -> bytes:
    """A small frame, whole."""
    return frame_head(len(data), more) + data


_scratch = memoryview(bytearray(256 * 1024))


def discard_views(size: int) -> list[memoryview]:
    """Views of `size` bytes together into scratch memory, for bytes that are discarded."""
    whole, rest = divmod(size, len(_scratch))
    return [_scratch] * whole + ([_scratch[:rest]] if rest else [])


class FrameSink(Protocol):
    """Who owns the frames of a connection. Called by the thread that is in `Receiver.receive`."""

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        """Where the frame's `size` bytes go: writable views of exactly that length together, or None to collect
        them (the sink checked the size). May raise to end the connection."""

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        """The frame is complete: its bytes when it was collected, None when it went to the views."""

    def bytes_after_frame(self) -> int:
        """How many bytes are certain to follow the current frame: the reader is not woken for fewer."""

    def command(self, name: bytes, body: bytes) -> None:
        """A ZMTP command arrived (READY, PING, PONG, ERROR)."""


class Receiver:
    """Reads frames from a non-blocking socket, large ones straight into the memory their sink names."""

    __slots__ = (
        "_buffer",
        "_collect",
        "_end",
        "_in_frame",
        "_is_command",
        "_left",
        "_low_water",
        "_more",
        "_sink",
        "_sock",
        "_start",
        "_view",
        "_views",
        "_views_at",
        "received",
    )

    def __init__(self, sock: socket.socket, sink: FrameSink) -> None:
        self._sock = sock
        self._sink = sink
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._in_frame = False
        self._left = 0  # bytes of the current frame still to come
        self._views: list[memoryview] = []  # where they go
        self._views_at = 0
        self._collect: bytearray | None = None
        self._more = False
        self._is_command = False
        self._low_water = 1
        self.received = 0  # bytes ever read

    def discard_rest(self) -> None:
        """Discard the rest of the current frame."""
        if self._left:
            self._views, self._views_at = discard_views(self._left), 0

    def receive(self, budget: int) -> bool:
        """Read and dispatch what has arrived, about `budget` bytes at most. False: the peer closed.

        Raises `OSError` of the socket and whatever the sink raises.
        """
        sock = self._sock
        while budget > 0:
            direct = self._left > _DIRECT_BYTES
            try:
                if direct:
                    ahead = self._view[:_READ_AHEAD_BYTES]
                    wanted = self._left
                    got = sock.recvmsg_into([*self._views[self._views_at :], ahead])[0]
                else:
                    if self._start == self._end:
                        self._start = self._end = 0
                    elif self._end > _BUFFER_BYTES // 2:
                        self._compact()
                    wanted = 0
                    got = sock.recv_into(self._view[self._end :])
            except BlockingIOError:
                break
            if got == 0:
                return False
            self.received += got
            budget -= got if direct else got * _BUFFERED_COST
            if direct:
                placed = min(got, self._left)
                self._advance(placed)
                self._start, self._end = 0, got - placed
            else:
                self._end += got
            self._parse()
            if got < wanted:
                break
        self.arm()
        return True

    def _compact(self) -> None:
        rest = bytes(self._view[self._start : self._end])
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def arm(self) -> None:
        """Ask to be woken for a large piece, not for every segment: each wake-up costs more than its bytes."""
        coming = self._left + self._sink.bytes_after_frame()
        low_water = min(coming, _LOW_WATER_BYTES) if coming > _DIRECT_BYTES else 1
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _advance(self, count: int) -> None:
        """`count` bytes were placed at the front of the remaining views."""
        self._left -= count
        views, at = self._views, self._views_at
        while count:
            size = len(views[at])
            if count < size:
                views[at] = views[at][count:]
                break
            count -= size
            at += 1
        self._views_at = at

    def _parse(self) -> None:
        """Dispatch the frames in the read-ahead buffer and begin the one it ends in."""
        while True:
            if self._in_frame:
                if self._left and self._start < self._end:
                    self._take_from_buffer()
                if self._left:
                    return
                self._finish()
            if not self._begin():
                return

    def _take_from_buffer(self) -> None:
        view, start = self._view, self._start
        count = min(self._left, self._end - start)
        taken = count
        while taken:
            target = self._views[self._views_at]
            size = min(taken, len(target))
            target[:size] = view[start : start + size]
            start += size
            taken -= size
            self._advance(size)
        self._start = start

    def _begin(self) -> bool:
        """Read a frame's head; False when it has not arrived."""
        while True:
            buffer, start = self._buffer, self._start
            available = self._end - start
            if available < 2:
                return False
            flags = buffer[start]
            if flags & ~(MORE | LONG | COMMAND):
                raise ZMTPError(f"frame flags {flags:#04x}: reserved bits are set")
            if flags & LONG:
                if available < 9:
                    return False
                size = int.from_bytes(self._view[start + 1 : start + 9], "big")
                start += 9
            else:
                size = buffer[start + 1]
                start += 2
            self._more = bool(flags & MORE)
            self._is_command = bool(flags & COMMAND)
            views: list[memoryview] | None
            if self._is_command:
                if size > MAX_COMMAND_BYTES:
                    raise ZMTPError(f"a command of {size} bytes: expected at most {MAX_COMMAND_BYTES}")
                views = None
            else:
                views = self._sink.begin_frame(size, self._more)
            self._start = start
            if views is None:
                if size <= self._end - start:  # the usual small frame: whole in the buffer
                    self._start = start + size
                    self._deliver(bytes(self._view[start : start + size]))
                    continue
                self._collect = bytearray(size)
                views = [memoryview(self._collect)]
            self._views, self._views_at, self._left = views, 0, size
            self._in_frame = True
            return True

    def _finish(self) -> None:
        collected, self._collect, self._views = self._collect, None, []
        self._in_frame = False
        self._deliver(collected)

    def _deliver(self, data: bytes | bytearray | None) -> None:
        if self._is_command:
            self._sink.command(*split_command(bytes(data or b"")))
        else:
            self._sink.end_frame(data, self._more)


def advance(views: Sequence[memoryview | bytes], sent: int) -> list[memoryview | bytes]:
    """What is left of `views` after their first `sent` bytes were taken by the kernel."""
    for at, view in enumerate(views):
        size = len(view)
        if sent < size:
            return [memoryview(view)[sent:], *views[at + 1 :]]
        sent -= size
    return []
