"""One turn of a shard's loop: who gets it, how long its parts may take, and a watchdog for turns that took too long.

A shard has one thread, so whatever takes long delays every client. In each turn new connections go first, so that an
operator or a health check gets in and is answered whatever others send. Then come the others by what their requests
cost, the cheapest first; each `Pace` has a few milliseconds of a turn, and who finds none waits for the next turn. So a
client that sends without end slows down others like it, and hardly anybody else. One message and one step of background
work are never interrupted: they must be short by themselves, and the watchdog tells which are not.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Literal, TypeVar, get_args

SLICE_S: Final = 0.0015  # for which one connection is read at a time
NEW_SLICE_S: Final = 0.00015  # a new one, so that a thousand of them do not delay each other
SLOW_TURN_S: Final = 0.05
Stage = Literal["events", "requests", "background", "disk", "replies", "transport", "housekeeping"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)

T = TypeVar("T")


class Pace(enum.IntEnum):
    """What a connection's slices cost; the lowest goes first."""

    PREFERRED = 0  # whatever they cost
    CHEAP = 1
    QUICK = 2
    SLOW = 3


LIMITS_S: Final = (0.005, 0.005, 0.002, 0.001)  # of a turn, by pace
_CHEAP_S: Final = 0.0002  # the most that a slice of a cheap connection costs, and of a quick one
_QUICK_S: Final = 0.001
_MOST_S: Final = 0.002  # what one slice counts at most: it may have had to pay for a collection of garbage
_WEIGHT: Final = 0.2  # of a slice in the average: of the slices of a large request few cost much


class Cost:
    """What the slices of one connection cost on average, in processor time: others may have the processor during a
    slice, so the clock does not tell, but for a slice that it says was cheap. A connection must prove that it is cheap.

    measured: the processor time of the next slice must be measured, which takes as long as a tenth of a small request.
    """

    __slots__ = ("_cost_s", "measured")

    def __init__(self) -> None:
        self._cost_s = _MOST_S
        self.measured = True

    def add(self, used_s: float) -> None:
        """A slice has used so much processor time."""
        self._cost_s += _WEIGHT * (min(used_s, _MOST_S) - self._cost_s)
        self.measured = self._cost_s > _CHEAP_S

    def took(self, took_s: float) -> None:
        """A slice that was not measured has taken so long by the clock."""
        if took_s <= _CHEAP_S:
            self._cost_s += _WEIGHT * (took_s - self._cost_s)
        else:
            self.measured = True

    @property
    def pace(self) -> Pace:
        """Who waits with whom."""
        return Pace.CHEAP if self._cost_s <= _CHEAP_S else Pace.QUICK if self._cost_s <= _QUICK_S else Pace.SLOW


class Line(Generic[T]):
    """Who waits for a part of a turn, by pace; first come first served among those of one pace."""

    def __init__(self) -> None:
        self._lines: list[deque[T]] = [deque() for _ in Pace]
        self._waiting: set[T] = set()  # in any of them

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, pace: Pace) -> None:
        """Let an item wait, unless it does."""
        if item not in self._waiting:
            self._waiting.add(item)
            self._lines[pace].append(item)

    def turn(self) -> Iterator[T]:
        """Take those whose turn it is now: at least one of each pace, and no more than there is time for.

        Items that are added meanwhile wait for the next turn.
        """
        if not self._waiting:
            return
        for limit_s, line in zip(LIMITS_S, self._lines, strict=True):
            if not line:
                continue
            count, until = len(line), 0.0
            if count > 1:
                until = time.monotonic() + limit_s
            while True:
                item = line.popleft()
                self._waiting.discard(item)
                yield item
                count -= 1
                if not count or time.monotonic() > until:
                    break


class Turns:
    """The watchdog: counts of the slow turns. Used by the loop's thread only.

    slow: turns that took more than `SLOW_TURN_S`, by the stage that took most of their time. longest_s: of all turns.
    """

    def __init__(self) -> None:
        self.slow: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        self.longest_s = 0.0
        self._began = self._stage_began = self._longest_stage_s = 0.0
        self._longest_stage = STAGES[0]

    def begin(self, now: float) -> None:
        """A turn begins; `now` is the time."""
        self._began = self._stage_began = now
        self._longest_stage_s = 0.0

    def done(self, stage: Stage) -> None:
        """A stage of the turn has ended; the next one begins."""
        now = time.monotonic()
        took_s = now - self._stage_began
        if took_s > self._longest_stage_s:
            self._longest_stage_s, self._longest_stage = took_s, stage
        self._stage_began = now

    def end(self) -> None:
        """The turn has ended with the stage that was `done` last."""
        took_s = self._stage_began - self._began
        self.longest_s = max(self.longest_s, took_s)
        if took_s > SLOW_TURN_S:
            self.slow[self._longest_stage] += 1
