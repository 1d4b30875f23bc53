"""What is sent to one client: replies first, then the streams of its GETs in turn, one part each.

Blocks are queued only in the kernel's socket buffer. While a client does not read its replies, the shard reads nothing
more from it. Used by the loop's thread only.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore import wire
from kvstore._cext import Parts
from kvstore.shard.account import GETS, REPLIES, REPLY_BYTES, STREAMS, LimitReached, Share
from kvstore.shard.session import Session
from kvstore.shard.state import ShardState
from kvstore.shard.stream import Outgoing, Stream
from kvstore.shard.turns import Line, Pace
from kvstore.wire import ErrorCode, WireError, zmtp
from kvstore.wire.shared import send_with_descriptors

WRITE_BUDGET_BYTES: Final = 8 << 20  # per turn of the loop, so that one reader does not starve the others
WRITE_BUDGET_S: Final = 0.005  # the same, for many streams that have little to send or, when woken, nothing
MAX_QUEUED_REPLIES_BYTES: Final = 128 << 10  # beyond this nothing more is read from this client
MAX_HELD_REPLIES: Final = 64
MAX_STREAMS: Final = 256
SMALL_REPLIES_BYTES: Final = 4 << 10
KEEP_ALIVE_S: Final = 1.0  # how often a client that must wait is sent a PING
STALL_S: Final = 30.0
_IOV: Final = 512


class Outbox:
    """The replies and streams of one connection. It adds itself to `to_flush`, the loop's line of those that may have
    bytes to send."""

    def __init__(
        self, state: ShardState, sock: socket.socket, share: Share, session: Session, to_flush: Line[Outbox]
    ) -> None:
        self.sock = sock
        self.share = share
        self.closed = False
        self.closing = False  # close the connection when all is sent
        self.streams: dict[int, Stream] = {}
        self.next_due = float("inf")  # when one of its streams is due, at the earliest
        self._state = state
        self._session = session
        self._to_flush = to_flush
        self._held_replies = 0  # replies that wait for the disk
        self._progress = state.now  # when the kernel last took bytes for this client, or new ones came to be sent
        self._replies: deque[bytes] = deque([zmtp.greeting() + zmtp.ready(b"ROUTER")])
        self._replies_bytes = 0
        self._sending_replies_bytes = 0  # of the replies in `_sending`
        self._turn: deque[Stream] = deque()  # streams that may have parts to send
        self._sending: list[bytes | memoryview] = []
        self._parts: Parts | None = None  # whose next part is being sent
        self._sent: Outgoing | None = None

    # ---- replies ---------------------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace:
        """When its replies are sent: small ones first, blocks last."""
        if self.streams:
            return Pace.SLOW
        return Pace.CHEAP if self._replies_bytes <= SMALL_REPLIES_BYTES else Pace.QUICK

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
        """Hold a reply back that has to wait. -> a function to call once, when the reply may be sent."""
        self._held_replies += 1

        def send() -> None:
            self._held_replies -= 1
            self.reply(reply)

        return send

    def wake(self) -> None:
        """Have the loop look at it in this turn: it may have bytes to send, or be polled for something else."""
        self._to_flush.add(self, self.pace)

    # ---- streams ---------------------------------------------------------------------------------------------

    def add_stream(self, stream: Stream) -> None:
        """Start to send the parts of a GET. Raises `WireError` when the client or the shard has too many GETs."""
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

    def resume(self, stream: Stream) -> None:
        """The stream may have parts to send (again)."""
        if stream not in self._turn:
            self._turn.append(stream)
        self._to_flush.add(self, self.pace)

    def end_stream(self, stream: Stream) -> None:
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
        """The client does not read its replies, or too many wait for the disk: read no more from it."""
        if self._held_replies > MAX_HELD_REPLIES:
            return True
        queued = self._replies_bytes
        return queued > 0 and (queued > MAX_QUEUED_REPLIES_BYTES or self.share.full)

    @property
    def _busy(self) -> bool:
        """Bytes wait for the kernel to take them."""
        return bool(self._sending) or self._parts is not None

    @property
    def waits(self) -> bool:
        """A reply waits for the disk."""
        return self._held_replies > 0

    @property
    def empty(self) -> bool:
        """There is nothing to send, now or later."""
        return not (self._busy or self._replies or self.streams or self._held_replies)

    def stalled(self, now: float) -> bool:
        """Bytes wait to be sent, and the client has taken none for `STALL_S`."""
        return self._busy and now - self._progress > STALL_S

    def keep_alive(self, now: float) -> None:
        """Queue a PING if nothing was sent for `KEEP_ALIVE_S` and no bytes are waiting to be sent."""
        if not self._busy and now - self._progress > KEEP_ALIVE_S:
            self.queue(zmtp.command(b"PING", bytes(2)))

    # ---- sending ---------------------------------------------------------------------------------------------

    def flush(self, now: float) -> bool:
        """Send as much as the kernel takes, up to `WRITE_BUDGET_BYTES`, of what is found in `WRITE_BUDGET_S`. -> True
        when more may be waiting to be sent. Raises `OSError` when the connection is lost."""
        session = self._session
        budget, until = WRITE_BUDGET_BYTES, time.monotonic() + WRITE_BUDGET_S
        try:
            while budget > 0:
                if not (self._sending or self._parts is not None):
                    if not (self._replies or self._turn):
                        return False
                    if not self._next_outgoing(now, until):
                        return bool(self._turn)  # else the time is up
                outgoing, parts = self._sent, self._parts
                if parts is not None:
                    sent = parts.send(self.sock)
                    if parts.part_sent:
                        self._parts = None
                elif outgoing is not None and outgoing.descriptors and outgoing.release is not None:
                    sent = send_with_descriptors(self.sock, self._sending[:_IOV], outgoing.descriptors)
                    outgoing.release(True)  # they have gone with the first byte
                else:
                    sent = self.sock.sendmsg(self._sending[:_IOV])
                self._state.bytes_out += sent
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
        """Find what to send next: replies, or a part of a stream that is found before `until`. -> False if none is."""
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
                continue  # until credit or a commit resumes it
            if stream.done:
                self._state.timing.add(wire.Get, stream.began, stream.fetched)
                self.end_stream(stream)
            else:
                self._turn.append(stream)
            self._sending, self._parts, self._sent = outgoing.views, outgoing.parts, outgoing
            self._progress = now
            return True
        return False

    def _release_sent(self, all_sent: bool) -> None:
        self.share.give_back(REPLIES, self._sending_replies_bytes)
        self._sending_replies_bytes = 0
        sent, self._sent = self._sent, None
        if sent is not None and sent.release is not None:
            sent.release(all_sent)

    def count_for(self, share: Share) -> None:
        """Count it for another share from now on, when it holds nothing but replies."""
        held = self._replies_bytes + self._sending_replies_bytes
        self.share.give_back(REPLIES, held)
        share.take(REPLIES, held)
        self.share = share

    def close(self) -> None:
        """The connection ends: let go of all that was to be sent."""
        self.closed = True
        self._release_sent(False)
        self.share.give_back(REPLIES, self._replies_bytes)
        for stream in list(self.streams.values()):
            self.end_stream(stream)
        self._replies.clear()
        self._sending = []
