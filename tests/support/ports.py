"""Ports on which servers can listen again after a restart."""

from __future__ import annotations

import os
import random
import socket
from itertools import cycle, islice
from typing import Final

_WORKER: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
_FIRST: Final = 20_000 + 1_000 * _WORKER
_ports: Final = cycle(range(_FIRST, _FIRST + 1_000))
for _ in range(random.randrange(1_000)):  # another run of the tests, beside this one, begins elsewhere
    next(_ports)


def free_ports(count: int) -> list[int]:
    """So many ports in a row, on which nobody listens now. Each pytest worker gives those of a range of its own, one
    after the other: an engine takes seconds until it listens, and another must not get its port meanwhile.

    The kernel gives them to no connection. From its own range it may take a port that a server had, or was to have next
    to that, and a connection that a client has closed keeps its port from listeners for a minute.
    """
    while True:
        ports = list(islice(_ports, count))
        if ports[-1] - ports[0] == count - 1 and all(_is_free(port) for port in ports):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
