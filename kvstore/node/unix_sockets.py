"""The Unix sockets of a node's shards. Clients on the same host connect to them.

By default the sockets are in a folder that only the server's user can enter, and are named after the address of the
first shard. The socket of shard 0 has the path itself, and that of shard i the path followed by `.i`. The kernel
reports each client's user id, by which the shard decides whether the client may connect. The modes of the folder and
the socket are an additional barrier for other users.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from kvstore.node.children import StartError
from kvstore.node.config import OFF, ServerConfig

log = logging.getLogger("kvstore.server")

MAX_PATH_BYTES: Final = 107  # the longest path of a Unix socket on Linux
_BACKLOG: Final = 512
_SWEPT_AGE_S: Final = 60.0  # a younger socket may be of a server that does not listen yet


class _Unusable(Exception):
    """A socket cannot be made at a path. The message says why."""


def users_of(config: ServerConfig) -> list[int]:
    """Return the ids of the users that may connect: the server's own user, and the users in the settings. Raises
    `StartError`."""
    users = [os.getuid()]
    for name in filter(None, (each.strip() for each in config.unix_users.split(","))):
        try:
            users.append(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise StartError(f"--unix-users {config.unix_users!r}: there is no user {name!r} on this host") from None
    return list(dict.fromkeys(users))


def listen(config: ServerConfig, host: str, port: int) -> list[tuple[socket.socket, str]]:
    """Return a listening Unix socket and its path for each shard, or an empty list.
    `host`, `port`: the address of shard 0.

    Raises `StartError` if the settings name a path that cannot be used. If the default path cannot be used, the server
    runs without Unix sockets.
    """
    if config.unix_socket == OFF:
        return []
    others = len(users_of(config)) > 1
    sockets: list[tuple[socket.socket, str]] = []
    try:
        first = Path(config.unix_socket).absolute() if config.unix_socket else _default_path(host, port, others)
        for shard in range(config.shards):
            path = f"{first}.{shard}" if shard else str(first)
            sockets.append((_listen(path, others), path))
    except (_Unusable, OSError) as error:
        remove(sockets)
        problem = f"no Unix socket for clients on this host: {error}"
        if config.unix_socket:
            raise StartError(f"{problem}; choose another --unix-socket, or {OFF}") from None
        log.warning("%s; they use TCP. Give --unix-socket another PATH, or %s for no Unix socket", problem, OFF)
        return []
    return sockets


def remove(sockets: list[tuple[socket.socket, str]]) -> None:
    """Close the sockets, and remove their files."""
    for sock, path in sockets:
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _default_path(host: str, port: int, others: bool) -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "kvstore" if runtime else Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}"
    mode = 0o711 if others else 0o700
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=mode)
    found = folder.lstat()
    # In a parent folder that all users may write to, another user could have made this folder to take our clients'
    # connections.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise _Unusable(f"{folder} is not a folder that belongs to this user")
    if stat.S_IMODE(found.st_mode) != mode:
        folder.chmod(mode)
    _sweep(folder)
    return folder / f"{host.replace('/', '_')}_{port}.sock"


def _sweep(folder: Path, older_s: float = _SWEPT_AGE_S) -> None:
    """Remove the sockets of servers that were killed."""
    for path in folder.glob("*.sock*"):
        with contextlib.suppress(_Unusable, OSError):  # another server listens there, or it is no socket
            if time.time() - path.lstat().st_ctime > older_s:
                _remove_left_over(str(path))


def _listen(path: str, others: bool) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise _Unusable(f"{path} has {len(os.fsencode(path))} bytes: expected at most {MAX_PATH_BYTES}")
    _remove_left_over(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o666 if others else 0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _Unusable(f"{path}: {error.strerror}") from None
    return sock


def _remove_left_over(path: str) -> None:
    """Remove the socket of a server that is gone. Raises `_Unusable` if there is anything else at the path."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise _Unusable(f"{path} exists, but is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        code = sock.connect_ex(path)
    if code != errno.ECONNREFUSED:
        raise _Unusable(f"{path}: another server listens there" if code == 0 else f"{path}: {os.strerror(code)}")
    os.unlink(path)
