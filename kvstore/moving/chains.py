"""Where moved blocks belong in their chains: after which block, of those that the same shard gains.

A chain's blocks are spread over all shards, and a shard gains only some of them. So the block that one follows on its
new shard is the nearest before it that goes there, too, not the one that it follows on its old shard.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.moving.planning import NOBODY, Targets
from kvstore.wire.asking import KeyArray
from kvstore.wire.attributes import names_of, rows_before

MOST_STEPS: Final = 16384  # back in a chain, in search of a block that goes to the same shard

Rows = npt.NDArray[np.intp]


def places(keys: KeyArray, before: KeyArray, targets: Targets, rows: Rows) -> npt.NDArray[np.uint8]:
    """-> for each copy of the blocks at `rows`, the key of the nearest block before it that the same shard gains, its
    own key if there is none: (len(rows), copies, key_bytes).

    keys, before: of all blocks of one shard, (n, key_bytes), `before` as HOTTEST gives it. targets: (n, copies), which
    shards gain each of them.
    """
    copies = targets.shape[1]
    parents = rows_before(names_of(keys), names_of(before))
    row, copy = np.nonzero(targets[rows] != NOBODY)
    wanted = targets[rows[row], copy]
    found = parents[rows[row]]
    searching = np.flatnonzero(found >= 0)
    for _ in range(MOST_STEPS):
        at = found[searching]
        searching = searching[~(targets[at] == wanted[searching][:, np.newaxis]).any(axis=1)]
        if not len(searching):
            break
        found[searching] = parents[found[searching]]
        searching = searching[found[searching] >= 0]
    found[searching] = -1
    result = np.repeat(keys[rows][:, np.newaxis], copies, axis=1)
    there = found >= 0
    result[row[there], copy[there]] = keys[found[there]]
    return result
