"""The dealer's half of a connection: the handshake, and replies to the requests that they answer.

Both who asks one request at a time (`kvstore.wire.asking`) and the client's links, which many callers share, are made
of it. A `Dealer` is the `zmtp.FrameSink` of one connection; an `Answer` is what has come in reply to one request. For a
frame of payload the answer names the memory it goes to before any of it is read.

Nothing a shard says is trusted: WELCOME must fit the HELLO, a PART must bring blocks that were asked for, each once,
and every size is compared with what is expected before memory is allocated or written to. What breaks these rules is
a `WireError` or a `ZMTPError`, and the end of the connection. Not thread-safe: its owner has a lock, or one thread.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.wire import zmtp
from kvstore.wire.messages import (
    CHECKSUM_BYTES,
    MAX_BLOCK_BYTES,
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Hello,
    Part,
    Reply,
    Welcome,
    WireError,
    decode_reply,
    encode,
    frame_blocks,
)
from kvstore.wire.namespace import decode_namespace

MAX_REPLY_HEADER_BYTES: Final = 16 << 20  # INFO of as many namespaces as a shard keeps
_HANDSHAKE_BYTES: Final = 1 << 16


class Refusal(Exception):
    """The shard refuses a request: the code and the sentence of its ERROR. The connection can be used on."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Answer:
    """What has come in reply to one request."""

    __slots__ = ("complete", "done", "error", "following", "id", "payload_bytes", "reply", "sent_at")

    def __init__(self, request_id: int) -> None:
        self.id = request_id
        self.done = False  # nothing more will come: `reply` is there, or `error`
        self.complete = False  # the message that is arriving is the last
        self.error: Exception | None = None
        self.reply: Reply | None = None
        self.payload_bytes = 0  # of the payload frame that comes next
        self.following = 0  # payload bytes that were announced behind this message
        self.sent_at = 0.0  # when the sending of the request ended; 0 before, and once the answer began

    def begin_message(self, reply: Reply) -> None:
        """The header of a message. Raises `WireError`."""
        self.reply = reply
        self.complete = True

    def begin_payload(self) -> list[memoryview]:
        """Where the `payload_bytes` of the next frame go: writable views of that length together."""
        raise NotImplementedError  # `payload_bytes` is 0 where there is none

    def end_payload(self) -> None:
        """The payload is there."""

    def fail(self, error: Exception) -> None:
        """No more will come."""
        if not self.done:
            self.error = error
            self.done = True


class GetAnswer(Answer):
    """What has come in reply to a GET of `count` keys. A subclass says where the blocks of a PART go: those at
    `part_positions` of the keys, with `part_sums`."""

    __slots__ = ("_left", "_most", "_wanted", "block_bytes", "part_positions", "part_sums")

    def __init__(self, request_id: int, count: int, block_bytes: int) -> None:
        super().__init__(request_id)
        self.block_bytes = block_bytes
        self.part_positions: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self.part_sums: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._most = frame_blocks(max(1, block_bytes))
        self._wanted = np.ones(count, dtype=np.bool_)  # by position: not come yet
        self._left = count

    def begin_message(self, reply: Reply) -> None:
        if not isinstance(reply, Part):
            super().begin_message(reply)
            return
        count, rest = divmod(len(reply.positions), 4)
        if rest or len(reply.sums) != count * CHECKSUM_BYTES:
            raise _broken(f"a PART with {len(reply.positions)} bytes of positions and {len(reply.sums)} of checksums")
        if count > self._most:
            raise _broken(f"a PART of {count} blocks: expected at most {self._most} blocks of {self.block_bytes} bytes")
        if count:
            positions = np.frombuffer(reply.positions, dtype="<u4")
            try:
                self._wanted[positions] = False
            except IndexError:
                raise _broken(
                    f"a PART with position {int(positions.max())}: expected positions below {len(self._wanted)}"
                ) from None
            self._left -= count
            if np.count_nonzero(self._wanted) != self._left:
                raise _broken("a PART with a position that came before: expected each block once")
            self.part_positions = positions
            self.part_sums = np.frombuffer(reply.sums, dtype="<u8")
            self.payload_bytes = count * self.block_bytes
        self.following = reply.following
        self.complete = reply.last


