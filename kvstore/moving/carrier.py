"""One shard's blocks on their way to the shards that gain them: asked whether they are there, read, checked, sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore._cext import checksum_into
from kvstore.moving.connections import Connections
from kvstore.moving.planning import NOBODY, Targets
from kvstore.moving.progress import Progress
from kvstore.moving.receivers import Receivers, numbers_in
from kvstore.wire import MAX_KEYS, ShardAddress
from kvstore.wire.asking import AskError, Asking, KeyArray, Refused

log = logging.getLogger("kvstore.moving")

BATCH_BYTES: Final = 4 << 20  # in memory at a time, at least a block
ROOM_LOOK_S: Final = 1.0  # so often a shard is asked for its room

Block = tuple[memoryview, int]  # its bytes and their checksum


@dataclass(frozen=True)
class Listed:
    """Blocks of one namespace on one shard that others gain, the hottest first."""

    canonical: bytes
    replicas: int
    block_bytes: int
    keys: KeyArray
    targets: Targets

    @property
    def copies(self) -> int:
        """How many are to be made."""
        return int((self.targets != NOBODY).sum())


class Carrier:
    """Sends blocks of one shard to others, a namespace at a time. One thread.

    `gentle`: a shard that has no room left is sent nothing more, and before each batch it is asked again what it has.
    """

    def __init__(
        self,
        shard: ShardAddress,
        receivers: Receivers,
        connections: Connections,
        progress: Progress,
        gentle: bool,
    ) -> None:
        self._receivers = receivers
        self._connections = connections
        self._progress = progress
        self._gentle = gentle
        self._source = connections.open(shard)
        self._askings: dict[int, Asking] = {}
        self._namespaces: dict[Asking, bytes] = {}
        self._room: dict[int, tuple[float, int]] = {}  # of a target: until when it counts, and bytes

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        for asking in (self._source, *self._askings.values()):
            self._connections.close(asking)

    def carry(self, listed: Listed, rows: slice) -> None:
        """Move some blocks of a namespace. Raises `AskError` when the shard they are on fails."""
        began = time.monotonic()
        keys, targets = listed.keys[rows], listed.targets[rows].copy()
        self._strike_out(listed, keys, targets)
        self._progress.rest(began)
        wanted = np.flatnonzero((targets != NOBODY).any(axis=1))
        step = batch_blocks(listed.block_bytes, BATCH_BYTES)
        for at in range(0, len(wanted), step):
            if self._progress.over:
                return
            began = time.monotonic()
            some = wanted[at : at + step]
            self._carry_batch(listed, keys[some], targets[some])
            self._progress.rest(began)

    def _strike_out(self, listed: Listed, keys: KeyArray, targets: Targets) -> None:
        """Take out of `targets` what a shard has already, and shards that are full. Ends early when it is over."""
        for target in numbers_in(targets):
            if self._progress.over:
                return
            if not self._receivers.is_full(target):
                self._strike_out_present(listed, keys, targets, target)
                lacking = int((targets == target).sum())
                if not self._gentle or not lacking or self._has_room(listed, target, lacking):
                    continue
            targets[targets == target] = NOBODY

    def _strike_out_present(self, listed: Listed, keys: KeyArray, targets: Targets, target: int) -> None:
        """What a shard has is not sent to it; one that does not answer is sent nothing."""
        gained = np.argwhere(targets == target)
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                present = asking.contains(keys[gained[:, 0]])
            except AskError as error:
                self._receivers.set_failed(target, listed.canonical, error)
            else:
                targets[tuple(gained[present].T)] = NOBODY
                self._receivers.settle(target, listed.canonical, keys[gained[present][:, 0]])
                self._progress.count(present=int(present.sum()))
                return
        targets[tuple(gained.T)] = NOBODY
        if not self._progress.over:  # otherwise cut short: nothing is known of these
            self._progress.count(failed=len(gained))

    def _has_room(self, listed: Listed, target: int, blocks: int) -> bool:
        """Whether a shard takes a batch of these blocks without evicting; if not, it is full from now on.

        It is asked when its last answer is old, or when so much was sent since that this matters.
        """
        needed_bytes = listed.block_bytes * min(blocks, batch_blocks(listed.block_bytes, BATCH_BYTES))
        valid_until, room_bytes = self._room.get(target, (0.0, 0))
        if room_bytes >= needed_bytes and time.monotonic() < valid_until:
            return True
        asking = self._asking(listed, target)
        if asking is None:
            return True  # it failed, which is counted where blocks are sent
        try:
            room_bytes = asking.info().room_bytes
        except AskError as error:
            self._receivers.set_failed(target, listed.canonical, error)
            return True
        self._room[target] = time.monotonic() + ROOM_LOOK_S, room_bytes
        if room_bytes < needed_bytes:
            self._receivers.set_full(target)
        return room_bytes >= needed_bytes

    def _carry_batch(self, listed: Listed, keys: KeyArray, targets: Targets) -> None:
        if self._gentle:  # meanwhile others sent some of it, too
            self._strike_out(listed, keys, targets)
            wanted = (targets != NOBODY).any(axis=1)
            keys, targets = keys[wanted], targets[wanted]
            if not len(keys) or self._progress.over:
                return
        blocks = self._read(listed, keys)
        there = np.array([block is not None for block in blocks])
        self._progress.count(failed=int((targets[~there] != NOBODY).sum()))
        for target in numbers_in(targets):
            rows = np.flatnonzero(there & (targets == target).any(axis=1))
            if self._progress.over:
                return
            if len(rows):
                self._set(listed, target, keys[rows], [block for row in rows if (block := blocks[row])])

    def _read(self, listed: Listed, keys: KeyArray) -> list[Block | None]:
        """The blocks, None for those that are gone or damaged."""
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
        return blocks

    def _set(self, listed: Listed, target: int, keys: KeyArray, blocks: Sequence[Block]) -> None:
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                reply = asking.set(keys, [view for view, _ in blocks], np.array([checksum for _, checksum in blocks]))
            except AskError as error:
                self._receivers.set_failed(target, listed.canonical, error)
            else:
                if not reply.error:  # otherwise it does not say which: the next mover asks
                    self._receivers.settle(target, listed.canonical, keys)
                self._progress.count(reply.created, reply.existed, reply.error)
                valid_until, room_bytes = self._room.get(target, (0.0, 0))
                self._room[target] = valid_until, room_bytes - reply.created * listed.block_bytes
                return
        if not self._progress.over:
            self._progress.count(failed=len(keys))

    # ---- connections -----------------------------------------------------------------------------------------------

    def _asking(self, listed: Listed, target: int) -> Asking | None:
        """A connection to a shard in a namespace; None when it failed, now or before."""
        if self._receivers.has_failed(target, listed.canonical):
            return None
        try:
            if target not in self._askings:
                self._askings[target] = self._connections.open(self._receivers.shards[target])
            return self._use(self._askings[target], listed)
        except AskError as error:
            self._receivers.set_failed(target, listed.canonical, error)
            return None

    def _use(self, asking: Asking, listed: Listed) -> Asking:
        """The connection, in a namespace; its next call ends in time."""
        asking.timeout_s = self._progress.call_s
        if self._namespaces.get(asking) != listed.canonical:
            self._namespaces.pop(asking, None)
            asking.hello(listed.canonical, listed.replicas)
            self._namespaces[asking] = listed.canonical
        return asking


def batch_blocks(block_bytes: int, batch_bytes: int) -> int:
    """How many blocks of this size one batch is."""
    return max(1, min(MAX_KEYS, batch_bytes // block_bytes))
