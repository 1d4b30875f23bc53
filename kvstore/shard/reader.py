"""Reads the messages of one connection as they arrive: the ZMTP handshake, headers, keys and payload.

The header frame decides which frames follow. Keys are collected in a buffer of bounded size. Payload goes from the
kernel straight into the slots that are reserved for it. Unwanted bytes, such as a block that exists or the rest of a
refused message, go into a scratch buffer. A message that breaks a rule is answered with ERROR, and its remaining frames
are discarded. The connection is closed only if its messages can no longer be told apart, because the client does not
speak ZMTP or a frame exceeds the limit.
"""

from __future__ import annotations

import logging
import time
from typing import Final, NoReturn

from kvstore import wire
from kvstore._cext import Landing, Payload, Receiver
from kvstore.shard.account import FRAMES, PENDING_WRITE_BYTES, SMALL_BYTES, WRITE_BLOCK_BYTES, WRITES
from kvstore.shard.handlers import RequestHandlers
from kvstore.shard.peer import ConnectionClass, Peer
from kvstore.shard.sets import Write
from kvstore.shard.state import ShardState
from kvstore.shard.turns import NEW_SLICE_S, SLICE_S, Cost, SliceClass
from kvstore.wire import ErrorCode, WireError, zmtp
from kvstore.wire.shared import STAGED, staged_blocks
from kvstore.wire.zmtp import ZMTPError

log = logging.getLogger(__name__)

SHARD_READ_BYTES: Final = 8 << 20  # for each turn of the loop, so that one writer does not starve the others
HANDSHAKE_S: Final = 5.0
PREFERRED_BYTES: Final = 4096  # a new connection goes before others until it has sent this many bytes
MESSAGE_S: Final = 30.0  # the time limit for a message whose header has not arrived yet


class OverlongFrame(WireError):
    """The error for a frame that is too large even to be discarded. The client gets ERROR and is disconnected."""


