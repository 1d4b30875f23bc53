"""TLS 1.3 for the data: processes that join TLS connections to sockets of this host.

The data path reads frames from a descriptor in C, and its threads must not wait for the interpreter's lock. So TLS is
neither there nor in a thread: a process of its own (`relay`) encrypts and decrypts, and a Unix socket pair joins each
TLS connection to the process that serves or uses it. A server has one such process for each shard (`accepting`), which
hands the shard its end of the pair and the client's address (`handing`). A client has one for all its connections
(`outgoing`, `connecting`). Python's `ssl`, that is OpenSSL, does the cryptography. Copies on each side: kernel →
relay → OpenSSL's memory → OpenSSL → kernel.

This module itself, how a client makes TLS connections, imports nothing: clients without TLS may use it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SYSTEM: Final = "system"  # as a CA: the certificates that the system trusts


class TLSError(OSError):
    """A TLS connection cannot be made, or its files cannot be used; the message says why and what to do."""


class TLSOptions(NamedTuple):
    """Files are PEM.

    ca: certificates of the CAs that may have signed the server's; empty or "system": those that the system trusts.
    cert, key: the client's own, for a server that asks for one; empty: it has none. server_name: the name that the
    server's certificate must have; empty: the host of its address.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
