"""Which blocks go to whom when members change: what a shard gains.

A `Plan` has the members before and after the change, and who carries it out. A shard gains a block that it holds a copy
of after the change and did not before; whoever held one before can send it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.cluster.members import Member
from kvstore.cluster.placement import Placement
from kvstore.wire.asking import KeyArray

NOBODY: Final = -1

Targets = npt.NDArray[np.intp]  # (n, copies): numbers of the shards that gain a block, or NOBODY
Ranks = npt.NDArray[np.intp]  # (n,)


@dataclass(frozen=True)
class Plan:
    """All of `before` and of `after` own blocks, whatever their states.

    `senders`: the nodes of `before` that send, each what it held. A copy that several of them have is sent by the first
    of them; the others look last whether it is there.
    `gentle`: in the background, and nothing more goes to a shard that is full: what it has is as good as what would
    come.
    """

    before: Sequence[Member]
    after: Sequence[Member]
    senders: Set[str]
    gentle: bool = False


def plan_leaving(node: str, members: Sequence[Member]) -> Plan:
    """`node`, one of `members`, leaves: its time is short, and nobody else sends. All owners without it are to have
    what it has. Nothing counts as being there already: while others join or drain, the members do not tell who has
    what, so the shards are asked."""
    after = [member for member in members if member.is_new_owner and member.node != node]
    before = [member for member in members if member.node == node]
    return Plan(before, after, {node})


def plan_joining(joined: Set[str], members: Sequence[Member]) -> Plan:
    """The nodes `joined` are new among `members`: all others send."""
    after = [member for member in members if member.is_new_owner]
    before = [member for member in after if member.node not in joined]
    return Plan(before, after, {member.node for member in before}, gentle=True)


class Gains:
    """What a plan, of which neither side is empty, means for the blocks of `node`. Immutable; any thread."""

    def __init__(self, node: str, plan: Plan) -> None:
        self.targets = [shard for member in plan.after for shard in member.shards]
        self._after = _placement(plan.after)
        self._before = _placement(plan.before)
        # By a shard's number in `before`: its number in `after`, and whether it is one of this node, or of a sender.
        numbers = {shard.name: number for number, shard in enumerate(self.targets)}
        placed = [(member.node, shard.name) for member in plan.before for shard in member.shards]
        self._number_after = np.array([numbers.get(name, NOBODY) for _, name in placed], dtype=np.intp)
        self._is_here = np.array([other == node for other, _ in placed], dtype=np.bool_)
        self._sends = np.array([other in plan.senders for other, _ in placed], dtype=np.bool_)

    def of(self, keys: KeyArray, copies: int) -> tuple[Targets, Ranks]:
        """For each key: who gains it, if this node held it before; and how many senders come before this node."""
        after, before = self._after.replicas(keys, copies), self._before.replicas(keys, copies)
        kept = (after[:, :, None] == self._number_after[before][:, None, :]).any(axis=2)
        here = self._is_here[before]
        targets = np.where(kept | ~here.any(axis=1, keepdims=True), NOBODY, after)
        earlier = self._sends[before] & (np.cumsum(here, axis=1) == 0)
        return targets, earlier.sum(axis=1)


def _placement(members: Sequence[Member]) -> Placement:
    """As clients place: a node without a zone is in one of its own."""
    placed = [(shard, member) for member in members for shard in member.shards]
    return Placement(
        [shard.name for shard, _ in placed],
        [shard.weight for shard, _ in placed],
        [member.node for _, member in placed],
        [member.zone or member.node for _, member in placed],
    )
