"""The Unix sockets of a node's shards, at which clients on the same host find them.

By default they lie in a folder that only the server's user can enter, named after the address of the first shard.
Shard 0 has the path itself, shard i the path and `.i`. Who may connect is decided in the shard, by the user id that the
kernel tells; the modes of folder and socket only keep others away before that.
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
from pathlib import Path
from typing import Final

from kvstore.node.children import StartError
from kvstore.node.config import OFF, ServerConfig

log = logging.getLogger("kvstore.server")

MAX_PATH_BYTES: Final = 107  # of a Unix socket, on Linux
_BACKLOG: Final = 512


class _Unusable(Exception):
    """A socket cannot be made there; the message says why."""


def users_of(config: ServerConfig) -> list[int]:
    """-> ids of the users who may connect: the server's own, and those of the settings. Raises `StartError`."""
    users = [os.getuid()]
    for name in filter(None, (each.strip() for each in config.unix_users.split(","))):
        try:
            users.append(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise StartError(f"--unix-users {config.unix_users!r}: there is no user {name!r} on this host") from None
    return list(dict.fromkeys(users))


def listen(config: ServerConfig, host: str, port: int) -> list[tuple[socket.socket, str]]:
    """-> for each shard a listening Unix socket and its path; empty: none. `host`, `port`: of the first shard.

    Raises `StartError` if the settings name a path that cannot be used. Without a path, the server runs without them.
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
        log.warning("%s; they use TCP. --unix-socket PATH names another place, %s asks for none", problem, OFF)
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
    # In a folder that everybody may write to, somebody else could have made it to take our clients' connections.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise _Unusable(f"{folder} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) != mode:
        folder.chmod(mode)
    return folder / f"{host.replace('/', '_')}_{port}.sock"


def _listen(path: str, others: bool) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise _Unusable(f"{path}: {len(os.fsencode(path))} bytes long, expected at most {MAX_PATH_BYTES}")
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
    """Remove the socket of a server that is gone. Raises `_Unusable` for anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise _Unusable(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        code = sock.connect_ex(path)
    if code != errno.ECONNREFUSED:
        raise _Unusable(f"{path}: another server listens there" if code == 0 else f"{path}: {os.strerror(code)}")
    os.unlink(path)
