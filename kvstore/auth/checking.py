"""Tokens that were checked already: they need not be hashed again. Thread-safe."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from typing import Final

from kvstore.auth.policy import AuthFile
from kvstore.auth.rights import Rights

MAX_KNOWN: Final = 4096
FAILURE_S: Final = 1.0  # after which a failed login is answered
LOOK_S: Final = 1.0  # how often the file is looked at

Found = tuple[Rights, str]
"""The rights of a principal, and the hash of the token that it has shown."""


class KnownTokens:
    """Keeps keyed hashes of tokens, never the tokens. The oldest ones are forgotten when there are too many, and all of
    them when the file has another policy."""

    def __init__(self, file: AuthFile) -> None:
        self._file = file
        self._look_at = 0.0
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known: dict[bytes, Found] = {}

    def find(self, token: bytes) -> Found | None:
        """-> what is known of a token."""
        return self._known.get(self._digest(token))

    def remember(self, token: bytes, found: Found) -> bool:
        """Remember a token that was checked. -> False if the policy in force does not have it (any more)."""
        if self._file.policy.rights_of(found[0].principal, found[1]) != found[0]:
            return False
        with self._lock:
            while len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[self._digest(token)] = found
        return True

    def look(self, now: float, asked: bool = False) -> bool:
        """Have the file read again if it is time to and it has changed, or if that was `asked` for. -> whether another
        policy is in force. One thread at a time, of those that use the file."""
        if now < self._look_at and not asked:
            return False
        self._look_at = now + LOOK_S
        changed = self._file.reload(asked)
        if changed:
            with self._lock:
                self._known.clear()
        return changed

    def _digest(self, token: bytes) -> bytes:
        return hmac.digest(self._key, token, hashlib.sha256)
