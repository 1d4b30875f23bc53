"""Plans which blocks go to which shards when the members change.

A `Plan` has the members before and after the change, and the nodes that send. A shard *gains* a block when it is to
hold a copy after the change and did not before. Any node that held a copy before the change can send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.cluster.members import Member
from kvstore.cluster.placement import Placement
from kvstore.wire.asking import KeyArray

NOBODY: Final = -1

Targets = npt.NDArray[np.intp]  # (n, copies): numbers of the shards that gain a block, or NOBODY
Ranks = npt.NDArray[np.intp]  # (n,): how many senders come before this node for a block


@dataclass(frozen=True)
class Plan:
    """All members of `before` and of `after` own blocks; their states are ignored.

    `senders`: the nodes of `before` that send the blocks that they held. When several of them have a block, the first
    one sends it; the others check at the end whether it arrived.
    `gentle`: move in the background, and send no more blocks to a full shard: its own blocks are as good as new ones.
    """

    before: Sequence[Member]
    after: Sequence[Member]
    senders: Set[str]
    gentle: bool = False

    @property
    def cookies(self) -> Mapping[str, str]:
        """The cookies of the members' nodes, by the names of their shards."""
        return {shard.name: member.cookie for member in (*self.before, *self.after) for shard in member.shards}


def plan_leaving(node: str, members: Sequence[Member]) -> Plan:
    """-> the plan when `node`, one of `members`, leaves: only it sends, and its time is short.

    The owners without it are to have all its blocks. The plan assumes that no copies are there already: while other
    nodes join or drain, the members do not tell which node has which block, so the shards are asked.
    """
    after = [member for member in members if member.is_new_owner and member.node != node]
    before = [member for member in members if member.node == node]
    return Plan(before, after, {node})


def plan_joining(joined: Set[str], members: Sequence[Member]) -> Plan:
    """-> the plan when the nodes `joined` are new among `members`: all other nodes send."""
    after = [member for member in members if member.is_new_owner]
    before = [member for member in after if member.node not in joined]
    return Plan(before, after, {member.node for member in before}, gentle=True)


class Gains:
    """Which shards gain the blocks of `node`. Both sides of `plan` must have members. Immutable; any thread."""

    def __init__(self, node: str, plan: Plan) -> None:
        self.targets = [shard for member in plan.after for shard in member.shards]
        self._after = _placement(plan.after)
        self._before = _placement(plan.before)
        # For each shard of `before`, by number: its number in `after`, whether it is on `node`, whether on a sender.
        numbers = {shard.name: number for number, shard in enumerate(self.targets)}
        placed = [(member.node, shard.name) for member in plan.before for shard in member.shards]
        self._number_after = np.array([numbers.get(name, NOBODY) for _, name in placed], dtype=np.intp)
        self._is_here = np.array([other == node for other, _ in placed], dtype=np.bool_)
        self._sends = np.array([other in plan.senders for other, _ in placed], dtype=np.bool_)

    def of(self, keys: KeyArray, copies: int) -> tuple[Targets, Ranks]:
        """-> for each of `keys`, (n, key_bytes): the shards that gain it, none if this node did not hold it before, and
        how many senders come before this node."""
        after, before = self._after.replicas(keys, copies), self._before.replicas(keys, copies)
        kept = (after[:, :, None] == self._number_after[before][:, None, :]).any(axis=2)
        here = self._is_here[before]
        targets = np.where(kept | ~here.any(axis=1, keepdims=True), NOBODY, after)
        earlier = self._sends[before] & (np.cumsum(here, axis=1) == 0)
        return targets, earlier.sum(axis=1)


def _placement(members: Sequence[Member]) -> Placement:
    """The same placement as in clients: a node without a zone counts as a zone of its own."""
    placed = [(shard, member) for member in members for shard in member.shards]
    return Placement(
        [shard.name for shard, _ in placed],
        [shard.weight for shard, _ in placed],
        [member.node for _, member in placed],
        [member.zone or member.node for _, member in placed],
    )
