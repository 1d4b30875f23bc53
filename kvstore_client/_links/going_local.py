"""From a shard's port to its Unix socket, if the shard is on this host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from kvstore import wire
from kvstore.wire import zmtp
from kvstore.wire.dealer import Dealer, Refusal
from kvstore.wire.shared import peer_credentials
from kvstore_client.errors import ConnectionLost, KVStoreError


def go_local(
    sock: socket.socket,
    dealer: Dealer,
    welcome: wire.Welcome,
    deadline: float,
    shake_hands: Callable[[socket.socket, float, bool], tuple[Dealer, wire.Welcome]],
    must: str,
    problem: str = "",
    same_address: bool = False,
) -> tuple[socket.socket, Dealer]:
    """-> a connection to the same shard over its Unix socket, if it is on this host, instead of `sock`.

    must: the shard's name in errors, if it must be on this host; else empty. Then raises `ConnectionLost` if it cannot
    be reached there. problem: why this is not to be tried, if it is not. same_address: `sock` ends where it begins, so
    the shard is on this host; else somebody here might have made the path to be shown a token.
    """
    path = welcome.unix_socket
    if not path:
        problem = "the server has no Unix socket (--unix-socket)"
    elif not os.path.exists(path):
        problem = f"its Unix socket {path} is not on this host, or this user may not look there"
    elif not problem:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(max(0.001, deadline - time.monotonic()))
            local.connect(path)
            _, user = peer_credentials(local)
            if not same_address and user not in (0, os.getuid()):
                raise OSError(f"user {user} of this host listens there, who may not be the server")
            its_dealer, its_welcome = shake_hands(local, deadline, True)
            if its_welcome.instance == welcome.instance and welcome.instance:
                sock.close()
                sock = local
                return local, its_dealer
            problem = f"another server listens at {path}"
        except (OSError, zmtp.ZMTPError, wire.WireError, Refusal, KVStoreError) as error:
            problem = f"{path}: {error}"
        finally:
            if sock is not local:
                local.close()
    if must:
        raise ConnectionLost(f"{must}: shared_memory=True, but {problem}")
    return sock, dealer
