"""Measures the time until a cleanly stopped server serves again, with many small blocks on its disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.persistence_kv_cache import names
from benchmarks.persistence_kv_cache.disk_server import Server, disk_state, wait_for
from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.shapes import Rows, random_keys, random_rows, size_text
from kvstore_client import KVStoreClient

BLOCK_BYTES: Final = 4096
MEMORY_BYTES: Final = 512 << 20
BATCH: Final = 4096
_SAMPLE: Final = 1024
_NAME: Final = "restart"


class SmallBlocks:
    """`count` blocks, made on demand. Each begins with its own number, and random bytes follow."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys = random_keys(count)
        self._rows = random_rows(BATCH, BLOCK_BYTES)

    def rows(self, numbers: npt.NDArray[np.uint64]) -> Rows:
        """Return at most `BATCH` blocks, valid until the next call."""
        rows = self._rows[: len(numbers)]
        rows[:, :8] = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
        return rows

    def set(self, client: KVStoreClient) -> None:
        """Set all blocks, no faster than the disk writes them, because a block that is evicted before it is on disk is
        lost."""
        for start in range(0, self.count, BATCH):
            numbers = np.arange(start, min(start + BATCH, self.count), dtype=np.uint64)
            client.set(self.keys[start : start + BATCH], self.rows(numbers))
            wait_for("write-behind", lambda: disk_state(client).dirty_bytes < MEMORY_BYTES // 4)

    def readable(self, client: KVStoreClient) -> bool:
        """Return whether the store reports all these blocks as present."""
        steps = range(0, self.count, BATCH)
        return all(client.contains(self.keys[start : start + BATCH]).all() for start in steps)

    def verify_sample(self, client: KVStoreClient) -> None:
        """Read some blocks and compare their bytes."""
        numbers = np.linspace(0, self.count - 1, min(_SAMPLE, self.count)).astype(np.uint64)
        out = np.zeros((len(numbers), BLOCK_BYTES), dtype=np.uint8)
        found = client.get_into(self.keys[numbers], out)
        if not found.all():
            raise AssertionError(f"{(~found).sum()} of {len(numbers)} blocks are missing after a clean stop")
        heads = out[:, :8].copy().view("<u8").ravel()
        if not np.array_equal(heads, numbers):
            raise AssertionError("the bytes of some blocks differ after a restart")


def measure_restart(
    benchmark: Benchmark, make_server: Callable[[int, int, str], Server], drop_cache: Callable[[], None], count: int
) -> None:
    """Measure two restarts in each round, one until the server is ready and one until all blocks are readable, and a
    new server as the lower limit."""
    blocks = SmallBlocks(count)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(make_server(MEMORY_BYTES, count * BLOCK_BYTES, _NAME))
        new = stack.enter_context(Server(MEMORY_BYTES))
        benchmark.say(f"restart: setting {count} blocks of {size_text(BLOCK_BYTES)}")
        server.start()
        with server.connect(_NAME, BLOCK_BYTES) as client:
            blocks.set(client)
            wait_for("write-behind", lambda: disk_state(client).dirty_blocks == 0)
            state = disk_state(client)
            if state.blocks != count:
                raise AssertionError(f"{state.blocks} of {count} blocks are on disk")

        def stopped() -> None:
            server.stop()
            new.stop()
            drop_cache()

        def until_readable() -> None:
            server.start()
            with server.connect(_NAME, BLOCK_BYTES) as client:
                wait_for("recovery", lambda: blocks.readable(client))

        def check() -> None:
            with server.connect(_NAME, BLOCK_BYTES) as client:
                wait_for("recovery", lambda: blocks.readable(client))
                blocks.verify_sample(client)

        benchmark.measure(
            f"restart, {count} blocks",
            [
                Operation(names.NEW_START, new.start, before=stopped),
                Operation(names.READY, server.start, before=stopped, after=check),
                Operation(names.READABLE, until_readable, before=stopped, after=check),
            ],
            group=names.RESTART_PART,
            blocks=count,
            block_bytes=BLOCK_BYTES,
            index_bytes=state.index_bytes,
        )
