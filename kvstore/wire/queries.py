"""A blocking connection from the server to a shard, with one request at a time.

The server uses it for the supervisor's metrics, for discovery and for moving blocks. The server must not import the
client library, whose connections are shared by many callers. When a block is moved, it is copied from the kernel to a
buffer of the connection, and from there back to the kernel.

Replies are not trusted: sizes are compared with the request before memory is allocated or returned. A `ShardQueries`
belongs to one thread; other threads may call only `interrupt`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import zmtp
from kvstore.wire.attributes import Attributes
from kvstore.wire.dealer import Dealer, FrameBuffers, GetAnswer, Refusal, ReplyCollector

_IOV: Final = 512
_NAME_IN_LOGS: Final = "server"  # in the shard's log
_KEPT_BUFFERS: Final = 8  # each has room for one frame
_RECEIVE_BYTES: Final = 1 << 20  # the most bytes received before the deadline is checked again

KeyArray = npt.NDArray[np.uint8]  # (n, key_bytes)
Positions = npt.NDArray[np.uint32]
Sums = npt.NDArray[np.uint64]
Blocks = tuple[Positions, Sums, Attributes, memoryview]
ReplyT = TypeVar("ReplyT", bound=wire.Reply)


# Takes a host, a port and a timeout in seconds, and returns a connected socket.
Dial = Callable[[tuple[str, int], float], socket.socket]


def dial_tcp(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a TCP connection. Raises `OSError`, and `ValueError` for an invalid host."""
    sock = socket.create_connection(address, timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class ShardQueryError(Exception):
    """The shard did not answer, or its reply is invalid. The connection is closed."""


class Refused(ShardQueryError):
    """The shard refused one request; the message says why. The connection can still be used."""


class ShardQueries:
    """A connection to the shard at `address`. Every call blocks for at most `timeout_s`, and may raise
    `ShardQueryError`.

    `namespace`: the namespace as canonical JSON. Requests for blocks need it.
    `replicas`: the number of copies that are kept of each block of the namespace.
    `cookie`: the node's cookie. With it, this connection gets a place even when clients have taken all of theirs.
    `token`: a client's token, for a shard that requires one.
    `dial`: the function that connects. It raises `OSError`, or `ValueError` for an invalid host.
    """

    def __init__(
        self,
        address: tuple[str, int],
        timeout_s: float,
        namespace: bytes = b"",
        replicas: int = 1,
        *,
        cookie: str = "",
        token: bytes = b"",
        dial: Dial = dial_tcp,
    ) -> None:
        self.timeout_s = timeout_s
        self._cookie = cookie
        self._token = token
        self._where = f"{address[0]}:{address[1]}"
        self._block_bytes = 0
        self._buffers = FrameBuffers(1, 0)
        self._last_id = 0
        self._deadline = time.monotonic() + timeout_s
        self._dealer: Dealer | None = None
        self._sock: socket.socket | None = None
        try:
            self._sock = dial(address, timeout_s)
            self._sock.setblocking(False)
            self._dealer = Dealer(self._sock, lambda _answer, _began_at: None)
            self._dealer.greet(self._deadline)
        except (OSError, ValueError, zmtp.ZMTPError) as error:
            raise self._broken(self._reason(error)) from None
        try:
            self.welcome = self.hello(namespace, replicas)
        except ShardQueryError:
            self.close()
            raise

    def __enter__(self) -> ShardQueries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """Make the call in progress fail soon. Other threads may call this."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # ---- requests --------------------------------------------------------------------------------------------

    def hello(self, namespace: bytes, replicas: int = 1) -> wire.Welcome:
        """Use this namespace from now on. Return the shard's WELCOME."""
        try:
            block_bytes = wire.decode_namespace(namespace).block_bytes if namespace else 0
        except wire.WireError as error:
            raise Refused(f"{self._where}: {error}") from None
        self._begin()
        dealer = self._open_dealer()
        try:
            welcome = dealer.say_hello(
                wire.Hello(
                    self._last_id,
                    wire.OLDEST_PROTOCOL,
                    namespace,
                    _NAME_IN_LOGS,
                    self._token,
                    replicas=replicas,
                    cookie=self._cookie,
                    newest=wire.PROTOCOL_VERSION,
                ),
                self._deadline,
            )
        except Refusal as error:
            raise Refused(f"{self._where}: {error}") from None
        except (OSError, zmtp.ZMTPError, wire.WireError) as error:
            raise self._broken(self._reason(error)) from None
        if block_bytes and block_bytes != self._block_bytes:
            self._buffers = FrameBuffers(block_bytes, _KEPT_BUFFERS)
        self._block_bytes = block_bytes
        return welcome

    def info(self) -> wire.ShardInfo:
        """Return the shard's state."""
        self._begin()
        reply = self._ask(wire.InfoReply, wire.Info(self._last_id, self._deadline_ms()))
        try:
            return wire.decode_shard_info(reply.info)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"its INFO_REPLY does not contain a shard's state: {error}") from None

    def hottest(self, skip: int, limit: int) -> tuple[KeyArray, KeyArray, int]:
        """Return keys of the namespace, the keys before them in their chains, and the number of the namespace's blocks.

        The keys are an array (n, key_bytes), with the most recently used ones first. The first `skip` keys are left
        out, and at most `limit` keys are returned. Fewer are returned if the keys do not fit one reply, and none at the
        end of the list. If a key follows no other in its chain, the key itself is returned as the key before it.
        """
        self._begin()
        reply = self._ask(wire.HottestReply, wire.Hottest(self._last_id, self._deadline_ms(), skip, limit, before=True))
        if not reply.keys:
            none = np.empty((0, wire.MIN_KEY_BYTES), dtype=np.uint8)
            return none, none, reply.total
        size = reply.key_bytes
        self._check(
            wire.MIN_KEY_BYTES <= size <= wire.MAX_KEY_BYTES
            and len(reply.keys) % size == 0
            and len(reply.keys) <= min(wire.MAX_HOTTEST_BYTES, limit * size)
            and len(reply.before) == len(reply.keys),
            f"{len(reply.keys)} bytes of keys of {size} bytes and {len(reply.before)} of those before them: "
            f"expected at most {limit} keys of each",
        )
        keys, before = (np.frombuffer(some, dtype=np.uint8).reshape(-1, size) for some in (reply.keys, reply.before))
        return keys, before, reply.total

    def contains(self, keys: KeyArray, refresh: bool = False) -> npt.NDArray[np.bool_]:
        """Return for each of up to `wire.MAX_KEYS` keys whether it is present. `refresh`: the request counts as a use
        of the blocks."""
        self._begin()
        request = wire.Contains(self._last_id, self._deadline_ms(), len(keys), keys.shape[1], refresh)
        reply = self._ask(wire.ContainsReply, request, [keys.tobytes()])
        self._check(len(reply.present) == len(keys), f"{len(reply.present)} answers to {len(keys)} keys")
        return np.frombuffer(reply.present, dtype=np.uint8).astype(np.bool_)

    def get(self, keys: KeyArray) -> Iterator[Blocks]:
        """Yield blocks as they arrive.

        Each item has the blocks' positions in `keys`, the checksums with which they were set, their attributes
        (`attributes.py`), and their bytes, concatenated. The memory of the bytes is reused only when no view of it
        exists any more. Each position comes at most once. A block whose position does not come is not on the shard.

        No other request is possible until the iterator is exhausted. Closing the iterator earlier closes the
        connection.
        """
        self._begin()
        answer = _Blocks(self._last_id, len(keys), keys.shape[1], self._block_bytes, self._buffers)
        ready = answer.ready
        try:
            self._send_message(
                answer,
                wire.Get(self._last_id, self._deadline_ms(), len(keys), keys.shape[1], refresh=False, attributes=True),
                [keys.tobytes()],
            )
            while not answer.done:
                self._receive_until(lambda: bool(ready) or answer.done)
                while ready:
                    yield ready.popleft()
            self._check_reply(answer, type(None))
        finally:
            if not answer.done:
                self.close()

    def set(
        self,
        keys: KeyArray,
        blocks: Sequence[memoryview],
        sums: Sums,
        attributes: Attributes | None = None,
        generation: int = 0,
    ) -> wire.SetReply:
        """Set those blocks that do not exist yet. For each key, `blocks` has a view of the namespace's block size, and
        `sums` has a checksum.

        `attributes`: the attributes of up to `wire.MAX_FRAME_BLOCKS` blocks of another shard.
        `generation`: the namespace's generation on that shard before the blocks were read.
        """
        self._begin()
        header = wire.Set(
            self._last_id,
            self._deadline_ms(),
            len(keys),
            keys.shape[1],
            attributes=b"" if attributes is None else attributes.tobytes(),
            generation=generation,
        )
        per_frame = wire.frame_blocks(self._block_bytes)
        if any(len(block) != self._block_bytes for block in blocks) or not len(keys) == len(blocks) == len(sums):
            raise ValueError(
                f"{len(keys)} keys, {len(blocks)} blocks and {len(sums)} checksums: expected the same number of each, "
                f"and blocks of {self._block_bytes} bytes"
            )
        frames: list[Sequence[bytes | memoryview]] = [[keys.tobytes()]]
        frames += [blocks[at : at + per_frame] for at in range(0, len(blocks), per_frame)]
        reply = self._ask(wire.SetReply, header, *frames, [sums.astype("<u8").tobytes()])
        counts = (reply.created, reply.existed, reply.forced, reply.duplicated, reply.error)
        self._check(
            min(counts) >= 0 and sum(counts) == reply.total == len(keys), f"{reply} to a SET of {len(keys)} blocks"
        )
        return reply

    # ---- a request and its reply -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a call: set its deadline and the id of its request."""
        self._deadline = time.monotonic() + self.timeout_s
        self._last_id += 1

    def _deadline_ms(self) -> int:
        return max(1, min(wire.MAX_DEADLINE_MS, int(self.timeout_s * 1000)))

    def _ask(self, kind: type[ReplyT], request: wire.Request, *frames: Sequence[bytes | memoryview]) -> ReplyT:
        answer = ReplyCollector(request.id)
        self._send_message(answer, request, *frames)
        self._receive_until(lambda: answer.done)
        reply = self._check_reply(answer, kind)
        assert isinstance(reply, kind)
        return reply

    def _send_message(
        self, answer: ReplyCollector, request: wire.Request, *frames: Sequence[bytes | memoryview]
    ) -> None:
        self._open_dealer().expect(answer)
        views: list[bytes | memoryview] = [zmtp.frame(wire.encode(request), bool(frames))]
        for number, frame in enumerate(frames, 1):
            views.append(zmtp.frame_head(sum(map(len, frame)), number < len(frames)))
            views += frame
        try:
            self._send(views)
        except OSError as error:
            raise self._broken(self._reason(error)) from None

    def _send(self, views: list[bytes | memoryview]) -> None:
        dealer, sock = self._open_dealer(), self._sock
        assert sock is not None
        while views:
            try:
                sent = sock.sendmsg(views[:_IOV])
            except BlockingIOError:
                dealer.wait(select.POLLOUT, self._deadline)
            else:
                views = zmtp.advance(views, sent)

    def _receive_until(self, ready: Callable[[], bool]) -> None:
        dealer = self._open_dealer()
        try:
            while not ready():
                dealer.wait(select.POLLIN, self._deadline)
                if not dealer.receiver.receive(_RECEIVE_BYTES):
                    raise OSError("it closed the connection before it answered")
                if dealer.pong:
                    pong, dealer.pong = dealer.pong, b""
                    self._send([pong])
        except (OSError, zmtp.ZMTPError, wire.WireError) as error:
            raise self._broken(self._reason(error)) from None

    def _check_reply(self, answer: ReplyCollector, kind: type) -> wire.Reply | None:
        """Return the reply of a complete answer. Raises `Refused` for an ERROR, `ShardQueryError` for another kind of
        reply."""
        reply = answer.reply
        if isinstance(reply, wire.Error):
            raise Refused(f"{self._where}: {reply.message}")
        self._check(isinstance(reply, kind), f"it answered with {type(reply).__name__}")
        return reply

    def _open_dealer(self) -> Dealer:
        if self._dealer is None or self._sock is None:
            raise ShardQueryError(f"{self._where}: the connection was closed")
        return self._dealer

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.timeout_s:.3g} s"
        return str(error)

    def _check(self, fine: bool, message: str) -> None:
        if not fine:
            raise self._broken(message)

    def _broken(self, message: str) -> ShardQueryError:
        self.close()
        return ShardQueryError(f"{self._where}: {message}")


class _Blocks(GetAnswer):
    """Collects the blocks of a GET, each PART in a buffer of `FrameBuffers`."""

    __slots__ = ("_buffers", "_part", "ready")

    def __init__(self, request_id: int, count: int, key_bytes: int, block_bytes: int, buffers: FrameBuffers) -> None:
        super().__init__(request_id, count, block_bytes, key_bytes)
        self.ready: deque[Blocks] = deque()
        self._buffers = buffers
        self._part: memoryview | None = None

    def begin_payload(self) -> list[memoryview]:
        self._part = self._buffers.take(len(self.part_positions) * self.block_bytes)
        return [self._part]

    def end_payload(self) -> None:
        assert self._part is not None
        self.ready.append((self.part_positions, self.part_sums, self.part_attributes, self._part))
        self._part = None
