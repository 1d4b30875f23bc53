"""Whether to load blocks or to have the engine compute them: what is sooner.

Two paces are measured while the engine works: blocks that arrive from the store in a second, and tokens that the engine
computes in a second. A load pays if its blocks, behind those of the loads before it, arrive before the engine would
have computed them without a store, behind the prompts before it. What is not known yet is tried, one load at a time; a
store that was too slow is tried again with a few blocks.
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
# The least time that a load is given: less is a matter of chance.
LEAST_S: Final = 0.05


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

    arriving: blocks that come from the store. computing: tokens that the engine computes.
    """

    def __init__(self, *, block_tokens: float, timeout_s: float, always: bool = False) -> None:
        """block_tokens: that a block stands for. timeout_s: how long a load may take at most, once it has begun.
        always: every load pays."""
        self.arriving, self.computing = Pace(), Pace()
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._always = always
        self._ahead = 0  # blocks of loads that have not ended
        self._ended = False  # whether one has: its first blocks alone tell little
        self._first_began = 0.0

    def judge(self, blocks: int, tokens_before: int = 0) -> int | None:
        """How many of the blocks to load that the store has of a prompt, from its beginning; 0: computing them is
        sooner. None: ask again, the first load will tell soon. tokens_before: what the engine, without a store, would
        have to compute first."""
        arriving = self.arriving.per_s
        if self._always:
            return blocks
        if arriving is None or not self._ended:
            if not self._ahead:
                return blocks
            return None if time.monotonic() - self._first_began < FIRST_LOAD_S else 0
        seconds = self._computing_s(blocks, tokens_before)
        if self._ahead + blocks <= arriving * seconds:
            return blocks
        hoped = self._hoped_per_s(arriving)
        return math.ceil(blocks * TRIAL) if self._ahead + blocks <= hoped * seconds else 0

    def begin(self, blocks: int, tokens_before: int = 0) -> float:
        """A load of so many blocks begins. -> how long it may take, in seconds: as long as those before it, and then as
        long as computing takes."""
        arriving = self.arriving.per_s
        before = self._ahead / arriving if arriving else 0.0
        if not self._ahead:
            self._first_began = time.monotonic()
        self._ahead += blocks
        return min(before, self._timeout_s) + max(LEAST_S, self._computing_s(blocks, tokens_before))

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

    def _computing_s(self, blocks: int, tokens_before: int) -> float:
        computing = self.computing.per_s
        tokens = blocks * self._block_tokens + tokens_before
        seconds = tokens / computing if computing and not self._always else math.inf
        return min(self._timeout_s, seconds)


class StepTimes:
    """How many tokens the engine computes in a second, from when it plans its steps. Not thread-safe."""

    def __init__(self, computing: Pace, steps_ahead: int) -> None:
        """steps_ahead: how many steps the engine plans before it waits for one."""
        self._computing = computing
        self._steps_ahead = steps_ahead
        self._steps: list[tuple[int, frozenset[str]]] = []  # the newest last: tokens, requests
        self._planned_at = 0.0

    def plan(self, scheduled: dict[str, int]) -> None:
        """The engine plans a step: so many tokens of each request."""
        now = time.monotonic()
        passed, self._planned_at = now - self._planned_at, now
        # Decoding takes a step's time for a token; it says nothing of prompts.
        prompts = sum(tokens for tokens in scheduled.values() if tokens > 1)
        self._steps.append((prompts if 2 * prompts > sum(scheduled.values()) else 0, frozenset(scheduled)))
        if len(self._steps) < self._steps_ahead + 2:
            return
        tokens, requests = self._steps.pop(0)
        if tokens and requests & scheduled.keys():  # otherwise the engine may have had nothing to do in between
            self._computing.add(tokens, passed)
