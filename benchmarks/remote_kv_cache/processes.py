"""The servers that are measured, each started by a benchmark on a free port and ended by it, whatever happens."""

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
_READ_BYTES: Final = 1 << 20  # of redis-py; with its default of 64 KiB it reads large values at a fraction of this
_SPARE_BYTES: Final = 256 << 20
# Below those that the kernel gives to connections, of which one could have the port by the time a server listens.
_PORTS: Final = iter(random.sample(range(10_000, 20_000), 10_000))


def environment() -> dict[str, str]:
    """The environment of child processes: this checkout can be imported, and the shell's server settings are
    left out."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_SERVER_")}
    return {**inherited, "PYTHONPATH": path}


def free_port() -> int:
    """A port on which nobody listens, for a server that cannot choose one itself; never the same one twice."""
    while True:
        port = next(_PORTS)
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, and kill it if it does not."""
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
    """A `kvstore-server` with room for `block_bytes` of blocks and some to spare on every shard. -> its endpoint.

    flags: more of them; they win over those for the room. prefix: a command that runs it elsewhere.
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
    """A process of this checkout while the body runs. -> what follows `ready` in its first line of output.

    Raises `RuntimeError`, with the end of its stderr, if that is not what it prints."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment())
        late = threading.Timer(_START_S, process.kill)  # ends the wait for the line below
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
    """The processor time of these processes so far, as the scheduler has counted it: all threads that are alive."""
    files = [file for each in processes for file in Path(f"/proc/{each.pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def redis_missing() -> str:
    """Why Redis cannot be measured; empty if it can."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed"
    return "" if importlib.util.find_spec("redis") else "redis-py is not installed"


@contextmanager
def redis_server() -> Iterator[Redis | None]:
    """A Redis of its own, memory only, over TCP. -> a redis-py client; None if `redis_missing`."""
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
    """A process that runs `serve(pipe, *arguments)` while the body runs. -> the first object that it sends."""
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
