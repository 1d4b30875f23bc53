"""`kvstore bench`: measures a running server from this host, without harm to the server's users.

The benchmark's blocks are in a namespace of their own, have the lowest priority, and are always removed at the end.
Before the first block is set, the command checks that all blocks fit into free memory and disk space. Otherwise the
server would evict the blocks of other users.

A token of an engine has fewer rights. Without the verb `monitor`, the command cannot see how much is free, so it needs
the user's consent (`--evict`). Without `delete`, its blocks stay until their TTL ends.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from kvstore.sizes import format_size
from kvstore.store.namespaces import INDEX_OVERHEAD_BYTES, SLOT_BYTES
from kvstore.wire import ShardInfo
from kvstore.wire.status import TAKES_NO_BLOCKS, segment_slots
from kvstore_cli.namespaces import model_of
from kvstore_cli.options import ended_by_sigterm
from kvstore_cli.plain_table import columns, print_table
from kvstore_cli.progress import progress_bar
from kvstore_cli.store_state import owners_of
from kvstore_client.client import KVStoreClient
from kvstore_client.errors import KVStoreError, NotAuthorized
from kvstore_client.keys import KeyArray, Namespace

BENCH_KEY_BYTES: Final = 16
PRIORITY: Final = 0  # the lowest, so that other users' blocks stay longer
DEFAULT_BLOCKS: Final = 512
WARM_UP_ROUNDS: Final = 1  # not measured: memory is used for the first time, here and in the server
BENCH_TTL_S: Final = 600  # longer than any round; with it, the blocks expire even if this process is killed

_BENCH_COLUMNS: Final = columns(
    ("operation", "operation"),
    ("GB/s", lambda row: row.gb_s or None, ".2f"),
    ("min … max", lambda row: f"{row.gb_s_min:.1f} … {row.gb_s_max:.1f}" if row.gb_s else None),
    ("blocks/s", "blocks_s", ",.0f"),
    *((f"{name} ms", f"{name}_ms", ".2f") for name in ("p50", "p90", "p99")),
)


class WouldEvict(Exception):
    """The benchmark's blocks would evict blocks of other users, or the command cannot find out whether they would."""


class OperationReport(msgspec.Struct, frozen=True):
    """The figures of one operation. A GB is 1e9 bytes, and the rate is 0 for operations that move no blocks. A latency
    is the time of a whole call."""

    operation: str
    gb_s: float
    gb_s_min: float
    gb_s_max: float
    blocks_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


class BenchReport(msgspec.Struct, frozen=True):
    """The results, with the size of a block and the number of blocks in each call."""

    endpoints: Sequence[str]
    block_bytes: int
    blocks: int
    batch: int
    rounds: int
    operations: Sequence[OperationReport]
    removed_blocks: int  # how many of its own blocks the benchmark removed at the end
    notes: Sequence[str] = ()  # what the rights of the token did not allow, and what was evicted


