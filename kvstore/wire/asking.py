"""Questions of the server to a shard: a blocking connection with one request at a time.

For the supervisor's metrics, for discovery and for moving blocks. The client library has connections that many callers
share, and must not be imported by the server. Copies of a block: kernel -> memory of its own -> kernel.

Nothing a shard says is trusted: sizes are compared with what was asked before anything is allocated or handed out.
One thread uses an `Asking`; only `interrupt` may be called by another.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import zmtp

MAX_REPLY_HEADER_BYTES: Final = 16 << 20  # INFO of as many namespaces as a shard keeps
_IOV: Final = 512
_NAME: Final = "server"  # for the shard's log
_KEPT_BUFFERS: Final = 8  # of a frame each: memory that was used before costs no page faults, half of a GET's time
_RECEIVE_BYTES: Final = 1 << 20  # before the deadline is looked at

Keys = npt.NDArray[np.uint8]  # (n, key_bytes)
Positions = npt.NDArray[np.uint32]
Sums = npt.NDArray[np.uint64]
Blocks = tuple[Positions, Sums, memoryview]
ReplyT = TypeVar("ReplyT", bound=wire.Reply)


class AskError(Exception):
    """The shard did not answer, or not as it should. The connection is closed."""


class Refused(AskError):
    """The shard refused one request, and says why. The connection can be used on."""


class Asking:
    """A connection to the shard at `address`. Every call takes `timeout_s` at most and raises `AskError`.

    With a `namespace` (canonical JSON) block requests are possible; `replicas`: the copies that are kept of its blocks.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float, namespace: bytes = b"", replicas: int = 1) -> None:
        self.timeout_s = timeout_s
        self._where = f"{address[0]}:{address[1]}"
        self._block_bytes = 0
        self._replies = _Replies()
        self._last_id = 0
        self._deadline = time.monotonic() + timeout_s
        self._sock: socket.socket | None = None
        try:
            self._sock = socket.create_connection(address, timeout_s)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setblocking(False)
            self._shake_hands()
            self.welcome = self.hello(namespace, replicas)
        except (OSError, ValueError, zmtp.ZMTPError) as error:  # ValueError: a host that cannot be one
            self.close()
            raise AskError(f"{self._where}: {error}") from None
        except AskError:
            self.close()
            raise

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the connection."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """From another thread: the call that is under way fails soon."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # ---- requests --------------------------------------------------------------------------------------------

    def hello(self, namespace: bytes, replicas: int = 1) -> wire.Welcome:
        """Use this namespace from now on."""
        try:
            block_bytes = wire.decode_namespace(namespace).block_bytes if namespace else 0
        except wire.WireError as error:
            raise Refused(str(error)) from None
        self._begin()
        request = wire.Hello(self._last_id, wire.PROTOCOL_VERSION, namespace, _NAME, b"", replicas)
        welcome = self._ask(wire.Welcome, request)
        self._check(
            welcome.protocol == wire.PROTOCOL_VERSION and welcome.block_bytes == block_bytes,
            f"protocol {welcome.protocol} and blocks of {welcome.block_bytes} bytes: "
            f"expected {wire.PROTOCOL_VERSION} and {block_bytes}",
        )
        self._check(
            0 <= welcome.shard < len(welcome.shards)
            and all(
                shard.name and 0 < shard.port < 1 << 16 and 0 < shard.weight < math.inf for shard in welcome.shards
            ),
            f"shards that cannot be: number {welcome.shard} of {welcome.shards}",
        )
        self._block_bytes = block_bytes
        return welcome

    def info(self) -> wire.ShardInfo:
        """The shard's state."""
        self._begin()
        reply = self._ask(wire.InfoReply, wire.Info(self._last_id, self._deadline_ms()))
        try:
            return msgspec.msgpack.decode(reply.info, type=wire.ShardInfo)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"its INFO is none: {error}") from None

    def hottest(self, skip: int, limit: int) -> tuple[Keys, int]:
        """Keys of the namespace, most recently used first: up to `limit` after the first `skip`, fewer if they do not
        fit a reply and none at the end; and how many blocks the namespace has."""
        self._begin()
        reply = self._ask(wire.HottestReply, wire.Hottest(self._last_id, self._deadline_ms(), skip, limit))
        if not reply.keys:
            return np.empty((0, wire.MIN_KEY_BYTES), dtype=np.uint8), reply.total
        size = reply.key_bytes
        self._check(
            wire.MIN_KEY_BYTES <= size <= wire.MAX_KEY_BYTES
            and len(reply.keys) % size == 0
            and len(reply.keys) <= min(wire.MAX_HOTTEST_BYTES, limit * size),
            f"{len(reply.keys)} bytes of keys of {size} bytes: expected at most {limit} keys",
        )
        return np.frombuffer(reply.keys, dtype=np.uint8).reshape(-1, size), reply.total

    def contains(self, keys: Keys, refresh: bool = False) -> npt.NDArray[np.bool_]:
        """Which of up to `wire.MAX_KEYS` keys are there; `refresh` counts as a use of them."""
        self._begin()
        request = wire.Contains(self._last_id, self._deadline_ms(), len(keys), keys.shape[1], refresh)
        reply = self._ask(wire.ContainsReply, request, keys.tobytes())
        self._check(len(reply.present) == len(keys), f"{len(reply.present)} answers to {len(keys)} keys")
        return np.frombuffer(reply.present, dtype=np.uint8).astype(np.bool_)

    def get(self, keys: Keys) -> Iterator[Blocks]:
        """Blocks as they come: positions in `keys`, the checksums they were set with, and their bytes end to end, in
        memory that is used again only when nobody looks at it any more. Each position comes once at most; those that
        do not come are not there.

        Nothing else can be asked until the iterator is at its end; who leaves it before that closes the connection.
        """
        self._begin()
        replies = self._replies
        replies.expect_blocks(len(keys), self._block_bytes)
        complete = False
        try:
            self._send_message(
                wire.Get(self._last_id, self._deadline_ms(), len(keys), keys.shape[1], refresh=False), [keys.tobytes()]
            )
            while True:
                part = self._receive(wire.Part)
                if part.positions:
                    yield replies.take_blocks()
                if part.last:
                    complete = True
                    return
        except Refused:
            complete = True
            raise
        finally:
            replies.expect_blocks(0, self._block_bytes)
            if not complete:
                self.close()

    def set(self, keys: Keys, blocks: Sequence[memoryview], sums: Sums) -> wire.SetReply:
        """Set blocks, one view and one checksum a key."""
        self._begin()
        header = wire.Set(self._last_id, self._deadline_ms(), *keys.shape)
        per_frame = wire.frame_blocks(self._block_bytes)
        if any(len(block) != self._block_bytes for block in blocks) or not len(keys) == len(blocks) == len(sums):
            raise ValueError(
                f"{len(keys)} keys, {len(blocks)} blocks and {len(sums)} checksums: expected as many of each, "
                f"and blocks of {self._block_bytes} bytes"
            )
        frames: list[Sequence[bytes | memoryview]] = [[keys.tobytes()]]
        frames += [blocks[at : at + per_frame] for at in range(0, len(blocks), per_frame)]
        self._send_message(header, *frames, [sums.astype("<u8").tobytes()])
        reply = self._receive(wire.SetReply)
        counts = (reply.created, reply.existed, reply.forced, reply.duplicated, reply.error)
        self._check(
            min(counts) >= 0 and sum(counts) == reply.total == len(keys), f"{reply} to a SET of {len(keys)} blocks"
        )
        return reply

    # ---- a request and its reply -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """A call begins: its deadline, and the id of its request."""
        self._deadline = time.monotonic() + self.timeout_s
        self._last_id += 1

    def _deadline_ms(self) -> int:
        return max(1, min(wire.MAX_DEADLINE_MS, int(self.timeout_s * 1000)))

    def _ask(self, kind: type[ReplyT], request: wire.Request, keys: bytes | None = None) -> ReplyT:
        self._send_message(request, *([] if keys is None else [[keys]]))
        return self._receive(kind)

    def _send_message(self, request: wire.Request, *frames: Sequence[bytes | memoryview]) -> None:
        views: list[bytes | memoryview] = [zmtp.frame(wire.encode(request), bool(frames))]
        for number, frame in enumerate(frames, 1):
            views.append(zmtp.frame_head(sum(map(len, frame)), number < len(frames)))
            views += frame
        self._send(views)

    def _send(self, views: list[bytes | memoryview]) -> None:
        sock = self._open_socket()
        try:
            while views:
                try:
                    sent = sock.sendmsg(views[:_IOV])
                except BlockingIOError:
                    self._wait(sock, select.POLLOUT)
                else:
                    views = zmtp.advance(views, sent)
        except OSError as error:
            raise self._broken(str(error)) from None

    def _receive(self, kind: type[ReplyT]) -> ReplyT:
        """The next message: of this kind, in answer to the last request."""
        sock, replies = self._open_socket(), self._replies
        try:
            while (reply := replies.next()) is None:
                self._wait(sock, select.POLLIN)
                assert replies.receiver is not None
                if not replies.receiver.receive(_RECEIVE_BYTES):
                    raise OSError("it closed the connection before it answered")
                if replies.pong:
                    pong, replies.pong = replies.pong, b""
                    self._send([pong])
        except (OSError, zmtp.ZMTPError, wire.WireError) as error:
            raise self._broken(str(error)) from None
        if isinstance(reply, wire.Error) and reply.id in (0, self._last_id):
            if not reply.id:
                raise self._broken(reply.message)
            raise Refused(f"{self._where}: {reply.message}")
        self._check(reply.id == self._last_id and isinstance(reply, kind), f"answered with {type(reply).__name__}")
        assert isinstance(reply, kind)
        return reply

    def _wait(self, sock: socket.socket, events: int) -> None:
        poll = select.poll()
        poll.register(sock, events)
        left = self._deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):  # also when it goes on sending, but no answer
            raise OSError(f"no answer within {self.timeout_s:.3g} s")

    def _shake_hands(self) -> None:
        """Greeting and READY, both ways."""
        sock, replies = self._open_socket(), self._replies
        self._send([zmtp.greeting() + zmtp.ready(b"DEALER")])
        greeting = b""
        while len(greeting) < zmtp.GREETING_BYTES:
            self._wait(sock, select.POLLIN)
            data = sock.recv(zmtp.GREETING_BYTES - len(greeting))
            if not data:
                raise OSError("it closed the connection during the handshake")
            greeting += data
        zmtp.check_greeting(greeting)
        replies.receiver = zmtp.Receiver(sock, replies)
        while not replies.ready:  # frames may follow a READY, not come before it
            self._wait(sock, select.POLLIN)
            if not replies.receiver.receive(_RECEIVE_BYTES):
                raise OSError("it closed the connection during the handshake")

    def _open_socket(self) -> socket.socket:
        if self._sock is None:
            raise AskError(f"{self._where}: the connection was closed")
        return self._sock

    def _check(self, fine: bool, message: str) -> None:
        if not fine:
            raise self._broken(message)

    def _broken(self, message: str) -> AskError:
        self.close()
        return AskError(f"{self._where}: {message}")


