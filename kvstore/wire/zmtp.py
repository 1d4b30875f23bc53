"""ZMTP 3.1, the protocol of ZeroMQ, on plain sockets, so that the kernel copies blocks straight to their memory.

libzmq receives every frame into a message of its own, from which the frame must be copied to its slot or destination.
Over loopback on two cores that copy (and the page faults of its allocations) makes a transfer 1.2 to 1.9 times as long
as with a plain socket: `python -m benchmarks.remote_kv_cache.baseline.test_zmq_transfer`. So kvstore implements ZMTP
itself. Any libzmq peer (DEALER to a shard, ROUTER to a client) interoperates, and tests check that. Between kvstore's
own ends the only copies are

    set = source -> kernel -> slot,   get = slot -> kernel -> destination

and every queue is bounded by kvstore.

`Receiver` turns a non-blocking socket into frames. Its owner (a `FrameSink`) gives the memory for every frame before
any byte of the frame is read. Not thread-safe: one thread at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

SIGNATURE: Final = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
GREETING_BYTES: Final = 64
MAX_COMMAND_BYTES: Final = 4096

_BUFFER_BYTES: Final = 16 * 1024
_READ_AHEAD_BYTES: Final = 512  # behind a large frame: enough for the next header, and cheap to copy
_DIRECT_BYTES: Final = 8 * 1024  # if more than this is left of a frame, it is read straight into its memory
# What a buffered byte counts in the budget of `receive`: a buffer of the smallest messages is as much work as a large
# frame.
_BUFFERED_COST: Final = 256
_LOW_WATER_BYTES: Final = 2 << 20  # the reader of large frames is woken when so much has arrived


class ZMTPError(Exception):
    """The peer breaks the rules of ZMTP 3, or needs a part of it that is not supported; the connection must end."""


def greeting() -> bytes:
    """-> the greeting that each side sends first: signature, version 3.1, mechanism NULL."""
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
    """-> the READY command that ends the NULL handshake."""
    return command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", b""))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def command(name: bytes, body: bytes) -> bytes:
    """-> the bytes of a command frame."""
    data = bytes([len(name)]) + name + body
    if len(data) > 255:
        return bytes([COMMAND | LONG]) + len(data).to_bytes(8, "big") + data
    return bytes([COMMAND, len(data)]) + data


def split_command(data: bytes) -> tuple[bytes, bytes]:
    """-> name and body of a command frame's data. Raises `ZMTPError`."""
    if not data or len(data) < 1 + data[0]:
        raise ZMTPError(f"a command of {len(data)} bytes holds no name")
    return data[1 : 1 + data[0]], data[1 + data[0] :]


def socket_type(body: bytes) -> bytes:
    """-> the Socket-Type property in the body of a READY command; b"" when it has none."""
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
    """-> the bytes that precede a frame's data of `size` bytes."""
    if size > 255:
        return (b"\x03" if more else b"\x02") + size.to_bytes(8, "big")
    return bytes((MORE if more else 0, size))


def frame(data: bytes, more: bool) -> bytes:
    """-> the bytes of a whole frame, for small ones: the data is copied."""
    return frame_head(len(data), more) + data


_scratch = memoryview(bytearray(256 * 1024))


def discard_views(size: int) -> list[memoryview]:
    """-> views into scratch memory, `size` bytes together, to read bytes into that are discarded."""
    whole, rest = divmod(size, len(_scratch))
    return [_scratch] * whole + ([_scratch[:rest]] if rest else [])


Receive: TypeAlias = Callable[[Sequence[memoryview]], int]  # reads bytes into views; -> how many came


class FrameSink(Protocol):
    """The owner of a connection's frames. Called by the thread that is in `Receiver.receive`."""

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        """-> the memory for the frame's `size` bytes: writable views of exactly that length together, or None to have
        them collected in a new buffer; then the sink must have checked the size. May raise to end the connection."""

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        """The frame is complete. `data`: its bytes if it was collected, None if it was read into the views."""

    def bytes_after_frame(self) -> int:
        """-> how many bytes are certain to follow the current frame. The reader need not be woken for fewer."""

    def go_on(self) -> bool:
        """Asked after each frame: whether the next one is wanted now. If not, the receiver pauses."""

    def command(self, name: bytes, body: bytes) -> None:
        """A ZMTP command arrived (READY, PING, PONG, ERROR)."""


