"""Shards that are forked from their supervisor, which a nursery has forked (see `forked`).

A supervisor starts each shard as a new interpreter, which imports numpy and the shard's code: most of what a server costs
until it is ready. A supervisor that comes from a nursery has imported all that, so its shards may as well be its forks.
What they run, what they inherit and how they end is the same; `kvstore.node.children` still starts every other process,
and the shards of servers that are not forked themselves.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from kvstore.node.children import ShardChild
from kvstore.shard import process as shard_process


class Fork:
    """A child of this process, with those methods of `subprocess.Popen` that a supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """-> its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """-> its exit status. Raises `subprocess.TimeoutExpired`."""
        if self.poll() is None:
            pid_fd = os.pidfd_open(self.pid)
            try:
                select.select([pid_fd], [], [], timeout)
            finally:
                os.close(pid_fd)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_shards() -> None:
    """From now on, supervisors in this process fork their shards."""
    ShardChild._spawn = _spawn  # type: ignore[method-assign]


def _spawn(_child: ShardChild, config: msgspec.Struct, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as given:
        given.write(msgspec.json.encode(config))
        given.seek(0)
        pid = os.fork()
        if not pid:
            _run(given.fileno(), fds)
    return cast("Any", Fork(pid))


def _run(given: int, fds: Sequence[int]) -> None:
    """In the fork: be what a new interpreter would be, and end."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(given, 0)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in fds:
                with contextlib.suppress(OSError):  # the descriptor of that list
                    os.close(int(name))
        for fd in fds:  # a new process has what it was passed; what it starts itself has not
            if fd >= 0:
                os.set_inheritable(fd, True)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        shard_process.main()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
