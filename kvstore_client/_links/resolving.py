"""Resolves host names within a deadline, because the system's resolver has none.

Each name is looked up on a thread of its own, which may run longer than its caller waits. The next caller then finds
the result. The threads are daemons: if the resolver is silent, threads of an executor would keep the process from
ending. If the resolver fails or does not answer, the last answer stays valid. Thread-safe. A child process keeps the
last answers and starts its lookups anew.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeAlias

Address: TypeAlias = "tuple[socket.AddressFamily, Any]"  # a family and the argument for `connect`


def resolve(host: str, port: int, timeout_s: float) -> list[Address]:
    """Return at least one address of `host`. Raises `OSError` if it has none, and `TimeoutError` after `timeout_s`."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return [(family, (host, port))]
    except ValueError:
        pass  # `host` is a name, not an address
    with _lock:
        lookup = _pending.get((host, port))
        if lookup is None:
            lookup = futures.Future()
            threading.Thread(target=_run, args=(lookup, host, port), name="kvstore-resolve", daemon=True).start()
            _pending[host, port] = lookup
    try:
        return lookup.result(timeout_s)
    except (OSError, futures.TimeoutError) as error:  # in Python 3.10, the futures' `TimeoutError` is no `OSError`
        last = _last.get((host, port))
        if last:
            return last
        if not lookup.done():
            raise TimeoutError(f"{host}: the resolver did not answer within {timeout_s:.3g} s") from None
        raise error


def _run(lookup: futures.Future[list[Address]], host: str, port: int) -> None:
    """Look up the name and set the result. This runs on a thread of its own."""
    addresses: list[Address] = []
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [(family, address) for family, _, _, _, address in found]
    except OSError as error:
        failure = error
    except ValueError as error:  # the name is invalid: a `UnicodeError`, or a zero byte in it
        failure = OSError(f"{host!r} is not a host name: {error}")
    with _lock:
        if addresses:
            _last[host, port] = addresses
        _pending.pop((host, port), None)
    if failure is None:
        lookup.set_result(addresses)
    else:
        lookup.set_exception(failure)


_lock = threading.Lock()
_pending: dict[tuple[str, int], futures.Future[list[Address]]] = {}
_last: dict[tuple[str, int], list[Address]] = {}


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def connected(host: str, port: int, deadline: float, trying: Callable[[socket.socket], None]) -> socket.socket:
    """Return a socket that is connected to one of the host's addresses. Before each attempt to connect, `trying(sock)`
    is called with the socket. Raises `OSError`."""
    addresses = resolve(host, port, max(0.001, deadline - time.monotonic()))
    for left, (family, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        trying(sock)
        try:
            sock.settimeout(max(0.001, (deadline - time.monotonic()) / left))
            sock.connect(address)
        except OSError:
            sock.close()
            if left == 1:
                raise
        else:
            return sock
    raise OSError(f"{host} has no address")
