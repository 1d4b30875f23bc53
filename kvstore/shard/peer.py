"""One client's connection: the client's attributes, and the replies and streams that are sent to it.

Replies are sent first, then the streams in turn, one part each. Blocks are queued only in the kernel's socket buffer.
While a client does not read its replies, the shard reads nothing more from it. `MessageReader` reads its messages.
"""

from __future__ import annotations

import enum
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore import wire
from kvstore._cext import Parts
from kvstore.auth.rights import Rights
from kvstore.shard.account import (
    CHAINS,
    CONNECTION_BYTES,
    CONNECTIONS,
    GETS,
    PROMISES,
    REPLIES,
    REPLY_BYTES,
    STREAMS,
    LimitReached,
    Share,
)
from kvstore.shard.client_files import ClientFiles
from kvstore.shard.leases import Leases
from kvstore.shard.state import ShardState
from kvstore.shard.stream import Outgoing, Stream
from kvstore.shard.tenant import Tenant
from kvstore.shard.turns import Line, Pace
from kvstore.store.expected import PROMISE_BYTES, Promises
from kvstore.wire import ErrorCode, WireError, zmtp
from kvstore.wire.shared import send_with_descriptors

log = logging.getLogger(__name__)

WRITE_BUDGET_BYTES: Final = 8 << 20  # per turn of the loop, so that one reader does not starve the others
WRITE_BUDGET_S: Final = 0.005  # the same, for many streams that have little to send or, when woken, nothing
MAX_REMEMBERED_BYTES: Final = 16 << 20  # while the shard buffers less, the keys that clients asked for are remembered
MAX_QUEUED_REPLIES_BYTES: Final = 128 << 10  # beyond this nothing more is read from this client
MAX_HELD_REPLIES: Final = 64
MAX_STREAMS: Final = 256
SMALL_REPLIES_BYTES: Final = 4 << 10
KEEP_ALIVE_S: Final = 1.0  # how often a client that must wait is sent a PING
STALL_S: Final = 30.0
_IOV: Final = 512


class Place(enum.Enum):
    """What a connection may be used for: see `kvstore.shard.places`."""

    CLIENT = "client"
    MEMBER = "member"
    DOOR = "door"  # it waits for a place


