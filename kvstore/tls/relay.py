"""Joins TLS connections to socket pairs: one loop, one thread, any number of connections.

A `Joined` connection has a buffer for neither direction. Bytes go through the loop's own memory, a chunk at a time;
only what the other side did not take is kept, and then nothing more is read until it was taken. So a slow reader on
either side slows its writer down, as one TCP connection would. What all connections keep together is bounded: beyond
`KEPT_BYTES` each has room for one TLS record in each direction.

A handshake takes up to a millisecond of this thread, and whoever reaches the port can begin one. So data go first:
there is one step of a handshake in a turn of the loop, and while data flow, all steps together take `SHAKING_SHARE` of
the time. Networks take turns (`Handshakes`).

`ssl` gives no two threads one connection, so there is one thread; OpenSSL works without the interpreter's lock, but
nothing else here needs it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Final

CHUNK_BYTES: Final = 256 << 10
RECORD_BYTES: Final = 16 << 10  # the most that a TLS record carries
KEPT_BYTES: Final = 32 << 20
PAIR_BYTES: Final = 512 << 10  # in the kernel, for each direction of a pair
LOOK_S: Final = 0.25  # how often deadlines are looked at
FLOW_S: Final = 0.02  # so long after the last bytes, data count as flowing
SHAKING_SHARE: Final = 0.25  # of the time, while data flow
LINGER_S: Final = 2.0  # for a client to read the last bytes before its connection is closed
IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT

Handler = Callable[[int], None]


class Loop:
    """Calls handlers when descriptors are ready, and `housekeeping` every `LOOK_S`."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.kept_bytes = 0  # by all connections, of what their other sides did not take
        self.again: dict[Joined, None] = {}  # connections with decrypted bytes in OpenSSL, of which poll does not tell
        self.waiting: dict[Deadline, None] = {}  # what has a deadline
        self.joined = 0  # connections
        self.flowed = 0.0  # when bytes of a connection were last moved
        self.handshakes = Handshakes()
        self.scratch = memoryview(bytearray(CHUNK_BYTES))
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[Handler, int]] = {}

    @property
    def idle(self) -> bool:
        """No connection is open."""
        return not self.joined and not self.waiting

    @property
    def room(self) -> memoryview:
        """Memory for the next chunk."""
        return self.scratch if self.kept_bytes < KEPT_BYTES else self.scratch[:RECORD_BYTES]

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call `handler(events)` when `fd` is ready for one of `events`. No events: not even for its end."""
        before = self._handlers.get(fd)
        if events:
            self._handlers[fd] = handler, events
            if before is None:
                self._poll.register(fd, events)
            elif before[1] != events:
                self._poll.modify(fd, events)
        elif before is not None:
            del self._handlers[fd]
            self._poll.unregister(fd)

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor. Call this before it is closed."""
        self.watch(fd, 0, lambda _events: None)

    def run(self, over: Callable[[], bool], housekeeping: Callable[[], None]) -> None:
        """Run until `over`, which is asked after each turn."""
        look_at = 0.0
        while not over():
            patience_s = min(LOOK_S, self.handshakes.due_s(self.now, self.flowed))
            for fd, events in self._poll.poll(0.0 if self.again else patience_s):
                found = self._handlers.get(fd)
                if found is not None:  # else an earlier event of this turn has closed it
                    found[0](events)
            again, self.again = self.again, {}
            for connection in again:
                connection.on_tls(IN)
            self.now = time.monotonic()
            if self.handshakes.due_s(self.now, self.flowed) == 0.0:
                self.handshakes.step(self.now)
            if self.now >= look_at:
                look_at = self.now + LOOK_S
                for waiting in [each for each in self.waiting if each.deadline < self.now]:
                    waiting.expire()
                housekeeping()


class Deadline:
    """Something in the loop that must end by a time."""

    def __init__(self, loop: Loop, timeout_s: float) -> None:
        self.loop = loop
        self.deadline = time.monotonic() + timeout_s
        loop.waiting[self] = None

    def expire(self) -> None:
        """The time has come. Must call `over`."""
        raise NotImplementedError

    def over(self) -> None:
        """It has ended."""
        self.loop.waiting.pop(self, None)


