"""Checks tokens against the policy in force, and notices when the file of the policy changes. Tokens that were checked
are not hashed again."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Final

from kvstore.auth.policy import AuthFile, Policy
from kvstore.auth.rights import Rights
from kvstore.watching import FileWatch

log = logging.getLogger("kvstore.auth")

MAX_KNOWN: Final = 4096
FAILURE_S: Final = 1.0  # a failed login is answered after this time

Found = tuple[Rights, str]
"""The rights of a principal, and the hash of the token that it has shown."""


class KnownTokens:
    """Remembers tokens that were checked, as keyed hashes only. It forgets the oldest tokens when there are too many,
    and those whose rights change with the policy. Thread-safe."""

    def __init__(self, file: AuthFile) -> None:
        self._file = file
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known: dict[bytes, Found] = {}

    def find(self, token: bytes) -> Found | None:
        """Return the rights and the hash of a token that was remembered, or None."""
        return self._known.get(self._digest(token))

    def remember(self, token: bytes, found: Found) -> bool:
        """Remember a token that was checked. Return False if the policy in force does not have the token (any more)."""
        if self._file.policy.rights_of(*_login(found)) != found[0]:
            return False
        with self._lock:
            while len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[self._digest(token)] = found
        return True

    def adopt(self, policy: Policy) -> None:
        """Put another policy in force."""
        self._file.policy = policy
        log.info("%s: a policy with %d principals is in force", self._file.path, len(policy.principals))
        with self._lock:
            known = self._known.items()
            self._known = {digest: found for digest, found in known if policy.rights_of(*_login(found)) == found[0]}

    def _digest(self, token: bytes) -> bytes:
        return hmac.digest(self._key, token, hashlib.sha256)


def _login(found: Found) -> tuple[str, str]:
    """Return the principal and the hash of its token."""
    return found[0].principal, found[1]


def watch_policy(file: AuthFile, found: Callable[[Policy], None]) -> FileWatch:
    """Return a watch that checks whether the file has changed. `found` is called on the watch's thread with each policy
    that differs from the last one."""

    def look(asked: bool) -> None:
        policy = file.read_again(asked)
        if policy is not None:
            found(policy)

    return FileWatch(str(file.path), look)
