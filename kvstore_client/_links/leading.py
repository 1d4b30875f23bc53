"""Which waiting caller reads the links.

The first caller to wait *leads*: it polls every link and reads what arrives, for itself and for the others. When its
own answer has come, another waiting caller takes over. So a lone caller receives straight into its memory on its own
thread, without a hand-over, and no thread exists for receiving.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Final

from kvstore_client._links.link import Link

# Then look whether somebody's reply is complete. Less is slower where shards share cores.
READ_BUDGET_BYTES: Final = 4 << 20
LOOK_ANYWAY_S: Final = 0.1


class Leading:
    """The links that are polled, and the turns at it. Thread-safe; of one process: a child makes another.

    `links()`: all of them. `look_after()` is called by the leader at least every `LOOK_ANYWAY_S`.
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
        self._lead = threading.Lock()
        self._hand_over = threading.Condition()
        self._waiters = 0

    def watch(self, link: Link) -> None:
        """Poll the link's new connection; a closed one is forgotten by itself."""
        sock = link.sock
        fd = sock.fileno() if sock is not None else -1
        if fd >= 0:  # else it was dropped this instant
            self._by_fd[fd] = link
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._epoll.register(fd, select.EPOLLIN)

    def wake(self) -> None:
        """Have the leader look again: calls failed without a byte arriving (epoll forgets a closed socket)."""
        if self._close_wake_fd.alive:
            os.eventfd_write(self._wake_fd, 1)

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Until `ready()` or the deadline; reads links meanwhile. -> whether it is ready."""
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return ready()
            if self._lead.acquire(blocking=False):
                try:
                    self._read_links(ready, deadline)
                finally:
                    self._lead.release()
                    if self._waiters:
                        with self._hand_over:
                            self._hand_over.notify_all()
            else:
                with self._hand_over:
                    self._waiters += 1
                    try:
                        if self._lead.locked() and not ready():
                            self._hand_over.wait(left)
                    finally:
                        self._waiters -= 1
        return True

    def _read_links(self, ready: Callable[[], bool], deadline: float) -> None:
        epoll, by_fd = self._epoll, self._by_fd
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return
            events = epoll.poll(min(left, LOOK_ANYWAY_S), 64)
            if not events:  # a shard that did not send what it announced leaves bytes below the low-water mark
                for each in self._links():
                    each.receive(READ_BUDGET_BYTES)
            for fd, _ in events:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    continue
                link = by_fd.get(fd)
                if link is not None and link.sock is not None:
                    link.receive(READ_BUDGET_BYTES)
            self._look_after()
            if self._waiters:
                with self._hand_over:
                    self._hand_over.notify_all()

    def close(self) -> None:
        """Whoever waits returns."""
        self._closed = True
        self.wake()
        with self._hand_over:
            self._hand_over.notify_all()
        with self._lead:  # whoever led has seen that it is over
            self._epoll.close()
            self._close_wake_fd()

    def forget(self) -> None:
        """In a child process: close without a word; the parent polls on."""
        self._epoll.close()
        self._close_wake_fd()
