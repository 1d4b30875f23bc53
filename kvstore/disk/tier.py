"""The disk tier of one shard: what it does with its volume, turn by turn of the loop.

A tier is *recovering* until the keeper has told all of the old index and all of it is in this run's: so long it writes
nothing, and answers for what is in already. Then it is *on*: it fetches what is wanted, writes what is dirty, scrubs,
and brings the hottest blocks of an earlier run to memory. When the volume fails it is *off*, for good: the shard serves
from memory.

One thread, the shard's loop, uses all of this; it blocks in `close` only.
"""

from __future__ import annotations

import logging
import select
import time
from typing import TYPE_CHECKING, Final

from kvstore._cext import BlockIndex
from kvstore.disk.fetching import Fetching
from kvstore.disk.format import DiskFormatError
from kvstore.disk.messages import Committed, Event, KeeperFailed, NamespaceFound, Recovered, RecoveryDone
from kvstore.disk.namespace import DiskNamespace
from kvstore.disk.recovery import Recovery, WarmStart
from kvstore.disk.scrubbing import Scrubbing
from kvstore.disk.volume import Volume
from kvstore.disk.writing import Writing
from kvstore.store.namespaces import Store
from kvstore.store.tier import Slots
from kvstore.wire import DiskInfo

if TYPE_CHECKING:
    from kvstore.disk.config import DiskConfig

log = logging.getLogger("kvstore.disk")

RECENCY_S: Final = 60.0  # how often the persistent index learns what was used
RECENCY_BATCH: Final = 8192
KEEPER_STOP_S: Final = 60.0


class DiskTier(Volume):
    """One shard's blocks on disk."""

    def __init__(self, store: Store, config: DiskConfig, poll: select.epoll) -> None:
        super().__init__(store, config, poll)
        self.writing = Writing(self, config.write)
        self.fetching = Fetching(self, self.writing)
        self.scrubbing = Scrubbing(self, self.fetching, config.scrub_bytes_per_s)
        self._recovery: Recovery | None = Recovery(self)
        self._warm_start: WarmStart | None = None
        self._recovered = self._lost = 0
        self._recovery_s = 0.0
        self._finishing = False
        self._recency_at = 0.0
        self._recency_tick = 0
        self._recency_rest: list[tuple[DiskNamespace, Slots]] = []
        self.take()

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
        self.check_progress(now)
        if not self.on:
            return
        self.writing.pump(now, quiet_since, hurry)
        if not self.on:
            return
        if self.fetching.starved and self.writing.idle:
            self.fetching.wake()
        if not hurry:
            if self._warm_start is not None and self._warm_start.pump(now):
                self._warm_start = None
            self.scrubbing.pump(now)
            self._record_recency(now)
        if self.on:
            self.watch_keeper()

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
            self.committed(event.sequence)
        elif isinstance(event, KeeperFailed):
            self._on_keeper_failed(event.message)
        elif self._recovery is not None:
            if isinstance(event, NamespaceFound):
                self._recovery.found(event)
            elif isinstance(event, Recovered):
                self._recovery.add(event)
            elif isinstance(event, RecoveryDone):
                self._recovery.lost += event.bad_entries
                if event.bad_entries or event.damage:
                    log.error("disk: the index was damaged: %d entries dropped %s", event.bad_entries, event.damage)
                self._recovery.complete()

    def _on_keeper_failed(self, message: str) -> None:
        if self._recovery is None or self._recovery.rewrite:
            self.fail(OSError(f"the index: {message}"))
            return
        log.error("disk: the index could not be read to its end, what was read so far is kept: %s", message)
        try:
            self.start_keeper(fresh=True)
        except OSError as error:
            self.fail(error)
            return
        self._recovery.rewrite = True
        if not self._recovery.ready:
            self._recovery.complete()

    def _turn_on(self, recovery: Recovery) -> None:
        self._recovery = None
        self._recovered, self._lost = recovery.blocks, recovery.lost
        self._recovery_s = time.monotonic() - recovery.started
        if recovery.refused:
            log.warning("disk: blocks of some namespaces cannot be kept and were dropped: %s", recovery.refused)
        log.info("disk: %d blocks recovered in %.2f s, %d lost", recovery.blocks, self._recovery_s, recovery.lost)
        self._recency_tick = self.store.ticks(1)
        self.turned_on()
        if self._finishing:
            self.writing.add_all(time.monotonic())
        elif self.on and recovery.blocks and self.config.warm_start:
            self._warm_start = WarmStart(self, self.fetching)

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

    def _used(self) -> list[tuple[DiskNamespace, Slots]]:
        since, self._recency_tick = self._recency_tick, self.store.ticks(1)
        used = [(member, member.index.ready_slots(since)) for member in self.members.members]
        return [(member, slots) for member, slots in used if len(slots)]

    # ---- the end -------------------------------------------------------------------------------------------------

    def fail(self, error: OSError | DiskFormatError) -> None:
        """The disk does not do its work: go on without it."""
        if not self.off:
            super().fail(error)
            self._recovery = self._warm_start = None
            self.writing.give_up()
            self.fetching.give_up()

    def finish(self, now: float) -> None:
        """No client is left: what is only in memory goes to disk. `finished` says when it is there."""
        self._finishing = True
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
            lost_blocks=self._lost,
            recovery_s=self._recovery_s,
            warming=self._warm_start is not None,
            scrub_passes=scrubbing.passes,
            scrubbing=scrubbing.running,
            scrubbed_blocks=scrubbing.blocks,
            scrubbed_bytes=scrubbing.bytes,
            scrub_corrupt_blocks=scrubbing.corrupt,
        )
