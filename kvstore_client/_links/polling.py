"""Waits for bytes on many links at once, for the caller that leads and for each reader of lanes."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from typing import Final

from kvstore_client._links.link import Link

# The longest wait while answers are owed. It is limited because bytes below a socket's low-water mark wake no thread.
LOOK_ANYWAY_S: Final = 0.1
_MOST_EVENTS: Final = 64


class Poller:
    """Finds the watched links that have bytes to read. One thread polls; any thread may watch and wake. Valid in one
    process only.

    `wake_fd`: a descriptor that is readable from a `wake` until the next `poll`.
    """

    def __init__(self) -> None:
        self._by_fd: dict[int, Link] = {}
        self._changing = threading.Lock()  # needed because a closed descriptor's number may soon be another link's
        self._epoll = select.epoll()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self.wake_fd)
        self._epoll.register(self.wake_fd, select.EPOLLIN)

    @property
    def links(self) -> list[Link]:
        """Return the watched links."""
        return list(self._by_fd.values())

    def watch(self, link: Link) -> None:
        """Poll the link's new connection. epoll removes a closed connection automatically."""
        with self._changing:
            sock = link.sock
            fd = sock.fileno() if sock is not None else -1
            if fd >= 0:  # otherwise another thread has just dropped the connection
                self._by_fd[fd] = link
                with contextlib.suppress(OSError, ValueError):  # the connection was closed meanwhile
                    self._epoll.register(fd, select.EPOLLIN)

    def wake(self) -> None:
        """Make `poll` return in the thread that polls."""
        if self._close_wake_fd.alive:
            os.eventfd_write(self.wake_fd, 1)

    def poll(self, timeout_s: float | None) -> list[Link] | None:
        """Wait. Return the links that have bytes to read, an empty list after a `wake`, or None at the time limit."""
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
                # The connection has ended, but its socket stays open until all loans are given back.
                self._by_fd.pop(fd, None)
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(fd)
        return readable

    def close(self) -> None:
        """Close the descriptors. The thread that polls must have ended, or be in another process."""
        self._epoll.close()
        self._close_wake_fd()
