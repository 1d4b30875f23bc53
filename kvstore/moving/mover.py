"""Moving a node's blocks to the shards that gain them by a change of members, the hottest first.

A node that leaves moves what others own without it; nodes that stay copy to one that joins what it owns from then on.
Each of the node's shards lists its keys by recency, and the blocks that another shard gains go there: what it has
already is not sent, what arrives damaged is not moved. For each of the node's shards there is a thread, with
connections of its own and one batch of blocks in memory.

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

from kvstore._cext import checksum_into
from kvstore.moving.planning import NOBODY, Gains, Plan, Ranks, Targets
from kvstore.moving.settled import Holder, Settled
from kvstore.store.namespaces import INDEX_OVERHEAD_BYTES
from kvstore.wire import (
    MAX_HOTTEST_BYTES,
    MAX_KEYS,
    MIN_KEY_BYTES,
    NamespaceInfo,
    ShardAddress,
    ShardInfo,
)
from kvstore.wire.asking import AskError, Asking, Keys, Refused

log = logging.getLogger("kvstore.moving")

BATCH_BYTES: Final = 4 << 20  # in memory at a time, at least a block
TURN_BYTES: Final = 64 << 20  # of one namespace, before the next one has its turn
CONNECT_S: Final = 3.0  # a shard that takes longer is left out; `stop` does not interrupt it
CALL_S: Final = 10.0  # a shard that takes longer is left out, too
LIST_KEYS: Final = MAX_HOTTEST_BYTES // MIN_KEY_BYTES  # as many as fit an answer
REST_RATIO: Final = 3.0  # who is gentle rests so many times as long as it worked: it works a quarter of the time
GENTLE_THREADS: Final = 8  # of all senders together; where there are more, each rests longer: they fill the same nodes
ROOM_LOOK_S: Final = 1.0  # so often a gentle mover asks a target for its room

Block = tuple[memoryview, int]  # its bytes and their checksum


class MoveReport(msgspec.Struct, frozen=True):
    """What became of the copies that were to be made: blocks, counted once for each shard that gains them. Those that
    are in none of the others were not come to, or a full shard was spared them."""

    total: int
    moved: int
    present: int  # the other shard had them
    failed: int  # gone or damaged here, or not taken there

    @property
    def done(self) -> int:
        """Nothing more is to be done for these."""
        return self.moved + self.present + self.failed


@dataclass(frozen=True)
class _Listed:
    """Blocks of one namespace on one shard that others gain, the hottest first."""

    canonical: bytes
    replicas: int
    block_bytes: int
    keys: Keys
    targets: Targets

    @property
    def copies(self) -> int:
        """How many are to be made."""
        return int((self.targets != NOBODY).sum())


class Mover:
    """Carries out a plan for the blocks of `node`, one of its senders, whose shards are reached at `shards`.

    `shards` must not be empty. `progress` is called with what is done so far, from any of the mover's threads, one
    at a time. `settled`: copies that count as done before, not in its report; it adds those that it makes or finds.
    """

    def __init__(
        self,
        shards: Sequence[ShardAddress],
        node: str,
        plan: Plan,
        progress: Callable[[MoveReport], None],
        settled: Settled | None = None,
    ) -> None:
        self.plan = plan
        self.deadline = 0.0
        self._shards = shards
        self._progress = progress
        self._gains = Gains(node, plan) if plan.after else None  # nobody is left
        self.targets = self._gains.targets if self._gains is not None else []
        self._settled = settled
        self._instances = [member.instance for member in plan.after for _ in member.shards]
        self._stop = threading.Event()
        self._lock = threading.RLock()  # who is told of progress may call `stop`
        self._open: set[Asking] = set()
        self._left_out: set[tuple[int, bytes | None]] = set()  # targets; with a namespace: for that one only
        self._full: set[int] = set()  # targets that are spared
        self._report = MoveReport(0, 0, 0, 0)

    def run(self, deadline: float) -> MoveReport:
        """Move until all is moved, the monotonic time `deadline` has come, or `stop` is called. To be called once."""
        self.deadline = deadline
        if self._gains is not None:
            with ThreadPoolExecutor(len(self._shards), "kvstore-moving") as pool:
                listed = list(pool.map(self._list, self._shards))
                self._report = MoveReport(sum(some.copies for each in listed for some in each), 0, 0, 0)
                self.count()
                list(pool.map(self._move, self._shards, listed))
        return self._report

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
        """A connection that `stop` interrupts; to be given to `disconnect`. Raises `AskError`, also when it is over."""
        if self.over:
            raise AskError("it is over")
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
            so_far = self._report
            self._report = MoveReport(
                so_far.total, so_far.moved + moved, so_far.present + present, so_far.failed + failed
            )
            self._progress(self._report)

    def rest(self, began: float) -> None:
        """A piece of work that began then is done: whoever is gentle rests now. Ends when `stop` is called."""
        if self.plan.gentle:
            now = time.monotonic()
            threads = len(self.plan.senders) * len(self._shards)
            rest_s = REST_RATIO * max(1.0, threads / GENTLE_THREADS) * (now - began)
            self._stop.wait(max(0.0, min(rest_s, self.deadline - now)))

    def is_full(self, target: int) -> bool:
        """Whether a target is spared from now on."""
        return target in self._full

    def spare(self, target: int) -> None:
        """The target has no room."""
        with self._lock:
            new = target not in self._full
            self._full.add(target)
        if new:
            log.info("moving: shard %s is full: nothing more is copied to it", self.targets[target].name)

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

    def settle(self, target: int, canonical: bytes, keys: Keys) -> None:
        """The target has these."""
        if self._settled is not None and len(keys):
            self._settled.add(self._holder(target, canonical), keys)

    def _strike_out_settled(self, canonical: bytes, keys: Keys, targets: Targets) -> None:
        if self._settled is not None:
            for target in _distinct(targets):
                gained = np.argwhere(targets == target)
                there = self._settled.among(self._holder(target, canonical), keys[gained[:, 0]])
                targets[tuple(gained[there].T)] = NOBODY

    def _holder(self, target: int, canonical: bytes) -> Holder:
        return self._instances[target], self.targets[target].name, canonical

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
        assert self._gains is not None
        found: list[tuple[Keys, Targets, Ranks]] = []
        skip = 0
        while not self.over:
            began = time.monotonic()
            asking.timeout_s = self.call_s
            some, total = asking.hottest(skip, LIST_KEYS)
            if not len(some):
                break
            targets, ranks = self._gains.of(some, namespace.replicas)
            self._strike_out_settled(canonical, some, targets)
            wanted = (targets != NOBODY).any(axis=1)
            found.append((some[wanted], targets[wanted], ranks[wanted]))
            self.rest(began)
            skip += len(some)
            if skip >= total:
                break
        if not found:
            none = np.empty(0, dtype=np.intp)
            found = [(np.empty((0, MIN_KEY_BYTES), dtype=np.uint8), none.reshape(0, 1), none)]
        keys, gaining, ranking = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(ranking, kind="stable")
        return _Listed(canonical, namespace.replicas, namespace.block_bytes, keys[order], gaining[order])

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
        self._room: dict[int, tuple[float, int]] = {}  # of a target: until when it counts, and bytes

    def __enter__(self) -> _Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        for asking in (self._source, *self._askings.values()):
            self._mover.disconnect(asking)

    def carry(self, listed: _Listed, rows: slice) -> None:
        """Move some blocks of a namespace. Raises `AskError` when the shard they are on fails."""
        began = time.monotonic()
        keys, targets = listed.keys[rows], listed.targets[rows].copy()
        self._strike_out(listed, keys, targets)
        self._mover.rest(began)
        wanted = np.flatnonzero((targets != NOBODY).any(axis=1))
        step = _batch_blocks(listed.block_bytes, BATCH_BYTES)
        for at in range(0, len(wanted), step):
            if self._mover.over:
                return
            began = time.monotonic()
            some = wanted[at : at + step]
            self._carry_batch(listed, keys[some], targets[some])
            self._mover.rest(began)

    def _strike_out(self, listed: _Listed, keys: Keys, targets: Targets) -> None:
        """Nothing is sent to a shard that has it or is to be spared. Ends early when it is over."""
        for target in _distinct(targets):
            if self._mover.over:
                return
            if not self._mover.is_full(target):
                self._strike_out_present(listed, keys, targets, target)
                lacking = int((targets == target).sum())
                if not self._mover.plan.gentle or not lacking or self._has_room(listed, target, lacking):
                    continue
            targets[targets == target] = NOBODY

    def _has_room(self, listed: _Listed, target: int, blocks: int) -> bool:
        """Whether a target takes a batch of these blocks without evicting; if not, it is spared from now on.

        It is asked when its last answer is old, or when so much was sent since that this matters.
        """
        mover = self._mover
        needed_bytes = listed.block_bytes * min(blocks, _batch_blocks(listed.block_bytes, BATCH_BYTES))
        valid_until, room_bytes = self._room.get(target, (0.0, 0))
        if room_bytes >= needed_bytes and time.monotonic() < valid_until:
            return True
        asking = self._asking(listed, target)
        if asking is None:
            return True  # it failed, which is counted where blocks are sent
        try:
            room_bytes = _room_bytes(asking.info())
        except AskError as error:
            mover.leave_out(target, listed.canonical, error)
            return True
        self._room[target] = time.monotonic() + ROOM_LOOK_S, room_bytes
        if room_bytes < needed_bytes:
            mover.spare(target)
        return room_bytes >= needed_bytes

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
                mover.settle(target, listed.canonical, keys[gained[present][:, 0]])
                mover.count(present=int(present.sum()))
                return
        targets[tuple(gained.T)] = NOBODY
        if not mover.over:  # otherwise cut short: nothing is known of these
            mover.count(failed=len(gained))

    def _carry_batch(self, listed: _Listed, keys: Keys, targets: Targets) -> None:
        if self._mover.plan.gentle:  # meanwhile others sent some of it, too
            self._strike_out(listed, keys, targets)
            wanted = (targets != NOBODY).any(axis=1)
            keys, targets = keys[wanted], targets[wanted]
            if not len(keys) or self._mover.over:
                return
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
        for target in _distinct(targets):
            rows = np.flatnonzero(there & (targets == target).any(axis=1))
            if self._mover.over:
                return
            if len(rows):
                self._set(listed, target, keys[rows], [block for row in rows if (block := blocks[row])])

    def _set(self, listed: _Listed, target: int, keys: Keys, blocks: Sequence[Block]) -> None:
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                reply = asking.set(keys, [view for view, _ in blocks], np.array([checksum for _, checksum in blocks]))
            except AskError as error:
                self._mover.leave_out(target, listed.canonical, error)
            else:
                if not reply.error:  # otherwise it does not say which: the next mover asks
                    self._mover.settle(target, listed.canonical, keys)
                self._mover.count(reply.created, reply.existed, reply.error)
                valid_until, room_bytes = self._room.get(target, (0.0, 0))
                self._room[target] = valid_until, room_bytes - reply.created * listed.block_bytes
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


def _room_bytes(shard: ShardInfo) -> int:
    """What a shard's memory takes before it evicts, in whole segments: its index counts, too, when it is large."""
    index_bytes = max(0, shard.index_bytes - INDEX_OVERHEAD_BYTES)
    room_bytes = shard.memory_limit_bytes - shard.memory_used_bytes - index_bytes
    return min(room_bytes // shard.segment_bytes, shard.segments_free) * shard.segment_bytes


def _distinct(targets: Targets) -> list[int]:
    found: list[int] = np.unique(targets[targets != NOBODY]).tolist()
    return found


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
