"""The disk tier of one shard. It drives its volume, writes, reads and scrubber, one turn of the loop at a time.

A tier is *recovering* until the keeper has sent the whole old index and the index in memory holds all of it. Until then
the tier writes no blocks, but serves the entries that it already has. Then the tier is *on*: it reads blocks that
clients want, writes dirty blocks, scrubs, and loads the hottest blocks of an earlier run into memory. When the file
system is full, the tier is *out of space* until it has room: the tier does all this, but writes nothing. The index in
memory stays right meanwhile. When there is room, a fresh keeper gets all its entries, so no deleted block comes back.
When the disk fails, the tier is *off* until the process ends, and the shard serves from memory only.

Only the thread of the shard's loop uses this module. Only two calls block: the constructor, which locks the folder, and
`close`.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstore._index import BlockIndex
from kvstore.disk.fetching import Fetching
from kvstore.disk.messages import Committed, Event, IndexedNamespace, KeeperFailed, Recovered, RecoveryDone
from kvstore.disk.recovery import Recovery, WarmStart
from kvstore.disk.room import RoomWatch
from kvstore.disk.scrubbing import Scrubbing
from kvstore.disk.volume import Volume
from kvstore.disk.writing import Writing
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespaces import Disk, ShardStore
from kvstore.store.tier import Slots
from kvstore.wire import DiskInfo
from kvstore.wire.status import report

if TYPE_CHECKING:
    from kvstore.disk.config import DiskConfig

log = logging.getLogger("kvstore.disk")

RECENCY_S: Final = 60.0  # how often the recency of used blocks is written to the persistent index, in seconds
RECORD_BATCH: Final = 8192
KEEPER_STOP_S: Final = 60.0


class DiskTier:
    """One shard's disk tier. The constructor sets `store.disk`, locks the shard's folder and starts the keeper.

    Other packages do not use the parts of a tier. The methods of parts that they need are attributes of the tier.
    """

    def __init__(self, store: ShardStore, config: DiskConfig, poll: select.epoll) -> None:
        self.volume = volume = Volume(store, config, poll, self._on_stop)
        self.writing = Writing(volume, config.write)
        self.fetching = Fetching(volume, self.writing)
        self.scrubbing = Scrubbing(volume, self.fetching, config.scrub_bytes_per_s)
        self.directory = volume.directory
        self.fail_with, self.keep_replicas = volume.fail_with, volume.keep_replicas
        self.after_removals = volume.after_removals
        writing, fetching = self.writing, self.fetching
        self.was_set, self.was_read, self.write_again = writing.was_set, writing.was_read, writing.write_again
        self.fetch, self.disown = fetching.fetch, fetching.disown
        self.set_scrub_rate = self.scrubbing.set_rate
        self._config = config
        self._store = store
        self._recovery: Recovery | None = Recovery(volume)
        self._warm_start: WarmStart | None = None
        self._recovered = self._lost = 0
        self._recovery_s = 0.0
        self._finishing = False
        self._recency_at = 0.0
        self._recency_tick = 0
        self._to_record: list[tuple[DiskBlocks, Slots]] = []  # entries that the keeper must still get
        self._room = RoomWatch(volume)
        self.when_on_again: Callable[[], None] = lambda: None  # called when a full disk has room again
        store.disk = Disk(volume.members, volume.open, volume.forget)
        volume.take()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def on_event(self, fd: int, event: int) -> bool:
        """Handle an event of the loop's epoll. Return False when `fd` does not belong to this tier."""
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
        """Start the work that is due. Called once per turn of the loop.

        now: the present time, in monotonic seconds.
        quiet_since: the time since which clients have moved hardly any payload, in monotonic seconds.
        hurry: whether to write without waiting for a quiet moment, because no client is connected any more.
        """
        if self._recovery is not None and self._recovery.step():
            self._turn_on(self._recovery)
        volume = self.volume
        if not volume.readable:
            return
        volume.check_progress(now)
        if volume.out_of_space and not hurry and self._room.found(now):
            self._write_blocks_again()
        if volume.on:
            self.writing.pump(now, quiet_since, hurry)
        if not volume.readable:
            return
        if self.fetching.starved and self.writing.idle:
            self.fetching.wake()
        if not hurry:
            if self._warm_start is not None and self._warm_start.pump(now):
                self._warm_start = None
            self.scrubbing.pump(now)
            if volume.on:
                self._record_recency(now)
        if volume.on:
            volume.watch_keeper()

    @property
    def recovering(self) -> bool:
        """True while it is not known yet which blocks an earlier run left on disk."""
        return self.volume.recovering

    @property
    def behind(self) -> bool:
        """True if clients that set blocks must wait until more blocks have been written."""
        return self.writing.behind

    def scrub(self) -> int:
        """Check every block on disk now. Return the number of complete passes that there will be after this check,
        or 0 if blocks cannot be read from disk."""
        return self.scrubbing.ask() if self.volume.readable else 0

    @property
    def working(self) -> bool:
        """True if work is pending that `pump` starts when it is due, so that the loop must call `pump` often."""
        sorting = self._recovery is not None and self._recovery.ready
        reading = self._warm_start is not None or self.scrubbing.running
        return sorting or not self.writing.idle or reading or bool(self._to_record)

    @property
    def restless(self) -> bool:
        """True if work is pending that no event announces, so that the loop must not sleep."""
        return self._recovery is not None and self._recovery.restless

    def _on_keeper(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.volume.committed(event.sequence)
        elif isinstance(event, KeeperFailed):
            self._on_keeper_failed(event)
        elif self._recovery is not None:
            if isinstance(event, IndexedNamespace):
                self._recovery.found(event)
            elif isinstance(event, Recovered):
                self._recovery.add(event)
            elif isinstance(event, RecoveryDone):
                self._recovery.lost += event.bad_entries
                if event.bad_entries or event.damage:
                    log.error("disk: the index was damaged: %d entries dropped; %s", event.bad_entries, event.damage)
                self._recovery.complete()

    def _on_keeper_failed(self, event: KeeperFailed) -> None:
        message = event.message
        if self._recovery is None or self._recovery.rewrite:
            (self.volume.run_out if event.no_space else self.volume.fail)(OSError(f"the index: {message}"))
            return
        log.error("disk: the index could not be read to its end; the entries read so far are kept: %s", message)
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
        elif self.volume.readable and recovery.blocks and self._config.warm_start:
            self._warm_start = WarmStart(self.volume, self.fetching)

    def _record_recency(self, now: float) -> None:
        """Every `RECENCY_S`, record in the persistent index which blocks were used since the last time."""
        if self._to_record:
            if self.volume.keeper.backlog_bytes:
                return
            member, slots = self._to_record.pop()
            if len(slots) > RECORD_BATCH:
                self._to_record.append((member, slots[RECORD_BATCH:]))
            self._record(member, slots[:RECORD_BATCH])
        elif now > self._recency_at + RECENCY_S:
            self._recency_at = now
            self._to_record = self._used()

    def _record(self, member: DiskBlocks, slots: Slots) -> None:
        self.volume.record(member, slots[member.index.states_of(slots) == BlockIndex.READY])

    def _used(self) -> list[tuple[DiskBlocks, Slots]]:
        since, self._recency_tick = self._recency_tick, self._store.ticks(1)
        used = [(member, member.index.ready_slots(since)) for member in self.volume.members.members]
        return [(member, slots) for member, slots in used if len(slots)]

    # ---- the end -------------------------------------------------------------------------------------------------

    def _on_stop(self) -> None:
        self.writing.give_up()
        self._to_record.clear()
        if self.volume.out_of_space:
            self._room.ran_out(time.monotonic())
        else:
            self._recovery = self._warm_start = None
            self.fetching.give_up()

    def _write_blocks_again(self) -> None:
        """Turn the tier on again, because the file system has room. The keeper then gets the entries of all blocks."""
        if self.volume.resume():
            self.when_on_again()
            self.writing.add_missed()
            self._to_record = [(member, member.index.ready_slots()) for member in self.volume.members.members]

    def finish(self, now: float) -> None:
        """Start to write the blocks that are only in memory, because no client is left. When they are written,
        `finished` is true."""
        self._finishing = True
        if self.volume.on:
            self.writing.add_all(now)
            if self.writing.dirty_bytes:
                log.info("disk: writing %d blocks before the server stops", self.writing.dirty_blocks)

    @property
    def finished(self) -> bool:
        """True if no block is left to write, or if the tier cannot write."""
        return not self.volume.takes_blocks or (self.volume.on and self.writing.idle)

    def close(self) -> None:
        """Stop all threads, flush all files to the device, and stop the keeper. Blocks."""
        if not self.volume.off:  # because threads may hang for ever in calls to a failed disk
            for pool in (self.volume.reads, self.volume.writes, self.volume.background):
                pool.close()
            self.volume.completions.run()
        if self.volume.on:
            try:
                self.volume.segments.sync()
            except OSError as error:
                self.volume.fail(error)
        if self.volume.on:
            for member, slots in [*self._to_record, *self._used()]:
                self._record(member, slots)
            if not self.volume.keeper.stop(KEEPER_STOP_S):
                log.error("disk: the index was not written completely: blocks set last may be missing after a restart")
        elif self.volume.recovering:
            self.volume.keeper.kill()

    def info(self) -> DiskInfo:
        """Return the state and the counters of the tier."""
        return report(
            DiskInfo,
            self,
            directory=str(self.directory),
            blocks=sum(member.index.ready for member in self.volume.members.members),
            recovered_blocks=self._recovered,
            lost_blocks=self._lost,
            recovery_s=self._recovery_s,
            warming=self._warm_start is not None,
        )
