"""The DEALER's side of a connection, which does the handshake and assigns replies to their requests.

Two kinds of connections use it: `kvstore.wire.queries`, which sends one request at a time, and the client's links,
which many callers share. A `Dealer` is the `zmtp.FrameSink` of one connection. A `ReplyCollector` collects the reply to
one request; it provides the memory for a payload frame before any byte of the frame is read.

Messages from a shard are not trusted. WELCOME must fit the HELLO, and a PART must contain only blocks that were
requested, and each of them once. Every size is checked before memory is allocated or written to. A message that breaks
these rules raises `WireError` or `ZMTPError`, and the connection must end. A `Dealer` is not thread-safe, so its owner
uses a lock or one thread.

Over 400 lines because the answers and the connection on which they arrive check each message together.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from kvstore._cext import Landing, Receiver, ReusableMemory
from kvstore.wire import zmtp
from kvstore.wire.attributes import Attributes, attributes_dtype
from kvstore.wire.messages import (
    CHECKSUM_BYTES,
    MAX_BLOCK_BYTES,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Extent,
    Hello,
    Part,
    Raised,
    ReleaseRing,
    Retired,
    Welcome,
    WireError,
    decode_reply,
    encode,
    frame_blocks,
    transport_of,
    with_transport,
)
from kvstore.wire.namespace import decode_namespace
from kvstore.wire.remote_memory import DESCRIPTORS, RemoteMemoryError, Sharing, Transport
from kvstore.wire.shared import MAX_REFERENCES, Loan, SharedFiles
from kvstore.wire.verbs import Reply

MAX_REPLY_HEADER_BYTES: Final = 16 << 20  # room for INFO about all namespaces that a shard keeps
MAX_SHARDS: Final = 256  # of one node, in WELCOME
_HANDSHAKE_BYTES: Final = 1 << 16
_NO_ATTRIBUTES: Final[Attributes] = np.empty(0, dtype=attributes_dtype(0))
_NO_POSITIONS: Final[npt.NDArray[np.uint32]] = np.empty(0, dtype=np.uint32)
_NO_SUMS: Final[npt.NDArray[np.uint64]] = np.empty(0, dtype=np.uint64)


class Refusal(Exception):
    """The shard refused a request. The error has the code and the sentence of the shard's ERROR message. The connection
    can still be used."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class SharedBlocks:
    """The blocks of a PART that are in shared memory, with their keys' positions in the request and their checksums."""

    positions: npt.NDArray[np.uint32]
    sums: npt.NDArray[np.uint64]
    loan: Loan
    files: SharedFiles  # to which the loan must be returned
    read: int = 0  # the number of blocks that were read

    def give_back(self) -> None:
        """Return the loan. Does nothing if it was returned before."""
        self.files.returned(self.loan)


class ReplyCollector:
    """Collects the reply to one request. A subclass that expects payload must implement `begin_payload`."""

    __slots__ = ("complete", "done", "error", "following", "id", "kept", "lent", "payload_bytes", "reply", "sent_at")

    def __init__(self, request_id: int) -> None:
        self.id = request_id
        self.done = False  # the reply is complete, or has failed: `reply` or `error` is set
        self.complete = False  # the message that is arriving is the last one
        self.error: Exception | None = None
        self.reply: Reply | None = None
        self.payload_bytes = 0  # size of the next frame if it is payload; 0 if no payload frame is expected
        self.following = 0  # how many payload bytes follow this message, as the shard has announced
        self.sent_at = 0.0  # when the request was sent completely; 0 before that, and after the reply began
        self.lent: deque[SharedBlocks] = deque()  # blocks in shared memory that the caller has to read and return
        self.kept = False  # the caller still reads blocks that were lent, and will release the GET

    def land(self) -> Landing | None:
        """Return the memory for all payload if it is known before the request is sent, otherwise None. If this method
        returns memory, the other methods are called only for replies that are not PARTs."""
        return None

    def begin_message(self, reply: Reply) -> None:
        """Accept the header of a message. Raises `WireError`."""
        self.reply = reply
        self.complete = True

    def begin_payload(self) -> list[memoryview]:
        """Return the memory for the next frame: writable views, of `payload_bytes` in total."""
        raise NotImplementedError  # not called while `payload_bytes` is 0

    def end_payload(self) -> None:
        """Called when the payload is complete in the views of `begin_payload`."""

    def return_loans(self) -> None:
        """Return all loans whose blocks the caller has not read."""
        while self.lent:
            self.lent[0].give_back()  # before `popleft`, as an interrupt may come in between
            self.lent.popleft()

    def fail(self, error: Exception) -> None:
        """End the answer with an error, unless it is complete."""
        if not self.done:
            self.error = error
            self.done = True


