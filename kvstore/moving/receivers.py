"""What the threads of one mover know about the shards that gain blocks: which are full, which failed, and which blocks
they have."""

from __future__ import annotations

import logging
import threading

import numpy as np

from kvstore.moving.planning import NO_SHARD, MovePlan, Targets
from kvstore.moving.progress import MoveProgress
from kvstore.moving.settled import Holder, Settled
from kvstore.wire import ShardAddress
from kvstore.wire.queries import KeyArray, Refused, ShardQueryError

log = logging.getLogger("kvstore.moving")


class Receivers:
    """The shards of `plan.after`, by their numbers in a `Targets`. Thread-safe.

    `settled`: the copies that earlier movers made or found. The copies that this mover makes or finds are added to it.
    """

    def __init__(self, plan: MovePlan, progress: MoveProgress, settled: Settled | None) -> None:
        self.shards: list[ShardAddress] = [shard for member in plan.after for shard in member.shards]
        self._instances = [member.instance for member in plan.after for _ in member.shards]
        self._progress = progress
        self._settled = settled
        self._lock = threading.Lock()
        self._failed: set[tuple[int, bytes | None]] = set()  # target and namespace, or None for all namespaces
        self._full: set[int] = set()

    def is_full(self, target: int) -> bool:
        """Return whether the shard has no room, and so gets no more blocks."""
        return target in self._full

    def set_full(self, target: int) -> None:
        """Send the shard no more blocks, because it has no room."""
        with self._lock:
            new = target not in self._full
            self._full.add(target)
        if new:
            log.info("moving: shard %s is full: nothing more is copied to it", self.shards[target].name)

    @property
    def failures(self) -> int:
        """How often a shard has failed so far."""
        return len(self._failed)

    def has_failed(self, target: int, canonical: bytes) -> bool:
        """Return whether the shard gets no more blocks of this namespace, because of an error."""
        return not self._failed.isdisjoint({(target, None), (target, canonical)})

    def set_failed(self, target: int, canonical: bytes, error: ShardQueryError) -> None:
        """Send the shard no more blocks. If the shard refused a request, this applies to this namespace only."""
        what = target, canonical if isinstance(error, Refused) else None
        with self._lock:
            new = what not in self._failed
            self._failed.add(what)
        if new and not self._progress.over:
            of_it = "of one namespace " if what[1] is not None else ""
            log.warning("moving: nothing more %sis sent to shard %s: %s", of_it, self.shards[target].name, error)

    def settle(self, target: int, canonical: bytes, keys: KeyArray) -> None:
        """Record that the shard has these blocks."""
        if self._settled is not None and len(keys):
            self._settled.add(self._holder(target, canonical), keys)

    def strike_out_settled(self, canonical: bytes, keys: KeyArray, targets: Targets) -> None:
        """Remove from `targets` the copies that were made or found before."""
        if self._settled is not None:
            for target in numbers_in(targets):
                gained = np.argwhere(targets == target)
                there = self._settled.among(self._holder(target, canonical), keys[gained[:, 0]])
                targets[tuple(gained[there].T)] = NO_SHARD

    def _holder(self, target: int, canonical: bytes) -> Holder:
        return self._instances[target], self.shards[target].name, canonical


def numbers_in(targets: Targets) -> list[int]:
    """Return the numbers of the shards that gain any of these blocks, in ascending order."""
    found: list[int] = np.unique(targets[targets != NO_SHARD]).tolist()
    return found
