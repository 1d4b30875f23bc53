"""How far a mover is: what it has moved, whether it is over, and when it rests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

CALL_S: Final = 10.0  # a shard that takes longer to answer is left out


class MoveReport(msgspec.Struct, frozen=True):
    """What became of the copies that were to be made: blocks, counted once for each shard that gains them. The rest of
    `total` was not reached in time, or was not sent because the other shard is full."""

    total: int
    moved: int
    present: int  # the other shard had them
    failed: int  # gone or damaged here, or not taken there

    @property
    def done(self) -> int:
        """Nothing more is to be done for these."""
        return self.moved + self.present + self.failed


class Progress:
    """Of one mover. Any thread.

    `told` is called with each new report, from any thread, one at a time; it may call `stop`. `rest_ratio`: after each
    piece of work whoever did it rests so many times as long as it took.
    """

    def __init__(self, told: Callable[[MoveReport], None], rest_ratio: float) -> None:
        self.report = MoveReport(0, 0, 0, 0)
        self.deadline = float("inf")  # monotonic
        self._told = told
        self._rest_ratio = rest_ratio
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Nothing more is to be done."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @property
    def over(self) -> bool:
        """Whether nothing more is to be done: stopped, or the deadline has come."""
        return self.stopped or time.monotonic() >= self.deadline

    @property
    def call_s(self) -> float:
        """How long the next call to a shard may take."""
        return max(0.001, min(CALL_S, self.deadline - time.monotonic()))

    def begin(self, total: int) -> None:
        """So many copies are to be made."""
        with self._lock:
            self.report = MoveReport(total, 0, 0, 0)
            self._told(self.report)

    def count(self, moved: int = 0, present: int = 0, failed: int = 0) -> None:
        """So many more copies are done."""
        with self._lock:
            so_far = self.report
            self.report = MoveReport(
                so_far.total, so_far.moved + moved, so_far.present + present, so_far.failed + failed
            )
            self._told(self.report)

    def rest(self, began: float) -> None:
        """A piece of work that began at that monotonic time is done: rest for it. Ends early with `stop`."""
        if self._rest_ratio:
            now = time.monotonic()
            self._stopped.wait(max(0.0, min(self._rest_ratio * (now - began), self.deadline - now)))