class GetAnswer(ReplyCollector):
    """Collects the reply to a GET of `count` keys.

    A subclass provides the memory for the blocks of a PART. They are the blocks of the keys at `part_positions`, with
    the checksums `part_sums` and the attributes `part_attributes`. `key_bytes`: the length of the keys, if the GET
    requests attributes.
    """

    __slots__ = (
        "_dtype",
        "_left",
        "_most",
        "_wanted",
        "block_bytes",
        "part_attributes",
        "part_positions",
        "part_sums",
    )

    def __init__(self, request_id: int, count: int, block_bytes: int, key_bytes: int = 0) -> None:
        super().__init__(request_id)
        self.block_bytes = block_bytes
        self._dtype = attributes_dtype(key_bytes) if key_bytes else None
        self.part_attributes: Attributes = np.empty(0, dtype=self._dtype) if self._dtype else _NO_ATTRIBUTES
        self.part_positions = _NO_POSITIONS
        self.part_sums = _NO_SUMS
        self._most = frame_blocks(max(1, block_bytes))
        self._wanted = np.ones(count, dtype=np.bool_)  # for each position, whether the block has not come yet
        self._left = count

    def begin_message(self, reply: Reply) -> None:
        if not isinstance(reply, Part):
            super().begin_message(reply)
            return
        count, rest = divmod(len(reply.positions), 4)
        if rest or len(reply.sums) != count * CHECKSUM_BYTES:
            raise _broken(
                f"a PART with {len(reply.positions)} bytes of positions and {len(reply.sums)} bytes of checksums: "
                f"expected 4 and {CHECKSUM_BYTES} bytes per block"
            )
        most = MAX_REFERENCES if reply.references else self._most
        if count > most:
            raise _broken(f"a PART of {count} blocks: expected at most {most} blocks of {self.block_bytes} bytes")
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
                raise _broken("a PART repeats a position: expected each block once")
            self.part_positions = positions
            self.part_sums = np.frombuffer(reply.sums, dtype="<u8")
            if self._dtype is not None:
                if len(reply.attributes) != count * self._dtype.itemsize:
                    raise _broken(
                        f"a PART with {len(reply.attributes)} bytes of attributes for {count} blocks: "
                        f"expected {count * self._dtype.itemsize} bytes"
                    )
                self.part_attributes = np.frombuffer(reply.attributes, dtype=self._dtype)
            self.payload_bytes = 0 if reply.references else count * self.block_bytes
        self.following = reply.following
        self.complete = reply.last


