"""Changes from a shard's TCP port to its Unix socket, if the shard is on this host.

If there is a Unix socket that is not used, the log says why. A process logs each reason only once, however many shards
and connections there are.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger("kvstore_client")

RUN: Final = Path("/run")  # only root, and therefore systemd, can make folders here
_MOST_SAID: Final = 1000
_said: dict[tuple[str, str], object] = {}  # by socket of shard 0 and reason: the call that logged this reason


class _Elsewhere(OSError):
    """The server's socket is not on this host, most likely because the server is on another host."""


def go_local(
    sock: socket.socket,
    dealer: Dealer,
    welcome: wire.Welcome,
    deadline: float,
    shake_hands: Callable[[socket.socket, float, bool], tuple[Dealer, wire.Welcome]],
    link: str,
    must: bool,
    problem: str = "",
) -> tuple[socket.socket, Dealer]:
    """Return a connection to the same shard over its Unix socket, or `sock` if the shard is not on this host.

    A server that lends memory can take it away while the client reads it. The server also sees the client's token. So
    the server's user must pass `_distrust`, unless `must` is set.

    * `link`: The shard's name in messages.
    * `must`: Whether the shard must be on this host. If so, `ConnectionLost` is raised if its Unix socket cannot be
      used.
    * `problem`: Why the Unix socket must not be tried; empty if it may be tried.
    """
    path, level = welcome.unix_socket, logging.WARNING
    if not path:
        problem = "the server has no Unix socket (--unix-socket)"
    elif not problem:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(max(0.001, deadline - time.monotonic()))
            user = _connect(local, path)
            if not must:
                _distrust(path, user)
            its_dealer, its_welcome = shake_hands(local, deadline, True)
            if its_welcome.instance == welcome.instance and welcome.instance:
                sock.close()
                sock = local
                return local, its_dealer
            raise _Elsewhere(f"another server listens at {path}")
        except _Elsewhere as error:
            problem, level = str(error), logging.INFO
        except (ConnectionResetError, BrokenPipeError):
            problem = (
                f"{path}: the server closed the connection of user {os.getuid()}: its --unix-users does not name that "
                "user, or its log says why"
            )
        except (OSError, zmtp.ZMTPError, wire.WireError, Refusal, KVStoreError) as error:
            problem = f"{path}: {error}"
        finally:
            if sock is not local:
                local.close()
    if must:
        raise ConnectionLost(f"{link}: shared_memory=True, but {problem}")
    if path:
        _say(level, link, path, welcome.shard, problem)
    return sock, dealer


def _say(level: int, link: str, path: str, shard: int, problem: str) -> None:
    """Log why blocks are not received in shared memory, unless this was already logged for any shard of the server."""
    first, me = path.removesuffix(f".{shard}"), object()
    if len(_said) < _MOST_SAID and _said.setdefault((first, problem.replace(path, first)), me) is me:
        log.log(level, "%s: blocks travel over TCP, not in shared memory: %s", link, problem)


def _connect(sock: socket.socket, path: str) -> int:
    """Connect to a server's Unix socket. Return the user id of the process that listens there. Raises `OSError`."""
    try:
        os.stat(path)
        sock.connect(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _Elsewhere(f"its Unix socket {path} is not on this host, or not mounted in this container") from None
    except PermissionError as error:
        raise OSError(
            f"{error.strerror} for user {os.getuid()}: --unix-users of the server names users other than its own, and "
            "these users must be able to enter the folder"
        ) from None
    _, user = peer_credentials(sock)
    return user


def _distrust(path: str, user: int) -> None:
    """Raise `OSError` unless the user that listens at a Unix socket can be trusted to be the server's user. The trusted
    users are root, this user, and the user of a folder that root has made in `RUN`, as systemd does for a service. A
    server's TCP port proves nothing, because every user of the host can take a free port."""
    if user in (0, os.getuid()):
        return
    folder = Path(os.path.realpath(path)).parent
    its_own = os.stat(folder)
    if folder.parent != RUN or its_own.st_uid not in (0, user):
        why = "which may be any user"
    elif its_own.st_mode & stat.S_IWOTH:
        why = f"and every user may write to {folder}, so it may be any process"
    elif (run := os.stat(RUN)).st_uid != 0 or run.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"and users other than root may write to {RUN}, so it may be any process"
    else:
        return
    raise OSError(
        f"user {user} listens there, {why}: run the server as user {os.getuid()} or root, or have its socket in a "
        f"folder {RUN}/NAME of its own, or set shared_memory=True"
    )
