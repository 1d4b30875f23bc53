"""A GET in progress: the parts of its reply, made one at a time as the connection can take them.

A stream never holds all slots of its request: it makes a group of a few parts ready at a time, and each part references
its slots until the kernel has taken its bytes. So a client that stops reading holds the slots of one group. A part says
how many bytes of its group are still to come; these bytes are certain to follow, so the client can sleep until they
are there. Which blocks are there, and which it waits for, is the search's business.

Credit: a client that uses credit is sent no more payload than it granted, so that other replies on its connection never
queue behind blocks that the client does not read. The deadline of such a stream starts anew with every grant: a slow
client does not fail, a client that vanished does.

References: on a Unix socket a client may ask where in shared memory the blocks are, see `kvstore.shard.leases`. What a
part lends keeps its slots until the client gives it back, and what may be lent has a limit: the stream waits a moment
for the client to read what it was lent before. If it gives nothing back, or others hold all, it is sent the blocks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore._cext import Parts
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import STREAM_BYTES
from kvstore.shard.leases import Leases, References
from kvstore.shard.search import Positions, Search
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import Store
from kvstore.store.tier import Slots
from kvstore.wire import GROUP_BYTES, Get, Part, encode
from kvstore.wire.zmtp import frame

PATIENCE_S: Final = 0.1  # for a client to give back what it was lent, before blocks are sent to it instead


@dataclass(eq=False)
class Outgoing:
    """Bytes to send, and a call to make when the kernel has taken them or the connection ends; it is told whether all
    were taken. `parts`: its next part is to be sent, instead of `views`."""

    views: list[bytes | memoryview]
    parts: Parts | None = None
    release: Callable[[bool], object] | None = None
    descriptors: Sequence[int] = ()  # that go with the first byte


class Stream:
    """The reply to one GET. Used by the loop's thread only. Its peer must call `close` at the end."""

    __slots__ = (
        "_attributes",
        "_disk",
        "_ends",
        "_group",
        "_hit",
        "_leases",
        "_lent_at",
        "_limit_s",
        "_miss",
        "_parts",
        "_places",
        "_resume",
        "_search",
        "_used",
        "began",
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
        self.began = now
        self.credit = request.credit if request.credit > 0 else None
        self.done = False
        self._disk = disk
        self._resume = resume  # called when there may be parts to send again
        self._attributes = request.attributes
        self._leases = leases if request.references else None
        self._places: References | None = None  # of the blocks of the part that is ready, if it is lent
        self._lent_at = 0.0  # when it was last lent something, or gave something back
        self._used = request.refresh  # whether this GET counts as a use of its blocks
        self._group: deque[tuple[Positions, Slots]] = deque()  # parts that are ready, not yet sent
        self._parts: Parts | None = None  # what sends them, unless they are lent or empty
        self._ends = False  # the last of them ends the reply
        self._hit, self._miss = 0, request.count if namespace is None else 0
        self._limit_s = request.deadline_ms / 1000
        self.deadline = now + self._limit_s
        self._search: Search | None = None  # of a namespace that is there
        if namespace is not None:
            self._search = Search(store, disk, namespace, request, keys, now, pin_until, self.wake)

    @property
    def fetched(self) -> bool:
        """Whether at least one of its blocks was read from disk."""
        return self._search is not None and self._search.fetched

    @property
    def nbytes(self) -> int:
        """The most bytes of the server's memory that this stream takes."""
        return STREAM_BYTES + (self._search.nbytes if self._search is not None else 0)

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
        """There is news of a block that it waits for: look again."""
        self._resume(self)

    @property
    def due(self) -> float:
        """When to call `time_passed`."""
        wait_until = self._search.wait_until if self._search is not None else 0.0
        return min(self.deadline, wait_until) if wait_until else self.deadline

    def time_passed(self, now: float) -> None:
        """It has waited for long enough: for blocks that were promised, which are misses now if they are not there; or,
        if the deadline has passed, for anything."""
        if self._search is not None:
            self._search.wait_until = 0.0
            if now > self.deadline:
                self._search.give_up()
        self._resume(self)

    def give_up(self) -> None:
        """The namespace is at another generation: all blocks that are not on their way yet are misses."""
        if self._search is not None:
            self._search.give_up()
        self._resume(self)

    def next_part(self, now: float) -> Outgoing | None:
        """-> the next part; None when none can be sent now (no credit, or all blocks left are still to come)."""
        namespace, search = self.namespace, self._search
        if namespace is None or search is None:
            self.done = True
            return self._empty_part()
        if not self._group and not self._make_group(namespace, search, now):
            self.count_use(now)
            return None
        return self._part(namespace, search, *self._group.popleft(), now)

    def _make_group(self, namespace: NamespaceStore, search: Search, now: float) -> bool:
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
                search.read_ahead(now)
                return False  # its client reads what it was lent, and gives it back; one that borrows does not
        if room < 1 and search.undecided:
            search.read_ahead(now)
            return False
        positions, slots = search.take(room, now)
        if not len(positions) and search.undecided:
            return False
        if self.credit is not None:
            self.credit -= len(positions) * block_bytes
        self._places = None
        if lends and leases is not None and len(positions):
            self._places = leases.references(namespace, slots)
            if self._places is not None:
                per_frame = len(positions)
            elif len(positions) > group:  # as payload, fewer blocks are made ready at a time
                namespace.release(slots[group:])
                search.put_back(positions[group:])
                positions, slots = positions[:group], slots[:group]
        for at in range(0, max(1, len(positions)), per_frame):
            self._group.append((positions[at : at + per_frame], slots[at : at + per_frame]))
        if self._places is None or search.undecided:
            self.count_use(now)
        self._ends, self._miss = not search.undecided, search.misses
        self._parts = None
        if len(positions) and self._places is None:
            attributes = namespace.attributes_of(slots, now) if self._attributes else b""
            self._parts = Parts(
                self.id,
                positions,
                namespace.checksums(slots),
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

    def count_use(self, now: float) -> None:
        """Count the use of its blocks now: it waits, and others may be evicted meanwhile."""
        if self._search is not None and self._search.untouched:
            self._search.touch(now)

    def close(self) -> None:
        """The stream is over, complete or not: release the slots of parts that were ready and not sent."""
        namespace = self.namespace
        if namespace is not None and self._search is not None:
            self._search.stop_waiting()
            for _, slots in self._group:
                namespace.release(slots)
        self._group.clear()

    def _part(
        self, namespace: NamespaceStore, search: Search, positions: Positions, slots: Slots, now: float
    ) -> Outgoing:
        """-> the next part of the group."""
        self._hit += len(positions)
        self.done = self._ends and not self._group
        if self.done and self._used:
            namespace.hits += self._hit
            namespace.misses += self._miss
            if search.fetched:  # reading from disk touched the blocks one by one
                search.touch(now)
        if not len(positions):
            return self._empty_part()
        if self._disk is not None and self._used:
            self._disk.was_read(namespace, slots, now)
        if self._parts is None:
            outgoing = self._lend(namespace, positions, slots, now)
        else:
            outgoing = Outgoing([], self._parts, functools.partial(namespace.release, slots))
        if self.done and search.untouched:
            outgoing.release = functools.partial(_release_and_touch, outgoing.release, search, now)
        return outgoing

    def _lend(self, namespace: NamespaceStore, positions: Positions, slots: Slots, now: float) -> Outgoing:
        assert self._leases is not None and self._places is not None
        lent = self._leases.lend(self.id, namespace, slots, self._places)
        part = Part(
            self.id,
            positions.tobytes(),
            namespace.checksums(slots).tobytes(),
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


def _release_and_touch(release: Callable[[bool], object] | None, search: Search, now: float, all_sent: bool) -> None:
    """Called when the last part of a reply is sent: only then is the use of its blocks counted, while the client reads
    them."""
    if release is not None:
        release(all_sent)
    if search.untouched:
        search.touch(now)
