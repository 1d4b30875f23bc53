"""Follows a cluster's members: a thread calls back with every new view, which is a list of the members.

While the directory cannot be reached, the last view stays. It also stays when a directory that had members suddenly
lists none: then the directory has lost its data, but the nodes still run, and will register again.
Members that leave or change are passed on at once. Members that join are passed on after a short random delay, so that
not all clients connect to a new node at the same time. Members that come back are not delayed. When etcd was down for
as long as a lease lasts, healthy nodes leave and join again at once, and their blocks are misses until the members are
passed on.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.cluster.members import DirectoryError, Member, Membership
from kvstore.cluster.schemes import directory_of
from kvstore.tls import TLSOptions

log = logging.getLogger(__name__)

REREAD_MEMBERS_S: Final = (
    5.0  # after this long without a change, the members are read again, because a broken connection is not noticed
)
SPREAD_S: Final = 1.0
LIST_SPREAD_NODE_S: Final = 0.001  # for each member
LIST_SPREAD_S: Final = 0.5  # the most for all members
REFILL_S: Final = 3.0  # how long nodes may take to register again after the directory lost its data
BACK_S: Final = 10.0  # a member that comes back within this time is passed on without a delay
BACKOFF_S: Final = (0.1, 1.0)
CLOSE_S: Final = 0.4


class Follower:
    """Follows the cluster at `url`. Raises the errors of `directory_of`.

    `on_change` is called with each new view, on the follower's thread, one call at a time. It is never called twice in
    a row with the same members, and never with an empty list. Errors that it raises are logged. It may call `close`.
    After `close` no new call is made, but a call in progress may continue for a moment.
    The thread does not survive a fork, so a child process needs its own follower.
    """

    def __init__(
        self,
        url: str,
        on_change: Callable[[Membership], None],
        *,
        name: str = "follower",
        tls: TLSOptions | None = None,
    ) -> None:
        self.url = url.partition("?")[0]  # for messages
        self._directory = directory_of(url, tls)
        self._on_change = on_change
        self._name = name
        self._closed = threading.Event()
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvstore-{name}", daemon=True)
        self._current: Membership | None = None
        self._lost = ""
        self._reason = "it has not answered yet"
        self._admit_at: float | None = None  # when to pass on members that joined
        self._left: dict[tuple[str, str], float] = {}  # when each member (node, instance) left, in the last `BACK_S`
        self._refilled_at: float | None = None  # after the directory was empty: when to pass on an incomplete list
        self._failures = 0
        self.errors = 0
        self.changes = 0

    @property
    def lost(self) -> str:
        """Why the directory cannot be reached now; empty if it can."""
        return self._lost

    @property
    def current(self) -> Membership | None:
        """The last view, or None before the first one."""
        return self._current

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, timeout_s: float) -> Membership:
        """Block until there is a view, and return it. Raises `DirectoryError`, with the reason, after `timeout_s`."""
        if not self._known.wait(timeout_s) or self._current is None:
            raise DirectoryError(f"no members of {self.url} within {timeout_s:g} s: {self._reason}")
        return self._current

    def close(self) -> None:
        """Stop following. Blocks for up to `CLOSE_S`; the thread may end some seconds later if etcd does not answer."""
        self._closed.set()
        self._directory.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            answered = False
            try:
                view = self._directory.membership()
                answered = True
                self._found()
                self._take(view)
                if self._directory.wait_for_change(view.epoch, self._look_s()):
                    # A change wakes all followers at the same time, but they must not all list the members at once.
                    self._closed.wait(random.uniform(0.0, min(LIST_SPREAD_S, len(view.members) * LIST_SPREAD_NODE_S)))
                self._failures = 0
            except DirectoryError as error:
                self._fail(str(error), answered)
            except Exception as error:
                log.exception("%s: following cluster %s failed; trying again", self._name, self.url)
                self._fail(repr(error), answered)

    def _look_s(self) -> float:
        due = [at for at in (self._admit_at, self._refilled_at) if at is not None]
        return min(REREAD_MEMBERS_S, max(0.01, min(due) - time.monotonic())) if due else REREAD_MEMBERS_S

    def _found(self) -> None:
        if self._lost:
            log.warning("%s: the members of cluster %s can be read again", self._name, self.url)
            self._lost = ""

    def _fail(self, reason: str, answered: bool) -> None:
        """Pause, for longer after each failure. If only a watch failed (`answered`), the directory does not count as
        lost."""
        if self._closed.is_set():
            return
        self.errors += 1
        self._failures += 1
        if not answered:
            self._reason = reason
            if self._failures > 1 and not self._lost:
                kept = f"keeping the last {len(self._current.members)}" if self._current else "none are known yet"
                log.warning("%s: cannot read the members of cluster %s: %s; %s", self._name, self.url, reason, kept)
                self._lost = reason
        shortest, longest = BACKOFF_S
        pause_s = min(longest, shortest * 2.0 ** min(self._failures - 1, 10))
        self._closed.wait(pause_s * random.uniform(0.5, 1.0))

    def _take(self, view: Membership) -> None:
        """Pass on the members that the directory lists, except new members that still have to wait."""
        now = time.monotonic()
        known = {member.node for member in self._current.members} if self._current else set()
        if not view.members:
            self._reason = "no node is registered there"
            if known and self._refilled_at is None:
                log.warning(
                    "%s: cluster %s lists no members any more; keeping the last %d until nodes register again",
                    self._name,
                    self.url,
                    len(known),
                )
            if known:
                self._refilled_at = now + REFILL_S
            return
        if self._refilled_at is not None and now < self._refilled_at and known - {m.node for m in view.members}:
            return
        self._refilled_at = None
        members = list(view.members)
        self._left = {who: left_at for who, left_at in self._left.items() if now < left_at + BACK_S}
        known |= {member.node for member in members if (member.node, member.instance) in self._left}
        remaining = [member for member in members if member.node in known]
        if remaining and len(remaining) < len(members):
            if self._admit_at is None:
                self._admit_at = now + random.uniform(0.0, SPREAD_S)
            if now < self._admit_at:
                members = remaining
            else:
                self._admit_at = None
        else:
            self._admit_at = None
        self._tell(Membership(view.epoch, members))

    def _tell(self, view: Membership) -> None:
        before = self._current.members if self._current else []
        if list(view.members) == list(before):
            return
        if self._closed.is_set():
            return
        nodes, now = {member.node for member in view.members}, time.monotonic()
        self._left |= {(member.node, member.instance): now for member in before if member.node not in nodes}
        self._current = view
        self.changes += 1
        log.info("%s: the members of cluster %s have changed: %s", self._name, self.url, describe_change(before, view))
        try:
            self._on_change(view)
        except Exception:
            log.exception("%s: using the new members of cluster %s failed", self._name, self.url)
        self._known.set()


def describe_change(before: Sequence[Member], view: Membership) -> str:
    """Describe the change from one view to the next in one line of `name=value`."""
    old = {member.node: member for member in before}
    new = {member.node: member for member in view.members}
    states = Counter(member.state for member in view.members)
    changed = [_describe_member(old[node], new[node]) for node in new if node in old and new[node] != old[node]]
    return (
        f"epoch={view.epoch} joining={states['joining']} serving={states['serving']} draining={states['draining']} "
        f"joined=[{', '.join(node for node in new if node not in old)}] "
        f"left=[{', '.join(node for node in old if node not in new)}] changed=[{', '.join(changed)}]"
    )


def _describe_member(old: Member, new: Member) -> str:
    parts = [f"{old.state}->{new.state}"] if old.state != new.state else []
    if old.instance != new.instance:
        parts.append("restarted")
    return f"{new.node}: {' '.join(parts) or 'other shards'}"
