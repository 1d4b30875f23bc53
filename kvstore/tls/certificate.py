"""A server's certificate in use, and reading it again.

It is read again at SIGHUP, and when its files have changed and then stayed the same from one look to the next, which
are `LOOK_S` apart: a certificate and its key are seldom replaced in one step. Connections keep the one they began with.
A certificate that cannot be used is logged, and the old one stays.
"""

from __future__ import annotations

import logging
from typing import Final

from kvstore.tls import TLSError
from kvstore.tls.contexts import server_context, signature

log = logging.getLogger("kvstore.tls")

LOOK_S: Final = 1.0


class Certificate:
    """`context` is for new connections. `client_ca`: see `server_context`. Raises `TLSError`. One thread at a time."""

    def __init__(self, cert: str, key: str, client_ca: str) -> None:
        self._files = cert, key, client_ca
        self._loaded = self._seen = self._signature()
        self._look_at = 0.0
        self.context = server_context(*self._files)

    def _signature(self) -> object:
        return signature(*filter(None, self._files))

    def reload(self) -> None:
        """Read the files now. Logs the result."""
        self._loaded = self._seen = self._signature()
        try:
            self.context = server_context(*self._files)
        except TLSError as error:
            log.error("the new certificate cannot be used, the old one stays: %s", error)
        else:
            log.info("%s: the certificate was read again, for new connections", self._files[0])

    def look(self, now: float) -> None:
        """Read the files if they have changed, and have not changed since the last look."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        before, self._seen = self._seen, self._signature()
        if self._seen != self._loaded and self._seen == before:
            self.reload()
