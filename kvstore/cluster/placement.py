"""Weighted rendezvous hashing: computes which shards hold a key.

Every shard has a score for every key, and the shard with the highest score owns it. The score is -weight / ln(u), where
u in (0, 1) is a hash of key and shard name (Schindelhauer and Schomaker, 2005; Resch, 2015). The processes need no
common table, because every process that knows the shards' names and weights computes the same owner. When a shard joins
or leaves, only this shard's share of the keys moves.

Each key is placed by itself, not together with its neighbours in a chain. So a client can start anywhere in a chain and
still find each key. `python -m benchmarks.cluster_sim` measures what this costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore._cext import rendezvous


class Placement:
    """Computes the owners and replicas of keys, for shards with these names and weights. A weight is > 0, in any unit.

    `nodes`: the node of each shard. By default, each shard is a node of its own.
    `zones`: the zone of each shard. Nodes of one zone fail together. By default, there is one zone.

    The order of the shards determines only their numbers. Raises `ValueError` if the lists have different lengths or a
    weight is not finite and > 0. Immutable and thread-safe; the calls release the GIL.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        nodes: Sequence[str] | None = None,
        zones: Sequence[str] | None = None,
    ) -> None:
        if len(names) != len(weights) or not names:
            raise ValueError(f"{len(names)} names and {len(weights)} weights: expected the same number, at least 1")
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights range from {min(weights)} to {max(weights)}: expected finite numbers above 0")
        for what, given in (("nodes", nodes), ("zones", zones)):
            if given is not None and len(given) != len(names):
                raise ValueError(f"{len(names)} names and {len(given)} {what}: expected the same number")
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], dtype=np.uint64)
        self._weights = np.array(weights, dtype=np.float64)
        self._ranks = np.empty(len(names), dtype=np.intp)
        self._ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        self._nodes = _numbered(names if nodes is None else nodes)
        self._zones = _numbered(zones or [""] * len(names))
        self._node_count = int(self._nodes.max()) + 1

    def __len__(self) -> int:
        return len(self._seeds)

    def owners(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
        """Return an array (n,) with the number of each key's owner.
        `keys`: an (n, key_bytes) uint8 array, with key_bytes >= 8."""
        return self.replicas(keys, 1)[:, 0]

    def replicas(self, keys: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.intp]:
        """Return an array (n, min(count, nodes)) with the numbers of the shards that hold each key, the owner first.

        Each further shard has the best score among the shards in zones and on nodes that are not used yet. When all
        zones are used, it is the shard with the best score on an unused node.
        """
        if count < 1:
            raise ValueError(f"{count} replicas: expected at least 1")
        if len(self) == 1:
            return np.zeros((len(keys), 1), dtype=np.intp)
        columns = min(count, self._node_count)
        return rendezvous(keys, self._seeds, self._weights, self._ranks, self._nodes, self._zones, columns)


def _numbered(names: Sequence[str]) -> npt.NDArray[np.intp]:
    """Return a number, counted from 0, for each name. Equal names have equal numbers."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.intp)
