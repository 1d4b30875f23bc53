"""Several client processes on one server at once: aggregate bytes a second of get_into and set.

Each process has its own blocks and connection. A run lasts from the first start to the last end. The limit is as many
plain sockets at once, each between two processes of its own; kvstore serves all of them from one process a shard.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import PlainSocket, plain_peer
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, Batch
from benchmarks.remote_kv_cache.transfers import (
    PLAIN_GET,
    PLAIN_SET,
    Blocks,
    connect,
    get_into_operation,
    plain_operations,
    set_operation,
)

COUNTS: Final = (1, 2, 4)
BLOCKS: Final = 256
QUICK_BLOCKS: Final = 32
PER_CALL: Final = 64
NAMES: Final = (PLAIN_SET, PLAIN_GET, "set", "get_into")
_LEAD_S: Final = 0.02
_ANSWER_S: Final = 300.0
_STOP_S: Final = 10.0


def _work(pipe: Connection, endpoint: str, plain_port: int, count: int, seed: int) -> None:
    """A client process: runs each step it is sent, `(step, name, when to start)`, and replies when it began and
    ended."""
    blocks = Blocks(Batch(count, PER_CALL), HEADLINE.block_bytes, seed)
    with connect(endpoint, "clients", HEADLINE.block_bytes) as client:
        plain = PlainSocket(plain_port)
        operations = {
            operation.name: operation
            for operation in (
                *plain_operations(plain, blocks),
                set_operation(client, blocks, "set", PLAIN_SET),
                get_into_operation(client, blocks, "get_into", PLAIN_GET),
            )
        }
        pipe.send((0.0, 0.0))
        with contextlib.suppress(EOFError):
            while True:
                step, name, start = pipe.recv()
                time.sleep(max(0.0, start - time.perf_counter()))
                begin = time.perf_counter()
                getattr(operations[name], step)()
                pipe.send((begin, time.perf_counter()))
        plain.close()


class Clients:
    """The client processes. `perf_counter` is the machine's monotonic clock, so their times can be compared."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def do(self, step: str, name: str, count: int) -> float:
        """Run a step of an operation in the first `count` processes at once. -> seconds, first start to last end."""
        start = time.perf_counter() + _LEAD_S
        for pipe in self._pipes[:count]:
            pipe.send((step, name, start))
        spans = [answer(pipe) for pipe in self._pipes[:count]]
        return max(end for _, end in spans) - min(begin for begin, _ in spans)


def answer(pipe: Connection) -> tuple[float, float]:
    """The next reply of a client process. Raises if it failed."""
    if not pipe.poll(_ANSWER_S):
        raise TimeoutError(f"a client process did not answer within {_ANSWER_S:g} s")
    begin, end = pipe.recv()
    return begin, end


@contextlib.contextmanager
def client_processes(endpoint: str, ports: list[int], blocks: int) -> Iterator[Clients]:
    """One client process for each plain-socket peer."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for number, port in enumerate(ports):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, endpoint, port, blocks, number), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            answer(pipe)
        yield Clients(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(_STOP_S)
            if process.is_alive():
                process.terminate()
                process.join()


def operation_of(clients: Clients, name: str, count: int, moved: int) -> Operation:
    """The operation `name` in `count` processes at once."""

    def step(what: str) -> Callable[[], float]:
        return partial(clients.do, what, name, count)

    limit = {"set": PLAIN_SET, "get_into": PLAIN_GET}.get(name, "")
    return Operation(
        f"{name} x{count}",
        run=step("run"),
        moved=moved,
        limit=limit and f"{limit} x{count}",
        before=step("before"),
        after=step("after"),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="of the server; default: 1")


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=_add_options)
    shards: int = benchmark.options.shards
    each = QUICK_BLOCKS if benchmark.quick else BLOCKS
    moved = each * HEADLINE.block_bytes
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(moved * max(COUNTS), shards))
        ports = [stack.enter_context(plain_peer(each, HEADLINE.block_bytes)) for _ in range(max(COUNTS))]
        clients = stack.enter_context(client_processes(endpoint, ports, each))
        operations = [
            # Most processes first: the uncounted round then leaves blocks for every process to read.
            operation_of(clients, name, count, moved * count)
            for count in reversed(COUNTS)
            for name in NAMES
        ]
        benchmark.measure("clients", operations, block_bytes=HEADLINE.block_bytes, blocks_per_client=each)
    benchmark.finish(shards=shards)


if __name__ == "__main__":
    main()
