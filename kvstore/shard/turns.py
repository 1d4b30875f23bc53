"""One turn of a shard's loop: who gets it, how long its parts may take, and a watchdog for turns that took too long.

A shard has one thread, so whatever takes long delays every client. In each turn new connections go first, so that an
operator or a health check gets in and is answered whatever others send. Then come the connections that need little
time; those that took long the last time share a few milliseconds after them, and the rest of these waits for the next
turn. So a client that sends without end slows down others like it, and hardly anybody else. One message and one step of
background work are never interrupted: they must be short by themselves, and the watchdog tells which are not.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

SLICE_S: Final = 0.0015  # for which one connection is read at a time
NEW_SLICE_S: Final = 0.00015  # a new one, so that a thousand of them do not delay each other
SLOW_S: Final = 0.001  # a connection that took longer is slow the next time
QUICK_LINE_S: Final = 0.02  # what quick connections together get of a turn
SLOW_LINE_S: Final = 0.002  # and slow ones
SLOW_TURN_S: Final = 0.05
STAGES: Final = ("events", "requests", "background", "disk", "replies", "housekeeping")

T = TypeVar("T")


class Line(Generic[T]):
    """Who waits for a part of a turn: preferred ones, quick ones, slow ones; first come first served among them."""

    def __init__(self) -> None:
        self._preferred: OrderedDict[T, None] = OrderedDict()
        self._quick: OrderedDict[T, None] = OrderedDict()
        self._slow: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preferred) + len(self._quick) + len(self._slow)

    def add(self, item: T, slow: bool = False, preferred: bool = False) -> None:
        """Let an item wait, unless it does."""
        if item not in self._slow and item not in self._quick and item not in self._preferred:
            (self._preferred if preferred else self._slow if slow else self._quick)[item] = None

    def turn(self) -> Iterator[T]:
        """Take those whose turn it is now: at least one of each kind, and no more than there is time for.

        Items that are added meanwhile wait for the next turn.
        """
        for line, limit_s in (
            (self._preferred, QUICK_LINE_S),
            (self._quick, QUICK_LINE_S),
            (self._slow, SLOW_LINE_S),
        ):
            until = time.monotonic() + limit_s
            for _ in range(len(line)):
                yield line.popitem(last=False)[0]
                if time.monotonic() > until:
                    break


class Turns:
    """The watchdog: counts of the slow turns. Used by the loop's thread only.

    slow: turns that took more than `SLOW_TURN_S`, by the stage that took most of their time. longest_s: of all turns.
    """

    def __init__(self) -> None:
        self.slow: dict[str, int] = {}
        self.longest_s = 0.0
        self._began = self._stage_began = self._longest_stage_s = 0.0
        self._longest_stage = ""

    def begin(self, now: float) -> None:
        """A turn begins; `now` is the time."""
        self._began = self._stage_began = now
        self._longest_stage_s = 0.0

    def done(self, stage: str) -> None:
        """A stage of the turn, one of `STAGES`, has ended; the next one begins."""
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
            self.slow[self._longest_stage] = self.slow.get(self._longest_stage, 0) + 1
