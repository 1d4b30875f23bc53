"""The certificate of a server, which is read again when it changes.

It is read again at SIGHUP. It is also read again when its files have changed and then stayed the same until the next
check, a second later. This second is needed because a certificate and its key are seldom replaced in one step.
Connections keep the certificate with which they began. If the new certificate cannot be used, this is logged, and the
old one stays in use.
"""

from __future__ import annotations

import logging

from kvstore.tls import TLSError
from kvstore.tls.contexts import server_context, signature
from kvstore.watching import FileWatch

log = logging.getLogger("kvstore.tls")


class Certificate:
    """The certificate of a server. `context` is for new connections. `client_ca`: see `server_context`. After its
    start, `watch` checks whether the files have changed. Raises `TLSError`."""

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
            log.error("the new certificate cannot be used, so the old one stays in use: %s", error)
        else:
            log.info("%s: the certificate was read again and is used for new connections", self._files[0])

    def _look(self, asked: bool) -> None:
        """Read the files if `asked`, or if they have changed and then stayed the same since the last check."""
        before, self._seen = self._seen, self._signature()
        if asked or (self._seen != self._loaded and self._seen == before):
            self._reload()