class Shaking(Deadline):
    """A connection until its handshake is done. A subclass says what happens then; it calls `over` first.

    network: whose turn it takes among handshakes.
    """

    def __init__(self, loop: Loop, sock: socket.socket, timeout_s: float, network: str = "") -> None:
        super().__init__(loop, timeout_s)
        self.sock = sock
        self.network = network
        self.tls: ssl.SSLSocket | None = None  # after `begin`
        self._timeout_s = timeout_s

    def begin(self) -> ssl.SSLSocket:
        """-> the TLS connection that takes `sock` over; its handshake is not done. Raises `OSError` or `ValueError`."""
        raise NotImplementedError

    def shake(self, _events: int = 0) -> None:
        """The handshake can go on: let it wait for its turn, in which `step` is called."""
        self.loop.forget(self.sock.fileno())
        self.loop.handshakes.add(self)

    def done(self) -> None:
        """The handshake is done."""
        raise NotImplementedError

    def failed(self, error: OSError) -> None:
        """It has failed. Must close the socket."""
        raise NotImplementedError

    def step(self) -> None:
        """Go on with the handshake, for as long as there is something to read."""
        try:
            if self.tls is None:
                self.sock = self.tls = self.begin()
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self.loop.watch(self.sock.fileno(), IN, self.shake)
        except ssl.SSLWantWriteError:
            self.loop.watch(self.sock.fileno(), OUT, self.shake)
        except OSError as error:
            self.failed(error)
        except ValueError as error:
            self.failed(OSError(str(error)))
        else:
            self.done()

    def expire(self) -> None:
        self.failed(TimeoutError(f"the TLS handshake was not finished within {self._timeout_s:.3g} s"))

    def over(self) -> None:
        super().over()
        self.loop.handshakes.remove(self)
        self.loop.forget(self.sock.fileno())


class Handshakes:
    """Handshakes that can go on: one of each network in turn, the oldest one first."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Shaking]] = {}  # by network, whose turn it is first
        self._pause_until = 0.0  # if data flow

    def add(self, shaking: Shaking) -> None:
        """Let one wait for its turn."""
        self._lines.setdefault(shaking.network, deque()).append(shaking)

    def remove(self, shaking: Shaking) -> None:
        """It has ended, perhaps before its turn."""
        line = self._lines.get(shaking.network)
        if line is not None and shaking in line:
            line.remove(shaking)
            if not line:
                del self._lines[shaking.network]

    def due_s(self, now: float, flowed: float) -> float:
        """-> seconds until the next step; inf: none waits."""
        if not self._lines:
            return float("inf")
        return max(0.0, min(self._pause_until, flowed + FLOW_S) - now)

    def step(self, now: float) -> None:
        """Take one step of the handshake whose turn it is."""
        network = next(iter(self._lines))
        line = self._lines.pop(network)
        shaking = line.popleft()
        if line:
            self._lines[network] = line
        began = time.thread_time()
        shaking.step()
        self._pause_until = now + (time.thread_time() - began) / SHAKING_SHARE


class Lingering(Deadline):
    """A connection whose last bytes were sent: closed when its other side has closed it, so that they are not lost."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        super().__init__(loop, LINGER_S)
        self._sock = sock
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        loop.watch(sock.fileno(), IN, self._discard)

    def _discard(self, _events: int) -> None:
        try:
            if self._sock.recv_into(self.loop.scratch):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # the end all the same
        self.expire()

    def expire(self) -> None:
        self.over()
        self.loop.forget(self._sock.fileno())
        self._sock.close()


