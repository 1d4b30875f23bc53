"""ZMTP 3.1, the protocol of ZeroMQ, on plain sockets, so that the kernel copies blocks straight to their places.

libzmq receives every frame into a message of its own, from which the frame must be copied to its slot or destination.
Over loopback on two cores, that copy and the page faults of its allocations make a transfer take 1.2 to 1.9 times as
long as with a plain socket: `python -m benchmarks.remote_kv_cache.baseline.bench_zmq_transfer`. So kvstore implements
ZMTP itself. Any libzmq peer (DEALER to a shard, ROUTER to a client) interoperates, and tests check that. Between
kvstore's own ends the only copies are

    set = source -> kernel -> slot,   get = slot -> kernel -> destination

and every queue is bounded by kvstore.

`_cext.Receiver` reads frames from a non-blocking socket. Its owner (a `FrameSink`) provides the memory for every frame
before any byte of the frame is read. For the blocks of a GET, a `Landing` provides this memory in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

from kvstore._cext import Landing, Payload

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

SIGNATURE: Final = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
GREETING_BYTES: Final = 64
MAX_COMMAND_BYTES: Final = 4096


class ZMTPError(Exception):
    """The peer breaks the rules of ZMTP 3, or needs an unsupported part of it. The connection must end."""


def greeting() -> bytes:
    """Return the greeting that each side sends first: signature, version 3.1, mechanism NULL."""
    return SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def stranger(first: bytes) -> str:
    """Return what a peer speaks that does not greet, by its first bytes."""
    if first.startswith(b"HTTP/"):
        return "it speaks HTTP, as the port of --http does: expected the server's --port, which is 7070 by default"
    return f"its first bytes are {first[:10].hex()}: expected a ZMTP greeting"


def check_greeting(data: bytes) -> None:
    """Raise `ZMTPError` unless `data` (64 bytes) opens a ZMTP 3 connection with mechanism NULL."""
    if data[0] != 0xFF or data[9] != 0x7F:
        raise ZMTPError(f"no ZMTP greeting: the first bytes are {data[:10].hex()}")
    if data[10] < 3:
        raise ZMTPError(f"ZMTP version {data[10]}.{data[11]}: expected 3.0 or later")
    mechanism = data[12:32].rstrip(b"\0")
    if mechanism != b"NULL":
        raise ZMTPError(f"security mechanism {mechanism!r}: expected b'NULL'")


def ready(socket_type: bytes) -> bytes:
    """Return the READY command that ends the NULL handshake."""
    return command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", b""))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def command(name: bytes, body: bytes) -> bytes:
    """Return the bytes of a command frame."""
    data = bytes([len(name)]) + name + body
    if len(data) > 255:
        return bytes([COMMAND | LONG]) + len(data).to_bytes(8, "big") + data
    return bytes([COMMAND, len(data)]) + data


def split_command(data: bytes) -> tuple[bytes, bytes]:
    """Return the name and the body in a command frame's data. Raises `ZMTPError`."""
    if not data or len(data) < 1 + data[0]:
        raise ZMTPError(f"a command of {len(data)} bytes holds no name")
    return data[1 : 1 + data[0]], data[1 + data[0] :]


def socket_type(body: bytes) -> bytes:
    """Return the Socket-Type property in the body of a READY command; b"" if it has none."""
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
    """Return the bytes that precede a frame's data of `size` bytes."""
    if size > 255:
        return (b"\x03" if more else b"\x02") + size.to_bytes(8, "big")
    return bytes((MORE if more else 0, size))


def frame(data: bytes, more: bool) -> bytes:
    """Return the bytes of a whole frame. Use this only for small frames, because it copies the data."""
    return frame_head(len(data), more) + data


_scratch = memoryview(bytearray(256 * 1024))


def discard_views(size: int) -> list[memoryview]:
    """Return views of scratch memory, `size` bytes in total, for bytes that are read and discarded."""
    whole, rest = divmod(size, len(_scratch))
    return [_scratch] * whole + ([_scratch[:rest]] if rest else [])


class FrameSink(Protocol):
    """The owner of a connection's frames. Its methods are called by the thread that is in `Receiver.receive`.

    It may have a method `message(header, second)`. For a small message that has arrived whole, this method is called
    once, instead of `begin_frame` and `end_frame` for each frame. The message has one frame (`second` is None) or two.
    """

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | Payload | None:
        """Return the memory for the frame's `size` bytes: writable views of exactly that length in total.

        Return None if the receiver shall collect the bytes in a new buffer. In this case the sink must have checked the
        size. Return a `Payload` for this frame and the later frames of the same payload. Of these frames, the sink is
        notified only of one that ends the message. An error that this method raises ends the connection.
        """

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        """Accept a complete frame. `data`: its bytes if it was collected, None if it was read into the views."""

    def bytes_after_frame(self) -> int:
        """Return how many bytes are certain to follow the current frame. The reader need not wake up before these bytes
        have arrived."""

    def go_on(self) -> bool:
        """Return whether the receiver should go on to the next frame or message, which may have arrived already. If
        not, it pauses. Called after each frame or message."""

    def landed(self, landing: Landing) -> None:
        """Accept the complete reply to a GET for which `Receiver.land` was called. The receiver has forgotten the
        GET."""

    def misplaced(self, size: int, expected: int) -> NoReturn:
        """Raise an error that ends the connection, because a frame of `size` bytes came where the payload of a PART was
        expected."""

    def command(self, name: bytes, body: bytes) -> None:
        """Handle a ZMTP command (READY, PING, PONG, ERROR)."""


def advance(views: Sequence[memoryview | bytes], sent: int) -> list[memoryview | bytes]:
    """Return the rest of `views` after the kernel has taken their first `sent` bytes."""
    for at, view in enumerate(views):
        size = len(view)
        if sent < size:
            return [memoryview(view)[sent:], *views[at + 1 :]]
        sent -= size
    return []
