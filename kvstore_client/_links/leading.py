"""Leading: one of the waiting callers reads the links for all of them.

The first caller to wait *leads*: it polls every link and reads what arrives, for itself and for the others. When its
own answer has come, another waiting caller takes over. So a lone caller receives straight into its memory on its own
thread, without a hand-over, and no thread exists for receiving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from kvstore_client._links.link import Link
from kvstore_client._links.ownership import Ownership
from kvstore_client._links.polling import LOOK_ANYWAY_S, Poller

# Most bytes read from one link before the leader checks for complete replies. Less is slower where shards share cores.
READ_BUDGET_BYTES: Final = 4 << 20
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
        self._poller = Poller()
        self._lead = Ownership()  # its owner is the `ready` of the caller that leads
        self._alone = False  # the leader reads one link, or is about to, and does not look at the others

    def watch(self, link: Link) -> None:
        """Read the link's new connection."""
        self._poller.watch(link)

    def wake(self) -> None:
        """Make the leader check again: calls failed without a byte arriving (epoll forgets a closed socket)."""
        self._poller.wake()

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
            if not self._read_alone(min(left, WAIT_S)):
                readable = self._poller.poll(min(left, LOOK_ANYWAY_S))
                for link in self._links() if readable is None else readable:
                    link.receive(READ_BUDGET_BYTES)
            self._look_after()
            self._lead.wake()

    def _read_alone(self, wait_s: float) -> bool:
        """If only one link owes answers, read it, and wait for it. -> whether that is so."""
        self._alone = True  # first: whoever sends on another link meanwhile must see it
        try:
            owing = self._owing()
            if len(owing) != 1:
                return False
            owing[0].receive(READ_BUDGET_BYTES, self._poller.wake_fd, wait_s)
            return True
        finally:
            self._alone = False

    def _owing(self) -> list[Link]:
        return [link for link in self._links() if link.pending]

    def close(self) -> None:
        """Make all waiting callers return, and close."""
        self._closed = True
        lead = self._lead
        try:
            while not lead.take(self, LOOK_ANYWAY_S):
                self.wake()
            self._poller.close()  # the leader has returned, so nobody polls any more
        finally:
            if lead.owner is self:
                lead.owner = None
                lead.wake()

    def forget(self) -> None:
        """In a child process: close the child's descriptors. The parent polls on."""
        self._poller.close()
