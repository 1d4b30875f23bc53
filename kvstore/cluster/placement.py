"""Weighted rendezvous hashing: which shard owns a key.

Every shard scores every key, the highest score owns it: score = -weight / ln(u), where u in (0, 1) is a hash of key
and shard name (Schindelhauer and Schomaker, 2005; Resch, 2015). No table to agree on: whoever knows the shards' names
and weights computes the same owner, and when a shard joins or leaves only its own share of the keys moves.
Pure functions of their arguments; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


class Placement:
    """The owners of keys among shards with these names and weights (> 0, in any unit)."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        if len(names) != len(weights) or not names:
            raise ValueError(f"{len(names)} names and {len(weights)} weights: expected the same number, at least 1")
        if min(weights) <= 0:
            raise ValueError(f"a weight of {min(weights)}: expected more than 0")
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], dtype=np.uint64)
        self._weights = np.array(weights, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._seeds)

    def owners(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
        """The owner's number for each row of `keys`, an `(n, key_bytes)` uint8 array with key_bytes >= 8."""
        if len(self) == 1:
            return np.zeros(len(keys), dtype=np.intp)
        words = np.ascontiguousarray(keys[:, :8]).view("<u8").astype(np.uint64)
        hashes = _mix(_mix(words) ^ self._seeds)
        uniform = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        best: npt.NDArray[np.intp] = np.argmax(self._weights / -np.log(uniform), axis=1)
        return best