class _Replies:
    """A `zmtp.FrameSink`: the messages of a connection, payload in memory of its own."""

    def __init__(self) -> None:
        self.receiver: zmtp.Receiver | None = None
        self.ready = False
        self.pong = b""  # owed to the shard
        self._complete: list[tuple[wire.Reply, Blocks | None]] = []
        self._blocks: Blocks | None = None  # of the message returned last
        self._frame = 0
        self._reply: wire.Reply | None = None
        self._payload: Blocks | None = None  # of the message that is arriving
        self._payload_bytes = 0  # still to come for it
        self._block_bytes = 0
        self._buffers: list[bytearray] = []
        self._following = 0  # payload bytes announced behind the current message
        self._wanted: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # by position: not come yet

    def expect_blocks(self, count: int, block_bytes: int) -> None:
        """A GET of `count` keys begins; or, of 0, is over."""
        if count and block_bytes != self._block_bytes:
            self._buffers.clear()
        self._wanted = np.ones(count, dtype=np.bool_)
        self._following = 0
        self._block_bytes = block_bytes

    def next(self) -> wire.Reply | None:
        """The next message that is complete."""
        if not self._complete:
            return None
        reply, self._blocks = self._complete.pop(0)
        return reply

    def take_blocks(self) -> Blocks:
        """Those of the message returned last."""
        blocks, self._blocks = self._blocks, None
        assert blocks is not None
        return blocks

    def command(self, name: bytes, body: bytes) -> None:
        if name == b"READY":
            self.ready = True
        elif name == b"PING":
            self.pong = zmtp.command(b"PONG", body[2:18])
        elif name == b"ERROR":
            raise zmtp.ZMTPError(f"it reports {body[1:]!r}")

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        if not self.ready:
            raise zmtp.ZMTPError("a frame before READY")
        if self._frame == 0:
            if size > MAX_REPLY_HEADER_BYTES:
                raise zmtp.ZMTPError(f"a reply header of {size} bytes: expected at most {MAX_REPLY_HEADER_BYTES}")
            return None
        if self._payload is None or size != self._payload_bytes or not size:
            raise zmtp.ZMTPError(f"a payload frame of {size} bytes: expected {self._payload_bytes}")
        self._payload_bytes = 0
        return [self._payload[2]]

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        if self._frame == 0:
            self._reply = wire.decode_reply(data or b"")
            if isinstance(self._reply, wire.Part):
                self._following = self._reply.following
                if self._reply.positions:
                    self._begin_payload(self._reply)
        self._frame += 1
        if not more:
            if self._payload_bytes:
                raise zmtp.ZMTPError(f"a PART without its payload of {self._payload_bytes} bytes")
            assert self._reply is not None
            self._complete.append((self._reply, self._payload))
            self._frame, self._payload = 0, None

    def _begin_payload(self, part: wire.Part) -> None:
        """Room for the blocks a PART announces, when they are some of those that were asked for."""
        count, rest = divmod(len(part.positions), 4)
        if rest or len(part.sums) != count * wire.CHECKSUM_BYTES:
            raise zmtp.ZMTPError(f"a PART of {len(part.positions)} bytes of positions, {len(part.sums)} of checksums")
        positions = np.frombuffer(part.positions, dtype="<u4").astype(np.uint32)
        known = int(positions.max()) < len(self._wanted) and count <= wire.frame_blocks(self._block_bytes)
        if not known or not self._wanted[positions].all() or len(np.unique(positions)) != count:
            raise zmtp.ZMTPError(f"a PART of {count} blocks that are not those asked for")
        self._wanted[positions] = False
        self._payload_bytes = count * self._block_bytes
        sums = np.frombuffer(part.sums, dtype="<u8").astype(np.uint64)
        self._payload = positions, sums, memoryview(self._free_buffer())[: self._payload_bytes]

    def _free_buffer(self) -> bytearray:
        """Memory for a frame that nobody looks at."""
        for buffer in self._buffers:
            try:
                buffer.append(0)  # refused while any view of it exists
            except BufferError:
                continue
            buffer.pop()
            return buffer
        buffer = bytearray(wire.frame_blocks(self._block_bytes) * self._block_bytes)
        if len(self._buffers) < _KEPT_BUFFERS:
            self._buffers.append(buffer)
        return buffer

    def bytes_after_frame(self) -> int:
        return self._following
