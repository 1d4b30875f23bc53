"""Waiting for bytes on many links at once: what the caller that leads and each reader of lanes do."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from typing import Final

from kvstore_client._links.link import Link

# How long a wait may take at most while answers are owed: bytes below a socket's low-water mark wake nobody.
LOOK_ANYWAY_S: Final = 0.1
_MOST_EVENTS: Final = 64


class Poller:
    """Tells which of the links that it watches have bytes to read. One thread polls, any may watch and wake. Valid in
    one process only.

    wake_fd: readable from `wake` until the next `poll`.
    """

    def __init__(self) -> None:
        self._by_fd: dict[int, Link] = {}
        self._changing = threading.Lock()  # a descriptor that ends may be another link's at once
        self._epoll = select.epoll()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self.wake_fd)
        self._epoll.register(self.wake_fd, select.EPOLLIN)

    @property
    def links(self) -> list[Link]:
        """The links that are watched."""
        return list(self._by_fd.values())

    def watch(self, link: Link) -> None:
        """Poll the link's new connection. epoll forgets a closed connection by itself."""
        with self._changing:
            sock = link.sock
            fd = sock.fileno() if sock is not None else -1
            if fd >= 0:  # else another thread has just dropped it
                self._by_fd[fd] = link
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    self._epoll.register(fd, select.EPOLLIN)

    def wake(self) -> None:
        """Make the thread that polls return."""
        if self._close_wake_fd.alive:
            os.eventfd_write(self.wake_fd, 1)

    def poll(self, timeout_s: float | None) -> list[Link] | None:
        """Wait. -> the links that have bytes to read, none after a `wake`; None if nothing happened in time."""
        events = self._epoll.poll(timeout_s, _MOST_EVENTS)
        if not events:
            return None
        readable = []
        for fd, _ in events:
            if fd == self.wake_fd:
                os.eventfd_read(fd)
                continue
            with self._changing:
                link = self._by_fd.get(fd)
                if link is not None and link.sock is not None and link.sock.fileno() == fd:
                    readable.append(link)
                    continue
                # A connection that has ended, whose socket stays open until what it was lent is given back.
                self._by_fd.pop(fd, None)
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(fd)
        return readable

    def close(self) -> None:
        """Close its descriptors: the thread that polls has ended, or is not in this process."""
        self._epoll.close()
        self._close_wake_fd()
