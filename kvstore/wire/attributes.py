"""What goes with a block when it is copied from shard to shard: its time to live, its priority, its place in its chain.

A PART has one entry a block if the GET asks for them, and a SET takes one a block. A pure codec.
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
    """-> the layout of an entry. `ttl`: what is left, in steps of `TTL_STEP_S`; 0: none of its
    own, so the rule of the namespace applies. `priority`: 0 to 3. `reads`: 0, or how often the block may still be read:
    then it is transient, and must not be copied. `before`: the key of the nearest block before it in its chain that the
    shard had; its own key if there is none."""
    return np.dtype([("ttl", "<u4"), ("priority", "u1"), ("reads", "u1"), ("before", "u1", (key_bytes,))])


def attributes_of(data: bytes, key_bytes: int) -> Attributes:
    """-> the entries in a message. Their number was checked when the message was decoded."""
    return np.frombuffer(data, dtype=attributes_dtype(key_bytes))


def names_of(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """-> short names of keys, (n, key_bytes): their xxh3-64."""
    names = np.empty(len(keys), dtype=np.uint64)
    checksum_blocks(np.ascontiguousarray(keys), keys.shape[1], names)
    return names


def rows_before(names: npt.NDArray[np.uint64], before: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """-> the row of the block that each one follows; -1 if that is none of them. `before`: the names of those blocks,
    for a block that follows none its own."""
    if not len(names):
        return np.zeros(0, dtype=np.intp)
    order = np.argsort(names)
    rows = order[np.minimum(np.searchsorted(names, before, sorter=order), len(names) - 1)]
    return np.where((names[rows] == before) & (before != names), rows, -1)
