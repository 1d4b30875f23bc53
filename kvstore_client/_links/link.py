"""One connection to one shard.

States: *down* (not connected, a call may connect), *up*, *broken* (connecting failed or the shard went silent; calls
fail at once until the prober in `core` gets through). A shard that owes an answer and says nothing is asked whether it
lives (ZMTP PING): one that works on an answer says so at once.

Any thread may send, one message at a time under `send_lock`; frames are read under `receive_lock` by whoever leads. A
link that loses its place in the byte stream (a message half sent, a deadline in the middle of a frame that cannot be
discarded) is dropped, never repaired.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstore import wire
from kvstore.wire import zmtp
from kvstore_client._links.operations import Operation
from kvstore_client._links.resolving import resolve
from kvstore_client.errors import ConnectionLost, KVStoreError, ProtocolError, Timeout

MAX_REPLY_HEADER_BYTES: Final = 16 << 20  # INFO of as many namespaces as a shard keeps
PING_AFTER_S: Final = 1.0  # of silence while an answer is owed
DEAD_AFTER_S: Final = 2.5  # so that a shard that vanished without a word is noticed within 3 s
_PING: Final = zmtp.command(b"PING", bytes(2))  # a time to live of 0: the shard need not watch us in turn
DELAY_WEIGHT: Final = 0.2  # of the newest answer in the mean delay
DELAY_HALF_LIFE_S: Final = 5.0  # a shard that was slow is tried again


class Link:
    """A shard as seen by one client. Implements `zmtp.FrameSink`."""

    def __init__(
        self, name: str, host: str, port: int, hello: Callable[[int], bytes], on_drop: Callable[[], None]
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.fixed_name = False  # whether only a shard of this name may answer
        self.retired = False  # it left the view: not connected again
        self.sock: socket.socket | None = None
        self.broken: KVStoreError | None = None
        self.pending: dict[int, Operation] = {}
        self.last_received = 0.0
        self.last_moved = 0.0  # when bytes were received, a full socket took more, or an answer was first owed
        self.unanswered = False  # a request that nobody waits for any more got no byte in answer
        self.connections = 0
        self.weight = 1.0
        self.reset_locks()
        self._hello = hello
        self._on_drop = on_drop
        self._receiver: zmtp.Receiver | None = None
        self._ready = False
        self._frame = 0
        self._operation: Operation | None = None  # whose reply is being read
        self._following = 0  # payload bytes that are certain to come after the current message
        self._doubted = 0.0  # when its present silence was first noticed
        self._pinged = 0.0
        self._delay_s = 0.0  # from a request's last byte to the first of its answer: a moving mean
        self._delay_known = 0.0  # when it was

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"

    def reset_locks(self) -> None:
        """After a fork the parent's threads may hold them for ever."""
        self.send_lock = threading.Lock()
        self.receive_lock = threading.Lock()
        self.connect_lock = threading.Lock()
        self._connecting: socket.socket | None = None  # by who holds `connect_lock`: not greeted yet

    # ---- connecting ------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> wire.Welcome:
        """Connect, greet, say HELLO. Raises `ConnectionLost`, `Timeout`, or what the server answers."""
        deadline = time.monotonic() + timeout_s
        try:
            sock = self._open(deadline)
        except TimeoutError:
            raise Timeout(f"{self}: no connection within {timeout_s:.3g} s") from None
        except OSError as error:
            raise ConnectionLost(f"{self}: {error.strerror or error}") from None
        try:
            return self._handshake(sock, deadline, timeout_s)
        except BaseException as error:
            self.close()
            sock.close()
            if isinstance(error, zmtp.ZMTPError | wire.WireError):
                # In a cluster, somebody else on the port of a node that is gone; else, a mistake of the user's.
                kind = ConnectionLost if self.fixed_name else ProtocolError
                raise kind(f"{self} is no kvstore server: {error}") from None
            if isinstance(error, OSError):
                raise ConnectionLost(f"{self}: {error.strerror or error}") from None
            raise
        finally:
            self._connecting = None

    def interrupt(self) -> None:
        """Have another thread's `connect` fail now."""
        sock = self._connecting
        if sock is not None:
            with contextlib.suppress(OSError):  # it failed by itself
                sock.shutdown(socket.SHUT_RDWR)

    def _open(self, deadline: float) -> socket.socket:
        addresses = resolve(self.host, self.port, max(0.001, deadline - time.monotonic()))
        for left, (family, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            self._connecting = sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(0.001, (deadline - time.monotonic()) / left))
                sock.connect(address)
            except OSError:
                sock.close()
                if left == 1:
                    raise
            else:
                return sock
        raise OSError(f"{self.host} has no address")

    def _handshake(self, sock: socket.socket, deadline: float, timeout_s: float) -> wire.Welcome:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        operation = Operation(0)
        self.pending = {0: operation}
        self._ready, self._frame, self._operation, self._following = False, 0, None, 0
        sock.sendall(zmtp.greeting() + zmtp.ready(b"DEALER"))
        greeted = False
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        greeting = b""
        receiver = zmtp.Receiver(sock, self)
        while not operation.done:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise Timeout(f"{self}: no answer to HELLO within {timeout_s:.3g} s")
            if len(greeting) < zmtp.GREETING_BYTES:
                data = sock.recv(zmtp.GREETING_BYTES - len(greeting))
                if not data:
                    raise ConnectionLost(f"{self}: closed during the handshake")
                greeting += data
                if greeting[0] != zmtp.SIGNATURE[0]:
                    raise zmtp.ZMTPError(f"it greets with {greeting[:10].hex()}")
                if len(greeting) == zmtp.GREETING_BYTES:
                    zmtp.check_greeting(greeting)
            elif not receiver.receive(1 << 16):
                raise ConnectionLost(f"{self}: closed during the handshake")
            if self._ready and not greeted:  # not before: libzmq drops a peer that sends ahead of its READY
                sock.sendall(zmtp.frame(self._hello(0), False))
                greeted = True
        if operation.error is not None:
            raise operation.error
        welcome = operation.reply
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError(f"{self}: answered HELLO with {type(welcome).__name__}")
        if not 0 <= welcome.shard < len(welcome.shards):
            raise ProtocolError(f"{self}: says it is shard {welcome.shard} of {len(welcome.shards)}")
        for address in welcome.shards:
            if not (0 < address.port < 1 << 16 and 0 < address.weight < math.inf):
                raise ProtocolError(f"{self}: names a shard that cannot be: {address}")
        if self.fixed_name and welcome.shards[welcome.shard].name != self.name:
            raise ConnectionLost(f"{self}: there is shard {welcome.shards[welcome.shard].name} now, not {self.name}")
        self._receiver = receiver
        self.pending = {}
        self.last_received = self.last_moved = time.monotonic()
        self.unanswered = False
        self.broken = None
        self.connections += 1
        self.sock = sock
        return welcome

    def close(self) -> None:
        """Forget the connection; operations in flight are not told."""
        sock, self.sock, self._receiver = self.sock, None, None
        if sock is not None:
            sock.close()

    def drop(self, error: KVStoreError) -> None:
        """The connection is of no more use: fail what is in flight. Takes `receive_lock`."""
        with self.receive_lock:
            self.drop_locked(error)

    def drop_locked(self, error: KVStoreError) -> None:
        """`drop` for who holds `receive_lock`."""
        with contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)  # a thread that waits to send wakes
        self.close()
        self._operation = None
        pending, self.pending = self.pending, {}
        for operation in pending.values():
            operation.fail(error)
        self._on_drop()

    # ---- liveness and load -----------------------------------------------------------------------------------

    @property
    def load_s(self) -> float:
        """How long an answer is likely to take: infinite while broken."""
        if self.broken is not None:
            return math.inf
        faded: float = 0.5 ** ((time.monotonic() - self._delay_known) / DELAY_HALF_LIFE_S)
        return self._delay_s * faded * (1 + len(self.pending))

    def silence_s(self, now: float) -> float:
        """For how long nothing has moved although an answer is owed; 0 when none is."""
        return now - self.last_moved if self.pending and self.sock is not None else 0.0

    def look_after(self, now: float) -> bool:
        """Ask a silent shard whether it lives. -> False: it was silent for so long that it does not."""
        if self.silence_s(now) < PING_AFTER_S:
            return True
        self.receive(zmtp.GREETING_BYTES)  # nobody may have read what is there
        if self.silence_s(now) < PING_AFTER_S:
            return True
        if self._doubted < self.last_moved:  # nobody may have looked for a while: the shard has its chance from now on
            self._doubted = now
        if now - self._doubted >= DEAD_AFTER_S - PING_AFTER_S:
            return False
        if self._pinged < self._doubted and self.send_lock.acquire(blocking=False):
            try:  # who holds the lock is in the middle of a message: its bytes tell as much as a PING
                sock = self.sock
                if sock is not None:
                    self._pinged = now
                    return sock.send(_PING) == len(_PING)  # half of it would garble what follows
            except OSError:
                return True  # a full socket or a lost connection: the silence decides
            finally:
                self.send_lock.release()
        return True

    def owe(self, operation: Operation) -> None:
        """An answer is owed for `operation` from now on."""
        if not self.pending and not self.unanswered:
            self.last_moved = time.monotonic()
        self.pending[operation.id] = operation

    def _learn_delay(self, operation: Operation) -> None:
        now = time.monotonic()
        self._delay_s += DELAY_WEIGHT * (now - operation.sent_at - self._delay_s)
        self._delay_known = now
        operation.sent_at = 0.0

    # ---- sending ---------------------------------------------------------------------------------------------

    def post(self, header: bytes, timeout_s: float) -> None:
        """Send a message that has no reply, best effort: CREDIT, CANCEL. Takes no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if not self.send_lock.acquire(timeout=timeout_s):
            return
        try:
            sock = self.sock
            if sock is not None:
                self._send(sock, zmtp.frame(header, False), deadline)
        except (OSError, ValueError, Timeout) as error:  # ValueError: closed this instant
            self.drop(ConnectionLost(f"{self}: {error}"))
        finally:
            self.send_lock.release()

    def _send(self, sock: socket.socket, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise Timeout(f"{self}: it did not take a message by its deadline") from None

    # ---- receiving: `zmtp.FrameSink` -------------------------------------------------------------------------

    def receive(self, budget: int) -> None:
        """Read what has arrived. On any failure the link is dropped and its operations fail."""
        with self.receive_lock:
            receiver = self._receiver
            if receiver is None:
                return
            before = receiver.received
            try:
                alive = receiver.receive(budget)
                if receiver.received > before:
                    self.last_received = self.last_moved = time.monotonic()
                    self.unanswered = False
                if not alive:
                    self.drop_locked(ConnectionLost(f"{self}: the server closed the connection"))
            except OSError as error:
                self.drop_locked(ConnectionLost(f"{self}: {error.strerror or error}"))
            except (zmtp.ZMTPError, wire.WireError, ProtocolError) as error:
                self.drop_locked(ProtocolError(f"{self}: {error}"))

    def abandon(self, operation: Operation) -> None:
        """The caller stops waiting: after this no byte of the reply is written to its memory."""
        with self.receive_lock:
            self.pending.pop(operation.id, None)
            if operation.sent_at > self.last_received:
                self.unanswered = True
                self._delay_s = max(self._delay_s, time.monotonic() - operation.sent_at)
                self._delay_known = time.monotonic()
            self._following = 0  # the shard drops what it announced when it hears CANCEL
            receiver = self._receiver
            if self._operation is operation:
                self._operation = None
                if receiver is not None:
                    receiver.discard_rest()
            if receiver is not None and self.sock is not None:
                receiver.arm()

    def begin_frame(self, size: int, more: bool) -> list[memoryview] | None:
        if not self._ready:
            raise zmtp.ZMTPError("a frame before READY")
        if self._frame == 0:
            if size > MAX_REPLY_HEADER_BYTES:
                raise ProtocolError(f"a reply header of {size} bytes: expected at most {MAX_REPLY_HEADER_BYTES}")
            return None
        if size > wire.MAX_BLOCK_BYTES:
            raise ProtocolError(f"a frame of {size} bytes: expected at most {wire.MAX_BLOCK_BYTES}")
        if self._operation is None:
            return zmtp.discard_views(size)
        return self._operation.begin_payload(size)

    def bytes_after_frame(self) -> int:
        return self._following

    def end_frame(self, data: bytes | bytearray | None, more: bool) -> None:
        if self._frame == 0:
            reply = wire.decode_reply(data or b"")
            self._operation = self.pending.get(reply.id)
            if self._operation is not None:
                if self._operation.sent_at:
                    self._learn_delay(self._operation)
                self._operation.header(reply)
                self._following = self._operation.following
            elif isinstance(reply, wire.Error) and reply.id == 0:
                raise ProtocolError(f"the server refuses a message: {reply.message}")
        elif self._operation is not None:
            self._operation.end_payload()
        self._frame += 1
        if not more:
            self._frame = 0
            operation, self._operation = self._operation, None
            if operation is not None:
                operation.end_message()
                if operation.done:
                    self.pending.pop(operation.id, None)

    def command(self, name: bytes, body: bytes) -> None:
        if name == b"READY":
            self._ready = True
        elif name == b"ERROR":
            raise zmtp.ZMTPError(f"the server reports {body[1:]!r}")
