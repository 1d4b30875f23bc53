"""A load on one rank. It tracks the slices of its blocks as they arrive, and copies them into the cache.

Each slice is fetched by a transfer of its own and placed as it arrives. A block is loaded when all its slices are
placed. Blocks that the host pool has are placed at the end, with all their slices.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_client.engine.jobs import FetchJob, Rows
from kvstore_client.engine.paged.device import Fence
from kvstore_client.engine.paged.layout import BlockLayout, Copy, DetachedError, rows_of
from kvstore_client.engine.paged.plan import Load
from kvstore_client.engine.shared_rows import Stripe


class StagingRows:
    """Sets of rows for blocks that get no slot of the host pool. Each running transfer takes one set, and there are at
    most `most` sets. Thread-safe."""

    def __init__(self, make: Callable[[], Rows], most: int, made_now: bool = False) -> None:
        """`make`: a function that makes a set. `made_now`: whether all sets are made now. Otherwise each is made when
        it is first needed."""
        self._make = make
        self._unmade = 0 if made_now else most
        self._free: list[Rows] = [make() for _ in range(most)] if made_now else []
        self._lock = threading.Lock()

    def take(self) -> Rows | None:
        """Return a set, or None if all are taken. Raises the errors of `make`."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._unmade:
                return None
            self._unmade -= 1
        try:
            return self._make()
        except BaseException:
            with self._lock:
                self._unmade += 1
            raise

    def give_back(self, rows: Rows) -> None:
        """Give a set back, so that it is free again. The caller must not read or write it any more."""
        with self._lock:
            self._free.append(rows)


class RankLoad:
    """The load of one request on this rank. Thread-safe."""

    def __init__(self, load: Load, layout: BlockLayout, pool: Rows) -> None:
        self.load = load
        self.layout = layout
        self.slices: list[SliceLoad] = []  # the slices to fetch
        self.jobs: list[FetchJob] = []  # the jobs that fetch them
        self.fence: Fence | None = None  # the fence for which its copies wait
        self._pool = pool
        self._ended = 0
        self._placed_here: set[int] = set()
        self._lock = threading.Lock()

    @property
    def placed(self) -> float:
        """The number of placed blocks. A block with only some of its slices placed counts as that fraction."""
        return len(self._placed_here) + sum(each.placed for each in self.slices) / self.layout.slices

    @property
    def seconds(self) -> float:
        """The time spent placing blocks that arrived."""
        return sum(each.seconds for each in self.slices)

    @property
    def missing(self) -> set[int]:
        """The cache blocks that are not loaded, or not loaded yet."""
        return {*self.load.host_block_ids, *self.load.block_ids} - self._placed_here - self._arrived

    @property
    def _arrived(self) -> set[int]:
        return set.intersection(*(each.there for each in self.slices)) if self.slices else set()

    def part_ends(self) -> bool:
        """Note that the transfer of one slice has ended. Return whether it was the last one."""
        with self._lock:
            self._ended += 1
            return self._ended == len(self.slices)

    def finish(self) -> None:
        """Place the blocks of the host pool and wait for these copies. After that, `missing` is final."""
        block_ids, slices = self.load.host_block_ids, self.layout.slices
        copies: list[Copy] = []
        try:
            for slice_index in range(slices) if block_ids else ():
                rows = rows_of(self.load.host_slots, slices, slice_index)
                copies.append(self.layout.swap_in(self._pool, rows, block_ids, self.fence, slice_index))
        except DetachedError:
            return
        finally:
            for copy in copies:
                copy.wait()
        self._placed_here.update(block_ids)


class SliceLoad:
    """One slice of all blocks of a load. Only one thread at a time may use it."""

    def __init__(
        self,
        load: RankLoad,
        slice_index: int,
        rows: Rows | StagingRows,
        slots: Sequence[int],
        stripe: Stripe | None = None,
    ) -> None:
        """`rows`: either the rows into which the slice is fetched, or an object that lends them. `slots`: the row of
        each block. `stripe`: this rank's share, if several ranks read the load together."""
        self.slice_index = slice_index
        self.stripe = stripe
        self.slots = slots
        self._staging = rows if isinstance(rows, StagingRows) else None
        self._rows = rows if not isinstance(rows, StagingRows) else None
        self.placed = 0
        self.seconds = 0.0  # time spent on placing
        self.there: set[int] = set()  # cache blocks that have this slice
        self._load = load
        self._copies: deque[tuple[Copy, int, Sequence[int]]] = deque()

    def begin(self) -> Rows | None:
        """Begin the transfer. Return the rows, or None if no rows are free."""
        if self._rows is None and self._staging is not None:
            self._rows = self._staging.take()
        return self._rows

    def arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        """Start to place the leading blocks of a chunk, up to the first missing one. Later blocks are useless, because
        the engine computes all blocks from the first missing one on. Return whether further blocks are useful."""
        started = time.monotonic()
        run = len(hits) if hits.all() else int(hits.argmin())
        if run:
            slots, block_ids = self.slots[first : first + run], self._load.load.block_ids[first : first + run]
            assert self._rows is not None
            try:
                copy = self._load.layout.swap_in(self._rows, slots, block_ids, self._load.fence, self.slice_index)
            except DetachedError:
                return False
            self._copies.append((copy, first, block_ids))
        while len(self._copies) > 1:  # the next chunk uses the rows of the chunks before this one
            self._settle()
        self.seconds += time.monotonic() - started
        return run == len(hits)

    def finish(self) -> None:
        """Finish after the transfer has ended: inform other ranks, wait for all copies, and return the lent rows."""
        if self.stripe is not None:
            self.stripe.end()
        try:
            while self._copies:
                self._settle()
        finally:
            rows, self._rows = self._rows, None
            if rows is not None and self._staging is not None:
                self._staging.give_back(rows)

    def _settle(self) -> None:
        copy, first, block_ids = self._copies.popleft()
        copy.wait()
        if self.stripe is not None:
            self.stripe.took(first, first + len(block_ids))
        self.placed += len(block_ids)
        self.there.update(block_ids)
