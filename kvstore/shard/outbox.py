"""The data to send to one client: first replies, then the streams of its GETs, one part of each in turn.

Blocks are queued only in the kernel's socket buffer. While a client does not read its replies, the shard reads nothing
more from that client. Used by the loop's thread only.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore import wire
from kvstore._cext import Parts
from kvstore.shard.account import GETS, REPLIES, REPLY_BYTES, STREAMS, AddressBudget, LimitReached
from kvstore.shard.session import Session
from kvstore.shard.state import ShardState
from kvstore.shard.stream import Outgoing, ReplyStream
from kvstore.shard.turns import SliceClass, SliceQueue
from kvstore.wire import ErrorCode, WireError, zmtp
from kvstore.wire.shared import send_with_descriptors

WRITE_BUDGET_BYTES: Final = 8 << 20  # for each turn of the loop, so that one reader does not starve the others
WRITE_BUDGET_S: Final = 0.005  # also for each turn, because many streams may have little or nothing to send
MAX_QUEUED_REPLIES_BYTES: Final = 128 << 10  # if more is queued, nothing more is read from this client
MAX_HELD_REPLIES: Final = 64
MAX_STREAMS: Final = 256
SMALL_REPLIES_BYTES: Final = 4 << 10
KEEP_ALIVE_S: Final = 1.0  # how often a client that must wait is sent a PING
READER_STALL_S: Final = 30.0
_IOV: Final = 512
_INT: Final = struct.Struct("i")
_SIOCOUTQNSD: Final = 0x894B  # <linux/sockios.h>: how many bytes of a TCP socket's queue were not sent yet


class Outbox:
    """The replies and streams of one connection. An outbox adds itself to `to_flush`, the loop's queue of outboxes that
    may have bytes to send."""

    def __init__(
        self,
        state: ShardState,
        sock: socket.socket,
        share: AddressBudget,
        session: Session,
        to_flush: SliceQueue[Outbox],
    ) -> None:
        self.sock = sock
        self.share = share
        self.closed = False
        self.closing = False  # the connection is closed when everything is sent
        self.streams: dict[int, ReplyStream] = {}
        self.next_due = float("inf")  # when the first of its streams is due
        self.sent_bytes = 0  # bytes that the kernel has taken since the connection was made
        self._state = state
        self._session = session
        self._to_flush = to_flush
        self._held_replies = 0  # replies that wait for the disk
        self._progress = state.now  # when the kernel last took bytes for this client, or when new bytes were queued
        self._replies: deque[bytes] = deque([zmtp.greeting() + zmtp.ready(b"ROUTER")])
        self._replies_bytes = 0
        self._sending_replies_bytes = 0  # bytes of replies in `_sending`
        self._turn: deque[ReplyStream] = deque()  # streams that may have parts to send
        self._sending: list[bytes | memoryview] = []
        self._parts: Parts | None = None  # the object that sends the next part
        self._sent: Outgoing | None = None

    # ---- replies ---------------------------------------------------------------------------------------------

    @property
    def pace(self) -> SliceClass:
        """The class in which the outbox waits for the loop: small replies go first, and blocks last."""
        if self.streams:
            return SliceClass.SLOW
        return SliceClass.CHEAP if self._replies_bytes <= SMALL_REPLIES_BYTES else SliceClass.QUICK

    def reply(self, reply: wire.Reply) -> None:
        """Queue a reply."""
        self.queue(zmtp.frame(wire.encode(reply), False))

    def queue(self, data: bytes) -> None:
        """Queue bytes in wire format."""
        if self.closed:
            return
        self._replies.append(data)
        self._replies_bytes += len(data) + REPLY_BYTES
        self.share.take(REPLIES, len(data) + REPLY_BYTES)
        self._to_flush.add(self, self.pace)

    def hold(self, reply: wire.Reply) -> Callable[[], None]:
        """Hold back a reply that must wait. Return a function that must be called once, when the reply may be sent."""
        self._held_replies += 1

        def send() -> None:
            self._held_replies -= 1
            self.reply(reply)

        return send

    def wake(self) -> None:
        """Let the loop check this connection in this turn, because it may have bytes to send or must be polled for
        other events."""
        self._to_flush.add(self, self.pace)

    # ---- streams ---------------------------------------------------------------------------------------------

    def add_stream(self, stream: ReplyStream) -> None:
        """Start to send the parts of a GET. Raises `WireError` if the client or the shard has too many GETs in
        progress."""
        if len(self.streams) >= MAX_STREAMS:
            raise LimitReached(GETS, f"{MAX_STREAMS} GETs are in progress on this connection; wait for one to end")
        if stream.id in self.streams:
            raise WireError(ErrorCode.PROTOCOL, f"request id {stream.id} is in use by a GET in progress")
        self.share.check(stream.nbytes)
        self.share.take(STREAMS, stream.nbytes)
        self._state.streams += 1
        if self.streams or self._busy:
            stream.count_use(self._state.now)
        self.streams[stream.id] = stream
        self.next_due = min(self.next_due, stream.due)
        self.resume(stream)

    def resume(self, stream: ReplyStream) -> None:
        """Start or continue a stream that may have parts to send."""
        if stream not in self._turn:
            self._turn.append(stream)
        self._to_flush.add(self, self.pace)

    def end_stream(self, stream: ReplyStream) -> None:
        """Send no more parts of a stream, and release its memory."""
        if self.streams.pop(stream.id, None) is not None:
            stream.close()
            self.share.give_back(STREAMS, stream.nbytes)
            self._state.streams -= 1
        if stream in self._turn:
            self._turn.remove(stream)

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def backed_up(self) -> bool:
        """True if nothing more is read from the client, because it does not read its replies, or because too many
        replies wait for the disk."""
        if self._held_replies > MAX_HELD_REPLIES:
            return True
        queued = self._replies_bytes
        return queued > 0 and (queued > MAX_QUEUED_REPLIES_BYTES or self.share.full)

    @property
    def _busy(self) -> bool:
        """True if bytes wait for the kernel to take them."""
        return bool(self._sending) or self._parts is not None

    @property
    def waits(self) -> bool:
        """True if a reply waits for the disk."""
        return self._held_replies > 0

    @property
    def requests(self) -> int:
        """The number of GETs in progress, and of replies that wait for the disk."""
        return len(self.streams) + self._held_replies

    def waiting_bytes(self) -> int:
        """Return how many bytes wait to be sent: replies that are queued here, and what the kernel has taken but not
        sent. Blocks that were not given to the kernel do not count."""
        queued = self._replies_bytes - REPLY_BYTES * len(self._replies)
        if self._parts is None:
            queued += sum(map(len, self._sending))
        queue = termios.TIOCOUTQ if self.sock.family == socket.AF_UNIX else _SIOCOUTQNSD
        try:
            (unsent,) = _INT.unpack(fcntl.ioctl(self.sock, queue, bytes(_INT.size)))
        except OSError:  # the connection is lost
            unsent = 0
        return int(queued + unsent)

    @property
    def empty(self) -> bool:
        """True if there is nothing to send, now or later."""
        return not (self._busy or self._replies or self.streams or self._held_replies)

    def stalled(self, now: float) -> bool:
        """Return whether bytes wait to be sent and the client has taken none for `READER_STALL_S`."""
        return self._busy and now - self._progress > READER_STALL_S

    def keep_alive(self, now: float) -> None:
        """Queue a PING if nothing was sent for `KEEP_ALIVE_S` and no bytes wait to be sent."""
        if not self._busy and now - self._progress > KEEP_ALIVE_S:
            self.queue(zmtp.command(b"PING", bytes(2)))

    # ---- sending ---------------------------------------------------------------------------------------------

    def flush(self, now: float) -> bool:
        """Send as much as the kernel takes, up to about `WRITE_BUDGET_BYTES`. After `WRITE_BUDGET_S` seconds, no more
        parts are collected. Return True if there may be more to send. Raises `OSError` if the connection is lost."""
        session = self._session
        budget, until = WRITE_BUDGET_BYTES, time.monotonic() + WRITE_BUDGET_S
        try:
            while budget > 0:
                if not (self._sending or self._parts is not None):
                    if not (self._replies or self._turn):
                        return False
                    if not self._next_outgoing(now, until):
                        return bool(self._turn)  # if streams are left, the time is up
                outgoing, parts = self._sent, self._parts
                if parts is not None:
                    sent = parts.send(self.sock)
                    if parts.part_sent:
                        self._parts = None
                elif outgoing is not None and outgoing.descriptors and outgoing.release is not None:
                    sent = send_with_descriptors(self.sock, self._sending[:_IOV], outgoing.descriptors)
                    outgoing.release(True)  # the descriptors were sent with the first byte
                else:
                    sent = self.sock.sendmsg(self._sending[:_IOV])
                self._state.bytes_out += sent
                self.sent_bytes += sent
                if session.tenant is not None:
                    session.tenant.spend(sent)
                self._progress = now
                budget -= sent
                if parts is None:
                    self._sending = zmtp.advance(self._sending, sent)
                if not (self._sending or self._parts is not None):
                    self._release_sent(True)
        except BlockingIOError:
            pass
        return True

    def _next_outgoing(self, now: float, until: float) -> bool:
        """Find what to send next: either replies, or a part of a stream if one is found before `until`. Return False if
        nothing is found."""
        if self._replies:
            self._sending = [b"".join(self._replies)]
            self._replies.clear()
            self._sending_replies_bytes, self._replies_bytes = self._replies_bytes, 0
            self._progress = now
            return True
        while self._turn and time.monotonic() < until:
            stream = self._turn.popleft()
            outgoing = stream.next_part(now)
            if outgoing is None:
                continue  # the stream is resumed by credit or by a commit
            if stream.done:
                if self._state.timing.add(wire.Get, stream.began + stream.promised_s, stream.fetched):
                    self._add_slow(stream)
                self.end_stream(stream)
            else:
                self._turn.append(stream)
            self._sending, self._parts, self._sent = outgoing.views, outgoing.parts, outgoing
            self._progress = now
            return True
        return False

    def _add_slow(self, stream: ReplyStream) -> None:
        """Add a GET to the slow log if it belongs there."""
        waits = stream.waits_s()
        slow, keys, nbytes = self._state.slow, stream.keys, stream.sent_bytes
        slow.add(self._session, wire.Get, stream.began, keys, nbytes, running="replies", waits=waits)

    def _release_sent(self, all_sent: bool) -> None:
        self.share.give_back(REPLIES, self._sending_replies_bytes)
        self._sending_replies_bytes = 0
        sent, self._sent = self._sent, None
        if sent is not None and sent.release is not None:
            sent.release(all_sent)

    def count_for(self, share: AddressBudget) -> None:
        """Charge the connection to another budget from now on. At this time, it must hold nothing but replies."""
        held = self._replies_bytes + self._sending_replies_bytes
        self.share.give_back(REPLIES, held)
        share.take(REPLIES, held)
        self.share = share

    def close(self) -> None:
        """Drop everything that has not been sent yet, because the connection ends."""
        self.closed = True
        self._release_sent(False)
        self.share.give_back(REPLIES, self._replies_bytes)
        for stream in list(self.streams.values()):
            self.end_stream(stream)
        self._replies.clear()
        self._sending = []
