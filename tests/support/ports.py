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
for _ in range(random.randrange(1_000)):  # so that another run of the tests at the same time uses other ports
    next(_ports)


def free_ports(count: int) -> list[int]:
    """Return this many consecutive ports on which no process listens now. Each pytest worker uses a range of its own,
    in sequence, because it takes seconds until an engine listens, and another one must not get its port meanwhile.

    The kernel uses none of these ports for outgoing connections. From the kernel's own range, a connection might get a
    port that a server had or will need. After its client has closed it, the port is blocked for listeners for a minute.
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
