"""Writes blocks from memory to disk in the background: which blocks, when, and what happens if the disk is slow.

A block that waits to be written is *dirty*. Its memory slot is referenced, so the block is not evicted before it is
written. `--disk-write` decides which blocks become dirty:

* `all`: every block that was set. Dirty blocks may fill half of the memory. Then the server reads nothing more from
  clients that set blocks, until the disk has caught up. So a slow disk never drops an acknowledged block.
* `reused`: every block that was read again.
* `evicted`: blocks that are about to be evicted. If clients set blocks faster than the disk can write, such blocks are
  evicted unwritten. Reads from disk wait for these writes.

Writes wait for a quiet moment, because they slow down clients that set blocks, even when they bypass the page cache.
They do not wait for long, and they do not wait while many blocks are dirty. A clean stop writes the blocks that are
only in memory.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.disk.volume import Volume
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots

WRITE_JOB_BYTES: Final = 4 << 20
MAX_IN_FLIGHT_BYTES: Final = 32 << 20
MAX_KEEPER_BACKLOG_BYTES: Final = 4 << 20
QUIET_S: Final = 0.02  # a moment is quiet if no payload has moved for this long
DIRTY_WAIT_S: Final = 1.0  # for how long a dirty block waits for a quiet moment
HURRY_SHARE: Final = 0.25  # when this share of memory is dirty, write at once until no block waits
BEHIND_SHARE: Final = 0.5  # when this share of memory is dirty, clients that set blocks must wait
CAUGHT_UP_SHARE: Final = 0.375  # when at most this share of memory is dirty, these clients no longer wait
EVICTION_AHEAD_BLOCKS: Final = 64


class _Waiting(NamedTuple):
    namespace: NamespaceStore
    slots: Slots
    since: float


class Writing:
    """The dirty blocks of a shard, and the writes of these blocks. Used by the loop's thread only."""

    def __init__(self, volume: Volume, policy: str) -> None:
        self._volume = volume
        self._policy = policy
        self._queue: deque[_Waiting] = deque()
        self._again: list[_Waiting] = []  # blocks to queue again, because an older version of them is being written
        self._dirty: dict[NamespaceStore, set[int]] = {}  # the memory slots of dirty blocks
        self._memory_bytes = volume.store.limit_bytes
        self.dirty_blocks = self.dirty_bytes = self.in_flight_bytes = 0
        self.blocks = self.bytes = self.skipped = 0
        self._hurrying = False  # write at once until no block waits
        self.behind = False  # clients that set blocks must wait
        self._missed: list[tuple[NamespaceStore, Slots]] = []  # see `add_missed`

    # ---- which blocks become dirty -------------------------------------------------------------------------------

    def was_set(self, namespace: NamespaceStore, slots: Slots, now: float) -> None:
        """Note blocks that clients have set. Their slots are READY."""
        if self._policy == "all":
            self._add(namespace, slots, now)

    def was_read(self, namespace: NamespaceStore, slots: Slots, now: float) -> None:
        """Note blocks that a client has read from memory."""
        if self._policy == "reused":
            self._add_if_not_on_disk(namespace, namespace.ordinary(slots), now)  # transient blocks are never written

    def write_again(self, namespace: NamespaceStore, keys: bytes, now: float) -> None:
        """Write blocks again whose expiry time has changed, because the disk records this time. Only blocks in memory
        are written. A block that is only on disk has its old expiry time again after a restart."""
        if namespace.disk is None or namespace.disk.empty:
            return
        slots = namespace.acquire(keys, now, 0, False)
        on_disk = np.frombuffer(namespace.on_disk(keys, now), dtype=np.uint8) != 0
        both = slots[(slots >= 0) & on_disk]
        if len(both) and self._volume.out_of_space:
            self._volume.after_removals(lambda: None)  # the index on disk has old times until there is a new one
        elif len(both):
            namespace.delete_on_disk(both)
            self._add(namespace, both, now)
        namespace.release(slots)

    def saves_before(self, namespace: NamespaceStore, blocks: int, now: float) -> bool:
        """With policy `evicted`, start to write the next victims if room for `blocks` blocks requires evictions.

        Return True if writes are pending, so that the caller must wait for them.
        """
        if self._policy != "evicted":
            return False
        short = blocks - namespace.free_slots
        if short <= 0:
            return False
        if self.idle:
            self._add_if_not_on_disk(namespace, namespace.victims(max(short, EVICTION_AHEAD_BLOCKS), now), now)
        return not self.idle

    def add_all(self, now: float) -> None:
        """Make dirty the blocks that are only in memory. If they do not all fit on the disk, take the hottest.

        The coldest of them are written first, so they are also the first to be evicted from disk.
        """
        room_bytes = self._volume.segments.segments * self._volume.segments.segment_bytes
        for namespace in self._volume.store:
            slots = namespace.coldest_first()
            slots = slots[max(0, len(slots) - room_bytes // namespace.block_bytes) :]
            self._add_if_not_on_disk(namespace, slots, now)

    def add_missed(self) -> None:
        """With policy `all`, write the blocks that were set while the disk took none, whenever no block is dirty."""
        if self._policy == "all":
            self._missed = [(namespace, namespace.ready_slots()) for namespace in self._volume.store]

    def _add_next_missed(self, now: float) -> None:
        namespace, slots = self._missed.pop()
        count = max(1, MAX_IN_FLIGHT_BYTES // namespace.block_bytes)
        if len(slots) > count:
            self._missed.append((namespace, slots[:-count]))
        slots = slots[-count:]
        there = slots[namespace.states_of(slots) == BlockIndex.READY]
        self._add_if_not_on_disk(namespace, namespace.ordinary(there), now)

    def _add_if_not_on_disk(self, namespace: NamespaceStore, slots: Slots, now: float) -> None:
        if len(slots):
            self._add(namespace, namespace.only_in_memory(slots, now), now)

    def _add(self, namespace: NamespaceStore, slots: Slots, now: float) -> None:
        if namespace.disk is None or not len(slots) or not self._volume.takes_blocks:
            return
        dirty = self._dirty.setdefault(namespace, set())
        fresh = np.array([slot not in dirty for slot in slots.tolist()])
        slots = slots[fresh]
        if not len(slots):
            return
        dirty.update(slots.tolist())
        namespace.hold(slots)
        self._queue.append(_Waiting(namespace, slots, now))
        self._count(namespace, len(slots))

    def _count(self, namespace: NamespaceStore, blocks: int) -> None:
        self.dirty_blocks += blocks
        self.dirty_bytes += blocks * namespace.block_bytes
        share = CAUGHT_UP_SHARE if self.behind else BEHIND_SHARE
        self.behind = self._volume.takes_blocks and self.dirty_bytes > self._memory_bytes * share

    def _clean(self, namespace: NamespaceStore, slots: Slots) -> None:
        """Mark blocks as no longer dirty, whether they were written or not."""
        namespace.release(slots)
        dirty = self._dirty[namespace]
        dirty.difference_update(slots.tolist())
        if not dirty:
            del self._dirty[namespace]
        self._count(namespace, -len(slots))

    # ---- when blocks are written ---------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if no block is dirty."""
        return not self._queue and not self._again and not self.in_flight_bytes

    def pump(self, now: float, quiet_since: float, hurry: bool) -> None:
        """Start the writes that are due. The arguments are those of `DiskTier.pump`."""
        if self._policy == "evicted" and not self._volume.store.arena.free:
            self._add_next_victims(now)
        if self._missed and self.idle:
            self._add_next_missed(now)
        self._queue.extend(self._again)
        self._again.clear()
        self._hurrying = self._hurrying and bool(self._queue)
        while self._queue and self.in_flight_bytes < MAX_IN_FLIGHT_BYTES:
            waiting = self._queue[0]
            self._hurrying = self._hurrying or self.dirty_bytes > self._memory_bytes * HURRY_SHARE
            due = hurry or self._hurrying or now - quiet_since > QUIET_S or now - waiting.since > DIRTY_WAIT_S
            if not due or self._volume.keeper.backlog_bytes > MAX_KEEPER_BACKLOG_BYTES:
                return
            self._queue.popleft()
            count = max(1, WRITE_JOB_BYTES // waiting.namespace.block_bytes)
            if len(waiting.slots) > count:
                self._queue.appendleft(waiting._replace(slots=waiting.slots[count:]))
            self._write(waiting.namespace, waiting.slots[:count], now)

    def _add_next_victims(self, now: float) -> None:
        if self.in_flight_bytes or self._queue:
            return
        for namespace in self._volume.store:
            self._add_if_not_on_disk(namespace, namespace.victims(EVICTION_AHEAD_BLOCKS, now), now)

    def _write(self, namespace: NamespaceStore, slots: Slots, now: float) -> None:
        disk, volume = namespace.disk, self._volume
        assert disk is not None
        kept = namespace.states_of(slots) == BlockIndex.READY  # the other blocks were deleted after they became dirty
        expires = namespace.expires_of(slots)
        kept &= (expires == 0) | (expires > now)
        self._clean(namespace, slots[~kept])
        slots = slots[kept]
        if not len(slots):
            return
        keys = namespace.keys_of(slots)
        volume.make_room(disk, disk.index.missing(keys), now)
        if not volume.on:
            self._clean(namespace, slots)
            return
        places = disk.index.reserve(keys, False, volume.store.ticks(len(slots)), namespace.priorities_of(slots))
        self.skipped += int((places == BlockIndex.NO_SPACE).sum())
        older = places == BlockIndex.EXISTED
        older[older] = [
            disk.index.state_of(key) == BlockIndex.WRITING for key in _rows(keys, namespace.key_bytes, older)
        ]
        if older.any():
            self._again.append(_Waiting(namespace, slots[older], now))
        self._clean(namespace, slots[(places < 0) & ~older])
        slots, places = slots[places >= 0], places[places >= 0]
        for segment, rows in disk.by_segment(places):
            self._submit(namespace, disk, segment, slots[rows], places[rows])

    def _submit(self, namespace: NamespaceStore, disk: DiskBlocks, segment: int, slots: Slots, places: Slots) -> None:
        self.in_flight_bytes += len(slots) * namespace.block_bytes
        self._volume.writes.submit(
            self._volume.jobs.writing(
                disk,
                segment,
                places,
                self._volume.store.arena.memory,
                namespace.memory.offsets(slots),
                namespace.checksums(slots),
            ),
            partial(self._written, namespace, disk, slots, places),
        )

    def _written(
        self, namespace: NamespaceStore, disk: DiskBlocks, slots: Slots, places: Slots, code: int | OSError
    ) -> None:
        self.in_flight_bytes -= len(slots) * namespace.block_bytes
        if isinstance(code, OSError):
            self._volume.fail(code)
        elif code:
            self._volume.fail_with(code)
        if self._volume.on:
            # A block that was deleted or replaced during the write must not come back.
            kept = namespace.states_of(slots) == BlockIndex.READY
            written = slots[kept]
            self.blocks += len(written)
            self.bytes += len(written) * namespace.block_bytes
            self._volume.commit(disk, places[kept], *namespace.record_of(written))
            disk.index.abort(places[~kept])
        else:
            disk.index.abort(places)
        self._clean(namespace, slots)

    def give_up(self) -> None:
        """Drop the queue, so that no block in it stays dirty, because the disk takes no more blocks."""
        for waiting in [*self._queue, *self._again]:
            self._clean(waiting.namespace, waiting.slots)
        self._queue.clear()
        self._again.clear()
        self._missed.clear()
        self.behind = False


def _rows(keys: bytes, key_bytes: int, which: npt.NDArray[np.bool_]) -> list[bytes]:
    return [keys[row * key_bytes : (row + 1) * key_bytes] for row in np.flatnonzero(which).tolist()]
