"""Decides whether to load blocks or to have the engine compute them, whichever ends sooner.

Two things are measured while the engine works: how many blocks arrive from the store per second, and how long the
engine takes to compute a prompt (`ComputingPace`). A load waits for earlier loads, and a computation waits for earlier
prompts. A load is useful if its blocks arrive before the engine would have computed them without a store. While a rate
is not known, one load at a time is tried. A store that was too slow is tried again with a few blocks.
"""

from __future__ import annotations

import math
import time
from typing import Final

# After this many seconds of work, a measurement counts half as much.
HALF_LIFE_S: Final = 5.0
# The assumed speed of a slow store doubles every HOPE_S seconds, so that the store is tried again.
HOPE_S: Final = 5.0
# A trial loads this fraction of the blocks that the request could load.
TRIAL: Final = 1 / 8
# How many blocks count as arrived when none has arrived, because doubling a rate of 0 has no effect.
LEAST_BLOCKS: Final = 0.5
# How long further loads wait for the first load, which shows how fast the store is.
FIRST_LOAD_S: Final = 0.25
# The shortest time limit of a load or a lookup. With a shorter one, chance would decide whether it ends in time.
MIN_LOOKUP_S: Final = 0.05
# A lookup may take at most this fraction of the time that computing all the blocks in question would take.
LOOKUP_SHARE: Final = 0.1


class RecentRate:
    """An average rate, in which the newest measurements count most. Not thread-safe."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.measured_at = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record that `amount` was done in `seconds` of work."""
        if seconds <= 0:
            return
        kept = math.pow(0.5, seconds / HALF_LIFE_S)
        self._amount, self._seconds = self._amount * kept + amount, self._seconds * kept + seconds
        self.measured_at = time.monotonic()

    @property
    def per_s(self) -> float | None:
        """The rate. It is None if nothing was measured."""
        return self._amount / self._seconds if self._seconds else None


class Admission:
    """Decides about the loads of one engine. Not thread-safe.

    `arriving` is the rate at which blocks come from the store, in blocks per second.

    In the methods, `computing_s` is the time in seconds until the engine would have computed the blocks without a
    store. It includes the time for earlier prompts. It is `math.inf` if it is not known.
    """

    def __init__(self, *, timeout_s: float, always: bool = False) -> None:
        """`timeout_s`: the longest time that a load may take once it has begun, in seconds. `always`: load whatever the
        store has, without comparing times."""
        self.arriving = RecentRate()
        self._timeout_s = timeout_s
        self._always = always
        self._ahead = 0  # blocks of loads that have not ended
        self._ended = False  # whether a load has ended; before that, the measured rate is uncertain
        self._first_began = 0.0

    def judge(self, blocks: int, computing_s: float) -> int | None:
        """Return how many of a prompt's leading blocks to load, given that the store has the first `blocks` of them.
        Return 0 if computing them takes less time. Return None if the caller should ask again, because the first load
        will soon show how fast the store is."""
        arriving = self.arriving.per_s
        if self._always:
            return blocks
        if arriving is None or not self._ended:
            if not self._ahead:
                return blocks
            return None if time.monotonic() - self._first_began < FIRST_LOAD_S else 0
        seconds = self._most_s(computing_s)
        if self._ahead + blocks <= arriving * seconds:
            return blocks
        hoped = self._hoped_per_s(arriving)
        return math.ceil(blocks * TRIAL) if self._ahead + blocks <= hoped * seconds else 0

    def patience_s(self, blocks: int, computing_s: float) -> float:
        """Return how long to wait for a lookup of a prompt, in seconds. `blocks`: the number of the prompt's blocks
        that the store could have. Return 0 if the prompt would be computed even if the store had all of them."""
        if self._always:
            return math.inf
        if self.judge(blocks, computing_s) == 0:
            return 0.0
        return max(MIN_LOOKUP_S, LOOKUP_SHARE * self._most_s(computing_s))

    def begin(self, blocks: int, computing_s: float) -> float:
        """Note that a load of this many blocks begins. Return the time limit of its transfer in seconds, which is the
        time that computing the blocks would take."""
        if not self._ahead:
            self._first_began = time.monotonic()
        self._ahead += blocks
        return max(MIN_LOOKUP_S, self._most_s(computing_s))

    def latest_s(self, computing_s: float) -> float:
        """Return the number of seconds from now after which a load is useless, because the engine would have computed
        all its blocks by then. This limit applies whenever the transfer begins."""
        return math.inf if self._always else max(MIN_LOOKUP_S, computing_s)

    def arrived(self, blocks: float, seconds: float) -> None:
        """Record that this many blocks came from the store while transfers were in progress for this many
        seconds."""
        self.arriving.add(max(LEAST_BLOCKS, blocks), seconds)

    def end(self, blocks: int) -> None:
        """Note that a load of this many blocks has ended."""
        self._ahead -= blocks
        self._ended = True

    def _hoped_per_s(self, arriving: float) -> float:
        if self._ahead:  # one trial at a time
            return arriving
        return arriving * math.pow(2.0, min(60.0, (time.monotonic() - self.arriving.measured_at) / HOPE_S))

    def _most_s(self, computing_s: float) -> float:
        return self._timeout_s if self._always else min(self._timeout_s, computing_s)
