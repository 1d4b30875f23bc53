"""Traces of requests as chains of blocks, head first.

An id stands for its block and all blocks before it, so equal ids mean equal prefixes. The eviction simulator uses only
the chains and the order of the requests, because its cache has no clock. The cluster simulator also uses the times.
Files are read with the code of `kvstore load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.trace import TraceError
from kvstore_serving.load.trace import read_trace as read_requests

KEY_BYTES: Final = 16

Chain = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Trace:
    """The requests in order. Blocks are numbered from 0 in the order of their first appearance."""

    name: str
    chains: Sequence[Chain]
    keys: Keys  # shape (distinct, KEY_BYTES), by block number
    times_s: Sequence[float] = ()  # the time of each request; empty if not known
    block_tokens: int = HASHED_TOKENS

    @classmethod
    def of(
        cls,
        name: str,
        requests: Iterable[Sequence[int]],
        times_s: Sequence[float] = (),
        block_tokens: int = HASHED_TOKENS,
    ) -> Trace:
        """Make a trace from chains of block ids."""
        numbers: dict[int, int] = {}
        chains = [
            np.array([numbers.setdefault(block, len(numbers)) for block in request], dtype=np.int32)
            for request in requests
        ]
        digests = b"".join(xxhash.xxh3_128_digest(block.to_bytes(8, "little")) for block in numbers)
        keys = np.frombuffer(digests, dtype=np.uint8).reshape(-1, KEY_BYTES)
        return cls(name, chains, keys, times_s, block_tokens)

    @property
    def references(self) -> int:
        """The number of blocks in all requests together."""
        return sum(map(len, self.chains))

    @property
    def distinct(self) -> int:
        """The number of distinct blocks."""
        return len(self.keys)

    def first(self, requests: int | None) -> Trace:
        """Return the trace of the first `requests` requests, or of all requests if it is None."""
        chains = self.chains[:requests]
        last = max((int(chain.max()) for chain in chains if len(chain)), default=-1)
        return Trace(self.name, chains, self.keys[: last + 1], self.times_s[:requests], self.block_tokens)


def read_trace(path: Path) -> Trace:
    """Read a trace from a file. Raises `TraceError`."""
    found = read_requests(path)
    trace = Trace.of(path.name, found.hash_ids, found.at_s, found.block_tokens)
    if not trace.distinct:
        raise TraceError(f"{path}: expected requests with blocks, but it has no blocks")
    return trace
