"""A server's certificate in use, and reading it again.

It is read again at SIGHUP, and when its files have changed and then stayed the same from one look to the next, which
are a second apart: a certificate and its key are seldom replaced in one step. Connections keep the one they began with.
A certificate that cannot be used is logged, and the old one stays.
"""

from __future__ import annotations

import logging

from kvstore.tls import TLSError
from kvstore.tls.contexts import server_context, signature
from kvstore.watching import FileWatch

log = logging.getLogger("kvstore.tls")


class Certificate:
    """`context` is for new connections. `client_ca`: see `server_context`. Once `watch` is started, it looks whether
    the files have changed. Raises `TLSError`."""

    def __init__(self, cert: str, key: str, client_ca: str) -> None:
        self._files = cert, key, client_ca
        self._loaded = self._seen = self._signature()
        self.context = server_context(*self._files)
        self.watch = FileWatch(cert, self._look)

    def _signature(self) -> object:
        return signature(*filter(None, self._files))

    def _reload(self) -> None:
        self._loaded = self._seen = self._signature()
        try:
            self.context = server_context(*self._files)
        except TLSError as error:
            log.error("the new certificate cannot be used, the old one stays: %s", error)
        else:
            log.info("%s: the certificate was read again, for new connections", self._files[0])

    def _look(self, asked: bool) -> None:
        """Read the files if they have changed, and have not changed since the last look; or if that was asked for."""
        before, self._seen = self._seen, self._signature()
        if asked or (self._seen != self._loaded and self._seen == before):
            self._reload()
