"""A GET in progress: the parts of its reply, made one at a time as the connection can take them.

Nothing is held for a whole request: a group of a few parts is made ready at a time, and each part references its slots
until the kernel has taken its bytes, so a reader that stops reading holds one group. A part says how many bytes of
its group are still to come: they are certain, and the reader sleeps until they are there. A key that another client
is writing is waited for, until it is there, gone, or the deadline passes. What is not there when its turn comes is a
miss.

Credit: a reader that asked for it is sent no more payload than it granted, so that other replies on its connection
never queue behind blocks nobody takes. The deadline of such a stream starts anew with every grant: a slow consumer
is no failure, a vanished one is.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.memory.store import NamespaceStore, Slots, Store
from kvstore.wire import GROUP_BYTES, Get, Part, encode
from kvstore.zmtp import frame, frame_head


@dataclass(eq=False)
class Outgoing:
    """Bytes to send, and what to do once the kernel has them (or never will)."""

    views: list[bytes | memoryview]
    release: Callable[[], None] | None = None


class Stream:
    """The reply to one GET."""

    __slots__ = (
        "_count",
        "_group",
        "_hit",
        "_key_bytes",
        "_keys",
        "_limit_s",
        "_miss",
        "_next",
        "_resume",
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
        namespace: NamespaceStore | None,
        request: Get,
        keys: bytes,
        now: float,
        resume: Callable[[Stream], None],
    ) -> None:
        self.id = request.id
        self.namespace = namespace
        self.credit = request.credit if request.credit > 0 else None
        self.done = False
        self._resume = resume  # called when there may be something to send again
        self._keys = memoryview(keys)
        self._key_bytes = request.key_bytes
        self._count = request.count
        self._next = 0
        self._waiting = array("I")  # positions: compact, for many GETs of many keys may wait
        self._group: deque[tuple[list[int], list[int]]] = deque()  # positions and slots of the parts made ready
        self._hit = self._miss = 0
        self._limit_s = request.deadline_ms / 1000
        self.deadline = now + self._limit_s
        if namespace is None:
            self._next, self._miss = self._count, self._count
        else:  # the chain is touched as one, whatever order its parts leave in
            namespace.index.contains(keys, now, True, store.ticks(self._count))

    @property
    def nbytes(self) -> int:
        """What this stream keeps in the server's memory, at most."""
        return len(self._keys) + self._count * self._waiting.itemsize

    def grant(self, credit: int, now: float) -> None:
        """The reader took something."""
        if self.credit is not None:
            self.credit += credit
            self.deadline = now + self._limit_s

    def wake(self) -> None:
        """A block that was being written is there, or is not coming."""
        self._resume(self)

    def give_up_waiting(self) -> None:
        """The deadline passed: what is still being written is a miss."""
        self._miss += len(self._waiting) + self._count - self._next
        del self._waiting[:]
        self._next = self._count

    def next_part(self, now: float) -> Outgoing | None:
        """The next part, or None: nothing can be sent now (no credit, or all that is left is being written)."""
        namespace = self.namespace
        if namespace is None:
            return self._end()
        if not self._group and not self._make_group(namespace, now):
            return None
        return self._part(namespace, *self._group.popleft())

    def _make_group(self, namespace: NamespaceStore, now: float) -> bool:
        """Make the next parts ready; False: nothing can be sent now."""
        block_bytes, per_frame = namespace.block_bytes, namespace.frame_blocks
        room = per_frame * max(1, GROUP_BYTES // (per_frame * block_bytes))
        if self.credit is not None:
            room = min(room, self.credit // block_bytes)
            if room < 1 and (self._next < self._count or self._waiting):
                return False
        positions, slots = self._acquire(namespace, room, now)
        if self._next < self._count or self._waiting:
            if not positions:
                namespace.parked.add(self)
                return False
        else:
            namespace.parked.discard(self)
        if self.credit is not None:
            self.credit -= len(positions) * block_bytes
        for at in range(0, max(1, len(positions)), per_frame):
            self._group.append((positions[at : at + per_frame], slots[at : at + per_frame]))
        return True

    def close(self) -> None:
        """The stream is over, sent to its end or not: what was made ready and not sent is let go."""
        for _, slots in self._group:
            assert self.namespace is not None
            self.namespace.index.release(slots)
        self._group.clear()

    def _acquire(self, namespace: NamespaceStore, room: int, now: float) -> tuple[list[int], list[int]]:
        """Reference up to `room` blocks that are there, waiting ones first."""
        index, size = namespace.index, self._key_bytes
        positions: list[int] = []
        slots: list[int] = []
        waiting, self._waiting = self._waiting, array("I")
        at = 0
        while at < len(waiting) and len(positions) < room:
            some = waiting[at : at + room - len(positions)]
            at += len(some)
            keys = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, size)[np.frombuffer(some, dtype=np.uint32)]
            for position, slot in zip(some, index.acquire(keys.reshape(-1), now, 0, False).tolist(), strict=True):
                self._sort(position, slot, positions, slots)
        self._waiting.extend(waiting[at:])
        while self._next < self._count and len(positions) < room:
            first = self._next
            self._next = min(self._count, first + room - len(positions))
            found = index.acquire(self._keys[first * size : self._next * size], now, 0, False).tolist()
            if min(found) >= 0:
                positions.extend(range(first, self._next))
                slots.extend(found)
                continue
            for position, slot in enumerate(found, first):
                self._sort(position, slot, positions, slots)
        return positions, slots

    def _sort(self, position: int, slot: int, positions: list[int], slots: list[int]) -> None:
        if slot >= 0:
            positions.append(position)
            slots.append(slot)
        elif slot == -2:
            self._waiting.append(position)
        else:
            self._miss += 1

    def _part(self, namespace: NamespaceStore, positions: list[int], slots: list[int]) -> Outgoing:
        block_bytes = namespace.block_bytes
        self._hit += len(positions)
        self.done = last = not self._group and self._next == self._count and not self._waiting
        slot_array: Slots = np.array(slots, dtype=np.int32)
        where = struct.pack(f"<{len(positions)}I", *positions)
        sums = namespace.index.checksums(slot_array).tobytes()
        following = sum(len(later) for later, _ in self._group) * block_bytes
        header = encode(Part(self.id, where, sums, last, self._hit, self._miss, following))
        if last:
            namespace.hits += self._hit
            namespace.misses += self._miss
        if not positions:
            return Outgoing([frame(header, False)])
        head = frame(header, True) + frame_head(len(positions) * block_bytes, False)
        views: list[bytes | memoryview] = [head, *namespace.views(slot_array)]
        return Outgoing(views, lambda: self._release(namespace, slot_array))

    @staticmethod
    def _release(namespace: NamespaceStore, slots: Slots) -> None:
        namespace.index.release(slots)

    def _end(self) -> Outgoing:
        self.done = True
        return Outgoing([frame(encode(Part(self.id, b"", b"", True, self._hit, self._miss)), False)])
