"""TLS 1.3 for the data path: separate processes join TLS connections to sockets of this host.

The data path reads frames from a descriptor in C, and its threads must not wait for the interpreter's lock. So TLS runs
neither in the data path nor in a thread. Instead, a separate process (`relay`) encrypts and decrypts. A Unix socket
pair joins each TLS connection to the process that serves or uses the connection. A server has one TLS process for each
shard (`accepting`). It hands the shard one end of the pair and the client's address (`handing`). A client process has
one TLS process for all its connections (`outgoing`, `connecting`). Python's `ssl` (OpenSSL) does the cryptography. The
copies on each side are kernel → relay → OpenSSL's memory → OpenSSL → kernel.

This module has only the options of a client's TLS connections. It imports only `typing`, because clients without TLS
use it, too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SYSTEM: Final = "system"  # as the value of `ca`: the certificates that the system trusts


class TLSError(OSError):
    """A TLS connection cannot be made, or its certificates or key cannot be used. The message says why and what to
    do."""


class TLSOptions(NamedTuple):
    """How a client makes TLS connections. The files are in PEM format.

    `ca`: the file with the certificates of the CAs that may have signed the server's certificate. If it is empty or
    "system", the system's trusted CAs are used.
    `cert`, `key`: the client's own certificate and its key, for a server that requests a certificate; empty if the
    client has none.
    `server_name`: the name that the server's certificate must have; if empty, the host of the server's address.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
