"""Long work on many blocks, in steps of a few milliseconds, so that it does not delay other clients.

Jobs run one after the other, one step per turn of the loop. Removals of blocks of an earlier generation go first, and
then jobs of the cluster's members. A removal continues even if the client that requested it is gone. It waits while the
disk tier recovers, because a block that is not known yet cannot be removed.

HOTTEST sorts all blocks by their last use. The order is kept, so a client that requests one part of the list after the
other causes only one sort. A DELETE of damaged blocks hashes the blocks in memory.

Only the loop's thread uses this module.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore import wire
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import JOBS, LISTS, REMOVALS, Account, LimitReached
from kvstore.shard.peer import Peer
from kvstore.shard.purging import MOST_SILENT, Purging, Removal
from kvstore.store.generations import Generations
from kvstore.store.listing import Listing
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore.wire import WireError, namespace_id

STEP_BLOCKS: Final = 4096  # the blocks removed in one turn; with a disk tier this takes some milliseconds
HASHED_BYTES: Final = 16 << 20  # the bytes hashed in one turn, which takes some milliseconds
MAX_JOBS: Final = 64  # for all clients; one address may have at most as many jobs as are still free
MAX_MEMBER_JOBS: Final = 64  # for the cluster's members, whose jobs go first
NOTED_S: Final = 3.0  # how long a PURGE waits for clients to drop their copies
LISTING_S: Final = 10.0  # how long the order of a namespace's blocks is kept after its last use

log = logging.getLogger("kvstore.shard")

Steps = Iterator[bool]
"""A job's steps: True after each step, False when the job can do nothing now. Its last step sends the reply."""


class _Job(NamedTuple):
    peer: Peer
    steps: Steps
    request_id: int
    held: int  # the bytes of the keys that the job holds


@dataclass(eq=False)
class _Removal:
    """The removal of a namespace's blocks of an earlier generation. `blocks`: the number of blocks found so far."""

    canonical: bytes
    blocks: int = 0
    done: bool = False


