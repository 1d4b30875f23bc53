"""A GET in progress: the parts of its reply, made one at a time as the connection can take them.

A stream never holds all slots of its request: it makes a group of a few parts ready at a time, and each part references
its slots until the kernel has taken its bytes. So a client that stops reading holds the slots of one group. A part says
how many bytes of its group are still to come; these bytes are certain to follow, so the client can sleep until they
are there. When another client is writing a block, the stream waits for it until the block is there, the write is given
up, or the deadline passes. A block that is not there when its turn comes is a miss.

Credit: a client that uses credit is sent no more payload than it granted, so that other replies on its connection never
queue behind blocks that the client does not read. The deadline of such a stream starts anew with every grant: a slow
client does not fail, a client that vanished does.

References: on a Unix socket a client may ask where in shared memory the blocks are, see `kvstore.shard.leases`. What a
part lends keeps its slots until the client gives it back, and what may be lent has a limit: the stream waits a moment
for the client to read what it was lent before. If it gives nothing back, or others hold all, it is sent the blocks.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import Parts
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import STREAM_BYTES
from kvstore.shard.leases import Leases, References
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import Store
from kvstore.store.tier import Slots
from kvstore.wire import GROUP_BYTES, Get, Part, encode
from kvstore.wire.zmtp import frame

PATIENCE_S: Final = 0.1  # for a client to give back what it was lent, before blocks are sent to it instead
READ_AHEAD_BYTES: Final = 32 << 20  # how far ahead of its next part a GET has blocks read from disk

Positions = npt.NDArray[np.uint32]


@dataclass(eq=False)
class Outgoing:
    """Bytes to send, and a call to make when the kernel has taken them or the connection ends. `parts`: its next part
    is to be sent, instead of `views`."""

    views: list[bytes | memoryview]
    parts: Parts | None = None
    release: Callable[[], object] | None = None
    descriptors: Sequence[int] = ()  # that go with the first byte


class Stream:
    """The reply to one GET. Used by the loop's thread only. Its peer must call `close` at the end."""

    __slots__ = (
        "_ahead",
        "_attributes",
        "_count",
        "_disk",
        "_ends",
        "_fetched",
        "_group",
        "_hit",
        "_key_bytes",
        "_keys",
        "_leases",
        "_lent_at",
        "_limit_s",
        "_miss",
        "_next",
        "_parts",
        "_places",
        "_resume",
        "_store",
        "_used",
        "_waiting",
        "credit",
        "deadline",
        "done",
        "id",
        "namespace",
    )

    def __init__(
        self,
        store: Store,
        disk: DiskTier | None,
        namespace: NamespaceStore | None,
        request: Get,
        keys: bytes,
        now: float,
        resume: Callable[[Stream], None],
        pin_until: float,
        leases: Leases | None,
    ) -> None:
        """leases: what the connection was lent; None: it takes no references."""
        self.id = request.id
        self.namespace = namespace
        self.credit = request.credit if request.credit > 0 else None
        self.done = False
        self._store = store
        self._disk = disk
        self._resume = resume  # called when there may be parts to send again
        self._keys = memoryview(keys)
        self._key_bytes = request.key_bytes
        self._count = request.count
        self._next = 0
        self._ahead = 0  # blocks before this position were looked up on disk
        self._fetched = False  # at least one block was read from disk
        self._attributes = request.attributes
        self._leases = leases if request.references else None
        self._places: References | None = None  # of the blocks of the part that is ready, if it is lent
        self._lent_at = 0.0  # when it was last lent something, or gave something back
        self._used = request.refresh  # whether this GET counts as a use of its blocks
        self._waiting = array("I")  # positions; an array, because many GETs of many keys may wait
        self._group: deque[tuple[Positions, Slots]] = deque()  # parts that are ready, not yet sent
        self._parts: Parts | None = None  # what sends them, unless they are lent or empty
        self._ends = False  # the last of them ends the reply
        self._hit = self._miss = 0
        self._limit_s = request.deadline_ms / 1000
        self.deadline = now + self._limit_s
        if namespace is None:
            self._next, self._miss = self._count, self._count
        elif request.prefix:
            self._cut_to_prefix(namespace, keys, now, pin_until)
        else:  # touch the chain as a whole, because its parts may be sent in any order
            namespace.contains(keys, now, self._used, store.ticks(self._count))

    def _cut_to_prefix(self, namespace: NamespaceStore, keys: bytes, now: float, pin_until: float) -> None:
        """Reduce the request to the leading run of blocks that are there or are being written.

        The run is touched and, until `pin_until`, pinned: an evicted block would make all blocks after it useless.
        """
        length = namespace.match_prefix(keys, now, self._used, self._store.ticks(self._count), pin_until)
        self._miss = self._count - length
        self._count = length
        self._keys = memoryview(keys[: length * self._key_bytes])

    @property
    def nbytes(self) -> int:
        """The most bytes of the server's memory that this stream takes."""
        return STREAM_BYTES + len(self._keys) + self._count * self._waiting.itemsize

    def grant(self, credit: int, now: float) -> None:
        """The client grants `credit` more bytes of payload: the deadline starts anew."""
        if self.credit is not None:
            self.credit += credit
            self.deadline = now + self._limit_s

    def released(self, now: float) -> None:
        """The client gives back what it was lent: the deadline starts anew."""
        if self._leases is not None:
            self.deadline = now + self._limit_s
            self._lent_at = now

    def impatient(self, now: float) -> bool:
        """Whether it has waited for long enough for its client to give back what it was lent."""
        return self._leases is not None and self._leases.holds(self.id) and now - self._lent_at >= PATIENCE_S

    def wake(self) -> None:
        """A write of a block has ended, or was given up: look again."""
        self._resume(self)

    def give_up_waiting(self) -> None:
        """The deadline has passed: count all blocks that are not ready to be sent as misses."""
        self._miss += len(self._waiting) + self._count - self._next
        del self._waiting[:]
        self._next = self._ahead = self._count

    def next_part(self, now: float) -> Outgoing | None:
        """-> the next part; None when none can be sent now (no credit, or all blocks left are still being written)."""
        namespace = self.namespace
        if namespace is None:
            return self._end()
        if not self._group and not self._make_group(namespace, now):
            return None
        return self._part(namespace, *self._group.popleft(), now)

    def _make_group(self, namespace: NamespaceStore, now: float) -> bool:
        """Make the next parts ready. -> False when no part can be sent now."""
        block_bytes, per_frame = namespace.block_bytes, namespace.frame_blocks
        room = group = per_frame * max(1, GROUP_BYTES // (per_frame * block_bytes))
        if self.credit is not None:
            room = min(room, self.credit // block_bytes)
        leases, lends = self._leases, False
        if leases is not None:
            lent = leases.room(namespace)
            if lent:
                room, lends, self._lent_at = lent, True, now
            elif leases.holds(self.id) and now - self._lent_at < PATIENCE_S:
                self._read_ahead(namespace, now)
                return False  # its client reads what it was lent, and gives it back; one that borrows does not
        if room < 1 and (self._next < self._count or self._waiting):
            self._read_ahead(namespace, now)
            return False
        while True:
            self._read_ahead(namespace, now)
            positions, slots = self._acquire(namespace, room, now)
            if len(positions) or self._waiting or self._next == self._count:
                break  # otherwise all blocks looked up so far are misses: look up more
        if self._next < self._count or self._waiting:
            if not len(positions):
                namespace.parked.add(self.wake)
                return False
        else:
            namespace.parked.discard(self.wake)
        if self.credit is not None:
            self.credit -= len(positions) * block_bytes
        self._places = None
        if lends and leases is not None and len(positions):
            self._places = leases.references(namespace, slots)
            if self._places is not None:
                per_frame = len(positions)
            elif len(positions) > group:  # as payload, fewer blocks are made ready at a time
                namespace.memory.index.release(slots[group:])
                self._waiting.extend(positions[group:].tolist())
                positions, slots = positions[:group], slots[:group]
        for at in range(0, max(1, len(positions)), per_frame):
            self._group.append((positions[at : at + per_frame], slots[at : at + per_frame]))
        self._ends = self._next == self._count and not self._waiting
        self._parts = None
        if len(positions) and self._places is None:
            attributes = namespace.attributes_of(slots, now) if self._attributes else b""
            self._parts = Parts(
                self.id,
                positions,
                namespace.memory.index.checksums(slots),
                namespace.arena.memory,
                namespace.memory.offsets(slots),
                block_bytes,
                per_frame,
                self._ends,
                self._hit,
                self._miss,
                attributes,
            )
        return True

    def close(self) -> None:
        """The stream is over, complete or not: release the slots of parts that were ready and not sent."""
        namespace = self.namespace
        if namespace is not None:
            namespace.parked.discard(self.wake)
            for _, slots in self._group:
                namespace.memory.index.release(slots)
        self._group.clear()

    def _read_ahead(self, namespace: NamespaceStore, now: float) -> None:
        """Start to read the next blocks from disk, so that they are in memory when their turn comes."""
        if namespace.disk is None or namespace.disk.empty:
            self._ahead = self._count
        if self._ahead == self._count:
            return
        window = max(1, min(READ_AHEAD_BYTES, self._store.limit_bytes // 4) // namespace.block_bytes)
        end = min(self._count, self._next - len(self._waiting) + window)
        if end - self._ahead < min(self._count - self._ahead, max(1, window // 4)):
            return  # wait until the look-up is worth its cost: many blocks at a time
        keys = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, self._key_bytes)[self._ahead : end]
        self._ahead = end
        present = namespace.memory.index.contains(keys.reshape(-1), now, False, 0)
        absent = np.frombuffer(present, dtype=np.uint8) == 0
        if absent.any():
            self._fetch(namespace, keys[absent], now)

    def _fetch(self, namespace: NamespaceStore, keys: npt.NDArray[np.uint8], now: float) -> npt.NDArray[np.bool_]:
        """Start to read blocks from disk that are not in memory. -> for each key, whether to wait for it."""
        assert self._disk is not None
        expected = self._disk.fetching.fetch(namespace, keys.tobytes(), now) < -1
        self._fetched = self._fetched or bool(expected.any())
        return expected

    def _acquire(self, namespace: NamespaceStore, room: int, now: float) -> tuple[Positions, Slots]:
        """Reference up to `room` blocks that are in memory, those that were waited for first."""
        found: list[tuple[Positions, Slots]] = []
        if self._waiting:
            waiting, self._waiting = np.array(self._waiting, dtype=np.uint32), array("I")
            positions, slots = self._find(namespace, waiting, now)
            if len(positions) > room:  # one look-up of all of them is cheaper than several look-ups of some
                namespace.memory.index.release(slots[room:])
                self._waiting.extend(positions[room:].tolist())
            found.append((positions[:room], slots[:room]))
            room -= len(found[0][0])
        while self._next < self._ahead and room > 0:
            first = self._next
            self._next = min(self._ahead, first + room)
            found.append(self._find(namespace, np.arange(first, self._next, dtype=np.uint32), now))
            room -= len(found[-1][0])
        if len(found) == 1:
            return found[0]
        if not found:
            return np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int32)
        positions, slots = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return positions, slots

    def _find(self, namespace: NamespaceStore, positions: Positions, now: float) -> tuple[Positions, Slots]:
        """Reference the blocks that are in memory; add the others to `_waiting` or count them as misses."""
        keys = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, self._key_bytes)[positions]
        slots = namespace.memory.index.acquire(keys.reshape(-1), now, 0, False)
        there = slots >= 0
        if there.all():
            return positions, slots
        expected = slots == -2
        absent = slots == -1
        if absent.any() and namespace.disk is not None and not namespace.disk.empty:
            expected[absent] = self._fetch(namespace, keys[absent], now)
        self._waiting.extend(positions[expected].tolist())
        self._miss += int((~there & ~expected).sum())
        return positions[there], slots[there]

    def _part(self, namespace: NamespaceStore, positions: Positions, slots: Slots, now: float) -> Outgoing:
        """-> the next part of the group."""
        self._hit += len(positions)
        self.done = self._ends and not self._group
        if self.done and self._used:
            namespace.hits += self._hit
            namespace.misses += self._miss
            # Reading from disk touched the blocks one by one; touch the chain as a whole, so that its tail is evicted
            # first.
            if self._fetched:
                keys = bytes(self._keys)
                namespace.memory.index.contains(keys, now, True, self._store.ticks(self._count))
        if not len(positions):
            return self._empty_part()
        if self._disk is not None and self._used:
            self._disk.writing.was_read(namespace, slots, now)
        if self._parts is None:
            return self._lend(namespace, positions, slots, now)
        return Outgoing([], self._parts, functools.partial(namespace.memory.index.release, slots))

    def _lend(self, namespace: NamespaceStore, positions: Positions, slots: Slots, now: float) -> Outgoing:
        assert self._leases is not None and self._places is not None
        lent = self._leases.lend(self.id, namespace, slots, self._places)
        part = Part(
            self.id,
            positions.tobytes(),
            namespace.memory.index.checksums(slots).tobytes(),
            self.done,
            self._hit,
            self._miss,
            0,
            namespace.attributes_of(slots, now) if self._attributes else b"",
            lent.references,
        )
        message = b"".join([*lent.extents, frame(encode(part), False)])
        return Outgoing([message], None, lent.close, lent.descriptors)

    def _empty_part(self) -> Outgoing:
        return Outgoing([frame(encode(Part(self.id, b"", b"", self.done, self._hit, self._miss)), False)])

    def _end(self) -> Outgoing:
        self.done = True
        return self._empty_part()
