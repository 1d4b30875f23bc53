"""A node drains: its hottest blocks move to their next owners, while it still answers for them.

A thread of the supervisor, which goes on watching its shards meanwhile; the moving itself is `Mover`'s. It is done in
passes, each with the members of that time, until one finds nothing more to move: a client that did not know yet may
have set blocks here, and a node that took blocks may have died.
"""

from __future__ import annotations

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

log = logging.getLogger("kvstore.cluster")

SETTLE_S: Final = 0.5  # before each pass, for clients to set elsewhere
# When only failing blocks are left, they are tried for so long: a node that died is out of the view by then.
FAILING_S: Final = 10.0


class Draining(threading.Thread):
    """One drain, from when it is asked for until the node has left.

    It calls, on its thread: `announce`, which writes the state draining into the node's record; `members` before each
    pass; and `leave` at the end, whether all blocks have moved or not.
    """

    def __init__(
        self,
        node: str,
        shards: Sequence[ShardAddress],
        asked: Drain,
        announce: Callable[[], None],
        members: Callable[[], Sequence[Member]],
        leave: Callable[[], None],
    ) -> None:
        super().__init__(name="kvstore-draining", daemon=True)
        self.progress = asked  # how far it is; replaced, never changed
        self._node = node
        self._shards = shards
        self._announce = announce
        self._members = members
        self._leave = leave
        self._deadline = time.monotonic() + asked.seconds
        self._stopped = threading.Event()
        self._mover: Mover | None = None
        self._settled = Settled()
        self._before = asked  # the progress of the passes before this one
        self._lock = threading.Lock()

    def run(self) -> None:
        """Drain."""
        try:
            self._move()
        except Exception:
            log.exception("node %s: draining failed; it leaves with what has moved so far", self._node)
        self._leave()

    def stop(self) -> None:
        """End soon, with what has moved so far."""
        self._stopped.set()
        with self._lock:
            if self._mover is not None:
                self._mover.stop()

    def _move(self) -> None:
        began = useful = time.monotonic()
        self._announce()
        self.progress = msgspec.structs.replace(self.progress, state="moving")
        passes = 0
        while not self._stopped.wait(min(SETTLE_S, max(0.0, self._deadline - time.monotonic()))):
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
        """Move what is here and not settled yet."""
        self._before = self.progress
        plan = plan_leaving(self._node, self._members())
        with self._lock:
            mover = self._mover = Mover(self._shards, self._node, plan, self._count, self._settled)
            if self._stopped.is_set():
                mover.stop()
        report = mover.run(self._deadline)
        if mover.progress.over:  # perhaps before all was listed
            self.progress = msgspec.structs.replace(self.progress, total=max(self.progress.total, self._before.total))
        return report

    def _count(self, report: MoveReport) -> None:
        """What failed before counts again: as whatever becomes of it now."""
        moved, present = self._before.moved + report.moved, self._before.present + report.present
        self.progress = msgspec.structs.replace(
            self.progress,
            total=self._before.moved + self._before.present + report.total,
            done=moved + present + report.failed,
            moved=moved,
            present=present,
            failed=report.failed,
        )
