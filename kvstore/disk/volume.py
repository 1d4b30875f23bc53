"""The disk of one shard, shared by all parts of its tier: files, thread pools, the keeper of the index, and the state.

Blocks and index entries may reach the disk in any order, because a block whose bytes are missing fails its checksum and
is a miss. Deleted and replaced blocks must not come back. So the reply to a request that removes blocks waits until the
keeper has committed the removal (`after_removals`). If the file system is full, the volume is *out of space* until
there is room. Blocks are then read but not written, and there is no keeper. Any other error of the disk turns the
volume off until the process ends.

Over 400 lines because the parts share one state: every call below depends on it or changes it.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.disk.config import DiskConfig
from kvstore.disk.discarding import Discarding
from kvstore.disk.entries import ENTRY, Entries
from kvstore.disk.format import NO_SPACE, DiskFormatError, lock_shard
from kvstore.disk.jobs import BlockJobs
from kvstore.disk.keeper import Keeper
from kvstore.disk.segments import SegmentFiles
from kvstore.disk.threads import Completions, IoThreads
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespaces import ShardStore
from kvstore.store.tier import Slots, Tier, keys_before
from kvstore.wire.attributes import names_of

log = logging.getLogger("kvstore.disk")

READ_THREADS: Final = 4
WRITE_THREADS: Final = 2
MIN_MAP_BYTES: Final = 16 << 20
DISK_STALL_S: Final = 30.0
# The most bytes that the persistent index takes on disk: `(key + ENTRY_BYTES) * INDEX_FACTOR` for each entry, plus
# `EMPTY_INDEX_BYTES`. An entry is its key, 50 bytes and a node's header. The factor allows for pages that are only half
# full, and for commits, which copy pages before the old pages are free.
ENTRY_BYTES: Final = 66
INDEX_FACTOR: Final = 6
EMPTY_INDEX_BYTES: Final = 1 << 20
# With very small blocks, the rest of a segment stays empty, because an index grows by all slots of a segment at once.
MAX_DISK_SEGMENT_SLOTS: Final = 1 << 19
MAX_SEGMENT_INDEX_SHARE: Final = 1 / 16  # the entries of one segment may take this share of the disk limit


def _entry_bytes(key_bytes: int) -> int:
    """Return the most bytes that a slot takes in the persistent index."""
    return (key_bytes + ENTRY_BYTES) * INDEX_FACTOR


class DiskState(enum.Enum):
    """The state of a disk tier; the module docstring of `tier` describes the states."""

    RECOVERING = "recovering"
    ON = "on"
    OUT_OF_SPACE = "out of space"
    OFF = "off"


class Volume:
    """One shard's folder. Call `take` before any other method.

    on_stop: a function that is called when the volume has turned itself off, and when it has run out of space.
    """

    def __init__(self, store: ShardStore, config: DiskConfig, poll: select.epoll, on_stop: Callable[[], None]) -> None:
        self.store = store
        self._on_stop = on_stop
        self.config = config
        self.state = DiskState.RECOVERING
        self.reason = ""  # why the volume is off or out of space
        self._full: OSError | None = None  # why it is out of space when recovery has ended
        self.directory = Path(config.directory)
        self.segments = SegmentFiles(self.directory, config.segment_bytes, config.limit_bytes // config.segment_bytes)
        self.jobs = BlockJobs(self.segments, config.key)
        self.members: Tier[DiskBlocks] = Tier(self.segments, self._may_grow)
        self.completions = Completions()
        self.reads = IoThreads("disk-read", READ_THREADS, self.completions)
        self.writes = IoThreads("disk-write", WRITE_THREADS, self.completions)
        self.background = IoThreads("disk-scrub", 1, self.completions)
        self._poll = poll
        self._poll.register(self.completions.fileno(), select.EPOLLIN)
        self._removed_early: list[tuple[DiskBlocks, bytes]] = []  # keys removed during recovery
        # Functions from `after_removals`, which wait for the commit of a sequence number, and for the end of recovery.
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting_early: list[Callable[[], None]] = []
        self._discarding = Discarding(self.directory, self.completions)
        # Sequence numbers of the keeper's operations: the last removal, the last committed one and the last one sent.
        self._removal = self._committed = self._sequence = 0
        self._uncommitted_since: float | None = None
        self._clock_offset = time.time() - time.monotonic()
        self._lock_fd = -1
        self._keeper: Keeper | None = None

    def take(self) -> None:
        """Lock the folder and start its keeper, which recovers the index. On failure the volume is off."""
        try:
            self._lock_fd = lock_shard(self.directory)
            self.segments.open()
            self.start_keeper(fresh=False)
        except (OSError, DiskFormatError) as error:
            self.fail(error)

    def start_keeper(self, fresh: bool) -> None:
        """Start a keeper in place of the present one, if any. `fresh`: start with an empty index and no namespaces."""
        if self._keeper is not None:
            self._keeper.kill()
        self._removal = self._committed = self._sequence = 0
        self._uncommitted_since = None
        map_bytes = max(self.config.limit_bytes, MIN_MAP_BYTES)
        self._keeper = Keeper(self.directory, fresh=fresh, lock_fd=self._lock_fd, map_bytes=map_bytes)
        self._poll.register(self._keeper.fileno(), select.EPOLLIN)

    @property
    def keeper(self) -> Keeper:
        """The present keeper. Only valid while the tier is not off."""
        assert self._keeper is not None
        return self._keeper

    def watch_keeper(self) -> None:
        """Poll the keeper's socket for reading, and for writing while operations are queued."""
        self._poll.modify(self.keeper.fileno(), select.EPOLLIN | (select.EPOLLOUT if self.keeper.wants_write else 0))

    def turned_on(self) -> None:
        """End recovery: carry out the removals that were requested during it."""
        self.state = DiskState.ON
        self._uncommitted_since = None
        if self._full is not None:
            self.run_out(self._full)
        for member in self.members.members:
            member.recovering = False
        self._shrink(time.monotonic())
        for member, keys in self._removed_early:
            member.delete(keys)
        self._removed_early.clear()
        waiting, self._waiting_early = self._waiting_early, []
        for call in waiting:
            self.after_removals(call)

    @property
    def on(self) -> bool:
        """True if blocks can be read and written."""
        return self.state is DiskState.ON

    @property
    def out_of_space(self) -> bool:
        """True if blocks can be read, but not written until the file system has room again."""
        return self.state is DiskState.OUT_OF_SPACE

    @property
    def readable(self) -> bool:
        """True if all blocks on disk are known and can be read."""
        return self.on or self.out_of_space

    @property
    def takes_blocks(self) -> bool:
        """True if new blocks are written to disk, now or after recovery."""
        return self.on or self.recovering

    @property
    def recovering(self) -> bool:
        """True while the old index is not completely known yet."""
        return self.state is DiskState.RECOVERING

    @property
    def off(self) -> bool:
        """True if the disk has failed."""
        return self.state is DiskState.OFF

    # ---- calls of the store --------------------------------------------------------------------------------------

    def open(self, canonical: bytes, key_bytes: int, block_bytes: int) -> DiskBlocks | None:
        """Return an empty `DiskBlocks` for a new namespace, or None when its blocks are larger than a segment."""
        seal = self.jobs.seal_of(canonical, key_bytes, block_bytes)
        slot_bytes = block_bytes if seal is None else seal.slot_bytes
        if slot_bytes > self.config.segment_bytes:
            log.warning(
                "disk: blocks of %d bytes stay in memory: a segment on disk has only %d; use a larger --disk-size",
                slot_bytes,
                self.config.segment_bytes,
            )
            return None
        slots = min(
            self.config.segment_bytes // slot_bytes,
            MAX_DISK_SEGMENT_SLOTS,
            max(1, int(self.config.limit_bytes * MAX_SEGMENT_INDEX_SHARE) // _entry_bytes(key_bytes)),
        )
        index = BlockIndex(key_bytes, slots, self.store.policy)
        member = DiskBlocks(self.segments, canonical, block_bytes, slot_bytes, index, self._record_removed)
        member.recovering = self.recovering
        if seal is not None:
            self.jobs.seals[member] = seal
        self.members.members.append(member)
        return member

    def forget(self, member: DiskBlocks) -> None:
        """Give back the segments of a namespace that is gone, and make the keeper forget the namespace."""
        self.members.remove(member)
        self.jobs.seals.pop(member, None)
        if self.on:
            member.remove_lapsed()
            self.keeper.forget_namespace(member.canonical)

    def keep_replicas(self, member: DiskBlocks, replicas: int) -> None:
        """Record the number of copies of the namespace's blocks, so that after a restart the shard knows this number
        even without a client."""
        member.replicas = replicas
        if self.on and member.index.ready:  # otherwise the keeper gets the number with the first block that is written
            self._ordinal(member)

    # ---- space and files -----------------------------------------------------------------------------------------

    def _may_grow(self, member: DiskBlocks, now: float) -> bool:
        segments = max(self.segments.made, self.segments.segments - self.segments.free + 1)
        more = member.index.slots_per_segment * _entry_bytes(member.index.key_bytes)
        bytes_after = segments * self.config.segment_bytes + self.index_file_bytes() + more
        return bytes_after <= self.config.limit_bytes and self.store.disk_may_grow(
            member.index.slots_per_segment, member.index.key_bytes, now
        )

    def index_file_bytes(self) -> int:
        """Return the most bytes that the persistent index takes on disk for the present namespaces."""
        indexes = [member.index for member in self.members.members]
        return EMPTY_INDEX_BYTES + sum(index.slots * _entry_bytes(index.key_bytes) for index in indexes)

    def _shrink(self, now: float) -> None:
        """Remove the least used segments while the files exceed the limit. An earlier run may have had a higher
        limit."""
        try:
            while self.segments.used_bytes + self.index_file_bytes() > self.config.limit_bytes:
                if not self.segments.remove_one() and not self.members.shrink(now):
                    break
        except OSError as error:
            self.fail(error)

    def make_room(self, member: DiskBlocks, wanted: int, now: float) -> None:
        """Free `wanted` slots of `member` on disk, or as many as possible."""
        try:
            self.members.make_room(member, wanted, now)
        except OSError as error:
            self.fail(error)

    def _wall_clock(self, expires: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
        """Convert monotonic times to seconds of the wall clock. 0 means never."""
        return np.where(expires > 0, np.ceil(expires + self._clock_offset), 0).astype(np.uint32)

    def monotonic(self, expires: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
        """Convert seconds of the wall clock to monotonic times. 0 means never."""
        return np.where(expires > 0, np.maximum(expires - self._clock_offset, 0.125), 0.0)

    # ---- the persistent index ------------------------------------------------------------------------------------

    def commit(
        self,
        member: DiskBlocks,
        slots: Slots,
        sums: npt.NDArray[np.uint64],
        expires: npt.NDArray[np.float64],
        links: tuple[bytes, bytes],
        before: npt.NDArray[np.uint8],
    ) -> None:
        """Make written slots readable, and record them in the persistent index.

        links: the blocks before and after the written ones in their chains, for `BlockIndex.link`.
        before: the keys of the blocks that the written blocks follow. These may not be on disk yet.
        """
        member.remove_lapsed()  # before the commit, because lapsed blocks may have the same keys
        member.index.commit(slots, sums, self.store.ticks(len(slots)), expires)
        member.index.link(*links)
        kept = member.index.states_of(slots) == BlockIndex.READY  # linking drops blocks that expired during the write
        self._record(member, slots[kept], before[kept])

    def record(self, member: DiskBlocks, slots: Slots) -> None:
        """Send the entries of these READY slots to the keeper."""
        self._record(member, slots, keys_before(member, slots))

    def _record(self, member: DiskBlocks, slots: Slots, before: npt.NDArray[np.uint8]) -> None:
        if self.takes_blocks and len(slots):
            keys = member.index.keys_of(slots)
            self._sent(self.keeper.put(self._ordinal(member), keys, self._entries(member, slots, before)))

    def _entries(self, member: DiskBlocks, slots: Slots, before: npt.NDArray[np.uint8]) -> Entries:
        """Return the entries for the persistent index of the blocks in READY slots."""
        index = member.index
        entries = np.zeros(len(slots), dtype=ENTRY)
        ordinals, places = np.divmod(slots, index.slots_per_segment)
        entries["segment"] = [member.segments[ordinal] for ordinal in ordinals.tolist()]
        entries["place"] = places
        entries["checksum"] = index.checksums(slots)
        entries["tick"] = index.ticks_of(slots)
        entries["expires"] = self._wall_clock(index.expires_of(slots))
        entries["priority"] = index.priorities_of(slots)
        entries["before"] = names_of(before)
        return entries

    def _record_removed(self, member: DiskBlocks, keys: bytes) -> None:
        """Delete blocks from the persistent index. During recovery, note them for later instead."""
        if self.recovering and keys:
            self._removed_early.append((member, keys))
        elif self.on and keys:
            self._removal = self._sent(self.keeper.delete(self._ordinal(member), keys))

    def _sent(self, sequence: int) -> int:
        self._sequence = sequence
        if self._uncommitted_since is None:
            self._uncommitted_since = time.monotonic()
        return sequence

    def _ordinal(self, member: DiskBlocks) -> int:
        return self.keeper.open_namespace(member.canonical, member.index.key_bytes, member.replicas)

    def after_removals(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as no block that was removed so far can come back, not even after a crash."""
        if self.recovering:
            self._waiting_early.append(call)
        elif self.on and self._removal > self._committed:
            self.keeper.sync()
            self._waiting.append((self._removal, call))
        elif self.on or self._lock_fd < 0:
            call()
        else:
            self._discarding.after(call)

    def committed(self, sequence: int) -> None:
        """Run the calls that waited for operations up to `sequence`, which the keeper has now committed."""
        self._committed = sequence
        self._uncommitted_since = None if sequence >= self._sequence else time.monotonic()
        while self._waiting and self._waiting[0][0] <= self._committed:
            self._waiting.popleft()[1]()

    # ---- the end -------------------------------------------------------------------------------------------------

    def check_progress(self, now: float) -> None:
        """Turn the volume off if the disk hangs, so that requests do not wait for the disk until their deadlines."""
        if any(pool.stalled(now, DISK_STALL_S) for pool in (self.reads, self.writes, self.background)):
            self.fail(OSError(f"a read or write took longer than {DISK_STALL_S:g} s"))
        elif self._uncommitted_since is not None and now - self._uncommitted_since > DISK_STALL_S:
            self.fail(OSError(f"the index was not committed for {DISK_STALL_S:g} s"))

    def fail(self, error: OSError | DiskFormatError) -> None:
        """Turn the volume off because of `error`. The shard goes on without it. Later calls do nothing."""
        if self.off:
            return
        if isinstance(error, OSError) and error.errno in NO_SPACE and not self.recovering:
            self.run_out(error)
            return
        self.state = DiskState.OFF
        self.reason = str(error)
        log.error(
            "disk tier %s is off: %s; blocks are served from memory only; repair the disk, then restart the server",
            self.directory,
            error,
        )
        for member in self.members.members:
            member.index.clear()
            member.recovering = False
        self._removed_early.clear()
        self._stop()

    def run_out(self, error: OSError) -> None:
        """Write no more blocks, because the file system is full, as `error` says. While the volume recovers, its keeper
        must have reported all entries. Then the volume is out of space when recovery ends."""
        if self.recovering:
            self._full = error
            self._end_keeper()
        elif self.on:
            self.state = DiskState.OUT_OF_SPACE
            self.reason = str(error)
            log.error(
                "disk tier %s is out of space: %s; its blocks are served, and none are written until there is room",
                self.directory,
                error,
            )
            self._stop()

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            with contextlib.suppress(OSError, ValueError):  # the keeper's socket may be closed already
                self._poll.unregister(self._keeper.fileno())
            self._keeper.kill()

    def _stop(self) -> None:
        """Go on without a keeper."""
        self._end_keeper()
        self._uncommitted_since = None
        waiting = [call for _, call in self._waiting] + self._waiting_early
        self._waiting.clear()
        self._waiting_early.clear()
        for call in waiting:
            self.after_removals(call)
        self._on_stop()

    def resume(self) -> bool:
        """Turn the volume on again if it is out of space. Return whether it is on. It has a fresh keeper, which must be
        told of all blocks."""
        if not self.out_of_space or self._discarding.running:  # a thread that removes the index must have ended
            return False
        try:
            self.start_keeper(fresh=True)
        except OSError as error:
            self.fail(error)
            return False
        self.state = DiskState.ON
        self.reason = ""
        self._full = None
        self._discarding.done = False
        log.warning("disk tier %s is on again: the file system has room, so blocks are written to it", self.directory)
        return True

    def fail_with(self, code: int) -> None:
        """Call `fail` with the `OSError` of an errno."""
        self.fail(OSError(code, os.strerror(code)))
