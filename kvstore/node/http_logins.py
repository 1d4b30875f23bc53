"""Checks logins at the HTTP port. Logins use the same tokens as on the shards' ports, either as ``Authorization: Bearer
TOKEN`` or as the password of Basic authentication.

The pages show data of all tenants, so they are for principals of all tenants with the verb `monitor` or `admin`. Probes
need no login. A failed login is answered after a second. While `MOST_WAITING` failed logins wait, further ones are
refused at once, so that clients that guess tokens cannot occupy all threads. Thread-safe.
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from kvstore.auth.audit import Audit
from kvstore.auth.checking import FAILURE_S, Found, KnownTokens, watch_policy
from kvstore.auth.policy import AuthFile
from kvstore.auth.rights import EVERY_TENANT
from kvstore.auth.tokens import name_in
from kvstore.node.config import ServerConfig
from kvstore.wire import ADMIN, MONITOR

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

log = logging.getLogger("kvstore.auth")

OPEN_PATHS: Final = ("/healthz", "/readyz")
MOST_WAITING: Final = 8


class HttpRefusal(Exception):
    """A request is refused. `status`: the status line of the response. The text of the error says why."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = [("WWW-Authenticate", 'Basic realm="kvstore"')] if status.startswith("401") else []


class HTTPLogins:
    """Checks the logins of requests. From the start, a thread notices when the file changes, so that a token that has
    ended opens no page."""

    def __init__(self, file: AuthFile, audit: Audit) -> None:
        self._file = file
        self._audit = audit
        self._known = KnownTokens(file)
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        watch_policy(file, self._known.adopt).start()

    def check(self, environ: WSGIEnvironment) -> None:
        """Raise `HttpRefusal` if the sender of a request may not read the answer. Blocks for up to `FAILURE_S`
        seconds."""
        if environ.get("PATH_INFO", "") in OPEN_PATHS:
            return
        token = _token(environ.get("HTTP_AUTHORIZATION", ""))
        if not token:
            raise HttpRefusal(
                "401 Unauthorized",
                "this server wants a token: send it as a Bearer token, or as the password of Basic authentication",
            )
        found = self._known.find(token)
        if found is None or self._file.policy.rights_of(found[0].principal, found[1]) != found[0]:
            found = self._log_in(token, environ.get("REMOTE_ADDR", ""))
        rights = found[0]
        if rights.tenant != EVERY_TENANT or not rights.verbs & (ADMIN | MONITOR):
            raise HttpRefusal(
                "403 Forbidden",
                f"principal {rights.principal!r} may not read these pages: they are for principals of tenant '*' with "
                "the verb monitor or admin",
            )

    def _log_in(self, token: bytes, address: str) -> Found:
        began = time.monotonic()
        policy = self._file.policy
        found = policy.recognize(token)
        if found is None and policy.slow:
            with self._hashing:  # one at a time, so that guesses take no more than one core
                found = policy.login(token)
        if found is not None and self._known.remember(token, found):
            return found
        if not self._waiting.acquire(blocking=False):
            raise HttpRefusal("429 Too Many Requests", "too many failed logins at once; try again later")
        try:
            time.sleep(max(0.0, began + FAILURE_S - time.monotonic()))
        finally:
            self._waiting.release()
        name = name_in(token)
        log.warning("http: %s: a login failed, as principal %r", address, name)
        with self._lock:
            self._audit.record("login_failed", address=address, principal=name, client="http")
        raise HttpRefusal("401 Unauthorized", "the token is not valid here")


def _token(header: str) -> bytes:
    kind, _, value = header.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("utf-8", "replace")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (ValueError, binascii.Error):
            return b""
    return b""


def http_logins(config: ServerConfig, node: str) -> HTTPLogins | None:
    """Return the logins of a node's HTTP port, or None if it needs no login. Raises `AuthFileError`."""
    if config.auth is None:
        return None
    return HTTPLogins(AuthFile(config.auth), Audit(config.audit or "", node=node))
