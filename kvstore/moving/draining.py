"""Drains a node: moves its hottest blocks to their next owners while the node still answers for them.

The drain is a thread of the supervisor, so that the supervisor can watch its shards meanwhile; `Mover` moves the
blocks. The drain works in passes, each with the current members, until a pass finds nothing to move. One pass is not
enough: a client that did not know of the drain may have set blocks here, and a node that took blocks may have died.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvstore.cluster.etcd import Drain
from kvstore.cluster.members import Member
from kvstore.moving.mover import Mover
from kvstore.moving.planning import plan_leaving
from kvstore.moving.progress import MoveReport
from kvstore.moving.settled import Settled
from kvstore.wire import ShardAddress
from kvstore.wire.queries import Dial, dial_tcp

log = logging.getLogger("kvstore.cluster")

DRAIN_SETTLE_S: Final = 0.5  # the pause before each pass, so that clients see the drain and set blocks elsewhere
# How long to retry when only failing blocks are left. After this time, a node that died is no longer a member.
FAILING_S: Final = 10.0


class Draining(threading.Thread):
    """One drain, from the request until the node has left. Any thread may call `stop` and read `progress`.

    The drain's thread calls three functions:
    * `announce`, which writes the state `draining` into the node's record;
    * `members`, before each pass;
    * `leave`, at the end, even if some blocks have not moved.

    `dial`: see `ShardQueries`.
    """

    def __init__(
        self,
        node: str,
        shards: Sequence[ShardAddress],
        asked: Drain,
        announce: Callable[[], None],
        members: Callable[[], Sequence[Member]],
        leave: Callable[[], None],
        dial: Dial = dial_tcp,
    ) -> None:
        super().__init__(name="kvstore-draining", daemon=True)
        self.progress = asked  # replaced as a whole, never changed in place
        self._node = node
        self._shards = shards
        self._announce = announce
        self._members = members
        self._leave = leave
        self._dial = dial
        self._deadline = time.monotonic() + asked.seconds
        self._stopped = threading.Event()
        self._mover: Mover | None = None
        self._settled = Settled()
        self._report = MoveReport(0, 0, 0, 0)  # of all passes
        self._lock = threading.Lock()

    def run(self) -> None:
        """Drain the node, then leave. An error ends the drain early, but the node leaves nevertheless."""
        try:
            self._move()
        except Exception:
            log.exception("node %s: draining failed; the node leaves, and blocks not moved become misses", self._node)
        self._leave()

    def stop(self) -> None:
        """End the drain soon. Blocks that have not moved yet stay here."""
        self._stopped.set()
        with self._lock:
            if self._mover is not None:
                self._mover.stop()

    def _move(self) -> None:
        began = useful = time.monotonic()
        self._announce()
        self.progress = msgspec.structs.replace(self.progress, state="moving")
        passes = 0
        while not self._stopped.wait(min(DRAIN_SETTLE_S, max(0.0, self._deadline - time.monotonic()))):
            report = self._pass()
            passes += 1
            now = time.monotonic()
            if report.moved:
                useful = now
            nothing_left = not report.moved and not report.failed
            if nothing_left or now >= self._deadline or now - useful > FAILING_S:
                break
        log.info(
            "node %s: drained: to_move=%d moved=%d present=%d failed=%d passes=%d seconds=%.1f",
            self._node,
            self.progress.total,
            self.progress.moved,
            self.progress.present,
            self.progress.failed,
            passes,
            time.monotonic() - began,
        )

    def _pass(self) -> MoveReport:
        """Move the blocks that are here and not settled yet, in one pass."""
        earlier = self._report
        plan = plan_leaving(self._node, self._members())
        count = functools.partial(self._count, earlier)
        with self._lock:
            mover = self._mover = Mover(self._shards, self._node, plan, count, self._settled, self._dial)
            if self._stopped.is_set():
                mover.stop()
        report = mover.run(self._deadline)
        self.progress = msgspec.structs.replace(self.progress, left=sorted(set(mover.gave_up)))
        if mover.progress.over:  # the listing may be incomplete, so that `total` is too low
            self._take(msgspec.structs.replace(self._report, total=max(self._report.total, earlier.total)))
        return report

    def _count(self, earlier: MoveReport, report: MoveReport) -> None:
        """Record the report of the current pass. `earlier`: the report of the earlier passes."""
        self._take(report.after(earlier))

    def _take(self, report: MoveReport) -> None:
        self._report = report
        self.progress = msgspec.structs.replace(self.progress, done=report.done, **msgspec.structs.asdict(report))
