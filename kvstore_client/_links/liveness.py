"""Checks whether a shard that owes an answer is still alive, and measures how long its answers take.

If a shard has sent nothing for a while, it is sent a ZMTP PING. A live shard replies to that at once, even while it
still works on the answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Final, Protocol

from kvstore.wire import zmtp
from kvstore.wire.dealer import ReplyCollector
from kvstore_client._links.notices import Notices
from kvstore_client._links.ownership import Ownership

PING_AFTER_S: Final = 1.0  # while an answer is owed, a PING is sent after this time of silence
DEAD_AFTER_S: Final = 2.5  # a shard that is silent for this long counts as dead, so a loss is noticed within 3 s
DELAY_WEIGHT: Final = 0.2  # the weight of the newest answer in the mean delay
DELAY_HALF_LIFE_S: Final = 5.0  # the mean delay fades, so that a formerly slow shard is tried again
_PING: Final = zmtp.command(b"PING", bytes(2))  # its time to live is 0, so the shard need not watch this client


class WatchedLink(Protocol):
    """The part of a link that this module uses."""

    sock: socket.socket | None
    sending: Ownership
    notices: Notices

    @property
    def pending(self) -> Mapping[int, ReplyCollector]: ...

    def receive(self, budget: int) -> None: ...


class Liveness:
    """The liveness of one link. Only the thread that moves bytes on the link writes the attributes."""

    def __init__(self, link: WatchedLink) -> None:
        self._link = link
        self.last_received = 0.0
        # The last time when bytes were received, a full socket took more bytes, or the shard began to owe an answer.
        self.last_moved = 0.0
        self.unanswered = False  # whether a request was given up before any byte of its answer came
        self._doubted = 0.0  # when the present silence was first noticed
        self._pinged = 0.0
        self._delay_s = 0.0  # the moving mean of the time from a request's end to the first byte of its answer
        self._delay_known = 0.0  # when `_delay_s` was updated

    @property
    def delay_s(self) -> float:
        """How long the first byte of an answer is likely to take, in seconds."""
        faded: float = 0.5 ** ((time.monotonic() - self._delay_known) / DELAY_HALF_LIFE_S)
        return self._delay_s * faded

    def answered(self, answer: ReplyCollector, began_at: float) -> None:
        """Note that the first byte of an answer arrived at `began_at`."""
        self._delay_s += DELAY_WEIGHT * (max(0.0, began_at - answer.sent_at) - self._delay_s)
        self._delay_known = time.monotonic()
        answer.sent_at = 0.0

    def given_up(self, answer: ReplyCollector) -> None:
        """Note that no caller waits for an answer any more."""
        if answer.sent_at > self.last_received:
            self.unanswered = True
            self._delay_s = max(self._delay_s, time.monotonic() - answer.sent_at)
            self._delay_known = time.monotonic()

    def silence_s(self, now: float) -> float:
        """Return how long no byte has moved although an answer is owed, in seconds; 0 if no answer is owed."""
        return now - self.last_moved if self._link.pending and self._link.sock is not None else 0.0

    def look_after(self, now: float) -> bool:
        """Send a PING if the shard is silent. Return False if it has been silent for long enough to count as dead."""
        link = self._link
        if self.silence_s(now) < PING_AFTER_S:
            return True
        link.receive(zmtp.GREETING_BYTES)  # because bytes may have arrived that no caller has read
        if self.silence_s(now) < PING_AFTER_S:
            return True
        if self._doubted < self.last_moved:  # the time starts only now, because nothing may have read the link before
            self._doubted = now
        if now - self._doubted >= DEAD_AFTER_S - PING_AFTER_S:
            return False
        if self._pinged < self._doubted:
            me = object()
            try:  # if another thread is sending, its message tests the shard as well as a PING would
                sock = link.sock
                if sock is not None and link.sending.take(me, 0.0):
                    self._pinged = now
                    return sock.send(_PING) == len(_PING)  # after a part of a PING, the next message would be garbled
            except OSError:
                return True  # the socket is full or the connection is lost: the length of the silence decides
            finally:
                if link.sending.owner is me:
                    link.sending.owner = None
                    link.sending.wake()
                    link.notices.send()
        return True
