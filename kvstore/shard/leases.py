"""Leases: the blocks that clients read in this shard's memory: on this host, or with a network card.

A GET by references does not send blocks: it tells where they are, and lends them. A block that is lent keeps its slot,
as while it is being sent, so it is not evicted and its segment is not given back. A lease ends when the client gives it
back, or when the client has closed its end of the connection, which the kernel does for a process that is gone. It does
not end by time: a client that sleeps may read on when it wakes up. Therefore all leases together have a limit, and one
connection may hold as much as is left for the others. Beyond it, blocks are sent through the socket.

A client gives blocks back with RELEASE, or by the id of their GET in its release ring, which wakes nobody: the shard
looks there before it lends more, before it makes room for a SET, and ten times a second. When it waits for blocks,
the ring tells the client to send a message.

A block that is given back was read; one that its client still held when it was gone was not. That counts for transient
blocks.

When the shard closes a connection, its leases stay until the client has closed its end as well: see `Holders`.
Used by the loop's thread only.
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
from kvstore.pages import FileMap
from kvstore.shard.account import LEASES, Share
from kvstore.store.arena import Arena
from kvstore.store.namespace import NamespaceStore
from kvstore.store.tier import Slots
from kvstore.wire.remote_memory import Handle, Sharing
from kvstore.wire.shared import MAX_DESCRIPTORS, MAX_REFERENCES
from kvstore.wire.zmtp import frame

LENT_SHARE: Final = 0.5  # of the shard's memory, that may be lent at a time
LEASE_BYTES: Final = 512  # what the lease of a part takes beside its slots

log = logging.getLogger(__name__)


class Lending:
    """What all connections together were lent, in bytes of blocks."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.limit_bytes = int(arena.segments * arena.segment_bytes * LENT_SHARE)
        self.held_bytes = 0
        self.blocks = 0
        self.remote_blocks = 0  # of them, those lent to clients that do not map this process's memory
        self.total_bytes = 0  # since the start
        self.with_ring: weakref.WeakSet[Leases] = weakref.WeakSet()

    def collect(self) -> None:
        """Release what clients have named in their rings."""
        if self.held_bytes:
            for leases in self.with_ring:
                leases.collect()


class References(NamedTuple):
    """Where blocks are: entries as PART carries them, and the files that the client has not got."""

    entries: npt.NDArray[np.uint64]
    new: list[tuple[int, Handle]]  # by segment


