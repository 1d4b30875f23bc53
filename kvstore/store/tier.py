"""One tier of a shard, memory or disk: segments of a space, an index a namespace over them, and who gives way.

A namespace grows by whole segments. When the space has none left, the least recently used block of the tier decides:
if it is the growing namespace's own, blocks of it are evicted; if it is another's, that namespace gives back the
segment it used least. Recency is one counter for the whole shard, so namespaces compare fairly. Within a namespace
the index's policy decides.

One thread, the shard's loop, uses all of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore._cext import BlockIndex

Slots = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


class Space(Protocol):
    """Segments of equal size: the arena, or the segment files."""

    segment_bytes: int

    @property
    def segments(self) -> int:
        """How many there may be."""

    @property
    def free(self) -> int:
        """How many belong to no namespace."""

    def take(self) -> int | None:
        """A free segment's number, or None."""

    def give_back(self, segment: int) -> None:
        """Return a segment none of whose bytes anybody reads or writes any more."""


class NamespaceTier:
    """One namespace's blocks in one tier."""

    def __init__(self, space: Space, block_bytes: int, index: BlockIndex) -> None:
        self.space = space
        self.block_bytes = block_bytes
        self.index = index
        self.segments: dict[int, int] = {}  # index ordinal -> segment of the space
        self.evicted = 0
        self._starts = np.zeros(0, dtype=np.int64)  # by ordinal: where the segment begins in the space

    @property
    def empty(self) -> bool:
        """It holds no block, and no block of it is being read or written."""
        index = self.index
        return not (index.ready or index.writing or index.gone)

    @property
    def nbytes(self) -> int:
        """Bytes of the space this namespace holds."""
        return len(self.segments) * self.space.segment_bytes

    def attach(self, segment: int) -> int:
        """Cut a segment of the space into slots. -> its ordinal in the index."""
        ordinal = self.index.attach()
        self.segments[ordinal] = segment
        if ordinal >= len(self._starts):
            self._starts = np.append(self._starts, np.zeros(ordinal + 1 - len(self._starts), dtype=np.int64))
        self._starts[ordinal] = segment * self.space.segment_bytes
        return ordinal

    def detach(self, ordinal: int) -> int:
        """Drop a segment's blocks and return it to the space. -> blocks dropped."""
        dropped = self.index.detach(ordinal)
        self.space.give_back(self.segments.pop(ordinal))
        self.evicted += dropped
        return dropped

    def evict(self, count: int, now: float) -> int:
        """Make up to `count` slots free by the index's policy. -> how many."""
        evicted = self.index.evict(count, now)
        self.evicted += evicted
        return evicted

    def drop(self, slots: Slots) -> int:
        """Forget blocks that are no good. -> how many there were."""
        return self.index.drop(slots)

    def offsets(self, slots: Slots) -> Offsets:
        """Where each slot begins in the space, in bytes."""
        ordinals, places = np.divmod(slots, self.index.slots_per_segment)
        offsets: Offsets = self._starts[ordinals] + places.astype(np.int64) * self.block_bytes
        return offsets


Member = TypeVar("Member", bound=NamespaceTier)


class Tier(Generic[Member]):
    """The namespaces that share one space."""

    def __init__(self, space: Space, may_grow: Callable[[Member, float], bool]) -> None:
        self.space = space
        self.members: list[Member] = []
        self._evicted_of_removed = 0
        self._may_grow = may_grow  # whether one more segment's index is within the shard's memory

    @property
    def index_bytes(self) -> int:
        """Memory of the indexes."""
        return sum(member.index.nbytes for member in self.members)

    @property
    def evicted(self) -> int:
        """Blocks evicted from all namespaces, those that are gone as well."""
        return self._evicted_of_removed + sum(member.evicted for member in self.members)

    def remove(self, member: Member) -> None:
        """The namespace is gone: its blocks with it."""
        for ordinal in list(member.segments):
            member.detach(ordinal)
        self.members.remove(member)
        self._evicted_of_removed += member.evicted

    def make_room(self, member: Member, count: int, now: float) -> None:
        """See that `member` has `count` free slots, as far as what is pinned or in use allows."""
        index = member.index
        while index.free < count:
            segment = self.space.take() if self.space.free and self._may_grow(member, now) else None
            if segment is not None:
                member.attach(segment)
                continue
            if self._reclaim(member, now):
                continue
            if not member.evict(count - index.free, now):
                return

    def _reclaim(self, growing: Member, now: float) -> bool:
        """Take a segment from the namespace whose oldest block is older than every block of `growing`."""
        own_oldest = growing.index.oldest_tick()
        others = [other for other in self.members if other is not growing and other.segments]
        for other in sorted(others, key=_reclaim_order):
            if other.index.ready and other.index.oldest_tick() >= own_oldest:
                return False
            if not self._give_up(other, now):
                continue
            segment = self.space.take()
            assert segment is not None
            growing.attach(segment)
            return True
        return False

    def shrink(self, now: float) -> bool:
        """Give one segment back to the space, the one used least; False: all are in use."""
        members = [member for member in self.members if member.segments]
        return any(self._give_up(member, now) for member in sorted(members, key=_reclaim_order))

    @staticmethod
    def _give_up(member: Member, now: float) -> bool:
        recency = {ordinal: member.index.segment_recency(ordinal, now) for ordinal in member.segments}
        idle = [(newest, ordinal) for ordinal, (newest, busy) in recency.items() if not busy]
        if idle:
            member.detach(min(idle)[1])
        return bool(idle)


def _reclaim_order(member: NamespaceTier) -> tuple[bool, int]:
    return member.index.ready > 0, member.index.oldest_tick()
