"""The blocks of one rank that are not in the store yet: how many, since when, and what becomes of them at the end.

A block counts from the step that plans to save it until nobody reads it any more, wherever it is meanwhile: in the
engine's cache, being copied, waiting for a check of the weights, in the queue, on the wire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class AtEnd(NamedTuple):
    """Of the blocks that were not in the store when the engine computed its last: how many are there now, and how many
    are lost."""

    sent: int
    lost: int


@dataclass
class _Job:
    since: float  # by `time.monotonic`
    blocks: int


class Unsent:
    """Thread-safe; no method blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}  # the oldest first
        self._ending_since: float | None = None
        self._sent = self._lost = 0  # since then

    def add(self, job: int, blocks: int) -> None:
        """This step is to save so many blocks."""
        if blocks:
            with self._lock:
                self._jobs[job] = _Job(time.monotonic(), blocks)

    def ended(self, results: Sequence[tuple[tuple[int, int], bool]]) -> None:
        """These blocks, by job and slot, are not read any more; whether the store has each."""
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
        """For how many seconds the oldest of them has been one; 0 if there is none."""
        with self._lock:
            oldest = next(iter(self._jobs.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.since

    def engine_ends(self) -> float:
        """The engine computes nothing any more. -> for how many seconds it has not."""
        with self._lock:
            if self._ending_since is None:
                self._ending_since = time.monotonic()
            return time.monotonic() - self._ending_since

    def at_end(self) -> AtEnd:
        """What became of them after `engine_ends`; what is not sent by now is lost."""
        with self._lock:
            return AtEnd(self._sent, self._lost + sum(job.blocks for job in self._jobs.values()))
