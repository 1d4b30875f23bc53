"""Long work on many blocks, in steps of a few milliseconds, so that it does not delay other clients.

Jobs run one after the other, a step a turn of the loop; those of the cluster's members go first. PURGE removes the
blocks that are in memory and on disk when it starts; blocks that are set while it runs may be removed or not. While the
disk tier recovers it waits, because a block that is not known yet cannot be removed. HOTTEST sorts all blocks by their
last use; the order is kept, so that a client that asks for one part after the other has it sorted once. A DELETE of
damaged blocks hashes those in memory.

Only the loop's thread uses this module.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from kvstore import wire
from kvstore._cext import BlockIndex, checksum
from kvstore.auth.rights import Rights
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import JOBS, LISTS, REMOVALS, Account, LimitReached
from kvstore.shard.peer import Peer
from kvstore.store.listing import Listing
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import Store
from kvstore.wire import WireError

STEP_BLOCKS: Final = 4096  # removed in one turn; takes some milliseconds with a disk tier
HASHED_BYTES: Final = 16 << 20  # in one turn, in some milliseconds
MAX_JOBS: Final = 64  # of all clients; those of one address may have as many as are still free
MAX_MEMBER_JOBS: Final = 64  # of members, whose jobs go first
LISTING_S: Final = 10.0  # how long the order of a namespace's blocks is kept after its last use

log = logging.getLogger("kvstore.shard")

Steps = Iterator[bool]
"""A job's steps: True after each, False when it can do nothing now. It sends the reply itself, as its last step."""


class _Job(NamedTuple):
    peer: Peer
    steps: Steps
    held: int  # bytes of keys


