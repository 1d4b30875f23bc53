"""Moving a node's blocks to the shards that will own them without it, the hottest first.

A node that leaves calls this, for a time it chooses. Each of its shards lists its keys by recency, and the blocks that
another shard gains by the node's leaving go there: what it has already is not sent, what arrives damaged is not moved.
For each of its shards there is a thread, with connections of its own and one batch of blocks in memory.

A block that was moved is a new one where it arrives: it has the priority and the time to live of its namespace there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore._cext import checksum_into
from kvstore.asking import AskError, Asking, Keys, Refused
from kvstore.cluster.members import Member
from kvstore.cluster.placement import Placement
from kvstore.wire import MAX_HOTTEST_BYTES, MAX_KEYS, MIN_KEY_BYTES, NamespaceInfo, ShardAddress

log = logging.getLogger("kvstore.moving")

BATCH_BYTES: Final = 4 << 20  # in memory at a time, at least a block
TURN_BYTES: Final = 64 << 20  # of one namespace, before the next one has its turn
CONNECT_S: Final = 3.0  # a shard that takes longer is left out; `stop` does not interrupt it
CALL_S: Final = 10.0  # a shard that takes longer is left out, too
LIST_KEYS: Final = MAX_HOTTEST_BYTES // MIN_KEY_BYTES  # as many as fit an answer

NOBODY: Final = -1

Targets = npt.NDArray[np.intp]  # (n, copies): numbers of the shards that gain a block, or NOBODY
Block = tuple[memoryview, int]  # its bytes and their checksum


class MoveReport(msgspec.Struct, frozen=True):
    """What became of the copies that were to be made: blocks, counted once for each shard that gains them. Those that
    are in none of the others were not come to."""

    total: int
    moved: int
    present: int  # the other shard had them
    failed: int  # gone or damaged here, or not taken there


@dataclass(frozen=True)
class _Listed:
    """Blocks of one namespace on one shard that others gain, the hottest first."""

    canonical: bytes
    replicas: int
    block_bytes: int
    keys: Keys
    targets: Targets


class Mover:
    """Moves the blocks of `node`, whose shards are `shards`, to the other `members` that own blocks.

    `shards` must not be empty. `progress` is called with copies done and copies in all, from any of the mover's
    threads, one at a time.
    """

    def __init__(
        self,
        shards: Sequence[ShardAddress],
        node: str,
        members: Sequence[Member],
        progress: Callable[[int, int], None],
    ) -> None:
        others = [member for member in members if member.is_new_owner and member.node != node]
        zone = next((member.zone for member in members if member.node == node), "")
        placed = [(shard, member.node, member.zone) for member in others for shard in member.shards]
        self.targets = [shard for shard, _, _ in placed]
        self.deadline = 0.0
        self._shards = shards
        self._progress = progress
        self._before = _placement([*placed, *((shard, node, zone) for shard in shards)])
        self._after = _placement(placed) if placed else None  # nobody is left
        self._stop = threading.Event()
        self._lock = threading.RLock()  # who is told of progress may call `stop`
        self._open: set[Asking] = set()
        self._left_out: set[tuple[int, bytes | None]] = set()  # targets; with a namespace: for that one only
        self._total = self._moved = self._present = self._failed = 0

    def run(self, deadline: float) -> MoveReport:
        """Move until all is moved, the monotonic time `deadline` has come, or `stop` is called. To be called once."""
        self.deadline = deadline
        if self._after is not None:
            with ThreadPoolExecutor(len(self._shards), "kvstore-moving") as pool:
                listed = list(pool.map(self._list, self._shards))
                self._total = sum(int((some.targets != NOBODY).sum()) for each in listed for some in each)
                self.count()
                list(pool.map(self._move, self._shards, listed))
        return MoveReport(self._total, self._moved, self._present, self._failed)

    def stop(self) -> None:
        """From another thread: end soon."""
        self._stop.set()
        with self._lock:
            for asking in self._open:
                asking.interrupt()

    # ---- for its threads -------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """No more is to be moved."""
        return self._stop.is_set() or time.monotonic() >= self.deadline

    @property
    def call_s(self) -> float:
        """How long the next call to a shard may take."""
        return max(0.001, min(CALL_S, self.deadline - time.monotonic()))

    def connect(self, shard: ShardAddress) -> Asking:
        """A connection that `stop` interrupts; to be given to `disconnect`. Raises `AskError`."""
        asking = Asking((shard.host or "127.0.0.1", shard.port), min(CONNECT_S, self.call_s))
        asking.timeout_s = self.call_s
        with self._lock:
            self._open.add(asking)
        if self._stop.is_set():
            asking.interrupt()
        return asking

    def disconnect(self, asking: Asking) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(asking)
        asking.close()

    def count(self, moved: int = 0, present: int = 0, failed: int = 0) -> None:
        """So many more copies are done."""
        with self._lock:
            self._moved += moved
            self._present += present
            self._failed += failed
            self._progress(self._moved + self._present + self._failed, self._total)

    def is_left_out(self, target: int, canonical: bytes) -> bool:
        """Whether nothing is sent there any more."""
        return not self._left_out.isdisjoint({(target, None), (target, canonical)})

    def leave_out(self, target: int, canonical: bytes, error: AskError) -> None:
        """The target failed, or does not take this namespace."""
        left_out = target, canonical if isinstance(error, Refused) else None
        with self._lock:
            new = left_out not in self._left_out
            self._left_out.add(left_out)
        if new and not self.over:
            log.warning("moving: shard %s is left out from now on: %s", self.targets[target].name, error)

    def _list(self, shard: ShardAddress) -> list[_Listed]:
        """What is to be moved from a shard: before anything is read from it, for that changes the recency."""
        try:
            asking = self.connect(shard)
            try:
                namespaces = [some for some in asking.info().namespaces if some.blocks or some.disk_blocks]
                return [self._list_namespace(asking, namespace) for namespace in namespaces]
            finally:
                self.disconnect(asking)
        except AskError as error:
            self._give_up(shard, error)
        except Exception:  # a defect of ours must cost one shard's blocks, not the node its orderly leaving
            log.exception("moving: internal error")
        return []

    def _list_namespace(self, asking: Asking, namespace: NamespaceInfo) -> _Listed:
        canonical = namespace.namespace.encode()
        asking.timeout_s = self.call_s
        asking.hello(canonical)
        keys: list[Keys] = []
        targets: list[Targets] = []
        skip = 0
        while not self.over:
            asking.timeout_s = self.call_s
            some, total = asking.hottest(skip, LIST_KEYS)
            gaining = self.gaining(some, namespace.replicas)
            wanted = (gaining != NOBODY).any(axis=1)
            keys.append(some[wanted])
            targets.append(gaining[wanted])
            skip += len(some)
            if not len(some) or skip >= total:
                break
        if not keys:
            keys, targets = [np.empty((0, 8), dtype=np.uint8)], [np.empty((0, 1), dtype=np.intp)]
        return _Listed(
            canonical, namespace.replicas, namespace.block_bytes, np.concatenate(keys), np.concatenate(targets)
        )

    def gaining(self, keys: Keys, copies: int) -> Targets:
        """For each key the shards that hold it without this node and do not with it."""
        assert self._after is not None
        after, before = self._after.replicas(keys, copies), self._before.replicas(keys, copies)
        return np.where((after[:, :, None] == before[:, None, :]).any(axis=2), NOBODY, after)

    def _move(self, shard: ShardAddress, listed: list[_Listed]) -> None:
        if not listed or self.over:
            return
        try:
            with _Carrier(self, shard) as carrier:
                for some, rows in _turns(listed):
                    if self.over:
                        return
                    carrier.carry(some, rows)
        except AskError as error:
            self._give_up(shard, error)
        except Exception:  # see `_list`
            log.exception("moving: internal error")

    def _give_up(self, shard: ShardAddress, error: AskError) -> None:
        if not self.over:
            log.warning("moving: blocks of shard %s stay where they are: %s", shard.name, error)


class _Carrier:
    """Blocks on their way from one shard to others, a namespace at a time. One thread."""

    def __init__(self, mover: Mover, shard: ShardAddress) -> None:
        self._mover = mover
        self._source = mover.connect(shard)
        self._askings: dict[int, Asking] = {}
        self._namespaces: dict[Asking, bytes] = {}

    def __enter__(self) -> _Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        for asking in (self._source, *self._askings.values()):
            self._mover.disconnect(asking)

    def carry(self, listed: _Listed, rows: slice) -> None:
        """Move some blocks of a namespace. Raises `AskError` when the shard they are on fails."""
        keys, targets = listed.keys[rows], listed.targets[rows].copy()
        for target in np.unique(targets[targets != NOBODY]).tolist():
            self._strike_out_present(listed, keys, targets, target)
        wanted = np.flatnonzero((targets != NOBODY).any(axis=1))
        step = _batch_blocks(listed.block_bytes, BATCH_BYTES)
        for at in range(0, len(wanted), step):
            if self._mover.over:
                return
            some = wanted[at : at + step]
            self._carry_batch(listed, keys[some], targets[some])

    def _strike_out_present(self, listed: _Listed, keys: Keys, targets: Targets, target: int) -> None:
        """What a target has is not sent to it; one that does not answer is sent nothing."""
        mover = self._mover
        gained = np.argwhere(targets == target)
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                present = asking.contains(keys[gained[:, 0]])
            except AskError as error:
                mover.leave_out(target, listed.canonical, error)
            else:
                targets[tuple(gained[present].T)] = NOBODY
                mover.count(present=int(present.sum()))
                return
        targets[tuple(gained.T)] = NOBODY
        if not mover.over:  # otherwise cut short: nothing is known of these
            mover.count(failed=len(gained))

    def _carry_batch(self, listed: _Listed, keys: Keys, targets: Targets) -> None:
        source = self._use(self._source, listed)
        blocks: list[Block | None] = [None] * len(keys)
        damaged = 0
        try:
            for positions, sums, memory in source.get(keys):
                views = [memory[at : at + listed.block_bytes] for at in range(0, len(memory), listed.block_bytes)]
                found = np.empty(len(views), dtype=np.uint64)
                checksum_into(views, found)
                damaged += int((found != sums).sum())
                for position, view, right, checksum in zip(positions, views, found, sums, strict=True):
                    blocks[position] = (view, checksum) if right == checksum else None
        except Refused as error:
            log.warning("moving: %d block(s) cannot be read: %s", len(keys), error)
        if damaged:
            log.error("moving: %d block(s) are damaged and are not moved", damaged)
        there = np.array([block is not None for block in blocks])
        self._mover.count(failed=int((targets[~there] != NOBODY).sum()))
        for target in np.unique(targets[targets != NOBODY]).tolist():
            rows = np.flatnonzero(there & (targets == target).any(axis=1))
            if len(rows) and not self._mover.over:
                self._set(listed, target, keys[rows], [block for row in rows if (block := blocks[row])])

    def _set(self, listed: _Listed, target: int, keys: Keys, blocks: Sequence[Block]) -> None:
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                reply = asking.set(keys, [view for view, _ in blocks], np.array([checksum for _, checksum in blocks]))
            except AskError as error:
                self._mover.leave_out(target, listed.canonical, error)
            else:
                self._mover.count(reply.created, reply.existed, reply.error)
                return
        if not self._mover.over:
            self._mover.count(failed=len(keys))

    def _asking(self, listed: _Listed, target: int) -> Asking | None:
        """A connection to a target in a namespace; None when it is left out."""
        if self._mover.is_left_out(target, listed.canonical):
            return None
        try:
            if target not in self._askings:
                self._askings[target] = self._mover.connect(self._mover.targets[target])
            return self._use(self._askings[target], listed)
        except AskError as error:
            self._mover.leave_out(target, listed.canonical, error)
            return None

    def _use(self, asking: Asking, listed: _Listed) -> Asking:
        """The connection, in a namespace; its next call ends in time."""
        asking.timeout_s = self._mover.call_s
        if self._namespaces.get(asking) != listed.canonical:
            self._namespaces.pop(asking, None)
            asking.hello(listed.canonical, listed.replicas)
            self._namespaces[asking] = listed.canonical
        return asking


def _placement(placed: Sequence[tuple[ShardAddress, str, str]]) -> Placement:
    shards = [shard for shard, _, _ in placed]
    return Placement(
        [shard.name for shard in shards],
        [shard.weight for shard in shards],
        [node for _, node, _ in placed],
        [zone for _, _, zone in placed],
    )


def _batch_blocks(block_bytes: int, batch_bytes: int) -> int:
    return max(1, min(MAX_KEYS, batch_bytes // block_bytes))


def _turns(listed: Sequence[_Listed]) -> Iterator[tuple[_Listed, slice]]:
    """All blocks, the hottest of each namespace before the less hot of any."""
    waiting = [(some, 0) for some in listed if len(some.keys)]
    while waiting:
        later = []
        for some, at in waiting:
            end = at + _batch_blocks(some.block_bytes, TURN_BYTES)
            yield some, slice(at, end)
            if end < len(some.keys):
                later.append((some, end))
        waiting = later
