"""Hands connections to a shard. For each connection, one message carries the descriptor and the client's address. The
messages go over a pair of sockets that only this node's processes have.

The pair outlives the shard's process. If a new process replaces that process, the new one serves the connections that
wait in the pair. The shard uses a `Handed` like a listening socket. There is no state except the descriptors.
"""

from __future__ import annotations

import os
import socket
from typing import Final

_MAX_HANDED_BYTES: Final = 256
_SPACE: Final = " "


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the giving and the taking end of a new pair. Any number of processes may hand over connections, and none
    of them blocks."""
    give, take = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    give.setblocking(False)
    return give, take


def hand_over(give: socket.socket, sock: socket.socket, address: tuple[str, int]) -> None:
    """Hand over a connection. The caller closes its own descriptor afterwards. Raises `OSError` if there is no room for
    the connection."""
    host, port = address
    socket.send_fds(give, [f"{port}{_SPACE}{host}".encode()[:_MAX_HANDED_BYTES]], [sock.fileno()])


class Handed:
    """The taking end: `accept` returns the connections that were handed over."""

    def __init__(self, take: socket.socket) -> None:
        self._take = take
        take.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, which is readable when a connection waits."""
        return self._take.fileno()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Return a connection and its client's address. Raises `BlockingIOError` if no connection waits, or another
        `OSError`."""
        data, fds, _, _ = socket.recv_fds(self._take, _MAX_HANDED_BYTES, 1)
        if not fds:
            raise OSError("a connection was lost when it was handed over: no descriptor was free")
        port, _, host = data.decode(errors="replace").partition(_SPACE)
        for fd in fds[1:]:
            os.close(fd)
        return socket.socket(fileno=fds[0]), (host, int(port))
