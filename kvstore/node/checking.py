"""The checks of `--check-config`: whether this machine has the ports, folders, users, packages and space that the
settings need. Nothing is served, made or changed, except that ports are bound for a moment. Whether etcd answers is not
checked, because a server starts without it."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.auth.audit import STDERR, SYSLOG
from kvstore.disk.format import DiskFormatError, check_layout, existing_above
from kvstore.node import memory_limit
from kvstore.node.access import member_secret
from kvstore.node.children import StartError, listen
from kvstore.node.config import MAX_PORT, OFF, ServerConfig
from kvstore.node.disk_folder import key_of
from kvstore.node.fitting import transport_misfits
from kvstore.node.settings import Misfit
from kvstore.node.unix_sockets import MAX_PATH_BYTES, users_of
from kvstore.sizes import format_size
from kvstore.tls import TLSError, TLSOptions
from kvstore.tls.contexts import client_context, server_context

_BESIDE: Final = (
    "`ss -ltnp` says which program has it; to check settings beside the server that runs with them, add --port 0 (and "
    "--http 127.0.0.1:0)"
)


def misfits(config: ServerConfig) -> Iterator[Misfit]:
    """Yield a misfit for everything that this machine lacks. Blocks while names are resolved and the disk is
    checked."""
    for check in (_addresses, _access, _tls, _unix_socket, _packages, _memory, _disk):
        yield from check(config)


def _addresses(config: ServerConfig) -> Iterator[Misfit]:
    with contextlib.ExitStack() as bound:
        for shard in range(config.shards if config.port else 1):
            port = config.port + shard if config.port else 0
            if port > MAX_PORT:  # the settings contradict each other; `fitting` reports that
                break
            problem = _bound(config.host, port, bound)
            if problem is not None and problem.errno in (errno.EADDRINUSE, errno.EACCES):
                yield Misfit("port", f"port {port}, for shard {shard}: {_reason(problem)}")
            elif problem is not None:
                yield Misfit("host", f"cannot listen there: {_reason(problem)}; expected an address of this machine")
                break
        if config.http is not None:
            problem = _bound(config.http.host, config.http.port, bound)
            if problem is not None:
                yield Misfit("http", f"cannot listen there: {_reason(problem)}")


def _bound(host: str, port: int, bound: contextlib.ExitStack) -> OSError | None:
    """Listen at an address until `bound` is closed. Return the error if that is not possible, otherwise None."""
    try:
        bound.enter_context(listen(host, port))
    except OSError as error:
        return error
    return None


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"it is in use; {_BESIDE}"
    return error.strerror or str(error)


def _unix_socket(config: ServerConfig) -> Iterator[Misfit]:
    try:
        users_of(config)
    except StartError as error:
        yield Misfit("unix_users", str(error).partition(": ")[2])
    if config.unix_socket in ("", OFF):  # a default path that cannot be used is no error, because clients use TCP
        return
    path = Path(config.unix_socket).absolute()
    longest = f"{path}.{config.shards - 1}" if config.shards > 1 else str(path)
    if len(os.fsencode(longest)) > MAX_PATH_BYTES:
        yield Misfit(
            "unix_socket", f"{longest} has {len(os.fsencode(longest))} bytes: expected at most {MAX_PATH_BYTES}"
        )
    folder = path.parent
    if not folder.is_dir():
        yield Misfit("unix_socket", f"{folder} is not a folder: make it, or choose another path")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Misfit("unix_socket", f"user {_me()} cannot write to {folder}")
    elif path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        yield Misfit("unix_socket", f"{path} exists, but is not a socket")


def _access(config: ServerConfig) -> Iterator[Misfit]:
    if config.auth:
        try:
            member_secret(config)
        except StartError as error:
            yield Misfit("auth", str(error).removeprefix("--auth: "))
    if config.audit in (None, "", STDERR, SYSLOG):
        return
    file = Path(config.audit or "").absolute()
    there = file if file.exists() else file.parent
    if not (os.access(there, os.W_OK) and (there.is_dir() or file.is_file()) and not file.is_dir()):
        yield Misfit("audit", f"user {_me()} cannot write to {file}")


def _tls(config: ServerConfig) -> Iterator[Misfit]:
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        server_context(config.tls_cert, config.tls_key, config.tls_client_ca or "")
        if config.tls_ca:
            client_context(TLSOptions(config.tls_ca))
    except TLSError as error:
        yield Misfit("tls_cert", str(error))


def _packages(config: ServerConfig) -> Iterator[Misfit]:
    yield from transport_misfits(config)
    if config.cluster and importlib.util.find_spec("requests") is None:
        yield Misfit("cluster", "the package requests is not installed: run pip install 'llm-kvstore[cluster]'")


def _memory(config: ServerConfig) -> Iterator[Misfit]:
    of_groups = list(memory_limit.misfits(config))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not of_groups and memory_limit.needed_bytes(config) > machine:
        yield Misfit("memory", f"{memory_limit.needs(config)}: this machine has {format_size(machine)}")
    yield from of_groups


def _disk(config: ServerConfig) -> Iterator[Misfit]:
    if not config.disk:
        return
    path = Path(config.disk).absolute()
    try:
        check_layout(path, config.shards, key_of(config))
    except (DiskFormatError, ValueError) as error:
        yield Misfit("disk", str(error))
        return
    taken = sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file()) if path.exists() else 0
    space = os.statvfs(existing_above(path))
    free = space.f_bavail * space.f_frsize
    if config.disk_size > free + taken:
        yield Misfit(
            "disk_size",
            f"the file system of {path} has {format_size(free)} free, and the disk tier takes {format_size(taken)} "
            f"now: expected at most {format_size(free + taken)}, less the room for the other files there",
        )


def made_at_start(config: ServerConfig) -> Iterator[str]:
    """Yield what a start would make, because it may be missing only by a mistake in its path."""
    path = Path(config.disk or "").absolute()
    if config.disk and not path.exists():
        yield f"a start makes the folder {path} of --disk, below {existing_above(path)}"


def _me() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
