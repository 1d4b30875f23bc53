"""Checks the health of a node. Every check queries the shards, so its result is current.

All shards are queried at once, each on its own thread. At most one query per shard is in progress, and callers that
arrive in the meantime share its result. So a shard that hangs holds only one thread, even if many probes wait for it.
A check takes at most `VERDICT_S` seconds. Any thread may use a `Health`.
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
from kvstore.wire.queries import Dial, ShardQueries, ShardQueryError, dial_tcp

if TYPE_CHECKING:
    from kvstore.cluster.etcd import Drain
    from kvstore.cluster.members import Member
    from kvstore.moving.progress import FillProgress, MoveReport
    from kvstore.node.tls import TLSUse

log = logging.getLogger("kvstore.server")

WATCH_S: Final = 5.0  # between two checks of a node without an HTTP server
HEALTH_TIMEOUT_S: Final = 1.5  # how long a shard may take to connect, and after that to answer
VERDICT_S: Final = 2.0  # the time to check all shards


@dataclass(frozen=True)
class RegistrationStatus:
    """The state of a node's membership, for metrics and health checks."""

    registered: bool
    state: str  # of the node; "out" if it has left and joins again only after a restart
    epoch: int  # of the last view
    nodes: Sequence[Member]  # of the last view
    directory_up: bool
    directory_errors: int
    changes: int  # of the view
    drain: Drain | None = None
    fill: MoveReport | None = None  # the current or the last fill of nodes that joined
    filling: FillProgress | None = None  # the current one


@dataclass(frozen=True)
class NodeView:
    """The supervisor's own state, for health checks and metrics. Any thread may call its functions."""

    addresses: Sequence[tuple[str, int]]  # of the shards
    not_serving: Callable[[int], str]  # why no process serves a shard; empty if one does
    pid: Callable[[int], int]  # the process of a shard; 0 if there is none
    stopping: Callable[[], bool]
    restarts: Callable[[], int]  # of shards, so far
    cluster: Callable[[], RegistrationStatus] | None  # the node's membership; None if it is in no cluster
    cookie: str  # with this cookie, shards accept health checks even at their limit of connections
    dial: Dial = dial_tcp
    tls: Callable[[], Sequence[TLSUse]] | None = None  # the TLS process of each shard; None without TLS


class ShardReadiness(msgspec.Struct, frozen=True):
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
    shards: list[ShardReadiness]
    cluster: ClusterState | None = None


class Health:
    """Queries the shards of a node. Thread-safe. Calls block for up to `VERDICT_S` seconds."""

    def __init__(self, node: NodeView) -> None:
        self.node = node
        count = len(node.addresses)
        self._threads = ThreadPoolExecutor(count, "kvstore-health")
        self._lock = threading.Lock()
        self._asked: list[Future[ShardInfo] | None] = [None] * count
        self._silent = [False] * count
        self._closed = threading.Event()

    def close(self) -> None:
        """Make no more queries. Does not block."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def watch(self) -> None:
        """Check the shards every `WATCH_S` seconds, on a thread, so that the log names a shard that does not answer.
        The page of an HTTP server checks more often, so a node with one needs no watch."""
        threading.Thread(target=self._watch, name="kvstore-health-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            self.shards()

    def shards(self) -> list[ShardInfo | str]:
        """Return each shard's state, or the reason why the shard did not answer."""
        questions = [self._question(shard) for shard in range(len(self.node.addresses))]
        wait(questions, VERDICT_S)
        return [_answer(question) for question in questions]

    def alive(self) -> bool:
        """Return whether at least one shard answers."""
        questions = [self._question(shard) for shard in range(len(self.node.addresses))]
        try:
            return any(question.exception() is None for question in as_completed(questions, VERDICT_S))
        except (Late, CancelledError):
            return False

    def readiness(self) -> Readiness:
        """Return whether the node is ready: every shard answers and, in a cluster, the node is registered."""
        shards = []
        reasons = []
        for number, state in enumerate(self.shards()):
            reason = state if isinstance(state, str) else ""
            shards.append(ShardReadiness(number, not reason, reason))
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
        """Return the shard's query that is in progress, or a new query."""
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
            refused.set_exception(ShardQueryError("the server is stopping"))
            return refused

    def _ask(self, shard: int) -> ShardInfo:
        node = self.node
        try:
            reason = node.not_serving(shard)
            if reason:
                raise ShardQueryError(reason)
            with ShardQueries(node.addresses[shard], HEALTH_TIMEOUT_S, cookie=node.cookie, dial=node.dial) as asking:
                info = asking.info()
        except ShardQueryError as error:
            if not self._silent[shard] and not node.stopping():
                log.warning("shard %d (pid %d) does not answer: %s", shard, node.pid(shard), error)
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
    """Return why the node is not registered in its cluster, or an empty string if it is."""
    if status.registered:
        return ""
    if status.state == "out":
        return "the node has left the cluster; restart it to join again"
    if not status.directory_up:
        return "not registered: etcd cannot be reached; see the log"
    return "not registered yet, or another process has its --node-id; see the log"
