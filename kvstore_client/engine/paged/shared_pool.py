"""One host pool for the ranks of an engine that have the same part of every block and are on one host.

Behind its slots the pool has the rows of a few *passages*, for loads that get no slots: there is no CPU tier, or they
are too large for it. The blocks of such a load pass through its passage and stay nowhere. The scheduler's half gives a
passage to one load at a time; loads wait for one, and their time runs meanwhile. Loads that wait for promised blocks
have passages of their own, and never wait for one: without, each rank reads for itself.

How ranks read a load together, and what may go wrong: `engine/shared_rows.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore_client.engine.paged.layout import BlockLayout, rows_of
from kvstore_client.engine.paged.plan import Load
from kvstore_client.engine.shared_rows import SharedRows, Stripe, share_rows
from kvstore_client.engine.transfer_in import CHUNK_BYTES, WAITED_CHUNK_BYTES

log = logging.getLogger("kvstore_client")

# As many as a rank has rows of its own for, where ranks have no pool in common.
PASSAGES: Final = 4
WAITING_PASSAGES: Final = 4


class SharedPool:
    """The pool as one rank sees it, in rows of a part of a block. Thread-safe."""

    def __init__(self, rows: SharedRows, slots: int, layout: BlockLayout) -> None:
        self.rows = rows
        self._parts = layout.parts
        self._passages = passages(slots, layout.block_bytes)

    def stripe(self, load: Load, part: int) -> Stripe | None:
        """This rank's share of a part of the load; None: it reads all of it, into rows of its own."""
        slots: Sequence[int] | None = load.slots
        if slots is None and load.passage is not None:
            slots = self._passages[load.passage]
        if slots is None:
            return None
        return self.rows.stripe(load.number, rows_of(slots, self._parts, part), len(load.keys))


def passages(slots: int, block_bytes: int) -> list[range]:
    """The slots of each passage, behind those of the pool: two chunks of a load."""
    found: list[range] = []
    first = slots
    for chunk_bytes in [CHUNK_BYTES] * PASSAGES + [WAITED_CHUNK_BYTES] * WAITING_PASSAGES:
        found.append(range(first, first + 2 * max(1, chunk_bytes // block_bytes)))
        first = found[-1].stop
    return found


def shared_pool(
    layout: BlockLayout, slots: int, replica: tuple[int, int], exchange: Callable[[object], Sequence[object]]
) -> SharedPool | None:
    """The pool of this rank and those with the same part of every block, if they can have one: all of them call this
    while the engine starts. None: each must have its own. ``replica``: the index of this rank among them, and their
    number. ``exchange``: sends an object to all of them, -> what each has sent, by index."""
    rank, ranks = replica
    if ranks == 1:
        return None
    rows = passages(slots, layout.block_bytes)[-1].stop * layout.parts
    shared = share_rows(rows, layout.part_bytes, rank, ranks, exchange)
    if shared is None:
        log.warning(
            "kvstore: the %d ranks with the same part of every block cannot share host memory (they are on several "
            "hosts or in several containers, or there is no memfd), so each reads all blocks for itself and has a pool "
            "of its own",
            ranks,
        )
        return None
    shared.pool = layout.locked(shared.pool)
    return SharedPool(shared, slots, layout)


class Passages:
    """Which load has which passage: the scheduler's side. Not thread-safe."""

    def __init__(self, there: bool) -> None:
        """there: whether any ranks share a pool. If not, loads go on at once."""
        self._there = there
        self._free = {False: list(range(PASSAGES)), True: list(range(PASSAGES, PASSAGES + WAITING_PASSAGES))}
        self._held: dict[str, int] = {}  # request -> its load's passage
        self._since: dict[str, float] = {}  # request -> since when its load waits
        self._number = 0

    @property
    def under_way(self) -> int:
        return len(self._held) + len(self._since)

    @property
    def last(self) -> int:
        """The number of the last load that went to the workers."""
        return self._number

    def admit(self, loads: Sequence[Load]) -> tuple[list[Load], list[Load]]:
        """-> the loads that go to the workers now, and those that wait for a passage. A load whose time is over does
        not wait."""
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
        """All ranks have ended the load of this request."""
        passage = self._held.pop(request_id, None)
        if passage is not None:
            self._free[passage >= PASSAGES].append(passage)
