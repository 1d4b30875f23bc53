"""The scrubber: reads the blocks on disk one after the other, and drops damaged blocks.

It works in the background, pass after pass, at the rate that the operator sets (`--scrub-mbps`, `kvstore config set`).
`kvstore verify --endpoint` requests one pass that runs as fast as the disk allows in addition to the clients' reads.
Only one read of the scrubber is in flight at a time.
"""

from __future__ import annotations

import logging
import mmap
from functools import partial
from typing import Final

import numpy as np

from kvstore._index import BlockIndex
from kvstore.disk.fetching import Answers, Fetching
from kvstore.disk.segments import CORRUPT
from kvstore.disk.volume import Volume
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.tier import Slots

log = logging.getLogger("kvstore.disk")

SCRUB_BATCH_BYTES: Final = 4 << 20


class Scrubbing:
    """The passes over all blocks on disk. Used by the loop's thread only."""

    def __init__(self, volume: Volume, fetching: Fetching, bytes_per_s: int) -> None:
        self._volume = volume
        self._fetching = fetching
        self._bytes_per_s = bytes_per_s
        self._rest: list[tuple[DiskBlocks, Slots]] | None = None  # left to read in this pass; None: no pass is running
        self._scratch: mmap.mmap | None = None
        self._next_at = 0.0
        self._reading = False
        self._asked = False
        self.passes = 0  # the number of complete passes
        self.blocks = self.bytes = self.corrupt = 0

    @property
    def running(self) -> bool:
        """True if a pass is in progress."""
        return self._rest is not None

    def set_rate(self, bytes_per_s: int) -> None:
        """Work at this rate from now on. With 0, end the pass in progress, unless it was requested."""
        self._bytes_per_s = bytes_per_s
        self._next_at = 0.0  # the rate before may have set a time that is far away
        if not (bytes_per_s or self._asked):
            self._rest = None

    def ask(self) -> int:
        """Make one complete pass now, at full speed. If a requested pass is already in progress, it goes on instead.

        Return the value that `passes` will have when that pass is complete.
        """
        if not self._asked:
            self._asked = True
            self._rest = None  # start again, so that the pass is complete
        return self.passes + 1

    def pump(self, now: float) -> None:
        """Start to read the next blocks if their time has come. `now`: monotonic seconds."""
        if self._reading or not (self._asked or self._bytes_per_s) or (now < self._next_at and not self._asked):
            return
        if self._rest is None:
            self._rest = [(member, member.index.ready_slots()) for member in self._volume.members.members]
        while self._rest:
            member, slots = self._rest.pop()
            count = max(1, SCRUB_BATCH_BYTES // member.block_bytes)
            if len(slots) > count:
                self._rest.append((member, slots[count:]))
            slots = slots[:count]
            slots = slots[member.index.states_of(slots) == BlockIndex.READY]
            # Each read is of one file, so take the rows of the batch's first segment and put the others back.
            for segment, rows in member.by_segment(slots):
                if len(rows) < len(slots):
                    self._rest.append((member, np.delete(slots, rows)))
                self._read(member, segment, slots[rows], now)
                return
        self._end_pass(now)

    def _read(self, member: DiskBlocks, segment: int, slots: Slots, now: float) -> None:
        volume, size = self._volume, member.block_bytes
        if self._scratch is None or len(self._scratch) < len(slots) * size:
            self._scratch = mmap.mmap(-1, max(SCRUB_BATCH_BYTES, len(slots) * size))
        self._reading = True
        self._next_at = now + len(slots) * size / self._bytes_per_s if self._bytes_per_s else now
        member.index.acquire_slot(slots)
        volume.background.submit(
            volume.jobs.reading(member, segment, slots, self._scratch, np.arange(len(slots), dtype=np.int64) * size),
            partial(self._checked, member, slots),
        )

    def _checked(self, member: DiskBlocks, slots: Slots, status: Answers | OSError) -> None:
        self._reading = False
        if isinstance(status, OSError):
            self._volume.fail(status)
        else:
            self.blocks += len(slots)
            self.bytes += len(slots) * member.block_bytes
            before = self._fetching.corrupt
            self._fetching.drop_corrupt(member, slots[status == CORRUPT])
            self.corrupt += self._fetching.corrupt - before
            if (status > 0).any():
                self._volume.fail_with(int(status.max()))
        member.index.release(slots)

    def _end_pass(self, now: float) -> None:
        self.passes += 1
        self._rest = None
        self._asked = False
        self._scratch = None
        self._next_at = max(self._next_at, now + 1.0)
        log.info("disk: scrubbed %d blocks, %d of them damaged, in %d passes", self.blocks, self.corrupt, self.passes)
