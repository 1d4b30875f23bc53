"""One client connection of a shard: ZMTP handshake, messages in, replies and streams out.

Reading: the header frame decides what follows; keys are collected (bounded), payload goes from the kernel straight
into the slots reserved for it, and what is not wanted (a block that exists, the rest of a refused message) into a
scratch buffer. A message that breaks a rule is answered with ERROR and its remaining frames are discarded; only a
connection that cannot be followed any more (no ZMTP, a frame over the limit) is closed.

Writing: replies first, then the streams in turn, one part each. The kernel's socket buffer is the only queue; while
a peer does not take its replies, nothing more is read from it.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.shard.stream import Outgoing, Stream
from kvstore.store.namespaces import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import ErrorCode, WireError, zmtp
from kvstore.wire.zmtp import ZMTPError

log = logging.getLogger(__name__)

READ_BUDGET_BYTES: Final = 8 << 20  # per turn of the loop, so that one writer does not starve the others
WRITE_BUDGET_BYTES: Final = 8 << 20
KEEP_ALIVE_S: Final = 1.0  # a client that must wait hears of us so often
LARGE_REPLY_BYTES: Final = 8 << 10  # what all clients are bounded together in
MAX_QUEUED_REPLIES_BYTES: Final = 128 << 10  # beyond it nothing more is read from this peer
_REPLY_COST_BYTES: Final = 64  # what a queued reply takes beside its bytes
MAX_PROMISED_REPLIES: Final = 64
MAX_STREAMS: Final = 256
HANDSHAKE_S: Final = 5.0
MESSAGE_S: Final = 30.0  # for a message whose header has not come yet
STALL_S: Final = 30.0
_IOV: Final = 512


class OverlongFrame(WireError):
    """A frame so large that it is not even read to be discarded: its sender is told, and the connection ends."""


@dataclass
class Write:
    """A SET whose payload is arriving. `slots[i]` < 0: block i is not wanted and is discarded."""

    request: wire.Set
    namespace: NamespaceStore
    slots: Slots
    keys: bytes
    existed: npt.NDArray[np.bool_] | None  # of a SET with `force`: which keys were there before
    parent: bytes  # the key before the first in its chain, as far as known
    ends_chain: bool
    arrived: int = 0  # blocks


class Loop(Protocol):
    """What a peer asks of the shard it belongs to."""

    now: float  # monotonic seconds, read once a turn
    bytes_in: int
    bytes_out: int
    errors: int
    buffered_bytes: int  # in frames being collected, keys of GETs in progress and large replies
    to_flush: set[Peer]  # who may have something to send

    def check_buffer_room(self, size: int, request_id: int = 0) -> None:
        """Raise `WireError` when `size` more bytes must not be kept, of a frame or of a reply."""

    def handle(self, peer: Peer, request: wire.Request) -> None:
        """A request of one frame."""

    def handle_keyed(self, peer: Peer, request: wire.KeyedRequest, keys: bytes) -> None:
        """A request whose keys have arrived."""

    def begin_write(self, peer: Peer, request: wire.Set, keys: bytes) -> Write:
        """Reserve slots for a SET whose payload follows."""

    def commit(self, peer: Peer, write: Write, sums: bytes) -> None:
        """The payload of a SET is in its slots: its blocks are readable, and its sender is told."""

    def stream_ended(self, stream: Stream) -> None:
        """A GET is over."""

    def forget(self, peer: Peer) -> None:
        """The peer is closing."""


class Peer:
    """A connection. Implements `zmtp.FrameSink`; used by the shard's loop only."""

    def __init__(self, shard: Loop, sock: socket.socket, address: str, now: float) -> None:
        self.shard = shard
        self.sock = sock
        self.address = address
        self.closed = False
        self.closing = False  # close when all replies are sent
        self.events = 0  # what the loop polls this socket for
        self.namespace: bytes = b""
        self.client = ""
        self.replicas = 1  # copies it keeps of each block
        self.streams: dict[int, Stream] = {}
        self.write: Write | None = None
        self.writer = False  # it has sent a SET
        self.promised = 0  # replies that wait for the disk
        self.chain = b""  # the keys it asked for last: a SET usually continues them
        self.message_deadline = now + HANDSHAKE_S
        self.progress = now  # when the kernel last took something we had to send
        self._receiver = zmtp.Receiver(sock, self)
        self._greeting = b""
        self._ready = False
        self._speaks_ping = False
        self._frame = 0  # index of the next frame in the current message
        self._request: wire.Set | wire.KeyedRequest | None = None
        self._skipping = False
        self._refused = False  # once: one line of log a connection, whatever it goes on to send
        self._collecting = 0
        self._replies: deque[bytes] = deque([zmtp.greeting() + zmtp.ready(b"ROUTER")])
        self._replies_bytes = 0
        self._large_replies_bytes = 0  # of them, what counts in `buffered_bytes`
        self._large_sending_bytes = 0
        self._turn: deque[Stream] = deque()  # streams that may have something to send
        self._sending: list[bytes | memoryview] = []
        self._sent: Outgoing | None = None

    # ---- reading ---------------------------------------------------------------------------------------------

    def on_readable(self, now: float) -> None:
        """The socket has something for us."""
        try:
            if len(self._greeting) < zmtp.GREETING_BYTES and not self._read_greeting():
                return
            before = self._receiver.received
            alive = self._receiver.receive(READ_BUDGET_BYTES)
            self.shard.bytes_in += self._receiver.received - before
            if not alive:
                self.close("the client closed")
        except BlockingIOError:
            return
        except OverlongFrame as error:
            self._refuse(error)
            self.closing = True
        except ZMTPError as error:
            log.warning("client %s: %s", self.address, error)
            self.shard.errors += 1
            self.close(str(error))
        except OSError as error:
            self.close(f"connection lost: {error}")
        except Exception:  # a defect of ours must cost one client its connection, not everybody the cache
            log.exception("client %s: internal error", self.address)
            self.shard.errors += 1
            self.close("internal error")

    def _read_greeting(self) -> bool:
        data = self.sock.recv(zmtp.GREETING_BYTES - len(self._greeting))
        if not data:
            self.close("the client closed")
            return False
        self._greeting += data
        if not self._greeting.startswith(zmtp.SIGNATURE[:1]):
            raise ZMTPError(f"no ZMTP greeting: it begins with {self._greeting[:10].hex()}")
        if len(self._greeting) < zmtp.GREETING_BYTES:
            return False
        zmtp.check_greeting(self._greeting)
        self._speaks_ping = self._greeting[10:12] >= b"\x03\x01"
        return True

    def command(self, name: bytes, body: bytes) -> None:
        if name == b"READY":
            kind = zmtp.socket_type(body)
            if kind not in {b"DEALER", b"REQ", b"ROUTER"}:
                raise ZMTPError(f"a socket of type {kind!r}: expected b'DEALER'")
            self._ready = True
            self.message_deadline = float("inf")
        elif name == b"PING":
            self._queue(zmtp.command(b"PONG", body[2:18]))
        elif name == b"ERROR":
            raise ZMTPError(f"the client reports {body[1:]!r}")

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        if not self._ready:
            raise ZMTPError("a frame before READY")
        if size > wire.MAX_BLOCK_BYTES:
            raise OverlongFrame(ErrorCode.LIMIT, f"a frame of {size} bytes: expected at most {wire.MAX_BLOCK_BYTES}")
        if self._frame == 0:
            self.message_deadline = self.shard.now + MESSAGE_S
        try:
            views = self._place(size)
        except WireError as error:
            self._refuse(error)
            views = zmtp.discard_views(size)
        if views is None:
            self._collecting = size
            self.shard.buffered_bytes += size
        return views

    def _place(self, size: int) -> list[memoryview] | None:
        """Where the next frame goes: None collects it."""
        if self._skipping:
            return zmtp.discard_views(size)
        if self._frame == 0:
            if size > wire.MAX_HEADER_BYTES:
                raise WireError(ErrorCode.LIMIT, f"a header of {size} bytes: expected at most {wire.MAX_HEADER_BYTES}")
        elif self._frame == 1:
            request = self._request
            assert request is not None
            expected = request.count * request.key_bytes
            if size != expected:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"a keys frame of {size} bytes: expected {request.count} keys of {request.key_bytes} bytes, "
                    f"{expected} bytes",
                )
        elif self.write is not None:
            return self._place_payload(self.write, size)
        self.shard.check_buffer_room(size)
        return None

    def _place_payload(self, write: Write, size: int) -> list[memoryview] | None:
        left = write.request.count - write.arrived
        if not left:
            expected = write.request.count * wire.CHECKSUM_BYTES
            if size != expected:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"a checksums frame of {size} bytes: expected {wire.CHECKSUM_BYTES} a block, {expected} bytes",
                )
            return None
        namespace = write.namespace
        block_bytes = namespace.block_bytes
        count = min(left, namespace.frame_blocks)
        if size != count * block_bytes:
            raise WireError(
                ErrorCode.BLOCK_SIZE,
                f"a payload frame of {size} bytes: expected {count} block(s) of {block_bytes} bytes, "
                f"{count * block_bytes} bytes",
            )
        slots = write.slots[write.arrived : write.arrived + count]
        write.arrived += count
        if int(slots.min()) >= 0:
            return namespace.views(slots)
        views: list[memoryview] = []
        for at, slot in enumerate(slots):
            views.extend(zmtp.discard_views(block_bytes) if slot < 0 else namespace.views(slots[at : at + 1]))
        return views

    def bytes_after_frame(self) -> int:
        write = self.write
        return (write.request.count - write.arrived) * write.namespace.block_bytes if write is not None else 0

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        if self._collecting:
            self.shard.buffered_bytes -= self._collecting
            self._collecting = 0
        if not self._skipping:
            try:
                self._take(data, more)
            except WireError as error:
                self._refuse(error)
        if more:
            self._frame += 1
        else:
            self._frame = 0
            self._request = None
            self._skipping = False
            self.message_deadline = float("inf")

    def _take(self, data: bytes | bytearray | None, more: bool) -> None:
        """A frame is complete."""
        if self._frame == 0:
            assert data is not None
            self._take_header(data, more)
        elif self._frame == 1:
            assert data is not None and self._request is not None
            self._take_keys(self._request, bytes(data), more)
        elif self.write is not None:
            if data is not None:
                if more:
                    raise WireError(ErrorCode.PROTOCOL, "a frame after the checksums: expected the message's end")
                write, self.write = self.write, None
                self.shard.commit(self, write, bytes(data))
            elif not more:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"the message ends after {write_progress(self.write)}: expected the rest and the checksums",
                )

    def _take_header(self, header: bytes | bytearray, more: bool) -> None:
        request = wire.decode_request(header)
        if isinstance(request, wire.Set | wire.Get | wire.Contains | wire.MatchPrefix | wire.Delete):
            self._request = request
            self.message_deadline = self.shard.now + request.deadline_ms / 1000
            if not more:
                raise WireError(ErrorCode.PROTOCOL, f"{type(request).__name__.upper()} without its keys frame")
            if not self.namespace:
                raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with one first")
            return
        if more:
            raise WireError(ErrorCode.PROTOCOL, f"{type(request).__name__.upper()} is one frame: more came", request.id)
        # Small requests with large replies:
        if self.backed_up and isinstance(request, wire.Hello | wire.Info | wire.Hottest):
            raise WireError(ErrorCode.LIMIT, "earlier replies were not read yet; read them first", request.id)
        self.shard.handle(self, request)

    def _take_keys(self, request: wire.Set | wire.KeyedRequest, keys: bytes, more: bool) -> None:
        if isinstance(request, wire.Set):
            self.writer = True
            if not more:
                raise WireError(ErrorCode.PROTOCOL, "SET without its payload and checksums frames")
            self.write = self.shard.begin_write(self, request, keys)
        elif more:
            raise WireError(ErrorCode.PROTOCOL, f"{type(request).__name__.upper()} ends with its keys: more came")
        else:
            self.shard.handle_keyed(self, request, keys)

    def _refuse(self, error: WireError) -> None:
        """Tell the sender, forget the message, skip what is left of it."""
        request_id = self._request.id if self._request is not None else error.request_id
        self._skipping = True
        self.abort_write()
        self.shard.errors += 1
        log.log(logging.DEBUG if self._refused else logging.INFO, "client %s: refused: %s", self.address, error)
        self._refused = True
        self._queue_reply(wire.Error(request_id, int(error.code), str(error)))

    def abort_write(self) -> None:
        """Give the slots of an unfinished SET back."""
        if self.write is not None:
            write, self.write = self.write, None
            write.namespace.memory.index.abort(write.slots)
            write.namespace.wake_parked()

    # ---- writing ---------------------------------------------------------------------------------------------

    def _queue(self, data: bytes) -> None:
        self._replies.append(data)
        self._replies_bytes += len(data) + _REPLY_COST_BYTES
        if len(data) > LARGE_REPLY_BYTES:
            self._large_replies_bytes += len(data)
            self.shard.buffered_bytes += len(data)
        self.shard.to_flush.add(self)

    def _queue_reply(self, reply: wire.Reply) -> None:
        self._queue(zmtp.frame(wire.encode(reply), False))

    reply = _queue_reply

    def add_stream(self, stream: Stream) -> None:
        if len(self.streams) >= MAX_STREAMS:
            raise WireError(
                ErrorCode.LIMIT, f"{MAX_STREAMS} GETs are in progress on this connection; wait for one to end"
            )
        if stream.id in self.streams:
            raise WireError(ErrorCode.PROTOCOL, f"request id {stream.id} is in use by a GET in progress")
        self.streams[stream.id] = stream
        self.resume(stream)

    def resume(self, stream: Stream) -> None:
        """The stream may have something to send (again)."""
        if stream not in self._turn:
            self._turn.append(stream)
        self.shard.to_flush.add(self)

    def end_stream(self, stream: Stream) -> None:
        if self.streams.pop(stream.id, None) is not None:
            stream.close()
            self.shard.stream_ended(stream)
        if stream in self._turn:
            self._turn.remove(stream)

    @property
    def backed_up(self) -> bool:
        """The peer does not take its replies: read no more from it."""
        return self._replies_bytes > MAX_QUEUED_REPLIES_BYTES or self.promised > MAX_PROMISED_REPLIES

    def stalled(self, now: float) -> bool:
        """The peer has taken nothing of what waits for it for a long time."""
        return bool(self._sending) and now - self.progress > STALL_S

    def keep_alive(self, now: float, held_back: bool) -> None:
        """Say that we are there to a client that waits while nothing is read from it, or nothing behind what it is
        sending: a PING of its own would not be answered. Something that waits to be sent says so, too."""
        waits = held_back or self.promised or self.write is not None
        if waits and self._speaks_ping and not self._sending and now - self.progress > KEEP_ALIVE_S:
            self._queue(zmtp.command(b"PING", bytes(2)))

    @property
    def idle(self) -> bool:
        """Nothing half received, nothing to send."""
        return self._frame == 0 and not (self._sending or self._replies or self.streams or self.promised)

    def flush(self, now: float) -> bool:
        """Send what the kernel takes. True: more is waiting for it."""
        budget = WRITE_BUDGET_BYTES
        try:
            while budget > 0:
                if not self._sending and not self._next_outgoing(now):
                    if self.closing:
                        self.close("closed after an error")
                    return False
                sent = self.sock.sendmsg(self._sending[:_IOV])
                self.shard.bytes_out += sent
                self.progress = now
                budget -= sent
                self._sending = zmtp.advance(self._sending, sent)
                if not self._sending:
                    self._release_sent()
        except BlockingIOError:
            return True
        except OSError as error:
            self.close(f"connection lost: {error}")
            return False
        except Exception:  # see `on_readable`
            log.exception("client %s: internal error", self.address)
            self.shard.errors += 1
            self.close("internal error")
            return False
        return True

    def _next_outgoing(self, now: float) -> bool:
        if self._replies:
            self._sending = [b"".join(self._replies)]
            self._replies.clear()
            self._replies_bytes = 0
            self._large_sending_bytes, self._large_replies_bytes = self._large_replies_bytes, 0
            self.progress = now
            return True
        while self._turn:
            stream = self._turn.popleft()
            outgoing = stream.next_part(now)
            if outgoing is None:
                continue  # until credit or a commit resumes it
            if stream.done:
                self.end_stream(stream)
            else:
                self._turn.append(stream)
            self._sending, self._sent = outgoing.views, outgoing
            self.progress = now
            return True
        return False

    def _release_sent(self) -> None:
        self.shard.buffered_bytes -= self._large_sending_bytes
        self._large_sending_bytes = 0
        sent, self._sent = self._sent, None
        if sent is not None and sent.release is not None:
            sent.release()

    def close(self, reason: str) -> None:
        """Drop the connection and everything it holds."""
        if self.closed:
            return
        self.closed = True
        log.debug("client %s %r: closed: %s", self.address, self.client, reason)
        self.abort_write()
        self._release_sent()
        self.shard.buffered_bytes -= self._collecting + len(self.chain) + self._large_replies_bytes
        for stream in list(self.streams.values()):
            self.end_stream(stream)
        self.shard.forget(self)
        self.sock.close()


def write_progress(write: Write) -> str:
    return f"{write.arrived} of {write.request.count} blocks"
