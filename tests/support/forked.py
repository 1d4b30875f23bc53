"""Our commands, and stand-in engines, in processes that are forked from one which has imported their code already.

Python, numpy and the libraries of the command line take up to half a second of processor time to import, and the tests
run hundreds of commands and servers. A nursery imports them once for each pytest worker; a fork of it takes some ten
milliseconds. The process runs the same `__main__`, with its own arguments, environment, folder and standard files.

What a process reads only at its start is not read again by a fork. So an environment that differs in such variables
(another PYTHONPATH, LD_PRELOAD, ...) gets a process of its own, started as usual; so does everything while coverage is
measured, which follows processes that start themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
_TYPER: Final = "typer._adapters"  # which it imports with its first argument, and pydantic with it
PRELOAD: Final = {
    "kvstore": [
        *("kvstore.node.cli", "kvstore.node.supervisor", "kvstore.node.health", "kvstore.node.web", "requests"),
        *("kvstore.shard.process", _TYPER),
    ],
    "kvstore_cli": ["kvstore_cli", "kvstore_client.client", "kvstore_serving", "requests", _TYPER],
    "tests.support.stand_in_engine": [
        *("starlette.applications", "starlette.middleware.cors", "uvicorn", "uvicorn.lifespan.on"),
        *("uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto"),
    ],
}
READ_AT_START: Final = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENBLAS_", "OMP_", "COVERAGE_")
WHOLE: Final = ("kvstore_cli", "kvstore_serving")  # packages whose modules are imported when a command needs them
START_S: Final = 60.0
_MAX_REQUEST_BYTES: Final = 1 << 20
_STATUS: Final = struct.Struct("<i")
_LOADER: Final = ("LD_", "OMP_")  # vLLM, when a test imports it, sets such variables in this process
_GIVEN: Final = {name: value for name, value in os.environ.items() if name.startswith(_LOADER)}


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: this checkout can be imported; kvstore settings of the caller's shell are
    left out, and what vLLM has set for itself."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = ("KVSTORE_SERVER_", "KVSTORE_ENDPOINT", "KVSTORE_NAMESPACE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*ours, *_LOADER))}
    return {**inherited, **_GIVEN, "PYTHONPATH": path, **extra}


_ENVIRONMENT: Final = environment()  # of the nurseries; some tests change that of this process


def forkable(variables: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked."""
    return _read_at_start(variables) == _read_at_start(_ENVIRONMENT) and not any(
        name.startswith("COVERAGE_") for name in variables
    )


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}


def run(
    module: str,
    *arguments: str,
    stdin: bytes = b"",
    env: Mapping[str, str],
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS`: like `subprocess.run` with captured text. Raises `subprocess.TimeoutExpired`."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = start(module, arguments, stdin=given, stdout=out, stderr=err, env=env)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait(START_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, "-m", module, *arguments], status, *texts)


def start(
    module: str,
    arguments: Sequence[str],
    *,
    stdin: IO[Any],
    stdout: IO[Any],
    stderr: IO[Any],
    env: Mapping[str, str],
    prefix: Sequence[str] = (),
) -> subprocess.Popen[bytes] | Process:
    """Start `python -m MODULE ARGUMENTS` with these standard files. `prefix`: a command that becomes this process."""
    if prefix or not forkable(env):
        command = [*prefix, sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env))
    return _nursery(module).fork(arguments, [stdin, stdout, stderr], env)


class Process:
    """A process that a nursery has forked. Its methods are those of `subprocess.Popen` of the same names."""

    def __init__(self, pid: int, pid_fd: int, ended: int) -> None:
        """ended: a pipe from which the status can be read when the process has ended. While it is open, the process id
        is not given to another process."""
        self.pid = pid
        self.returncode: int | None = None
        self._pid_fd = pid_fd
        self._ended = ended
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pid_fd)
        if self.returncode is None:
            os.close(self._ended)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and _readable(self._ended, 0.0):
                self.returncode = self._status()
                os.close(self._ended)
            return self.returncode

    def _status(self) -> int:
        data = os.read(self._ended, _STATUS.size)
        assert data, f"the nursery of process {self.pid} has died"
        return int(_STATUS.unpack(data)[0])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            _readable(self._ended, timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pid_fd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _readable(fd: int, timeout_s: float | None) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


# ---- the nursery ---------------------------------------------------------------------------------------------------


class Nursery:
    """A process that has imported a command's code. It ends when its end of `_socket` is closed: with this process."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**_ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},  # its threads would be lost in a fork
            )
        self._lock = threading.Lock()
        self._socket.settimeout(START_S)
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, arguments: Sequence[str], files: Sequence[IO[Any]], env: Mapping[str, str]) -> Process:
        """Start a process. Any thread."""
        request = json.dumps([list(arguments), dict(env), os.getcwd()]).encode()
        ended, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [request], [*(file.fileno() for file in files), theirs])
                answer, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        finally:
            os.close(theirs)
        assert fds, f"the nursery has died: exit status {self._process.poll()}"
        return Process(_STATUS.unpack(answer)[0], fds[0], ended)


_nursery = functools.cache(Nursery)  # one a module and pytest worker


def _serve(requests: socket.socket) -> list[str]:
    """Fork a child for each request. Returns in the children: -> their arguments. Exits in the nursery."""
    running: dict[int, tuple[int, int]] = {}  # pid_fd -> pid, pipe for its status
    ended: dict[int, int] = {}  # that pipe -> pid, until the other side has closed it
    poll = select.epoll()
    poll.register(requests, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, pipe = running.pop(fd)
                poll.unregister(fd)  # closing alone would not do: the other side has it, too
                os.close(fd)
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert end is not None
                status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, _STATUS.pack(status))
                ended[pipe] = pid
                poll.register(pipe, 0)
                continue
            if fd in ended:
                os.waitpid(ended.pop(fd), 0)
                poll.unregister(fd)
                os.close(fd)
                continue
            request, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
            if not request:
                os._exit(0)
            pid = os.fork()
            if not pid:
                for standard, file in enumerate(fds[:3]):
                    os.dup2(file, standard)
                os.closerange(3, 1 << 12)
                arguments, variables, folder = json.loads(request)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(variables)
                return [str(argument) for argument in arguments]
            pid_fd = os.pidfd_open(pid)
            for file in fds[:3]:
                os.close(file)
            running[pid_fd] = pid, fds[3]
            poll.register(pid_fd, select.EPOLLIN)
            socket.send_fds(requests, [_STATUS.pack(pid)], [pid_fd])


def _import(name: str) -> None:
    module = importlib.import_module(name)
    if name in WHOLE:
        for found in pkgutil.walk_packages(module.__path__, f"{name}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)


def main() -> None:
    module, fd = sys.argv[1], int(sys.argv[2])
    for name in PRELOAD[module]:
        _import(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    importlib.import_module("tests.support.forked_children").fork_children()
    gc.collect()
    gc.freeze()
    sys.argv[1:] = _serve(socket.socket(fileno=fd))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
