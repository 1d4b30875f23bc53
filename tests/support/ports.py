"""Ports on which servers can listen again after a restart."""

from __future__ import annotations

import os
import random
import socket


def free_ports(count: int) -> list[int]:
    """So many ports in a row, on which nobody listens now. Each pytest worker draws from a range of its own.

    The kernel gives them to no connection. From its own range it may take a port that a server had, or was to have next
    to that, and a connection that a client has closed keeps its port from listeners for a minute.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    while True:
        first = 20_000 + 1_000 * worker + random.randrange(1_000 - count)
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
