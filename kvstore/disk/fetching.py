"""Reads from disk to memory. A block that a client wants and that is only on disk is read straight into a memory slot.

The slot is reserved first, as for a block that a client is writing, so readers wait for the block in the same way. The
thread that reads the block checks it, usually against the client's checksum. The block is then either readable or a
miss. The only copy is from disk to slot, because the block is sent from the slot.

The number of bytes in flight is bounded. A stream that finds no room (`WAIT`) tries again when a read has ended.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.disk.segments import CORRUPT
from kvstore.disk.volume import Volume
from kvstore.disk.writing import Writing
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots

log = logging.getLogger("kvstore.disk")

WAIT: Final = -3  # besides `ABSENT` and `COMING`: on disk; try again when woken by the namespace's waiters
READ_JOB_BYTES: Final = 1 << 20  # the most bytes per job, so that several threads keep several reads at the device
MAX_MEMORY_SHARE: Final = 0.25  # the share of memory that may be in slots that wait for the disk

Sums = npt.NDArray[np.uint64]
Answers = npt.NDArray[np.int32]


class Fetching:
    """All reads of blocks from disk on behalf of clients. Used by the loop's thread only."""

    def __init__(self, volume: Volume, writing: Writing) -> None:
        self._volume = volume
        self._writing = writing
        self._limit_bytes = int(volume.store.limit_bytes * MAX_MEMORY_SHARE)
        self._starved: set[NamespaceStore] = set()  # namespaces with streams that got `WAIT`
        self._in_flight: dict[int, tuple[NamespaceStore, Slots, bytes]] = {}  # by job number; the bytes are keys
        self._jobs = 0
        self.in_flight_bytes = 0
        self.blocks = self.bytes = self.corrupt = 0

    def fetch(self, namespace: NamespaceStore, keys: bytes, now: float) -> Answers:
        """Start to read those blocks of `keys` that are on disk and not in memory.

        Return one answer per key. `BlockIndex.COMING`: the block is in memory, or it is being read or written there.
        `WAIT`: try again later. `BlockIndex.ABSENT`: the block is not on disk, or memory has no slot for it.
        """
        disk = namespace.disk
        assert disk is not None
        found = disk.index.acquire(keys, now, 0, False)
        answers = np.full(len(found), BlockIndex.ABSENT, dtype=np.int32)
        rows = np.flatnonzero(found >= 0)
        if not len(rows):
            return answers
        answers[rows] = BlockIndex.COMING
        if self._writing.saves_before(namespace, len(rows), now):
            self._put_off(namespace, answers, rows, disk.index, found)
            return answers
        room = max(0, self._limit_bytes - self.in_flight_bytes) // namespace.block_bytes
        if not self.in_flight_bytes:
            room = max(room, 1)
        if len(rows) > room:
            self._put_off(namespace, answers, rows[room:], disk.index, found)
            rows = rows[:room]
        self._begin(namespace, disk, keys, found, rows, answers, now)
        return answers

    def _put_off(
        self, namespace: NamespaceStore, answers: Answers, rows: npt.NDArray[np.int64], index: BlockIndex, found: Slots
    ) -> None:
        index.release(found[rows])
        answers[rows] = WAIT
        self._starved.add(namespace)

    def _begin(
        self,
        namespace: NamespaceStore,
        disk: DiskBlocks,
        keys: bytes,
        found: Slots,
        rows: npt.NDArray[np.int64],
        answers: Answers,
        now: float,
    ) -> None:
        wanted = np.frombuffer(keys, dtype=np.uint8).reshape(-1, namespace.key_bytes)[rows].tobytes()
        slots = self._volume.store.reserve_to_fetch(namespace, wanted, disk.index.priorities_of(found[rows]), now)
        refused = slots < 0
        if refused.any():
            full = slots == BlockIndex.NO_SPACE
            disk.index.release(found[rows[refused & ~full]])  # in memory already, or being read or written there
            if self.in_flight_bytes:
                self._put_off(namespace, answers, rows[full], disk.index, found)
            else:  # every slot is pinned or being sent, and the stream would not be woken by the end of a read
                disk.index.release(found[rows[full]])
                answers[rows[full]] = BlockIndex.ABSENT
            rows, slots = rows[~refused], slots[~refused]
        places = found[rows]
        step = max(1, READ_JOB_BYTES // namespace.block_bytes)
        for segment, members in disk.by_segment(places):
            for at in range(0, len(members), step):
                some = members[at : at + step]
                self._read(namespace, disk, segment, slots[some], places[some])

    def _read(self, namespace: NamespaceStore, disk: DiskBlocks, segment: int, slots: Slots, places: Slots) -> None:
        volume, size = self._volume, namespace.block_bytes
        sums = disk.index.checksums(places)
        self.in_flight_bytes += len(slots) * size
        self._jobs += 1
        self._in_flight[self._jobs] = namespace, slots, namespace.keys_of(slots)
        volume.reads.submit(
            volume.jobs.reading(disk, segment, places, volume.store.arena.memory, namespace.memory.offsets(slots)),
            partial(self._arrived, self._jobs, namespace, disk, slots, places, sums),
        )

    def _arrived(
        self,
        job: int,
        namespace: NamespaceStore,
        disk: DiskBlocks,
        slots: Slots,
        places: Slots,
        sums: Sums,
        status: Answers | OSError,
    ) -> None:
        volume = self._volume
        self.in_flight_bytes -= len(slots) * namespace.block_bytes
        _, _, keys = self._in_flight.pop(job)
        if isinstance(status, OSError):
            namespace.unreserve(slots)
            disk.index.release(places)
            volume.fail(status)
        else:
            # A block that was deleted during the read must not come back.
            ours = namespace.states_of(slots) == BlockIndex.WRITING
            good = (status == 0) & (disk.index.states_of(places) == BlockIndex.READY) & ours
            self.blocks += int(good.sum())
            self.bytes += int(good.sum()) * namespace.block_bytes
            self._place(namespace, disk, slots[good], places[good], sums[good])
            namespace.unreserve(slots[~good])
            self.drop_corrupt(disk, places[status == CORRUPT])
            disk.index.release(places)
            if (status > 0).any():
                volume.fail_with(int(status.max()))
        namespace.tell(keys)
        self.wake()

    def give_up(self) -> None:
        """Give up all reads and wake all streams, because the disk has failed and its threads may hang for ever."""
        for namespace, slots, keys in self._in_flight.values():
            namespace.disown(slots)
            namespace.tell(keys)
        self.wake()

    def disown(self, namespace: NamespaceStore, keys: bytes) -> None:
        """Discard the results of reads in flight for these blocks, because the blocks are deleted or will be
        replaced."""
        size = namespace.key_bytes
        replaced = {keys[at : at + size] for at in range(0, len(keys), size)}
        for other, slots, read in self._in_flight.values():
            if other is not namespace:
                continue
            mine = [read[at : at + size] in replaced for at in range(0, len(read), size)]
            if namespace.disown(slots[np.array(mine)]):
                namespace.tell(keys)

    @property
    def starved(self) -> bool:
        """True if a stream got `WAIT` and no read is in flight that would wake the stream when it ends."""
        return bool(self._starved) and not self.in_flight_bytes

    def wake(self) -> None:
        """Wake the streams that got `WAIT`, so that they try again."""
        starved, self._starved = self._starved, set()
        for namespace in starved:
            namespace.waiters.tell_all()

    def _place(self, namespace: NamespaceStore, disk: DiskBlocks, slots: Slots, places: Slots, sums: Sums) -> None:
        namespace.commit(slots, sums, self._volume.store.ticks(len(slots)), disk.index.expires_of(places))
        namespace.link(*disk.index.links_of(places))

    def drop_corrupt(self, disk: DiskBlocks, places: Slots) -> None:
        """Drop blocks whose bytes do not match their checksums. They are counted and logged."""
        bad = places[disk.index.states_of(places) == BlockIndex.READY]
        if not len(bad):
            return
        key = disk.index.keys_of(bad[:1]).hex()
        log.error("disk: %d damaged block(s) dropped, among them key %s of namespace %s", len(bad), key, disk.name)
        self.corrupt += disk.drop(bad)
