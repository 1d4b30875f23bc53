"""The disk tier of one shard: what it holds, how it comes back after a restart, and how it ends when the disk fails.

The index of what lies on disk is in memory, like that of the arena; the keeper (`kvstore.disk.keeper`) writes it to
disk, a quarter of a second late at most. Data and index need no order on disk: an entry whose bytes are not there
fails its checksum and is a miss. What must not come back are blocks that were deleted or replaced: the reply to such a
request waits until the keeper has committed it (`after_removals`).

A tier is *recovering* until the keeper has told all of the old index: it answers nothing and writes nothing so long;
then it is *on*. Any error of the disk turns it *off*, for good, with one line of log: the shard serves from memory.

One thread, the shard's loop, uses all of this; it blocks in `close` only.
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
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockIndex
from kvstore.disk.fetching import Fetching
from kvstore.disk.format import INDEX, SEGMENTS, DiskFormatError, lock_shard
from kvstore.disk.keeper import Keeper
from kvstore.disk.messages import Committed, Event, KeeperFailed, NamespaceFound, Recovered, RecoveryDone
from kvstore.disk.namespace import DiskNamespace
from kvstore.disk.recovery import Recovery, WarmStart
from kvstore.disk.scrubbing import Scrubbing
from kvstore.disk.segments import SegmentFiles
from kvstore.disk.threads import Completions, Pool
from kvstore.disk.writing import Writing
from kvstore.tier import Tier
from kvstore.wire import DiskInfo

if TYPE_CHECKING:
    from kvstore.config import DiskConfig
    from kvstore.disk.entries import Entries
    from kvstore.store import Store

log = logging.getLogger("kvstore.disk")

READ_THREADS: Final = 4
WRITE_THREADS: Final = 2
RECENCY_S: Final = 60.0  # how often the persistent index learns what was used
RECENCY_BATCH: Final = 8192
KEEPER_STOP_S: Final = 60.0
STALL_S: Final = 30.0
MIN_MAP_BYTES: Final = 16 << 20
# What the persistent index takes on disk, at most: of an entry, and of an empty one. An entry is its key, 50 bytes and
# a node's header; pages are half full at worst, and a commit copies pages before the old ones are free.
ENTRY_BYTES: Final = 66
INDEX_FACTOR: Final = 4
EMPTY_INDEX_BYTES: Final = 256 << 10


class State(enum.Enum):
    """Whether the tier answers."""

    RECOVERING = "recovering"
    ON = "on"
    OFF = "off"


class DiskTier:
    """One shard's blocks on disk."""

    def __init__(self, store: Store, config: DiskConfig, poll: select.epoll) -> None:
        self.store = store
        self.config = config
        self.state = State.RECOVERING
        self.reason = ""  # why it is off
        self.directory = Path(config.directory)
        self.segments = SegmentFiles(
            self.directory / SEGMENTS, config.segment_bytes, config.limit_bytes // config.segment_bytes
        )
        self.members: Tier[DiskNamespace] = Tier(self.segments, self._may_grow)
        self.completions = Completions()
        self.reads = Pool("disk-read", READ_THREADS, self.completions)
        self.writes = Pool("disk-write", WRITE_THREADS, self.completions)
        self.background = Pool("disk-scrub", 1, self.completions)
        self.fetching = Fetching(self)
        self.writing = Writing(self, config.write)
        self.scrubbing = Scrubbing(self, config.scrub_bytes_per_s)
        self._poll = poll
        self._poll.register(self.completions.fileno(), select.EPOLLIN)
        self._recovery: Recovery | None = Recovery(self)
        self._warm_start: WarmStart | None = None
        self._recovered = 0
        self._recovery_s = 0.0
        self._removed_early: list[tuple[DiskNamespace, bytes]] = []  # while recovering
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # for a commit, by sequence
        self._waiting_early: list[Callable[[], None]] = []  # while recovering
        self._removal = self._committed = self._sequence = 0  # of the keeper's operations
        self._uncommitted_since: float | None = None
        self._recency_at = 0.0
        self._recency_tick = 0
        self._recency_rest: list[tuple[DiskNamespace, npt.NDArray[np.int32]]] = []
        self._clock_offset = time.time() - time.monotonic()
        self._index_discarded = False
        self._lock_fd = -1
        self._keeper: Keeper | None = None
        try:
            self._lock_fd = lock_shard(self.directory)
            self.segments.open()
            self._start_keeper(fresh=False)
        except (OSError, DiskFormatError) as error:
            self.fail(error)

    def _start_keeper(self, fresh: bool) -> None:
        map_bytes = max(self.config.limit_bytes, MIN_MAP_BYTES)
        self._keeper = Keeper(self.directory, fresh=fresh, lock_fd=self._lock_fd, map_bytes=map_bytes)
        self._poll.register(self._keeper.fileno(), select.EPOLLIN)

    @property
    def keeper(self) -> Keeper:
        """While the tier is not off."""
        assert self._keeper is not None
        return self._keeper

    # ---- the loop ------------------------------------------------------------------------------------------------

    def on_event(self, fd: int, event: int) -> bool:
        """Whether the event was this tier's, and then it is dealt with."""
        if fd == self.completions.fileno():
            self.completions.run()
            return True
        if self.off or fd != self.keeper.fileno():
            return False
        if event & select.EPOLLOUT:
            self.keeper.on_writable()
        if event & ~select.EPOLLOUT:
            for told in self.keeper.on_readable():
                self._on_keeper(told)
        return True

    def pump(self, now: float, quiet_since: float, hurry: bool) -> None:
        """Begin what there is to do: once a turn of the loop. `hurry`: clients are gone, do not wait."""
        if self._recovery is not None and self._recovery.step():
            self._turn_on(self._recovery)
        if not self.on:
            return
        self._check_progress(now)
        if not self.on:
            return
        self.writing.pump(now, quiet_since, hurry)
        if not hurry:
            if self._warm_start is not None and self._warm_start.pump(now):
                self._warm_start = None
            self.scrubbing.pump(now)
            self._record_recency(now)
        if self.on:
            events = select.EPOLLIN | (select.EPOLLOUT if self.keeper.wants_write else 0)
            self._poll.modify(self.keeper.fileno(), events)

    def _check_progress(self, now: float) -> None:
        """A disk that hangs has failed: what waits for it would wait for its deadline, request after request."""
        if any(pool.stalled(now, STALL_S) for pool in (self.reads, self.writes, self.background)):
            self.fail(OSError(f"a read or write took longer than {STALL_S:g} s"))
        elif self._uncommitted_since is not None and now - self._uncommitted_since > STALL_S:
            self.fail(OSError(f"the index was not committed for {STALL_S:g} s"))

    @property
    def working(self) -> bool:
        """There is work that waits for its time: the loop must look at it often."""
        return not self.writing.idle or self._warm_start is not None or self.scrubbing.running

    @property
    def restless(self) -> bool:
        """There is work that no event announces: the loop must not sleep."""
        return self._recovery is not None and self._recovery.ready

    def _on_keeper(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._committed = event.sequence
            self._uncommitted_since = None if event.sequence >= self._sequence else time.monotonic()
            while self._waiting and self._waiting[0][0] <= self._committed:
                self._waiting.popleft()[1]()
        elif isinstance(event, KeeperFailed):
            self._on_keeper_failed(event.message)
        elif self._recovery is not None:
            if isinstance(event, NamespaceFound):
                self._recovery.found(event)
            elif isinstance(event, Recovered):
                self._recovery.add(event)
            elif isinstance(event, RecoveryDone):
                if event.bad_entries or event.damage:
                    log.error("disk: the index was damaged: %d entries dropped %s", event.bad_entries, event.damage)
                self._recovery.complete()

    def _on_keeper_failed(self, message: str) -> None:
        if self._recovery is None or self._recovery.rewrite:
            self.fail(OSError(f"the index: {message}"))
            return
        log.error("disk: the index could not be read to its end, what was read so far is kept: %s", message)
        self.keeper.kill()
        self._start_keeper(fresh=True)
        self._recovery.rewrite = True
        for member in self.members.members:
            member.ordinal = None
        if not self._recovery.ready:
            self._recovery.complete()

    def _turn_on(self, recovery: Recovery) -> None:
        self._recovery = None
        self.state = State.ON
        self._recovered = recovery.blocks
        self._recovery_s = time.monotonic() - recovery.started
        log.info("disk: %d blocks recovered in %.2f s, %d lost", recovery.blocks, self._recovery_s, recovery.lost)
        self._recency_tick = self.store.ticks(1)
        for member, keys in self._removed_early:
            member.delete(keys)
        self._removed_early.clear()
        waiting, self._waiting_early = self._waiting_early, []
        for call in waiting:
            self.after_removals(call)
        if recovery.blocks and self.config.warm_start:
            self._warm_start = WarmStart(self)

    # ---- what the store asks -------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Blocks can be read and written."""
        return self.state is State.ON

    @property
    def recovering(self) -> bool:
        """It is not known yet what is there."""
        return self.state is State.RECOVERING

    @property
    def off(self) -> bool:
        """The disk has failed."""
        return self.state is State.OFF

    @property
    def index_bytes(self) -> int:
        """Memory of the indexes of what is on disk."""
        return self.members.index_bytes

    def open(self, canonical: bytes, key_bytes: int, block_bytes: int) -> DiskNamespace | None:
        """A new namespace's place on disk; None when there is none for its blocks."""
        if block_bytes > self.config.segment_bytes:
            log.warning(
                "disk: blocks of %d bytes stay in memory: a segment on disk has %d bytes; use a larger --disk-size",
                block_bytes,
                self.config.segment_bytes,
            )
            return None
        index = BlockIndex(key_bytes, self.config.segment_bytes // block_bytes, self.store.policy)
        member = DiskNamespace(self, canonical, block_bytes, index)
        self.members.members.append(member)
        return member

    def forget(self, member: DiskNamespace) -> None:
        """The namespace is gone."""
        self.members.remove(member)
        if self.on and member.ordinal is not None:
            self.keeper.forget_namespace(member.ordinal)

    def _may_grow(self, member: DiskNamespace, now: float) -> bool:
        segments = max(self.segments.made, self.segments.segments - self.segments.free + 1)
        slots = member.index.slots_per_segment * (member.index.key_bytes + ENTRY_BYTES)
        for other in self.members.members:
            slots += other.index.slots * (other.index.key_bytes + ENTRY_BYTES)
        bytes_after = segments * self.config.segment_bytes + slots * INDEX_FACTOR + EMPTY_INDEX_BYTES
        return bytes_after <= self.config.limit_bytes and self.store.disk_may_grow(member, now)

    def make_room(self, member: DiskNamespace, wanted: int, now: float) -> None:
        """See that `member` has `wanted` free slots on disk, as far as that goes."""
        try:
            self.members.make_room(member, wanted, now)
        except OSError as error:
            self.fail(error)

    def open_file(self, segment: int, direct: bool) -> int | None:
        """A segment's descriptor; None: the disk has failed."""
        try:
            return self.segments.open_file(segment, direct)
        except OSError as error:
            self.fail(error)
            return None

    def wall_clock(self, expires: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
        """Monotonic times, 0 for never, as seconds of the wall clock."""
        return np.where(expires > 0, np.ceil(expires + self._clock_offset), 0).astype(np.uint32)

    def monotonic(self, expires: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
        """The reverse."""
        return np.where(expires > 0, np.maximum(expires - self._clock_offset, 0.125), 0.0)

    # ---- the persistent index ------------------------------------------------------------------------------------

    @property
    def keeper_backlog_bytes(self) -> int:
        """What the keeper has not taken yet."""
        return self.keeper.backlog_bytes

    def record(self, member: DiskNamespace, keys: bytes, entries: Entries) -> None:
        """Blocks are on disk now."""
        if not self.off and keys:
            self._sent(self.keeper.put(self._ordinal(member), keys, entries))

    def record_evicted(self, member: DiskNamespace, keys: bytes) -> int:
        """Blocks are on disk no longer. -> the keeper's sequence number; 0 when it is not told."""
        if not self.on or not keys:
            return 0
        return self._sent(self.keeper.delete(self._ordinal(member), keys))

    def _sent(self, sequence: int) -> int:
        self._sequence = sequence
        if self._uncommitted_since is None:
            self._uncommitted_since = time.monotonic()
        return sequence

    def record_deleted(self, member: DiskNamespace, keys: bytes) -> None:
        """Blocks were deleted or replaced: they must not come back."""
        if self.recovering:
            self._removed_early.append((member, keys))
        else:
            self._removal = max(self._removal, self.record_evicted(member, keys))

    def _ordinal(self, member: DiskNamespace) -> int:
        if member.ordinal is None:
            member.ordinal = self.keeper.open_namespace(member.canonical, member.index.key_bytes)
        return member.ordinal

    def after_removals(self, call: Callable[[], None]) -> None:
        """Call it once nothing that was deleted so far can come back, not even after a crash."""
        if self.recovering:
            self._waiting_early.append(call)
        elif self.on and self._removal > self._committed:
            self.keeper.sync()
            self._waiting.append((self._removal, call))
        else:
            if not self.on:
                self._discard_index()
            call()

    def _discard_index(self) -> None:
        """The index can be changed no more, and says more than is true: after a restart nobody may believe it."""
        if self._index_discarded:
            return
        self._index_discarded = True
        try:
            for name in os.listdir(self.directory / INDEX):
                os.unlink(self.directory / INDEX / name)
            log.error("disk: blocks were deleted while the tier is off; its index was removed, it will start empty")
        except OSError as error:
            log.error("disk: blocks deleted while the tier is off may come back after a restart: %s", error)

    def _record_recency(self, now: float) -> None:
        """From time to time, tell the persistent index what was used since the last time."""
        if self._recency_rest:
            if self.keeper.backlog_bytes:
                return
            member, slots = self._recency_rest.pop()
            if len(slots) > RECENCY_BATCH:
                self._recency_rest.append((member, slots[RECENCY_BATCH:]))
            slots = slots[:RECENCY_BATCH]
            slots = slots[member.index.states_of(slots) == BlockIndex.READY]
            self.record(member, member.index.keys_of(slots), member.entries(slots))
        elif now > self._recency_at + RECENCY_S:
            self._recency_at = now
            self._recency_rest = self._used()

    def _used(self) -> list[tuple[DiskNamespace, npt.NDArray[np.int32]]]:
        since, self._recency_tick = self._recency_tick, self.store.ticks(1)
        used = [(member, member.index.ready_slots(since)) for member in self.members.members]
        return [(member, slots) for member, slots in used if len(slots)]

    # ---- the end -------------------------------------------------------------------------------------------------

    def fail(self, error: OSError | DiskFormatError) -> None:
        """The disk does not do its work: go on without it."""
        if self.off:
            return
        self.state = State.OFF
        self.reason = str(error)
        log.error(
            "disk tier %s is off: %s; serving goes on from memory; repair the disk, then restart the server",
            self.directory,
            error,
        )
        self._recovery = self._warm_start = None
        if self._keeper is not None:
            with contextlib.suppress(OSError, ValueError):  # it may have closed its socket itself
                self._poll.unregister(self._keeper.fileno())
            self._keeper.kill()
        self.writing.give_up()
        for member in self.members.members:
            member.index.clear()
        waiting = [call for _, call in self._waiting] + self._waiting_early
        self._waiting.clear()
        self._waiting_early.clear()
        for call in waiting:
            self.after_removals(call)
        self.fetching.wake()

    def fail_with(self, code: int) -> None:
        """`fail` for an errno."""
        self.fail(OSError(code, os.strerror(code)))

    def finish(self, now: float) -> None:
        """No client is left: what is only in memory goes to disk. `finished` says when it is there."""
        if self.on:
            self.writing.add_all(now)
            if self.writing.dirty_bytes:
                log.info("disk: writing %d blocks before the end", self.writing.dirty_blocks)

    @property
    def finished(self) -> bool:
        """Nothing is left to be written (or it cannot be)."""
        return self.off or (self.on and self.writing.idle)

    def close(self) -> None:
        """Blocking: everything is on the device, the keeper and all threads gone."""
        if not self.off:  # a disk that failed may hold its threads for ever
            for pool in (self.reads, self.writes, self.background):
                pool.close()
            self.completions.run()
        if self.on:
            try:
                self.segments.sync()
            except OSError as error:
                self.fail(error)
        if self.on:
            for member, slots in self._used():
                self.record(member, member.index.keys_of(slots), member.entries(slots))
            if not self.keeper.stop(KEEPER_STOP_S):
                log.error("disk: the index could not be written to its end")
        elif self.recovering:
            self.keeper.kill()

    def info(self) -> DiskInfo:
        """What the tier holds and did."""
        fetching, writing, scrubbing = self.fetching, self.writing, self.scrubbing
        members = self.members.members
        return DiskInfo(
            directory=str(self.directory),
            state=self.state.value,
            reason=self.reason,
            limit_bytes=self.config.limit_bytes,
            used_bytes=self.segments.used_bytes,
            segment_bytes=self.config.segment_bytes,
            segments_free=self.segments.free,
            blocks=sum(member.index.ready for member in members),
            evicted=sum(member.evicted for member in members),
            dirty_blocks=writing.dirty_blocks,
            dirty_bytes=writing.dirty_bytes,
            behind=writing.behind,
            written_blocks=writing.blocks,
            written_bytes=writing.bytes,
            skipped_blocks=writing.skipped,
            fetched_blocks=fetching.blocks,
            fetched_bytes=fetching.bytes,
            corrupt_blocks=fetching.corrupt,
            recovered_blocks=self._recovered,
            recovery_s=self._recovery_s,
            warming=self._warm_start is not None,
            scrub_passes=scrubbing.passes,
            scrubbing=scrubbing.running,
            scrubbed_blocks=scrubbing.blocks,
            scrubbed_bytes=scrubbing.bytes,
            scrub_corrupt_blocks=scrubbing.corrupt,
        )
