"""`kvstore bench`: what a running server gives this client, from where it stands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvstore_client.client import KVStoreClient
from kvstore_client.errors import KVStoreError
from kvstore_client.keys import KeyArray, Namespace


class OperationReport(msgspec.Struct, frozen=True):
    """One operation. GB = 1e9 bytes; 0 for operations that move no blocks. Latencies are of whole calls."""

    operation: str
    gb_s: float
    gb_s_min: float
    gb_s_max: float
    blocks_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


class BenchReport(msgspec.Struct, frozen=True):
    """What was measured, and with which shape."""

    endpoints: Sequence[str]
    block_bytes: int
    blocks: int
    batch: int
    rounds: int
    operations: Sequence[OperationReport]


class Bench:
    """A measurement of `rounds` interleaved rounds; every byte read is compared with what was written."""

    def __init__(
        self,
        endpoints: Sequence[str],
        block_bytes: int,
        blocks: int,
        batch: int,
        rounds: int,
        timeout_s: float,
    ) -> None:
        self._endpoints = endpoints
        self._block_bytes, self._blocks, self._batch, self._rounds = (
            block_bytes,
            blocks,
            min(batch, blocks),
            rounds,
        )
        self._namespace = Namespace(
            model="kvstore-bench",
            dtype="uint8",
            block_tokens=16,
            block_bytes=block_bytes,
            extra={"run": os.urandom(8).hex()},
        )
        self._timeout_s = timeout_s

    def run(self, progress: bool) -> BenchReport:
        """Measure. Raises `KVStoreError` when the server does not keep what it was given, or returns other bytes."""
        with KVStoreClient(self._endpoints, self._namespace, timeout_s=self._timeout_s) as client:
            return self._measure(client, progress)

    def _measure(self, client: KVStoreClient, progress: bool) -> BenchReport:
        keys = np.frombuffer(os.urandom(16 * self._blocks), dtype=np.uint8).reshape(-1, 16)
        generator = np.random.default_rng()
        source = np.frombuffer(generator.bytes(self._blocks * self._block_bytes), dtype=np.uint8)
        source = source.reshape(self._blocks, self._block_bytes)
        out = np.zeros_like(source)

        def stream(start: int, end: int) -> None:
            for position, block in client.stream_get(keys[start:end]):
                out[start + position] = np.frombuffer(block, dtype=np.uint8)

        operations: dict[str, Callable[[int, int], object]] = {
            "set deferred": lambda start, end: client.set(keys[start:end], source[start:end]),
            "set": lambda start, end: client.set(keys[start:end], source[start:end], deferred=False),
            "get_into": lambda start, end: client.get_into(keys[start:end], out[start:end]),
            "stream_get": stream,
            "contains": lambda start, end: client.contains(keys[start:end]),
            "match_prefix": lambda start, end: client.match_prefix(keys[start:end]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        calls: dict[str, list[float]] = {name: [] for name in operations}
        with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
            task = bar.add_task("measuring", total=self._rounds * len(operations))
            for _ in range(self._rounds):
                for name, operation in operations.items():
                    if name.startswith("set"):
                        client.delete(keys)
                    if name.endswith(("into", "get")):
                        out[:] = 0
                    seconds[name].append(self._round(operation, calls[name]))
                    if name.endswith(("into", "get")):
                        self._compare(client, keys, source, out)
                    bar.advance(task)
        client.delete(keys)
        return BenchReport(
            endpoints=self._endpoints,
            block_bytes=self._block_bytes,
            blocks=self._blocks,
            batch=self._batch,
            rounds=self._rounds,
            operations=[self._report(name, seconds[name], calls[name]) for name in operations],
        )

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._blocks, self._batch):
            yield start, min(start + self._batch, self._blocks)

    def _round(self, operation: Callable[[int, int], object], calls: list[float]) -> float:
        begin = time.perf_counter()
        for start, end in self._chunks():
            before = time.perf_counter()
            operation(start, end)
            calls.append(time.perf_counter() - before)
        return time.perf_counter() - begin

    def _compare(self, client: KVStoreClient, keys: KeyArray, source: KeyArray, out: KeyArray) -> None:
        if np.array_equal(source, out):
            return
        present = int(client.contains(keys).sum())
        if present < self._blocks:
            raise KVStoreError(
                f"the server kept {present} of {self._blocks} blocks: give it more memory, or measure fewer --blocks"
            )
        raise KVStoreError("the server returned other bytes than were set")

    def _report(self, name: str, seconds: list[float], calls: list[float]) -> OperationReport:
        moved = 0 if name in ("contains", "match_prefix") else self._blocks * self._block_bytes / 1e9
        median = float(np.median(seconds))
        p50, p90, p99 = (float(value) * 1000 for value in np.percentile(calls, [50, 90, 99]))
        return OperationReport(
            operation=name,
            gb_s=moved / median,
            gb_s_min=moved / max(seconds),
            gb_s_max=moved / min(seconds),
            blocks_s=self._blocks / median,
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
        )
