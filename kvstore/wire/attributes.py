"""What goes with a block when it is copied from shard to shard: its time to live, its priority, its place in its chain.

A PART has one entry a block if the GET asks for them, and a SET takes one a block. A pure codec.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

TTL_STEP_S: Final = 0.125

Attributes = npt.NDArray[np.void]  # (n,) of dtype `attributes_dtype(key_bytes)`


def attributes_dtype(key_bytes: int) -> np.dtype[Any]:
    """-> the layout of an entry. `ttl`: what is left, in steps of `TTL_STEP_S`; 0: none of its
    own, so the rule of the namespace applies. `priority`: 0 to 3.
    `before`: the key of the nearest block before it in its chain that the shard had; its own key if there is none."""
    return np.dtype([("ttl", "<u4"), ("priority", "u1"), ("before", "u1", (key_bytes,))])


def attributes_of(data: bytes, key_bytes: int) -> Attributes:
    """-> the entries in a message. Their number was checked when the message was decoded."""
    return np.frombuffer(data, dtype=attributes_dtype(key_bytes))
