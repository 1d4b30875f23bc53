"""The loop of a process for TLS: one thread, any number of connections, and the handshakes of those that begin.

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

from kvstore.tls.secured import Secured

SCRATCH_BYTES: Final = 288 << 10
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
        self.kept_bytes = 0  # by all connections: what their other sides did not take, and memory for large chunks
        self.waiting: dict[Deadline, None] = {}  # what has a deadline
        self.joined = 0  # connections
        self.flowed = 0.0  # when bytes of a connection were last moved
        self.handshakes = Handshakes()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))  # of whatever has its turn
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[Handler, int]] = {}

    @property
    def idle(self) -> bool:
        """No connection is open."""
        return not self.joined and not self.waiting

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
            for fd, events in self._poll.poll(patience_s):
                found = self._handlers.get(fd)
                if found is not None:  # else an earlier event of this turn has closed it
                    found[0](events)
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
        self.tls: Secured | None = None  # after `begin`
        self._timeout_s = timeout_s

    def begin(self) -> Secured:
        """-> `sock` with TLS; its handshake is not done. Raises `OSError` or `ValueError`."""
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
                self.tls = self.begin()
            self.tls.shake()
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