class Dealer:
    """One connection of a DEALER, from the greeting on. Implements `zmtp.FrameSink`. Does not own the socket.

    `on_answer(answer, began_at)` is called when a message of an answer has begun, if the answer's `sent_at` is set.
    `local`: whether the socket is connected to a shard's Unix socket.
    `sharing`: how a shard on this host shares memory.
    `transport`: how to read the memory of a shard on another host.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_answer: Callable[[ReplyCollector, float], None],
        sharing: Sharing = DESCRIPTORS,
        transport: Transport | None = None,
        local: bool = False,
    ) -> None:
        self.files: SharedFiles | None = None  # the shard's shared memory, on a Unix socket or with a transport
        self.receiver = Receiver(sock, self)
        self.local = local
        if self.local:
            self.files = files = SharedFiles(sock, sharing)
            self.receiver = Receiver(sock, self, files.memory.receive)
        self.pending: dict[int, ReplyCollector] = {}  # by request id
        self.on_raised: Callable[[int], None] = _ignore  # called with the generation of a RAISED; may raise `OSError`
        self.pong = b""  # the PONG frame that the owner must send, or empty
        self._sock = sock
        self.transport = transport if self.files is None else None  # the given transport; after HELLO, the one in use
        self._on_answer = on_answer
        self._ready = False
        self._frame = 0  # index of the arriving frame in its message
        self._answer: ReplyCollector | None = None  # the answer to which the arriving message belongs
        self._following = 0  # payload bytes that are certain to follow that message
        self._newest = 0  # the highest request id so far

    def expect(self, answer: ReplyCollector) -> None:
        """Register the answer of a request. Call this before the request is sent."""
        self._newest = max(self._newest, answer.id)
        self.pending[answer.id] = answer
        if self.files is None:
            landing = answer.land()
            if landing is not None:
                self.receiver.land(landing)

    def abandon(self, answer: ReplyCollector) -> None:
        """Forget an answer for which no caller waits any more. From now on no bytes are written to its memory."""
        self.pending.pop(answer.id, None)
        self.receiver.forget(answer.id)
        self._following = 0  # after CANCEL the shard does not send the bytes that it announced
        if self._answer is answer:
            self._answer = None
            self.receiver.discard_rest()

    def close(self) -> None:
        """Release the callers' memory, because the connection has ended."""
        for request_id in list(self.pending):
            self.receiver.forget(request_id)

    # ---- the handshake ---------------------------------------------------------------------------------------

    def greet(self, deadline: float) -> None:
        """Exchange greeting and READY. Blocks. Raises `OSError` (`TimeoutError` after `deadline`) and `ZMTPError`."""
        sock = self._sock
        sock.sendall(zmtp.greeting() + zmtp.ready(b"DEALER"))
        greeting = b""
        while len(greeting) < zmtp.GREETING_BYTES:
            self.wait(select.POLLIN, deadline)
            data = sock.recv(zmtp.GREETING_BYTES - len(greeting))
            if not data:
                raise ConnectionResetError("closed during the handshake")
            greeting += data
            if greeting[0] != zmtp.SIGNATURE[0]:  # the peer speaks another protocol, and may never send a full greeting
                raise zmtp.ZMTPError(zmtp.stranger(greeting))
        zmtp.check_greeting(greeting)
        while not self._ready:
            self._receive(deadline)

    def say_hello(self, request: Hello, deadline: float) -> Welcome:
        """Send HELLO and check the reply. Blocks. Raises `WireError`, `Refusal` and the errors of `greet`."""
        block_bytes = decode_namespace(request.namespace).block_bytes if request.namespace else 0
        answer = ReplyCollector(request.id)
        self.expect(answer)
        transport = self.transport
        if transport is not None:
            request = with_transport(request, transport.name)
        self._sock.sendall(zmtp.frame(encode(request), False))
        while not answer.done:
            self._receive(deadline)
        welcome = answer.reply
        if isinstance(welcome, Error):
            raise Refusal(welcome.code, welcome.message)
        if not isinstance(welcome, Welcome):
            raise _broken(f"it answered HELLO with {type(welcome).__name__}")
        check_welcome(welcome, block_bytes)
        named = transport_of(welcome)
        if not named:
            self.transport = None
        elif transport is None or transport.name != named:
            raise _broken(f"it chose the transport {named!r}, which HELLO did not offer")
        else:
            self.files = SharedFiles(self._sock, transport.sharing)
        return welcome

    def wait(self, events: int, deadline: float) -> None:
        """Block until the socket is ready for one of `events` (of `select.poll`). Raises `TimeoutError`."""
        poll = select.poll()
        poll.register(self._sock, events)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):  # also fails if the shard sends other bytes but no answer
            raise TimeoutError("no answer in time")

    def _receive(self, deadline: float) -> None:
        self.wait(select.POLLIN, deadline)
        if not self.receiver.receive(_HANDSHAKE_BYTES):
            raise ConnectionResetError("closed during the handshake")

    # ---- `zmtp.FrameSink` ------------------------------------------------------------------------------------

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        if not self._ready:
            raise zmtp.ZMTPError("a frame came before READY")
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
            raise _broken(f"a payload frame of {size} bytes: expected {answer.payload_bytes} bytes")
        answer.payload_bytes = 0
        return answer.begin_payload()

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        answer = self._answer
        if self._frame == 0:
            reply = decode_reply(data or b"")
            self._answer = answer = self.pending.get(reply.id)
            if answer is not None:
                if answer.sent_at:
                    self._on_answer(answer, time.monotonic())
                answer.begin_message(reply)
                self._following = answer.following
                if isinstance(reply, Part) and reply.references:
                    self._take_loan(answer, reply)
            elif isinstance(reply, Extent | Retired | ReleaseRing):
                self._take_files(reply)
            elif isinstance(reply, Raised):
                self.on_raised(reply.generation)
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
                    raise _broken(f"a PART came without its payload of {answer.payload_bytes} bytes")
                if answer.complete:
                    self.pending.pop(answer.id, None)
                    answer.done = True

    def _take_files(self, message: Extent | Retired | ReleaseRing) -> None:
        if self.files is None:
            raise _broken(f"{type(message).__name__.upper()} on a connection that is not local")
        try:
            self.files.take(message)
        except (RemoteMemoryError, ValueError) as error:
            raise _broken(str(error)) from None

    def _take_loan(self, answer: ReplyCollector, part: Part) -> None:
        if not isinstance(answer, GetAnswer) or self.files is None:
            raise _broken("a PART with references, which the request did not allow")
        try:
            loan = self.files.loan(part.references, len(answer.part_positions), answer.block_bytes)
        except RemoteMemoryError as error:
            raise _broken(str(error)) from None
        lent = SharedBlocks(answer.part_positions, answer.part_sums, loan, self.files)
        try:
            self.files.keep(loan)
            answer.lent.append(lent)
        except BaseException:  # KeyboardInterrupt: `answer` may not have the loan, so nothing would return it
            if all(each is not lent for each in answer.lent):
                self.files.returned(loan)
            raise

    def landed(self, landing: Landing) -> None:
        answer = self.pending.pop(landing.id, None)
        if answer is not None:
            if answer.sent_at:
                self._on_answer(answer, landing.began_at)
            answer.done = True

    def misplaced(self, size: int, expected: int) -> NoReturn:
        raise _broken(f"a frame of {size} bytes after a PART: expected its payload of {expected} bytes")

    def bytes_after_frame(self) -> int:
        return self._following

    def go_on(self) -> bool:
        return True

    def command(self, name: bytes, body: bytes) -> None:
        if name == b"READY":
            self._ready = True
        elif name == b"PING":
            self.pong = zmtp.command(b"PONG", body[2:18])
        elif name == b"ERROR":
            raise zmtp.ZMTPError(f"it reports: {body[1:].decode(errors='replace')}")


