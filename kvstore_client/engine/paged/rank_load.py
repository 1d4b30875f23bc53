"""A load on one rank: the parts of its blocks that arrive, and their copies into the cache.

Each part is fetched by a transfer of its own and placed as it arrives. A block is loaded when all its parts are. Blocks
that the host pool has are placed at the end, all their parts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_client.engine.jobs import Job, Rows
from kvstore_client.engine.paged.device import Fence
from kvstore_client.engine.paged.layout import BlockLayout, Copy, DetachedError, rows_of
from kvstore_client.engine.paged.plan import Load
from kvstore_client.engine.shared_rows import Stripe


class Staging:
    """Rows for blocks that get no slot of the host pool: so many sets of them, one for each transfer that has its turn.
    Thread-safe."""

    def __init__(self, make: Callable[[], Rows], most: int, made_now: bool = False) -> None:
        """make: makes a set. made_now: all are made now; otherwise each when it is first needed."""
        self._make = make
        self._unmade = 0 if made_now else most
        self._free: list[Rows] = [make() for _ in range(most)] if made_now else []
        self._lock = threading.Lock()

    def take(self) -> Rows | None:
        """-> a set; None: all are taken. Raises what ``make`` raises."""
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
        """Nothing reads or writes them any more."""
        with self._lock:
            self._free.append(rows)


class RankLoad:
    """The blocks of one request's load, on this rank. Thread-safe."""

    def __init__(self, load: Load, layout: BlockLayout, pool: Rows) -> None:
        self.load = load
        self.layout = layout
        self.parts: list[PartLoad] = []  # what is fetched
        self.jobs: list[Job] = []  # that fetch it
        self.fence: Fence | None = None  # what its copies wait for
        self._pool = pool
        self._ended = 0
        self._placed_here: set[int] = set()
        self._lock = threading.Lock()

    @property
    def placed(self) -> float:
        """So many blocks."""
        return len(self._placed_here) + sum(each.placed for each in self.parts) / self.layout.parts

    @property
    def seconds(self) -> float:
        """Spent placing blocks that arrived."""
        return sum(each.seconds for each in self.parts)

    @property
    def missing(self) -> set[int]:
        """Cache blocks that are not loaded, or not yet."""
        return {*self.load.host_block_ids, *self.load.block_ids} - self._placed_here - self._arrived

    @property
    def _arrived(self) -> set[int]:
        return set.intersection(*(each.there for each in self.parts)) if self.parts else set()

    def part_ends(self) -> bool:
        """-> whether that was the last one."""
        with self._lock:
            self._ended += 1
            return self._ended == len(self.parts)

    def finish(self) -> None:
        """Place the blocks of the host pool and wait for all copies. After that, ``missing`` is final."""
        block_ids, parts = self.load.host_block_ids, self.layout.parts
        copies: list[Copy] = []
        try:
            for part in range(parts) if block_ids else ():
                rows = rows_of(self.load.host_slots, parts, part)
                copies.append(self.layout.swap_in(self._pool, rows, block_ids, self.fence, part))
        except DetachedError:
            return
        finally:
            for copy in copies:
                copy.wait()
        self._placed_here.update(block_ids)


class PartLoad:
    """One part of these blocks; used by one thread at a time."""

    def __init__(
        self, load: RankLoad, part: int, rows: Rows | Staging, slots: Sequence[int], stripe: Stripe | None = None
    ) -> None:
        """rows, slots: where it arrives; or what lends the rows. stripe: of a load that other ranks read, too."""
        self.part = part
        self.stripe = stripe
        self.slots = slots
        self._staging = rows if isinstance(rows, Staging) else None
        self._rows = rows if not isinstance(rows, Staging) else None
        self.placed = 0
        self.seconds = 0.0  # spent placing
        self.there: set[int] = set()  # cache blocks that have this part
        self._load = load
        self._copies: deque[tuple[Copy, int, Sequence[int]]] = deque()

    def begin(self) -> Rows | None:
        """Its turn has come. -> the rows; None: there are none to lend."""
        if self._rows is None and self._staging is not None:
            self._rows = self._staging.take()
        return self._rows

    def arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        """Start to place the leading run of a chunk. Blocks after a gap are of no use, since the engine computes from
        the first missing block on. -> whether more is of use."""
        started = time.monotonic()
        run = len(hits) if hits.all() else int(hits.argmin())
        if run:
            slots, block_ids = self.slots[first : first + run], self._load.load.block_ids[first : first + run]
            assert self._rows is not None
            try:
                copy = self._load.layout.swap_in(self._rows, slots, block_ids, self._load.fence, self.part)
            except DetachedError:
                return False
            self._copies.append((copy, first, block_ids))
        while len(self._copies) > 1:  # the next chunk is written to the rows of those before this one
            self._settle()
        self.seconds += time.monotonic() - started
        return run == len(hits)

    def finish(self) -> None:
        """No more of it is fetched: tell other ranks, wait for all copies, and give back what was lent."""
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
