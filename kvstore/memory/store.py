"""What a shard keeps: namespaces, each an index over segments of the arena, and who gives way when memory is short.

A namespace grows by whole segments. When the arena has none left, the least recently used block of the shard decides:
if it is the growing namespace's own, blocks of it are evicted; if it is another's, that namespace gives back the
segment it used least. Recency is one counter for the whole shard (`ticks`), so namespaces compare fairly.

One thread, the shard's loop, uses all of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockIndex
from kvstore.memory.arena import Arena
from kvstore.wire import (
    ErrorCode,
    NamespaceInfo,
    WireError,
    decode_namespace,
    frame_blocks,
    namespace_id,
)

Slots = npt.NDArray[np.int32]

MAX_NAMESPACES: Final = 1024
INDEX_OVERHEAD_BYTES: Final = 96 << 20  # index memory beyond this counts against the shard's limit


class Parked(Protocol):
    """Who waits for a block that is being written."""

    def wake(self) -> None:
        """A block that was being written is there, or is not coming."""


@dataclass(eq=False)
class NamespaceStore:
    """One namespace's blocks on this shard."""

    canonical: bytes
    id: bytes
    block_bytes: int
    arena: Arena
    index: BlockIndex
    frame_blocks: int
    segments: dict[int, int] = field(default_factory=dict)  # index ordinal -> arena segment
    parked: set[Parked] = field(default_factory=set)
    hits: int = 0
    misses: int = 0
    created: int = 0
    evicted: int = 0

    @property
    def empty(self) -> bool:
        """Nothing in it and nobody at it."""
        index = self.index
        return not (index.ready or index.writing or index.gone or self.parked)

    def wake_parked(self) -> None:
        """A write ended: whoever waits for one looks again."""
        if self.parked:
            parked, self.parked = self.parked, set()
            for waiter in parked:
                waiter.wake()

    def attach(self, segment: int) -> None:
        """Cut a segment of the arena into slots."""
        self.segments[self.index.attach()] = segment

    def detach(self, ordinal: int) -> int:
        """Drop a segment's blocks and return it to the arena. -> blocks dropped."""
        dropped = self.index.detach(ordinal)
        self.arena.give_back(self.segments.pop(ordinal))
        self.evicted += dropped
        return dropped

    def views(self, slots: Slots) -> list[memoryview]:
        """The memory of `slots`, in order, neighbours merged into one view."""
        memory, segment_bytes, block_bytes = self.arena.memory, self.arena.segment_bytes, self.block_bytes
        per_segment = self.index.slots_per_segment
        result: list[memoryview] = []
        start = end = -1
        for slot in slots.tolist():
            ordinal, place = divmod(slot, per_segment)
            at = self.segments[ordinal] * segment_bytes + place * block_bytes
            if at == end:
                end += block_bytes
                continue
            if end >= 0:
                result.append(memory[start:end])
            start, end = at, at + block_bytes
        if end >= 0:
            result.append(memory[start:end])
        return result

    def info(self, now: float) -> NamespaceInfo:
        index = self.index
        return NamespaceInfo(
            id=self.id.hex(),
            namespace=self.canonical.decode(),
            block_bytes=self.block_bytes,
            blocks=index.ready,
            writing=index.writing,
            segments=len(self.segments),
            slots=index.slots,
            memory_bytes=len(self.segments) * self.arena.segment_bytes,
            pinned=index.pinned(now),
            hits=self.hits,
            misses=self.misses,
            created=self.created,
            evicted=self.evicted,
        )


