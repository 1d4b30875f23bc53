"""The shards that gain blocks, shared by all threads of one mover: which are full, which failed, what they have."""

from __future__ import annotations

import logging
import threading

import numpy as np

from kvstore.moving.planning import NOBODY, Plan, Targets
from kvstore.moving.progress import Progress
from kvstore.moving.settled import Holder, Settled
from kvstore.wire import ShardAddress
from kvstore.wire.asking import AskError, KeyArray, Refused

log = logging.getLogger("kvstore.moving")


class Receivers:
    """The shards of `plan.after`, by their numbers in a `Targets`. Any thread.

    `settled`: copies that earlier movers made or found; copies that this mover makes or finds are added.
    """

    def __init__(self, plan: Plan, progress: Progress, settled: Settled | None) -> None:
        self.shards: list[ShardAddress] = [shard for member in plan.after for shard in member.shards]
        self._instances = [member.instance for member in plan.after for _ in member.shards]
        self._progress = progress
        self._settled = settled
        self._lock = threading.Lock()
        self._failed: set[tuple[int, bytes | None]] = set()  # target and namespace; None: for all namespaces
        self._full: set[int] = set()

    def is_full(self, target: int) -> bool:
        """Whether the shard has no room and so gets no more blocks."""
        return target in self._full

    def set_full(self, target: int) -> None:
        """The shard has no room: send it no more blocks."""
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
        """Whether the shard gets no more blocks, at all or of this namespace, because of an error."""
        return not self._failed.isdisjoint({(target, None), (target, canonical)})

    def set_failed(self, target: int, canonical: bytes, error: AskError) -> None:
        """Send the shard no more blocks; if it only refused a request, no more of this namespace."""
        what = target, canonical if isinstance(error, Refused) else None
        with self._lock:
            new = what not in self._failed
            self._failed.add(what)
        if new and not self._progress.over:
            of_it = "of one namespace " if what[1] is not None else ""
            log.warning("moving: nothing more %sis sent to shard %s: %s", of_it, self.shards[target].name, error)

    def settle(self, target: int, canonical: bytes, keys: KeyArray) -> None:
        """The shard has these blocks."""
        if self._settled is not None and len(keys):
            self._settled.add(self._holder(target, canonical), keys)

    def strike_out_settled(self, canonical: bytes, keys: KeyArray, targets: Targets) -> None:
        """Remove from `targets` the copies that were made or found before."""
        if self._settled is not None:
            for target in numbers_in(targets):
                gained = np.argwhere(targets == target)
                there = self._settled.among(self._holder(target, canonical), keys[gained[:, 0]])
                targets[tuple(gained[there].T)] = NOBODY

    def _holder(self, target: int, canonical: bytes) -> Holder:
        return self._instances[target], self.shards[target].name, canonical


def numbers_in(targets: Targets) -> list[int]:
    """The numbers of the shards that gain any of these blocks, ascending."""
    found: list[int] = np.unique(targets[targets != NOBODY]).tolist()
    return found
