"""Measures how long transfers of a model's blocks between an engine's host and a store take, by their size.

One client sends a number of blocks in one call, and reads them in another call, as engines do. The time of a small call
is mostly latency, and that of a large call mostly the time for its bytes. `fitting.fit_transfer` separates the two.
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
CALLS: Final = (1, 4, 16, 64, 256)  # the numbers of blocks in a call
CALL_BYTES: Final = 64 << 20  # the most bytes of a call
LEAST_CALLS: Final = 3  # this many sizes must fit `CALL_BYTES`; blocks get fewer tokens if necessary
ROUNDS: Final = 7
PROFILE_TTL_S: Final = 60  # in case this process is killed
_SOON_S: Final = 0.001


def measure_transfers(
    endpoints: Sequence[str], kv_bytes_per_token: int, timeout_s: float = 30.0
) -> tuple[list[TransferSample], list[TransferSample]]:
    """Return the seconds that one client takes to read, and to write, for different numbers of bytes. They are medians
    of `ROUNDS` calls of up to 256 blocks. Blocks have 16 tokens, or fewer if the calls would be too large.

    The blocks are in a namespace of their own, have the lowest priority, and expire after each round. Nothing else in
    the store is removed, except what it evicts for them. So a token that reads and writes is enough.
    Raises `KVStoreError`, or `ValueError` if the store keeps too few of the blocks.
    """
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
    written: list[bytes] = []
    with KVStoreClient(list(endpoints), namespace, timeout_s=timeout_s) as client:
        try:
            for number in range(ROUNDS + 1):  # sizes take turns, so that a busy moment of the machine affects all sizes
                for count in list(reads):
                    keys = [secrets.token_bytes(16) for _ in range(count)]
                    written += keys
                    begin = time.perf_counter()
                    client.set(keys, blocks[:count], deferred=False, priority=0, ttl_s=PROFILE_TTL_S)
                    middle = time.perf_counter()
                    found = client.get_into(keys, out[:count])
                    end = time.perf_counter()
                    if not (number or found.all()):  # the store has no room for this many
                        del reads[count], writes[count]
                    elif number and found.all():  # otherwise other clients took the room, and the call is ignored
                        writes[count].append(middle - begin)
                        reads[count].append(end - middle)
                client.expire(written, ttl_s=_SOON_S)
                written.clear()
        finally:
            client.expire(written, ttl_s=_SOON_S)
    reads, writes = ({count: seconds for count, seconds in each.items() if seconds} for each in (reads, writes))
    if len(reads) < 2:
        raise ValueError(
            f"the store kept fewer than {CALLS[1]} blocks of {size} bytes: expected a store with more free memory"
        )
    return _medians(reads, size), _medians(writes, size)


def _medians(times: dict[int, list[float]], size: int) -> list[TransferSample]:
    return [TransferSample(count * size, median(seconds)) for count, seconds in times.items()]
