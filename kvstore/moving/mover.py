"""Moves a node's blocks to the shards that gain them by a change of members, the hottest first.

A node that leaves moves its blocks to their owners without it. When a node joins, each other node copies to it the
blocks that it now owns. Each of the node's shards lists its keys by recency. Then each block that another shard gains
is sent there, unless that shard has it already or the block is damaged. Each of the node's shards has a thread with a
`Carrier`, which has its own connections and one batch of blocks in memory.

A moved block keeps its priority, the rest of its time to live, and its place behind those blocks of its chain that the
same shard gains. A block comes after those before it in its chain, also at its new shard.
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
from kvstore.moving.planning import NOBODY, Gains, Plan, Ranks, Targets
from kvstore.moving.progress import MoveReport, Progress
from kvstore.moving.receivers import Receivers
from kvstore.moving.settled import Settled
from kvstore.wire import MAX_HOTTEST_BYTES, MAX_KEYS, MIN_KEY_BYTES, NamespaceInfo, ShardAddress
from kvstore.wire.asking import AskError, Asking, Dial, KeyArray, dial_tcp
from kvstore.wire.attributes import names_of, rows_before

log = logging.getLogger("kvstore.moving")

TURN_BYTES: Final = 64 << 20  # of one namespace, before the next one has its turn
LIST_KEYS: Final = MAX_HOTTEST_BYTES // MIN_KEY_BYTES  # as many as can fit one reply
MOST_STEPS: Final = 16384  # back in a chain, in search of a block that goes to the same shard
REST_RATIO: Final = 3.0  # a gentle mover rests so many times as long as it works: it works a quarter of the time
# The senders of a gentle plan all fill the same nodes. With more threads than this in all of them, each rests longer.
GENTLE_THREADS: Final = 8


class Mover:
    """Carries out a plan for the blocks of `node`, which is one of the plan's senders.

    `shards`: the addresses of the node's shards, at least one. `told` is called with each new report, from any of the
    mover's threads, one call at a time. `settled`: copies that earlier movers made or found; they are skipped and not
    in the report. The mover adds the copies that it makes or finds. `dial`: of `Asking`.
    """

    def __init__(
        self,
        shards: Sequence[ShardAddress],
        node: str,
        plan: Plan,
        told: Callable[[MoveReport], None],
        settled: Settled | None = None,
        dial: Dial = dial_tcp,
    ) -> None:
        threads = len(plan.senders) * len(shards)
        self._shards = shards
        self._gentle = plan.gentle
        self._gains = Gains(node, plan) if plan.after else None  # None: no node is left that could take blocks
        self.gave_up = False  # on a shard of the node, which failed: its blocks are not in the report
        self.progress = Progress(told, REST_RATIO * max(1.0, threads / GENTLE_THREADS) if plan.gentle else 0.0)
        self._connections = Connections(self.progress, plan.cookies, dial)
        self._receivers = Receivers(plan, self.progress, settled)

    def run(self, deadline: float) -> MoveReport:
        """Move until all blocks are moved, the monotonic time `deadline` has come, or `stop` is called.

        Call it once. -> the final report. Shards that fail are logged and skipped.
        """
        self.progress.deadline = deadline
        if self._gains is not None:
            with ThreadPoolExecutor(len(self._shards), "kvstore-moving") as pool:
                listed = list(pool.map(self._list, self._shards))
                self.progress.begin(sum(some.copies for each in listed for some in each))
                list(pool.map(self._move, self._shards, listed))
        return self.progress.report

    def stop(self) -> None:
        """Make `run` return soon. Any thread."""
        self.progress.stop()
        self._connections.interrupt()

    # ---- the mover's threads, one a shard --------------------------------------------------------------------

    def _list(self, shard: ShardAddress) -> list[Listed]:
        """-> the blocks to move from a shard. Listing comes before any reading, because reads change the recency."""
        try:
            with self._connections.opened(shard) as asking:
                namespaces = [some for some in asking.info().namespaces if some.blocks or some.disk_blocks]
                return [self._list_namespace(asking, namespace) for namespace in namespaces]
        except AskError as error:
            self._give_up(shard, error)
        except Exception:  # a bug must cost one shard's blocks, not keep the node from leaving in order
            log.exception("moving: internal error")
        return []

    def _list_namespace(self, asking: Asking, namespace: NamespaceInfo) -> Listed:
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
        rows = np.flatnonzero((targets != NOBODY).any(axis=1))
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
        except AskError as error:
            self._give_up(shard, error)
        except Exception:  # see `_list`
            log.exception("moving: internal error")

    def _give_up(self, shard: ShardAddress, error: AskError) -> None:
        if not self.progress.over:
            self.gave_up = True
            log.warning("moving: blocks of shard %s stay where they are: %s", shard.name, error)


def turns(listed: Sequence[Listed]) -> Iterator[tuple[Listed, slice]]:
    """-> slices of all blocks in turns of `TURN_BYTES`: first the hottest of each namespace, then the next of each."""
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
    """-> for each copy of the blocks at `rows`, the key of the nearest block before it that the same shard gains, its
    own key if there is none: (len(rows), copies, key_bytes).

    A chain's blocks are spread over all shards, and a shard gains only some of them. So the block that one follows on
    its new shard is the nearest before it that goes there, too, not the one that it follows on its old shard.

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
