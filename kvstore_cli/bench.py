"""`kvstore bench`: measures a running server as this client reaches it, without harm to the server's users.

Its blocks are in a namespace of its own, have the lowest priority, and are removed at the end whatever happens. Before
it sets the first block, it checks that all of them fit into memory and disk space that is free: a full server would
evict the blocks of other users for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from kvstore.sizes import format_size
from kvstore.store.namespaces import INDEX_OVERHEAD_BYTES, SLOT_BYTES
from kvstore.wire import ShardInfo
from kvstore.wire.status import segment_slots
from kvstore_cli.plain_table import columns, print_table
from kvstore_cli.progress import progress_bar
from kvstore_cli.store_state import owners_of
from kvstore_client.client import KVStoreClient
from kvstore_client.errors import KVStoreError
from kvstore_client.keys import KeyArray, Namespace

KEY_BYTES: Final = 16
PRIORITY: Final = 0  # the lowest, so that other users' blocks stay longer
TTL_S: Final = 600  # of each block, longer than any round: the blocks go even if this process is killed

_COLUMNS: Final = columns(
    ("operation", "operation"),
    ("GB/s", lambda row: row.gb_s or None, ".2f"),
    ("min … max", lambda row: f"{row.gb_s_min:.1f} … {row.gb_s_max:.1f}" if row.gb_s else None),
    ("blocks/s", "blocks_s", ",.0f"),
    *((f"{name} ms", f"{name}_ms", ".2f") for name in ("p50", "p90", "p99")),
)


class NoRoom(Exception):
    """The benchmark's blocks would evict blocks of other users."""


class OperationReport(msgspec.Struct, frozen=True):
    """The numbers of one operation. GB = 1e9 bytes; 0 for operations that move no blocks. Latencies are of whole
    calls."""

    operation: str
    gb_s: float
    gb_s_min: float
    gb_s_max: float
    blocks_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


