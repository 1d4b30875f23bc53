"""Writes to standard error without waiting for its reader, because a log driver that has stopped must not stop a shard.

A line that does not fit into the pipe or the socket within `STDERR_WAIT_S` is left out. Until there is room again, the
lines after it are left out at once.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from typing import Final

_FD: Final = 2
STDERR_WAIT_S: Final = 0.01  # time for a reader that is slow but has not stopped


class StandardError:
    """Writes lines. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._stalled = False
        self._cut = False  # the last line was written without its end
        self._pipe = -1
        self._socket: socket.socket | None = None
        mode = os.fstat(_FD).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(_FD))
        elif stat.S_ISFIFO(mode):
            try:  # open the pipe again, because other users of this descriptor may rely on writes that wait
                self._pipe = os.open(f"/proc/self/fd/{_FD}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # another user owns the pipe, so rely on `poll` alone
                self._pipe = -1

    def write(self, line: bytes) -> bool:
        """Write a line and a newline. Return False if the line or its end was left out."""
        data = (b"\n" if self._cut else b"") + line + b"\n"
        try:
            done = self._put(data)
        except OSError:  # the reader is gone
            done = 0
        whole = done == len(data)
        self._cut = not whole and (self._cut or done > 0)
        return whole

    def _put(self, data: bytes) -> int:
        """Write as many bytes as there is room for, and return their number."""
        at = 0
        while at < len(data):
            try:
                at += self._send(data[at : at + select.PIPE_BUF])
            except BlockingIOError:
                if self._stalled or not self._room(STDERR_WAIT_S):
                    self._stalled = True
                    return at
        self._stalled = False
        return at

    def _send(self, data: bytes) -> int:
        """Write bytes and return how many were written. Raises `BlockingIOError` if there is no room."""
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
