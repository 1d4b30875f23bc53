"""Logins: the principal that a connection's HELLO names, and the rights of that principal.

If the file has the kind of hash that `kvstore auth` writes now, a valid token is recognized at once, even while many
other clients guess. If the file has a scrypt hash of an earlier release, a token that is new to the shard is checked on
a thread, because this takes 10 ms. Nothing more is read from the connection until the check is done, so its next
requests are handled after the login. A checked token is remembered (as a keyed hash, in memory only), so that an engine
with many connections waits only once. A failed login is answered `FAILURE_S` after it came, whatever the reason. One
address may have at most as many waiting logins as are left for the others. So guessing is slow and reveals nothing. A
connection that has not logged in after `LOGIN_S` is closed.

The file is checked once a second, on a thread. Connections whose token or rights have changed are closed, and their
clients log in again.

Used by the loop's thread only, except for `_check` and `_read`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore import wire
from kvstore.auth.audit import Audit
from kvstore.auth.checking import FAILURE_S, Found, KnownTokens, watch_policy
from kvstore.auth.policy import AuthFile, Policy
from kvstore.auth.rights import NONE, refuse
from kvstore.auth.tokens import name_in
from kvstore.shard.account import LOGINS, AddressBudget, LimitReached
from kvstore.shard.peer import Peer
from kvstore.wire import ErrorCode, WireError

log = logging.getLogger("kvstore.auth")

MAX_LOGINS: Final = 256  # the most logins that wait for a check, or for the answer to a failed check
LOGIN_S: Final = 10.0  # a connection that has not logged in by then is closed
LOGIN_REFUSAL: Final = (
    "the token is not valid here: expected one that `kvstore auth add` or `kvstore auth rotate` printed for this "
    "server's --auth file"
)


class _Login(NamedTuple):
    peer: Peer
    request: wire.Hello
    policy: Policy  # the policy when the login began
    began: float


class Logins:
    """Checks the tokens of one shard's connections. `done`: called to continue with a HELLO whose sender has logged
    in."""

    def __init__(self, file: AuthFile, audit: Audit, done: Callable[[Peer, wire.Hello], None]) -> None:
        self.asked_to_reload = False  # set by a signal handler
        self.failed = 0  # the number of failed logins
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable after a check, or for a new policy
        self._file = file
        self._audit = audit
        self._done = done
        self._known = KnownTokens(file)
        self._watch = watch_policy(file, self._read)
        self._policies: deque[Policy] = deque()  # policies that were read but are not in force yet
        self._waiting = 0
        self._to_check: dict[AddressBudget, deque[_Login]] = {}  # by address; the first address is checked next
        self._changed = threading.Condition()  # guards `_to_check`
        self._checked: deque[tuple[_Login, Found | None]] = deque()
        self._failed: deque[_Login] = deque()  # failed logins that wait for their answer, the oldest first
        self._thread: threading.Thread | None = None

    def begin(self, peer: Peer, request: wire.Hello, now: float) -> bool:
        """Check the token of a HELLO. Return True if the client has logged in. Otherwise return False, and `done` is
        called when the client has logged in.

        Raises `WireError` if the HELLO has no token and its sender has not logged in before, or if too many logins
        wait.
        """
        token = request.credentials
        if not token:
            if peer.session.rights is NONE:
                raise refuse(peer.session.rights, request)
            return True
        found = self._known.find(token) or self.policy.recognize(token)
        if found is not None:
            _log_in(peer, found)
            return True
        share = peer.share
        if MAX_LOGINS - self._waiting - share.logins <= 0:
            raise LimitReached(
                LOGINS,
                f"{self._waiting} logins wait, {share.logins} of them from clients at {share.address}; try again later",
                ErrorCode.NO_PLACE,
            )
        share.logins += 1
        self._waiting += 1
        peer.session.logging_in = True  # nothing more is read until the login ends
        peer.outbox.wake()  # so that the loop polls the socket for other events
        login = _Login(peer, request, self.policy, now)
        if not login.policy.slow:
            self._failed.append(login)
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._check, name="kvstore-logins", daemon=True)
            self._thread.start()
        with self._changed:
            self._to_check.setdefault(share, deque()).append(login)
            self._changed.notify()
        return False

    def _check(self) -> None:
        """Check tokens one by one, taking the addresses in turn. A thread runs this until the process ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._to_check))
                share = next(iter(self._to_check))
                waiting = self._to_check.pop(share)
                login = waiting.popleft()
                if waiting:
                    self._to_check[share] = waiting
            found: Found | None = None
            if not login.peer.outbox.closed:
                try:
                    found = login.policy.login(login.request.credentials)
                except Exception:  # one failure must not stop the other logins
                    log.exception("client %s: its token could not be checked", login.peer.address)
            self._checked.append((login, found))
            os.eventfd_write(self.fd, 1)

    def _read(self, policy: Policy) -> None:
        """Queue a new policy from the file. The thread that watches the file calls this."""
        self._policies.append(policy)
        os.eventfd_write(self.fd, 1)

    def finish(self) -> None:
        """Log in the clients whose token the thread has recognized. Call it when `fd` is readable."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        while self._checked:
            login, found = self._checked.popleft()
            if found is not None and self._known.remember(login.request.credentials, found):
                self._succeed(login, found)
            else:
                self._failed.append(login)

    def _succeed(self, login: _Login, found: Found) -> None:
        self._end(login)
        _log_in(login.peer, found)
        if not login.peer.outbox.closed:
            self._done(login.peer, login.request)

    def _end(self, login: _Login) -> None:
        login.peer.share.logins -= 1
        self._waiting -= 1
        login.peer.session.logging_in = False

    def step(self, now: float) -> bool:
        """Answer failed logins that have waited for long enough, and apply a new policy. Return whether the policy has
        changed."""
        while self._failed and now >= self._failed[0].began + FAILURE_S:
            login = self._failed.popleft()
            found = self.policy.recognize(login.request.credentials)  # the policy may have changed meanwhile
            if found is not None:
                self._succeed(login, found)
            else:
                self._fail(login)
        self._watch.start()
        if self.asked_to_reload:
            self.asked_to_reload = False
            self._watch.ask()
        if not self._policies:
            return False
        while self._policies:
            self._known.adopt(self._policies.popleft())
        return True

    def _fail(self, login: _Login) -> None:
        peer = login.peer
        self._end(login)
        if peer.outbox.closed:  # the client did not wait for the answer
            return
        self.failed += 1
        name = name_in(login.request.credentials)
        log.warning("client %s: a login failed, as principal %r", peer.address, name)
        self._audit.record("login_failed", address=peer.address, principal=name, client=peer.session.client)
        peer.refuse(login.request.id, WireError(ErrorCode.NOT_AUTHORIZED, LOGIN_REFUSAL))

    @property
    def policy(self) -> Policy:
        """Return the policy in force."""
        return self._file.policy

    def still_valid(self, peer: Peer) -> bool:
        """Return whether the policy in force still gives a connection the rights with which it logged in."""
        session = peer.session
        return session.login is None or self._file.policy.rights_of(*session.login) == session.rights


def _log_in(peer: Peer, found: Found) -> None:
    """Give the connection the rights of a principal. It has no namespace until its HELLO has been handled."""
    session = peer.session
    session.namespace = b""
    session.rights, session.login = found[0], (found[0].principal, found[1])
