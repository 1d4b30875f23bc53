"""Runs our commands and stand-in engines in processes that are forked from a process that has already imported their
code.

Python's start and the imports of numpy and the command line take up to half a second of processor time, and the tests
run hundreds of commands and servers. A process called nursery imports them once for each pytest worker; a fork of it
takes about ten milliseconds. The fork runs the same `__main__`, with its own arguments, environment, folder and
standard files.

A fork ends without finalizing the interpreter. Finalizing would write to, and so copy, every page that the fork shares
with its nursery, which takes longer than most commands.

Some variables are read only when a process starts, and not by a fork. So if the environment differs in such variables
(PYTHONPATH, LD_PRELOAD, ...), the process is started normally. While coverage is measured, all processes are started
normally, because coverage follows only those. An environment with the variable `FORKED` has a nursery of its own,
started with those variables. With a `prefix`, `FORKED` makes a server fork its shards.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
_TYPER: Final = "typer._adapters"  # typer imports it with its first argument, and it imports pydantic
PRELOAD: Final = {
    "kvstore": [
        *("kvstore.node.cli", "kvstore.node.supervisor", "kvstore.node.health", "kvstore.node.web", "requests"),
        *("kvstore.shard.process", _TYPER, "tests.support.harness"),
    ],
    "kvstore_cli": [
        *("kvstore_cli", "kvstore_client.client", "kvstore_serving", "requests", _TYPER, "tests.support.harness"),
    ],
    "tests.support.stand_in_engine": [
        *("starlette.applications", "starlette.middleware.cors", "uvicorn", "uvicorn.lifespan.on"),
        *("uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto"),
    ],
}
# Programs of the tests that need no more code than a command. They are forked from that command's nursery.
IN_NURSERY_OF: Final = {
    "tests.chaos.worker": "kvstore_cli",
    "tests.chaos.torture_writer": "kvstore_cli",
    "tests.support.keeper_loop": "kvstore",
}
READ_AT_START: Final = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENBLAS_", "OMP_", "COVERAGE_")
WHOLE: Final = ("kvstore_cli", "kvstore_serving")  # packages whose modules are imported when a command needs them
FORKED: Final = "KVSTORE_TESTS_FORKED"
CLOCK: Final = "KVSTORE_TESTS_CLOCK"  # the file with the time of a test's clock
MOVED_CLOCK: Final = Path(__file__).parent / "moved_clock"
START_S: Final = 60.0
_MAX_REQUEST_BYTES: Final = 1 << 20
_STATUS: Final = struct.Struct("<i")
_LOADER: Final = ("LD_", "OMP_")  # when a test imports vLLM, it sets such variables in this process
_GIVEN: Final = {name: value for name, value in os.environ.items() if name.startswith(_LOADER)}


def environment(**extra: str) -> dict[str, str]:
    """Return an environment for child processes that can import this checkout. It lacks the kvstore settings of the
    caller's shell, and variables that vLLM has set for itself."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = ("KVSTORE_SERVER_", "KVSTORE_ENDPOINT", "KVSTORE_NAMESPACE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*ours, *_LOADER))}
    return {**inherited, **_GIVEN, "PYTHONPATH": path, **extra}


_ENVIRONMENT: Final = environment()  # the nurseries' environment; some tests change this process's environment


def clocked(clock: str) -> dict[str, str]:
    """Return variables for processes whose time comes from a file."""
    path = os.pathsep.join([str(MOVED_CLOCK), environment()["PYTHONPATH"]])
    return {CLOCK: clock, "PYTHONPATH": path, FORKED: "1"}


def forkable(variables: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked."""
    if any(name.startswith("COVERAGE_") for name in variables):
        return False
    return FORKED in variables or _read_at_start(variables) == _read_at_start(_ENVIRONMENT)


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}


class Running:
    """A running command, and its captured output."""

    def __init__(self, process: subprocess.Popen[bytes] | Process, args: list[str], files: list[IO[bytes]]) -> None:
        self._process = process
        self._args = args
        self._files = files
        self.send_signal = process.send_signal

    def finish(self, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Wait until the command has ended. Raises `subprocess.TimeoutExpired`."""
        status = self._process.wait(timeout)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode())
        return subprocess.CompletedProcess(self._args, status, *texts)


