"""One tier of a shard, in memory or on disk: its space, one index for each namespace, and how room is reclaimed.

A namespace grows by whole segments. When the space has no free segment, the least recently used block of the tier
decides which namespace gives up room. If this block belongs to the growing namespace, that namespace evicts blocks. If
it belongs to another namespace, the other one gives back its least recently used segment. Recency is one counter for
the whole shard, so that namespaces can be compared. Within a namespace, the index's policy chooses the blocks. If
tenants have quotas, the quotas decide which namespaces may have to give up room (`quotas.py`).

Transient blocks have segments of their own, whose number is limited. Transient blocks are never evicted, so their
segments are given back only when they are empty. If there is no free segment for more transient blocks, the least
recently used segment of ordinary blocks is given back as a whole.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore._cext import slot_offsets
from kvstore._index import BlockIndex
from kvstore.store.quotas import Quotas

Slots = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


class Space(Protocol):
    """A number of segments of equal size: the arena, or the segment files."""

    segment_bytes: int

    @property
    def segments(self) -> int:
        """The maximum number of segments."""

    @property
    def free(self) -> int:
        """The number of segments that belong to no namespace."""

    def take(self) -> int | None:
        """Take a free segment. Return its number, or None if there is none."""

    def give_back(self, segment: int) -> None:
        """Give back a segment. No read or write of it may be in progress."""


class NamespaceTier:
    """One namespace's blocks in one tier."""

    def __init__(self, space: Space, block_bytes: int, index: BlockIndex, tenant: str = "") -> None:
        self.space = space
        self.tenant = tenant
        self.block_bytes = block_bytes
        self.index = index
        self.segments: dict[int, int] = {}  # index ordinal -> segment of the space
        self.transient: set[int] = set()  # ordinals of the segments for transient blocks
        self.unused_since: float | None = None  # when a segment for transient blocks became empty, in monotonic seconds
        self.evicted = 0
        self.cuts: list[tuple[int, int, bytes]] | None = None  # filled by `BlockIndex.evict`; None if not needed
        self._starts = np.zeros(0, dtype=np.int64)  # by ordinal: the offset of the segment in the space, in bytes

    @property
    def empty(self) -> bool:
        """True if there is no block, and no read or write of a block is in progress."""
        index = self.index
        return not (index.ready or index.writing or index.gone)

    @property
    def nbytes(self) -> int:
        """The size of the segments that this namespace holds, in bytes."""
        return len(self.segments) * self.space.segment_bytes

    @property
    def transient_bytes(self) -> int:
        """The size of the segments for transient blocks, in bytes."""
        return len(self.transient) * self.space.segment_bytes

    def attach(self, segment: int, transient: bool = False) -> int:
        """Cut a segment of the space into slots, for transient blocks if `transient`. Return its ordinal in the
        index."""
        ordinal = self.index.attach(transient)
        self.segments[ordinal] = segment
        if transient:
            self.transient.add(ordinal)
        if ordinal >= len(self._starts):
            self._starts = np.append(self._starts, np.zeros(ordinal + 1 - len(self._starts), dtype=np.int64))
        self._starts[ordinal] = segment * self.space.segment_bytes
        return ordinal

    def detach(self, ordinal: int) -> int:
        """Drop a segment's blocks and give the segment back to the space. Return the number of blocks dropped."""
        dropped = self.index.detach(ordinal)
        self.transient.discard(ordinal)
        self.space.give_back(self.segments.pop(ordinal))
        self.evicted += dropped
        return dropped

    def evict(self, count: int, now: float) -> int:
        """Evict up to `count` blocks, chosen by the index's policy. Return how many were evicted."""
        evicted = self.index.evict(count, now, cuts=self.cuts)
        self.evicted += evicted
        return evicted

    def give_up_transient(self, now: float) -> bool:
        """Give back an empty segment for transient blocks. Return False when there is none."""
        self.index.expire_transient(now)
        ordinal = self.index.unused_transient()
        if ordinal >= 0:
            self.detach(ordinal)
        return ordinal >= 0

    def drop(self, slots: Slots) -> int:
        """Remove damaged blocks. Return how many were removed."""
        return self.index.drop(slots)

    def offsets(self, slots: Slots) -> Offsets:
        """Return the offset of each slot in the space, in bytes."""
        return slot_offsets(slots, self._starts, self.index.slots_per_segment, self.block_bytes)


Member = TypeVar("Member", bound=NamespaceTier)


