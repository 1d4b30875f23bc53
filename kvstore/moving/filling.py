"""Fills nodes that join: in the background, this node copies to them the blocks that they now own.

Clients fill new nodes as well, with blocks that they find at the old owners. But blocks that no client reads during the
grace period would be lost at its end. So each node copies its blocks in the background: for the length of its own grace
period after it saw the new nodes join, or until their records say that they serve.

All other nodes fill a node that joins, even nodes that are joining themselves: they may hold new blocks that the next
one owns. When another node joins or any node leaves, the copying starts again with the new members; blocks that are
there already are not sent again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.cluster.following import SPREAD_S
from kvstore.cluster.members import Member, Membership
from kvstore.moving.mover import Mover
from kvstore.moving.planning import plan_joining
from kvstore.moving.progress import MoveReport
from kvstore.wire import ShardAddress

log = logging.getLogger("kvstore.cluster")

# Before the listing, so that all clients see the new view: blocks that are set here after the listing are not copied.
SETTLE_S: Final = SPREAD_S + 0.5

_Who = tuple[str, str]  # a node and its instance
_Joined = frozenset[tuple[_Who, float]]  # nodes that joined, and when this node saw it, monotonic


@dataclass(frozen=True, eq=False)
class _Task:
    """One fill."""

    joined: _Joined
    owners: frozenset[_Who]  # all new owners, with the nodes in `joined`
    members: Sequence[Member]
    deadline: float  # monotonic


class Filling(threading.Thread):
    """Fills nodes that join, one fill at a time, until `stop`. Any thread may call it; nothing blocks or raises.

    `member`: this node's record; its state is ignored. `shards`: this node's shards, at addresses that this process can
    reach.
    """

    def __init__(self, member: Member, shards: Sequence[ShardAddress], grace_s: float) -> None:
        super().__init__(name="kvstore-filling", daemon=True)
        self.progress: MoveReport | None = None  # of the present or the last fill; replaced as a whole
        self._me: _Who = (member.node, member.instance)
        self._shards = shards
        self._grace_s = grace_s
        self._seen: dict[_Who, float] = {}  # nodes that join in the last view, and when they were first seen
        self._changed = threading.Condition()  # guards the fields below
        self._task: _Task | None = None
        self._done: _Task | None = None
        self._mover: Mover | None = None
        self._stopped = False

    def take(self, view: Membership) -> None:
        """Take a new view of the members. Only one thread at a time may call this."""
        now = time.monotonic()
        owners = frozenset(_who(member) for member in view.members if member.is_new_owner)
        joining = [_who(member) for member in view.members if member.state == "joining"]
        self._seen = {who: self._seen.get(who, now) for who in joining}
        joined: _Joined = frozenset(
            (who, since) for who, since in self._seen.items() if who != self._me and now < since + self._grace_s
        )
        task = None
        if joined and self._me in owners:
            task = _Task(joined, owners, view.members, max(since for _, since in joined) + self._grace_s)
        with self._changed:
            if not self._stopped and not self._covers(task):
                self._replace(task)

    def is_now(self, member: Member) -> None:
        """This node has joined again, under another instance."""
        with self._changed:
            self._me = (member.node, member.instance)

    def stop(self) -> None:
        """End the present fill soon, and start no other."""
        with self._changed:
            self._stopped = True
            self._replace(None)

    def _covers(self, task: _Task | None) -> bool:
        """Whether the present task, which may be done already, makes `task` unnecessary."""
        known = self._task
        if known is None or task is None:
            return known is task
        same = task.joined == known.joined or (known is self._done and task.joined < known.joined)
        return same and task.owners == known.owners

    def _replace(self, task: _Task | None) -> None:
        self._task = task
        if self._mover is not None:
            self._mover.stop()
        self._changed.notify_all()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry out one task after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._task is not self._done)
                task = self._task
                if self._stopped:
                    return
            try:
                if task is not None:
                    self._fill(task)
            except Exception:  # a failed fill is not fatal: clients fill, too
                log.exception("node %s: filling %s failed", self._me[0], _names(task))
            with self._changed:
                self._mover, self._done = None, task

    def _fill(self, task: _Task) -> None:
        node, names = self._me[0], _names(task)
        with self._changed:
            settle_s = min(SETTLE_S, task.deadline - time.monotonic())
            if self._changed.wait_for(lambda: self._task is not task, settle_s):
                return
            plan = plan_joining({who[0] for who, _ in task.joined}, task.members)
            mover = self._mover = Mover(self._shards, node, plan, self._count)
        began = time.monotonic()
        log.info("node %s: filling %s, for at most %.0f s", node, names, task.deadline - began)
        report = mover.run(task.deadline)
        log.info(
            "node %s: filling %s is over: to_copy=%d copied=%d present=%d failed=%d seconds=%.1f",
            node,
            names,
            report.total,
            report.moved,
            report.present,
            report.failed,
            time.monotonic() - began,
        )

    def _count(self, report: MoveReport) -> None:
        self.progress = report


def _who(member: Member) -> _Who:
    return member.node, member.instance


def _names(task: _Task | None) -> str:
    return ", ".join(sorted(node for (node, _), _ in task.joined)) if task is not None else "nobody"
