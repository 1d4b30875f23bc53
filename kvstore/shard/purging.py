"""Emptying namespaces: some blocks a turn of the loop, so that purging a million blocks does not delay other clients.

A purge removes what is in memory and on disk when its turn comes; blocks that are set while it runs may stay or go.
While the disk tier still recovers it waits, because a block that is not known yet cannot be removed. The loop's
thread uses all of this.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from kvstore import wire
from kvstore._cext import BlockIndex
from kvstore.disk.tier import DiskTier
from kvstore.shard.peer import Peer
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import Store
from kvstore.wire import ErrorCode, WireError

STEP_BLOCKS: Final = 4096  # removed in one turn: some milliseconds with a disk tier
MAX_WAITING: Final = 64

log = logging.getLogger("kvstore.shard")


class Purges:
    """The purges that clients asked for, one after the other."""

    def __init__(self, store: Store, disk: DiskTier | None, answer: Callable[[Peer, wire.Reply], None]) -> None:
        """`answer` sends a reply once nothing that was removed can come back from disk."""
        self._store = store
        self._disk = disk
        self._answer = answer
        self._waiting: deque[tuple[Peer, wire.Purge]] = deque()
        self._running: Iterator[int] | None = None
        self._purged = 0

    def add(self, peer: Peer, request: wire.Purge) -> None:
        """Do it, in the next turns of the loop. Raises `WireError` when too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise WireError(ErrorCode.LIMIT, f"{MAX_WAITING} purges wait already; try again later", request.id)
        self._waiting.append((peer, request))

    @property
    def pending(self) -> bool:
        """There is something to remove now: the loop must not sleep."""
        return bool(self._waiting) and not (self._disk is not None and self._disk.volume.recovering)

    def step(self, now: float) -> None:
        """Remove the next blocks."""
        if not self.pending:
            return
        peer, request = self._waiting[0]
        if self._running is None:
            self._purged = 0
            self._running = self._remove(self._chosen(peer, request), now)
        try:
            removed = next(self._running, None)
        except Exception:  # a defect of ours must cost one client its connection, not everybody the cache
            log.exception("purge: internal error")
            peer.close("internal error")
            removed = None
        if removed is not None:
            self._purged += removed
            return
        self._running = None
        self._waiting.popleft()
        if not peer.closed:
            self._answer(peer, wire.PurgeReply(request.id, self._purged))

    def _chosen(self, peer: Peer, request: wire.Purge) -> list[NamespaceStore]:
        if request.all:
            return list(self._store)
        namespace = self._store.get(peer.namespace)
        return [namespace] if namespace is not None else []

    def _remove(self, namespaces: list[NamespaceStore], now: float) -> Iterator[int]:
        """Remove the blocks of these. Gives after each step how many there were."""
        for namespace in namespaces:
            yield from self._remove_listed(namespace, namespace.memory.index, now)
            if namespace.disk is not None:
                yield from self._remove_listed(namespace, namespace.disk.index, now)

    def _remove_listed(self, namespace: NamespaceStore, index: BlockIndex, now: float) -> Iterator[int]:
        """Remove from both tiers what one tier's index lists."""
        listed = index.ready_slots()
        for at in range(0, len(listed), STEP_BLOCKS):
            slots = listed[at : at + STEP_BLOCKS]
            keys = index.keys_of(slots[np.equal(index.states_of(slots), BlockIndex.READY)])
            if self._disk is not None:
                self._disk.fetching.disown(namespace, keys)
            yield namespace.delete(keys, now)
