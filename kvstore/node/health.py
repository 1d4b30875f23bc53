"""The health of a node: every check queries the shards, so its result is current.

All shards are queried at once, each on its own thread. At most one query a shard is in progress; callers that come
meanwhile share its result. So a shard that hangs holds one thread, however many probes wait for it. A check takes
`VERDICT_S` at most. Any thread may use a `Health`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.wire import ShardInfo
from kvstore.wire.asking import AskError, Asking, Dial, dial_tcp

if TYPE_CHECKING:
    from kvstore.cluster.etcd import Drain
    from kvstore.cluster.members import Member
    from kvstore.moving.progress import MoveReport
    from kvstore.node.tls import TLSUse

log = logging.getLogger("kvstore.server")

ASK_TIMEOUT_S: Final = 1.5  # to connect, and again to answer
VERDICT_S: Final = 2.0  # for all shards together


@dataclass(frozen=True)
class RegistrationStatus:
    """The state of a node's membership, for metrics and health checks."""

    registered: bool
    state: str  # of the node; "out": it has left, and joins again only after a restart
    epoch: int  # of the last view
    nodes: Sequence[Member]  # of the last view
    directory_up: bool
    directory_errors: int
    changes: int  # of the view
    drain: Drain | None = None
    fill: MoveReport | None = None  # the present or the last fill of nodes that joined


@dataclass(frozen=True)
class NodeView:
    """The supervisor's own state, for health checks and metrics. Any thread may call its functions."""

    addresses: Sequence[tuple[str, int]]  # of the shards
    not_serving: Callable[[int], str]  # why no process serves this shard; empty: one does
    stopping: Callable[[], bool]
    restarts: Callable[[], int]  # of shards, so far
    cluster: Callable[[], RegistrationStatus] | None  # the node's membership; None: not in a cluster
    cookie: str  # with which a shard always has a place for a check
    dial: Dial = dial_tcp
    tls: Callable[[], Sequence[TLSUse]] | None = None  # the TLS process of each shard; None: there are none


class ShardState(msgspec.Struct, frozen=True):
    """One shard in `Readiness`."""

    shard: int
    ready: bool
    reason: str  # why it is not ready


class ClusterState(msgspec.Struct, frozen=True):
    """The node's membership in `Readiness`."""

    registered: bool
    state: str
    reason: str


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of /readyz."""

    ready: bool
    reasons: list[str]
    shards: list[ShardState]
    cluster: ClusterState | None = None


class Health:
    """Queries the shards of a node. Any thread; calls block for up to `VERDICT_S`."""

    def __init__(self, node: NodeView) -> None:
        self.node = node
        count = len(node.addresses)
        self._threads = ThreadPoolExecutor(count, "kvstore-health")
        self._lock = threading.Lock()
        self._asked: list[Future[ShardInfo] | None] = [None] * count
        self._silent = [False] * count

    def close(self) -> None:
        """Make no more queries. Does not block."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def shards(self) -> list[ShardInfo | str]:
        """-> for each shard its state, or the reason why it did not answer."""
        questions = [self._question(shard) for shard in range(len(self.node.addresses))]
        wait(questions, VERDICT_S)
        return [_answer(question) for question in questions]

    def alive(self) -> bool:
        """Whether at least one shard answers."""
        questions = [self._question(shard) for shard in range(len(self.node.addresses))]
        try:
            return any(question.exception() is None for question in as_completed(questions, VERDICT_S))
        except (Late, CancelledError):
            return False

    def readiness(self) -> Readiness:
        """Whether every shard answers and, in a cluster, the node is registered."""
        shards = []
        reasons = []
        for number, state in enumerate(self.shards()):
            reason = state if isinstance(state, str) else ""
            shards.append(ShardState(number, not reason, reason))
            if reason:
                reasons.append(f"shard {number}: {reason}")
        cluster = None
        if self.node.cluster is not None:
            status = self.node.cluster()
            reason = why_not_registered(status)
            cluster = ClusterState(status.registered, status.state, reason)
            if reason:
                reasons.append(f"cluster: {reason}")
        if self.node.stopping():
            reasons.append("the server is stopping")
        return Readiness(not reasons, reasons, shards, cluster)

    def _question(self, shard: int) -> Future[ShardInfo]:
        """-> the query of a shard that is in progress, or a new one."""
        with self._lock:
            question = self._asked[shard]
            if question is None or question.done():
                question = self._asked[shard] = self._submit(shard)
            return question

    def _submit(self, shard: int) -> Future[ShardInfo]:
        try:
            return self._threads.submit(self._ask, shard)
        except RuntimeError:  # closed
            refused: Future[ShardInfo] = Future()
            refused.set_exception(AskError("the server is stopping"))
            return refused

    def _ask(self, shard: int) -> ShardInfo:
        try:
            reason = self.node.not_serving(shard)
            if reason:
                raise AskError(reason)
            node = self.node
            with Asking(node.addresses[shard], ASK_TIMEOUT_S, cookie=node.cookie, dial=node.dial) as asking:
                info = asking.info()
        except AskError as error:
            if not self._silent[shard] and not self.node.stopping():
                log.warning("shard %d does not answer: %s", shard, error)
                self._silent[shard] = True
            raise
        if self._silent[shard]:
            log.warning("shard %d answers again", shard)
            self._silent[shard] = False
        return info


def _answer(question: Future[ShardInfo]) -> ShardInfo | str:
    if not question.done() or question.cancelled():
        return f"no answer within {VERDICT_S:g} s"
    error = question.exception()
    return question.result() if error is None else str(error)


def why_not_registered(status: RegistrationStatus) -> str:
    """-> why the node is not registered in its cluster; empty: it is."""
    if status.registered:
        return ""
    if status.state == "out":
        return "the node has left the cluster; restart it to join again"
    if not status.directory_up:
        return "not registered: etcd cannot be asked; see the log"
    return "not registered yet, or another process has its --node-id; see the log"
