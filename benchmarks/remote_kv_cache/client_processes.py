"""Client processes that do the same work at the same time, each with its own blocks, connections and plain socket.

A process makes the operations of its blocks once, then runs each step (`before`, `run`, `after`) that it receives. A
run lasts from the first start to the last end: `perf_counter` is the machine's monotonic clock, so times of different
processes can be compared. A process compares the blocks that it has read after the clock has stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

from benchmarks.remote_kv_cache.harness import Operation
from benchmarks.remote_kv_cache.plain import PlainSocket
from benchmarks.remote_kv_cache.shapes import HEADLINE, Batch
from benchmarks.remote_kv_cache.transfers import (
    MEMCPY,
    PLAIN_GET,
    PLAIN_SET,
    Blocks,
    connect,
    get_into_operation,
    memcpy_operation,
    plain_operations,
    set_operation,
)

SET: Final = "set"
GET: Final = "get_into"
SHARED_SET: Final = "set, shared memory"
SHARED_GET: Final = "get_into, shared memory"
LIMITS: Final = {SET: PLAIN_SET, GET: PLAIN_GET, SHARED_SET: MEMCPY, SHARED_GET: MEMCPY}
MODEL: Final = "clients"
PER_CALL: Final = 64
_LEAD_S: Final = 0.02
_ANSWER_S: Final = 120.0  # longer than the deadline of a client's call, whose error says more
_STOP_S: Final = 10.0

Step = Literal["before", "run", "after"]


def _operations(
    stack: contextlib.ExitStack, endpoint: str, port: int, blocks: Blocks, shared_memory: bool
) -> list[Operation]:
    """Return the operations of one process. The process sets and reads the same keys over TCP and over shared
    memory."""
    client = stack.enter_context(connect(endpoint, MODEL, blocks.block_bytes))
    plain = PlainSocket(port)
    stack.callback(plain.close)
    operations = [
        *plain_operations(plain, blocks),
        set_operation(client, blocks, SET, PLAIN_SET),
        get_into_operation(client, blocks, GET, PLAIN_GET),
    ]
    if shared_memory:
        local = stack.enter_context(connect(endpoint, MODEL, blocks.block_bytes, shared_memory=True))
        operations += [
            memcpy_operation(blocks),
            set_operation(local, blocks, SHARED_SET, MEMCPY),
            get_into_operation(local, blocks, SHARED_GET, MEMCPY),
        ]
    return operations


def _work(pipe: Connection, endpoint: str, port: int, count: int, seed: int, shared_memory: bool) -> None:
    """The main function of a client process. It runs each step that it receives, `(step, name, when to start)`, and
    sends back when the step began and ended, or the error."""
    try:
        blocks = Blocks(Batch(count, PER_CALL), HEADLINE.block_bytes, seed)
        with contextlib.ExitStack() as stack:
            made = _operations(stack, endpoint, port, blocks, shared_memory)
            operations = {operation.name: operation for operation in made}
            pipe.send((0.0, 0.0))
            with contextlib.suppress(EOFError):
                while True:
                    step, name, start = pipe.recv()
                    time.sleep(max(0.0, start - time.perf_counter()))
                    begin = time.perf_counter()
                    getattr(operations[name], step)()
                    pipe.send((begin, time.perf_counter()))
    except Exception:
        with contextlib.suppress(OSError):  # the parent process has ended
            pipe.send(traceback.format_exc())


class Clients:
    """The client processes. Not thread-safe."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def do(self, step: Step, name: str, count: int) -> float:
        """Run a step of an operation in the first `count` processes at once. Return the seconds from the first start to
        the last end."""
        start = time.perf_counter() + _LEAD_S if step == "run" else 0.0
        for pipe in self._pipes[:count]:
            pipe.send((step, name, start))
        spans = [answer_of(pipe) for pipe in self._pipes[:count]]
        return max(end for _, end in spans) - min(begin for begin, _ in spans)


def answer_of(pipe: Connection) -> Any:
    """Return the next message of a client process. Raises `RuntimeError` with its traceback if it failed,
    `TimeoutError` if it does not answer."""
    if not pipe.poll(_ANSWER_S):
        raise TimeoutError(f"a client process did not answer within {_ANSWER_S:g} s")
    try:
        reply = pipe.recv()
    except EOFError:
        raise RuntimeError("a client process ended before it answered") from None
    if isinstance(reply, str):
        raise RuntimeError(f"a client process failed:\n{reply}")
    return reply


@contextlib.contextmanager
def started(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Start a process for each of `arguments`, which runs `work(pipe, *arguments)` while the body runs. Yield pipes to
    them once each has sent a message. A process ends when its pipe is closed."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for given in arguments:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(theirs, *given), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            answer_of(pipe)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        deadline = time.monotonic() + _STOP_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join()


@contextlib.contextmanager
def client_processes(endpoint: str, ports: list[int], blocks: int, *, shared_memory: bool = False) -> Iterator[Clients]:
    """Start one client process for each port of a plain socket's peer. `blocks`: the number of blocks of each.
    `shared_memory`: whether they run all operations of `LIMITS` and memcpy, or only those over TCP."""
    arguments = [(endpoint, port, blocks, number, shared_memory) for number, port in enumerate(ports)]
    with started(_work, arguments) as pipes:
        yield Clients(pipes)


def operation_of(clients: Clients, name: str, count: int, moved: int) -> Operation:
    """Return the operation that runs the operation `name` in `count` processes at once, which move `moved` bytes
    together."""

    def step(what: Step) -> Callable[[], float]:
        return partial(clients.do, what, name, count)

    limit = LIMITS.get(name, "")
    return Operation(
        f"{name} x{count}",
        run=step("run"),
        moved=moved,
        limit=limit and f"{limit} x{count}",
        before=step("before"),
        after=step("after"),
    )
