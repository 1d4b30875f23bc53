"""One host pool that is shared by those ranks of an engine that have the same slice of every block and are on one host.

After its slots, the pool has the rows of a few *passages*. They are for loads that get no slots, because there is no
CPU tier or because the load is too large for it. The blocks of these loads pass through their passages and are not
kept. The scheduler's half gives a passage to one load at a time. A load waits until a passage is free, and this wait
counts towards its time limit. Loads that wait for promised blocks have separate passages and never wait for a passage.
If no passage is free for one of these loads, each rank reads all the load's blocks itself.

`engine/shared_rows.py` says how ranks read a load together, and what can go wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore_client.engine.paged.layout import BlockLayout, rows_of
from kvstore_client.engine.paged.plan import Load
from kvstore_client.engine.shared_rows import SharedRows, Stripe, share_rows
from kvstore_client.engine.transfer_in import LOAD_CHUNK_BYTES, WAITED_CHUNK_BYTES

log = logging.getLogger("kvstore_client")

# If the ranks share no pool, each rank has as many sets of staging rows.
PASSAGES: Final = 4
WAITING_PASSAGES: Final = 4


class SharedPool:
    """One rank's view of the pool. Each row has one slice of a block. Thread-safe."""

    def __init__(self, rows: SharedRows, slots: int, layout: BlockLayout) -> None:
        self.rows = rows
        self._slices = layout.slices
        self._passages = passages(slots, layout.block_bytes)

    def stripe(self, load: Load, slice_index: int) -> Stripe | None:
        """Return this rank's share of a slice of the load. If it is None, the rank reads the whole slice into rows of
        its own."""
        slots: Sequence[int] | None = load.slots
        if slots is None and load.passage is not None:
            slots = self._passages[load.passage]
        if slots is None:
            return None
        return self.rows.stripe(load.number, rows_of(slots, self._slices, slice_index), len(load.keys))


def passages(slots: int, block_bytes: int) -> list[range]:
    """Return the slots of each passage, which come after the pool's `slots`. A passage has room for two chunks of a
    load."""
    found: list[range] = []
    first = slots
    for chunk_bytes in [LOAD_CHUNK_BYTES] * PASSAGES + [WAITED_CHUNK_BYTES] * WAITING_PASSAGES:
        found.append(range(first, first + 2 * max(1, chunk_bytes // block_bytes)))
        first = found[-1].stop
    return found


def shared_pool(
    layout: BlockLayout, slots: int, replica: tuple[int, int], exchange: Callable[[object], Sequence[object]]
) -> SharedPool | None:
    """Return the pool that this rank shares with the ranks that have the same slice of every block. Return None if they
    cannot share one, so that each must have its own. All these ranks must call this while the engine starts. `replica`:
    the index of this rank among them, and how many they are. `exchange`: a function that sends an object to all of them
    and returns the objects of all ranks by index."""
    rank, ranks = replica
    if ranks == 1:
        return None
    rows = passages(slots, layout.block_bytes)[-1].stop * layout.slices
    shared = share_rows(rows, layout.slice_bytes, rank, ranks, exchange)
    if shared is None:
        log.warning(
            "kvstore: the %d ranks with the same slice of every block cannot share host memory. They are on several "
            "hosts or in several containers, or have no memfd. So each rank reads all blocks into a pool of its own",
            ranks,
        )
        return None
    shared.pool = layout.locked(shared.pool)
    return SharedPool(shared, slots, layout)


class Passages:
    """Assigns passages to loads, in the scheduler's half. Not thread-safe."""

    def __init__(self, there: bool) -> None:
        """`there`: whether any ranks share a pool. If not, no load waits for a passage."""
        self._there = there
        self._free = {False: list(range(PASSAGES)), True: list(range(PASSAGES, PASSAGES + WAITING_PASSAGES))}
        self._held: dict[str, int] = {}  # the passage of each load, by request
        self._since: dict[str, float] = {}  # since when each load waits, by request
        self._number = 0

    @property
    def under_way(self) -> int:
        return len(self._held) + len(self._since)

    @property
    def last(self) -> int:
        """The number of the last load that was sent to the workers."""
        return self._number

    def admit(self, loads: Sequence[Load]) -> tuple[list[Load], list[Load]]:
        """Return two lists: the loads to send to the workers now, and the loads that wait for a passage. A load whose
        time is over does not wait."""
        going: list[Load] = []
        waiting: list[Load] = []
        now = time.monotonic()
        for load in loads:
            waited = now - self._since.get(load.request_id, now)
            if self._there and load.keys and load.slots is None and waited < load.within_s:
                free = self._free[load.waits]
                if free:
                    load.passage = self._held[load.request_id] = free.pop()
                elif not load.waits:
                    self._since.setdefault(load.request_id, now)
                    waiting.append(load)
                    continue
            self._since.pop(load.request_id, None)
            load.within_s = max(0.0, load.within_s - waited)
            load.latest_s = max(0.0, load.latest_s - waited)
            self._number += 1
            load.number = self._number
            going.append(load)
        return going, waiting

    def left(self, request_id: str) -> None:
        """Note that all ranks have ended the load of this request."""
        passage = self._held.pop(request_id, None)
        if passage is not None:
            self._free[passage >= PASSAGES].append(passage)
