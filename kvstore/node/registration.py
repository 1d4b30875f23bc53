"""A node's membership in a cluster: its record in etcd, from the start of the node until it leaves.

A thread of the supervisor checks every second whether the record is still the node's own and whether an operator has
requested a drain (`leaving`). Another thread renews the lease (`LeaseKeeper`). The states of a node:

* *joining*, for its grace period. The only member of a cluster skips this state, because no node can fill it;
* *serving*, until it must leave. Then it either withdraws at once, or first *drains*: it moves its hottest blocks to
  their next owners.

The lease ends if the supervisor is stopped or cut off for longer than the lease lasts. The record is gone if etcd has
lost its data. In both cases the node joins again, because its keys may have been set on other nodes meanwhile. It also
joins again when one of its shards has died, because the other nodes fill a new instance, as this node fills theirs
(`kvstore.moving.filling`).

While etcd cannot be reached, the node stays in its present state. When two processes have the same node id, the record
belongs to the first. The second process stays out, logs this, and registers when the record is gone. Only a node that
has just started may replace a record. The record must have an address on which this node now listens, which shows that
it is from an earlier run.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvstore.cluster.etcd import Drain, EtcdDirectory
from kvstore.cluster.following import Follower
from kvstore.cluster.members import DirectoryError, Member, Membership, State
from kvstore.cluster.url import EtcdURL
from kvstore.moving.draining import Draining
from kvstore.moving.filling import Filling
from kvstore.node.access import with_cookies
from kvstore.node.health import RegistrationStatus
from kvstore.node.leaving import LEAVE_S, Leaving
from kvstore.wire import ShardAddress
from kvstore.wire.queries import Dial, dial_tcp

log = logging.getLogger("kvstore.cluster")

REQUEST_TIMEOUT_S: Final = 2.0
LEASE_POLL_S: Final = 1.0
CONFLICT_LOG_S: Final = 10.0
REGISTER_RETRY_S: Final = (0.1, 0.5)
STOP_S: Final = 3.0  # how long `stop` waits for each thread


class LeaseKeeper(threading.Thread):
    """Renews `lease` every quarter of the lease's time. The thread does nothing else, so that no slow request to etcd
    can delay a renewal until the lease ends. It calls `ended()` when a lease has ended."""

    def __init__(self, url: EtcdURL, node: str, lease_s: int, ended: Callable[[], None]) -> None:
        super().__init__(name="kvstore-lease", daemon=True)
        # This timeout leaves time to try another endpoint before the lease ends if one does not answer.
        self.directory = EtcdDirectory(url, max(0.5, lease_s / 4))
        self.lease: int | None = None  # the lease of the record, or None if there is none to renew
        self.errors = 0
        self._node = node
        self._lease_s = lease_s
        self._on_ended = ended
        self._ended: int | None = None  # a lease that has ended
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped.set()

    @property
    def has_ended(self) -> bool:
        """Whether the lease has ended and the record is gone with it."""
        return self.lease is not None and self.lease == self._ended

    def run(self) -> None:
        """Renew the lease until `stop`."""
        pause_s = self._lease_s / 4
        while not self._stopped.wait(pause_s):
            lease = self.lease
            pause_s = self._lease_s / 4
            try:
                if lease is not None and not self.directory.keep_alive(lease):
                    self._ended = lease
                    self._on_ended()
            except DirectoryError as error:
                log.debug("node %s: cannot renew its lease: %s", self._node, error)
                self.errors += 1
                pause_s = random.uniform(*REGISTER_RETRY_S)
            except Exception:
                log.exception("node %s: renewing its lease failed; trying again", self._node)


class Registration:
    """The membership of one node. Thread-safe. Raises `DirectoryError` when the package requests is missing.

    `member`: the node's record; its state is ignored.
    `secret`: the argument of `with_cookies`.
    `shards`: the same shards, at addresses that this process can reach.
    `drained`: a function that is called on a separate thread after a call of `drain`, when the drain has ended and the
    node has left the cluster.
    """

    def __init__(
        self,
        url: EtcdURL,
        member: Member,
        shards: Sequence[ShardAddress],
        *,
        lease_s: int,
        grace_s: float,
        drained: Callable[[], None],
        secret: str = "",
        dial: Dial = dial_tcp,
    ) -> None:
        self.url = url
        self._secret = secret
        self.node = member.node
        self._member = member
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._drained = drained
        self._directory = EtcdDirectory(url, REQUEST_TIMEOUT_S)
        self._wake = threading.Event()
        self._keeper = LeaseKeeper(url, self.node, lease_s, self._wake.set)
        self._follower = Follower(str(url), self._on_view, name=self.node)
        self._lock = threading.Lock()  # held to write the record
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-registration", daemon=True)
        self._may_take_over = True
        self._joined = 0.0
        self._was_in = False
        self._conflict_said_at: float | None = None
        self._errors = 0
        self._lost = ""
        self._filling = Filling(member, shards, grace_s, dial)
        drain = functools.partial(
            Draining, self.node, shards, announce=self._announce_drain, members=self._members_now, dial=dial
        )
        self._leaving = Leaving(self.node, self._directory, self._withdraw, drain)
        self._out = False
        self._emptied = False  # a shard has lost its blocks, and the other nodes do not know this yet
        self._started = False

    def start(self, metrics: str) -> None:
        """Register as soon as etcd answers. Does not block. `metrics`: HOST:PORT of the node's metrics, or empty."""
        self._member = msgspec.structs.replace(self._member, metrics=metrics)
        self._started = True
        self._filling.start()
        self._follower.start()
        self._thread.start()
        self._keeper.start()

    def drain(self, seconds: float) -> None:
        """Move blocks away for at most `seconds`, and then withdraw. Does not block. Before `start`, the drain ends at
        once."""
        if not self._started:
            self._drained()
            return
        with self._lock:
            draining = self._leaving.begin(Drain(self._member.instance, seconds))

        def wait() -> None:
            draining.join(seconds)
            draining.stop()
            draining.join()
            self._drained()

        threading.Thread(target=wait, name="kvstore-drained", daemon=True).start()

    def shard_restarted(self) -> None:
        """Make the other nodes fill a shard that died and was restarted without its blocks. Does not block."""
        self._emptied = True
        self._wake.set()

    def stop(self) -> None:
        """Withdraw, and wait for a few seconds at most until clients know it. May be called before `start`."""
        self._stopped.set()
        self._wake.set()
        self._keeper.stop()
        self._filling.stop()
        self._leaving.stop(STOP_S)
        if self._started:
            self._thread.join(STOP_S)
            if self._withdraw():
                time.sleep(LEAVE_S)
            self._filling.join(STOP_S)
        self._follower.close()
        self._directory.close()
        self._keeper.directory.close()

    def status(self) -> RegistrationStatus:
        """Return the current state of the membership."""
        view = self._follower.current
        draining = self._leaving.draining
        return RegistrationStatus(
            registered=self._keeper.lease is not None,
            state="out" if self._out else self._member.state,
            epoch=view.epoch if view else 0,
            nodes=view.members if view else (),
            directory_up=not self._lost and not self._follower.lost,
            directory_errors=self._errors + self._keeper.errors + self._follower.errors,
            changes=self._follower.changes,
            drain=draining.progress if draining else None,
            fill=self._filling.progress,
            filling=self._filling.current,
        )

    # ---- the threads -----------------------------------------------------------------------------------------------

    def _on_view(self, view: Membership) -> None:
        self._wake.set()
        self._filling.take(msgspec.structs.replace(view, members=with_cookies(view.members, self._secret)))

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                with self._lock:
                    self._step()
                if self._lost:
                    log.warning("node %s: etcd answers again", self.node)
                failures, self._lost = 0, ""
                pause_s = LEASE_POLL_S
            except DirectoryError as error:
                self._errors += 1
                failures += 1
                if failures > 1 and not self._lost:
                    log.warning("node %s: cannot reach etcd: %s; the node goes on serving", self.node, error)
                    self._lost = str(error)
                pause_s = min(REGISTER_RETRY_S[1], REGISTER_RETRY_S[0] * 2.0 ** min(failures, 8)) * random.uniform(
                    0.5, 1.0
                )
            except Exception:
                log.exception("node %s: updating its membership failed; trying again", self.node)
                pause_s = REGISTER_RETRY_S[1]
            self._wake.wait(pause_s)
            self._wake.clear()

    def _step(self) -> None:
        if self._out or self._stopped.is_set():
            return
        keeper, leaving = self._keeper, self._leaving
        if keeper.has_ended:
            log.warning("node %s: its lease has ended; joining again", self.node)
            keeper.lease = None
        if keeper.lease is None:
            self._join()
            return
        if not self._check_record():
            return
        if self._emptied and leaving.draining is None:
            self._join_again(keeper.lease)
        leaving.check(self._member.instance)
        if leaving.draining is not None and self._member.state != "draining":
            self._write("draining")  # etcd did not answer when the drain began
        elif self._member.state == "joining" and self._is_filled():
            self._write("serving")

    def _join(self) -> None:
        """Register under a new lease, unless another process is registered with this node's id."""
        found = self._directory.read_member(self.node)
        mine = found is not None and (
            found.instance == self._member.instance  # this node has registered, but etcd's answer was lost
            or (self._may_take_over and not _addresses(found).isdisjoint(_addresses(self._member)))
        )
        if found is not None and not mine:
            self._stay_out(found)
            return
        state: State = "joining"
        if self._leaving.draining is not None:
            state = "draining"
        elif not any(member.node != self.node for member in self._directory.membership().members):
            state = "serving"
        member = msgspec.structs.replace(self._member, state=state)
        lease = self._directory.grant(self._lease_s)
        if not self._directory.register(member, lease, replace=mine):
            self._stay_out(None)
            return
        self._keeper.lease, self._member = lease, member
        self._may_take_over = False
        self._conflict_said_at = None
        self._joined = time.monotonic()
        how = "is again in" if self._was_in else "is in"
        text = "node %s %s cluster %s: state=%s shards=%d zone=%s address=%s"
        log.info(text, self.node, how, self.url, state, len(member.shards), member.zone, member.shards[0].host)
        self._was_in = True

    def _join_again(self, lease: int) -> None:
        """Become a new instance, which joins, so that the other nodes copy to it the blocks that it owns and lacks."""
        others = any(member.node != self.node for member in self._directory.membership().members)
        state: State = "joining" if others else "serving"
        member = msgspec.structs.replace(self._member, instance=uuid.uuid4().hex, state=state)
        self._filling.joins_as(member)
        self._emptied, written = False, False  # first, because another shard may die meanwhile
        try:
            written = self._directory.register(member, lease)
        finally:
            self._emptied = self._emptied or not written
        if written:
            self._member, self._joined = member, time.monotonic()
            log.warning("node %s: a shard was restarted and has lost its blocks; state=%s", self.node, state)

    def _check_record(self) -> bool:
        """Return whether the record still belongs to this node. If not, the node drops its lease, and either joins
        again or stays out."""
        found = self._directory.read_member(self.node)
        if found is not None and found.instance == self._member.instance:
            return True
        self._keeper.lease = None
        if found is None:
            log.warning("node %s: its record is gone; joining again", self.node)
            self._wake.set()
        else:
            self._stay_out(found)
        return False

    def _stay_out(self, found: Member | None) -> None:
        """Log an error every `CONFLICT_LOG_S` seconds, but only after the lease of an earlier run must have ended."""
        self._may_take_over = False
        now = time.monotonic()
        if self._conflict_said_at is None:
            log.info("node %s: its id is registered already; waiting until that record is gone", self.node)
            self._conflict_said_at = now + self._lease_s + 1.0 - CONFLICT_LOG_S
        if now - self._conflict_said_at < CONFLICT_LOG_S:
            return
        self._conflict_said_at = now
        where = f"at {found.shards[0].host}:{found.shards[0].port}" if found else "its record cannot be read"
        log.error(
            "node %s: another process is registered with this node id (%s) in cluster %s; this node stays out until "
            "that record is gone. Give each node its own --node-id",
            self.node,
            where,
            self.url,
        )

    def _is_filled(self) -> bool:
        """Whether the grace period is over. Only the time matters, because clients ask previous owners only while the
        node joins."""
        return time.monotonic() - self._joined >= self._grace_s

    def _write(self, state: State) -> None:
        """Change the node's state, here and in its record."""
        member = msgspec.structs.replace(self._member, state=state)
        lease = self._keeper.lease
        if lease is not None and self._directory.register(member, lease):
            log.info("node %s: state=%s (was %s)", self.node, state, self._member.state)
            self._member = member

    def _withdraw(self) -> bool:
        """Leave the cluster until the next start. Return False if the node was not a member."""
        with self._lock:
            self._out = True
            lease, self._keeper.lease = self._keeper.lease, None
            if lease is None:
                return False
            try:
                (self._keeper.directory if self._lost else self._directory).withdraw(self.node, lease)
            except DirectoryError as error:
                log.warning("node %s: cannot withdraw (%s); its record ends with its lease", self.node, error)
            else:
                log.info("node %s: has withdrawn from cluster %s", self.node, self.url)
            return True

    # ---- draining --------------------------------------------------------------------------------------------------

    def _announce_drain(self) -> None:
        self._filling.stop()
        with self._lock:
            try:
                self._write("draining")
            except DirectoryError as error:
                log.warning(
                    "node %s: cannot write to etcd that it drains (%s); moving its blocks anyway",
                    self.node,
                    error,
                )

    def _members_now(self) -> Sequence[Member]:
        """Return the members in the last view, with this node's current record."""
        view = self._follower.current
        others = [member for member in view.members if member.node != self.node] if view else []
        return with_cookies([*others, self._member], self._secret)


def _addresses(member: Member) -> set[tuple[str, int]]:
    return {(shard.host, shard.port) for shard in member.shards}
