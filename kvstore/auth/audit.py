"""The audit log: one JSON object per line for each administrative act, failed login, and refusal.

The log is limited. After a burst, at most `LINES_PER_S` lines per second are written, and the next line says how many
were left out. A field has at most `MAX_AUDIT_TEXT` characters, and a file at most `MAX_AUDIT_BYTES`. A full file is
renamed to ``FILE.1``, and a new one is begun. Several processes may write to one file, because each line is one `write`
to a file that is open for appending. No process waits for the file, even if another one has locked it. Lines that
cannot be written are counted and logged. Only one thread may use an `Audit`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import time
from typing import Any, Final

import msgspec

from kvstore.standard_error import StandardError

log = logging.getLogger("kvstore.audit")

LINES_PER_S: Final = 50
BURST: Final = 200
MAX_AUDIT_TEXT: Final = 512
MAX_AUDIT_BYTES: Final = 64 << 20
OVER_BYTES: Final = 1 << 20  # how far a file may exceed its limit while another process holds the lock for renaming
COMPLAIN_S: Final = 60.0
STDERR: Final = "stderr"
SYSLOG: Final = "syslog"
_SYSLOG_SOCKET: Final = "/dev/log"
_AUTH_NOTICE: Final = 10 * 8 + 5  # facility authpriv, severity notice: RFC 5424


class Audit:
    """Writes the audit log. `target`: a file, "stderr", "syslog", or "" for none. `where`: fields of each line that
    name the process."""

    def __init__(self, target: str, **where: Any) -> None:
        """Raises `OSError` when the file cannot be opened."""
        self._target = target
        self._where = where
        self._tokens = float(BURST)
        self._filled = time.monotonic()
        self._left_out = 0
        self._complained = -COMPLAIN_S
        self._fd = -1
        self._syslog: socket.socket | None = None
        self._stderr = StandardError() if target == STDERR else None
        if target not in ("", STDERR, SYSLOG):
            self._fd = self._open()

    def record(self, event: str, **fields: Any) -> None:
        """Write a line. Raises no error if the system refuses the line, and never waits for another process."""
        if not self._target:
            return
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * LINES_PER_S)
        self._filled = now
        if self._tokens < 1:
            self._left_out += 1
            return
        self._tokens -= 1
        left_out, self._left_out = self._left_out, 0
        line: dict[str, Any] = {"time": _utc(), "event": event, **self._where}
        line |= {name: value[:MAX_AUDIT_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
        if left_out:
            line["lines_left_out"] = left_out
        try:
            self._write(msgspec.json.encode(line))
        except OSError as error:
            self._left_out += left_out + 1
            if now - self._complained >= COMPLAIN_S:
                self._complained = now
                log.error("the audit log %s cannot be written: %s", self._target, error)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._syslog is not None:
            self._syslog.close()

    def _write(self, line: bytes) -> None:
        if self._stderr is not None:
            if not self._stderr.write(line):
                raise BlockingIOError(errno.EAGAIN, "standard error is not read")
        elif self._target == SYSLOG:
            self._send(b"<%d>kvstore-server: " % _AUTH_NOTICE + line)
        else:
            if os.fstat(self._fd).st_size >= MAX_AUDIT_BYTES or not self._in_place():
                self._turn_over()
            os.write(self._fd, line + b"\n")

    def _send(self, data: bytes) -> None:
        if self._syslog is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            try:
                sock.connect(_SYSLOG_SOCKET)
            except OSError:
                sock.close()
                raise
            self._syslog = sock
        try:
            self._syslog.send(data)
        except OSError:
            self._syslog.close()
            self._syslog = None  # the next line connects again
            raise

    def _open(self) -> int:
        """Open the file. Raises `OSError`. A file that is not regular is an error, too, because writing to a pipe would
        wait for the pipe's reader."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._target, flags, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", self._target)
        return fd

    def _in_place(self) -> bool:
        """Return whether the open file still has its name. Another process or logrotate may have renamed the file."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self._target, follow_symlinks=False), os.fstat(self._fd))
        return False

    def _turn_over(self) -> None:
        """Rename the file if it is full and still has its name. Then open the file that has this name now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (
            BlockingIOError
        ):  # the server's other processes hold the lock for two system calls; other programs may hold it for long
            if os.fstat(self._fd).st_size >= MAX_AUDIT_BYTES + OVER_BYTES:
                raise
            return
        try:
            if self._in_place() and os.fstat(self._fd).st_size >= MAX_AUDIT_BYTES:
                os.replace(self._target, f"{self._target}.1")
            opened = self._open()
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        self._fd = opened


NO_AUDIT: Final = Audit("")


def _utc() -> str:
    seconds = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"
