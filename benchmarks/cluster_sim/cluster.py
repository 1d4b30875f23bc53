"""A simulated cluster, without sockets and without the content of blocks. It uses the server's placement, and its block
index and policy on every node.

A request of the trace does what an engine does through the client: it looks up the whole chain, reads the leading
blocks that are present, and sets the rest. Like the client, it first looks for a block at the block's owners in the
*new* placement, and then at its owners in the *old* placement (see `kvstore.cluster.members`). If a later candidate has
the block, the block is set on the owners that lacked it. Every node is one shard, and all nodes have the same capacity.
Only the steps of a scenario take time; requests take none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.eviction.traces import KEY_BYTES, Chain, Keys
from kvstore._index import BlockIndex
from kvstore.cluster.members import State
from kvstore.cluster.placement import Placement

POLICY: Final = "default"
NO_SHARD: Final = -1

Numbers = npt.NDArray[np.intp]


class Cache:
    """The blocks of one node, with room for `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self._index = BlockIndex(KEY_BYTES, capacity, POLICY)
        self._index.attach()
        self._sums = np.zeros(capacity, dtype=np.uint64)
        self._tick = 1

    def find(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which keys are present. This does not count as a use."""
        return np.frombuffer(self._index.contains(keys.tobytes(), 0.0, False, 0), dtype=np.bool_)

    def use(self, keys: Keys) -> None:
        """Count a use of these keys, as a GET does."""
        self._index.contains(keys.tobytes(), 0.0, True, self._ticks(len(keys)))

    def insert(self, keys: Keys) -> None:
        """Insert these keys, as a SET does."""
        index, packed = self._index, keys.tobytes()
        room = index.missing(packed) - index.free
        if room > 0:
            index.evict(room, 0.0)
        slots = index.reserve(packed, False, self._ticks(len(keys)))
        mine = slots[slots >= 0]
        index.commit(mine, self._sums[: len(mine)], self._ticks(len(keys)))

    def hottest(self) -> Keys:
        """Return all keys, the most recent first."""
        slots = self._index.ready_slots()
        recent = slots[np.argsort(self._index.ticks_of(slots))[::-1]]
        return np.frombuffer(self._index.keys_of(recent), dtype=np.uint8).reshape(-1, KEY_BYTES)

    def _ticks(self, count: int) -> int:
        self._tick += count
        return self._tick - count


@dataclass
class Node:
    """One node. `state`: its state as the other nodes see it, or empty if it is not a member. `cache`: None while the
    node does not answer."""

    name: str
    zone: str
    state: State | None
    cache: Cache | None
    reads: int = 0


@dataclass
class _Move:
    """Blocks that move to their new owners, at an even rate over a period of time."""

    keys: Keys
    begin_s: float
    duration_s: float
    done: int = 0


class Cluster:
    """The nodes, and the clients' view of them.

    keys: the key of each block number
    placing: other keys, if placement must not use `keys`
    spares: the number of further owners in the new placement that are asked while a node joins or drains
    """

    def __init__(
        self,
        keys: Keys,
        nodes: int,
        zones: int,
        replicas: int,
        capacity: int,
        placing: Keys | None = None,
        spares: int = 0,
    ) -> None:
        self.replicas = replicas
        self.repaired = self.copied = 0
        self.moved: list[float] = []  # the share of keys whose owner changed, at each change of the view
        self.nodes: list[Node] = []
        self._capacity, self._zones, self._spares = capacity, zones, spares
        self._keys = keys
        self._placing = keys if placing is None else placing
        self._number_of = {key.tobytes(): number for number, key in enumerate(keys)}
        self._moves: list[_Move] = []
        self._owners: Numbers = np.empty((0, 0), dtype=np.intp)
        self._readers: Numbers = self._owners
        for _ in range(nodes):
            self.add("serving")
        self.look_again()

    # ---- changes: each takes effect with the next `look_again` ------------------------------------------------------

    def add(self, state: State) -> int:
        """Add an empty node. Return its number."""
        number = len(self.nodes)
        self.nodes.append(Node(f"node-{number}/0", f"zone-{number % self._zones}", state, Cache(self._capacity)))
        return number

    def set_state(self, numbers: Sequence[int], state: State | None) -> None:
        """Set a node's state. If it is None, the node is no longer a member."""
        for number in numbers:
            self.nodes[number].state = state

    def kill(self, numbers: Sequence[int]) -> None:
        """Stop nodes without notice. They stop answering and lose their blocks, but the other nodes do not know it
        yet."""
        for number in numbers:
            self.nodes[number].cache = None

    def restart(self, numbers: Sequence[int]) -> None:
        """Bring nodes back without blocks, and let them join."""
        for number in numbers:
            self.nodes[number].cache = Cache(self._capacity)
        self.set_state(numbers, "joining")

    def drain(self, numbers: Sequence[int], now_s: float, duration_s: float) -> None:
        """Drain nodes. They announce that they leave, and move all their blocks at an even rate over `duration_s`
        seconds, the hottest first."""
        self.set_state(numbers, "draining")
        for number in numbers:
            cache = self.nodes[number].cache
            if cache is not None:
                self._moves.append(_Move(cache.hottest(), now_s, duration_s))

    def fill(self, numbers: Sequence[int], now_s: float, duration_s: float) -> None:
        """Let all other nodes copy blocks to these nodes: the blocks that these nodes own in the new placement, the
        hottest first."""
        for number, node in enumerate(self.nodes):
            if node.state is not None and node.cache is not None and number not in numbers:
                keys = node.cache.hottest()
                theirs = np.isin(self._owners[self._blocks(keys)], numbers).any(axis=1)
                self._moves.append(_Move(keys[theirs], now_s, duration_s))

    def look_again(self) -> float:
        """Update the view of all clients to the current members. Return the share of keys whose owner changed."""
        before = self._owners
        new = self._placed([number for number, node in enumerate(self.nodes) if node.state in _NEW], self._spares)
        self._readers = self._owners = new[:, : self.replicas]
        olds = [number for number, node in enumerate(self.nodes) if node.state in _OLD]
        if olds and any(node.state in ("joining", "draining") for node in self.nodes):
            old = self._placed(olds)
            old[(old[:, :, None] == new[:, None, :]).any(axis=2)] = NO_SHARD
            self._readers = np.concatenate([new, old], axis=1)
        moved = float((before[:, 0] != self._owners[:, 0]).mean()) if before.size else 0.0
        self.moved.append(moved)
        return moved

    def _blocks(self, keys: Keys) -> Numbers:
        return np.array([self._number_of[key.tobytes()] for key in keys], dtype=np.intp)

    def _placed(self, members: Sequence[int], spares: int = 0) -> Numbers:
        placement = Placement(
            [self.nodes[number].name for number in members],
            [1.0] * len(members),
            zones=[self.nodes[number].zone for number in members],
        )
        numbers: Numbers = np.array(members, dtype=np.intp)[placement.replicas(self._placing, self.replicas + spares)]
        return numbers

    # ---- requests ---------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Move the blocks that are due by `now_s`."""
        for move in self._moves:
            share = min(1.0, (now_s - move.begin_s) / move.duration_s)
            until = int(len(move.keys) * share)
            keys = move.keys[move.done : until]
            if len(keys):
                self._set(keys, self._owners[self._blocks(keys)])
                self.copied += len(keys)
                move.done = until
        self._moves = [move for move in self._moves if move.done < len(move.keys)]

    def request(self, chain: Chain) -> int:
        """Request a chain, head first, and set the missing blocks. Return the number of leading blocks that were
        present."""
        keys, readers = self._keys[chain], self._readers[chain]
        column = self._look(keys, readers)
        missing = np.flatnonzero(column == NO_SHARD)
        run = int(missing[0]) if len(missing) else len(chain)
        holders = readers[np.arange(run), column[:run]]
        for number, positions in _by_node(holders):
            node = self.nodes[number]
            assert node.cache is not None
            node.cache.use(keys[positions])
            node.reads += len(positions)
        self._repair(keys[:run], readers[:run], column[:run])
        self._set(keys[run:], readers[run:, : self.replicas])
        return run

    def _look(self, keys: Keys, readers: Numbers) -> Numbers:
        """Return, for each key, the first column of `readers` that has the key, or `NO_SHARD`."""
        column: Numbers = np.full(len(keys), NO_SHARD, dtype=np.intp)
        for number in range(readers.shape[1]):
            left = np.flatnonzero(column == NO_SHARD)
            for owner, some in _by_node(readers[left, number]):
                cache = self.nodes[owner].cache if owner != NO_SHARD else None
                if cache is not None:
                    positions = left[some]
                    column[positions[cache.find(keys[positions])]] = number
        return column

    def _repair(self, keys: Keys, readers: Numbers, column: Numbers) -> None:
        for number in range(min(self.replicas, self._owners.shape[1])):
            lacking = np.flatnonzero(column > number)
            if len(lacking):
                self._set(keys[lacking], readers[lacking, number : number + 1])
                self.repaired += len(lacking)

    def _set(self, keys: Keys, owners: Numbers) -> None:
        for number in range(owners.shape[1]):
            for owner, positions in _by_node(owners[:, number]):
                cache = self.nodes[owner].cache
                if cache is not None:
                    cache.insert(keys[positions])


_NEW: Final = ("joining", "serving")
_OLD: Final = ("serving", "draining")


def _by_node(numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield each node's number and its positions, in ascending order of number."""
    if not len(numbers):
        return
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    bounds = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(order)]
    for start, end in itertools.pairwise(bounds):
        yield int(ordered[start]), order[start:end]
