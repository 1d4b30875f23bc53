"""One connection to one shard.

A link is *down* (not connected; a call may connect), *up*, or *broken* (connecting failed or the shard went silent;
calls fail at once until the prober has connected again, see `probing`). A shard that owes an answer and says nothing
is sent a ZMTP PING; a shard that is still working on the answer replies to it at once.

Any thread may send, one message at a time, under `send_lock`. The caller that leads (see `leading`) reads frames, under
`receive_lock`. A link that loses its place in the byte stream (a message half sent, a deadline in the middle of a
frame that cannot be discarded) is dropped, never repaired.
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
from kvstore.wire.dealer import Answer, Dealer, Refusal
from kvstore_client._links.resolving import resolve
from kvstore_client.errors import ConnectionLost, KVStoreError, ProtocolError, Timeout, from_wire

PING_AFTER_S: Final = 1.0  # of silence while an answer is owed
DEAD_AFTER_S: Final = 2.5  # so that a shard that vanished without a word is noticed within 3 s
_PING: Final = zmtp.command(b"PING", bytes(2))  # a time to live of 0: the shard need not watch us in turn
DELAY_WEIGHT: Final = 0.2  # of the newest answer in the mean delay
DELAY_HALF_LIFE_S: Final = 5.0  # a shard that was slow is tried again


class Link:
    """A shard as seen by one client. `hello()` makes its HELLO; `on_drop()` is called when a connection is lost."""

    def __init__(
        self, name: str, host: str, port: int, hello: Callable[[], wire.Hello], on_drop: Callable[[], None]
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.fixed_name = False  # whether only a shard of this name may answer
        self.retired = False  # it left the view: not connected again
        self.sock: socket.socket | None = None
        self.broken: KVStoreError | None = None
        self.last_received = 0.0
        self.last_moved = 0.0  # when bytes were received, a full socket took more, or an answer was first owed
        self.unanswered = False  # a request that nobody waits for any more got no byte in answer
        self.connections = 0
        self.weight = 1.0
        self.reset_locks()
        self._hello = hello
        self._on_drop = on_drop
        self._dealer: Dealer | None = None  # of the connection `sock`
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

    @property
    def pending(self) -> dict[int, Answer]:
        """Answers that are owed on the present connection."""
        dealer = self._dealer
        return dealer.pending if dealer is not None else {}

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
            return self._shake_hands(sock, deadline)
        except BaseException as error:
            sock.close()
            if isinstance(error, Refusal):
                raise from_wire(error.code, f"{self}: {error}") from None
            if isinstance(error, zmtp.ZMTPError | wire.WireError):
                # In a cluster, somebody else on the port of a node that is gone; else, a mistake of the user's.
                kind = ConnectionLost if self.fixed_name else ProtocolError
                raise kind(f"{self} is not a kvstore server that this client can use: {error}") from None
            if isinstance(error, TimeoutError):
                raise Timeout(f"{self}: no answer to HELLO within {timeout_s:.3g} s") from None
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

    def _shake_hands(self, sock: socket.socket, deadline: float) -> wire.Welcome:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        dealer = Dealer(sock, self._learn_delay)
        dealer.greet(deadline)
        welcome = dealer.say_hello(self._hello(), deadline)
        name = welcome.shards[welcome.shard].name
        if self.fixed_name and name != self.name:
            raise ConnectionLost(f"{self}: expected shard {self.name} there, but shard {name} answered")
        self.last_received = self.last_moved = time.monotonic()
        self.unanswered = False
        self.broken = None
        self.connections += 1
        self._dealer = dealer
        self.sock = sock
        return welcome

    def close(self) -> None:
        """Forget the connection; those who wait for answers are not told."""
        sock, self.sock, self._dealer = self.sock, None, None
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
        owed = list(self.pending.values())
        self.close()
        for answer in owed:
            answer.fail(error)
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

    def owe(self, answer: Answer) -> int:
        """An answer is owed from now on. -> on which of the link's connections; 0: there is none."""
        dealer, connection = self._dealer, self.connections
        if dealer is None or self.sock is None or self._dealer is not dealer:  # lost, or replaced this instant
            return 0
        if not dealer.pending and not self.unanswered:
            self.last_moved = time.monotonic()
        dealer.expect(answer)
        return connection

    def _learn_delay(self, answer: Answer) -> None:
        """The answer begins."""
        now = time.monotonic()
        self._delay_s += DELAY_WEIGHT * (now - answer.sent_at - self._delay_s)
        self._delay_known = now
        answer.sent_at = 0.0

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

    # ---- receiving -------------------------------------------------------------------------------------------

    def receive(self, budget: int) -> None:
        """Read what has arrived. On any failure the link is dropped, and calls in flight fail."""
        with self.receive_lock:
            dealer = self._dealer
            if dealer is None:
                return
            receiver = dealer.receiver
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
            except (zmtp.ZMTPError, wire.WireError) as error:
                self.drop_locked(ProtocolError(f"{self}: {error}"))

    def abandon(self, answer: Answer) -> None:
        """The caller stops waiting: after this no byte of the reply is written to its memory."""
        with self.receive_lock:
            if answer.sent_at > self.last_received:
                self.unanswered = True
                self._delay_s = max(self._delay_s, time.monotonic() - answer.sent_at)
                self._delay_known = time.monotonic()
            dealer = self._dealer
            if dealer is not None:
                dealer.abandon(answer)
                dealer.receiver.arm()
