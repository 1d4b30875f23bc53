"""Recovery after a restart: restores blocks of an earlier run to the disk index, then loads the hottest into memory.

The keeper sends entries in key order, but the index must get them in order of recency. So entries are collected, sorted
on a separate thread, and put into the index, some thousands per turn of the loop. Clients are served meanwhile. At the
end, blocks that follow each other in a chain are linked. An entry cannot be used if its segment's file is gone, its
place is taken, or its block has expired. An entry that cannot be used is deleted, and its block is a miss.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.disk.entries import ENTRY, Entries
from kvstore.disk.fetching import WAIT, Fetching
from kvstore.disk.messages import IndexedNamespace, Recovered
from kvstore.disk.volume import Volume
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire import WireError
from kvstore.wire.attributes import names_of, rows_before

ROWS_A_TURN: Final = 16384
LINKS_A_TURN: Final = 4096
WARM_START_BYTES: Final = 8 << 20  # read at a time, while no other read is in flight


class _OldNamespace:
    """The entries of one namespace in the old index."""

    def __init__(self, member: DiskBlocks | None, ordinal: int, canonical: bytes, key_bytes: int) -> None:
        self.member = member  # None if this shard cannot hold the namespace
        self.ordinal = ordinal
        self.canonical = canonical
        self.key_bytes = key_bytes
        self.pieces: list[Recovered] = []
        self.ordinals: dict[int, int] = {}  # segment -> its ordinal in the index, or -1 if it could not be claimed
        self.next = 0  # the next row to restore
        self.unlinked = 0  # the next row to link
        self.keys: npt.NDArray[np.uint8] = np.zeros((0, key_bytes), dtype=np.uint8)
        self.entries: Entries = np.zeros(0, dtype=ENTRY)
        self.before: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)  # the row that each row follows, or -1

    def sort(self) -> None:
        """Join all pieces, the least recently used entry first. This takes a second for a million entries. Any
        thread."""
        if self.pieces:
            self.entries = np.frombuffer(b"".join(piece.entries for piece in self.pieces), dtype=ENTRY)
            self.keys = np.frombuffer(b"".join(piece.keys for piece in self.pieces), dtype=np.uint8)
            self.keys = self.keys.reshape(-1, self.key_bytes)
            order = np.argsort(self.entries["tick"], kind="stable")
            self.entries, self.keys = self.entries[order], self.keys[order]
            self.before = rows_before(names_of(self.keys), np.ascontiguousarray(self.entries["before"]))
            self.pieces.clear()


class Recovery:
    """Moves the entries of the old index into the index in memory. Used by the loop's thread only."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._found: dict[int, _OldNamespace] = {}
        self.ready = False  # all entries have arrived
        self._sorting = threading.Thread(target=self._sort, name="kvstore-sort", daemon=True)
        self._failure: Exception | None = None  # the error of the sorting thread
        self.started = time.monotonic()
        self.rewrite = False  # a fresh keeper with an empty index was started, and needs the recovered entries
        self.blocks = self.lost = 0
        self.refused = ""  # the first reason why the store refused a namespace

    def found(self, event: IndexedNamespace) -> None:
        """Open a namespace of the old index in the store."""
        member = None
        try:
            namespace = self._volume.store.open(event.canonical, event.key_bytes)
            namespace.replicas = max(namespace.replicas, event.replicas)
            member = namespace.disk
            if member is not None:
                member.replicas = namespace.replicas
        except WireError as error:
            self.refused = self.refused or str(error)
        self._found[event.ordinal] = _OldNamespace(member, event.ordinal, event.canonical, event.key_bytes)

    def add(self, event: Recovered) -> None:
        """Collect entries of the old index."""
        self._found[event.ordinal].pieces.append(event)

    def complete(self) -> None:
        """Sort the entries, because no more will come."""
        self.ready = True
        self._sorting.start()

    def _sort(self) -> None:
        try:
            for found in self._found.values():
                found.sort()
        except Exception as error:  # `step` raises it, so that the loop sees it
            self._failure = error

    @property
    def restless(self) -> bool:
        """True if the next step can be done now."""
        return self.ready and not self._sorting.is_alive()

    def step(self) -> bool:
        """Put the next rows into the index, or link them. Return whether everything is done."""
        if not self.restless:
            return False
        if self._failure is not None:
            raise self._failure
        for found in self._found.values():
            if not found.next and len(found.entries):
                self._volume.store.skip_ticks(int(found.entries["tick"][-1]))
            if found.next < len(found.entries):
                self._restore(found)
                return False
        for found in self._found.values():
            if found.member is not None and found.unlinked < len(found.entries):
                self._link(found, found.member)
                return False
        for found in self._found.values():
            if self.rewrite and found.member is not None:
                self._tell(found.member)
            elif not self.rewrite and found.member is None:
                self._volume.keeper.forget_namespace(found.canonical)
        return True

    def _tell(self, member: DiskBlocks) -> None:
        """Send recovered entries to a fresh keeper."""
        slots = member.index.ready_slots()
        for at in range(0, len(slots), ROWS_A_TURN):
            some = slots[at : at + ROWS_A_TURN]
            self._volume.record(member, some)

    def _restore(self, found: _OldNamespace) -> None:
        rows = slice(found.next, found.next + ROWS_A_TURN)
        found.next += ROWS_A_TURN
        keys, entries, member, volume = found.keys[rows], found.entries[rows], found.member, self._volume
        if member is None:
            self.lost += len(entries)
            if not self.rewrite:
                volume.keeper.delete(found.ordinal, keys.tobytes())
            return
        index = member.index
        expires = volume.monotonic(entries["expires"])
        ordinals = np.array([self._ordinal(found, member, int(segment)) for segment in entries["segment"]])
        good = (ordinals >= 0) & (entries["place"] < index.slots_per_segment)
        good &= (expires == 0) | (expires > time.monotonic())
        slots = np.where(good, ordinals * index.slots_per_segment + entries["place"], -1).astype(np.int32)
        which = np.flatnonzero(good)
        placed = index.restore(
            keys[which].tobytes(),
            slots[which],
            np.ascontiguousarray(entries["checksum"][which]),
            np.ascontiguousarray(entries["tick"][which]),
            expires[which],
            entries["priority"][which].astype(np.uint8),
        )
        kept = np.zeros(len(entries), dtype=bool)
        kept[which] = placed >= 0
        self.blocks += int(kept.sum())
        self.lost += int((~kept).sum())
        if not self.rewrite and not kept.all():
            volume.keeper.delete(found.ordinal, keys[~kept].tobytes())

    def _link(self, found: _OldNamespace, member: DiskBlocks) -> None:
        rows = np.arange(found.unlinked, min(found.unlinked + LINKS_A_TURN, len(found.entries)))
        found.unlinked += LINKS_A_TURN
        rows = rows[found.before[rows] >= 0]
        member.index.link(found.keys[rows].tobytes(), found.keys[found.before[rows]].tobytes())

    def _ordinal(self, found: _OldNamespace, member: DiskBlocks, segment: int) -> int:
        known = found.ordinals.get(segment)
        if known is None:
            known = member.attach(segment) if self._volume.segments.claim(segment) else -1
            found.ordinals[segment] = known
        return known