class Dealer:
    """One connection of a DEALER, from the greeting on. Implements `zmtp.FrameSink`.

    `on_answer` is called with an answer of which `sent_at` is set when its first message begins.
    """

    def __init__(self, sock: socket.socket, on_answer: Callable[[Answer], None]) -> None:
        self.receiver = zmtp.Receiver(sock, self)
        self.pending: dict[int, Answer] = {}  # by request id
        self.pong = b""  # owed to the shard: the frame to send
        self._sock = sock
        self._on_answer = on_answer
        self._ready = False
        self._frame = 0  # number of the frame that is arriving in its message
        self._answer: Answer | None = None  # to which the message that is arriving belongs
        self._following = 0  # payload bytes that are certain to come behind it
        self._newest = 0  # the highest id of a request

    def expect(self, answer: Answer) -> None:
        """A request is sent: its answer may come from now on."""
        self._newest = max(self._newest, answer.id)
        self.pending[answer.id] = answer

    def abandon(self, answer: Answer) -> None:
        """Nobody waits for this answer any more: from now on none of its bytes are written to its memory."""
        self.pending.pop(answer.id, None)
        self._following = 0  # the shard drops what it announced when it hears CANCEL
        if self._answer is answer:
            self._answer = None
            self.receiver.discard_rest()

    # ---- the handshake ---------------------------------------------------------------------------------------

    def greet(self, deadline: float) -> None:
        """Greeting and READY, both ways. Raises `OSError` (`TimeoutError` after the deadline) and `ZMTPError`."""
        sock = self._sock
        sock.sendall(zmtp.greeting() + zmtp.ready(b"DEALER"))
        greeting = b""
        while len(greeting) < zmtp.GREETING_BYTES:
            self.wait(select.POLLIN, deadline)
            data = sock.recv(zmtp.GREETING_BYTES - len(greeting))
            if not data:
                raise ConnectionResetError("closed during the handshake")
            greeting += data
            if greeting[0] != zmtp.SIGNATURE[0]:  # who greets with less may say nothing more
                raise zmtp.ZMTPError(f"it greets with {greeting[:10].hex()}: expected a ZMTP greeting")
        zmtp.check_greeting(greeting)
        while not self._ready:
            self._receive(deadline)

    def say_hello(self, request: Hello, deadline: float) -> Welcome:
        """Send HELLO and check what comes back. Raises as `greet` does, `WireError`, and `Refusal`."""
        block_bytes = decode_namespace(request.namespace).block_bytes if request.namespace else 0
        answer = Answer(request.id)
        self.expect(answer)
        self._sock.sendall(zmtp.frame(encode(request), False))
        while not answer.done:
            self._receive(deadline)
        welcome = answer.reply
        if isinstance(welcome, Error):
            raise Refusal(welcome.code, welcome.message)
        if not isinstance(welcome, Welcome):
            raise _broken(f"it answered HELLO with {type(welcome).__name__}")
        check_welcome(welcome, block_bytes)
        return welcome

    def wait(self, events: int, deadline: float) -> None:
        """Until the socket is ready for one of `events` (of `select.poll`); `TimeoutError` after the deadline."""
        poll = select.poll()
        poll.register(self._sock, events)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):  # also when it goes on sending, but no answer
            raise TimeoutError("no answer in time")

    def _receive(self, deadline: float) -> None:
        self.wait(select.POLLIN, deadline)
        if not self.receiver.receive(_HANDSHAKE_BYTES):
            raise ConnectionResetError("closed during the handshake")

    # ---- `zmtp.FrameSink` ------------------------------------------------------------------------------------

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        if not self._ready:
            raise zmtp.ZMTPError("a frame before READY")
        if self._frame == 0:
            if size > MAX_REPLY_HEADER_BYTES:
                raise _broken(f"a reply header of {size} bytes: expected at most {MAX_REPLY_HEADER_BYTES}")
            return None
        answer = self._answer
        if answer is None:
            if size > MAX_BLOCK_BYTES:
                raise _broken(f"a frame of {size} bytes: expected at most {MAX_BLOCK_BYTES}")
            return zmtp.discard_views(size)
        if size != answer.payload_bytes or not size:
            raise _broken(f"a payload frame of {size} bytes: expected {answer.payload_bytes}")
        answer.payload_bytes = 0
        return answer.begin_payload()

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        answer = self._answer
        if self._frame == 0:
            reply = decode_reply(data or b"")
            self._answer = answer = self.pending.get(reply.id)
            if answer is not None:
                if answer.sent_at:
                    self._on_answer(answer)
                answer.begin_message(reply)
                self._following = answer.following
            elif isinstance(reply, Error) and reply.id == 0:
                raise _broken(f"it refuses a message: {reply.message}")
            elif reply.id > self._newest:
                raise _broken(f"it answered request {reply.id}, which was never sent")
        elif answer is not None:
            answer.end_payload()
        self._frame += 1
        if not more:
            self._frame, self._answer = 0, None
            if answer is not None:
                if answer.payload_bytes:
                    raise _broken(f"a PART without its payload of {answer.payload_bytes} bytes")
                if answer.complete:
                    self.pending.pop(answer.id, None)
                    answer.done = True

    def bytes_after_frame(self) -> int:
        return self._following

    def command(self, name: bytes, body: bytes) -> None:
        if name == b"READY":
            self._ready = True
        elif name == b"PING":
            self.pong = zmtp.command(b"PONG", body[2:18])
        elif name == b"ERROR":
            raise zmtp.ZMTPError(f"it reports {body[1:]!r}")


