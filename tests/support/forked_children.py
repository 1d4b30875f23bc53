"""Makes supervisors that a nursery has forked (see `forked`) fork their shards, and makes those shards fork their
keepers.

Normally, a supervisor starts a new interpreter for each shard, which imports numpy and the shard's code; a shard does
the same for its keeper. This takes most of the time until a server is ready. A supervisor from a nursery has already
imported that code, so it can fork its shards. The forks run the same code, inherit the same descriptors and end in the
same way. All other processes, and those of servers that are not forked, are started normally.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from kvstore import logs
from kvstore.disk import keeper, keeper_process
from kvstore.node.children import ShardChild
from kvstore.shard import process as shard_process
from tests.support.forked import Process


class Fork(Process):
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid, os.pidfd_open(pid), os.pidfd_open(pid))  # readable after its end, like a pipe

    def _status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_children() -> None:
    """From now on in this process, supervisors fork their shards, shards fork their keepers, and a planner forks its
    workers."""
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: context
    ShardChild._spawn = _fork_shard
    keeper._spawn = _fork_keeper


def _fork_shard(_child: ShardChild, config: msgspec.Struct, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    with open(os.memfd_create("config"), "w+b") as given:  # in a container, no folder may be writable
        given.write(msgspec.json.encode(config))
        given.seek(0)
        return _fork(shard_process.main, [given.fileno(), 1, 2], fds)


def _fork_keeper(
    directory: Path, mode: str, map_bytes: int, lock_fd: int | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "r+b") as nothing:
        arguments = ["-c", "", str(directory), str(theirs.fileno()), mode, str(map_bytes), *logs.of_child("keeper")]

        def main() -> None:
            sys.argv = arguments
            keeper_process.main()

        passed = [theirs.fileno(), *(() if lock_fd is None else (lock_fd,))]
        return _fork(main, [nothing.fileno(), nothing.fileno(), 2], passed), ours


def _fork(main: Callable[[], None], standard: Sequence[int], passed: Sequence[int]) -> subprocess.Popen[bytes]:
    """Run `main` in a fork, with these standard files and further descriptors."""
    pid = os.fork()
    if not pid:
        _be(main, standard, passed)
    return cast("Any", Fork(pid))


def _be(main: Callable[[], None], standard: Sequence[int], passed: Sequence[int]) -> None:
    """In the fork: behave like a new interpreter, run `main`, and end."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        logging.root.handlers.clear()  # the handlers of pytest, if this was its process
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in passed:
                with contextlib.suppress(OSError):  # the descriptor of the list itself
                    os.close(int(name))
        main()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
