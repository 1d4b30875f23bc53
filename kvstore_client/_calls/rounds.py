"""Which shard is asked for which blocks, round by round: first a block's owner, then other shards that may have it.

Each round asks the next candidate of every block. A block that its candidate lacks, or whose candidate cannot be asked,
goes on to the next round, all within one deadline. Normally there is only one round. `lacking` names the owners
without a block that a later round looks for, so that the block can be set there once it is found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.batches import take
from kvstore_client._links.call import Call
from kvstore_client._links.core import Core
from kvstore_client._links.link import Link
from kvstore_client._links.view import NOBODY, Numbers, View
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError
from kvstore_client.keys import KeyArray

# Even with a long deadline, a shard is given up after so long a silence while another one can be asked.
MOST_PATIENCE_S: Final = 1.0
WAITING_PATIENCE_S: Final = 2.5  # with a shard that waits for blocks and has nothing to say but to answer PINGs


class Rounds:
    """The rounds of one call that looks for blocks. `positions`: the positions in `packed` of the keys to look for.
    Used by the calling thread only."""

    def __init__(
        self, core: Core, packed: KeyArray, positions: Numbers, replicas: int, timeout_s: float, waits: bool = False
    ) -> None:
        """waits: the shards may wait for blocks before they answer."""
        self._most_patience_s = WAITING_PATIENCE_S if waits else MOST_PATIENCE_S
        self.deadline = time.monotonic() + timeout_s
        self.failovers = 0  # blocks looked for elsewhere because a shard failed
        self.found_elsewhere = 0  # blocks found after the first round
        self._core = core
        self._packed = packed
        self._replicas = replicas
        self._error: KVStoreError | None = None
        self._unanswered: npt.NDArray[np.bool_] | None = None  # by position; None: no shard has failed
        self._missed: list[tuple[Link, Numbers]] = []  # owners, each with positions of blocks that it lacks
        self._begin(positions)

    def _begin(self, positions: Numbers) -> None:
        self._view: View = self._core.view
        self._left = positions
        self._unanswered = None
        self._column = -1
        if self._view.links:
            self._candidates = self._view.readers(take(self._packed, positions), self._replicas, self._core.turn)
        else:
            self._candidates = np.empty((len(positions), 0), dtype=np.intp)
            self._fail(positions)
        self._owners = min(self._replicas, self._view.new_nodes)

    @property
    def patience_s(self) -> float | None:
        """How long this round waits for a silent shard; None: until the deadline."""
        later: int = self._candidates.shape[1] - self._column - 1
        if not later:
            return None
        return min(self._most_patience_s, max(0.0, self.deadline - time.monotonic()) / (later + 1))

    def next(self) -> Sequence[tuple[Link, Numbers]]:
        """Start a round. -> the shards to ask, each with the positions it is asked for; empty if no shard is left."""
        while len(self._left):
            self._column += 1
            if self._column >= self._candidates.shape[1]:
                if not self._begin_again():
                    return ()
                continue
            numbers = self._candidates[:, self._column]
            if self._column == 0:
                return self._view.split(numbers, self._left)
            asked = numbers != NOBODY
            if asked.any() and time.monotonic() < self.deadline:
                return self._view.split(numbers[asked], self._left[asked])
        return ()

    def _begin_again(self) -> bool:
        """No shard is left to ask. If there is a new view, start again with it for the blocks without an answer.
        -> whether there is one."""
        if self._unanswered is None:
            return False
        unanswered = self._left[self._unanswered[self._left]]
        if not len(unanswered) or self._core.view is self._view or time.monotonic() >= self.deadline:
            return False
        self._begin(unanswered)
        return True

    def settle(self, calls: Sequence[Call], present: npt.NDArray[np.bool_]) -> None:
        """End a round. `present[position]`: whether the block has been found by now. Raises a refusal or a protocol
        error at once if no other shard can be asked."""
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
                if self._column == 0:  # later failures change nothing: the first answer, or its absence, counts
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
        """End the call: raise the error if no shard gave an answer about some block. A transport error is not raised
        under `fail_open`."""
        unanswered = int(self._unanswered[self._left].sum()) if self._unanswered is not None else 0
        if not unanswered:
            return
        error = self._error or self._core.no_shards()
        self._core.stats.unanswered += unanswered
        if not (fail_open and isinstance(error, TRANSPORT_ERRORS)):
            raise error

    def lacking(self) -> list[tuple[Link, Numbers]]:
        """The owners that were asked and lack blocks that are still looked for, each with the blocks' positions."""
        if not self._missed:
            return []
        left = np.zeros(len(self._packed), dtype=np.bool_)
        left[self._left] = True
        lacking = [(link, missed[left[missed]]) for link, missed in self._missed]
        return [(link, positions) for link, positions in lacking if len(positions)]

    def owned_by(self, link: Link) -> Numbers:
        """The positions of all keys of the batch of which this shard is to hold a copy, in ascending order."""
        owners = self._view.owners(self._packed, self._replicas)
        return np.flatnonzero((owners == self._view.links.index(link)).any(axis=1))
