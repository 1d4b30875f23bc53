"""How a shard waits for events: it polls for a moment before it sleeps, as long as this saves time.

Waking up takes longer than serving a small request. So while requests follow closely on one another, a shard polls for
the next request rather than sleeping. Between two polls it yields its core to any other process that wants it. When
requests come more rarely, the shard sleeps at once. Used by the loop's thread only.
"""

from __future__ import annotations

import os
import select
import time
from typing import Final

LOOKING_S: Final = 100e-6
MOST_PAYS: Final = 8


class EventWait:
    """Waits for the events of `poll`."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self._pays = 0  # above 0 if recent events came soon enough for polling to save time

    def events(self, patience_s: float) -> list[tuple[int, int]]:
        """Return the events that have come. After `patience_s` seconds, there may be none."""
        poll = self._poll.poll
        if not patience_s:
            return poll(0)
        began = time.monotonic()
        looks = self._pays > 0
        events: list[tuple[int, int]] = []
        while looks and not events and time.monotonic() - began < LOOKING_S:
            events = poll(0)
            os.sched_yield()
        events = events or poll(patience_s)
        # If the shard slept, it woke up later than it would have seen the event by polling.
        soon = time.monotonic() - began < (LOOKING_S if looks else 2 * LOOKING_S)
        self._pays = min(MOST_PAYS, self._pays + 1) if soon else max(-MOST_PAYS, self._pays - 1)
        return events
