"""Changing blocks: `set` on all replicas at once; `delete` and `expire` on every shard that may have a block.

Copies: source -> kernel -> slot, once for each replica. A deferred set ends when one replica of each block is stored;
the other replicas' answers are read when they come. A set that is not deferred counts a block as stored only when all
its replicas are stored. The block then survives the loss of all replicas but one. With fewer nodes than replicas, there
are fewer copies. `SetResult.copies` reports their number. With `min_copies`, too few copies are an error.

A transient block has one copy, at the first of its owners that can be reached.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import Outcome
from kvstore_client._calls.batches import milliseconds, set_message, staged_message, take
from kvstore_client._calls.chains import ChainFields, requests_of
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._calls.options import Options
from kvstore_client._calls.reading import Present, Reader
from kvstore_client._calls.repairs import Repairs
from kvstore_client._links.buffers import BlockSource
from kvstore_client._links.call import Call, Message, protocol_error
from kvstore_client._links.lanes import least_busy
from kvstore_client._links.link import Link
from kvstore_client._links.staging import SetAnswer, SharedStaging
from kvstore_client._links.view import NO_SHARD, Numbers, View
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError, ProtocolError, Timeout
from kvstore_client.keys import KeyArray
from kvstore_client.results import SetResult

if TYPE_CHECKING:
    from kvstore_client._links.block_mac import BatchMacs, BlockMac, SecretMissing

PENDING_PAUSE_S: Final = 0.02  # the pause before checking again whether another client has written a block
SET_BYTES: Final = 16 << 20  # the most payload of one SET; a larger batch becomes several SETs
LOCAL_SET_BYTES: Final = 64 << 20  # the same for a shard on this host, which gets only references
# No block of a SET can be read before all its blocks have arrived. So one SET should take at most this time at its
# link's recent speed. Readers that wait then get the first blocks while the others are still being sent.
SET_S: Final = 0.02
LEAST_SET_BYTES: Final = 256 << 10
MOST_PURGES: Final = 4  # after this many purges during one set, its blocks are refused
PACED_BYTES: Final = 256 << 10  # a link's speed is measured only with at least this payload

_UNKNOWN: Final = 255
_STALE: Final = 254  # refused because the namespace has been purged since the block was made
# The outcomes that replicas report, by rising rank. A block's highest rank counts. Ranks above that of a refusal mean
# that the replica has a copy.
_BY_RANK: Final = np.array(
    [_UNKNOWN, _STALE, Outcome.ERROR, Outcome.CREATED, Outcome.EXISTED, Outcome.FORCED], dtype=np.uint8
)
_STALE_RANK: Final = 1
_REFUSED_RANK: Final = 2
_RANKS: Final = np.zeros(256, dtype=np.uint8)
_RANKS[_BY_RANK[_REFUSED_RANK:]] = np.arange(_REFUSED_RANK, len(_BY_RANK))
_RANKS[Outcome.PENDING] = _RANKS[Outcome.EXISTED]
_PENDING: Final = int(Outcome.PENDING)


class Writer:
    """Sets and deletes blocks of one namespace. Thread-safe."""

    def __init__(
        self,
        exchange: Exchange,
        block_bytes: int,
        replicas: int,
        min_copies: int,
        repairs: Repairs,
        reader: Reader,
        mac: BlockMac | SecretMissing | None,
    ) -> None:
        self._exchange = exchange
        self._mac = mac
        self._reader = reader
        self._min_copies = min_copies
        self._repairs = repairs
        self._pool = exchange.pool
        self._replicas = replicas
        self._block_bytes = block_bytes
        self._paces: dict[str, float] = {}  # bytes/s by link name, for links that have carried `PACED_BYTES`

    def set(self, packed: KeyArray, unique: Numbers, source: BlockSource, options: Options) -> SetResult:
        """Store the blocks at positions `unique`, which are the first occurrences of all keys."""
        deadline = time.monotonic() + options.timeout_s
        macs = self._mac.batch(packed) if self._mac is not None else None
        if options.force:
            self._repairs.cancel(packed, options.timeout_s / 2)
        outcomes = np.full(len(packed), _UNKNOWN, dtype=np.uint8)
        copies = np.zeros(len(packed), dtype=np.uint8)
        evicted = 0
        others = self._replicas - 1 if options.reads else 0  # owners of transient blocks that can still be tried
        left = unique
        waited = unique[:0]  # the positions that other clients were writing at the last check
        error: KVStoreError | None = None
        # Without `generation`, the blocks count as made now, even if this client does not know of a purge yet.
        again = MOST_PURGES if options.generation is None else 0
        while True:
            view = self._pool.view
            left, pending, error, tally = self._set_under(
                view, packed, left, source, macs, options, deadline, outcomes, copies
            )
            evicted += tally.evicted if tally is not None else 0
            if tally is not None and len(stale := tally.stale(unique)):
                self._pool.generations.learn(tally.generation)
                if again:
                    left, again = np.union1d(left, stale), again - 1
                    continue
            if isinstance(error, Timeout) and np.isin(left, waited).all():
                error = None  # the deadline passed during a check, and others may still be writing
            waited = pending
            if options.force:
                self._delete_elsewhere(view, packed, unique, deadline)
            if time.monotonic() + (PENDING_PAUSE_S if len(pending) else 0.0) >= deadline:
                break
            if len(pending):  # other clients write these: wait until they are stored, or can be set
                time.sleep(PENDING_PAUSE_S)
            elif len(left) and others:
                others -= 1
            elif not len(left) or self._pool.view is view:
                break
            # Otherwise the view has changed, and blocks whose shards have left belong to other owners now.
            left = np.union1d(left, pending)
        self._pool.stats.unanswered += len(left)
        if error is not None and len(left) and not (options.fail_open and isinstance(error, TRANSPORT_ERRORS)):
            raise error
        counts = np.bincount(outcomes[unique], minlength=_UNKNOWN + 1)
        return SetResult(
            total=len(packed),
            created=int(counts[Outcome.CREATED]),
            existed=int(counts[Outcome.EXISTED]),
            forced=int(counts[Outcome.FORCED]),
            duplicated=len(packed) - len(unique),
            error=int(counts[Outcome.ERROR] + counts[_STALE] + counts[_UNKNOWN]),
            copies=int(copies[unique].min()),
            evicted=evicted,
            refused=int(counts[Outcome.ERROR] + counts[_STALE]),
            stale=int(counts[_STALE]),
        )

    def _set_under(
        self,
        view: View,
        packed: KeyArray,
        positions: Numbers,
        source: BlockSource,
        macs: BatchMacs | None,
        options: Options,
        deadline: float,
        outcomes: npt.NDArray[np.uint8],
        copies: npt.NDArray[np.uint8],
    ) -> tuple[Numbers, Numbers, KVStoreError | None, _Tally | None]:
        """Set blocks under one view. Return the positions that shards failed to store, the positions to wait for while
        other clients write them, the error, and the tally of the answers. The tally is None if there is no shard."""
        if not view.links:
            return positions, positions[:0], self._pool.no_shards(), None
        generation = self._pool.generations.known if options.generation is None else options.generation
        owners = view.owners(take(packed, positions), self._replicas)
        owners = _reachable(view, owners) if options.reads else owners
        replicas = owners.shape[1]
        split = view.split(owners.reshape(-1), positions.repeat(replicas))
        by_link = [(least_busy(link), mine) for link, mine in split]
        local = [link for link, _ in by_link if link.local and source.count]
        staged = {link: self._exchange.staging(link, source, deadline) for link in local}

        def message(part: ChainFields, call: Call) -> Message:
            keys = take(packed, call.positions)
            staging = staged.get(call.link)
            if staging is not call.link.staging or not isinstance(call.answer, SetAnswer):
                staging = None  # the call is sent again, over a connection without shared memory
            request = wire.Set(
                id=call.id,
                deadline_ms=options.deadline_ms,
                count=len(keys),
                key_bytes=keys.shape[1],
                force=options.force,
                priority=options.priority,
                outcomes=True,
                ttl_s=options.ttl_s,
                chained=not options.reads,
                parent=part.parent,
                end=part.end,
                position=part.position,
                call=part.call,
                offsets=part.offsets,
                references=staging is not None,
                reads=options.reads,
                generation=generation,
            )
            if staging is not None:
                return staged_message(request, keys, call.positions, source, staging, call, macs)
            return set_message(request, keys, call.positions, source, macs)

        calls = [
            Call(link, self._pool.next_id(), some, functools.partial(message, part), SetAnswer)
            for link, mine in by_link
            for some, part in requests_of(
                packed, positions, mine, options.chains, self._most(link, staged.get(link)), len(view.links) == 1
            )
        ]
        needed = 1 if options.reads else max(1 if options.deferred else replicas, self._min_copies)
        tally = _Tally(calls, len(packed), needed, waits=not options.deferred or needed > 1)
        began = time.monotonic()
        self._exchange.run(calls, deadline, enough=tally.enough if needed < replicas else None)
        taken_s = time.monotonic() - began
        for link, mine in by_link:
            if (nbytes := len(mine) * self._block_bytes) >= PACED_BYTES:
                pace = nbytes / taken_s
                self._paces[link.name] = (self._paces.get(link.name, pace) + pace) / 2
        return *tally.result(positions, outcomes, copies), tally

    def _most(self, link: Link, staging: SharedStaging | None) -> int:
        """Return the most keys that one SET on this link may have."""
        most_bytes = LOCAL_SET_BYTES
        if staging is None:
            pace = self._paces.get(link.name, math.inf)
            most_bytes = int(min(SET_BYTES, max(LEAST_SET_BYTES, pace * SET_S)))
        return max(1, min(wire.MAX_KEYS, most_bytes // self._block_bytes))

    def delete(self, packed: KeyArray, options: Options) -> int:
        """Remove blocks from every shard that may have them. Return how many there were. No key may be repeated."""
        deadline = time.monotonic() + options.timeout_s
        self._repairs.cancel(packed, options.timeout_s / 2)
        view = self._pool.view
        if not view.links:
            if options.fail_open:
                return 0
            raise self._pool.no_shards()
        readers = view.readers(packed, self._replicas)
        several = readers.shape[1] > 1
        # If a block may have several copies, the replies count copies and not blocks.
        present = 0
        if several:
            present = int(self._reader.contains(packed, options.within((deadline - time.monotonic()) / 2)).sum())
        calls = self._delete_from(view, packed, np.arange(len(packed)), readers, deadline)
        replies = [outcome(call, wire.DeleteReply, options.fail_open) for call in calls]
        return present if several else sum(reply.deleted for reply in replies if reply is not None)

    def _delete_elsewhere(self, view: View, packed: KeyArray, positions: Numbers, deadline: float) -> None:
        """While nodes join or drain, delete replaced blocks from their old owners, where readers could still find the
        old content. Failures are ignored, as for every request to a node that leaves."""
        if not view.changing:
            return
        readers = view.readers(packed[positions], self._replicas)
        owners = view.owners(packed[positions], self._replicas)
        readers[(readers[:, :, None] == owners[:, None, :]).any(axis=2)] = NO_SHARD
        self._delete_from(view, packed, positions, readers, deadline)

    def _delete_from(
        self, view: View, packed: KeyArray, positions: Numbers, readers: Numbers, deadline: float
    ) -> list[Call]:
        """Delete the block at `positions[i]` from the links `readers[i]`. Return the finished calls."""
        deadline_ms = milliseconds(max(0.001, deadline - time.monotonic()))

        def request(number: int, keys: int, key_bytes: int) -> wire.Delete:
            return wire.Delete(number, deadline_ms, keys, key_bytes)

        return self._tell(request, view, packed, positions, readers, deadline)

    def expire(self, packed: KeyArray, options: Options) -> Present:
        """Give blocks another time to live on every shard that may have them. Return which blocks were found."""
        deadline = time.monotonic() + options.timeout_s
        present = np.zeros(len(packed), dtype=np.bool_)
        view = self._pool.view
        if not view.links:
            if options.fail_open:
                return present
            raise self._pool.no_shards()

        def request(number: int, keys: int, key_bytes: int) -> wire.Expire:
            return wire.Expire(number, options.deadline_ms, keys, key_bytes, options.ttl_s)

        readers = view.readers(packed, self._replicas)
        for call in self._tell(request, view, packed, np.arange(len(packed)), readers, deadline):
            reply = outcome(call, wire.ExpireReply, options.fail_open)
            if reply is None:
                self._pool.stats.unanswered += call.count
            elif len(reply.present) != call.count:
                raise protocol_error(call.link, reply)
            else:
                present[call.positions] |= np.frombuffer(reply.present, dtype=np.uint8) != 0
        return present

    def _tell(
        self,
        request: Callable[[int, int, int], wire.KeyedRequest],
        view: View,
        packed: KeyArray,
        positions: Numbers,
        readers: Numbers,
        deadline: float,
    ) -> list[Call]:
        """Send each of the links `readers[i]` a request about the block at `positions[i]`. Return the finished calls.
        `request`: see `Exchange.calls`."""
        numbers = readers.reshape(-1)
        asked = numbers != NO_SHARD
        groups = view.split(numbers[asked], positions.repeat(readers.shape[1])[asked])
        calls = self._exchange.calls(packed, groups, request)
        self._exchange.run(calls, deadline)
        return calls


def _reachable(view: View, owners: Numbers) -> Numbers:
    """Return an `(n, 1)` array: for each block, the first owner that can be reached, or its first owner if none can."""
    whole = np.array([link.broken is None for link in view.links])[owners]
    return np.take_along_axis(owners, whole.argmax(axis=1)[:, np.newaxis], axis=1)


class _Tally:
    """The outcomes that the replicas of each block have reported so far. `needed`: the number of copies that a block
    needs to count as stored. `waits`: whether a block that another client is still writing does not count as a copy."""

    def __init__(self, calls: Sequence[Call], count: int, needed: int, waits: bool) -> None:
        self.evicted = 0  # blocks that were evicted to make room for these
        self.generation = 0  # if not 0, a shard refused blocks because the namespace is at this generation
        self._stale: list[Numbers] = []
        self._waits = waits
        self._pending: list[Numbers] = []
        self._waiting = list(calls)
        self._needed = needed
        self._copies = np.zeros(count, dtype=np.uint8)
        self._said = np.zeros(count, dtype=np.uint8)  # for each position, the highest rank that was reported
        self._failed: list[Numbers] = []
        self._error: KVStoreError | None = None

    def enough(self) -> bool:
        """Return whether every block either has the needed copies or cannot get them any more."""
        self._count()
        return all((self._copies[call.positions] >= self._needed).all() for call in self._waiting)

    def _count(self) -> None:
        waiting = []
        for call in self._waiting:
            if not call.done or call.retry:  # a call with `retry` is sent once more
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
            if reply.generation:
                self.generation = max(self.generation, reply.generation)
                self._stale.append(call.positions)
                ranks[ranks == _REFUSED_RANK] = _STALE_RANK
            if self._waits and (pending := told == _PENDING).any():
                ranks[pending] = 0
                self._pending.append(call.positions[pending])
            self.evicted += reply.evicted
            self._said[call.positions] = np.maximum(self._said[call.positions], ranks)
            self._copies[call.positions] += ranks > _REFUSED_RANK
        self._waiting = waiting

    def stale(self, positions: Numbers) -> Numbers:
        """Return those of `positions` whose blocks a shard has refused because of their generation."""
        return np.intersect1d(positions, np.concatenate(self._stale)) if self._stale else positions[:0]

    def result(
        self, positions: Numbers, outcomes: npt.NDArray[np.uint8], copies: npt.NDArray[np.uint8]
    ) -> tuple[Numbers, Numbers, KVStoreError | None]:
        """Fill in `outcomes` and `copies`. Return the positions that shards failed to store, the positions that other
        clients are writing, and the error."""
        self._count()
        copies[positions] = self._copies[positions]
        stored = self._copies[positions] >= self._needed
        said = self._said[positions]
        outcomes[positions] = np.where(stored | (said <= _REFUSED_RANK), _BY_RANK[said], _UNKNOWN)
        pending = np.unique(np.concatenate(self._pending)) if self._pending else positions[:0]
        if not self._failed:
            return positions[:0], pending, None
        failed = np.concatenate(self._failed)
        lacking = np.zeros(len(self._copies), dtype=np.bool_)
        lacking[failed] = True
        lacking[positions[stored]] = False
        return np.flatnonzero(lacking), pending, self._error


def _outcomes(call: Call, reply: wire.SetReply) -> npt.NDArray[np.uint8]:
    """Return one `Outcome` for each block. A server that does not list them reports the number of each outcome."""
    if reply.outcomes:
        told = np.frombuffer(reply.outcomes, dtype=np.uint8)
    else:
        counts = (reply.created, reply.existed, reply.forced, reply.duplicated, reply.error)
        told = np.arange(len(counts), dtype=np.uint8).repeat(np.clip(counts, 0, call.count))
    if len(told) != call.count:
        raise ProtocolError(f"{call.link}: the shard reported {len(told)} outcomes: expected {call.count}")
    return told
