"""What goes with a block that is found at one shard and set at another: its time to live, priority and place."""

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
    """What goes with the blocks that the GETs of one round find. Used by the calling thread only."""

    def __init__(self, packed: KeyArray, calls: Sequence[Call]) -> None:
        self._packed = packed
        self._calls = calls
        self._call = np.zeros(len(packed), dtype=np.intp)  # by position: which call asks for the block
        self._row = np.zeros(len(packed), dtype=np.intp)  # and at which of its positions
        for number, call in enumerate(calls):
            self._call[call.positions] = number
            self._row[call.positions] = np.arange(call.count)

    @functools.cached_property
    def _positions(self) -> dict[bytes, int]:
        return {key.tobytes(): position for position, key in enumerate(self._packed)}

    def to(self, owned: Numbers, positions: Numbers) -> Attributes:
        """-> what goes with the blocks at `positions`, which were found, to a shard that is to hold those at `owned`.

        The shards hold different blocks of a chain. So if a block follows an earlier one of this batch at the shard
        where it was found, the batch is its chain, and at the other shard it follows the last block before it that
        belongs there. Otherwise it follows the same block as where it was found, if the other shard has that.
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
