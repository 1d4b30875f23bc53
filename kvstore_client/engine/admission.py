"""Whether to load blocks or to have the engine compute them: what is sooner.

Two paces are measured while the engine works: blocks that arrive from the store in a second, and how long the engine
computes a prompt (`ComputingPace`). A load pays if its blocks, behind those of the loads before it, arrive before the
engine would have computed them without a store, behind the prompts before it. What is not known yet is tried, one load
at a time; a store that was too slow is tried again with a few blocks.
"""

from __future__ import annotations

import math
import time
from typing import Final

# Seconds of work after which what was measured before counts half.
HALF_LIFE_S: Final = 5.0
# A store that was slow is believed to be twice as fast after so many seconds, so that it is tried again, …
HOPE_S: Final = 5.0
# … with such a part of what a request could load.
TRIAL: Final = 1 / 8
# What is taken to have arrived when nothing has: from a pace of 0 hope could not grow.
LEAST_BLOCKS: Final = 0.5
# For how long further loads wait for the first one, which tells how fast the store is.
FIRST_LOAD_S: Final = 0.25
# The least time that a load, or a lookup, is given: less is a matter of chance.
LEAST_S: Final = 0.05
# A lookup may take such a part of the time in which all would be computed that the store may have.
LOOKUP_SHARE: Final = 0.1


class Pace:
    """An amount per second, of which the newest seconds count most. Not thread-safe."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.measured_at = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much was done in these seconds of work."""
        if seconds <= 0:
            return
        kept = math.pow(0.5, seconds / HALF_LIFE_S)
        self._amount, self._seconds = self._amount * kept + amount, self._seconds * kept + seconds
        self.measured_at = time.monotonic()

    @property
    def per_s(self) -> float | None:
        """None: nothing was measured."""
        return self._amount / self._seconds if self._seconds else None


class Admission:
    """The loads of one engine. Not thread-safe.

    arriving: blocks that come from the store. computing_s: how long the engine, without a store, would compute until it
    had what is loaded: the prompts before it, and then its own. Unknown is `math.inf`.
    """

    def __init__(self, *, timeout_s: float, always: bool = False) -> None:
        """timeout_s: how long a load may take at most, once it has begun. always: every load pays."""
        self.arriving = Pace()
        self._timeout_s = timeout_s
        self._always = always
        self._ahead = 0  # blocks of loads that have not ended
        self._ended = False  # whether one has: its first blocks alone tell little
        self._first_began = 0.0

    def judge(self, blocks: int, computing_s: float) -> int | None:
        """How many of the blocks to load that the store has of a prompt, from its beginning; 0: computing them is
        sooner. None: ask again, the first load will tell soon."""
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
        """How long to wait to be told what the store has of a prompt: so many blocks at most. 0: it would be computed
        all the same."""
        if self._always:
            return math.inf
        if self.judge(blocks, computing_s) == 0:
            return 0.0
        return max(LEAST_S, LOOKUP_SHARE * self._most_s(computing_s))

    def begin(self, blocks: int, computing_s: float) -> float:
        """A load of so many blocks begins. -> how long it may take from when its turn begins, in seconds: as long as
        computing takes."""
        if not self._ahead:
            self._first_began = time.monotonic()
        self._ahead += blocks
        return max(LEAST_S, self._most_s(computing_s))

    def latest_s(self, computing_s: float) -> float:
        """In how many seconds from now a load is of no use any more, whenever its turn begins: all would be computed
        by then."""
        return math.inf if self._always else max(LEAST_S, computing_s)

    def arrived(self, blocks: float, seconds: float) -> None:
        """So many blocks came from the store while some were on their way for so long."""
        self.arriving.add(max(LEAST_BLOCKS, blocks), seconds)

    def end(self, blocks: int) -> None:
        """A load of so many blocks has ended."""
        self._ahead -= blocks
        self._ended = True

    def _hoped_per_s(self, arriving: float) -> float:
        if self._ahead:  # one trial at a time
            return arriving
        return arriving * math.pow(2.0, min(60.0, (time.monotonic() - self.arriving.measured_at) / HOPE_S))

    def _most_s(self, computing_s: float) -> float:
        return self._timeout_s if self._always else min(self._timeout_s, computing_s)