class Peer:
    """A client, and the replies and streams that are sent to it. Used by the loop's thread only.

    to_flush: the loop's line of peers that may have bytes to send; a peer adds itself. on_close: called once, before
    the socket is closed.
    """

    def __init__(
        self,
        state: ShardState,
        sock: socket.socket,
        share: Share,
        host: str,
        port: int,
        to_flush: Line[Peer],
        on_close: Callable[[Peer], None],
        leases: Leases | None = None,
        files: ClientFiles | None = None,
    ) -> None:
        """host, port: its address. leases, files: of a client on this host, what it was lent and what it shares; None:
        it is not at the Unix socket."""
        self.sock = sock
        self.leases = leases
        self.files = files
        self.share = share
        self.place = Place.DOOR  # until it is given another one
        self.host = host
        self.address = f"{host}:{port}"
        self.closed = False
        self._refused = False
        self.closing = False  # close when all replies are sent
        self.rights: Rights = state.newcomer
        self.login: tuple[str, str] | None = None  # the principal and the hash of the token with which it logged in
        self.tenant: Tenant | None = None  # whose limits count; None: nobody's
        self.logging_in = False  # its token is being checked: nothing more is read meanwhile
        self.namespace: bytes = b""  # canonical JSON, from HELLO; its tenant is the principal's
        self.client = ""
        self.replicas = 1  # copies that the client keeps of each block
        self.chain = b""  # the keys that the client asked for last: a SET usually continues them
        self.streams: dict[int, Stream] = {}
        self.jobs = 0  # of this client in the background
        self.promising: set[Promises] = set()  # where it has promised blocks
        self._promised_keys = 0
        self.next_due = float("inf")  # when one of its streams is due, at the earliest
        self._state = state
        self._to_flush = to_flush
        self._on_close = on_close
        self._held_replies = 0  # replies that wait for the disk
        self._progress = state.now  # when the kernel last took bytes for this client, or new ones came to be sent
        self._replies: deque[bytes] = deque([zmtp.greeting() + zmtp.ready(b"ROUTER")])
        self._replies_bytes = 0
        self._sending_replies_bytes = 0  # of the replies in `_sending`
        state.account.take(CONNECTIONS, CONNECTION_BYTES)
        self._turn: deque[Stream] = deque()  # streams that may have parts to send
        self._sending: list[bytes | memoryview] = []
        self._parts: Parts | None = None  # whose next part is being sent
        self._sent: Outgoing | None = None

    def remember(self, keys: bytes) -> None:
        """Remember the keys of a request: they tell the place in the chain of blocks that the client sets next."""
        if self.chain.startswith(keys):  # a GET of the blocks that the look-up before it found
            return
        account = self._state.account
        account.give_back(CHAINS, len(self.chain))
        self.chain = keys if account.held_bytes + len(keys) <= MAX_REMEMBERED_BYTES else b""
        account.take(CHAINS, len(self.chain))

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

    def await_login(self) -> None:
        """Read nothing more until its token is checked."""
        self.logging_in = True
        self._to_flush.add(self, self.pace)  # so that the loop polls anew

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

    def promises_in(self, promises: Promises) -> None:
        """It may have promised blocks of another namespace; where it has none any more is forgotten."""
        if promises not in self.promising and promises.held_by(self):
            self.promising = {each for each in self.promising if each.held_by(self)} | {promises}

    def promised(self, keys: int) -> None:
        """It has promised so many keys more; below 0: fewer."""
        self._promised_keys += keys
        if keys > 0:
            self.share.take(PROMISES, keys * PROMISE_BYTES)
        else:
            self.share.give_back(PROMISES, -keys * PROMISE_BYTES)

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def member(self) -> bool:
        """It is a member of the cluster, or the node itself."""
        return self.place is Place.MEMBER

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
    def idle(self) -> bool:
        """There is nothing to send, now or later, and nobody relies on the connection."""
        relied_on = self._promised_keys or (self.leases is not None and self.leases.held_bytes)
        return not (self._busy or self._replies or self.streams or self._held_replies or self.jobs or relied_on)

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
        when more may be waiting to be sent."""
        budget, until = WRITE_BUDGET_BYTES, time.monotonic() + WRITE_BUDGET_S
        try:
            while budget > 0:
                if not self._busy and not self._next_outgoing(now, until):
                    if self._turn:
                        return True  # the time is up
                    if self.closing:
                        self.close("closed after an error")
                    return False
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
                if self.tenant is not None:
                    self.tenant.spend(sent)
                self._progress = now
                budget -= sent
                if parts is None:
                    self._sending = zmtp.advance(self._sending, sent)
                if not self._busy:
                    self._release_sent(True)
        except BlockingIOError:
            return True
        except OSError as error:
            self.close(f"connection lost: {error}")
            return False
        except Exception:  # a bug must end one client's connection, not the whole cache
            self.close_after_defect()
            return False
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
                self._state.timing.add("get", stream.began, stream.fetched)
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

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close the connection and release everything that it holds. Later calls do nothing."""
        if self.closed:
            return
        self.closed = True
        log.debug("client %s %r: closed: %s", self.address, self.client, reason)
        self._release_sent(False)
        account = self._state.account
        account.give_back(CHAINS, len(self.chain))
        self.share.give_back(REPLIES, self._replies_bytes)
        account.give_back(CONNECTIONS, CONNECTION_BYTES)
        for stream in list(self.streams.values()):
            self.end_stream(stream)
        for promises in self.promising:
            promises.withdraw_all(self)
        # A promise that ends later may still know it: what it holds must not wait for that.
        self.chain = b""
        self._replies.clear()
        self._sending = []
        if self.files is not None:
            self.files.close()
        self._on_close(self)
        self.sock.close()

    def refuse(self, request_id: int, error: wire.WireError) -> None:
        """Answer a request with ERROR. Only the first refusal of a connection is logged above DEBUG."""
        self._state.errors += 1
        if isinstance(error, LimitReached):
            self._state.refused[error.limit] += 1
        if self._refused:
            log.debug("client %s: refused again: %s", self.address, error)
        elif isinstance(error, LimitReached):  # another kind of line: the operator can do something about it
            log.warning("client %s: refused at a limit: %s", self.address, error)
        else:
            log.info("client %s: refused: %s", self.address, error)
        self._refused = True
        self.reply(wire.Error(request_id, int(error.code), str(error)))

    def close_after_defect(self) -> None:
        """Log the exception being handled, which is a bug in the server, and close the connection."""
        log.exception("client %s: internal error", self.address)
        self._state.errors += 1
        self.close("internal error")
