"""Standard error, where nobody waits for who reads it: a log driver that has stopped must not stop a shard.

What does not fit into the pipe or the socket within `WAIT_S` is left out. While there is no room, further lines are
left out at once.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from typing import Final

_FD: Final = 2
WAIT_S: Final = 0.01  # for a reader that is only slow


class StandardError:
    """Writes lines. One thread at a time."""

    def __init__(self) -> None:
        self._stalled = False
        self._cut = False  # the last line has no end
        self._pipe = -1
        self._socket: socket.socket | None = None
        mode = os.fstat(_FD).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(_FD))
        elif stat.S_ISFIFO(mode):
            try:  # a description of our own: others may share this one, and want to wait
                self._pipe = os.open(f"/proc/self/fd/{_FD}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # another user has made the pipe: what `poll` says must do
                self._pipe = -1

    def write(self, line: bytes) -> bool:
        """Write a line, which has no end. -> False: it was left out, or its end was."""
        data = (b"\n" if self._cut else b"") + line + b"\n"
        try:
            done = self._put(data)
        except OSError:  # who read it is gone
            done = 0
        whole = done == len(data)
        self._cut = not whole and (self._cut or done > 0)
        return whole

    def _put(self, data: bytes) -> int:
        """-> how many bytes there was room for."""
        at = 0
        while at < len(data):
            try:
                at += self._send(data[at : at + select.PIPE_BUF])
            except BlockingIOError:
                if self._stalled or not self._room(WAIT_S):
                    self._stalled = True
                    return at
        self._stalled = False
        return at

    def _send(self, data: bytes) -> int:
        """Raises `BlockingIOError` where there is no room."""
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        if self._pipe >= 0:
            return os.write(self._pipe, data)
        if not self._room(0.0):
            raise BlockingIOError
        return os.write(_FD, data)

    @staticmethod
    def _room(wait_s: float) -> bool:
        poll = select.poll()
        poll.register(_FD, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poll.poll(wait_s * 1000))
