"""The progress of a mover: its counts, its deadline, whether it was stopped, and its pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

CALL_S: Final = 10.0  # a shard that takes longer to answer has failed


class MoveReport(msgspec.Struct, frozen=True):
    """Counts of copies. A block counts once for each shard that gains it.

    The other copies in `total` were not reached in time, or were not sent because the other shard is full.
    """

    total: int
    moved: int
    present: int  # the other shard already had them
    failed: int  # the block was gone or damaged on this shard, or the other one did not store it

    @property
    def done(self) -> int:
        """The number of copies that need no more work in this mover."""
        return self.moved + self.present + self.failed

    def after(self, earlier: MoveReport) -> MoveReport:
        """Return the report of all passes: this one and the `earlier` ones. The copies that failed in the earlier
        passes are counted again in this one."""
        moved, present = earlier.moved + self.moved, earlier.present + self.present
        return MoveReport(earlier.moved + earlier.present + self.total, moved, present, self.failed)


class FillProgress(NamedTuple):
    """A fill that is in progress."""

    nodes: str  # the nodes that are filled
    since: float  # when it began, by the monotonic clock, like the next field
    deadline: float  # when it ends, even if blocks are left
    report: MoveReport

    def left_s(self, now: float) -> float | None:
        """Return an estimate of the seconds that are left; None before the first copy."""
        if not self.report.done:
            return None
        per_copy_s = (now - self.since) / self.report.done
        return max(0.0, min(per_copy_s * (self.report.total - self.report.done), self.deadline - now))


class MoveProgress:
    """The progress of one mover, shared by its threads. Thread-safe.

    `told`: a function that is called with each new report, from any thread, one call at a time. It may call `stop`.
    `rest_ratio`: after each piece of work, the thread pauses this many times as long as the work took.
    """

    def __init__(self, told: Callable[[MoveReport], None], rest_ratio: float) -> None:
        self.report = MoveReport(0, 0, 0, 0)
        self.deadline = float("inf")  # by the monotonic clock
        self._told = told
        self._rest_ratio = rest_ratio
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Make all threads of the mover end."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @property
    def over(self) -> bool:
        """Whether the mover must end, because it was stopped or the deadline has come."""
        return self.stopped or time.monotonic() >= self.deadline

    @property
    def call_s(self) -> float:
        """How long the next call to a shard may take, in seconds."""
        return max(0.001, min(CALL_S, self.deadline - time.monotonic()))

    def begin(self, total: int) -> None:
        """Start the report. `total`: the number of copies to make."""
        with self._lock:
            self.report = MoveReport(total, 0, 0, 0)
            self._told(self.report)

    def count(self, moved: int = 0, present: int = 0, failed: int = 0) -> None:
        """Add copies to the report."""
        with self._lock:
            so_far = self.report
            self.report = MoveReport(
                so_far.total, so_far.moved + moved, so_far.present + present, so_far.failed + failed
            )
            self._told(self.report)

    def rest(self, began: float) -> None:
        """Pause after a piece of work that began at the monotonic time `began`. Blocks; `stop` ends the pause."""
        if self._rest_ratio:
            now = time.monotonic()
            self._stopped.wait(max(0.0, min(self._rest_ratio * (now - began), self.deadline - now)))
