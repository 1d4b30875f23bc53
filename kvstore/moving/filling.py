"""Fills nodes that join: in the background, this node copies to them the blocks that they now own.

Clients fill new nodes as well, with blocks that they find at the old owners. But blocks that no client reads during the
grace period would be lost at the end of this period. So each node copies its blocks in the background. It does so for
the length of its own grace period after it saw the new nodes join, or until the new nodes' records say that they serve.

All other nodes fill a node that joins. Even nodes that are still joining do so, because they may hold new blocks that
the next node to join owns. When another node joins or any node leaves, the copying starts again with the new members.
Blocks that are already at their new owner are not sent again.

A copy that failed because a shard did not answer for some seconds is tried again in another pass. Otherwise the copy
would wait for the next change of members, and the death of one more shard would lose the block.
"""

from __future__ import annotations

import functools
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
from kvstore.moving.progress import FillProgress, MoveReport
from kvstore.moving.settled import Settled
from kvstore.wire import ShardAddress
from kvstore.wire.queries import Dial, dial_tcp

log = logging.getLogger("kvstore.cluster")

# The pause before the listing, so that all clients have the new view. Blocks that are set here after the listing are
# not copied.
FILL_SETTLE_S: Final = SPREAD_S + 0.5

FILL_RETRY_S: Final = (1.0, 30.0)  # the first and the longest pause between passes; each is twice the one before

_Who = tuple[str, str]  # a node and its instance
_Joined = frozenset[tuple[_Who, float]]  # nodes that joined, and when this node saw them, by the monotonic clock


@dataclass(frozen=True, eq=False)
class _Task:
    """One fill."""

    joined: _Joined
    owners: frozenset[_Who]  # all new owners, including the nodes in `joined`
    members: Sequence[Member]
    deadline: float  # by the monotonic clock


class Filling(threading.Thread):
    """Fills nodes that join, one fill at a time, until `stop`. Any thread may call its methods, which do not block or
    raise.

    `member`: this node's record; its state is ignored.
    `shards`: this node's shards, at addresses that this process can reach.
    `dial`: see `ShardQueries`.
    """

    def __init__(self, member: Member, shards: Sequence[ShardAddress], grace_s: float, dial: Dial = dial_tcp) -> None:
        super().__init__(name="kvstore-filling", daemon=True)
        self.progress: MoveReport | None = None  # the report of the current or the last fill; replaced as a whole
        self._began = 0.0  # when the current fill began
        self._node = member.node
        self._mine = {_who(member)}  # the names under which this node is or was a member
        self._shards = shards
        self._grace_s = grace_s
        self._dial = dial
        self._seen: dict[_Who, float] = {}  # the nodes that join in the last view, and when they were first seen
        self._changed = threading.Condition()  # guards the fields below
        self._task: _Task | None = None
        self._done: _Task | None = None
        self._mover: Mover | None = None
        self._stopped = False

    def take(self, view: Membership) -> None:
        """Accept a new view of the members. Only one thread at a time may call this."""
        now = time.monotonic()
        owners = frozenset(_who(member) for member in view.members if member.is_new_owner)
        joining = [_who(member) for member in view.members if member.state == "joining"]
        self._seen = {who: self._seen.get(who, now) for who in joining}
        joined: _Joined = frozenset(
            (who, since) for who, since in self._seen.items() if who not in self._mine and now < since + self._grace_s
        )
        task = None
        if joined and not self._mine.isdisjoint(owners):
            task = _Task(joined, owners, view.members, max(since for _, since in joined) + self._grace_s)
        with self._changed:
            if not self._stopped and not self._covers(task):
                self._replace(task)

    def joins_as(self, member: Member) -> None:
        """Record that this node joins again as another instance. Call this before the new record is written, so that
        this node knows the instance before any view contains the record."""
        self._mine = self._mine | {_who(member)}

    @property
    def current(self) -> FillProgress | None:
        """The progress of the current fill; None if there is none."""
        with self._changed:
            task, report = self._task, self.progress
            if self._mover is None or task is None or report is None:
                return None
            return FillProgress(_names(task), self._began, task.deadline, report)

    def stop(self) -> None:
        """End the current fill soon, and start no other."""
        with self._changed:
            self._stopped = True
            self._replace(None)

    def _covers(self, task: _Task | None) -> bool:
        """Return whether the current task, which may be done already, makes `task` unnecessary."""
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
            except Exception:  # a failed fill is not fatal, because clients fill, too
                log.exception("node %s: filling %s failed", self._node, _names(task))
            with self._changed:
                self._mover, self._done = None, task

    def _fill(self, task: _Task) -> None:
        node, names = self._node, _names(task)
        with self._changed:
            settle_s = min(FILL_SETTLE_S, task.deadline - time.monotonic())
            if self._changed.wait_for(lambda: self._task is not task, settle_s):
                return
        self.progress, self._began = MoveReport(0, 0, 0, 0), time.monotonic()
        log.info("node %s: filling %s for at most %.0f s", node, names, task.deadline - self._began)
        report = self._copy(task)
        log.info(
            "node %s: filling %s is over: to_copy=%d copied=%d present=%d failed=%d seconds=%.1f",
            node,
            names,
            report.total,
            report.moved,
            report.present,
            report.failed,
            time.monotonic() - self._began,
        )

    def _copy(self, task: _Task) -> MoveReport:
        """Copy in passes until a pass leaves nothing to try again, or the task is over. Return the report of all
        passes."""
        node, names = self._node, _names(task)
        plan = plan_joining({who[0] for who, _ in task.joined}, task.members)
        settled = Settled()
        report, pause_s = MoveReport(0, 0, 0, 0), FILL_RETRY_S[0]
        while True:
            with self._changed:
                if self._task is not task:
                    return report
                count = functools.partial(self._count, report)
                mover = self._mover = Mover(self._shards, node, plan, count, settled, self._dial)
            report = mover.run(task.deadline).after(report)
            if mover.progress.over or not (report.failed or mover.gave_up):
                return report
            log.warning("node %s: filling %s: blocks could not be copied; trying again in %.0f s", node, names, pause_s)
            with self._changed:
                self._changed.wait_for(lambda: self._task is not task, min(pause_s, task.deadline - time.monotonic()))
            pause_s = min(2 * pause_s, FILL_RETRY_S[1])

    def _count(self, earlier: MoveReport, report: MoveReport) -> None:
        """Record the report of the current pass. `earlier`: the report of the earlier passes."""
        self.progress = report.after(earlier)


def _who(member: Member) -> _Who:
    return member.node, member.instance


def _names(task: _Task | None) -> str:
    return ", ".join(sorted(node for (node, _), _ in task.joined)) if task is not None else "no node"
