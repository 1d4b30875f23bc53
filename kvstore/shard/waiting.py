"""How a shard waits for events: it looks for a moment before it sleeps, as long as that pays.

To be woken takes longer than to serve a small request. So while requests follow one another closely, a shard looks for
the next one rather than sleep; it gives its core to whoever else wants it between two looks. When they come more
rarely, it sleeps at once. Used by the loop's thread only.
"""

from __future__ import annotations

import os
import select
import time
from typing import Final

LOOKING_S: Final = 100e-6
MOST_PAYS: Final = 8


class Waiting:
    """Waits for the events of `poll`."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self._pays = 0  # above 0: of late, events came while one looks rather than sleeps

    def events(self, patience_s: float) -> list[tuple[int, int]]:
        """-> what has come; after `patience_s`, perhaps nothing."""
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
        # Who slept was woken later than it would have seen the event.
        soon = time.monotonic() - began < (LOOKING_S if looks else 2 * LOOKING_S)
        self._pays = min(MOST_PAYS, self._pays + 1) if soon else max(-MOST_PAYS, self._pays - 1)
        return events
