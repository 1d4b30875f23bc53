"""Plans which blocks go to which shards when the members change.

A `MovePlan` has the members before and after the change, and the nodes that send blocks. A shard *gains* a block if it
should hold a copy after the change and did not before. Any node that held a copy before the change can send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.cluster.members import Member
from kvstore.cluster.placement import Placement
from kvstore.wire.queries import KeyArray

NO_SHARD: Final = -1

Targets = npt.NDArray[np.intp]  # (n, copies): numbers of the shards that gain a block, or NO_SHARD
Ranks = npt.NDArray[np.intp]  # (n,): for each block, how many senders come before this node


@dataclass(frozen=True)
class MovePlan:
    """The members before and after a change. All of them own blocks; their states are ignored.

    `senders`: the nodes of `before` that send the blocks that they held. If several of them have a block, the first one
    sends the block, and the others check at the end whether it arrived.
    `gentle`: move in the background, and send no more blocks to a full shard, because the shard's own blocks are as
    valuable as new ones.
    """

    before: Sequence[Member]
    after: Sequence[Member]
    senders: Set[str]
    gentle: bool = False

    @property
    def cookies(self) -> Mapping[str, str]:
        """The cookies of the members' nodes, by the names of their shards."""
        return {shard.name: member.cookie for member in (*self.before, *self.after) for shard in member.shards}


def plan_leaving(node: str, members: Sequence[Member]) -> MovePlan:
    """Return the plan by which `node`, one of `members`, leaves. Only this node sends, and its time is short.

    All its blocks go to the shards that own them without this node. The plan assumes that these shards have no copies
    yet, because while other nodes join or drain, the list of members does not say which node has which block. So the
    shards are asked.
    """
    after = [member for member in members if member.is_new_owner and member.node != node]
    before = [member for member in members if member.node == node]
    return MovePlan(before, after, {node})


def plan_joining(joined: Set[str], members: Sequence[Member]) -> MovePlan:
    """Return the plan for filling the nodes `joined`, which are new among `members`. All other nodes send."""
    after = [member for member in members if member.is_new_owner]
    before = [member for member in after if member.node not in joined]
    return MovePlan(before, after, {member.node for member in before}, gentle=True)


class Gains:
    """Computes which shards gain the blocks of `node`. `plan` must have members before and after the change. Immutable;
    thread-safe."""

    def __init__(self, node: str, plan: MovePlan) -> None:
        self.targets = [shard for member in plan.after for shard in member.shards]
        self._after = _placement(plan.after)
        self._before = _placement(plan.before)
        # Arrays with an entry for each shard of `before`: its number in `after`, whether it is on `node`, and whether
        # it is on a sender.
        numbers = {shard.name: number for number, shard in enumerate(self.targets)}
        placed = [(member.node, shard.name) for member in plan.before for shard in member.shards]
        self._number_after = np.array([numbers.get(name, NO_SHARD) for _, name in placed], dtype=np.intp)
        self._is_here = np.array([other == node for other, _ in placed], dtype=np.bool_)
        self._sends = np.array([other in plan.senders for other, _ in placed], dtype=np.bool_)

    def of(self, keys: KeyArray, copies: int) -> tuple[Targets, Ranks]:
        """Return for each key the shards that gain its block, and how many senders come before this node. No shard
        gains a block that this node did not hold before.
        `keys`: an array (n, key_bytes)."""
        after, before = self._after.replicas(keys, copies), self._before.replicas(keys, copies)
        kept = (after[:, :, None] == self._number_after[before][:, None, :]).any(axis=2)
        here = self._is_here[before]
        targets = np.where(kept | ~here.any(axis=1, keepdims=True), NO_SHARD, after)
        earlier = self._sends[before] & (np.cumsum(here, axis=1) == 0)
        return targets, earlier.sum(axis=1)


def _placement(members: Sequence[Member]) -> Placement:
    """Return the same placement as clients compute, in which a node without a zone counts as a zone of its own."""
    placed = [(shard, member) for member in members for shard in member.shards]
    return Placement(
        [shard.name for shard, _ in placed],
        [shard.weight for shard, _ in placed],
        [member.node for _, member in placed],
        [member.zone or member.node for _, member in placed],
    )
