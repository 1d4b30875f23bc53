"""A node drains: its hottest blocks move to their next owners, while it still answers for them.

A thread of the supervisor, which goes on watching its shards meanwhile; the moving itself is `Mover`'s.
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
from kvstore.cluster.moving import Mover, MoveReport
from kvstore.cluster.planning import plan_leaving
from kvstore.wire import ShardAddress

log = logging.getLogger("kvstore.cluster")

SETTLE_S: Final = 0.5  # for clients to set elsewhere: what they set here after that has been listed would stay here


class Draining(threading.Thread):
    """One drain, from when it is asked for until the node has left.

    Calls, on its thread: `announce`, which makes the node draining for all to see and returns the members as they are
    then; and `leave`, when all is moved that could be, in time or at all.
    """

    def __init__(
        self,
        node: str,
        shards: Sequence[ShardAddress],
        asked: Drain,
        announce: Callable[[], Sequence[Member]],
        leave: Callable[[], None],
    ) -> None:
        super().__init__(name="kvstore-draining", daemon=True)
        self.progress = asked  # how far it is; replaced, never changed
        self._node = node
        self._shards = shards
        self._announce = announce
        self._leave = leave
        self._deadline = time.monotonic() + asked.seconds
        self._stopped = threading.Event()
        self._mover: Mover | None = None
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
        members = self._announce()
        self.progress = msgspec.structs.replace(self.progress, state="moving")
        self._stopped.wait(min(SETTLE_S, max(0.0, self._deadline - time.monotonic())))
        with self._lock:
            if self._stopped.is_set():
                return
            self._mover = Mover(self._shards, self._node, plan_leaving(self._node, members), self._count)
        began = time.monotonic()
        report = self._mover.run(self._deadline)
        log.info(
            "node %s: drained: to_move=%d moved=%d present=%d failed=%d seconds=%.1f",
            self._node,
            report.total,
            report.moved,
            report.present,
            report.failed,
            time.monotonic() - began,
        )

    def _count(self, report: MoveReport) -> None:
        self.progress = msgspec.structs.replace(
            self.progress,
            total=report.total,
            done=report.done,
            moved=report.moved,
            present=report.present,
            failed=report.failed,
        )