class Receiver:
    """Reads frames from a non-blocking socket, large ones straight into the memory that their sink gives.

    One thread at a time. It keeps references to the sink's views until their frame is complete.

    paused: the sink did not want to go on. Frames that have arrived wait in the buffer, and poll does not tell of them:
    the next `receive` dispatches them.
    """

    __slots__ = (
        "_buffer",
        "_collect",
        "_end",
        "_in_frame",
        "_is_command",
        "_left",
        "_low_water",
        "_more",
        "_receive",
        "_sink",
        "_sock",
        "_start",
        "_view",
        "_views",
        "_views_at",
        "paused",
        "received",
    )

    def __init__(
        self,
        sock: socket.socket,
        sink: FrameSink,
        receive: Receive | None = None,
    ) -> None:
        """receive: reads bytes into views; by default from the socket alone."""
        self._sock = sock
        self._sink = sink
        self._receive = receive or self._receive_from_socket
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._in_frame = False
        self._left = 0  # bytes of the current frame still to come
        self._views: list[memoryview] = []  # the memory for these bytes
        self._views_at = 0
        self._collect: bytearray | None = None
        self._more = False
        self._is_command = False
        self._low_water = 1
        self.paused = False
        self.received = 0  # bytes read since the connection began

    def _receive_from_socket(self, views: Sequence[memoryview]) -> int:
        return self._sock.recv_into(views[0]) if len(views) == 1 else self._sock.recvmsg_into(views)[0]

    def discard_rest(self) -> None:
        """Discard the rest of the current frame."""
        if self._left:
            self._views, self._views_at = discard_views(self._left), 0

    def receive(self, budget: int) -> bool:
        """Read and dispatch the bytes that have arrived, about `budget` at most. -> False: the peer closed.

        Does not block. Raises `ZMTPError`, `OSError` of the socket, and what the sink raises.
        """
        if self.paused:
            self.paused = False
            self._parse()
        while budget > 0 and not self.paused:
            direct = self._left > _DIRECT_BYTES
            try:
                if direct:
                    ahead = self._view[:_READ_AHEAD_BYTES]
                    wanted = self._left
                    got = self._receive([*self._views[self._views_at :], ahead])
                else:
                    if self._start == self._end:
                        self._start = self._end = 0
                    elif self._end > _BUFFER_BYTES // 2:
                        self._compact()
                    wanted = 0
                    got = self._receive((self._view[self._end :],))
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
        """Set the socket's low-water mark, so that poll wakes the reader for large pieces and not for every segment.

        A wake-up for a small piece costs more than reading it.
        """
        coming = self._left + self._sink.bytes_after_frame()
        low_water = min(coming, _LOW_WATER_BYTES) if coming > _DIRECT_BYTES else 1
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _advance(self, count: int) -> None:
        """Note that the first `count` bytes of the remaining views have been read."""
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
        """Dispatch the frames in the read-ahead buffer, and begin the last one, which may be incomplete."""
        while True:
            if self._in_frame:
                if self._left and self._start < self._end:
                    self._take_from_buffer()
                if self._left:
                    return
                self._finish()
                if not self._goes_on():
                    return
            if not self._begin():
                return

    def _goes_on(self) -> bool:
        self.paused = not self._sink.go_on()
        return not self.paused

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
        """Read a frame's head; dispatch whole small frames. -> False: paused, or no further head has arrived."""
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
                if size <= self._end - start:  # the usual case: a small frame that is wholly in the buffer
                    self._start = start + size
                    self._deliver(bytes(self._view[start : start + size]))
                    if not self._goes_on():
                        return False
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
    """-> the rest of `views` after the kernel has taken their first `sent` bytes."""
    for at, view in enumerate(views):
        size = len(view)
        if sent < size:
            return [memoryview(view)[sent:], *views[at + 1 :]]
        sent -= size
    return []
