"""Names to addresses within a deadline: the system's resolver has none.

A name is looked up on a thread of its own, which may outlive the wait for it; what it finds then is there for the next
one. A resolver that fails or does not answer leaves the last answer valid. Thread-safe; a child process begins anew.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from typing import Any, TypeAlias

Address: TypeAlias = "tuple[socket.AddressFamily, Any]"  # a family, and what `connect` takes


class _Lookup:
    """One name and port: asked for, answered, or failed."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.addresses: list[Address] = []
        self.error: OSError | None = None

    def run(self, host: str, port: int) -> None:
        """On a thread of its own."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.addresses = [(family, address) for family, _, _, _, address in found]
        except OSError as error:
            self.error = error
        except ValueError as error:  # a name that cannot be one: UnicodeError, a zero byte
            self.error = OSError(f"{host!r} is no host name: {error}")
        self.done.set()


def resolve(host: str, port: int, timeout_s: float) -> list[Address]:
    """The addresses of `host`; at least one. Raises `OSError`, `TimeoutError` after `timeout_s`."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return [(family, (host, port))]
    except ValueError:
        pass  # a name
    with _lock:
        lookup = _pending.get((host, port))
        if lookup is None:
            lookup = _Lookup()
            threading.Thread(target=_run, args=(lookup, host, port), name="kvstore-resolve", daemon=True).start()
            _pending[host, port] = lookup
    lookup.done.wait(timeout_s)
    if lookup.addresses:
        return lookup.addresses
    last = _last.get((host, port))
    if last:
        return last
    if lookup.error is not None:
        raise lookup.error
    raise TimeoutError(f"{host}: no address within {timeout_s:.3g} s")


def _run(lookup: _Lookup, host: str, port: int) -> None:
    lookup.run(host, port)
    with _lock:
        if lookup.addresses:
            _last[host, port] = lookup.addresses
        _pending.pop((host, port), None)


_lock = threading.Lock()
_pending: dict[tuple[str, int], _Lookup] = {}
_last: dict[tuple[str, int], list[Address]] = {}


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
