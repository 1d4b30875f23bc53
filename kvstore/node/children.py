"""The supervisor's processes. A shard is a listening socket and the process that serves it at present.

The supervisor owns the socket. So when a shard's process dies, the port and the connections in its backlog stay, and
the process that replaces the dead one serves them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

import kvstore
from kvstore.logs import fields
from kvstore.shard.setup import ShardConfig

log = logging.getLogger("kvstore.server")

MAX_RESTART_DELAY_S: Final = 5.0
FIRST_RESTART_DELAY_S: Final = 0.1
STABLE_S: Final = 10.0  # a shard that ran for at least this long is restarted without delay
BIND_RETRY_S: Final = 1.0
_BACKLOG: Final = 512
# Children must run the supervisor's own code. `python -m` would search the working directory first.
_CODE: Final = str(Path(kvstore.__file__).resolve().parent.parent)
_RUN_CHILD: Final = "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; from {} import main; main()"


class StartError(Exception):
    """The server cannot start. The message says why and what to do."""


def bind(host: str, port: int, shards: int) -> list[socket.socket]:
    """Return listening sockets for all shards, on `port`, `port`+1 and so on, or on free ports if `port` is 0. Raises
    `StartError`.

    Blocks for up to `BIND_RETRY_S` while a port is in use.
    """
    sockets: list[socket.socket] = []
    deadline = time.monotonic() + BIND_RETRY_S
    for number in range(shards):
        wanted = port + number if port else 0
        while True:
            try:
                sockets.append(listen(host, wanted))
                break
            except (OSError, OverflowError) as error:
                code = error.errno if isinstance(error, OSError) else None
                if code == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.05)  # an earlier server that was just killed may still have the port
                    continue
                for other in sockets:
                    other.close()
                reason = "the port is in use" if code == errno.EADDRINUSE else str(error)
                raise StartError(
                    f"cannot listen on {host}:{wanted} for shard {number}: {reason}; "
                    "choose another --host or --port (--port 0 picks free ones)"
                ) from None
    return sockets


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises `OSError`, and `OverflowError` for an invalid port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def reap_adopted(own: Collection[int]) -> None:
    """Reap processes that have ended and that this process did not start. As process 1 of a container without an init,
    it becomes the parent of all processes whose parents have died, such as the keeper of a shard that was killed.

    `own`: the ids of processes that other code of this process waits for.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        # WNOWAIT: do not reap the process yet, because other code may wait for it.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in own:
                return  # this function is called again after that process was reaped
            os.waitpid(ended.si_pid, 0)


class Child:
    """One process that the supervisor starts and watches. Used by the supervisor's main thread, except that any thread
    may read `not_serving`.

    `selector` watches the process's `pid_fd` and, until the process is ready, its `ready_fd`. In the selector, the data
    of both is this object.
    """

    kind = "process"  # its name in the log
    loss = ""  # what is lost when it dies, for the log
    module = ""  # the process runs the `main` of this module

    def __init__(self, number: int, selector: selectors.BaseSelector) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.pid_fd = -1
        self.ready_fd = -1  # the pipe on which the process reports that it is ready; -1 afterwards
        self.restart_at = 0.0
        self.not_serving = "its process is starting"  # why it does not serve; empty if it does
        self._selector = selector
        self._started = 0.0
        self._delay_s = 0.0

    def config(self, ready_fd: int) -> tuple[msgspec.Struct, Sequence[int]]:
        """Return the process's configuration, and the descriptors in it."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process.

        Raises `OSError`. After an error, no process and no descriptor is left.
        """
        with contextlib.ExitStack() as undo:
            ready_r, ready_w = os.pipe()
            undo.callback(os.close, ready_r)
            try:
                process = self._spawn(*self.config(ready_w))
            finally:
                os.close(ready_w)
            undo.callback(process.wait)
            undo.callback(process.kill)
            pid_fd = os.pidfd_open(process.pid)
            undo.callback(os.close, pid_fd)
            self._selector.register(pid_fd, selectors.EVENT_READ, self)
            undo.callback(self._selector.unregister, pid_fd)
            self._selector.register(ready_r, selectors.EVENT_READ, self)
            undo.pop_all()
        self.process, self.pid_fd, self.ready_fd = process, pid_fd, ready_r
        self._started = time.monotonic()

    def _spawn(self, config: msgspec.Struct, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN_CHILD.format(self.module), _CODE],
            stdin=subprocess.PIPE,
            pass_fds=[fd for fd in fds if fd >= 0],
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # otherwise numpy starts a thread for every core
        )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
        except BrokenPipeError:
            log.error("%s %d died before it read its configuration", self.kind, self.number)
        return process

    def take_ready(self) -> bool:
        """Read and close `ready_fd`, which must be readable. Return True if the process is ready, and False if it died
        before."""
        ready = bool(os.read(self.ready_fd, 1))
        self._selector.unregister(self.ready_fd)
        os.close(self.ready_fd)
        self.ready_fd = -1
        if ready:
            self.not_serving = ""
        return ready

    def bury(self) -> None:
        """Clean up after the process has ended, and set the time of its restart."""
        process = self.process
        assert process is not None
        status = process.wait()
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        self.not_serving = f"its process died ({cause}); another one is starting"
        self._selector.unregister(self.pid_fd)
        os.close(self.pid_fd)
        self.pid_fd = -1
        if self.ready_fd >= 0:
            self.take_ready()
        self.process = None
        now = time.monotonic()
        stable = now - self._started > STABLE_S
        self._delay_s = 0.0 if stable else min(MAX_RESTART_DELAY_S, self._delay_s * 2 or FIRST_RESTART_DELAY_S)
        self.restart_at = now + self._delay_s
        log.error(
            "%s %d (pid %d) died: %s; %s; restarting in %.1f s",
            self.kind,
            self.number,
            process.pid,
            cause,
            self.loss,
            self._delay_s,
            extra=fields(shard=self.number, pid=process.pid, status=status, restart_s=self._delay_s),
        )

    def start_failed(self, error: OSError) -> None:
        """Set the time of the next attempt, because the process cannot be started now."""
        self.restart_at = time.monotonic() + MAX_RESTART_DELAY_S
        self.not_serving = f"its process cannot be started: {error}"
        log.error(
            "%s %d cannot be started: %s; trying again in %.1f s",
            self.kind,
            self.number,
            error,
            MAX_RESTART_DELAY_S,
            extra=fields(shard=self.number, restart_s=MAX_RESTART_DELAY_S),
        )


class ShardChild(Child):
    """One shard and its sockets."""

    kind = "shard"
    loss = "its blocks in memory are gone and count as misses"
    module = "kvstore.shard.process"

    def __init__(
        self,
        number: int,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        make_config: Callable[[ShardChild, int], ShardConfig],
        unix: socket.socket | None,
        path: str,
    ) -> None:
        """`make_config`: the function that returns the shard's configuration. Its arguments are this shard and the
        descriptor of the pipe on which the shard reports that it is ready.
        `unix`, `path`: the Unix socket for clients on this host, and its path."""
        super().__init__(number, selector)
        self.listener = listener
        self.unix = unix
        self.unix_path = path
        self._make_config = make_config

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port on which the shard listens."""
        host, port = self.listener.getsockname()[:2]
        return host, port

    def config(self, ready_fd: int) -> tuple[ShardConfig, Sequence[int]]:
        config = self._make_config(self, ready_fd)
        return config, (
            config.listen_fd,
            config.unix_fd,
            ready_fd,
            config.heard_fd,
            config.changes_fd,
            *config.told_fds,
        )
