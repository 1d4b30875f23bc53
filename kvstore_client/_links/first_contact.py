"""What a client does when it cannot reach the shard at a node's address: it looks for the node's other shards.

The address of a node is that of its first shard, and the other shards have the ports that follow. Only a shard's
WELCOME names them all. So without its first shard, a node would look as if it were gone.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Final

import msgspec

from kvstore.tls import TLSOptions
from kvstore.wire import Welcome
from kvstore_client._links.resolving import connected

log = logging.getLogger("kvstore_client")

NEXT_PORT_S: Final = 0.5  # how long the next port may take to answer
LAST_PORT: Final = 65535


def welcome_of_next(host: str, port: int, tls: TLSOptions | None, token: bytes, timeout_s: float) -> Welcome | None:
    """Ask the shard at the next port about its node. Return its WELCOME as the shard at `port` would have sent it: with
    the number of that shard. Return None if nothing answers there, or if another node does.

    Another program may have the next port. So the token is sent only with TLS, which has verified the host.
    """
    from kvstore.wire.queries import ShardQueries, ShardQueryError  # most clients never need it

    def dial(address: tuple[str, int], timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        sock = connected(*address, deadline, lambda _sock: None)
        if tls is None:
            return sock
        from kvstore.tls.outgoing import join  # this imports `ssl`, which only TLS needs

        return join(sock, host, tls, deadline)

    if port == LAST_PORT:
        return None
    try:
        with ShardQueries(
            (host, port + 1), min(timeout_s, NEXT_PORT_S), token=b"" if tls is None else token, dial=dial
        ) as shard:
            welcome = shard.welcome
    except ShardQueryError as error:
        log.debug("no other shard of %s:%d was found: %s", host, port, error)
        return None
    numbers = [number for number, address in enumerate(welcome.shards) if address.port == port]
    return msgspec.structs.replace(welcome, shard=numbers[0]) if numbers else None
