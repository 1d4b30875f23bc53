"""Compares the total read rate of 64 clients, on a server with two shards, with the rate of one client. It also shows
the slowest reads.

A call reads 16 blocks of Qwen2.5-7B. The clients are threads of 8 processes, each with its own connections. The single
client makes as many calls as 16 of the 64 clients together. A run lasts from the first start to the last end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.client_processes import answer_of, started
from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE, Batch
from benchmarks.remote_kv_cache.transfers import Blocks, connect

MODEL: Final = "many clients"
ALONE: Final = "1 client"
TOGETHER: Final = "64 clients"
PROCESSES: Final = 8
IN_A_PROCESS: Final = 8
SHARDS: Final = 2
BLOCKS: Final = 256
PER_CALL: Final = 16
CALLS: Final = 8  # calls of each of the 64 clients
_LEAD_S: Final = 0.1

Spans = list[tuple[float, float]]


def _read(pipe: Connection, endpoint: str, seed: int) -> None:
    """The main function of each process. It receives the number of clients, the number of calls of each, and the time
    to start. It sends back the begin and the end of every call."""
    blocks = Blocks(Batch(BLOCKS, PER_CALL), HEADLINE.block_bytes)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(endpoint, MODEL, HEADLINE.block_bytes)) for _ in range(IN_A_PROCESS)]
        rows = [np.zeros((PER_CALL, HEADLINE.block_bytes), dtype=np.uint8) for _ in clients]
        pipe.send([])
        with contextlib.suppress(EOFError):
            while True:
                count, calls, start = pipe.recv()
                spans: Spans = []

                def read(number: int, calls: int = calls, start: float = start, spans: Spans = spans) -> None:
                    first = 0
                    time.sleep(max(0.0, start - time.perf_counter()))
                    for first in np.random.default_rng((seed, number)).integers(0, BLOCKS - PER_CALL, calls).tolist():
                        began = time.perf_counter()
                        clients[number].get_into(blocks.keys[first : first + PER_CALL], rows[number])
                        spans.append((began, time.perf_counter()))
                    if not np.array_equal(rows[number], blocks.source[first : first + PER_CALL]):
                        spans.clear()  # the answer is then too short, which fails the benchmark

                threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                pipe.send(spans)


def _operation(name: str, pipes: list[Connection], clients: int, calls: int, took_s: list[float]) -> Operation:
    """Return the operation in which each process at the other end of `pipes` has `clients` clients that read, with
    `calls` calls each. The seconds of every call are appended to `took_s`."""

    def run() -> float:
        start = time.perf_counter() + _LEAD_S
        for pipe in pipes:
            pipe.send((clients, calls, start))
        spans = [span for pipe in pipes for span in answer_of(pipe)]
        if len(spans) != len(pipes) * clients * calls:
            raise AssertionError("the bytes read differ from those written")
        took_s.extend(end - began for began, end in spans)
        return max(end for _, end in spans) - min(began for began, _ in spans)

    return Operation(name, run, len(pipes) * clients * calls * PER_CALL * HEADLINE.block_bytes)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    calls = 2 if benchmark.quick else CALLS
    took_s: dict[str, list[float]] = {ALONE: [], TOGETHER: []}
    blocks = Blocks(Batch(BLOCKS, PER_CALL), HEADLINE.block_bytes)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes, SHARDS))
        with connect(endpoint, MODEL, HEADLINE.block_bytes) as client:
            client.set(blocks.keys, blocks.source)
        pipes = stack.enter_context(started(_read, [(endpoint, seed) for seed in range(PROCESSES)]))
        operations = [
            _operation(ALONE, pipes[:1], 1, 16 * calls, took_s[ALONE]),
            _operation(TOGETHER, pipes, IN_A_PROCESS, calls, took_s[TOGETHER]),
        ]
        benchmark.measure("many clients", operations, block_bytes=HEADLINE.block_bytes, blocks_per_call=PER_CALL)
    benchmark.finish(
        p50_seconds={name: median(each) for name, each in took_s.items()},
        p99_seconds={name: float(np.quantile(each, 0.99)) for name, each in took_s.items()},
    )


if __name__ == "__main__":
    main()
