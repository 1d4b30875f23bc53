"""One turn of a shard's loop: the order of connections, the time of each part, and a watchdog for slow turns.

A shard has one thread, so anything that takes long delays every client. In each turn, new connections go first, so that
an operator or a health check is accepted and answered, whatever other clients send. The other connections are ordered
by the cost of their requests, the cheapest first. Each `SliceClass` has a few milliseconds of a turn. Connections for
which no time is left wait for the next turn. So a client that sends without end slows down clients that do the same,
but hardly any other client. A message and a step of background work are never interrupted. So each of them must be
short, and the watchdog reports those that are not.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Literal, TypeVar, get_args

SLICE_S: Final = 0.0015  # how long one connection is read at a time, in seconds
NEW_SLICE_S: Final = 0.00015  # the same for a new connection, so that a thousand of them do not delay each other
SLOW_TURN_S: Final = 0.05
KEPT_TURNS: Final = 64
Stage = Literal["events", "requests", "background", "disk", "replies", "transport", "housekeeping"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)

T = TypeVar("T")


class SliceClass(enum.IntEnum):
    """The classes of connections by the cost of their slices. The lowest class goes first."""

    PREFERRED = 0  # regardless of the cost
    CHEAP = 1
    QUICK = 2
    SLOW = 3


LIMITS_S: Final = (0.005, 0.005, 0.002, 0.001)  # the time per turn for each class
_CHEAP_S: Final = 0.0002  # the highest average cost of a slice in the class CHEAP; the next line: in QUICK
_QUICK_S: Final = 0.001
_MOST_S: Final = 0.002  # the most that one slice counts, because its time may include a garbage collection
_WEIGHT: Final = 0.2  # weight of a slice in the average; only a few of a large request's slices are expensive


class Cost:
    """The average cost of one connection's slices, in processor time. The time by the clock is not enough, because
    other processes may use the processor during a slice. But a slice that was short by the clock was certainly cheap. A
    connection counts as slow until it proves to be cheap.

    measured: whether the processor time of the next slice must be measured. This takes a tenth of the time of a small
    request.
    """

    __slots__ = ("_cost_s", "measured")

    def __init__(self) -> None:
        self._cost_s = _MOST_S
        self.measured = True

    def add(self, used_s: float) -> None:
        """Count a slice that has used `used_s` seconds of processor time."""
        self._cost_s += _WEIGHT * (min(used_s, _MOST_S) - self._cost_s)
        self.measured = self._cost_s > _CHEAP_S

    def took(self, took_s: float) -> None:
        """Count a slice whose processor time was not measured and that took `took_s` seconds by the clock."""
        if took_s <= _CHEAP_S:
            self._cost_s += _WEIGHT * (took_s - self._cost_s)
        else:
            self.measured = True

    @property
    def pace(self) -> SliceClass:
        """The class in which the connection waits."""
        return (
            SliceClass.CHEAP
            if self._cost_s <= _CHEAP_S
            else SliceClass.QUICK
            if self._cost_s <= _QUICK_S
            else SliceClass.SLOW
        )


class SliceQueue(Generic[T]):
    """Items that wait for a part of a turn, in one queue for each class. Within a queue, the oldest item goes first."""

    def __init__(self) -> None:
        self._lines: list[deque[T]] = [deque() for _ in SliceClass]
        self._waiting: set[T] = set()  # items that wait in any of the queues

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, pace: SliceClass) -> None:
        """Let an item wait, unless it waits already."""
        if item not in self._waiting:
            self._waiting.add(item)
            self._lines[pace].append(item)

    def turn(self) -> Iterator[T]:
        """Yield the items that are served in this turn: at least one of each class, and more while the class has time
        left.

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


class LoopWatchdog:
    """The watchdog, which counts slow turns. Used by the loop's thread only.

    slow: for each stage, the number of turns over `SLOW_TURN_S` in which this stage took longest.
    longest_s: the length of the longest turn, in seconds.
    """

    def __init__(self) -> None:
        self.slow: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        self.longest_s = 0.0
        self._began = self._stage_began = self._longest_stage_s = 0.0
        self._longest_stage = STAGES[0]
        self._last: deque[tuple[float, Stage, float]] = deque(maxlen=KEPT_TURNS)  # slow ones: end, stage, seconds

    def begin(self, now: float) -> None:
        """Begin a turn at the time `now`, in monotonic seconds."""
        self._began = self._stage_began = now
        self._longest_stage_s = 0.0

    def done(self, stage: Stage) -> None:
        """End a stage of the turn. The next stage begins."""
        now = time.monotonic()
        took_s = now - self._stage_began
        if took_s > self._longest_stage_s:
            self._longest_stage_s, self._longest_stage = took_s, stage
        self._stage_began = now

    def end(self) -> None:
        """End the turn, after the last call of `done`."""
        took_s = self._stage_began - self._began
        self.longest_s = max(self.longest_s, took_s)
        if took_s > SLOW_TURN_S:
            self.slow[self._longest_stage] += 1
            self._last.append((self._stage_began, self._longest_stage, took_s))

    def slow_since(self, began: float, running: Stage) -> dict[Stage, float]:
        """Return the seconds of the slow turns since a turn began at `began`, and of the present turn. Each turn counts
        for the stage that took longest. `running`: the present stage of the present turn."""
        found: dict[Stage, float] = {}
        for end, stage, took_s in self._last:
            if end > began:
                found[stage] = found.get(stage, 0.0) + took_s
        now = time.monotonic()
        longest = running if now - self._stage_began > self._longest_stage_s else self._longest_stage
        found[longest] = found.get(longest, 0.0) + now - self._began
        return found
