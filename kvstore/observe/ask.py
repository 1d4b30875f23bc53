"""One question to one shard: its `ShardInfo`, over a connection that lives for the question.

For the supervisor's metrics. The client library has connections that last and must not be imported by the server.
"""

from __future__ import annotations

import select
import socket
import time

import msgspec

from kvstore import wire, zmtp


class AskError(Exception):
    """The shard did not answer."""


class _Answers:
    """A `zmtp.FrameSink` that keeps the last reply."""

    def __init__(self) -> None:
        self.reply: wire.Reply | None = None

    def begin_frame(self, size: int, more: bool) -> None:
        if size > wire.MAX_BLOCK_BYTES:
            raise zmtp.ZMTPError(f"a reply of {size} bytes")

    def bytes_after_frame(self) -> int:
        return 0

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        self.reply = wire.decode_reply(data or b"")

    def command(self, name: bytes, body: bytes) -> None:
        """READY: nothing to do."""


def ask_info(address: tuple[str, int], timeout_s: float) -> wire.ShardInfo:
    """Ask the shard at `address`. Raises `AskError` when it does not answer within `timeout_s`."""
    try:
        with socket.create_connection(address, timeout_s) as sock:
            return _ask(sock, time.monotonic() + timeout_s)
    except (OSError, zmtp.ZMTPError, wire.WireError, msgspec.DecodeError) as error:
        raise AskError(f"{address[0]}:{address[1]}: {error}") from None


def _ask(sock: socket.socket, deadline: float) -> wire.ShardInfo:
    hello = wire.encode(wire.Hello(1, wire.PROTOCOL_VERSION, client="supervisor"))
    info = wire.encode(wire.Info(2, 1000))
    sock.sendall(zmtp.greeting() + zmtp.ready(b"DEALER") + zmtp.frame(hello, False) + zmtp.frame(info, False))
    greeting = b""
    while len(greeting) < zmtp.GREETING_BYTES:
        data = sock.recv(zmtp.GREETING_BYTES - len(greeting))
        if not data:
            raise OSError("closed during the handshake")
        greeting += data
    zmtp.check_greeting(greeting)
    sock.setblocking(False)
    answers = _Answers()
    receiver = zmtp.Receiver(sock, answers)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not isinstance(answers.reply, wire.InfoReply):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("no answer in time")
        if not receiver.receive(1 << 20):
            raise OSError("closed before it answered")
    return msgspec.msgpack.decode(answers.reply.info, type=wire.ShardInfo)
