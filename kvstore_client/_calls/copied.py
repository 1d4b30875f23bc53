"""The attributes of blocks that are found at one shard and set at another: time to live, priority and place in a
chain."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from kvstore.wire.attributes import Attributes, attributes_dtype
from kvstore_client._links.call import Call
from kvstore_client._links.targets import PlacedBlocks
from kvstore_client._links.view import Numbers
from kvstore_client.keys import KeyArray


class Copied:
    """The attributes of the blocks that the GETs of one round find. For use by the calling thread only."""

    def __init__(self, packed: KeyArray, calls: Sequence[Call]) -> None:
        self._packed = packed
        self._calls = calls
        self._call = np.zeros(len(packed), dtype=np.intp)  # for each position, the index of the block's call in `calls`
        self._row = np.zeros(len(packed), dtype=np.intp)  # for each position, the block's index in that call
        for number, call in enumerate(calls):
            self._call[call.positions] = number
            self._row[call.positions] = np.arange(call.count)

    @functools.cached_property
    def _positions(self) -> dict[bytes, int]:
        return {key.tobytes(): position for position, key in enumerate(self._packed)}

    def to(self, owned: Numbers, positions: Numbers) -> Attributes:
        """Return the attributes for setting the found blocks at `positions` on another shard. `owned`: the positions
        of all blocks that this other shard is to hold.

        The two shards hold different blocks of a chain. If the block before a found block is in this batch, the batch
        is the chain. At the other shard, the found block then follows the last earlier block that belongs there.
        Otherwise, it follows the same block at both shards, if the other shard has that block.
        """
        result = np.zeros(len(positions), dtype=attributes_dtype(self._packed.shape[1]))
        for row, position in enumerate(positions.tolist()):
            answer = self._calls[self._call[position]].answer
            assert isinstance(answer, PlacedBlocks)
            result[row] = answer.attributes[self._row[position]]
            earlier = int(np.searchsorted(owned, position))
            if earlier and self._positions.get(result["before"][row].tobytes(), position) < position:
                result["before"][row] = self._packed[owned[earlier - 1]]
        return result