class FrameBuffers:
    """Memory for payload frames of one block size. A buffer is reused when no view of it exists any more.

    `kept`: the number of buffers, of one frame each, that are kept. Thread-safe.
    """

    def __init__(self, block_bytes: int, kept: int) -> None:
        self._buffer_bytes = frame_blocks(block_bytes) * block_bytes
        self._kept = kept
        self._buffers: list[ReusableMemory] = []
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Return a view of `nbytes`, at most one frame, in a buffer that has no other views."""
        with self._taking:
            for buffer in self._buffers:
                if not buffer.in_use:
                    return memoryview(buffer)[:nbytes]
            buffer = ReusableMemory(self._buffer_bytes)
            if len(self._buffers) < self._kept:
                self._buffers.append(buffer)
            return memoryview(buffer)[:nbytes]


def _ignore(generation: int) -> None:
    """Ignore RAISED, because a mover learns a namespace's generation from WELCOME."""


def check_welcome(welcome: Welcome, block_bytes: int) -> None:
    """Raise `WireError` unless WELCOME fits a HELLO whose namespace has blocks of `block_bytes` (0: no namespace)."""
    if not OLDEST_PROTOCOL <= welcome.protocol <= PROTOCOL_VERSION:
        raise WireError(
            ErrorCode.VERSION,
            f"it speaks protocol version {welcome.protocol}: expected {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}",
        )
    if welcome.block_bytes != block_bytes:
        raise _broken(f"WELCOME with blocks of {welcome.block_bytes} bytes: expected {block_bytes}")
    if len(welcome.shards) > MAX_SHARDS:
        raise _broken(f"WELCOME with {len(welcome.shards)} shards: expected at most {MAX_SHARDS}")
    if not 0 <= welcome.shard < len(welcome.shards):
        raise _broken(f"it says that it is shard {welcome.shard}, counted from 0, of {len(welcome.shards)}")
    for shard in welcome.shards:
        if not (shard.name and 0 < shard.port < 1 << 16 and 0 < shard.weight < math.inf):
            raise _broken(f"WELCOME with {shard}: expected a name, a port from 1 to 65535 and a weight above 0")
    if len({shard.name for shard in welcome.shards}) != len(welcome.shards):
        raise _broken(f"WELCOME names a shard twice: {[shard.name for shard in welcome.shards]}")


def _broken(message: str) -> WireError:
    return WireError(ErrorCode.PROTOCOL, message)
