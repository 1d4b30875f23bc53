"""From a shard's port to its Unix socket, if the shard is on this host."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore import wire
from kvstore.wire import zmtp
from kvstore.wire.dealer import Dealer, Refusal
from kvstore.wire.shared import peer_credentials
from kvstore_client.errors import ConnectionLost, KVStoreError

RUN: Final = Path("/run")  # where only root, and so systemd, can make folders


def go_local(
    sock: socket.socket,
    dealer: Dealer,
    welcome: wire.Welcome,
    deadline: float,
    shake_hands: Callable[[socket.socket, float, bool], tuple[Dealer, wire.Welcome]],
    must: str,
    problem: str = "",
) -> tuple[socket.socket, Dealer]:
    """-> a connection to the same shard over its Unix socket, if it is on this host, instead of `sock`.

    must: the shard's name in errors, if it must be on this host; else empty. Then raises `ConnectionLost` if it cannot
    be reached there, and whoever listens there is trusted. Else only those whom `_is_trusted` trusts: who lends memory
    can take it away while it is read, and is shown the token. problem: why this is not to be tried, if it is not.
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
            if not must and not _is_trusted(path, user):
                raise OSError(
                    f"user {user} of this host listens there, who may be anybody: run the server as this user or root, "
                    f"with its socket in a folder of {RUN}, or say shared_memory=True"
                )
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


def _is_trusted(path: str, user: int) -> bool:
    """Whether who listens at a Unix socket is a server: root, this user, or the user of a folder that root has made for
    it in `RUN`, as systemd does for a service. A free TCP port can be had by every user of the host."""
    if user in (0, os.getuid()):
        return True
    folder = Path(os.path.realpath(path)).parent
    if folder.parent != RUN:
        return False
    run, its_own = os.stat(RUN), os.stat(folder)
    if run.st_uid != 0 or run.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return its_own.st_uid in (0, user) and not its_own.st_mode & stat.S_IWOTH
