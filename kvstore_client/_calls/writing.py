"""Changing blocks: `set` on all replicas at once, `delete` wherever a block may be.

Copies: source -> kernel -> slot, once for each replica. A deferred set ends when one replica of each block has taken
it; the others' answers are read when they come. One that is not deferred ends when all have, and a block counts as
stored only then: it survives the death of all replicas but one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import Outcome
from kvstore_client._calls.batches import chunks, keyed_message, milliseconds, set_message, take
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.reading import Reader
from kvstore_client._calls.repairs import Repairs
from kvstore_client._links.buffers import BlockSource
from kvstore_client._links.call import Call, Message
from kvstore_client._links.view import NOBODY, Numbers, View
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError, ProtocolError
from kvstore_client.keys import KeyArray
from kvstore_client.results import SetResult

SET_BYTES: Final = 16 << 20  # payload of one SET: longer batches are several

_UNKNOWN: Final = 255
# What a block's replicas say, from what counts least to what counts most; what ranks above a refusal is a copy.
_OUTCOMES: Final = np.array([_UNKNOWN, Outcome.ERROR, Outcome.CREATED, Outcome.EXISTED, Outcome.FORCED], dtype=np.uint8)
_REFUSED: Final = 1
_RANKS: Final = np.zeros(256, dtype=np.uint8)
_RANKS[_OUTCOMES[_REFUSED:]] = np.arange(_REFUSED, len(_OUTCOMES))


class Writer:
    """Sets and deletes blocks of one namespace. Thread-safe."""

    def __init__(self, exchange: Exchange, block_bytes: int, replicas: int, repairs: Repairs, reader: Reader) -> None:
        self._exchange = exchange
        self._reader = reader
        self._repairs = repairs
        self._core = exchange.core
        self._replicas = replicas
        self._per_request = max(1, min(wire.MAX_KEYS, SET_BYTES // block_bytes))

    def set(
        self,
        packed: KeyArray,
        unique: Numbers,
        source: BlockSource,
        options: Options,
    ) -> SetResult:
        """Store the blocks at positions `unique`, those of the keys without repetition."""
        deadline = time.monotonic() + options.timeout_s
        if options.force:
            self._repairs.cancel(packed, options.timeout_s / 2)
        outcomes = np.full(len(packed), _UNKNOWN, dtype=np.uint8)
        left = unique
        error: KVStoreError | None = None
        while True:
            view = self._core.view
            left, error = self._set_under(view, packed, left, source, options, deadline, outcomes)
            if options.force:
                self._delete_elsewhere(view, packed, unique, deadline)
            if not len(left) or self._core.view is view or time.monotonic() >= deadline:
                break  # Otherwise the shards that failed have left: their blocks have other owners now
        self._core.stats.unanswered += len(left)
        if error is not None and len(left) and not (options.fail_open and isinstance(error, TRANSPORT_ERRORS)):
            raise error
        counts = np.bincount(outcomes[unique], minlength=_UNKNOWN + 1)
        return SetResult(
            total=len(packed),
            created=int(counts[Outcome.CREATED]),
            existed=int(counts[Outcome.EXISTED]),
            forced=int(counts[Outcome.FORCED]),
            duplicated=len(packed) - len(unique),
            error=int(counts[Outcome.ERROR] + counts[_UNKNOWN]),
        )

    def _set_under(
        self,
        view: View,
        packed: KeyArray,
        positions: Numbers,
        source: BlockSource,
        options: Options,
        deadline: float,
        outcomes: npt.NDArray[np.uint8],
    ) -> tuple[Numbers, KVStoreError | None]:
        """Set under one view. -> the positions that were not stored because shards failed, and why."""
        if not view.links:
            return positions, self._core.no_shards()
        owners = view.owners(take(packed, positions), self._replicas)
        replicas = owners.shape[1]
        deadline_ms, force, priority, ttl_s = options.deadline_ms, options.force, options.priority, options.ttl_s

        def message(call: Call) -> Message:
            keys = take(packed, call.positions)
            request = wire.Set(
                call.id, deadline_ms, len(keys), keys.shape[1], force, priority, outcomes=True, ttl_s=ttl_s
            )
            return set_message(request, keys, call.positions, source)

        calls = [
            Call(link, self._core.next_id(), some, message)
            for link, mine in view.split(owners.reshape(-1), positions.repeat(replicas))
            for some in chunks(mine, self._per_request)
        ]
        tally = _Tally(calls, len(packed), 1 if options.deferred else replicas)
        self._exchange.run(calls, deadline, enough=tally.enough if options.deferred and replicas > 1 else None)
        return tally.result(positions, outcomes)

    def delete(self, packed: KeyArray, options: Options) -> int:
        """Remove blocks, of keys without repetition, from every shard that may have them. -> how many there were."""
        deadline = time.monotonic() + options.timeout_s
        self._repairs.cancel(packed, options.timeout_s / 2)
        view = self._core.view
        if not view.links:
            if options.fail_open:
                return 0
            raise self._core.no_shards()
        readers = view.readers(packed, self._replicas)
        several = readers.shape[1] > 1
        # With several copies of a block, the replies do not tell how many blocks there were.
        present = 0
        if several:
            present = int(self._reader.contains(packed, options.within((deadline - time.monotonic()) / 2)).sum())
        calls = self._delete_from(view, packed, np.arange(len(packed)), readers, deadline)
        replies = [outcome(call, wire.DeleteReply, options.fail_open) for call in calls]
        return present if several else sum(reply.deleted for reply in replies if reply is not None)

    def _delete_elsewhere(self, view: View, packed: KeyArray, positions: Numbers, deadline: float) -> None:
        """While nodes come and go: what was replaced must not be found at those who owned it before. Best effort, as
        is anything that is asked of a node that leaves."""
        if not view.changing:
            return
        readers = view.readers(packed[positions], self._replicas)
        owners = view.owners(packed[positions], self._replicas)
        readers[(readers[:, :, None] == owners[:, None, :]).any(axis=2)] = NOBODY
        self._delete_from(view, packed, positions, readers, deadline)

    def _delete_from(
        self, view: View, packed: KeyArray, positions: Numbers, readers: Numbers, deadline: float
    ) -> list[Call]:
        """`readers[i]`: the links from which the block at `positions[i]` is deleted."""
        deadline_ms = milliseconds(max(0.001, deadline - time.monotonic()))
        numbers = readers.reshape(-1)
        asked = numbers != NOBODY

        def message(call: Call) -> Message:
            keys = take(packed, call.positions)
            return keyed_message(wire.Delete(call.id, deadline_ms, len(keys), keys.shape[1]), keys)

        calls = [
            Call(link, self._core.next_id(), some, message)
            for link, mine in view.split(numbers[asked], positions.repeat(readers.shape[1])[asked])
            for some in chunks(mine, wire.MAX_KEYS)
        ]
        self._exchange.run(calls, deadline)
        return calls


class _Tally:
    """What the replicas of each block said so far."""

    def __init__(self, calls: Sequence[Call], count: int, needed: int) -> None:
        self._waiting = list(calls)
        self._needed = needed
        self._copies = np.zeros(count, dtype=np.uint8)
        self._said = np.zeros(count, dtype=np.uint8)  # the highest rank of what was said
        self._failed: list[Numbers] = []
        self._error: KVStoreError | None = None

    def enough(self) -> bool:
        """Whether every block has as many copies as are needed, or cannot get them."""
        self._count()
        return all((self._copies[call.positions] >= self._needed).all() for call in self._waiting)

    def _count(self) -> None:
        waiting = []
        for call in self._waiting:
            if not call.done or call.retry:  # it will be sent once more
                waiting.append(call)
                continue
            try:
                reply = outcome(call, wire.SetReply, fail_open=False)
                assert reply is not None
                told = _outcomes(call, reply)
            except KVStoreError as error:
                if self._error is None or not isinstance(error, TRANSPORT_ERRORS):
                    self._error = error
                self._failed.append(call.positions)
                continue
            ranks = _RANKS[told]
            self._said[call.positions] = np.maximum(self._said[call.positions], ranks)
            self._copies[call.positions] += ranks > _REFUSED
        self._waiting = waiting

    def result(self, positions: Numbers, outcomes: npt.NDArray[np.uint8]) -> tuple[Numbers, KVStoreError | None]:
        """Fill in the outcomes. -> the positions that shards failed to store."""
        self._count()
        stored = self._copies[positions] >= self._needed
        said = self._said[positions]
        outcomes[positions] = np.where(stored | (said <= _REFUSED), _OUTCOMES[said], _UNKNOWN)
        if not self._failed:
            return positions[:0], None
        failed = np.concatenate(self._failed)
        lacking = np.zeros(len(self._copies), dtype=np.bool_)
        lacking[failed] = True
        lacking[positions[stored]] = False
        return np.flatnonzero(lacking), self._error


def _outcomes(call: Call, reply: wire.SetReply) -> npt.NDArray[np.uint8]:
    """One `Outcome` a block. A server that does not tell them one by one tells how many there were of each."""
    if reply.outcomes:
        told = np.frombuffer(reply.outcomes, dtype=np.uint8)
    else:
        counts = (reply.created, reply.existed, reply.forced, reply.duplicated, reply.error)
        told = np.arange(len(counts), dtype=np.uint8).repeat(np.clip(counts, 0, call.count))
    if len(told) != call.count:
        raise ProtocolError(f"{call.link}: it tells what became of {len(told)} blocks: expected {call.count}")
    return told