class Store:
    """All namespaces of one shard over one arena."""

    def __init__(self, limit_bytes: int, segment_bytes: int) -> None:
        self.arena = Arena(limit_bytes, segment_bytes)
        self.limit_bytes = limit_bytes
        self._namespaces: dict[bytes, NamespaceStore] = {}
        self._tick = 1

    def __iter__(self) -> Iterator[NamespaceStore]:
        return iter(self._namespaces.values())

    def ticks(self, count: int) -> int:
        """Reserve `count` recency ticks; the lowest is returned."""
        tick = self._tick
        self._tick += max(count, 1)
        return tick

    def check_namespace(self, canonical: bytes) -> int:
        """`block_bytes` of a namespace this shard could hold; `WireError` says why it could not."""
        block_bytes = decode_namespace(canonical).block_bytes
        if block_bytes > self.arena.segment_bytes:
            raise WireError(
                ErrorCode.OUT_OF_MEMORY,
                f"blocks of {block_bytes} bytes do not fit a segment of {self.arena.segment_bytes} bytes; "
                "start the server with a larger --segment",
            )
        return block_bytes

    def find(self, canonical: bytes, key_bytes: int) -> NamespaceStore | None:
        """The namespace, if it holds anything; `WireError` when its keys have another length."""
        found = self._namespaces.get(canonical)
        if found is None or found.empty:
            return None
        if found.index.key_bytes != key_bytes:
            raise WireError(
                ErrorCode.KEY_SIZE,
                f"keys of {key_bytes} bytes: this namespace's keys have {found.index.key_bytes} bytes",
            )
        return found

    def open(self, canonical: bytes, key_bytes: int) -> NamespaceStore:
        """The namespace, made if it is new. The first block set decides its key length."""
        found = self.find(canonical, key_bytes) or self._namespaces.get(canonical)
        if found is not None:
            if found.index.key_bytes == key_bytes:
                return found
            self._forget(found)
        block_bytes = self.check_namespace(canonical)
        if len(self._namespaces) >= MAX_NAMESPACES:
            self._forget_an_empty_one()
        namespace = NamespaceStore(
            canonical=canonical,
            id=namespace_id(canonical),
            block_bytes=block_bytes,
            arena=self.arena,
            index=BlockIndex(key_bytes, self.arena.segment_bytes // block_bytes),
            frame_blocks=frame_blocks(block_bytes),
        )
        self._namespaces[canonical] = namespace
        return namespace

    def _forget(self, namespace: NamespaceStore) -> None:
        for ordinal in list(namespace.segments):
            namespace.detach(ordinal)
        del self._namespaces[namespace.canonical]

    def _forget_an_empty_one(self) -> None:
        for namespace in self:
            if namespace.empty:
                self._forget(namespace)
                return
        raise WireError(ErrorCode.LIMIT, f"{MAX_NAMESPACES} namespaces hold blocks already; delete one's blocks first")

    def make_room(self, namespace: NamespaceStore, count: int, now: float) -> None:
        """See that `namespace` has `count` free slots, as far as what is pinned or in use allows."""
        index = namespace.index
        while index.free < count:
            segment = self.arena.take() if self._index_fits(namespace) else None
            if segment is not None:
                namespace.attach(segment)
                continue
            if self._reclaim(namespace, now):
                continue
            evicted = index.evict(count - index.free, now)
            namespace.evicted += evicted
            if not evicted:
                return

    def _index_fits(self, growing: NamespaceStore) -> bool:
        """Whether one more segment's index keeps the shard inside its limit (small blocks need much index)."""
        index_bytes = sum(namespace.index.nbytes for namespace in self)
        in_use = (self.arena.segments - self.arena.free + 1) * self.arena.segment_bytes
        return in_use + max(0, index_bytes - INDEX_OVERHEAD_BYTES) <= self.limit_bytes or not growing.segments

    def _reclaim(self, growing: NamespaceStore, now: float) -> bool:
        """Take a segment from the namespace whose oldest block is older than every block of `growing`."""
        own_oldest = growing.index.oldest_tick()
        others = [other for other in self if other is not growing and other.segments]
        for other in sorted(others, key=_reclaim_order):
            if other.index.ready and other.index.oldest_tick() >= own_oldest:
                return False
            recency = {ordinal: other.index.segment_recency(ordinal, now) for ordinal in other.segments}
            idle = [(newest, ordinal) for ordinal, (newest, busy) in recency.items() if not busy]
            if idle:
                other.detach(min(idle)[1])
                segment = self.arena.take()
                assert segment is not None
                growing.attach(segment)
                return True
        return False


def _reclaim_order(namespace: NamespaceStore) -> tuple[bool, int]:
    return namespace.index.ready > 0, namespace.index.oldest_tick()
