"""A GET in progress. The parts of its reply are made one at a time, as the connection can take them.

A stream never holds all slots of its request. It makes a group of a few parts ready at a time, and each part references
its slots until the kernel has taken its bytes. So a client that stops reading holds only the slots of one group. Each
part says how many bytes of its group are still to come. These bytes are certain to follow, so the client can sleep
until they have arrived. `Search` finds which blocks are there and for which ones to wait.

Credit: a client that uses credit gets only as much payload as it has granted. So other replies on its connection never
wait behind blocks that the client does not read. With credit, the deadline of the stream starts anew with every grant.
So the GET of a slow client does not fail, but the GET of a client that has vanished does.

References: on a Unix socket, a client may request references to blocks in shared memory (see `kvstore.shard.leases`).
Blocks that a part lends keep their slots until the client gives the blocks back, and the number of lent blocks is
limited. At the limit the stream waits a moment for the client to give back earlier loans. If the client gives nothing
back, or if other clients hold everything, the blocks are sent through the socket.
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
from kvstore.shard.turns import Stage
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore.store.tier import Slots
from kvstore.wire import REPLY_GROUP_BYTES, Get, Part, encode
from kvstore.wire.zmtp import frame

LOAN_WAIT_S: Final = 0.1  # the wait for a client to give back earlier loans, before blocks are sent instead


@dataclass(eq=False)
class Outgoing:
    """Bytes to send, and a function that is called when the kernel has taken them or the connection ends. The argument
    of the function says whether all bytes were taken. `parts`: an object whose next part is sent instead of `views`."""

    views: list[bytes | memoryview]
    parts: Parts | None = None
    release: Callable[[bool], object] | None = None
    descriptors: Sequence[int] = ()  # sent with the first byte


class ReplyStream:
    """The reply to one GET. Used by the loop's thread only. At the end, the connection's peer must call `close`."""

    __slots__ = (
        "_attributes",
        "_disk",
        "_disk_s",
        "_disk_since",
        "_ends",
        "_first_s",
        "_group",
        "_hit",
        "_leases",
        "_lent_at",
        "_limit_s",
        "_miss",
        "_parts",
        "_places",
        "_promised_since",
        "_resume",
        "_search",
        "_used",
        "began",
        "credit",
        "deadline",
        "done",
        "id",
        "namespace",
        "promised_s",
    )

    def __init__(
        self,
        store: ShardStore,
        disk: DiskTier | None,
        namespace: NamespaceStore | None,
        request: Get,
        keys: bytes,
        now: float,
        resume: Callable[[ReplyStream], None],
        pin_until: float,
        leases: Leases | None,
    ) -> None:
        """leases: the connection's leases, or None if the connection takes no references."""
        self.id = request.id
        self.namespace = namespace
        self.began = now
        self.credit = request.credit if request.credit > 0 else None
        self.done = False
        self._first_s = -1.0  # how long it has waited until its first blocks were looked up; below 0 before that
        self._disk_s = 0.0  # how long it has waited for blocks on disk
        self._disk_since = 0.0  # since when it waits for these; 0 if it does not
        self.promised_s = 0.0  # how long it has waited for promised blocks
        self._promised_since = 0.0  # since when it waits for these; 0 if it does not
        self._disk = disk
        self._resume = resume  # called when there may be parts to send again
        self._attributes = request.attributes
        self._leases = leases if request.references else None
        self._places: References | None = None  # where the blocks of the next part are, if they are lent
        self._lent_at = 0.0  # when blocks were last lent to the stream or given back
        self._used = request.refresh  # whether this GET counts as a use of its blocks
        self._group: deque[tuple[Positions, Slots]] = deque()  # parts that are ready but have not been sent
        self._parts: Parts | None = None  # the object that sends the parts; None if they are lent or empty
        self._ends = False  # the last part in the group ends the reply
        self._hit, self._miss = 0, request.count if namespace is None else 0
        self._limit_s = request.deadline_ms / 1000
        self.deadline = now + self._limit_s
        self._search: Search | None = None  # None if the namespace does not exist
        if namespace is not None:
            self._search = Search(store, disk, namespace, request, keys, now, pin_until, self.wake)

    @property
    def fetched(self) -> bool:
        """Whether at least one of its blocks was read from disk."""
        return self._search is not None and self._search.fetched

    def waits_s(self) -> dict[Stage, float]:
        """Return how long the shard has made it wait, by the stage of the loop that was responsible."""
        return {"replies": max(0.0, self._first_s), "disk": self._disk_s}

    @property
    def keys(self) -> int:
        """The number of keys for which the reply is decided: all of them at the end."""
        return self._hit + self._miss

    @property
    def sent_bytes(self) -> int:
        """The bytes of the blocks in the parts made so far."""
        return self._hit * self.namespace.block_bytes if self.namespace is not None else 0

    @property
    def nbytes(self) -> int:
        """The most memory that this stream takes, in bytes."""
        return STREAM_BYTES + (self._search.nbytes if self._search is not None else 0)

    def grant(self, credit: int, now: float) -> None:
        """Add `credit` bytes of payload that the client has granted. The deadline starts anew."""
        if self.credit is not None:
            self.credit += credit
            self.deadline = now + self._limit_s

    def released(self, now: float) -> None:
        """Note that the client has given back lent blocks. The deadline starts anew."""
        if self._leases is not None:
            self.deadline = now + self._limit_s
            self._lent_at = now

    def impatient(self, now: float) -> bool:
        """Return whether the stream has waited long enough for its client to give back lent blocks."""
        return self._leases is not None and self._leases.holds(self.id) and now - self._lent_at >= LOAN_WAIT_S

    def wake(self) -> None:
        """Search again, because the state of a block for which the stream waits has changed."""
        self._resume(self)

    @property
    def due(self) -> float:
        """The time at which to call `time_passed`."""
        wait_until = self._search.wait_until if self._search is not None else 0.0
        return min(self.deadline, wait_until) if wait_until else self.deadline

    def time_passed(self, now: float) -> None:
        """End the waits whose time is over. Promised blocks that are not there by now are misses. After the deadline
        the stream waits for no block."""
        if self._search is not None:
            self._search.wait_until = 0.0
            if now > self.deadline:
                self._search.give_up()
        self._resume(self)

    def give_up(self) -> None:
        """Count all blocks that are not being sent yet as misses, because the namespace is at another generation."""
        if self._search is not None:
            self._search.give_up()
        self._resume(self)

    def next_part(self, now: float) -> Outgoing | None:
        """Return the next part, or None if no part can be sent now: because there is no credit, or because none of the
        remaining blocks has come yet."""
        namespace, search = self.namespace, self._search
        if namespace is None or search is None:
            self.done = True
            return self._empty_part()
        if not self._group and not self._make_group(namespace, search, now):
            self.count_use(now)
            return None
        return self._part(namespace, search, *self._group.popleft(), now)

    def _make_group(self, namespace: NamespaceStore, search: Search, now: float) -> bool:
        """Make the next parts ready. Return False if no part can be sent now."""
        if self._first_s < 0:
            self._first_s = now - self.began
        block_bytes, per_frame = namespace.block_bytes, namespace.frame_blocks
        room = group = per_frame * max(1, REPLY_GROUP_BYTES // (per_frame * block_bytes))
        if self.credit is not None:
            room = min(room, self.credit // block_bytes)
        leases, lends = self._leases, False
        if leases is not None:
            lent = leases.room(namespace)
            if lent:
                room, lends, self._lent_at = lent, True, now
            elif leases.holds(self.id) and now - self._lent_at < LOAN_WAIT_S:
                search.read_ahead(now)
                return False  # a client that only reads lent blocks returns them soon; a client that borrows does not
        if room < 1 and search.undecided:
            search.read_ahead(now)
            return False
        positions, slots = search.take(room, now)
        if not len(positions) and search.undecided:
            if search.fetched:
                self._disk_since = self._disk_since or now
            elif search.wait_until:
                self._promised_since = self._promised_since or now
            return False
        if self._disk_since:
            self._disk_s += now - self._disk_since
            self._disk_since = 0.0
        if self._promised_since:
            self.promised_s += now - self._promised_since
            self._promised_since = 0.0
        if self.credit is not None:
            self.credit -= len(positions) * block_bytes
        self._places = None
        if lends and leases is not None and len(positions):
            self._places = leases.references(namespace, slots)
            if self._places is not None:
                per_frame = len(positions)
            elif len(positions) > group:  # the blocks are sent as payload, of which less is made ready at a time
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
        """Count the use of the blocks now, because the stream waits and the blocks might be evicted meanwhile."""
        if self._search is not None and self._search.untouched:
            self._search.touch(now)

    def close(self) -> None:
        """End the stream, whether complete or not. Release the slots of parts that were ready but not sent."""
        namespace = self.namespace
        if namespace is not None and self._search is not None:
            self._search.stop_waiting()
            for _, slots in self._group:
                namespace.release(slots)
        self._group.clear()

    def _part(
        self, namespace: NamespaceStore, search: Search, positions: Positions, slots: Slots, now: float
    ) -> Outgoing:
        """Return the next part of the group."""
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
    """Release the last part of a reply when it has been sent. The use of the blocks is counted only then, while the
    client reads them."""
    if release is not None:
        release(all_sent)
    if search.untouched:
        search.touch(now)
