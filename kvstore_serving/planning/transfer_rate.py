"""Measures how fast blocks of a model go to a store and come back, from where an engine runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np

from kvstore_client import KVStoreClient, Namespace

BLOCK_TOKENS: Final = 16
BATCH: Final = 64  # blocks a call, as engines send them
BATCH_BYTES: Final = 64 << 20  # of a call, at most
ROUNDS: Final = 7
TTL_S: Final = 60  # if they cannot be removed


def transfer_rate(endpoints: Sequence[str], kv_bytes_per_token: int, timeout_s: float = 30.0) -> tuple[float, float]:
    """-> bytes a second that one client reads and writes: medians of `ROUNDS` calls of up to 64 blocks of 16 tokens.

    The blocks are in a namespace of their own, have the lowest priority, and are removed. Raises `KVStoreError`."""
    size = BLOCK_TOKENS * kv_bytes_per_token
    count = max(1, min(BATCH, BATCH_BYTES // size))
    namespace = Namespace(
        model=f"kvstore-plan-{secrets.token_hex(4)}", dtype="uint8", block_tokens=BLOCK_TOKENS, block_bytes=size
    )
    blocks = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    out = np.empty_like(blocks)
    reads, writes = [], []
    with KVStoreClient(list(endpoints), namespace, timeout_s=timeout_s) as client:
        try:
            for _ in range(ROUNDS + 1):
                keys = [secrets.token_bytes(16) for _ in range(count)]
                begin = time.perf_counter()
                client.set(keys, blocks, deferred=False, priority=0, ttl_s=TTL_S)
                middle = time.perf_counter()
                client.get_into(keys, out)
                writes.append(middle - begin)
                reads.append(time.perf_counter() - middle)
        finally:
            client.purge()
    return blocks.nbytes / median(reads[1:]), blocks.nbytes / median(writes[1:])
