"""The disk tier of one shard: what it does with its volume, turn by turn of the loop.

A tier is *recovering* until the keeper has sent all of the old index and the new index holds it. Until then it writes
nothing, and answers for the entries that it has. Then it is *on*: it reads blocks that clients want, writes dirty
blocks, scrubs, and brings the hottest blocks of an earlier run to memory. When the volume fails the tier is *off*, for
good: the shard serves from memory.

One thread, the shard's loop, uses all of this. Only `close` blocks.
"""

from __future__ import annotations

import logging
import select
import time
from typing import TYPE_CHECKING, Final

from kvstore._cext import BlockIndex
from kvstore.disk.fetching import Fetching
from kvstore.disk.messages import Committed, Event, KeeperFailed, NamespaceFound, Recovered, RecoveryDone
from kvstore.disk.recovery import Recovery, WarmStart
from kvstore.disk.scrubbing import Scrubbing
from kvstore.disk.volume import Volume
from kvstore.disk.writing import Writing
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespaces import Disk, Store
from kvstore.store.tier import Slots
from kvstore.wire import DiskInfo

if TYPE_CHECKING:
    from kvstore.disk.config import DiskConfig

log = logging.getLogger("kvstore.disk")

RECENCY_S: Final = 60.0  # how often the persistent index learns what was used
RECENCY_BATCH: Final = 8192
KEEPER_STOP_S: Final = 60.0


class DiskTier:
    """One shard's blocks on disk. It makes itself known to `store`."""

    def __init__(self, store: Store, config: DiskConfig, poll: select.epoll) -> None:
        self.volume = volume = Volume(store, config, poll, self._on_failure)
        self.writing = Writing(volume, config.write)
        self.fetching = Fetching(volume, self.writing)
        self.scrubbing = Scrubbing(volume, self.fetching, config.scrub_bytes_per_s)
        self._config = config
        self._store = store
        self._recovery: Recovery | None = Recovery(volume)
        self._warm_start: WarmStart | None = None
        self._recovered = self._lost = 0
        self._recovery_s = 0.0
        self._finishing = False
        self._recency_at = 0.0
        self._recency_tick = 0
        self._recency_rest: list[tuple[DiskBlocks, Slots]] = []
        store.disk = Disk(volume.members, volume.open, volume.forget)
        volume.take()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def on_event(self, fd: int, event: int) -> bool:
        """Whether the event was this tier's, and then it is dealt with."""
        if fd == self.volume.completions.fileno():
            self.volume.completions.run()
            return True
        if self.volume.off or fd != self.volume.keeper.fileno():
            return False
        if event & select.EPOLLOUT:
            self.volume.keeper.on_writable()
        if event & ~select.EPOLLOUT:
            for told in self.volume.keeper.on_readable():
                self._on_keeper(told)
        return True

    def pump(self, now: float, quiet_since: float, hurry: bool) -> None:
        """Begin what there is to do: once a turn of the loop. `hurry`: clients are gone, do not wait."""
        if self._recovery is not None and self._recovery.step():
            self._turn_on(self._recovery)
        if not self.volume.on:
            return
        self.volume.check_progress(now)
        if not self.volume.on:
            return
        self.writing.pump(now, quiet_since, hurry)
        if not self.volume.on:
            return
        if self.fetching.starved and self.writing.idle:
            self.fetching.wake()
        if not hurry:
            if self._warm_start is not None and self._warm_start.pump(now):
                self._warm_start = None
            self.scrubbing.pump(now)
            self._record_recency(now)
        if self.volume.on:
            self.volume.watch_keeper()

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
            self.volume.committed(event.sequence)
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
            self.volume.fail(OSError(f"the index: {message}"))
            return
        log.error("disk: the index could not be read to its end, what was read so far is kept: %s", message)
        try:
            self.volume.start_keeper(fresh=True)
        except OSError as error:
            self.volume.fail(error)
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
        self._recency_tick = self._store.ticks(1)
        self.volume.turned_on()
        if self._finishing:
            self.writing.add_all(time.monotonic())
        elif self.volume.on and recovery.blocks and self._config.warm_start:
            self._warm_start = WarmStart(self.volume, self.fetching)

    def _record_recency(self, now: float) -> None:
        """From time to time, tell the persistent index what was used since the last time."""
        if self._recency_rest:
            if self.volume.keeper.backlog_bytes:
                return
            member, slots = self._recency_rest.pop()
            if len(slots) > RECENCY_BATCH:
                self._recency_rest.append((member, slots[RECENCY_BATCH:]))
            slots = slots[:RECENCY_BATCH]
            slots = slots[member.index.states_of(slots) == BlockIndex.READY]
            self.volume.record(member, slots)
        elif now > self._recency_at + RECENCY_S:
            self._recency_at = now
            self._recency_rest = self._used()

    def _used(self) -> list[tuple[DiskBlocks, Slots]]:
        since, self._recency_tick = self._recency_tick, self._store.ticks(1)
        used = [(member, member.index.ready_slots(since)) for member in self.volume.members.members]
        return [(member, slots) for member, slots in used if len(slots)]

    # ---- the end -------------------------------------------------------------------------------------------------

    def _on_failure(self) -> None:
        self._recovery = self._warm_start = None
        self.writing.give_up()
        self.fetching.give_up()

    def finish(self, now: float) -> None:
        """No client is left: what is only in memory goes to disk. `finished` says when it is there."""
        self._finishing = True
        if self.volume.on:
            self.writing.add_all(now)
            if self.writing.dirty_bytes:
                log.info("disk: writing %d blocks before the server stops", self.writing.dirty_blocks)

    @property
    def finished(self) -> bool:
        """Nothing is left to be written (or it cannot be)."""
        return self.volume.off or (self.volume.on and self.writing.idle)

    def close(self) -> None:
        """Blocking: everything is on the device, the keeper and all threads gone."""
        if not self.volume.off:  # a disk that failed may hold its threads for ever
            for pool in (self.volume.reads, self.volume.writes, self.volume.background):
                pool.close()
            self.volume.completions.run()
        if self.volume.on:
            try:
                self.volume.segments.sync()
            except OSError as error:
                self.volume.fail(error)
        if self.volume.on:
            for member, slots in self._used():
                self.volume.record(member, slots)
            if not self.volume.keeper.stop(KEEPER_STOP_S):
                log.error("disk: the index was not written completely: blocks set last may be missing after a restart")
        elif self.volume.recovering:
            self.volume.keeper.kill()

    def info(self) -> DiskInfo:
        """What the tier holds and did."""
        fetching, writing, scrubbing = self.fetching, self.writing, self.scrubbing
        members = self.volume.members.members
        return DiskInfo(
            directory=str(self.volume.directory),
            state=self.volume.state.value,
            reason=self.volume.reason,
            limit_bytes=self._config.limit_bytes,
            used_bytes=self.volume.segments.used_bytes,
            segment_bytes=self._config.segment_bytes,
            segments_free=self.volume.segments.free,
            blocks=sum(member.index.ready for member in members),
            evicted=self.volume.members.evicted,
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
