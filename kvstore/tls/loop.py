"""The loop of a TLS process: one thread serves any number of connections and the handshakes of new ones.

A handshake takes up to a millisecond of this thread, and any client that reaches the port can begin one. So data have
priority: each turn of the loop takes at most one step of a handshake. While data flow, all these steps together take at
most the fraction `SHAKING_SHARE` of the time. The clients' networks take turns (`Handshakes`).

`ssl` does not let two threads use one connection, so there is one thread. OpenSSL releases the interpreter's lock while
it works, but nothing else in this process needs the lock.
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
DEADLINE_POLL_S: Final = 0.25  # how often deadlines are checked
FLOW_S: Final = 0.02  # for this long after the last bytes, data count as flowing
SHAKING_SHARE: Final = 0.25  # the share of the time for handshakes while data flow
LINGER_S: Final = 2.0  # how long a client may take to read the last bytes; after that, its connection is closed
IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT

Handler = Callable[[int], None]


class Loop:
    """Calls handlers when descriptors are ready, and `housekeeping` every `DEADLINE_POLL_S`."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.kept_bytes = 0  # of all connections: bytes that could not be sent yet, and memory for large chunks
        self.waiting: dict[Deadline, None] = {}  # everything that has a deadline
        self.joined = 0  # the number of joined connections
        self.flowed = 0.0  # when bytes of a connection were last moved
        self.handshakes = Handshakes()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))  # used by the connection whose turn it is
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[Handler, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether no connection is open."""
        return not self.joined and not self.waiting

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call `handler(events)` when `fd` is ready for one of `events`. If `events` is 0, the handler is not called,
        even if the other side closes the connection."""
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
        """Stop watching a descriptor. Call this before you close the descriptor."""
        self.watch(fd, 0, lambda _events: None)

    def run(self, over: Callable[[], bool], housekeeping: Callable[[], None]) -> None:
        """Run until `over()` returns True. The loop calls `over` before each turn."""
        look_at = 0.0
        while not over():
            patience_s = min(DEADLINE_POLL_S, self.handshakes.due_s(self.now, self.flowed))
            for fd, events in self._poll.poll(patience_s):
                found = self._handlers.get(fd)
                if found is not None:  # otherwise an earlier event of this turn has closed it
                    found[0](events)
            self.now = time.monotonic()
            if self.handshakes.due_s(self.now, self.flowed) == 0.0:
                self.handshakes.step(self.now)
            if self.now >= look_at:
                look_at = self.now + DEADLINE_POLL_S
                for waiting in [each for each in self.waiting if each.deadline < self.now]:
                    waiting.expire()
                housekeeping()


class Deadline:
    """An object in the loop that must end by a given time."""

    def __init__(self, loop: Loop, timeout_s: float) -> None:
        self.loop = loop
        self.deadline = time.monotonic() + timeout_s
        loop.waiting[self] = None

    def expire(self) -> None:
        """Called when the time has come: end this object. Must call `over`."""
        raise NotImplementedError

    def over(self) -> None:
        """Remove this object from the loop, because it has ended."""
        self.loop.waiting.pop(self, None)


class Shaking(Deadline):
    """A connection until its handshake is complete. A subclass defines what happens then, and must call
    `over`.

    `network`: the client's network. Handshakes of one network share the network's turns.
    """

    def __init__(self, loop: Loop, sock: socket.socket, timeout_s: float, network: str = "") -> None:
        super().__init__(loop, timeout_s)
        self.sock = sock
        self.network = network
        self.tls: Secured | None = None  # after `begin`
        self._timeout_s = timeout_s

    def begin(self) -> Secured:
        """Return `sock` with TLS, before its handshake. Raises `OSError` or `ValueError`."""
        raise NotImplementedError

    def shake(self, _events: int = 0) -> None:
        """Let this handshake, which can continue, wait for its turn. `step` is called in that turn."""
        self.loop.forget(self.sock.fileno())
        self.loop.handshakes.add(self)

    def done(self) -> None:
        """Called when the handshake is complete."""
        raise NotImplementedError

    def failed(self, error: OSError) -> None:
        """Called when the handshake has failed. Must close the socket."""
        raise NotImplementedError

    def step(self) -> None:
        """Continue the handshake while there is something to read."""
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
    """The handshakes that can continue. The networks take turns, each with its oldest handshake."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Shaking]] = {}  # by network; the next turn belongs to the first network
        self._pause_until = 0.0  # while data flow

    def add(self, shaking: Shaking) -> None:
        """Let a handshake wait for its turn."""
        self._lines.setdefault(shaking.network, deque()).append(shaking)

    def remove(self, shaking: Shaking) -> None:
        """Remove a connection that has ended, perhaps before its turn."""
        line = self._lines.get(shaking.network)
        if line is not None and shaking in line:
            line.remove(shaking)
            if not line:
                del self._lines[shaking.network]

    def due_s(self, now: float, flowed: float) -> float:
        """Return the seconds until the next step; inf if no handshake waits."""
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


class LingeringClose(Deadline):
    """A connection whose last bytes were sent. It is closed only after the other side has closed it, or after
    `LINGER_S` seconds, so that no bytes are lost."""

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
            pass  # the connection ends in any case
        self.expire()

    def expire(self) -> None:
        self.over()
        self.loop.forget(self._sock.fileno())
        self._sock.close()
