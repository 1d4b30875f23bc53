"""Handing a connection to a shard: its descriptor and its client's address in one message, over a pair of sockets that
only this node's processes have.

The pair outlives the shard's process: what waits in it is served by the process that replaces it. `Handed` looks like a
listening socket to the shard. No state beside the descriptors.
"""

from __future__ import annotations

import os
import socket
from typing import Final

_MOST_BYTES: Final = 256
_SPACE: Final = " "


def pair() -> tuple[socket.socket, socket.socket]:
    """-> the end that hands over (by any number of processes, none of which blocks), and the end that takes."""
    give, take = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    give.setblocking(False)
    return give, take


def hand_over(give: socket.socket, sock: socket.socket, address: tuple[str, int]) -> None:
    """Hand a connection over; the caller closes its own descriptor. Raises `OSError` if there is no room for it."""
    host, port = address
    socket.send_fds(give, [f"{port}{_SPACE}{host}".encode()[:_MOST_BYTES]], [sock.fileno()])


class Handed:
    """The end that takes: `accept` gives the connections that were handed over."""

    def __init__(self, take: socket.socket) -> None:
        self._take = take
        take.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, which is readable when a connection waits."""
        return self._take.fileno()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """-> a connection and its client's address. Raises `BlockingIOError` if none waits, else `OSError`."""
        data, fds, _, _ = socket.recv_fds(self._take, _MOST_BYTES, 1)
        if not fds:
            raise OSError("a connection was lost when it was handed over: no descriptor was free")
        port, _, host = data.decode(errors="replace").partition(_SPACE)
        for fd in fds[1:]:
            os.close(fd)
        return socket.socket(fileno=fds[0]), (host, int(port))