class Background:
    """The jobs that clients have requested, and the namespaces whose older blocks must be removed."""

    answer: Callable[[Peer, wire.Reply], None]
    """Sends a reply once no removed block can come back from disk. The owner sets it before the first job."""

    def __init__(self, store: ShardStore, disk: DiskTier | None, account: Account, generations: Generations) -> None:
        self._store = store
        self._disk = disk
        self._account = account
        self._generations = generations
        self._jobs: deque[_Job] = deque()
        self._member_jobs: deque[_Job] = deque()
        self._job: _Job | None = None  # the job that has begun
        self._waits = False
        self._removals: deque[Steps] = deque([self._go_on()] if generations.emptying else [])
        self._removals_wait = False
        self._unsaved = False  # a removal is not saved yet, so a restart would repeat it
        self._now = 0.0
        self._listing: Listing | None = None
        self._listing_until = 0.0

    def purge(self, peer: Peer, request: wire.Purge, purging: Purging) -> None:
        """Raise generations, remove older blocks, and answer when all of this is done. If too many jobs are queued,
        this does nothing but raise `LimitReached`."""
        self._check_room(peer)
        purged = purging.purge(request, peer.session.rights, peer.session.namespace)
        holders = set[Peer]().union(*map(purging.holders, purged))
        removals: list[Removal] = [self.remove(each) for each in purged]
        removals += filter(None, map(purging.early, purged))
        self._add(peer, request.id, self._purge(peer, request, purging, removals, holders))

    def remove(self, canonical: bytes) -> _Removal:
        """Start to remove the older blocks of a namespace, which is marked as emptying."""
        removal = _Removal(canonical)
        self._removals.append(self._remove(removal))
        self._removals_wait = False
        return removal

    def hottest(self, peer: Peer, request: wire.Hottest, namespace: NamespaceStore) -> None:
        """Queue a job that lists the hottest blocks. Raises `LimitReached` if too many jobs are queued."""
        self._add(peer, request.id, self._hottest(peer, request, namespace))

    def delete_damaged(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore, keys: bytes) -> None:
        """Queue a job that checks blocks. Raises `LimitReached` if too many jobs are queued or the keys do not fit."""
        self._add(peer, request.id, self._delete_damaged(peer, request, namespace, keys), len(keys))

    def _check_room(self, peer: Peer) -> None:
        share, queue = peer.share, self._member_jobs if peer.member else self._jobs
        free = MAX_MEMBER_JOBS - len(queue) if peer.member else MAX_JOBS - len(queue) - share.jobs
        if free <= 0:
            raise LimitReached(
                JOBS,
                f"{len(queue)} purges, lists and checks of blocks are queued, {share.jobs} of them by clients at "
                f"{share.address}; try again later",
            )

    def _add(self, peer: Peer, request_id: int, steps: Steps, held: int = 0) -> None:
        self._check_room(peer)
        share, queue = peer.share, self._member_jobs if peer.member else self._jobs
        share.check(held)
        share.take(REMOVALS, held)
        share.jobs += 1
        peer.jobs += 1
        queue.append(_Job(peer, steps, request_id, held))

    @property
    def pending(self) -> bool:
        """True if a job can continue now, so that the loop must not sleep."""
        if self._removals and not self._removals_wait:
            return True
        return not self._waits and (self._job is not None or bool(self._jobs or self._member_jobs))

    def step(self, now: float) -> None:
        """Do the next step of the current job. Jobs of clients that are gone are dropped."""
        self._now = now
        if now > self._listing_until:
            self._keep(None)
        if self._removals and self._remove_more():
            return
        self._removals_wait = bool(self._removals)
        if self._unsaved and not self._removals:  # only one save per purge, because a save waits for the device
            self._unsaved = False
            self._generations.save()
        if self._job is None:
            queue = self._member_jobs or self._jobs
            if not queue:
                return
            self._job = queue.popleft()
        peer, steps, request_id, held = self._job
        working: bool | None = None
        try:
            if not peer.outbox.closed:
                working = next(steps, None)
        except WireError as error:
            peer.refuse(request_id, error)
        except Exception:  # a bug must end one client's connection, not the whole cache
            peer.close_after_defect()
        self._waits = working is False
        if working is None:
            self._job = None
            peer.jobs -= 1
            peer.share.jobs -= 1
            peer.share.give_back(REMOVALS, held)

    def _remove_more(self) -> bool:
        """Continue the removal that has begun. Return False if it cannot continue now."""
        try:
            removing = next(self._removals[0], None)
        except Exception:  # a bug must not end the whole cache; the namespace stays hidden until the next start
            log.exception("blocks of an earlier generation were not removed")
            removing = None
        if removing is False:
            return False
        self._waits = False  # a client may wait for this removal
        if removing is None:
            self._removals.popleft()
        return True

    # ---- PURGE -----------------------------------------------------------------------------------------------

    def _purge(
        self,
        peer: Peer,
        request: wire.Purge,
        purging: Purging,
        removals: list[Removal],
        holders: set[Peer],
    ) -> Steps:
        while not all(removal.done for removal in removals):
            yield False
        until = self._now + NOTED_S
        while purging.silent(holders) and self._now < until:
            yield False
        silent = [holder.address for holder in purging.silent(holders)]
        ids = [namespace_id(each) for each in dict.fromkeys(removal.canonical for removal in removals)]
        reply = wire.PurgeReply(
            request.id,
            sum(removal.blocks for removal in removals),
            max(map(self._generations.of, ids), default=request.generation),
            [each.hex() for each in ids],
            len(holders),
            silent[:MOST_SILENT],
        )
        self.answer(peer, reply)

    def _remove(self, removal: _Removal) -> Steps:
        while self._disk is not None and self._disk.recovering:
            yield False
        namespace = self._store.get(removal.canonical)
        if namespace is not None:
            for keys in namespace.all_keys(STEP_BLOCKS):
                if self._disk is not None:
                    self._disk.disown(namespace, keys)
                removal.blocks += namespace.delete(keys, self._now)
                yield True

        def removed() -> None:
            self._generations.end_emptying(namespace_id(removal.canonical))
            removal.done, self._unsaved, self._waits = True, True, False

        if self._disk is None:
            removed()
        else:  # wait for the disk, because a block could come back from there if this process died
            self._disk.after_removals(removed)

    def _go_on(self) -> Steps:
        """Continue the removals that an earlier process began, because their blocks have come back from disk."""
        while self._disk is not None and self._disk.recovering:
            yield False
        generations, there = self._generations, {each.id: each.canonical for each in self._store}
        for identity in generations.emptying:
            if identity in there:
                self.remove(there[identity])
            else:
                generations.end_emptying(identity)
        self._unsaved = True

    # ---- DELETE of damaged blocks ----------------------------------------------------------------------------

    def _delete_damaged(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore, keys: bytes) -> Steps:
        step = max(1, HASHED_BYTES // namespace.block_bytes) * namespace.key_bytes
        deleted = 0
        if namespace.opaque_sums:  # only clients with the secret can check and delete these blocks
            keys = b""
        for at in range(0, len(keys), step):
            bad = namespace.damaged(keys[at : at + step], self._now)
            if bad:
                count = len(bad) // namespace.key_bytes
                log.warning("client %s: %d damaged blocks in memory were deleted", peer.address, count)
                if self._disk is not None:
                    self._disk.disown(namespace, bad)
                deleted += namespace.delete(bad, self._now)
            yield True
        self.answer(peer, wire.DeleteReply(request.id, deleted))

    # ---- HOTTEST ---------------------------------------------------------------------------------------------

    def _keep(self, listing: Listing | None) -> None:
        """Keep the order of a namespace's blocks, in place of the order that was kept before."""
        if self._listing is not None:
            self._account.give_back(LISTS, self._listing.nbytes)
        self._listing = listing

    def _hottest(self, peer: Peer, request: wire.Hottest, namespace: NamespaceStore) -> Steps:
        listing = self._listing
        if listing is None or not listing.complete or listing.namespace is not namespace or not request.skip:
            self._keep(None)
            listing = Listing(namespace, self._now)
            peer.share.check(listing.nbytes)
            self._account.take(LISTS, listing.nbytes)  # not charged to one client, because others may use it
            self._keep(listing)
            for working in listing.steps():
                self._listing_until = self._now + LISTING_S
                yield working
        self._listing_until = self._now + LISTING_S
        limit = min(request.limit, wire.MAX_HOTTEST_BYTES // namespace.key_bytes // (1 + request.before))
        keys, before = listing.keys(request.skip, limit)
        before = before if request.before else b""
        peer.share.check(len(keys) + len(before))  # the keys stay queued until the client has taken them
        peer.outbox.reply(wire.HottestReply(request.id, namespace.key_bytes, keys, listing.total, before))
