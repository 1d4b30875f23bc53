"""Shared by the benchmarks of the KV pipeline: a decoder, its KV, the store that has a copy of the KV, and rounds of
operations."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.kv_pipeline.beside import Beside, attending
from benchmarks.kv_pipeline.blocks import connect
from benchmarks.kv_pipeline.decoder import Decoder, Shape
from benchmarks.kv_pipeline.lending import Fetched, Pushed, Resident, copying, fill, lent_layers, make_kv
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.limited_link import LimitedLink
from benchmarks.remote_kv_cache.processes import kvstore_server
from kvstore_client import KVStoreClient

FULL_RATE: Final = 4e9  # bytes/s: more than this machine can move
RATIOS: Final = {"0.25": (4, 288), "0.5": (8, 288), "1": (8, 576)}  # batch and context for KV to weights
# The names, in results, of what crosses the link.
FETCHED: Final = "fetched"
PUSHED: Final = "pushed"
ARMS: Final = {FETCHED: "KV comes", PUSHED: "attention goes"}


class Rig:
    """A decoder with its own core, its KV, and the store that has a copy of it. All processes that it starts end with
    the stack. The thread that makes the rig runs the decoder, and must close the stack."""

    def __init__(self, shape: Shape, link: LimitedLink | None, stack: ExitStack) -> None:
        """link: the link between decoder and store; if it is None, loopback."""
        self.shape, self._stack = shape, stack
        cores = sorted(os.sched_getaffinity(0))
        self.own_core, self.other_core = cores[0], cores[min(1, len(cores) - 1)]
        self.decoder, self.resident = Decoder(shape), Resident([make_kv(shape, layer) for layer in range(shape.layers)])
        self._host = link.address if link else "127.0.0.1"
        self._prefix = link.command if link else []
        flags = ("--host", self._host, "--insecure")
        with self._elsewhere():
            self.endpoint = stack.enter_context(kvstore_server(shape.kv_bytes, flags=flags, prefix=self._prefix))
        self.client = self.connect(False)
        if link:
            link.set_rate(FULL_RATE)
        fill(shape, self.resident, self.client)
        stack.callback(os.sched_setaffinity, 0, set(cores))
        os.sched_setaffinity(0, {self.own_core})
        self.expected = self.decoder.run(self.resident.attend)

    def of_batch(self, batch: int) -> Rig:
        """Return a rig for the first `batch` sequences, with the same store."""
        smaller = copy.copy(self)
        smaller.decoder, smaller.resident = self.decoder.of_batch(batch), self.resident.of_batch(batch)
        smaller.shape = smaller.decoder.shape
        smaller.expected = smaller.decoder.run(smaller.resident.attend)
        return smaller

    def connect(self, shared: bool) -> KVStoreClient:
        """A client whose threads are on the other core."""
        with self._elsewhere():
            return self._stack.enter_context(connect(self.endpoint, self.shape, shared))

    def beside(self) -> Beside:
        """Start a process on the store's host that attends its KV."""
        with self._elsewhere():
            address = self._stack.enter_context(attending(self.shape, self.endpoint, self._host, self._prefix))
            beside = Beside(address)
        self._stack.callback(beside.close)
        return beside

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Let threads and processes that are started while the body runs, and their children, run on the other core."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.other_core})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def steps(self, lender: Resident | Fetched | Pushed) -> float:
        """Return the seconds of a step: the median after the first one. Raises `AssertionError` if the output
        differs."""
        times: list[float] = []
        begin = time.perf_counter()

        def stepped() -> None:
            nonlocal begin
            now = time.perf_counter()
            times.append(now - begin)
            begin = now

        output = self.decoder.run(lender.attend, stepped)
        if isinstance(lender, Pushed):  # attention is computed one sequence at a time
            np.testing.assert_allclose(output, self.expected, rtol=2e-3, atol=2e-3)
        else:
            np.testing.assert_array_equal(output, self.expected)
        return median(times[1:])

    def lent(self, lent: int, depth: int, client: KVStoreClient | None = None) -> float:
        """Return the seconds of a step when the KV of `lent` layers comes from the store."""
        if not lent:
            return self.steps(self.resident)
        layers = lent_layers(self.shape, lent)
        with Fetched(self.shape, self.resident, layers, client or self.client, depth, self.other_core) as fetched:
            return self.steps(fetched)

    def beside_copies(self) -> float:
        """Return the seconds of a step with nothing lent while all layers are read again and again without being used.
        This shows how much copies slow computing."""
        with copying(self.shape, self.client, range(self.shape.layers), self.other_core):
            return self.lent(0, 0)

    def pushed(self, lent: int, beside: Beside) -> float:
        """Return the seconds of a step when `lent` layers are attended on the store's host."""
        return self.steps(Pushed(self.shape, self.resident, lent_layers(self.shape, lent), beside))


def of_ratios(benchmark: Benchmark) -> Iterator[tuple[str, Rig, LimitedLink]]:
    """Yield a rig for each ratio of KV to weights, behind one link; only for the first ratio if the run is quick. Each
    rig ends when the next one is requested."""
    with LimitedLink(FULL_RATE) as link:
        for name, (batch, context) in list(RATIOS.items())[: 1 if benchmark.quick else None]:
            with ExitStack() as stack:
                yield name, Rig(Shape(batch=batch, context=context), link, stack), link


def in_turn(benchmark: Benchmark, runs: dict[Any, Callable[[], float]]) -> dict[Any, float]:
    """Run these in turn in each round. Return the median of each."""
    found: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(benchmark.rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {name: median(values) for name, values in found.items()}
