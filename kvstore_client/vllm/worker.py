"""The connector's half beside the model: moves blocks between the KV cache and the store.

Thread: the worker's, around the model's forward pass. Blocking: until the bytes are moved, each request to the store
bounded by ``timeout_s``. Copies of a block, load: message -> staging row -> cache; save: cache -> staging row ->
socket. The staging rows are reused, so a transfer of any size costs ``STAGING_BYTES`` of memory.

A save ends before the step's tokens reach the user: what one engine has answered, another can load.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

from kvstore_client import KVStoreClient
from kvstore_client.vllm.guard import StoreGuard
from kvstore_client.vllm.layout import BlockLayout, Rows
from kvstore_client.vllm.scheduler import BlockLoad, BlockSaves

logger = logging.getLogger(f"vllm.{__name__}")

STAGING_BYTES = 64 << 20


class WorkerHalf:
    """The transfers of one rank. Nothing here raises: what fails is reported as not loaded, or not saved."""

    def __init__(self, guard: StoreGuard, layout: BlockLayout, counters: Counter[str]) -> None:
        self._guard = guard
        self._layout = layout
        self._counters = counters
        self._staging: Rows | None = None
        self._finished: set[str] = set()
        self._failed_block_ids: set[int] = set()

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Copy blocks from the store into the cache. Every request ends up finished, its missing blocks failed."""
        for load in loads:
            self._finished.add(load.request_id)
            loaded = 0
            try:
                loaded = self._load_blocks(load.keys, load.block_ids)
            except Exception:
                logger.exception("kvstore: loading the blocks of request %s failed", load.request_id)
            self._failed_block_ids.update(load.block_ids[loaded:])
            self._counters["loaded_blocks"] += loaded
            self._counters["missed_blocks"] += len(load.block_ids) - loaded

    def save(self, saves: BlockSaves) -> None:
        """Copy the blocks the store lacks from the cache to the store. Sets are deferred: acknowledged, and visible
        to every lookup, once the store owns the bytes."""
        try:
            self._save_blocks(saves.keys, saves.block_ids)
        except Exception:
            logger.exception("kvstore: saving %d blocks failed", len(saves.keys))

    def take_finished(self) -> set[str]:
        """Requests whose loads ended since the last call."""
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_block_ids(self) -> set[int]:
        """Blocks of the cache that were to be loaded and were not, since the last call."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def close(self) -> None:
        self._guard.close()

    def _load_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Load the leading run of blocks the store delivers and return its length: a block after a hole is of no
        use, since the engine computes again from the first missing one."""
        rows = self._staging_rows()
        for first in range(0, len(keys), len(rows)):
            chunk = keys[first : first + len(rows)]
            run = self._guard.call(partial(_get_run, chunk, rows[: len(chunk)]), 0)
            if run:
                self._layout.scatter(rows[:run], block_ids[first : first + run])
            if run < len(chunk):
                return first + run
        return len(keys)

    def _save_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        present = self._guard.call(lambda client: client.contains(keys), None)
        if present is None:
            self._counters["unsaved_blocks"] += len(keys)
            return
        missing = [index for index, found in enumerate(present) if not found]
        self._counters["present_blocks"] += len(keys) - len(missing)
        if not missing:
            return
        rows = self._staging_rows()
        for first in range(0, len(missing), len(rows)):
            chunk = missing[first : first + len(rows)]
            blocks = rows[: len(chunk)]
            self._layout.gather([block_ids[index] for index in chunk], blocks)
            errors = self._guard.call(partial(_set, [keys[index] for index in chunk], blocks), len(chunk))
            self._counters["saved_blocks"] += len(chunk) - errors
            self._counters["unsaved_blocks"] += errors

    def _staging_rows(self) -> Rows:
        if self._staging is None:
            self._staging = self._layout.staging(max(1, STAGING_BYTES // self._layout.block_bytes))
        return self._staging


def _get_run(keys: Sequence[bytes], rows: Rows, client: KVStoreClient) -> int:
    """Receive into ``rows``; how many leading blocks are there."""
    hits = client.get_into(keys, rows)
    return len(keys) if hits.all() else int(hits.argmin())


def _set(keys: Sequence[bytes], blocks: Rows, client: KVStoreClient) -> int:
    """How many blocks the store could not take."""
    return client.set(keys, blocks, deferred=True).error
