"""A job of `TransferIn`: the blocks that it fetches, its time limit, and its progress."""

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
    """The time limit of a load. All jobs of the load share it.

    * `seconds`: How many seconds the load may take once it has begun.
    * `latest`: The time by which the load must end in any case, on the clock of `time.monotonic`.
    * `deadline`: The time by which the load must end, on the same clock. It is None until the load has begun.
    """

    def __init__(self, seconds: float, latest: float = math.inf) -> None:
        self.seconds = seconds
        self.latest = latest
        self.deadline: float | None = None  # None: it has not begun

    def begin(self, now: float) -> float:
        """Start the time limit, unless it has started already. Return the deadline.

        * `now`: The present time of `time.monotonic`.
        """
        if self.deadline is None:
            self.deadline = min(now + self.seconds, self.latest)
        return self.deadline


class State(enum.Enum):
    """The state of a job. The value says what the job waits for."""

    QUEUED = "its start, or its next chunk"
    ON_THE_WIRE = "a chunk"
    PLACING = "the placing thread, which also ends it"
    OVER = "nothing"


class FetchJob:
    """The blocks to fetch for one caller. `TransferIn.submit` describes the fields.

    Only the thread that a job waits for, according to its state, changes the job. Any thread may set `stopped`.
    """

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
        self.missed = "unkept_blocks" if waits else "missed_blocks"  # the counter of its misses
        self.arrived = arrived
        self.done = done
        self.stripe = stripe
        self.state = State.QUEUED
        self.stopped = False
        self.asked_at = time.monotonic()
        self.rows: Rows | None = None  # None before the job begins
        self.began = 0.0
        self.tries = False
        self.first = self.end = 0  # the present chunk
        self.task: Task | None = None  # the call that fetches the present chunk
        self.sent_at = 0.0
        self.took_s = 0.0  # how long the last chunk took
        self.shards: Set[Link] = frozenset()  # the shards that it needs; empty until they are known