@contextlib.contextmanager
def running(module: str, *arguments: str, stdin: bytes = b"", env: Mapping[str, str]) -> Iterator[Running]:
    """Run `python -m MODULE ARGUMENTS` during the body. If it has not ended by then, it is killed."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = start(module, arguments, stdin=given, stdout=out, stderr=err, env=env)
        try:
            yield Running(process, [sys.executable, "-m", module, *arguments], [out, err])
        finally:
            process.kill()
            process.wait(START_S)


def run(
    module: str,
    *arguments: str,
    stdin: bytes = b"",
    env: Mapping[str, str],
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` to its end, like `subprocess.run` with captured text. Raises
    `subprocess.TimeoutExpired`."""
    with running(module, *arguments, stdin=stdin, env=env) as process:
        return process.finish(timeout)


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
    """Start `python -m MODULE ARGUMENTS` with these standard files. `prefix`: a command that executes the rest in the
    same process, such as `ip netns exec`."""
    if prefix or not forkable(env):
        program = [__name__, module, "--"] if FORKED in env and forkable(env) else [module]
        command = [*prefix, sys.executable, "-m", *program, *arguments]
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env))
    nursery = _nursery(IN_NURSERY_OF.get(module, module), frozenset(_read_at_start(env).items()))
    return nursery.fork(module, arguments, [stdin, stdout, stderr], env)


class Process:
    """A process that a nursery has forked. Its methods work like those of `subprocess.Popen` with the same names."""

    def __init__(self, pid: int, pid_fd: int, ended: int) -> None:
        """ended: a pipe from which the exit status can be read after the process has ended. While the pipe is open, no
        other process can get the process id."""
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
    """A process that has imported a command's code. It ends when `_socket` is closed, at the latest when this process
    ends."""

    def __init__(self, module: str, variables: frozenset[tuple[str, str]]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Threads of OpenBLAS would be lost in a fork.
                env={**_ENVIRONMENT, **dict(variables), "OPENBLAS_NUM_THREADS": "1"},
            )
        self._lock = threading.Lock()
        self._socket.settimeout(START_S)
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, module: str, arguments: Sequence[str], files: Sequence[IO[Any]], env: Mapping[str, str]) -> Process:
        """Start a process. May be called from any thread."""
        request = json.dumps([module, list(arguments), dict(env), os.getcwd()]).encode()
        ended, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [request], [*(file.fileno() for file in files), theirs])
                answer, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        finally:
            os.close(theirs)
        assert fds, f"the nursery has died: exit status {self._process.poll()}"
        return Process(_STATUS.unpack(answer)[0], fds[0], ended)


_nursery = functools.cache(Nursery)  # one per module, set of start-only variables, and pytest worker


def _serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Fork a child for each request. Returns the module and the arguments in each child; in the nursery, this function
    does not return."""
    running: dict[int, tuple[int, int]] = {}  # pid_fd -> pid, pipe for its status
    ended: dict[int, int] = {}  # that pipe -> pid, until the test's process has closed the pipe
    poll = select.epoll()
    poll.register(requests, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, pipe = running.pop(fd)
                poll.unregister(fd)  # closing is not enough, because the test's process has the descriptor, too
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
                module, arguments, variables, folder = json.loads(request)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(variables)
                if CLOCK in variables:
                    importlib.import_module("sitecustomize").follow(variables[CLOCK])
                signal.signal(signal.SIGINT, signal.default_int_handler)  # as for a foreground process
                return module, arguments
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


def _run(module: str) -> None:
    """Run `python -m MODULE` in this fork, and end the process."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        status = end.code or 0
    else:
        status = 0
    threading._shutdown()  # waits for threads, as an interpreter does before its own end
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the reader is gone, or the file is closed: the interpreter handles that
        sys.exit(status)
    os._exit(status)


def main() -> None:
    """With the arguments MODULE FD, be a nursery. With MODULE -- ARGUMENTS, be a server that is started normally and
    forks its shards."""
    module, fd, *arguments = sys.argv[1:]
    for name in PRELOAD[module]:
        _import(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    if forkable({**os.environ, FORKED: "1"}):  # no coverage is measured
        importlib.import_module("tests.support.forked_children").fork_children()
    gc.collect()
    gc.freeze()
    if fd != "--":
        module, arguments = _serve(socket.socket(fileno=int(fd)))
    sys.argv[1:] = arguments
    _run(module)


if __name__ == "__main__":
    main()
