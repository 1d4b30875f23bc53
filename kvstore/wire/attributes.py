"""The attributes of a block that is copied from shard to shard: its time to live, its priority and its place in its
chain.

A PART has one entry per block if the GET requests them, and a SET takes one per block. A pure codec.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import checksum_blocks

TTL_STEP_S: Final = 0.125

Attributes = npt.NDArray[np.void]  # (n,) of dtype `attributes_dtype(key_bytes)`


@functools.cache
def attributes_dtype(key_bytes: int) -> np.dtype[Any]:
    """Return the layout of an entry.

    `ttl`: the time left to live, in steps of `TTL_STEP_S`; 0 if the rule of the namespace applies.
    `priority`: 0 to 3.
    `reads`: how many more times a transient block may be read; 0 for other blocks. A transient block must not be
    copied.
    `before`: the key of the nearest earlier block of the chain on the shard that sends the block; the block's own key
    if there is none.
    """
    return np.dtype([("ttl", "<u4"), ("priority", "u1"), ("reads", "u1"), ("before", "u1", (key_bytes,))])


def attributes_of(data: bytes, key_bytes: int) -> Attributes:
    """Return the entries in a message. The number of entries was checked when the message was decoded."""
    return np.frombuffer(data, dtype=attributes_dtype(key_bytes))


def names_of(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return a short name, the xxh3-64, for each key of an array (n, key_bytes)."""
    names = np.empty(len(keys), dtype=np.uint64)
    checksum_blocks(np.ascontiguousarray(keys), keys.shape[1], names)
    return names


def rows_before(names: npt.NDArray[np.uint64], before: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return the row of the block that each block follows, or -1 if that block has no row.

    `before`: for each block, the name of the block that it follows, or its own name if it follows none.
    """
    if not len(names):
        return np.zeros(0, dtype=np.intp)
    order = np.argsort(names)
    rows = order[np.minimum(np.searchsorted(names, before, sorter=order), len(names) - 1)]
    return np.where((names[rows] == before) & (before != names), rows, -1)
