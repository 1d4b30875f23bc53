"""A job of `TransferIn`: what it is to fetch, in how long, and how far it is."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_client._links.link import Link
from kvstore_client.engine.multiplexer import Task
from kvstore_client.engine.shared_rows import Stripe

Rows: TypeAlias = "npt.NDArray[np.uint8]"
Hits: TypeAlias = "npt.NDArray[np.bool_]"
Arrived: TypeAlias = "Callable[[int, Hits], bool]"


class Within:
    """The time of a load: so many seconds from when its turn begins, but not beyond ``latest``, on the clock of
    `time.monotonic`. The jobs of one load share it."""

    def __init__(self, seconds: float, latest: float = math.inf) -> None:
        self.seconds = seconds
        self.latest = latest
        self.deadline: float | None = None  # None: its turn has not begun

    def begin(self, now: float) -> float:
        """-> the deadline."""
        if self.deadline is None:
            self.deadline = min(now + self.seconds, self.latest)
        return self.deadline


class State(enum.Enum):
    """What a job waits for."""

    QUEUED = "its turn, or that its next chunk is sent"
    ON_THE_WIRE = "a chunk"
    PLACING = "the thread that places, which also ends it"
    OVER = "nothing"


class Job:
    """Blocks to fetch for one caller. Changed by the thread that its state names alone; ``stopped`` by any."""

    def __init__(
        self,
        keys: Sequence[bytes],
        out: Rows | Callable[[], Rows | None],
        slots: Sequence[int],
        within: Within,
        waits: bool,
        arrived: Arrived,
        done: Callable[[], None],
        stripe: Stripe | None,
    ) -> None:
        self.keys = keys
        self.out = out
        self.slots = slots
        self.within = within
        self.waits = waits
        self.missed = "unkept_blocks" if waits else "missed_blocks"  # the counter
        self.arrived = arrived
        self.done = done
        self.stripe = stripe
        self.state = State.QUEUED
        self.stopped = False
        self.asked_at = time.monotonic()
        self.rows: Rows | None = None  # from its turn on
        self.began = 0.0
        self.tries = False
        self.first = self.end = 0  # the present chunk
        self.task: Task | None = None  # that has it on the wire
        self.sent_at = 0.0
        self.took_s = 0.0  # the chunk before
        self.shards: Set[Link] = frozenset()  # that it needs; empty: nobody has asked
