"""Measures how long blocks of a model take to a store and back, from where an engine runs, by their size.

One client sends so many blocks in one call, and reads them again, as engines do. A small call is mostly latency, a
large one mostly its bytes: the fit of `fitting.fit_transfer` tells them apart.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np

from kvstore_client import KVStoreClient, Namespace
from kvstore_serving.planning.fitting import TransferSample

BLOCK_TOKENS: Final = 16
CALLS: Final = (1, 4, 16, 64, 256)  # blocks of a call
CALL_BYTES: Final = 64 << 20  # of a call, at most
LEAST_CALLS: Final = 3  # sizes that fit `CALL_BYTES`: where fewer do, blocks have fewer tokens
ROUNDS: Final = 7
TTL_S: Final = 60  # if they cannot be removed


def measure_transfers(
    endpoints: Sequence[str], kv_bytes_per_token: int, timeout_s: float = 30.0
) -> tuple[list[TransferSample], list[TransferSample]]:
    """-> the seconds that one client takes to read, and to write, by the bytes of a call: medians of `ROUNDS` calls of
    up to 256 blocks of 16 tokens, or of fewer tokens where those would be too large.

    The blocks are in a namespace of their own, have the lowest priority, and are removed. Raises `KVStoreError`, and
    `ValueError` if the store keeps too few of them."""
    tokens = max(1, min(BLOCK_TOKENS, CALL_BYTES // CALLS[LEAST_CALLS - 1] // kv_bytes_per_token))
    size = tokens * kv_bytes_per_token
    counts = [count for count in CALLS if count * size <= CALL_BYTES or count <= CALLS[1]]
    namespace = Namespace(
        model=f"kvstore-plan-{secrets.token_hex(4)}", dtype="uint8", block_tokens=tokens, block_bytes=size
    )
    blocks = np.random.default_rng(0).integers(0, 256, (counts[-1], size), dtype=np.uint8)
    out = np.empty_like(blocks)
    reads: dict[int, list[float]] = {count: [] for count in counts}
    writes: dict[int, list[float]] = {count: [] for count in counts}
    with KVStoreClient(list(endpoints), namespace, timeout_s=timeout_s) as client:
        try:
            for number in range(ROUNDS + 1):  # in turn, so that a busy moment of the machine falls on all sizes
                for count in list(reads):
                    keys = [secrets.token_bytes(16) for _ in range(count)]
                    begin = time.perf_counter()
                    client.set(keys, blocks[:count], deferred=False, priority=0, ttl_s=TTL_S)
                    middle = time.perf_counter()
                    found = client.get_into(keys, out[:count])
                    end = time.perf_counter()
                    if not (number or found.all()):  # the store has no room for so many
                        del reads[count], writes[count]
                    elif number and found.all():  # else others took the room: that call tells nothing
                        writes[count].append(middle - begin)
                        reads[count].append(end - middle)
                client.purge()
        finally:
            client.purge()
    reads, writes = ({count: seconds for count, seconds in each.items() if seconds} for each in (reads, writes))
    if len(reads) < 2:
        raise ValueError(
            f"the store kept fewer than {CALLS[1]} blocks of {size} bytes: expected a store with more free memory"
        )
    return _medians(reads, size), _medians(writes, size)


def _medians(times: dict[int, list[float]], size: int) -> list[TransferSample]:
    return [TransferSample(count * size, median(seconds)) for count, seconds in times.items()]