class Bench:
    """A measurement with `rounds` interleaved rounds, after one that is not measured. Every byte that is read is
    compared with what was written."""

    def __init__(
        self,
        endpoints: Sequence[str],
        block_bytes: int,
        blocks: int | None,
        batch: int,
        rounds: int,
        timeout_s: float,
    ) -> None:
        """`blocks`: blocks in each round; by default as many as fit, and at most `DEFAULT_BLOCKS`."""
        self._endpoints = endpoints
        self._block_bytes, self._blocks, self._chosen = block_bytes, blocks or DEFAULT_BLOCKS, blocks is not None
        self._batch, self._rounds = batch, rounds
        self._may_delete = True
        self._notes: list[str] = []
        self._namespace = Namespace(
            model="kvstore-bench",
            dtype="uint8",
            block_tokens=16,
            block_bytes=block_bytes,
            extra={"run": os.urandom(8).hex()},
        )
        self._timeout_s = timeout_s
        self._keys = np.frombuffer(os.urandom(BENCH_KEY_BYTES * self._blocks), dtype=np.uint8)
        self._keys = self._keys.reshape(-1, BENCH_KEY_BYTES)

    def run(self, evict: bool, shown: bool) -> BenchReport:
        """Measure all operations.

        evict: whether to measure even if other users' blocks are evicted; otherwise `WouldEvict` is raised before any
        block is set
        shown: whether to show a progress bar

        Raises `KVStoreError` if the server does not keep the blocks, or returns other bytes.
        """
        with KVStoreClient(self._endpoints, self._namespace, timeout_s=self._timeout_s) as client:
            if not evict:
                self._check_room(client)
            self._delete(client)  # there are none yet; this shows whether the token may
            evicted = self._evicted(client) if evict else {}
            with ended_by_sigterm():
                try:
                    operations = self._measure(client, shown)
                finally:
                    removed = self._delete(client)
            if evict:
                self._note_evictions(evicted, self._evicted(client))
        return BenchReport(
            endpoints=self._endpoints,
            block_bytes=self._block_bytes,
            blocks=self._blocks,
            batch=self._batch,
            rounds=self._rounds,
            operations=operations,
            removed_blocks=removed,
            notes=self._notes,
        )

    def _delete(self, client: KVStoreClient) -> int:
        """Delete all blocks, if the token may; otherwise they expire. Return the number of deleted blocks."""
        if not self._may_delete:
            return 0
        try:
            return client.delete(self._keys)
        except NotAuthorized:
            self._may_delete = False
            self._notes.append(
                f"The token may not delete blocks, so those of the benchmark stay for {BENCH_TTL_S // 60} minutes."
            )
            return 0

    def _evicted(self, client: KVStoreClient) -> Mapping[tuple[str, str], tuple[int, int]]:
        """Return how many blocks of each other namespace each shard has evicted so far, from memory and from disk. It
        is empty if the token may not ask."""
        try:
            shards = client.info().shards
        except NotAuthorized:
            return {}
        return {
            (shard.name, some.id): (some.evicted, some.disk_evicted)
            for shard in shards
            for some in shard.namespaces
            if model_of(some) != self._namespace.model
        }

    def _note_evictions(
        self, before: Mapping[tuple[str, str], tuple[int, int]], after: Mapping[tuple[str, str], tuple[int, int]]
    ) -> None:
        pairs = [(before.get(each, (0, 0)), counts) for each, counts in after.items()]
        memory, disk = (sum(max(0, new[tier] - old[tier]) for old, new in pairs) for tier in (0, 1))
        if memory or disk:
            self._notes.append(
                f"Meanwhile the server evicted {memory} blocks of other namespaces from memory and {disk} from disk."
            )

    def _take(self, fitting: int) -> None:
        """Measure with this number of blocks, which is at most the number so far."""
        self._blocks = fitting
        self._keys = self._keys[:fitting]

    def _check_room(self, client: KVStoreClient) -> None:
        try:
            client.info()
        except NotAuthorized:
            raise WouldEvict(
                "the token may not ask how much is free (verb monitor), so the benchmark might evict other blocks. "
                "Use a token with this verb, or allow it with --evict and give few --blocks"
            ) from None
        listed = client.shards()
        shards = {shard.name: shard.info for shard in listed if shard.info is not None}
        if any(self._block_bytes > shard.segment_bytes for shard in shards.values()):
            return  # the server will refuse the blocks with a reason
        counts = Counter(owners_of(listed, self._keys))
        fitting = self._blocks
        for name, count in counts.items():
            if name in shards:
                fitting = min(fitting, self._blocks * room_for(shards[name], self._block_bytes) // count)
        if 0 < fitting < self._blocks and not self._chosen:
            self._take(fitting)
        elif fitting < self._blocks:
            others = any(space.blocks or space.disk_blocks for shard in shards.values() for space in shard.namespaces)
            if not others:
                raise WouldEvict(
                    f"{self._blocks} blocks of {format_size(self._block_bytes)} do not fit: the server has room for "
                    f"about {fitting}. Measure with --blocks {fitting}, or give the server more memory"
                )
            space = "memory and disk space" if any(shard.disk for shard in shards.values()) else "memory"
            instead = f"measure with --blocks {fitting}, or" if fitting else f"use a server with free {space}, or"
            raise WouldEvict(
                f"{self._blocks} blocks of {format_size(self._block_bytes)} would evict other users' blocks: "
                f"about {fitting} fit into the server's free {space}. Either {instead} allow evictions with --evict"
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
            "set": lambda start, end: client.set(  # blocks that could not be deleted are replaced
                keys[start:end], source[start:end], force=not self._may_delete, priority=PRIORITY, ttl_s=BENCH_TTL_S
            ),
            "get_into": lambda start, end: client.get_into(keys[start:end], out[start:end]),
            "stream_get": stream,
            "contains": lambda start, end: client.contains(keys[start:end]),
            "match_prefix": lambda start, end: client.match_prefix(keys[start:end]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        calls: dict[str, list[float]] = {name: [] for name in operations}
        done = 0
        with progress_bar("measuring", shown, unit="measurements") as progress:
            for number in range(self._rounds + WARM_UP_ROUNDS):
                if number == WARM_UP_ROUNDS:
                    for times in (*seconds.values(), *calls.values()):
                        times.clear()
                for name, operation in operations.items():
                    if name == "set":
                        self._delete(client)
                    reads = name in ("get_into", "stream_get")
                    if reads:
                        out[:] = 0
                    seconds[name].append(self._round(operation, calls[name]))
                    if reads:
                        self._compare(client, source, out)
                    done += 1
                    progress(done, (self._rounds + WARM_UP_ROUNDS) * len(operations))
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
        raise KVStoreError("the server returned bytes that differ from the bytes that were set")

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
    """Return how many new blocks of this size a shard can store, in memory and on its disk, without evicting a
    block."""
    slots = segment_slots(shard.segment_bytes, block_bytes)
    emptied = sum(some.segments for some in shard.namespaces if not (some.blocks or some.writing))
    free = shard.segments_free + emptied
    # Small blocks need a large index, which uses memory that blocks could use.
    tiers = 1 if shard.disk is None else 2
    segment_index_bytes = slots * (BENCH_KEY_BYTES + SLOT_BYTES) * tiers
    free_bytes = free * shard.segment_bytes + INDEX_OVERHEAD_BYTES - shard.index_bytes
    room = max(0, min(free, free_bytes // (shard.segment_bytes + segment_index_bytes))) * slots
    if shard.disk is not None and shard.disk.state not in TAKES_NO_BLOCKS:
        # One segment is left free, because the space of a deleted block is free only after the deletion has been
        # written.
        room = min(room, max(0, shard.disk.segments_free - 1) * (shard.disk.segment_bytes // block_bytes))
    return room


def print_bench(report: BenchReport) -> None:
    """Print a table with one row per operation."""
    title = (
        f"{report.blocks} blocks of {format_size(report.block_bytes)}, {report.batch} a call, "
        f"median of {report.rounds} warm rounds; latencies of calls"
    )
    print_table(title, _BENCH_COLUMNS, report.operations, narrow=True)
    print()
    if report.removed_blocks:
        print(f"The benchmark used a namespace of its own and removed its {report.removed_blocks} blocks at the end.")
    for note in report.notes:
        print(note)