class Lent:
    """A reply by references that is ready to be sent."""

    __slots__ = ("descriptors", "extents", "references")

    def __init__(self, references: bytes) -> None:
        self.references = references
        self.extents: list[bytes] = []  # frames that go before the PART
        self.descriptors: list[int] = []  # that go with their bytes

    def close(self, sent: bool) -> None:
        """Close the descriptors: they were sent, or nobody will send them."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class Leases:
    """What one connection was lent. `share`: its part of the account of memory. `sharing`: how the client reads it.
    `ring_wanted`: it takes a release ring."""

    def __init__(self, lending: Lending, share: Share, sharing: Sharing) -> None:
        self.held_bytes = 0
        self.ring_wanted = False
        self._ring: IdRing | None = None
        self._lending = lending
        self._share = share
        self._sharing = sharing
        self._lent: dict[int, deque[tuple[NamespaceStore, Slots]]] = {}  # by id of the GET, the oldest first
        # By segment: the number of the file that the client was given of it.
        self._told = np.zeros(lending.arena.segments, dtype=np.uint64)

    def room(self, namespace: NamespaceStore) -> int:
        """How many blocks of a namespace may be lent to this connection now."""
        self.collect()
        room = self._room(namespace)
        if not room and self.held_bytes:
            self._lending.collect()
            self.collect(waits=True)  # what the client releases from now on, it tells by a message
            room = self._room(namespace)
        return room

    def _room(self, namespace: NamespaceStore) -> int:
        lending = self._lending
        # Afterwards it has as much as is left for the others: so a client that hangs holds half of what may be lent.
        room_bytes = (lending.limit_bytes - lending.held_bytes - self.held_bytes) // 2
        # Few descriptors may go in one message, so it refers to few files that the client has not got.
        most = MAX_REFERENCES if len(namespace.memory.segments) <= MAX_DESCRIPTORS else MAX_DESCRIPTORS
        if self._share.full:
            return 0
        return max(0, min(most, room_bytes // namespace.block_bytes))

    def holds(self, request_id: int) -> bool:
        """Whether blocks of a GET are lent."""
        return request_id in self._lent

    def references(self, namespace: NamespaceStore, slots: Slots) -> References | None:
        """-> where these slots are in memory that a client can map; None: not all of them are, or no descriptor is
        free. `lend` must follow: it takes the descriptors."""
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

    def lend(self, request_id: int, namespace: NamespaceStore, slots: Slots, places: References) -> Lent:
        """Lend blocks whose slots are referenced, at `places`: from now on the lease holds the slots."""
        lending = self._lending
        arena, lent = lending.arena, Lent(places.entries.tobytes())
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
        lending.held_bytes += nbytes
        lending.total_bytes += nbytes
        lending.blocks += len(slots)
        lending.remote_blocks += 0 if self._sharing.mapped else len(slots)
        self._share.take(LEASES, LEASE_BYTES + slots.nbytes)
        return lent

    def _make_ring(self, lent: Lent) -> None:
        """Have a release ring sent with a reply."""
        try:
            file = os.memfd_create("kvstore-releases", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:  # the client sends messages instead
            log.warning("no ring for releases: %s", error)
            return
        try:
            os.ftruncate(file, IdRing.NBYTES)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._ring = IdRing(FileMap(file, IdRing.NBYTES, writable=True).memory)
        except OSError as error:
            log.warning("no ring for releases: %s", error)
            os.close(file)
            return
        self._lending.with_ring.add(self)
        lent.descriptors.append(file)
        lent.extents.append(frame(wire.encode(wire.ReleaseRing(0, IdRing.NBYTES)), False))

    def collect(self, waits: bool = False) -> None:
        """Release what the client has named in the ring. `waits`: have it send a message next time."""
        if self._ring is not None:
            for request_id in self._ring.take(waits):
                self.release(request_id, 0)

    def release(self, request_id: int, count: int, read: bool = True) -> None:
        """The client reads the first `count` blocks lent to a GET no more; 0: none of them. `read`: it has read them.
        Does nothing for what was not lent."""
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
        """The client has closed its end."""
        self.collect()
        for request_id in list(self._lent):
            self.release(request_id, 0, read=False)

    def retire(self, numbers: list[int]) -> bytes:
        """Files were cut to nothing. -> the numbers of those that the client was given, as RETIRED carries them."""
        gone = np.isin(self._told, np.array(numbers, dtype=np.uint64))
        found = self._told[gone]
        self._told[gone] = 0
        return found.astype("<u8").tobytes()


class Holders:
    """Clients whose connection the shard has closed, and who may still read what they were lent.

    Their sockets stay open until they have closed their end.
    """

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self._holders: dict[int, tuple[socket.socket, Leases, Callable[[], None]]] = {}

    def keep(self, sock: socket.socket, leases: Leases, ended: Callable[[], None]) -> None:
        """Take over the socket of a connection that ends, and keep its leases. `ended` is called at their end."""
        with contextlib.suppress(OSError):  # the client has closed its end already, which the next poll tells
            sock.shutdown(socket.SHUT_WR)  # tells the client that nothing more comes
        self._holders[sock.fileno()] = (sock, leases, ended)
        self._poll.register(sock.fileno(), 0)  # poll tells of the end in any case

    def on_event(self, fd: int) -> bool:
        """-> whether the descriptor is one of a holder, whose client has now closed its end."""
        found = self._holders.pop(fd, None)
        if found is None:
            return False
        sock, leases, ended = found
        self._poll.unregister(fd)
        sock.close()
        leases.release_all()
        ended()
        return True
