"""Leading: one of the waiting callers reads the links for all of them.

The first caller that waits *leads*: it polls every link and reads everything that arrives, for itself and for the
others. When its own answer has come, another waiting caller takes over. So no extra thread is needed for receiving. A
caller that is alone receives straight into its own memory on its own thread, without a change of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from kvstore_client._links.link import Link
from kvstore_client._links.ownership import Ownership
from kvstore_client._links.polling import LOOK_ANYWAY_S, Poller

# The most bytes that are read from one link before the leader checks for complete replies. With a lower limit, reading
# is slower if shards share cores.
CLIENT_READ_BYTES: Final = 4 << 20
# If only one link owes answers, the leader reads only that link for up to this time. So the leader seldom needs the
# GIL, for which it may have to wait.
READ_WAIT_S: Final = 0.02


class Leading:
    """Polls the links of one client, with one leader at a time. Thread-safe. Valid in one process only; a child process
    makes a new one.

    `links()` returns all links. The leader calls `look_after()` at least every `LOOK_ANYWAY_S`.
    """

    def __init__(self, links: Callable[[], Iterable[Link]], look_after: Callable[[], None]) -> None:
        self._links = links
        self._look_after = look_after
        self._closed = False
        self._poller = Poller()
        self._lead = Ownership()  # its owner is the `ready` of the caller that leads
        self._alone = False  # whether the leader reads just one link, or is about to, instead of polling all

    def watch(self, link: Link) -> None:
        """Read the link's new connection."""
        self._poller.watch(link)

    def wake(self) -> None:
        """Make the leader check its condition again. This is needed if calls fail although no byte has arrived, because
        epoll forgets a closed socket."""
        self._poller.wake()

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until `ready()` is true or the deadline has passed, and read links meanwhile. Return the last value of
        `ready()`. The wait ends early if this object is closed."""
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return ready()
            lead = self._lead
            try:
                if lead.take(ready, 0.0):
                    self._read_links(ready, deadline)
                else:
                    if self._alone and len(self._owing()) > 1:
                        self._poller.wake()
                    lead.wait(left, ready)
            finally:
                if lead.owner is ready:
                    lead.owner = None
                    lead.wake()
        return True

    def _read_links(self, ready: Callable[[], bool], deadline: float) -> None:
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return
            if not self._read_alone(min(left, READ_WAIT_S)):
                readable = self._poller.poll(min(left, LOOK_ANYWAY_S))
                for link in self._links() if readable is None else readable:
                    link.receive(CLIENT_READ_BYTES)
            self._look_after()
            self._lead.wake()

    def _read_alone(self, wait_s: float) -> bool:
        """If only one link owes answers, read it, wait for more bytes from it, and return True."""
        self._alone = True  # set first, because a thread that sends on another link must see it
        try:
            owing = self._owing()
            if len(owing) != 1:
                return False
            owing[0].receive(CLIENT_READ_BYTES, self._poller.wake_fd, wait_s)
            return True
        finally:
            self._alone = False

    def _owing(self) -> list[Link]:
        return [link for link in self._links() if link.pending]

    def close(self) -> None:
        """Make all waiting callers return, and close the descriptors."""
        self._closed = True
        lead = self._lead
        try:
            while not lead.take(self, LOOK_ANYWAY_S):
                self.wake()
            self._poller.close()  # the leader has returned, so no thread polls any more
        finally:
            if lead.owner is self:
                lead.owner = None
                lead.wake()

    def forget(self) -> None:
        """Close the descriptors. This is for a child process; the parent keeps polling."""
        self._poller.close()