class Joined:
    """A TLS connection after its handshake, and the pair to which it is joined. Both sockets do not block."""

    def __init__(self, loop: Loop, tls: ssl.SSLSocket, pair: socket.socket) -> None:
        self._loop = loop
        self._tls = tls
        self._pair = pair
        self._to_pair = self._to_tls = memoryview(b"")  # what was not taken
        self._tls_over = False
        self._closed = False
        self._wants_write = False  # OpenSSL must send before it can read
        loop.joined += 1
        self.on_tls(IN)
        self.on_pair(IN)

    def on_tls(self, events: int) -> None:
        """The TLS side is ready."""
        if self._closed:
            return
        if self._to_tls:
            self._encrypt(self._to_tls)
        if not self._closed and (events & ~OUT or self._wants_write):
            self._decrypt()
        self._rewatch()

    def on_pair(self, events: int) -> None:
        """The pair is ready."""
        if self._closed:
            return
        if self._to_pair:
            self._give(self._to_pair)
        if not self._closed and not self._to_tls and events & ~OUT:
            try:
                size = self._pair.recv_into(self._loop.room)
            except BlockingIOError:
                size = -1
            except OSError:
                size = 0
            if size > 0:
                self._encrypt(self._loop.scratch[:size])
            elif size == 0:
                self._end()
        self._rewatch()

    def _decrypt(self) -> None:
        if self._to_pair or self._tls_over:
            return
        room, got = self._loop.room, 0
        self._wants_write = False
        try:
            while got < len(room):
                size = self._tls.recv_into(room[got:])  # a record at most
                if not size:
                    self._tls_over = True
                    break
                got += size
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._wants_write = True
        except OSError:  # the connection is lost, or a record was changed on its way
            self._tls_over = True
        if got:
            self._give(room[:got])
        if not self._closed and self._tls.pending():
            self._loop.again[self] = None
        if self._tls_over and not self._to_pair:
            self.close()

    def _give(self, data: memoryview) -> None:
        """Send decrypted bytes to the pair, and keep what it does not take."""
        self._loop.flowed = self._loop.now
        kept = len(self._to_pair)
        try:
            sent = self._pair.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # its owner has closed it
            self.close()
            return
        self._to_pair = self._keep(data[sent:], kept)
        if self._tls_over and not self._to_pair:
            self.close()
        elif not self._to_pair and kept and self._tls.pending():
            self._loop.again[self] = None

    def _encrypt(self, data: memoryview) -> None:
        """Send plain bytes over TLS, and keep what it does not take."""
        self._loop.flowed = self._loop.now
        kept = len(self._to_tls)
        try:
            while data:
                data = data[self._tls.send(data) :]  # a record at most
        except ssl.SSLWantWriteError:
            pass  # OpenSSL expects the same bytes again
        except OSError:
            self.close()
            return
        self._to_tls = self._keep(data, kept)

    def _keep(self, rest: memoryview, kept: int) -> memoryview:
        self._loop.kept_bytes += len(rest) - kept
        return rest if kept else memoryview(bytes(rest))  # what was kept before is no longer in the loop's memory

    def _rewatch(self) -> None:
        if self._closed:
            return
        loop = self._loop
        tls = (0 if self._to_pair or self._tls_over else IN) | (OUT if self._to_tls or self._wants_write else 0)
        loop.watch(self._tls.fileno(), tls, self.on_tls)
        loop.watch(self._pair.fileno(), (0 if self._to_tls else IN) | (OUT if self._to_pair else 0), self.on_pair)

    def _end(self) -> None:
        """The pair's owner has closed it, and all that it sent was sent on: close the connection in good order."""
        with contextlib.suppress(OSError):  # the other side need not answer
            self._tls.unwrap()
        self._leave()
        Lingering(self._loop, socket.socket(fileno=self._tls.detach()))

    def close(self) -> None:
        """Close both sides now."""
        self._leave()
        self._tls.close()

    def _leave(self) -> None:
        self._closed = True
        loop = self._loop
        loop.joined -= 1
        loop.kept_bytes -= len(self._to_pair) + len(self._to_tls)
        loop.again.pop(self, None)
        loop.forget(self._tls.fileno())
        loop.forget(self._pair.fileno())
        self._pair.close()


def prepare_pair(sock: socket.socket) -> None:
    """Make room in the kernel for large pieces, in one direction of a pair."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PAIR_BYTES)
