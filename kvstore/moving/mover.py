"""Moves a node's blocks to the shards that gain them when the members change, the hottest first.

A node that leaves moves its blocks to the shards that own them without this node. When a node joins, each other node
copies to it the blocks that the new node now owns. Each shard of the sending node lists its keys by recency. Then each
block that another shard gains is sent there, unless that shard already has the block or the block is damaged. Each of
the sending node's shards has a thread in the mover. The thread's `Carrier` has its own connections and one batch of
blocks in memory.

A moved block keeps its priority and the rest of its time to live. At its new shard, the block still comes after those
earlier blocks of its chain that the same shard gains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.moving.carrier import Carrier, Listed, batch_blocks
from kvstore.moving.connections import Connections
from kvstore.moving.planning import NO_SHARD, Gains, MovePlan, Ranks, Targets
from kvstore.moving.progress import MoveProgress, MoveReport
from kvstore.moving.receivers import Receivers
from kvstore.moving.settled import Settled
from kvstore.wire import MAX_HOTTEST_BYTES, MAX_KEYS, MIN_KEY_BYTES, NamespaceInfo, ShardAddress
from kvstore.wire.attributes import names_of, rows_before
from kvstore.wire.queries import Dial, KeyArray, ShardQueries, ShardQueryError, dial_tcp

log = logging.getLogger("kvstore.moving")

TURN_BYTES: Final = 64 << 20  # bytes of one namespace that are moved before the next namespace has its turn
LIST_KEYS: Final = MAX_HOTTEST_BYTES // MIN_KEY_BYTES  # the most keys that fit in one reply
MAX_CHAIN_STEPS: Final = 16384  # how far back in a chain to search for a block that goes to the same shard
REST_RATIO: Final = 3.0  # a gentle mover pauses this many times as long as it works, so it works a quarter of the time
# The senders of a gentle plan all fill the same nodes. If they have more threads than this, each pauses for longer.
GENTLE_THREADS: Final = 8


class Mover:
    """Carries out a plan for the blocks of `node`, which is one of the plan's senders.

    `shards`: the addresses of the node's shards, at least one.
    `told`: a function that is called with each new report, from any of the mover's threads, one call at a time.
    `settled`: the copies that earlier movers made or found. They are skipped, and are not in the report. The mover adds
    the copies that it makes or finds.
    `dial`: see `ShardQueries`.
    """

    def __init__(
        self,
        shards: Sequence[ShardAddress],
        node: str,
        plan: MovePlan,
        told: Callable[[MoveReport], None],
        settled: Settled | None = None,
        dial: Dial = dial_tcp,
    ) -> None:
        threads = len(plan.senders) * len(shards)
        self._shards = shards
        self._gentle = plan.gentle
        self._gains = Gains(node, plan) if plan.after else None  # None if no node is left that could take blocks
        self.gave_up: list[str] = []  # the shards of the node that failed, so that their blocks are not in the report
        self.progress = MoveProgress(told, REST_RATIO * max(1.0, threads / GENTLE_THREADS) if plan.gentle else 0.0)
        self._connections = Connections(self.progress, plan.cookies, dial)
        self._receivers = Receivers(plan, self.progress, settled)

    def run(self, deadline: float) -> MoveReport:
        """Move until all blocks are moved, the monotonic time `deadline` has come, or `stop` is called.

        Return the final report. Call it once. Shards that fail are logged and skipped.
        """
        self.progress.deadline = deadline
        if self._gains is not None:
            with ThreadPoolExecutor(len(self._shards), "kvstore-moving") as pool:
                listed = list(pool.map(self._list, self._shards))
                self.progress.begin(sum(some.copies for each in listed for some in each))
                list(pool.map(self._move, self._shards, listed))
        return self.progress.report

    def stop(self) -> None:
        """Make `run` return soon. Thread-safe."""
        self.progress.stop()
        self._connections.interrupt()

    # ---- the mover's threads, one for each shard -------------------------------------------------------------

    def _list(self, shard: ShardAddress) -> list[Listed]:
        """Return the blocks to move from a shard. All blocks are listed before any is read, because reads change the
        recency."""
        try:
            with self._connections.opened(shard) as asking:
                namespaces = [some for some in asking.info().namespaces if some.blocks or some.disk_blocks]
                return [self._list_namespace(asking, namespace) for namespace in namespaces]
        except ShardQueryError as error:
            self._give_up(shard, error)
        except Exception:  # a bug may lose one shard's blocks, but must not keep the node from leaving in order
            log.exception("moving: internal error")
        return []

    def _list_namespace(self, asking: ShardQueries, namespace: NamespaceInfo) -> Listed:
        canonical = namespace.namespace.encode()
        asking.timeout_s = self.progress.call_s
        asking.hello(canonical)
        assert self._gains is not None
        found: list[tuple[KeyArray, KeyArray, Targets, Ranks]] = []
        skip = 0
        while not self.progress.over:
            began = time.monotonic()
            asking.timeout_s = self.progress.call_s
            some, before, total = asking.hottest(skip, LIST_KEYS)
            if not len(some):
                break
            found.append((some, before, *self._gains.of(some, namespace.replicas)))
            self.progress.rest(began)
            skip += len(some)
            if skip >= total:
                break
        if not found:
            none, nobody = np.empty((0, MIN_KEY_BYTES), dtype=np.uint8), np.empty(0, dtype=np.intp)
            found = [(none, none, nobody.reshape(0, 1), nobody)]
        keys, before, gaining, ranking = (np.concatenate(parts) for parts in zip(*found, strict=True))
        targets = gaining.copy()
        self._receivers.strike_out_settled(canonical, keys, targets)
        rows = np.flatnonzero((targets != NO_SHARD).any(axis=1))
        rows = rows[np.argsort(ranking[rows], kind="stable")]
        return Listed(
            canonical,
            namespace.replicas,
            namespace.block_bytes,
            keys[rows],
            targets[rows],
            places(keys, before, gaining, rows),
        )

    def _move(self, shard: ShardAddress, listed: list[Listed]) -> None:
        if not listed or self.progress.over:
            return
        try:
            with Carrier(shard, self._receivers, self._connections, self.progress, self._gentle) as carrier:
                for some, rows in turns(listed):
                    if self.progress.over:
                        return
                    carrier.carry(some, rows)
        except ShardQueryError as error:
            self._give_up(shard, error)
        except Exception:  # see `_list`
            log.exception("moving: internal error")

    def _give_up(self, shard: ShardAddress, error: ShardQueryError) -> None:
        if not self.progress.over:
            self.gave_up.append(shard.name)
            log.warning("moving: blocks of shard %s stay where they are: %s", shard.name, error)


def turns(listed: Sequence[Listed]) -> Iterator[tuple[Listed, slice]]:
    """Yield slices of all blocks in turns of `TURN_BYTES`: first the hottest blocks of each namespace, then the next
    ones."""
    waiting = [(some, 0) for some in listed if len(some.keys)]
    while waiting:
        later = []
        for some, at in waiting:
            end = at + batch_blocks(some.block_bytes, TURN_BYTES, MAX_KEYS)
            yield some, slice(at, end)
            if end < len(some.keys):
                later.append((some, end))
        waiting = later


def places(keys: KeyArray, before: KeyArray, targets: Targets, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    """Return an array (len(rows), copies, key_bytes): one key for each copy of each block at `rows`.

    The key belongs to the nearest earlier block that the same shard gains. If there is none, it is the block's own key.

    A chain's blocks are spread over all shards, and a shard gains only some of them. So on its new shard, a block
    follows the nearest earlier block that also goes there. This need not be the block that it follows on its old shard.

    `keys`, `before`: arrays (n, key_bytes) for all blocks of one shard, as HOTTEST returns them.
    `targets`: an array (n, copies) with the shards that gain each block.
    """
    copies = targets.shape[1]
    parents = rows_before(names_of(keys), names_of(before))
    row, copy = np.nonzero(targets[rows] != NO_SHARD)
    wanted = targets[rows[row], copy]
    found = parents[rows[row]]
    searching = np.flatnonzero(found >= 0)
    for _ in range(MAX_CHAIN_STEPS):
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
