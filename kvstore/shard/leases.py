"""Leases: the blocks that clients read in this shard's memory, either on this host or with a network card.

A GET by references sends no blocks. Its reply says where the blocks are, and lends them. A lent block keeps its slot,
like a block that is being sent. So the block is not evicted, and its segment is not given back. A lease ends when the
client gives it back, or when the client has closed its end of the connection. The kernel closes that end if the
client's process ends. A lease has no time limit, because a client that sleeps may continue to read when it wakes up.
Therefore all leases together have a limit, and one connection may hold at most as much as is left for the others.
Beyond the limit, blocks are sent through the socket.

A client gives blocks back with RELEASE, or by writing the id of their GET to its release ring. A write to the ring
wakes no process. So the shard reads the ring before it lends more, before it makes room for a SET, and ten times a
second. When the shard waits for blocks, it sets a flag in the ring, and the client then also sends a message.

A block that was given back counts as read. A block that a client still held when the client vanished does not count as
read. This matters for transient blocks.

When the shard closes a connection, the leases stay until the client has closed its end as well (see `Holders`). Used by
the loop's thread only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import IdRing, references_to
from kvstore.huge_pages import FileMap
from kvstore.shard.account import LEASES, AddressBudget
from kvstore.store.arena import Arena
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire.remote_memory import Handle, Sharing
from kvstore.wire.shared import MAX_DESCRIPTORS, MAX_REFERENCES
from kvstore.wire.zmtp import frame

LENT_SHARE: Final = 0.5  # the fraction of the shard's memory that may be lent at a time
LEASE_BYTES: Final = 512  # the memory for the lease of one part, in addition to its slots

log = logging.getLogger(__name__)


class LeaseTotals:
    """The totals of all connections' leases, in bytes of blocks."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.limit_bytes = int(arena.segments * arena.segment_bytes * LENT_SHARE)
        self.held_bytes = 0
        self.blocks = 0
        self.remote_blocks = 0  # the number of lent blocks whose clients do not map this process's memory
        self.total_bytes = 0  # bytes lent since the start
        self.with_ring: weakref.WeakSet[Leases] = weakref.WeakSet()

    def collect(self) -> None:
        """Release the blocks that clients have named in their rings."""
        if self.held_bytes:
            for leases in self.with_ring:
                leases.collect()


class References(NamedTuple):
    """Where blocks are: their entries for a PART, and those of their files that the client does not have yet."""

    entries: npt.NDArray[np.uint64]
    new: list[tuple[int, Handle]]  # by segment


