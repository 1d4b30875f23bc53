"""Counts the blocks of one rank that are not in the store yet, how long the oldest has waited, and how many are lost at
the end.

A block counts from the step that plans to save it until it is no longer read. Meanwhile it may be in the engine's
cache, in the queue, or on the wire. It may also be waiting for a copy or for a check of the weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class AtEnd(NamedTuple):
    """Counts for the blocks that were not in the store when the engine computed for the last time. Of these, `sent` are
    in the store now, and `lost` are not."""

    sent: int
    lost: int


@dataclass
class _Job:
    since: float  # when it was planned, by `time.monotonic`
    blocks: int


class Unsent:
    """The unsent blocks of one rank. Thread-safe; no method blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}  # the oldest first
        self._ending_since: float | None = None
        self._sent = self._lost = 0  # since `_ending_since`

    def add(self, job: int, blocks: int) -> None:
        """Note that this step plans to save this many blocks."""
        if blocks:
            with self._lock:
                self._jobs[job] = _Job(time.monotonic(), blocks)

    def ended(self, results: Sequence[tuple[tuple[int, int], bool]]) -> None:
        """Note that these blocks are not read any more. Each result has the block's job and slot, and whether the store
        has the block."""
        with self._lock:
            for (job, _), is_stored in results:
                self._jobs[job].blocks -= 1
                if not self._jobs[job].blocks:
                    del self._jobs[job]
                if self._ending_since is not None:
                    self._sent += is_stored
                    self._lost += not is_stored

    @property
    def blocks(self) -> int:
        with self._lock:
            return sum(job.blocks for job in self._jobs.values())

    @property
    def oldest_s(self) -> float:
        """The age of the oldest unsent block in seconds, 0 if there is none."""
        with self._lock:
            oldest = next(iter(self._jobs.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.since

    def engine_ends(self) -> float:
        """Note that the engine computes nothing any more. Return the number of seconds since this was first noted."""
        with self._lock:
            if self._ending_since is None:
                self._ending_since = time.monotonic()
            return time.monotonic() - self._ending_since

    def at_end(self) -> AtEnd:
        """Return how many blocks were sent since `engine_ends`, and how many were lost. Blocks that are not sent by now
        count as lost."""
        with self._lock:
            return AtEnd(self._sent, self._lost + sum(job.blocks for job in self._jobs.values()))
