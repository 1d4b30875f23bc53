"""Logins: who a connection's HELLO says that it is, and what it may do.

A right token is recognized at once, however many others guess, if the file has the hash that `kvstore auth` writes now.
Against a scrypt hash of an earlier release, a token that was not seen before is checked on a thread, because that takes
10 ms. Nothing more is read from the connection until then, so its next requests find it logged in. A token that was
checked is remembered (as a keyed hash, in memory only), so that an engine with many connections waits once. A login
that fails is answered `FAILURE_S` after it came, whatever was wrong; the logins of one address that wait may be as many
as are left for the others. So guessing is slow, and says nothing. A connection that has not logged in after `LOGIN_S`
is closed.

The file is looked at once a second, on a thread. Whose token or rights have changed is disconnected, and logs in again.

Used by the loop's thread only, but for `_check` and `_read`.
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
from kvstore.shard.account import LOGINS, LimitReached, Share
from kvstore.shard.peer import Peer
from kvstore.wire import ErrorCode, WireError

log = logging.getLogger("kvstore.auth")

MAX_LOGINS: Final = 256  # that wait: for a check, or to be told that they failed
LOGIN_S: Final = 10.0  # a connection that has not logged in by then is closed
REFUSAL: Final = (
    "the token is not valid here: expected one that `kvstore auth add` or `kvstore auth rotate` printed for this "
    "server's --auth file"
)


class _Login(NamedTuple):
    peer: Peer
    request: wire.Hello
    policy: Policy  # at its begin
    began: float


class Logins:
    """Checks the tokens of one shard's connections. `done`: continues with a HELLO whose sender has logged in."""

    def __init__(self, file: AuthFile, audit: Audit, done: Callable[[Peer, wire.Hello], None]) -> None:
        self.asked_to_reload = False  # set by a signal handler
        self.failed = 0  # logins
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: checks are done, or there is a policy
        self._file = file
        self._audit = audit
        self._done = done
        self._known = KnownTokens(file)
        self._watch = watch_policy(file, self._read)
        self._policies: deque[Policy] = deque()  # that were read, and are not in force yet
        self._waiting = 0
        self._to_check: dict[Share, deque[_Login]] = {}  # by address, the one whose turn it is first
        self._changed = threading.Condition()  # guards it
        self._checked: deque[tuple[_Login, Found | None]] = deque()
        self._failed: deque[_Login] = deque()  # to be told so, the first one first
        self._thread: threading.Thread | None = None

    def begin(self, peer: Peer, request: wire.Hello, now: float) -> bool:
        """Check a HELLO's token. -> True: it has logged in; False: `done` is called when it has, if it does.

        Raises `WireError` when the HELLO has no token and its sender has not logged in before, or when too many wait.
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
                f"{self._waiting} logins wait, {share.logins} of them of clients at {share.address}; try again later",
                ErrorCode.NO_PLACE,
            )
        share.logins += 1
        self._waiting += 1
        peer.session.logging_in = True  # nothing more is read until then
        peer.outbox.wake()  # so that the loop polls anew
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
        """Check tokens, one after the other, of one address after the other. The thread's whole life."""
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
                except Exception:  # it must not end the logins of all others
                    log.exception("client %s: its token could not be checked", login.peer.address)
            self._checked.append((login, found))
            os.eventfd_write(self.fd, 1)

    def _read(self, policy: Policy) -> None:
        """The file has another policy. Called by the thread that looks."""
        self._policies.append(policy)
        os.eventfd_write(self.fd, 1)

    def finish(self) -> None:
        """Log in whose token was found. Call it when `fd` is readable."""
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
        """Tell whose login has failed, and take the file's policy. -> whether another one is in force."""
        while self._failed and now >= self._failed[0].began + FAILURE_S:
            login = self._failed.popleft()
            found = self.policy.recognize(login.request.credentials)  # there may be another policy meanwhile
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
        if peer.outbox.closed:  # it did not wait to be told
            return
        self.failed += 1
        name = name_in(login.request.credentials)
        log.warning("client %s: a login failed, as principal %r", peer.address, name)
        self._audit.record("login_failed", address=peer.address, principal=name, client=peer.session.client)
        peer.refuse(login.request.id, WireError(ErrorCode.NOT_AUTHORIZED, REFUSAL))

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._file.policy

    def still_valid(self, peer: Peer) -> bool:
        """Whether the policy in force gives a connection that has logged in the rights that it has."""
        session = peer.session
        return session.login is None or self._file.policy.rights_of(*session.login) == session.rights


def _log_in(peer: Peer, found: Found) -> None:
    """The connection is a principal's from now on, and has no namespace until its HELLO has been taken in."""
    session = peer.session
    session.namespace = b""
    session.rights, session.login = found[0], (found[0].principal, found[1])
