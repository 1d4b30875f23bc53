"""Leading: one of the waiting callers reads the links for all of them.

The first caller to wait *leads*: it polls every link and reads what arrives, for itself and for the others. When its
own answer has come, another waiting caller takes over. So a lone caller receives straight into its memory on its own
thread, without a hand-over, and no thread exists for receiving.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Final

from kvstore_client._links.link import Link
from kvstore_client._links.ownership import Ownership

# Most bytes read from one link before the leader checks for complete replies. Less is slower where shards share cores.
READ_BUDGET_BYTES: Final = 4 << 20
LOOK_ANYWAY_S: Final = 0.1
# If only one link owes answers, the leader stays with it for so long: then it needs the interpreter's lock, for which
# it may have to wait, only now and then.
WAIT_S: Final = 0.02


class Leading:
    """Polls the links of one client, one leader at a time. Thread-safe. Valid in one process only: a child process
    makes another.

    `links()` returns all links. The leader calls `look_after()` at least every `LOOK_ANYWAY_S`.
    """

    def __init__(self, links: Callable[[], Iterable[Link]], look_after: Callable[[], None]) -> None:
        self._links = links
        self._look_after = look_after
        self._closed = False
        self._epoll = select.epoll()
        self._by_fd: dict[int, Link] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._lead = Ownership()  # its owner is the `ready` of the caller that leads

    def watch(self, link: Link) -> None:
        """Poll the link's new connection. epoll forgets a closed connection by itself."""
        sock = link.sock
        fd = sock.fileno() if sock is not None else -1
        if fd >= 0:  # else another thread has just dropped it
            self._by_fd[fd] = link
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._epoll.register(fd, select.EPOLLIN)

    def wake(self) -> None:
        """Make the leader check again: calls failed without a byte arriving (epoll forgets a closed socket)."""
        if self._close_wake_fd.alive:
            os.eventfd_write(self._wake_fd, 1)

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until `ready()` or the deadline, and read links meanwhile. -> whether it is ready. Returns early when
        this object is closed."""
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return ready()
            lead = self._lead
            try:
                if lead.take(ready, 0.0):
                    self._read_links(ready, deadline)
                else:
                    lead.wait(left, ready)
            finally:
                if lead.owner is ready:
                    lead.owner = None
                    lead.wake()
        return True

    def _read_links(self, ready: Callable[[], bool], deadline: float) -> None:
        epoll, by_fd = self._epoll, self._by_fd
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return
            alone = self._read_alone(min(left, WAIT_S))
            events = [] if alone else epoll.poll(min(left, LOOK_ANYWAY_S), 64)
            if not (alone or events):  # bytes below the low-water mark wake nobody, if no more come than those
                for each in self._links():
                    each.receive(READ_BUDGET_BYTES)
            for fd, _ in events:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    continue
                link = by_fd.get(fd)
                if link is None or link.sock is None or link.sock.fileno() != fd:
                    # A connection that has ended, whose socket stays open until what it was lent is given back.
                    with contextlib.suppress(OSError, ValueError):
                        epoll.unregister(fd)
                else:
                    link.receive(READ_BUDGET_BYTES)
            self._look_after()
            self._lead.wake()

    def _read_alone(self, wait_s: float) -> bool:
        """If blocks that land are owed by one link, and other links owe nothing, read it, and wait for it. -> whether
        that is so."""
        owing = [link for link in self._links() if link.pending]
        if len(owing) != 1 or not owing[0].landing:
            return False
        owing[0].receive(READ_BUDGET_BYTES, self._wake_fd, wait_s)
        return True

    def close(self) -> None:
        """Make all waiting callers return, and close."""
        self._closed = True
        lead = self._lead
        try:
            while not lead.take(self, LOOK_ANYWAY_S):
                self.wake()
            self._epoll.close()  # the leader has returned, so nobody polls any more
            self._close_wake_fd()
        finally:
            if lead.owner is self:
                lead.owner = None
                lead.wake()

    def forget(self) -> None:
        """In a child process: close the child's descriptors. The parent polls on."""
        self._epoll.close()
        self._close_wake_fd()