class WarmStart:
    """Loads the most recently used blocks of an earlier run into memory while no other read is in flight."""

    def __init__(self, volume: Volume, fetching: Fetching) -> None:
        self._volume = volume
        self._fetching = fetching
        self._wanted = self._choose()

    def _choose(self) -> list[tuple[NamespaceStore, Slots]]:
        """Return the hottest blocks that fit into the free segments of memory, the hottest last."""
        store = self._volume.store
        room_bytes = store.arena.free * store.arena.segment_bytes
        # Runs of blocks of one namespace: the newest tick in the run, the run's number, the namespace and the slots.
        blocks: list[tuple[int, int, NamespaceStore, Slots]] = []
        for namespace in store:
            if namespace.disk is None or not namespace.disk.index.ready:
                continue
            slots = namespace.disk.index.ready_slots()
            ticks = namespace.disk.index.ticks_of(slots)
            order = np.argsort(ticks, kind="stable")[::-1][: room_bytes // namespace.block_bytes]
            step = max(1, WARM_START_BYTES // namespace.block_bytes)
            for at in range(0, len(order), step):
                some = order[at : at + step]
                blocks.append((int(ticks[some[0]]), len(blocks), namespace, slots[some]))
        wanted: list[tuple[NamespaceStore, Slots]] = []
        for _, _, namespace, slots in sorted(blocks, key=lambda run: -run[0]):
            room_bytes -= len(slots) * namespace.block_bytes
            if room_bytes < 0:
                break
            wanted.append((namespace, slots))
        return wanted[::-1]

    def pump(self, now: float) -> bool:
        """Fetch the next blocks if no read is in flight. Return whether the warm start is complete."""
        if self._fetching.in_flight_bytes:
            return False
        if not self._wanted or not self._volume.store.arena.free:
            return True
        namespace, slots = self._wanted.pop()
        disk = namespace.disk
        assert disk is not None
        slots = slots[disk.index.states_of(slots) == disk.index.READY]
        answers = self._fetching.fetch(namespace, disk.index.keys_of(slots), now)
        if (answers == WAIT).any():
            self._wanted.append((namespace, slots[answers == WAIT]))
        return False
