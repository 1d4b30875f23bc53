"""The servers that are measured. A benchmark starts each on a free port, and ends it even after an error."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

if TYPE_CHECKING:
    from redis import Redis

ROOT: Final = Path(__file__).resolve().parents[2]
_START_S: Final = 60.0
_STOP_S: Final = 20.0
_READ_BYTES: Final = 1 << 20  # for redis-py, whose default of 64 KiB makes reads of large values several times slower
_SPARE_BYTES: Final = 256 << 20
# These are below the kernel's ephemeral ports, which a connection could take before the server listens.
_PORTS: Final = iter(random.sample(range(10_000, 20_000), 10_000))


def environment() -> dict[str, str]:
    """Return the environment of child processes, in which they can import this checkout. It lacks the server settings
    of the shell's environment."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_SERVER_")}
    return {**inherited, "PYTHONPATH": path}


def free_port() -> int:
    """Return a free port, for a server that cannot choose one itself. No port is returned twice."""
    while True:
        port = next(_PORTS)
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


def end(process: subprocess.Popen[Any]) -> None:
    """End a process with SIGTERM, and kill it if it does not end in time."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def kvstore_server(
    block_bytes: int,
    shards: int = 1,
    spare_bytes: int = _SPARE_BYTES,
    flags: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> Iterator[str]:
    """Start a `kvstore-server` with room for `block_bytes` of blocks, and some more, on every shard. Yield its
    endpoint.

    flags: further flags, which override those for the memory. prefix: a command that runs the server on another host.
    """
    memory = block_bytes * 5 // 4 + spare_bytes * shards
    command = [
        *prefix,
        sys.executable,
        "-m",
        "kvstore",
        "--port",
        "0",
        "--memory",
        f"{memory}B",
        "--shards",
        str(shards),
    ]
    command += flags
    with child(command, "kvstore-server ready ", "kvstore-server") as endpoint:
        yield endpoint


@contextmanager
def child(command: Sequence[str], ready: str, what: str) -> Iterator[str]:
    """Run a process of this checkout while the body runs. Yield the text after `ready` in its first line of output.

    Raises `RuntimeError`, with the end of its stderr, if its first line is a different one."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment())
        late = threading.Timer(_START_S, process.kill)  # ends the wait for the ready line below
        late.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            late.cancel()
            if not line.startswith(ready):
                log.seek(0)
                raise RuntimeError(f"{what} did not start:\n{log.read()[-4000:].decode(errors='replace')}")
            yield line.removeprefix(ready).split()[0]
        finally:
            late.cancel()
            end(process)
            if process.stdout is not None:
                process.stdout.close()


def processor_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time of these processes so far, as counted by the scheduler, for all live threads."""
    files = [file for each in processes for file in Path(f"/proc/{each.pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def redis_missing() -> str:
    """Return why Redis cannot be measured; empty if it can."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed"
    return "" if importlib.util.find_spec("redis") else "redis-py is not installed"


@contextmanager
def redis_server() -> Iterator[Redis | None]:
    """Start a Redis server, memory only, over TCP. Yield a redis-py client; None if `redis_missing`."""
    if redis_missing():
        yield None
        return
    import redis

    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", ""]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            client = redis.Redis(host="127.0.0.1", port=port, socket_timeout=_START_S, socket_read_size=_READ_BYTES)
            _await_redis(client, process)
            with client:
                yield client
        finally:
            end(process)


def _await_redis(client: Redis, process: subprocess.Popen[Any]) -> None:
    import redis

    deadline = time.monotonic() + _START_S
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {error}") from error
            time.sleep(0.02)


@contextmanager
def serving_process(serve: Callable[..., None], *arguments: Any, what: str) -> Iterator[Any]:
    """Start a process that runs `serve(pipe, *arguments)` while the body runs. Yield the first object that it sends."""
    spawn = multiprocessing.get_context("spawn")
    ours, its_own = spawn.Pipe()
    process = spawn.Process(target=serve, args=(its_own, *arguments), daemon=True)
    process.start()
    its_own.close()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"{what} was not ready within {_START_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        process.terminate()
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()