class MessageReader:
    """Reads and dispatches the messages of `peer`. Implements `zmtp.FrameSink`; used by the loop's thread only."""

    def __init__(self, peer: Peer, answers: RequestHandlers, state: ShardState) -> None:
        self.peer = peer
        self.events = 0  # the events for which the loop polls the socket
        self.began = state.now
        self.last_heard = state.now  # when the client last sent something
        self._until = 0.0  # the end of the connection's slice of the turn
        self._cost = Cost()
        self.writer = False  # the client has sent a SET
        self.deadline = state.now + HANDSHAKE_S  # for the arriving handshake or message, in monotonic seconds
        self.write: Write | None = None  # the SET whose payload is arriving
        self._write_bytes = 0  # the memory that `write` holds
        self._answers = answers
        self._state = state
        self._receiver = Receiver(peer.sock, self, peer.files.take if peer.files is not None else None)
        self._greeting = b""
        self._ready = False
        self._speaks_ping = False
        self._frame = 0  # index of the next frame in the current message
        self._request: wire.KeyedRequest | None = None
        self._request_id = 0  # of the message that is being read; 0 if unknown
        self._skipping = False
        self._collecting = 0  # the bytes of the frame that is being collected

    @property
    def paused(self) -> bool:
        """True if received messages wait for this connection's next slice, or for its client to read replies."""
        return self._receiver.paused

    @property
    def pace(self) -> SliceClass:
        """The class in which the connection waits to be read. A connection goes first if it is new, belongs to a
        member, or waits for a place."""
        pace = self._cost.pace
        kept = self.peer.place is not ConnectionClass.CLIENT and pace < SliceClass.SLOW
        return SliceClass.PREFERRED if kept or self._receiver.received < PREFERRED_BYTES else pace

    @property
    def idle(self) -> bool:
        """True if no message is partly received, nothing is to be sent, and nothing else depends on the connection."""
        return self._frame == 0 and not self.paused and self.peer.idle

    def keep_alive(self, now: float, held_back: bool) -> None:
        """Send a PING to a client that waits, if a PING from the client could not be answered now.

        This is the case if the connection is not read (`held_back`), if a reply waits for the disk, or if the client is
        in the middle of a SET.
        """
        if self._speaks_ping and (held_back or self.peer.outbox.waits or self.write is not None):
            self.peer.outbox.keep_alive(now)

    def abandon(self) -> None:
        """Release the slots and buffers of a partly received message, because the connection ends."""
        self.abort_write()
        self.peer.share.give_back(FRAMES, self._collecting)
        self._collecting = 0

    def on_readable(self, now: float) -> None:
        """Handle received bytes for about `SLICE_S`, up to `SHARD_READ_BYTES`."""
        self.last_heard = now
        cost, began = self._cost, time.monotonic()
        used = time.thread_time() if cost.measured else None
        new = self._receiver.received < PREFERRED_BYTES
        self._until = self._receiver.slice_end = began + (NEW_SLICE_S if new else SLICE_S)
        self._read(1 if new else SHARD_READ_BYTES)  # 1: read with one system call only
        if used is not None:
            cost.add(time.thread_time() - used)
        else:
            cost.took(time.monotonic() - began)

    def _read(self, budget: int) -> None:
        try:
            if len(self._greeting) < zmtp.GREETING_BYTES and not self._read_greeting():
                return
            before = self._receiver.received
            alive = self._receiver.receive(budget)
            received = self._receiver.received - before
            self._state.bytes_in += received
            self.peer.received_bytes += received
            tenant = self.peer.session.tenant
            if tenant is not None:
                tenant.spend(received)
            if not alive:
                self.peer.close("the client closed")
        except BlockingIOError:
            return
        except OverlongFrame as error:
            self._refuse(error)
            self.peer.outbox.closing = True
        except ZMTPError as error:
            log.warning("client %s: %s", self.peer.address, error)
            self._state.errors += 1
            self.peer.close(str(error))
        except OSError as error:
            self.peer.close(f"connection lost: {error}")
        except Exception:  # a bug must end one client's connection, not the whole cache
            self.peer.close_after_defect()

    def _read_greeting(self) -> bool:
        data = self.peer.sock.recv(zmtp.GREETING_BYTES - len(self._greeting))
        if not data:
            self.peer.close("the client closed")
            return False
        self._greeting += data
        if not self._greeting.startswith(zmtp.SIGNATURE[:1]):
            raise ZMTPError(f"no ZMTP greeting: the first bytes are {self._greeting[:10].hex()}")
        if len(self._greeting) < zmtp.GREETING_BYTES:
            return False
        zmtp.check_greeting(self._greeting)
        self._speaks_ping = self._greeting[10:12] >= b"\x03\x01"
        return True

    def command(self, name: bytes, body: bytes) -> None:
        if self._frame and name not in {b"PING", b"PONG"}:
            raise ZMTPError(f"a command {name!r} came inside a message")
        if name == b"READY":
            if self._ready:
                raise ZMTPError("a second READY")
            kind = zmtp.socket_type(body)
            if kind not in {b"DEALER", b"REQ", b"ROUTER"}:
                raise ZMTPError(f"a socket of type {kind!r}: expected b'DEALER'")
            self._ready = True
            self.deadline = float("inf")
        elif name == b"PING":
            self.peer.outbox.queue(zmtp.command(b"PONG", body[2:18]))
        elif name == b"ERROR":
            raise ZMTPError(f"the client reports {body[1:]!r}")

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | Payload | None:
        if not self._ready:
            raise ZMTPError("a frame came before READY")
        if size > wire.MAX_BLOCK_BYTES:
            raise OverlongFrame(ErrorCode.LIMIT, f"a frame of {size} bytes: expected at most {wire.MAX_BLOCK_BYTES}")
        if self._frame == 0:
            self.deadline = self._state.now + MESSAGE_S
        try:
            views: list[memoryview] | Payload | None = self._place(size)
        except WireError as error:
            self._refuse(error)
            views = zmtp.discard_views(size)
        if views is None:
            self._collecting = size
            self.peer.share.take(FRAMES, size)
        return views

    def _place(self, size: int) -> list[memoryview] | Payload | None:
        """Return the memory for the next frame, or None if the frame is to be collected in a buffer."""
        if self._skipping:
            return zmtp.discard_views(size)
        if self._frame == 0:
            self._check_header(size)
        elif self._frame == 1:
            assert self._request is not None
            self._check_keys(self._request, size)
        elif self.write is not None:
            return self._place_payload(self.write, size)
        if size > SMALL_BYTES:
            self.peer.share.check(size)
        return None

    @staticmethod
    def _check_header(size: int) -> None:
        if size > wire.MAX_HEADER_BYTES:
            raise WireError(ErrorCode.LIMIT, f"a header of {size} bytes: expected at most {wire.MAX_HEADER_BYTES}")

    @staticmethod
    def _check_keys(request: wire.KeyedRequest, size: int) -> None:
        expected = request.count * request.key_bytes
        if size != expected:
            raise WireError(
                ErrorCode.PROTOCOL,
                f"a keys frame of {size} bytes: expected {expected} bytes for {request.count} keys of "
                f"{request.key_bytes} bytes",
            )

    def _place_payload(self, write: Write, size: int) -> list[memoryview] | Payload | None:
        left = write.request.count - write.arrived
        if write.request.references:
            most = min(left, staged_blocks(write.namespace.block_bytes))
            if size % STAGED.itemsize or size > most * STAGED.itemsize:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"{size} bytes of references: expected {STAGED.itemsize} bytes for each of at most {most} blocks",
                )
            return None
        if not left:
            expected = write.request.count * wire.CHECKSUM_BYTES
            if size != expected:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"a checksums frame of {size} bytes: expected {expected} bytes, {wire.CHECKSUM_BYTES} per block",
                )
            return None
        namespace = write.namespace
        block_bytes = namespace.block_bytes
        count = min(left, namespace.frame_blocks)
        if size != count * block_bytes:
            raise WireError(
                ErrorCode.BLOCK_SIZE,
                f"a payload frame of {size} bytes: expected {count * block_bytes} bytes for {count} block(s) of "
                f"{block_bytes} bytes",
            )
        if not write.placed and int(write.slots.min()) >= 0:
            memory, offsets = namespace.arena.memory, namespace.memory.offsets(write.slots)
            write.payload = Payload(memory, offsets, block_bytes, namespace.frame_blocks)
            return write.payload
        slots = write.slots[write.placed : write.placed + count]
        write.placed += count
        if int(slots.min()) >= 0:
            return namespace.views(slots)
        views: list[memoryview] = []
        for at, slot in enumerate(slots):
            views.extend(zmtp.discard_views(block_bytes) if slot < 0 else namespace.views(slots[at : at + 1]))
        return views

    def go_on(self) -> bool:
        outbox = self.peer.outbox
        stopped = outbox.closed or outbox.backed_up or self.peer.session.logging_in
        return not stopped and time.monotonic() < self._until

    def landed(self, landing: Landing) -> None:
        raise AssertionError("a shard sends no GETs here")

    def misplaced(self, size: int, expected: int) -> NoReturn:
        raise AssertionError("a shard sends no GETs here")

    def bytes_after_frame(self) -> int:
        write = self.write
        if write is None or write.request.references:
            return 0
        return (write.request.count - write.arrived) * write.namespace.block_bytes

    def message(self, header: bytes, keys: bytes | None) -> None:
        """Handle a message that has arrived as a whole (see `zmtp.FrameSink`)."""
        if not self._ready:
            raise ZMTPError("a frame came before READY")
        try:
            self._check_header(len(header))
            self._take_header(header, keys is not None)
            request = self._request
            if request is not None and keys is not None:
                self._check_keys(request, len(keys))
                if len(keys) > SMALL_BYTES:
                    self.peer.share.check(len(keys))
                self._take_keys(request, keys, False)
        except WireError as error:
            self._refuse(error)
        self._end_message()

    def _end_message(self) -> None:
        self._frame = 0
        self._request, self._request_id = None, 0
        self._skipping = False
        self.deadline = float("inf")

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        if self._collecting:
            self.peer.share.give_back(FRAMES, self._collecting)
            self._collecting = 0
        if not self._skipping:
            try:
                self._take(data, more)
            except WireError as error:
                self._refuse(error)
        if more:
            self._frame += 1
        else:
            self._end_message()

    def _take(self, data: bytes | bytearray | None, more: bool) -> None:
        """Handle a frame that has arrived as a whole."""
        if self._frame == 0:
            assert data is not None
            self._take_header(data, more)
        elif self._frame == 1:
            assert data is not None and self._request is not None
            self._take_keys(self._request, bytes(data), more)
        elif self.write is not None:
            if self.write.request.references:
                assert data is not None
                self._answers.sets.copy_staged(self.peer, self.write, bytes(data), more)
                if not more and self.write.arrived == self.write.request.count:
                    write = self._end_write(self.write)
                    self._answers.sets.commit(self.peer, write, write.sums)
                    return
            elif data is not None:
                if more:
                    raise WireError(ErrorCode.PROTOCOL, "a frame after the checksums: expected the end of the message")
                self._answers.sets.commit(self.peer, self._end_write(self.write), bytes(data))
                return
            if not more:
                raise WireError(
                    ErrorCode.PROTOCOL,
                    f"the message ends after {self.write.arrived} of {self.write.request.count} blocks: "
                    "expected the other blocks and the checksums",
                )

    def _take_header(self, header: bytes | bytearray, more: bool) -> None:
        request = wire.decode_request(header)
        self._request_id = request.id
        verb, peer, answers = wire.VERBS[type(request)], self.peer, self._answers
        session = peer.session
        if isinstance(request, wire.KeyedRequest):
            self._request = request
            self.deadline = self._state.now + request.deadline_ms / 1000
        if not verb.right & session.rights.verbs:
            answers.check_rights(peer, request)
        if more != verb.keyed:
            wrong = "without its keys frame" if verb.keyed else "is one frame, but more frames follow it"
            raise WireError(ErrorCode.PROTOCOL, f"{verb.name.upper()} {wrong}")
        if verb.large and peer.outbox.backed_up:  # the request is small, but the reply may be large
            raise WireError(ErrorCode.LIMIT, "earlier replies were not read yet; read them first")
        if verb.namespace and not session.namespace:
            raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with a namespace first")
        if verb.place:
            answers.places.check(peer, self._state.now)
        if not verb.keyed:
            answers.handlers[type(request)](peer, request)
        elif session.tenant is not None and session.tenant.limited:
            answers.check_tenant(peer, session.tenant)

    def _take_keys(self, request: wire.KeyedRequest, keys: bytes, more: bool) -> None:
        if isinstance(request, wire.Set):
            self.writer = True
            if not more:
                raise WireError(ErrorCode.PROTOCOL, "SET came without its payload and checksums frames")
            size = PENDING_WRITE_BYTES + len(keys) + request.count * WRITE_BLOCK_BYTES
            size += len(request.attributes) + len(request.offsets)
            self.peer.share.check(size)
            self.write = self._answers.sets.begin_write(self.peer, request, keys)
            self._write_bytes = size
            self.peer.share.take(WRITES, size)
        elif more:
            raise WireError(
                ErrorCode.PROTOCOL,
                f"{wire.VERBS[type(request)].name.upper()} ends with its keys frame, but more frames follow it",
            )
        else:
            self._answers.handle_keyed(self.peer, request, keys)

    def _refuse(self, error: WireError) -> None:
        """Reply with ERROR, drop the message, and discard its remaining frames."""
        self._skipping = True
        self.abort_write()
        self.peer.refuse(self._request_id or error.request_id, error)

    def _end_write(self, write: Write) -> Write:
        self.peer.share.give_back(WRITES, self._write_bytes)
        self.write, self._write_bytes = None, 0
        return write

    def abort_write(self) -> None:
        """Give back the slots of a SET that did not arrive completely."""
        if self.write is not None:
            self._answers.sets.give_up(self._end_write(self.write))