class BenchReport(msgspec.Struct, frozen=True):
    """The results, and the shape of the blocks and calls that were measured."""

    endpoints: Sequence[str]
    block_bytes: int
    blocks: int
    batch: int
    rounds: int
    operations: Sequence[OperationReport]
    removed_blocks: int  # of the benchmark's own, at the end


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
        self._block_bytes, self._blocks = block_bytes, blocks
        self._batch, self._rounds = min(batch, blocks), rounds
        self._namespace = Namespace(
            model="kvstore-bench",
            dtype="uint8",
            block_tokens=16,
            block_bytes=block_bytes,
            extra={"run": os.urandom(8).hex()},
        )
        self._timeout_s = timeout_s
        self._keys = np.frombuffer(os.urandom(KEY_BYTES * blocks), dtype=np.uint8).reshape(-1, KEY_BYTES)

    def run(self, evict: bool, shown: bool) -> BenchReport:
        """Measure. `evict`: even if other users' blocks are evicted; otherwise `NoRoom` is raised before any block is
        set. `shown`: with a progress bar.

        Raises `KVStoreError` if the server does not keep the blocks, or returns other bytes.
        """
        with KVStoreClient(self._endpoints, self._namespace, timeout_s=self._timeout_s) as client:
            if not evict:
                self._check_room(client)
            with _ended_by_sigterm():
                try:
                    operations = self._measure(client, shown)
                finally:
                    removed = client.delete(self._keys)
        return BenchReport(
            endpoints=self._endpoints,
            block_bytes=self._block_bytes,
            blocks=self._blocks,
            batch=self._batch,
            rounds=self._rounds,
            operations=operations,
            removed_blocks=removed,
        )

    def _check_room(self, client: KVStoreClient) -> None:
        listed = client.shards()
        shards = {shard.name: shard.info for shard in listed if shard.info is not None}
        if any(self._block_bytes > shard.segment_bytes for shard in shards.values()):
            return  # the server will refuse the blocks and say why
        counts = Counter(owners_of(listed, self._keys))
        fitting = self._blocks
        for name, count in counts.items():
            if name in shards:
                fitting = min(fitting, self._blocks * room_for(shards[name], self._block_bytes) // count)
        if fitting < self._blocks:
            instead = f"measure with --blocks {fitting}, or" if fitting else "use a server with free memory, or"
            raise NoRoom(
                f"{self._blocks} blocks of {format_size(self._block_bytes)} would evict blocks of others: "
                f"about {fitting} fit into what is free on the server. Either {instead} let others' blocks be evicted "
                "with --evict"
            )

    def _measure(self, client: KVStoreClient, shown: bool) -> list[OperationReport]:
        keys = self._keys
        source = np.frombuffer(np.random.default_rng().bytes(self._blocks * self._block_bytes), dtype=np.uint8)
        source = source.reshape(self._blocks, self._block_bytes)
        out = np.zeros_like(source)

        def stream(start: int, end: int) -> None:
            for position, block in client.stream_get(keys[start:end]):
                out[start + position] = np.frombuffer(block, dtype=np.uint8)

        operations: dict[str, Callable[[int, int], object]] = {
            "set": lambda start, end: client.set(keys[start:end], source[start:end], priority=PRIORITY, ttl_s=TTL_S),
            "get_into": lambda start, end: client.get_into(keys[start:end], out[start:end]),
            "stream_get": stream,
            "contains": lambda start, end: client.contains(keys[start:end]),
            "match_prefix": lambda start, end: client.match_prefix(keys[start:end]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        calls: dict[str, list[float]] = {name: [] for name in operations}
        done = 0
        with progress_bar("measuring", shown, unit="measurements") as progress:
            for _ in range(self._rounds):
                for name, operation in operations.items():
                    if name == "set":
                        client.delete(keys)
                    reads = name in ("get_into", "stream_get")
                    if reads:
                        out[:] = 0
                    seconds[name].append(self._round(operation, calls[name]))
                    if reads:
                        self._compare(client, source, out)
                    done += 1
                    progress(done, self._rounds * len(operations))
        return [self._report(name, seconds[name], calls[name]) for name in operations]

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

    def _compare(self, client: KVStoreClient, source: KeyArray, out: KeyArray) -> None:
        if np.array_equal(source, out):
            return
        present = int(client.contains(self._keys).sum())
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


def room_for(shard: ShardInfo, block_bytes: int) -> int:
    """How many new blocks of this size a shard can take without evicting any, in memory and on its disk."""
    slots = segment_slots(shard.segment_bytes, block_bytes)
    emptied = sum(some.segments for some in shard.namespaces if not (some.blocks or some.writing))
    free = shard.segments_free + emptied
    # Small blocks need a large index, which takes memory from the blocks.
    tiers = 1 if shard.disk is None else 2
    segment_index_bytes = slots * (KEY_BYTES + SLOT_BYTES) * tiers
    free_bytes = free * shard.segment_bytes + INDEX_OVERHEAD_BYTES - shard.index_bytes
    room = max(0, min(free, free_bytes // (shard.segment_bytes + segment_index_bytes))) * slots
    if shard.disk is not None and shard.disk.state != "off":
        # One segment is left free: a deleted block gives its place back only once it has been written.
        room = min(room, max(0, shard.disk.segments_free - 1) * (shard.disk.segment_bytes // block_bytes))
    return room


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the body as Ctrl-C does, so that its clean-up runs."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_bench(report: BenchReport) -> None:
    """Print a table with one row per operation."""
    title = (
        f"{report.blocks} blocks of {format_size(report.block_bytes)}, {report.batch} a call, "
        f"median of {report.rounds} rounds; latencies of calls"
    )
    print_table(title, _COLUMNS, report.operations, narrow=True)
    print(f"\nThe benchmark used a namespace of its own and removed its {report.removed_blocks} blocks at the end.")