class FrameBuffers:
    """Memory for payload frames of one block size, used again when nobody looks at it any more: memory that was used
    before costs no page faults, half of a GET's time. `kept`: how many buffers, of a frame each."""

    def __init__(self, block_bytes: int, kept: int) -> None:
        self._buffer_bytes = frame_blocks(block_bytes) * block_bytes
        self._kept = kept
        self._buffers: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """`nbytes`, at most a frame, that nobody looks at."""
        for buffer in self._buffers:
            try:
                buffer.append(0)  # refused while any view of it exists: then its reader still needs it
            except BufferError:
                continue
            buffer.pop()
            return memoryview(buffer)[:nbytes]
        buffer = bytearray(self._buffer_bytes)
        if len(self._buffers) < self._kept:
            self._buffers.append(buffer)
        return memoryview(buffer)[:nbytes]


def check_welcome(welcome: Welcome, block_bytes: int) -> None:
    """Raise `WireError` unless WELCOME fits a HELLO whose namespace has blocks of `block_bytes` (0: no namespace)."""
    if welcome.protocol != PROTOCOL_VERSION:
        raise WireError(
            ErrorCode.VERSION, f"it speaks protocol version {welcome.protocol}: expected {PROTOCOL_VERSION}"
        )
    if welcome.block_bytes != block_bytes:
        raise _broken(f"WELCOME with blocks of {welcome.block_bytes} bytes: expected {block_bytes}")
    if not 0 <= welcome.shard < len(welcome.shards):
        raise _broken(f"it says it is shard {welcome.shard} of {len(welcome.shards)} shards")
    for shard in welcome.shards:
        if not (shard.name and 0 < shard.port < 1 << 16 and 0 < shard.weight < math.inf):
            raise _broken(f"WELCOME with {shard}: expected a name, a port from 1 to 65535 and a weight above 0")
    if len({shard.name for shard in welcome.shards}) != len(welcome.shards):
        raise _broken(f"WELCOME names a shard twice: {[shard.name for shard in welcome.shards]}")


def _broken(message: str) -> WireError:
    return WireError(ErrorCode.PROTOCOL, message)
