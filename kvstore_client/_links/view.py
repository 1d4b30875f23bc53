"""A view: the shards that a client knows, and, for each key, the shards to ask, in order.

A view never changes, but is replaced as a whole. So a call that began under one view ends under the same view. While no
node joins or drains, the owners of a key are the shards that have its block. Otherwise there are two placements (see
`kvstore.cluster.members`): blocks are set on the *new* owners, and blocks that the new owners lack are read from the
*old* ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore._cext import group_by_owner
from kvstore.cluster.placement import Placement
from kvstore_client._links.link import Link
from kvstore_client.keys import KeyArray

NO_SHARD: Final = -1
# Each replica keeps in memory the blocks that clients request from it. So the other replica is asked first only if the
# preferred one is slow, and slower than the other by this factor.
SLOWER: Final = 2.0
SLOW_REPLICA_S: Final = 0.002
# The most former owners that are asked for a key while nodes join. The shard that has the block may rank behind at most
# this many nodes that have joined.
MAX_FORMER: Final = 4

Numbers = npt.NDArray[np.intp]


class ShardEntry(NamedTuple):
    """A shard in a view: its link, its failure domains (node and zone), and the placements that include it."""

    link: Link
    node: str
    zone: str
    state: str = "listed"
    new: bool = True
    old: bool = True


class _Ring:
    """One placement of keys on some of a view's links."""

    def __init__(self, places: Sequence[ShardEntry], numbers: Sequence[int]) -> None:
        chosen = [places[number] for number in numbers]
        self._numbers: Numbers = np.array(numbers, dtype=np.intp)
        self._placement = Placement(
            [place.link.name for place in chosen],
            [place.link.weight for place in chosen],
            [place.node for place in chosen],
            [place.zone for place in chosen],
        )

    def replicas(self, keys: KeyArray, count: int) -> Numbers:
        """Return an `(n, r)` array: the link numbers of the first `count` replicas of each key, fewer if there are
        fewer nodes."""
        if count == 1:
            return self._numbers[self._placement.owners(keys)].reshape(-1, 1)
        found: Numbers = self._numbers[self._placement.replicas(keys, count)]
        return found


@dataclass
class Node:
    """A server of a list, as the user named it. The names of its shards come from the server itself.

    * `instance`: The random name of the process that has answered; empty if none has.
    """

    host: str
    port: int
    zone: str = ""
    links: list[Link] = field(default_factory=list)
    instance: str = ""

    def is_same_as(self, other: Node) -> bool:
        """Return whether the other node is certainly the same server under another name or at another port."""
        if self.instance and self.instance == other.instance:
            return True
        return any((link.host, link.port) == (other.host, other.port) for link in self.links)


class View:
    """All shards of a store, as this client knows them at one epoch. Immutable."""

    def __init__(self, places: Sequence[ShardEntry], epoch: int = 0) -> None:
        self.epoch = epoch
        self.places = places
        self.links: Sequence[Link] = [place.link for place in places]
        new = [number for number, place in enumerate(places) if place.new]
        old = [number for number, place in enumerate(places) if place.old]
        self.new_nodes = len({places[number].node for number in new or old})  # the most owners of a block
        # While a node joins or drains, blocks may be on shards that do not own them any more.
        self.changing = len(places) > 1 and new != old
        joining = len({places[number].node for number in new if not places[number].old})
        self._former = min(max(1, joining), MAX_FORMER) if self.changing else 0
        self._new = _Ring(places, new or old) if len(places) > 1 else None
        self._old = _Ring(places, old) if self.changing and new and old else None

    def owners(self, keys: KeyArray, replicas: int) -> Numbers:
        """Return an `(n, r)` array of link numbers: the shards on which each block is set. r is `replicas`, or fewer
        if there are fewer nodes."""
        if self._new is None:
            return np.zeros((len(keys), 1), dtype=np.intp)
        return self._new.replicas(keys, replicas)

    def readers(self, keys: KeyArray, replicas: int, preferred: int = 0) -> Numbers:
        """Return an `(n, c)` array of link numbers: the shards that may have each block, in the order in which they are
        asked. `NO_SHARD` fills the rows that have fewer shards.

        `preferred`: the number of the replica that is asked first. It rotates, because a replica that is never read
        would evict the wrong blocks.
        """
        found = self.owners(keys, replicas + self._former)
        owners = min(replicas, found.shape[1])
        if owners > 1:
            found[:, :owners] = np.roll(found[:, :owners], -(preferred % owners), axis=1)
            self._prefer_the_faster(found)
        if not self.changing:
            return found
        # A node that joins owns the blocks that are set from then on. If more nodes join later, it may have blocks
        # although it is not an old owner of them. It then ranks right behind the nodes that have joined since.
        found, old = found[:, :owners], found[:, owners:]
        if self._old is not None:
            old = np.concatenate([self._old.replicas(keys, replicas), old], axis=1)
        known = (old[:, :, None] == found[:, None, :]).any(axis=2)
        known |= np.triu((old[:, :, None] == old[:, None, :]), 1).any(axis=1)
        old[known] = NO_SHARD
        return np.concatenate([found, old], axis=1)

    def _prefer_the_faster(self, found: Numbers) -> None:
        """Of the first two replicas, put the less loaded one first (Mitzenmacher, 2001), with a bias to the first."""
        loads = np.array([link.load_s for link in self.links])
        first, second = loads[found[:, 0]], loads[found[:, 1]]
        swap = (first > SLOW_REPLICA_S) & (first > SLOWER * second)
        if swap.any():
            found[swap, :2] = found[swap, 1::-1]

    def split(self, numbers: Numbers, positions: Numbers) -> list[tuple[Link, Numbers]]:
        """Return each link that has positions, with its positions in order. `positions[i]` belongs to the link
        `numbers[i]`."""
        if len(self.links) == 1:
            return [(self.links[0], positions)] if len(positions) else []
        order, bounds = group_by_owner(np.ascontiguousarray(numbers), len(self.links))
        ends = bounds.tolist()
        grouped = positions[order]
        return [
            (link, grouped[start:end])
            for link, start, end in zip(self.links, ends[:-1], ends[1:], strict=True)
            if start < end
        ]
