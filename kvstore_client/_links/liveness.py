"""Whether a shard that owes an answer is still there, and how long its answers take.

A shard that sends nothing for a while gets a ZMTP PING, which one that is still working on the answer returns at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Final, Protocol

from kvstore.wire import zmtp
from kvstore.wire.dealer import Answer
from kvstore_client._links.notices import Notices
from kvstore_client._links.ownership import Ownership

PING_AFTER_S: Final = 1.0  # silence, while an answer is owed, after which a PING is sent
DEAD_AFTER_S: Final = 2.5  # silence after which a shard is dead; one that vanishes is noticed within 3 s
DELAY_WEIGHT: Final = 0.2  # weight of the newest answer in the mean delay
DELAY_HALF_LIFE_S: Final = 5.0  # the mean delay fades, so that a shard that was slow is tried again
_PING: Final = zmtp.command(b"PING", bytes(2))  # a time to live of 0: the shard need not watch us in turn


class Link(Protocol):
    """What is used of a link here."""

    sock: socket.socket | None
    sending: Ownership
    notices: Notices

    @property
    def pending(self) -> Mapping[int, Answer]: ...

    def receive(self, budget: int) -> None: ...


class Liveness:
    """That of one link. Its attributes are written by whoever moves bytes on the link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.last_received = 0.0
        self.last_moved = 0.0  # when bytes were received, a full socket took more, or an answer was first owed
        self.unanswered = False  # whether a request that was given up had got no byte in answer
        self._doubted = 0.0  # when the present silence was first noticed
        self._pinged = 0.0
        self._delay_s = 0.0  # moving mean of the time from a request's last byte to the first byte of its answer
        self._delay_known = 0.0  # when `_delay_s` was updated

    @property
    def delay_s(self) -> float:
        """How long the first byte of an answer is likely to take."""
        faded: float = 0.5 ** ((time.monotonic() - self._delay_known) / DELAY_HALF_LIFE_S)
        return self._delay_s * faded

    def answered(self, answer: Answer, began_at: float) -> None:
        """The first byte of an answer arrived at `began_at`."""
        self._delay_s += DELAY_WEIGHT * (max(0.0, began_at - answer.sent_at) - self._delay_s)
        self._delay_known = time.monotonic()
        answer.sent_at = 0.0

    def given_up(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        if answer.sent_at > self.last_received:
            self.unanswered = True
            self._delay_s = max(self._delay_s, time.monotonic() - answer.sent_at)
            self._delay_known = time.monotonic()

    def silence_s(self, now: float) -> float:
        """For how long no byte has moved although an answer is owed; 0 if none is owed."""
        return now - self.last_moved if self._link.pending and self._link.sock is not None else 0.0

    def look_after(self, now: float) -> bool:
        """Send a PING to a silent shard. -> False if it has been silent for so long that it must be dead."""
        link = self._link
        if self.silence_s(now) < PING_AFTER_S:
            return True
        link.receive(zmtp.GREETING_BYTES)  # bytes may have arrived that no caller has read
        if self.silence_s(now) < PING_AFTER_S:
            return True
        if self._doubted < self.last_moved:  # perhaps no caller has looked for long: the shard's time starts only now
            self._doubted = now
        if now - self._doubted >= DEAD_AFTER_S - PING_AFTER_S:
            return False
        if self._pinged < self._doubted:
            me = object()
            try:  # if another thread is sending a message, that tests the shard as well as a PING
                sock = link.sock
                if sock is not None and link.sending.take(me, 0.0):
                    self._pinged = now
                    return sock.send(_PING) == len(_PING)  # half a PING would garble the message after it
            except OSError:
                return True  # a full socket or a lost connection: the silence decides
            finally:
                if link.sending.owner is me:
                    link.sending.owner = None
                    link.sending.wake()
                    link.notices.send()
        return True