class Background:
    """The jobs that clients have requested."""

    def __init__(
        self, store: Store, disk: DiskTier | None, account: Account, answer: Callable[[Peer, wire.Reply], None]
    ) -> None:
        """answer: sends a reply once no removed block can come back from disk."""
        self._store = store
        self._disk = disk
        self._account = account
        self._answer = answer
        self._jobs: deque[_Job] = deque()
        self._member_jobs: deque[_Job] = deque()
        self._job: _Job | None = None  # the one that has begun
        self._waits = False
        self._now = 0.0
        self._listing: Listing | None = None
        self._listing_until = 0.0

    def purge(self, peer: Peer, request: wire.Purge) -> None:
        """Queue a purge. Raises `LimitReached` when too many jobs are queued."""
        self._add(peer, request.id, self._purge(peer, request, peer.rights, peer.namespace))

    def hottest(self, peer: Peer, request: wire.Hottest, namespace: NamespaceStore) -> None:
        """Queue a list of the hottest blocks. Raises `LimitReached` when too many jobs are queued."""
        self._add(peer, request.id, self._hottest(peer, request, namespace))

    def delete_damaged(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore, keys: bytes) -> None:
        """Queue a check of blocks. Raises `LimitReached` when too many jobs are queued, or the keys do not fit."""
        self._add(peer, request.id, self._delete_damaged(peer, request, namespace, keys), len(keys))

    def _add(self, peer: Peer, request_id: int, steps: Steps, held: int = 0) -> None:
        share, queue = peer.share, self._member_jobs if peer.member else self._jobs
        free = MAX_MEMBER_JOBS - len(queue) if peer.member else MAX_JOBS - len(queue) - share.jobs
        if free <= 0:
            raise LimitReached(
                JOBS,
                f"{len(queue)} purges, lists and checks of blocks wait, {share.jobs} of them of clients at "
                f"{share.address}; try again later",
                request_id,
            )
        share.check(held, request_id)
        share.take(REMOVALS, held)
        share.jobs += 1
        peer.jobs += 1
        queue.append(_Job(peer, steps, held))

    @property
    def pending(self) -> bool:
        """A job can go on now: the loop must not sleep."""
        return not self._waits and (self._job is not None or bool(self._jobs or self._member_jobs))

    def step(self, now: float) -> None:
        """Do the next step of the present job. Jobs of clients that are gone are dropped."""
        self._now = now
        if now > self._listing_until:
            self._keep(None)
        if self._job is None:
            queue = self._member_jobs or self._jobs
            if not queue:
                return
            self._job = queue.popleft()
        peer, steps, held = self._job
        working: bool | None = None
        try:
            if not peer.closed:
                working = next(steps, None)
        except WireError as error:
            peer.refuse(error.request_id, error)
        except Exception:  # a bug must end one client's connection, not the whole cache
            peer.close_after_defect()
        self._waits = working is False
        if working is None:
            self._job = None
            peer.jobs -= 1
            peer.share.jobs -= 1
            peer.share.give_back(REMOVALS, held)

    # ---- PURGE -----------------------------------------------------------------------------------------------

    def _purge(self, peer: Peer, request: wire.Purge, rights: Rights, canonical: bytes) -> Steps:
        """rights, canonical: when it was asked for; the connection may be somebody else's when it begins."""
        while self._disk is not None and self._disk.volume.recovering:
            yield False
        purged = 0
        for namespace in self._chosen(request, rights, canonical):
            for index in (namespace.memory.index, namespace.disk.index if namespace.disk is not None else None):
                if index is None:
                    continue
                for slots in np.array_split(listed := index.ready_slots(0, True), len(listed) // STEP_BLOCKS + 1):
                    keys = index.keys_of(slots[np.equal(index.states_of(slots), BlockIndex.READY)])
                    if self._disk is not None:
                        self._disk.fetching.disown(namespace, keys)
                    purged += namespace.delete(keys, self._now)
                    yield True
        self._answer(peer, wire.PurgeReply(request.id, purged))

    def _chosen(self, request: wire.Purge, rights: Rights, canonical: bytes) -> list[NamespaceStore]:
        if request.all:
            return [each for each in self._store if rights.owns(each.tenant) and rights.use(each.model)]
        namespace = self._store.get(canonical)
        return [namespace] if namespace is not None else []

    # ---- DELETE of damaged blocks ----------------------------------------------------------------------------

    def _delete_damaged(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore, keys: bytes) -> Steps:
        index, size = namespace.memory.index, namespace.key_bytes
        step = max(1, HASHED_BYTES // namespace.block_bytes) * size
        deleted = 0
        if namespace.opaque_sums:  # what cannot be checked is not deleted: clients with the secret delete it themselves
            keys = b""
        for at in range(0, len(keys), step):
            some = keys[at : at + step]
            slots = index.acquire(some, self._now, 0, False)
            there = np.flatnonzero(slots >= 0)
            sums = np.array([checksum(namespace.views(slots[i : i + 1])[0]) for i in there], dtype=np.uint64)
            wrong = there[sums != index.checksums(slots[there])]
            index.release(slots)
            bad = b"".join(some[i * size : (i + 1) * size] for i in wrong.tolist())
            if bad:
                log.warning("client %s: %d damaged blocks in memory were deleted", peer.address, len(wrong))
                if self._disk is not None:
                    self._disk.fetching.disown(namespace, bad)
                deleted += namespace.delete(bad, self._now)
            yield True
        self._answer(peer, wire.DeleteReply(request.id, deleted))

    # ---- HOTTEST ---------------------------------------------------------------------------------------------

    def _keep(self, listing: Listing | None) -> None:
        """Keep the order of a namespace's blocks, instead of the one that is kept."""
        if self._listing is not None:
            self._account.give_back(LISTS, self._listing.nbytes)
        self._listing = listing

    def _hottest(self, peer: Peer, request: wire.Hottest, namespace: NamespaceStore) -> Steps:
        listing = self._listing
        if listing is None or not listing.complete or listing.namespace is not namespace or not request.skip:
            self._keep(None)
            listing = Listing(namespace, self._now)
            peer.share.check(listing.nbytes, request.id)
            self._account.take(LISTS, listing.nbytes)  # of nobody in particular: others may use it
            self._keep(listing)
            for working in listing.steps():
                self._listing_until = self._now + LISTING_S
                yield working
        self._listing_until = self._now + LISTING_S
        limit = min(request.limit, wire.MAX_HOTTEST_BYTES // namespace.key_bytes // (1 + request.before))
        keys, before = listing.keys(request.skip, limit)
        before = before if request.before else b""
        peer.share.check(len(keys) + len(before), request.id)  # they stay there until the client has taken them
        peer.reply(wire.HottestReply(request.id, namespace.key_bytes, keys, listing.total, before))