class Tier(Generic[Member]):
    """The namespaces that share one space."""

    def __init__(self, space: Space, may_grow: Callable[[Member, float], bool]) -> None:
        self.space = space
        self.members: list[Member] = []
        self.quotas: Quotas | None = None  # the quotas of tenants; None: each tenant may take all free segments
        self._evicted_of_removed = 0
        self._may_grow = may_grow  # whether a member may take one more segment, within the shard's limits

    @property
    def index_bytes(self) -> int:
        """The memory of the indexes, in bytes."""
        return sum(member.index.nbytes for member in self.members)

    @property
    def evicted(self) -> int:
        """The number of blocks evicted so far, including those of namespaces that are gone."""
        return self._evicted_of_removed + sum(member.evicted for member in self.members)

    def remove(self, member: Member) -> None:
        """Drop the blocks of a namespace that is gone, and give back its segments."""
        for ordinal in list(member.segments):
            member.detach(ordinal)
        self.members.remove(member)
        self._evicted_of_removed += member.evicted

    def make_room(self, member: Member, count: int, now: float) -> None:
        """Free `count` slots of `member`, or fewer if blocks are pinned or in use."""
        index = member.index
        while index.free < count:
            segment = self._take(member, now)
            if segment is not None:
                member.attach(segment)
            elif not self._reclaim_for(member, now) and not member.evict(count - index.free, now):
                return

    def _take(self, member: Member, now: float, transient: bool = False) -> int | None:
        """Return a free segment, or None if there is none or the namespace may not have one."""
        if self.quotas is not None and not self.quotas.may_take(member, self.members, transient):
            return None
        return self.space.take() if self.space.free and self._may_grow(member, now) else None

    @property
    def transient_segments(self) -> int:
        """The number of segments for transient blocks."""
        return sum(len(member.transient) for member in self.members)

    def make_transient_room(self, member: Member, count: int, most: int, now: float) -> None:
        """Free `count` slots of `member` for transient blocks, or fewer if all members together would otherwise have
        more than `most` segments for transient blocks."""
        index = member.index
        if index.spare < count:
            index.expire_transient(now)
        while index.spare < count:
            if self.transient_segments >= most:
                if not any(other.give_up_transient(now) for other in self.members if other is not member):
                    return
                continue
            segment = self._take(member, now, transient=True)
            if segment is not None:
                member.attach(segment, transient=True)
                continue
            if self.quotas is not None and not self.quotas.may_take(member, self.members, transient=True):
                return
            victims, _ = self._victims(member)
            if not self._shrink([member, *victims], now):
                return

    def _reclaim_for(self, growing: Member, now: float) -> bool:
        """Give back a segment of the namespace whose oldest block is older than every block of `growing`."""
        own_oldest = growing.index.oldest_tick()
        others, by_recency = self._victims(growing)
        for other in sorted((other for other in others if other.segments), key=_reclaim_order):
            if by_recency and _ordinary(other) and other.index.oldest_tick() >= own_oldest:
                return False
            if self._give_up(other, now):
                return True
        return False

    def _victims(self, growing: Member) -> tuple[list[Member], bool]:
        """Return the namespaces that may have to give up a segment for `growing`, and whether recency decides (see
        `Quotas.victims`)."""
        if self.quotas is not None:
            return self.quotas.victims(growing, self.members, self.space.segments)
        return [other for other in self.members if other is not growing], True

    def shrink(self, now: float) -> bool:
        """Give one of the least recently used segments back to the space. Return False when all are in use."""
        return self._shrink(self.members, now)

    def keep_quotas(self, now: float) -> None:
        """Give back a segment of each tenant that holds more than its maximum, because its maximum was lowered. The
        loop calls this every fraction of a second, so a large tenant gives back its memory in small steps."""
        if self.quotas is not None:
            for members in self.quotas.beyond(self.members):
                self._shrink(members, now)

    def _shrink(self, members: list[Member], now: float) -> bool:
        holding = [member for member in members if member.segments]
        return any(self._give_up(member, now) for member in sorted(holding, key=_reclaim_order))

    @staticmethod
    def _give_up(member: Member, now: float) -> bool:
        ordinary = member.segments.keys() - member.transient
        recency = {ordinal: member.index.segment_recency(ordinal, now) for ordinal in ordinary}
        idle = [(newest, ordinal) for ordinal, (newest, busy) in recency.items() if not busy]
        if idle:
            member.detach(min(idle)[1])
        return bool(idle)


def _reclaim_order(member: NamespaceTier) -> tuple[bool, int]:
    return _ordinary(member) > 0, member.index.oldest_tick()


def _ordinary(member: NamespaceTier) -> int:
    return member.index.ready - member.index.transient


def keys_before(tier: NamespaceTier, slots: Slots) -> npt.NDArray[np.uint8]:
    """Return one key for each slot, in the shape (n, key_bytes). This is the key of the block that the slot's block
    follows in its chain, or the block's own key if it follows none."""
    index = tier.index
    before = index.before_of(slots)
    keys = np.frombuffer(index.keys_of(np.where(before >= 0, before, slots)), dtype=np.uint8)
    return keys.reshape(len(slots), index.key_bytes)
