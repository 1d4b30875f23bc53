"""Measures how much transfers slow a thread of the same process that computes in Python, as an engine's thread does,
and how much this thread slows transfers.

A thread keeps the interpreter's lock for up to 5 ms, so code that needs the lock for every few megabytes is slow.
*Pace*: the speed of a thread that counts in a loop. *Rate*: bytes a second of the concurrent transfer. The limit of
both is measured with a plain socket (`sendall`, `recv_into`), which releases the lock while it copies, instead of the
client. Three busy threads share two cores here, so all rates are lower than without the counter.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import PLAIN_GET, PLAIN_SET, Blocks, connect

PACE: Final = "pace beside"
COUNTS: Final = 10_000_000  # a pace is the time for this many counts
RUN_S: Final = 0.6
QUICK_RUN_S: Final = 0.05


class Counter:
    """A thread that counts while a transfer is repeated."""

    def __init__(self, run_s: float) -> None:
        self._run_s = run_s
        self._counted = 0
        self._stop = False

    def _count(self) -> None:
        counted = 0
        while not self._stop:
            counted += 1
        self._counted = counted

    def beside(self, transfer: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of one transfer, and the seconds for `COUNTS` counts."""
        self._stop = False
        thread = threading.Thread(target=self._count)
        begin = time.perf_counter()
        thread.start()
        repeats = 0
        while (elapsed := time.perf_counter() - begin) < self._run_s:
            transfer()
            repeats += 1
        self._stop = True
        thread.join()
        return elapsed / repeats, elapsed / self._counted * COUNTS

    def operations(self, name: str, transfer: Callable[[], object], moved: int, limit: str = "") -> list[Operation]:
        """Return the operations for the transfer's rate and the counter's pace."""
        return [
            Operation(name, lambda: self.beside(transfer)[0], moved, limit),
            Operation(f"{PACE} {name}", lambda: self.beside(transfer)[1], limit=limit and f"{PACE} {limit}"),
        ]


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    blocks = Blocks(benchmark.batch, HEADLINE.block_bytes)
    first, last = next(iter(blocks.batch.calls()))
    moved = (last - first) * HEADLINE.block_bytes
    counter = Counter(QUICK_RUN_S if benchmark.quick else RUN_S)
    keys, out, source = blocks.keys[first:last], blocks.out[first:last], blocks.source[first:last]
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks.total_bytes))
        plain = stack.enter_context(plain_socket(benchmark.batch.blocks, HEADLINE.block_bytes))
        client = stack.enter_context(connect(endpoint, "beside python", HEADLINE.block_bytes))
        client.set(blocks.keys, blocks.source)
        plain.set(blocks.source, 0, len(blocks.source))
        benchmark.measure(
            "beside a thread that counts",
            [
                Operation(f"{PACE} nothing", lambda: counter.beside(lambda: time.sleep(0.01))[1]),
                *counter.operations(PLAIN_GET, lambda: plain.get_into(blocks.out, first, last), moved),
                *counter.operations(PLAIN_SET, lambda: plain.set(blocks.source, first, last), moved),
                *counter.operations("get_into", lambda: client.get_into(keys, out), moved, PLAIN_GET),
                *counter.operations("set", lambda: client.set(keys, source, force=True), moved, PLAIN_SET),
            ],
            block_bytes=HEADLINE.block_bytes,
        )
    benchmark.finish(shards=1)


if __name__ == "__main__":
    main()