class LeasedReply:
    """A reply by references that is ready to be sent."""

    __slots__ = ("descriptors", "extents", "references")

    def __init__(self, references: bytes) -> None:
        self.references = references
        self.extents: list[bytes] = []  # frames that go before the PART
        self.descriptors: list[int] = []  # sent with the bytes of the reply

    def close(self, sent: bool) -> None:
        """Close the descriptors, because they were sent or will never be sent."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class Leases:
    """The leases of one connection.

    share: the memory budget of the connection's address.
    sharing: how the client reads memory.
    ring_wanted: whether the client accepts a release ring.
    """

    def __init__(self, lending: LeaseTotals, share: AddressBudget, sharing: Sharing) -> None:
        self.held_bytes = 0
        self.lent_bytes = 0  # bytes lent since the connection was made
        self.ring_wanted = False
        self._ring: IdRing | None = None
        self._lending = lending
        self._share = share
        self._sharing = sharing
        self._lent: dict[int, deque[tuple[NamespaceStore, Slots]]] = {}  # by id of the GET, the oldest blocks first
        # By segment: the number of the file that the client was given for it.
        self._told = np.zeros(lending.arena.segments, dtype=np.uint64)

    def room(self, namespace: NamespaceStore) -> int:
        """Return the number of blocks of a namespace that may be lent to this connection now."""
        self.collect()
        room = self._room(namespace)
        if not room and self.held_bytes:
            self._lending.collect()
            self.collect(waits=True)  # from now on the client also sends a message when it releases blocks
            room = self._room(namespace)
        return room

    def _room(self, namespace: NamespaceStore) -> int:
        lending = self._lending
        # After this loan, the connection may hold as much as is left for the others. So a client that hangs holds at
        # most half of the limit.
        room_bytes = (lending.limit_bytes - lending.held_bytes - self.held_bytes) // 2
        # A message carries only a few descriptors, so it may refer to only a few files that the client does not have
        # yet.
        most = MAX_REFERENCES if len(namespace.memory.segments) <= MAX_DESCRIPTORS else MAX_DESCRIPTORS
        if self._share.full:
            return 0
        return max(0, min(most, room_bytes // namespace.block_bytes))

    def holds(self, request_id: int) -> bool:
        """Return whether blocks of this GET are lent."""
        return request_id in self._lent

    def references(self, namespace: NamespaceStore, slots: Slots) -> References | None:
        """Return where these slots are in memory that a client can map. Return None if the client cannot map all of
        them, or if no descriptor is free. Call `lend` next, because it takes over the descriptors."""
        arena = self._lending.arena
        offsets = namespace.memory.offsets(slots)
        entries, segments = references_to(offsets, arena.segment_bytes, arena.numbers, self._told)
        if not segments:
            return References(entries, [])
        if not all(arena.export(segment) for segment in segments):
            return None
        new: list[tuple[int, Handle]] = []
        try:
            for segment in segments:
                opened = functools.partial(arena.open_to_read, segment)
                new.append((segment, self._sharing.offer(arena.view(segment), opened)))
        except OSError:
            for _, handle in new:
                handle.close()
            return None
        entries, _ = references_to(offsets, arena.segment_bytes, arena.numbers, self._told)
        return References(entries, new)

    def lend(self, request_id: int, namespace: NamespaceStore, slots: Slots, places: References) -> LeasedReply:
        """Lend the blocks at `places`. Their slots are referenced already, and the lease holds them from now on."""
        lending = self._lending
        arena, lent = lending.arena, LeasedReply(places.entries.tobytes())
        for segment, handle in places.new:
            number = int(arena.numbers[segment])
            lent.descriptors += handle.descriptors
            extent = wire.Extent(0, number, arena.segment_bytes, handle.data)
            lent.extents.append(frame(wire.encode(extent), False))
            self._told[segment] = number
        if self.ring_wanted and self._sharing.mapped:
            self.ring_wanted = False
            self._make_ring(lent)
        self._lent.setdefault(request_id, deque()).append((namespace, slots))
        nbytes = len(slots) * namespace.block_bytes
        self.held_bytes += nbytes
        self.lent_bytes += nbytes
        lending.held_bytes += nbytes
        lending.total_bytes += nbytes
        lending.blocks += len(slots)
        lending.remote_blocks += 0 if self._sharing.mapped else len(slots)
        self._share.take(LEASES, LEASE_BYTES + slots.nbytes)
        return lent

    def _make_ring(self, lent: LeasedReply) -> None:
        """Send a release ring with a reply."""
        try:
            file = os.memfd_create("kvstore-releases", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:  # without a ring the client sends messages
            log.warning("no release ring could be made: %s", error)
            return
        try:
            os.ftruncate(file, IdRing.NBYTES)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._ring = IdRing(FileMap(file, IdRing.NBYTES, writable=True).memory)
        except OSError as error:
            log.warning("no release ring could be made: %s", error)
            os.close(file)
            return
        self._lending.with_ring.add(self)
        lent.descriptors.append(file)
        lent.extents.append(frame(wire.encode(wire.ReleaseRing(0, IdRing.NBYTES)), False))

    def collect(self, waits: bool = False) -> None:
        """Release the blocks that the client has named in the ring. `waits`: whether the client must also send a
        message when it next writes to the ring."""
        if self._ring is not None:
            for request_id in self._ring.take(waits):
                self.release(request_id, 0)

    def release(self, request_id: int, count: int, read: bool = True) -> None:
        """Take back the first `count` blocks lent to a GET, or all of them if `count` is 0. `read`: whether the client
        has read them. Blocks that were not lent are ignored."""
        lent = self._lent.get(request_id)
        if lent is None:
            return
        left = count or -1
        while lent and left:
            namespace, slots = lent.popleft()
            if 0 < left < len(slots):
                lent.appendleft((namespace, slots[left:]))
                self._share.take(LEASES, LEASE_BYTES + slots[left:].nbytes)
                self._end(namespace, slots[:left], LEASE_BYTES + slots.nbytes, read)
                return
            self._end(namespace, slots, LEASE_BYTES + slots.nbytes, read)
            left -= len(slots) if left > 0 else 0
        if not lent:
            del self._lent[request_id]

    def _end(self, namespace: NamespaceStore, slots: Slots, account_bytes: int, read: bool) -> None:
        namespace.release(slots, read)
        nbytes = len(slots) * namespace.block_bytes
        self.held_bytes -= nbytes
        self._lending.held_bytes -= nbytes
        self._lending.blocks -= len(slots)
        self._lending.remote_blocks -= 0 if self._sharing.mapped else len(slots)
        self._share.give_back(LEASES, account_bytes)

    def release_all(self) -> None:
        """End all leases, because the client has closed its end of the connection."""
        self.collect()
        for request_id in list(self._lent):
            self.release(request_id, 0, read=False)

    def retire(self, numbers: list[int]) -> bytes:
        """Forget the files that were truncated. Return the numbers of those that the client had, in the form that
        RETIRED has."""
        gone = np.isin(self._told, np.array(numbers, dtype=np.uint64))
        found = self._told[gone]
        self._told[gone] = 0
        return found.astype("<u8").tobytes()


class Holders:
    """Clients that may still read the blocks lent to them although the shard has closed their connections.

    The shard keeps their sockets open until the clients have closed their ends.
    """

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self._holders: dict[int, tuple[socket.socket, Leases, Callable[[], None]]] = {}

    def keep(self, sock: socket.socket, leases: Leases, ended: Callable[[], None]) -> None:
        """Take over the socket of a connection that ends, and keep its leases. `ended` is called when the leases
        end."""
        with contextlib.suppress(OSError):  # the client may have closed its end already; the next poll reports that
            sock.shutdown(socket.SHUT_WR)  # so that the client sees that nothing more comes
        self._holders[sock.fileno()] = (sock, leases, ended)
        self._poll.register(sock.fileno(), 0)  # poll reports the end in any case

    def on_event(self, fd: int) -> bool:
        """Return whether the descriptor belongs to a holder. If it does, the client has closed its end, and its leases
        end."""
        found = self._holders.pop(fd, None)
        if found is None:
            return False
        sock, leases, ended = found
        self._poll.unregister(fd)
        sock.close()
        leases.release_all()
        ended()
        return True
