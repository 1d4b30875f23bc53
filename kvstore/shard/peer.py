"""One client: what is known of it, and the replies and streams on their way to it.

Replies go first, then the streams in turn, one part each. The kernel's socket buffer is the only queue; while a client
does not take its replies, nothing more is read from it. What it sends is read by its `MessageReader`.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore import wire
from kvstore.shard.state import SMALL_BUFFER_BYTES, ShardState
from kvstore.shard.stream import Outgoing, Stream
from kvstore.wire import ErrorCode, WireError, zmtp

log = logging.getLogger(__name__)

WRITE_BUDGET_BYTES: Final = 8 << 20  # per turn of the loop, so that one reader does not starve the others
MAX_REMEMBERED_BYTES: Final = 16 << 20  # while the shard buffers less, what clients asked for last is remembered
MAX_QUEUED_REPLIES_BYTES: Final = 128 << 10  # beyond it nothing more is read from this client
_REPLY_COST_BYTES: Final = 64  # what a queued reply takes beside its bytes
MAX_PROMISED_REPLIES: Final = 64
MAX_STREAMS: Final = 256
KEEP_ALIVE_S: Final = 1.0  # a client that must wait hears of us so often
STALL_S: Final = 30.0
_IOV: Final = 512


class Peer:
    """A client and what is sent to it. Used by the loop's thread only.

    to_flush: the loop's set of those that may have something to send. on_close: called once, before the socket is
    closed.
    """

    def __init__(
        self,
        state: ShardState,
        sock: socket.socket,
        address: str,
        to_flush: set[Peer],
        on_close: Callable[[Peer], None],
    ) -> None:
        self.sock = sock
        self.address = address
        self.closed = False
        self.closing = False  # close when all replies are sent
        self.namespace: bytes = b""  # as HELLO gave it, canonical
        self.client = ""
        self.replicas = 1  # copies it keeps of each block
        self.chain = b""  # the keys it asked for last: a SET usually continues them
        self.streams: dict[int, Stream] = {}
        self._state = state
        self._to_flush = to_flush
        self._on_close = on_close
        self._promised = 0  # replies that wait for the disk
        self._progress = state.now  # when the kernel last took something we had to send
        self._replies: deque[bytes] = deque([zmtp.greeting() + zmtp.ready(b"ROUTER")])
        self._replies_bytes = 0
        self._large_replies_bytes = 0  # of them, what counts in `buffered_bytes`
        self._large_sending_bytes = 0
        self._turn: deque[Stream] = deque()  # streams that may have something to send
        self._sending: list[bytes | memoryview] = []
        self._sent: Outgoing | None = None

    def remember(self, keys: bytes) -> None:
        """What a client asks for tells where in its chain the blocks belong that it sets next."""
        if self.chain.startswith(keys):  # a GET of what the question before it found
            return
        state = self._state
        state.buffered_bytes -= len(self.chain)
        self.chain = keys if state.buffered_bytes + len(keys) <= MAX_REMEMBERED_BYTES else b""
        state.buffered_bytes += len(self.chain)

    # ---- replies ---------------------------------------------------------------------------------------------

    def reply(self, reply: wire.Reply) -> None:
        """Queue a reply."""
        self.queue(zmtp.frame(wire.encode(reply), False))

    def queue(self, data: bytes) -> None:
        """Queue bytes of the wire."""
        self._replies.append(data)
        self._replies_bytes += len(data) + _REPLY_COST_BYTES
        if len(data) > SMALL_BUFFER_BYTES:
            self._large_replies_bytes += len(data)
            self._state.buffered_bytes += len(data)
        self._to_flush.add(self)

    def promise(self, reply: wire.Reply) -> Callable[[], None]:
        """A reply that has to wait. -> what to call, once, when it may be sent."""
        self._promised += 1

        def keep() -> None:
            self._promised -= 1
            if not self.closed:
                self.reply(reply)

        return keep

    # ---- streams ---------------------------------------------------------------------------------------------

    def add_stream(self, stream: Stream) -> None:
        """Begin to send a GET's parts. Raises `WireError` when the client or the shard has too many."""
        if len(self.streams) >= MAX_STREAMS:
            raise WireError(
                ErrorCode.LIMIT, f"{MAX_STREAMS} GETs are in progress on this connection; wait for one to end"
            )
        if stream.id in self.streams:
            raise WireError(ErrorCode.PROTOCOL, f"request id {stream.id} is in use by a GET in progress")
        self._state.check_buffer_room(stream.nbytes)
        self._state.buffered_bytes += stream.nbytes
        self._state.streams += 1
        self.streams[stream.id] = stream
        self.resume(stream)

    def resume(self, stream: Stream) -> None:
        """The stream may have something to send (again)."""
        if stream not in self._turn:
            self._turn.append(stream)
        self._to_flush.add(self)

    def end_stream(self, stream: Stream) -> None:
        """Send no more of it, and give its memory back."""
        if self.streams.pop(stream.id, None) is not None:
            stream.close()
            self._state.buffered_bytes -= stream.nbytes
            self._state.streams -= 1
        if stream in self._turn:
            self._turn.remove(stream)

    # ---- how it is doing -------------------------------------------------------------------------------------

    @property
    def backed_up(self) -> bool:
        """The client does not take its replies: read no more from it."""
        return self._replies_bytes > MAX_QUEUED_REPLIES_BYTES or self._promised > MAX_PROMISED_REPLIES

    @property
    def promised(self) -> bool:
        """A reply waits for the disk."""
        return self._promised > 0

    @property
    def idle(self) -> bool:
        """Nothing to send, now or later."""
        return not (self._sending or self._replies or self.streams or self._promised)

    def stalled(self, now: float) -> bool:
        """The client has taken nothing of what waits for it for a long time."""
        return bool(self._sending) and now - self._progress > STALL_S

    def keep_alive(self, now: float) -> None:
        """Send a PING if nothing was sent for a while; something that waits to be sent says that we are there, too."""
        if not self._sending and now - self._progress > KEEP_ALIVE_S:
            self.queue(zmtp.command(b"PING", bytes(2)))

    # ---- sending ---------------------------------------------------------------------------------------------

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
                self._state.bytes_out += sent
                self._progress = now
                budget -= sent
                self._sending = zmtp.advance(self._sending, sent)
                if not self._sending:
                    self._release_sent()
        except BlockingIOError:
            return True
        except OSError as error:
            self.close(f"connection lost: {error}")
            return False
        except Exception:  # a defect of ours must cost one client its connection, not everybody the cache
            self.close_after_defect()
            return False
        return True

    def _next_outgoing(self, now: float) -> bool:
        if self._replies:
            self._sending = [b"".join(self._replies)]
            self._replies.clear()
            self._replies_bytes = 0
            self._large_sending_bytes, self._large_replies_bytes = self._large_replies_bytes, 0
            self._progress = now
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
            self._progress = now
            return True
        return False

    def _release_sent(self) -> None:
        self._state.buffered_bytes -= self._large_sending_bytes
        self._large_sending_bytes = 0
        sent, self._sent = self._sent, None
        if sent is not None and sent.release is not None:
            sent.release()

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Drop the connection and everything it holds."""
        if self.closed:
            return
        self.closed = True
        log.debug("client %s %r: closed: %s", self.address, self.client, reason)
        self._release_sent()
        self._state.buffered_bytes -= len(self.chain) + self._large_replies_bytes
        for stream in list(self.streams.values()):
            self.end_stream(stream)
        self._on_close(self)
        self.sock.close()

    def close_after_defect(self) -> None:
        """Log the exception being handled, a defect of ours, and drop the connection."""
        log.exception("client %s: internal error", self.address)
        self._state.errors += 1
        self.close("internal error")
