"""The order in which shards are asked for blocks, in rounds: first a block's owner, then others that may have it.

Each round asks the next candidate of every block. If the candidate lacks the block or cannot be asked, the block goes
on to the next round. All rounds share one deadline. Normally there is only one round. `lacking` names the owners that
lack blocks. If a later round finds these blocks, they can be set on these owners.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.batches import take
from kvstore_client._links.call import Call
from kvstore_client._links.link import Link
from kvstore_client._links.link_pool import LinkPool
from kvstore_client._links.view import NO_SHARD, Numbers, View
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError
from kvstore_client.keys import KeyArray

# If another shard can be asked, a shard is given up after this time of silence, even before the deadline.
MOST_PATIENCE_S: Final = 1.0
WAITING_PATIENCE_S: Final = 2.5  # the same time while shards wait for promised blocks and answer only PINGs


class Rounds:
    """The rounds of one call that looks for blocks. `positions`: the positions in `packed` of the keys to look for.
    For use by the calling thread only."""

    def __init__(
        self, pool: LinkPool, packed: KeyArray, positions: Numbers, replicas: int, timeout_s: float, waits: bool = False
    ) -> None:
        """`waits`: whether the shards may wait for promised blocks before they answer."""
        self._most_patience_s = WAITING_PATIENCE_S if waits else MOST_PATIENCE_S
        self.deadline = time.monotonic() + timeout_s
        self.failovers = 0  # blocks requested from another shard because one failed
        self.found_elsewhere = 0  # blocks found after the first round
        self._pool = pool
        self._packed = packed
        self._replicas = replicas
        self._error: KVStoreError | None = None
        self._unanswered: npt.NDArray[np.bool_] | None = None  # for each position; None while no shard has failed
        self._missed: list[tuple[Link, Numbers]] = []  # owners, each with the positions of blocks that it lacks
        self._begin(positions)

    def _begin(self, positions: Numbers) -> None:
        self._view: View = self._pool.view
        self._left = positions
        self._unanswered = None
        self._column = -1
        if self._view.links:
            self._candidates = self._view.readers(
                take(self._packed, positions), self._replicas, self._pool.preferred_replica
            )
        else:
            self._candidates = np.empty((len(positions), 0), dtype=np.intp)
            self._fail(positions)
        self._owners = min(self._replicas, self._view.new_nodes)

    @property
    def patience_s(self) -> float | None:
        """How long this round waits for a silent shard, in seconds; None if it waits until the deadline."""
        later: int = self._candidates.shape[1] - self._column - 1
        if not later:
            return None
        return min(self._most_patience_s, max(0.0, self.deadline - time.monotonic()) / (later + 1))

    def next(self) -> Sequence[tuple[Link, Numbers]]:
        """Start a round. Return the shards to ask, each with its positions, or an empty list if no shard is left."""
        while len(self._left):
            self._column += 1
            if self._column >= self._candidates.shape[1]:
                if not self._begin_again():
                    return ()
                continue
            numbers = self._candidates[:, self._column]
            if self._column == 0:
                return self._view.split(numbers, self._left)
            asked = numbers != NO_SHARD
            if asked.any() and time.monotonic() < self.deadline:
                return self._view.split(numbers[asked], self._left[asked])
        return ()

    def _begin_again(self) -> bool:
        """Start again under the new view, if there is one, for the blocks about which no shard has answered. Return
        whether this was done. It is called when no shard is left to ask."""
        if self._unanswered is None:
            return False
        unanswered = self._left[self._unanswered[self._left]]
        if not len(unanswered) or self._pool.view is self._view or time.monotonic() >= self.deadline:
            return False
        self._begin(unanswered)
        return True

    def settle(self, calls: Sequence[Call], present: npt.NDArray[np.bool_]) -> None:
        """End a round. `present[position]` says whether the block has been found by now. If no other shard can be
        asked, a refusal or a protocol error is raised at once."""
        more = self._candidates.shape[1] > 1
        for call in calls:
            error = call.error
            if error is None:
                if self._unanswered is not None:
                    self._unanswered[call.positions] = False
                if more and self._column < self._owners:
                    missed = call.positions[~present[call.positions]]
                    if len(missed):
                        self._missed.append((call.link.first, missed))
            elif more or isinstance(error, TRANSPORT_ERRORS):
                if self._error is None or not isinstance(error, TRANSPORT_ERRORS):
                    self._error = error
                if self._column == 0:  # what counts is whether the first candidate answered
                    self._fail(call.positions)
                self.failovers += call.count if more else 0
            else:
                raise error
        if not more and self._unanswered is None:
            return
        found = present[self._left]
        if self._column > 0:
            self.found_elsewhere += int(found.sum())
        if found.any():
            self._left = self._left[~found]
            self._candidates = self._candidates[~found]

    def _fail(self, positions: Numbers) -> None:
        if self._unanswered is None:
            self._unanswered = np.zeros(len(self._packed), dtype=np.bool_)
        self._unanswered[positions] = True

    def check(self, fail_open: bool) -> None:
        """End the call. If no shard gave an answer about some block, raise the error. With `fail_open`, a transport
        error is not raised."""
        unanswered = int(self._unanswered[self._left].sum()) if self._unanswered is not None else 0
        if not unanswered:
            return
        error = self._error or self._pool.no_shards()
        self._pool.stats.unanswered += unanswered
        if not (fail_open and isinstance(error, TRANSPORT_ERRORS)):
            raise error

    def lacking(self) -> list[tuple[Link, Numbers]]:
        """Return the owners that lack some of the blocks still to be found, each with the positions of these blocks."""
        if not self._missed:
            return []
        left = np.zeros(len(self._packed), dtype=np.bool_)
        left[self._left] = True
        lacking = [(link, missed[left[missed]]) for link, missed in self._missed]
        return [(link, positions) for link, positions in lacking if len(positions)]

    def owned_by(self, link: Link) -> Numbers:
        """Return the positions of all keys in the batch whose blocks this shard is to hold, in ascending order."""
        owners = self._view.owners(self._packed, self._replicas)
        return np.flatnonzero((owners == self._view.links.index(link)).any(axis=1))
