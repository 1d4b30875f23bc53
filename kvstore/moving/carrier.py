"""Copies blocks of one shard to the shards that gain them. It asks those shards which of the blocks they have, and then
reads, checks and sends the others.

A `Mover` decides which blocks go where; a `Carrier` does the transfer, in batches of `CARRIED_BYTES`. `Receivers`,
which all carriers of a mover share, records the failed and the full shards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore._cext import checksum_into
from kvstore.moving.connections import Connections
from kvstore.moving.planning import NO_SHARD, Targets
from kvstore.moving.progress import MoveProgress
from kvstore.moving.receivers import Receivers, numbers_in
from kvstore.wire import MAX_FRAME_BLOCKS, ShardAddress, decode_namespace
from kvstore.wire.attributes import Attributes
from kvstore.wire.queries import KeyArray, Refused, ShardQueries, ShardQueryError

log = logging.getLogger("kvstore.moving")

CARRIED_BYTES: Final = 4 << 20  # the most bytes in memory at a time, but at least one block
ROOM_LOOK_S: Final = 1.0  # how long a shard's answer about its room is trusted


class Block(NamedTuple):
    """A block that is being moved."""

    view: memoryview
    checksum: int
    attributes: Attributes  # one entry


@dataclass(frozen=True)
class Listed:
    """The blocks of one namespace on one shard that other shards gain, the hottest first.

    `keys`: an array (n, key_bytes).
    `targets`: an array (n, copies), with row i for key i.
    `before`: an array (n, copies, key_bytes), with the key of the nearest earlier block in the chain that the same
    shard gains. If there is none, it is the block's own key.
    """

    canonical: bytes
    replicas: int
    block_bytes: int
    keys: KeyArray
    targets: Targets
    before: npt.NDArray[np.uint8]

    @property
    def copies(self) -> int:
        """The number of copies to make."""
        return int((self.targets != NO_SHARD).sum())


class Carrier:
    """Sends blocks of one shard to others, one namespace at a time. Only one thread may use it, and every call blocks.

    `gentle`: send no more blocks to a shard without room, and ask each shard before each batch which of the blocks it
    has.
    """

    def __init__(
        self,
        shard: ShardAddress,
        receivers: Receivers,
        connections: Connections,
        progress: MoveProgress,
        gentle: bool,
    ) -> None:
        self._receivers = receivers
        self._connections = connections
        self._progress = progress
        self._gentle = gentle
        self._source = connections.open(shard)
        self._askings: dict[int, ShardQueries] = {}
        self._namespaces: dict[ShardQueries, bytes] = {}
        self._room: dict[int, tuple[float, int]] = {}  # by target: until when its answer is used, and its room in bytes

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        for asking in (self._source, *self._askings.values()):
            self._connections.close(asking)

    def carry(self, listed: Listed, rows: slice) -> None:
        """Move the blocks at `rows` of a namespace. Raises `ShardQueryError` when the source shard fails."""
        began, failures = time.monotonic(), self._receivers.failures
        keys, targets, before = listed.keys[rows], listed.targets[rows].copy(), listed.before[rows]
        self._strike_out(listed, keys, targets)
        self._rest(began, failures)
        wanted = np.flatnonzero((targets != NO_SHARD).any(axis=1))
        step = batch_blocks(listed.block_bytes, CARRIED_BYTES, MAX_FRAME_BLOCKS)
        for at in range(0, len(wanted), step):
            if self._progress.over:
                return
            began, failures = time.monotonic(), self._receivers.failures
            some = wanted[at : at + step]
            self._carry_batch(listed, keys[some], targets[some], before[some])
            self._rest(began, failures)

    def _rest(self, began: float, failures: int) -> None:
        """Pause after a piece of work, unless a shard failed during it, because then the thread only waited for an
        answer."""
        if self._receivers.failures == failures:
            self._progress.rest(began)

    def _strike_out(self, listed: Listed, keys: KeyArray, targets: Targets) -> None:
        """Remove from `targets` the copies that a shard already has, and full shards. Return early if the mover
        must end."""
        for target in numbers_in(targets):
            if self._progress.over:
                return
            if not self._receivers.is_full(target):
                self._strike_out_present(listed, keys, targets, target)
                lacking = int((targets == target).sum())
                if not self._gentle or not lacking or self._has_room(listed, target, lacking):
                    continue
            targets[targets == target] = NO_SHARD

    def _strike_out_present(self, listed: Listed, keys: KeyArray, targets: Targets, target: int) -> None:
        """Remove from `targets` the copies that shard `target` already has, or all copies for it if it does not
        answer."""
        gained = np.argwhere(targets == target)
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                present = asking.contains(keys[gained[:, 0]])
            except ShardQueryError as error:
                self._receivers.set_failed(target, listed.canonical, error)
            else:
                targets[tuple(gained[present].T)] = NO_SHARD
                self._receivers.settle(target, listed.canonical, keys[gained[present][:, 0]])
                self._progress.count(present=int(present.sum()))
                return
        targets[tuple(gained.T)] = NO_SHARD
        if not self._progress.over:  # otherwise the call was interrupted, and these copies did not fail
            self._progress.count(failed=len(gained))

    def _has_room(self, listed: Listed, target: int, blocks: int) -> bool:
        """Return whether a shard can take a batch of these blocks without an eviction. If not, the shard counts as full
        from now on.

        The shard is asked only if its last answer is old, or if the blocks sent since then have used up the room.
        """
        needed_bytes = listed.block_bytes * min(
            blocks, batch_blocks(listed.block_bytes, CARRIED_BYTES, MAX_FRAME_BLOCKS)
        )
        valid_until, room_bytes = self._room.get(target, (0.0, 0))
        if room_bytes >= needed_bytes and time.monotonic() < valid_until:
            return True
        asking = self._asking(listed, target)
        if asking is None:
            return True  # the shard failed, so its copies count as failed when they are sent
        try:
            room_bytes = asking.info().room_bytes
        except ShardQueryError as error:
            self._receivers.set_failed(target, listed.canonical, error)
            return True
        self._room[target] = time.monotonic() + ROOM_LOOK_S, room_bytes
        if room_bytes < needed_bytes:
            self._receivers.set_full(target)
        return room_bytes >= needed_bytes

    def _carry_batch(self, listed: Listed, keys: KeyArray, targets: Targets, before: npt.NDArray[np.uint8]) -> None:
        if self._gentle:  # other senders may have sent some of these blocks meanwhile
            self._strike_out(listed, keys, targets)
            wanted = (targets != NO_SHARD).any(axis=1)
            keys, targets, before = keys[wanted], targets[wanted], before[wanted]
            if not len(keys) or self._progress.over:
                return
        generation = self._generation(listed)
        blocks = self._read(listed, keys)
        there = np.array([block is not None for block in blocks])
        self._progress.count(failed=int((targets[~there] != NO_SHARD).sum()))
        for target in numbers_in(targets):
            rows, copies = np.nonzero((targets == target) & there[:, np.newaxis])
            if self._progress.over:
                return
            if len(rows):
                sent = [block for row in rows if (block := blocks[row])]
                attributes = np.concatenate([block.attributes for block in sent])
                attributes["before"] = before[rows, copies]
                self._set(listed, target, keys[rows], sent, attributes, generation)

    def _generation(self, listed: Listed) -> int:
        """Return the current generation of a namespace at the source shard. Blocks that are read later have this
        generation or a higher one."""
        source = self._use(self._source, listed)
        return source.hello(listed.canonical, listed.replicas).generation

    def _read(self, listed: Listed, keys: KeyArray) -> list[Block | None]:
        """Read blocks from the source shard and check them. The list has None for a block that is gone or damaged."""
        source = self._use(self._source, listed)
        opaque = decode_namespace(listed.canonical).opaque_sums  # if so, only clients with the secret can check blocks
        blocks: list[Block | None] = [None] * len(keys)
        damaged = 0
        try:
            for positions, sums, attributes, memory in source.get(keys):
                views = [memory[at : at + listed.block_bytes] for at in range(0, len(memory), listed.block_bytes)]
                found = sums
                if not opaque:
                    found = np.empty(len(views), dtype=np.uint64)
                    checksum_into(views, found)
                damaged += int((found != sums).sum())
                for row, (position, view) in enumerate(zip(positions, views, strict=True)):
                    if found[row] == sums[row] and not attributes["reads"][row]:  # transient blocks are not moved
                        blocks[position] = Block(view, sums[row], attributes[row : row + 1])
        except Refused as error:
            log.warning("moving: %d block(s) cannot be read: %s", len(keys), error)
        if damaged:
            log.error("moving: %d block(s) are damaged and are not moved", damaged)
        return blocks

    def _set(
        self,
        listed: Listed,
        target: int,
        keys: KeyArray,
        blocks: Sequence[Block],
        attributes: Attributes,
        generation: int,
    ) -> None:
        asking = self._asking(listed, target)
        if asking is not None:
            try:
                sums = np.array([block.checksum for block in blocks])
                reply = asking.set(keys, [block.view for block in blocks], sums, attributes, generation)
            except ShardQueryError as error:
                self._receivers.set_failed(target, listed.canonical, error)
            else:
                if not reply.error:  # with errors, it is not known which blocks failed, so the next mover asks
                    self._receivers.settle(target, listed.canonical, keys)
                self._progress.count(reply.created, reply.existed, reply.error)
                valid_until, room_bytes = self._room.get(target, (0.0, 0))
                self._room[target] = valid_until, room_bytes - reply.created * listed.block_bytes
                return
        if not self._progress.over:
            self._progress.count(failed=len(keys))

    # ---- connections -----------------------------------------------------------------------------------------------

    def _asking(self, listed: Listed, target: int) -> ShardQueries | None:
        """Return a connection to shard `target` in a namespace, or None if the shard fails now or has failed before."""
        if self._receivers.has_failed(target, listed.canonical):
            return None
        try:
            if target not in self._askings:
                self._askings[target] = self._connections.open(self._receivers.shards[target])
            return self._use(self._askings[target], listed)
        except ShardQueryError as error:
            self._receivers.set_failed(target, listed.canonical, error)
            return None

    def _use(self, asking: ShardQueries, listed: Listed) -> ShardQueries:
        """Switch a connection to a namespace, limit its next call to the time left, and return it."""
        asking.timeout_s = self._progress.call_s
        if self._namespaces.get(asking) != listed.canonical:
            self._namespaces.pop(asking, None)
            asking.hello(listed.canonical, listed.replicas)
            self._namespaces[asking] = listed.canonical
        return asking


def batch_blocks(block_bytes: int, batch_bytes: int, most: int) -> int:
    """Return the number of blocks in one batch of up to `batch_bytes`. It is at least 1 and at most `most`."""
    return max(1, min(most, batch_bytes // block_bytes))
