"""The work of a SET: it reserves slots for the blocks, and makes the blocks readable when all of them are there.

The payload goes straight to the slots, either from the connection or from memory that a client on this host shares. If
a request breaks a rule, `WireError` is raised, and the reader sends it to the client as ERROR.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import Payload, outcomes_of
from kvstore._index import BlockIndex
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import REMOVALS
from kvstore.shard.leases import LeaseTotals
from kvstore.shard.peer import Peer
from kvstore.shard.purging import Purging
from kvstore.shard.state import ShardState
from kvstore.shard.turns import Stage
from kvstore.store.chains import part_of
from kvstore.store.expected import split
from kvstore.store.namespace import NamespaceStore, find_parent
from kvstore.store.namespaces import Priorities, ShardStore
from kvstore.store.tier import Slots
from kvstore.wire import WRITE, ErrorCode, Outcome, WireError
from kvstore.wire.attributes import TTL_STEP_S, Attributes, attributes_of
from kvstore.wire.shared import STAGED

# The key is the negated verdict of `BlockIndex.reserve`, or 0 if it returned a slot.
_OUTCOME_OF: Final = {
    0: Outcome.CREATED,
    -BlockIndex.EXISTED: Outcome.EXISTED,
    -BlockIndex.DUPLICATE: Outcome.DUPLICATED,
    -BlockIndex.NO_SPACE: Outcome.ERROR,
}
_OUTCOME_OF_VERDICT: Final = bytes(_OUTCOME_OF[verdict] for verdict in range(len(_OUTCOME_OF)))
_EXISTED, _DUPLICATED, _ERROR = (bytes([each]) for each in (Outcome.EXISTED, Outcome.DUPLICATED, Outcome.ERROR))


@dataclass
class Write:
    """A SET whose payload is arriving. If `slots[i]` is negative, block i is not wanted and is discarded."""

    request: wire.Set
    namespace: NamespaceStore
    slots: Slots
    keys: bytes
    existed: npt.NDArray[np.bool_] | None  # for a SET with `force`: which keys existed before
    before: bytes  # the key to which the blocks are linked (see `Chains.find`); empty if they begin a chain
    parent: bytes  # a hint: `before`, or the key before the first one in the last request; empty if unknown
    ends_chain: bool
    began: float  # when the keys had arrived, in monotonic seconds
    generation: int = 0  # the generation of the namespace when the SET began
    stale: bool = False  # the blocks were made in another generation and are refused
    attributes: Attributes | None = None  # for blocks copied from another shard
    evicted: int = 0  # the number of blocks that were evicted for these
    placed: int = 0  # the number of blocks for which memory was provided; not used with `payload`
    payload: Payload | None = None  # the memory for all blocks; None: each frame gets its own memory
    sums: bytes = b""  # for a SET by references: the checksums so far
    held_back_s: float = 0.0  # how long its client was not read because the disk was behind

    @property
    def arrived(self) -> int:
        """The number of blocks that have arrived or are arriving."""
        return self.placed if self.payload is None else self.payload.arrived


class TimedRequest(NamedTuple):
    """A request that `timing` counts when it is answered.

    began: when the request began, in monotonic seconds.
    keys, nbytes: the number of its keys, and the bytes of its blocks.
    held_back_s: see `Write`.
    """

    request: type[wire.Request]
    began: float
    keys: int
    nbytes: int = 0
    held_back_s: float = 0.0


class Sets:
    """Stores the blocks of SETs. Used by the loop's thread only."""

    def __init__(
        self, store: ShardStore, disk: DiskTier | None, state: ShardState, lending: LeaseTotals, purging: Purging
    ) -> None:
        self._store = store
        self._purging = purging
        self._disk = disk
        self._state = state
        self._lending = lending

    def note_replicas(self, peer: Peer, namespace: NamespaceStore | None) -> None:
        """Note the largest number of copies that a client keeps of each block. Nodes that move blocks keep as many."""
        session = peer.session
        if namespace is not None and namespace.replicas < session.replicas and session.rights.verbs & WRITE:
            namespace.replicas = session.replicas
            if self._disk is not None and namespace.disk is not None:
                self._disk.keep_replicas(namespace.disk, session.replicas)

    def begin_write(self, peer: Peer, request: wire.Set, keys: bytes) -> Write:
        """Reserve a slot for every block of a SET that must be stored. Raises `WireError`."""
        self._state.sets += 1
        if self._state.draining:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        self._lending.collect()  # so that blocks that clients have given back may be evicted
        generation = self._purging.learn(peer, request.generation)
        namespace = self._store.open(peer.session.namespace, request.key_bytes)
        self.note_replicas(peer, namespace)
        if request.generation != generation:
            slots = np.full(request.count, BlockIndex.NO_SPACE, dtype=np.int32)
            return Write(request, namespace, slots, keys, None, b"", b"", True, self._state.now, generation, stale=True)
        existed = None
        if request.force:
            existed = np.frombuffer(namespace.contains(keys, self._state.now, False, 0), dtype=np.bool_)
            if self._disk is not None:
                self._disk.disown(namespace, keys)
        store, now = self._store, self._state.now
        # The keys of the last request do not always form a chain, so `parent` is only a hint.
        parent, ends_chain = find_parent(peer.session.chain, keys, request.key_bytes)
        before: bytes | None = b""
        priority: int | Priorities = request.priority
        attributes = None
        if request.attributes:
            attributes = attributes_of(request.attributes, request.key_bytes)
            if attributes["reads"].any():
                raise WireError(ErrorCode.PROTOCOL, "a copy of a transient block: expected copies of ordinary blocks")
            priority = np.minimum(attributes["priority"], wire.MAX_PRIORITY)
        elif request.chained:  # assume that the chain ends here, unless its last key went to another shard
            before, ends_chain = store.chains.find(namespace, request.parent), not request.end
        cut = request.chained and attributes is None and store.chains.is_cut(namespace, request.parent, now)
        if not request.force and (cut or (before is None and store.is_full(namespace, request.count))):
            # The blocks after refused ones are useless, so no other blocks are evicted for them.
            slots = store.refuse(namespace, keys, now)
            return Write(request, namespace, slots, keys, existed, b"", b"", ends_chain, now, generation)
        before = before or b""
        evicted = store.memory.evicted
        slots = store.reserve(namespace, keys, request.force, now, priority, before, request.reads)
        evicted = store.memory.evicted - evicted
        return Write(
            request,
            namespace,
            slots,
            keys,
            existed,
            before,
            before or parent,
            ends_chain,
            now,
            generation,
            attributes=attributes,
            evicted=evicted,
        )

    def copy_staged(self, peer: Peer, write: Write, frame: bytes, more: bool) -> None:
        """Copy from the client's memory the blocks that one frame of a SET by references names. `more`: whether more
        frames follow. Raises `WireError`."""
        if peer.files is None:
            raise WireError(ErrorCode.PROTOCOL, "a SET by references is possible on the Unix socket only")
        count = len(frame) // STAGED.itemsize
        slots = write.slots[write.arrived : write.arrived + count]
        write.sums += peer.files.copy(write.namespace, slots, frame, write.request.count).astype("<u8").tobytes()
        write.placed += count
        self._state.bytes_in += count * write.namespace.block_bytes
        if more:
            peer.outbox.reply(wire.Taken(write.request.id, write.arrived))

    def commit(self, peer: Peer, write: Write, sums: bytes) -> None:
        """Make the blocks of a SET readable, and reply. All blocks must be in their slots."""
        request, namespace, slots = write.request, write.namespace, write.slots
        generation = self._purging.generations.of(namespace.id)
        if write.stale or write.generation != generation:
            self._refuse_stale(peer, write, generation)
            return
        checksums = np.frombuffer(sums, dtype="<u8")
        attributes = write.attributes
        ttl_s = (request.ttl_s if attributes is None else 0.0) or namespace.ttl_s
        if request.reads:
            ttl_s = request.ttl_s or wire.TRANSIENT_TTL_S
        expires: float | npt.NDArray[np.float64] = self._state.now + ttl_s if ttl_s else 0.0
        if attributes is not None:
            expires = np.where(attributes["ttl"], self._state.now + attributes["ttl"] * TTL_STEP_S, expires)
        placed = namespace.commit(
            slots,
            checksums,
            self._store.ticks(request.count),
            expires,
            write.parent,
            write.ends_chain,
            attributes is not None or (request.chained and request.position > 0),
        )
        if attributes is not None:
            self._store.chains.place(namespace, write.keys, attributes["before"].tobytes(), slots)
        elif request.chained and request.count:
            told = slots
            if write.existed is not None:  # blocks that existed and were not replaced are still there
                told = np.where(write.existed & (slots == BlockIndex.NO_SPACE), BlockIndex.EXISTED, slots)
            part = part_of(request, write.keys)
            self._store.chains.join(namespace, write.keys, told, write.before, part, self._state.now)
        replaced = None if write.existed is None else write.existed & (slots >= 0)
        forced = 0 if replaced is None else int(np.count_nonzero(replaced))
        namespace.created += placed
        outcomes = outcomes_of(slots, _OUTCOME_OF_VERDICT)
        existed = outcomes.count(_EXISTED)
        if existed:  # touch existing blocks, so that the chain's head is not evicted before its new tail
            namespace.contains(write.keys, self._state.now, True, self._store.ticks(request.count))
            if request.reads:
                namespace.renew(write.keys, request.reads, self._state.now, self._state.now + ttl_s)
        namespace.promises.fulfil(split(write.keys, namespace.key_bytes))
        namespace.tell(write.keys)
        reply = wire.SetReply(
            id=request.id,
            total=request.count,
            created=placed - forced,
            existed=existed,
            forced=forced,
            duplicated=outcomes.count(_DUPLICATED),
            error=outcomes.count(_ERROR),
            outcomes=self._outcomes(write, outcomes, replaced) if request.outcomes else b"",
            evicted=write.evicted + namespace.take_cut_off(),
        )
        written = slots[slots >= 0]
        if self._disk is not None and len(written) and not request.reads:  # transient blocks are never written to disk
            if request.force:
                namespace.delete_on_disk(written)
            self._disk.was_set(namespace, written, self._state.now)
            if request.force:
                self.reply_for_good(peer, reply, 0, _timed(write))
                return
        peer.outbox.reply(reply)
        self._count(peer, write)

    def _count(self, peer: Peer, write: Write) -> None:
        """Count a SET that is answered now."""
        if self._state.timing.add(wire.Set, write.began):
            self._note_slow(peer, _timed(write), 0.0)

    def _note_slow(self, peer: Peer, timed: TimedRequest, disk_s: float) -> None:
        """Add a request to the slow log if it belongs there. `disk_s`: how long its reply has waited for the disk."""
        request, began, keys, nbytes, held_back_s = timed
        running: Stage = "disk" if disk_s else "requests"
        waits: dict[Stage, float] = {"disk": disk_s + held_back_s}
        self._state.slow.add(peer.session, request, began, keys, nbytes, running=running, waits=waits)

    def give_up(self, write: Write) -> None:
        """Free the slots of a SET that did not arrive completely, or whose blocks are refused."""
        request, before = write.request, write.before
        if write.attributes is not None:
            before = write.attributes["before"].tobytes()
        if write.attributes is not None or request.chained:
            self._store.chains.abandon(write.namespace, write.keys, write.slots, before)
        write.namespace.abort(write.slots, write.keys)

    def _refuse_stale(self, peer: Peer, write: Write, generation: int) -> None:
        """Refuse blocks whose generation has ended, perhaps while they were arriving."""
        request = write.request
        self.give_up(write)
        count = request.count
        outcomes = bytes([Outcome.ERROR]) * count if request.outcomes else b""
        reply = wire.SetReply(request.id, count, 0, 0, 0, 0, count, outcomes, write.evicted, generation)
        peer.outbox.reply(reply)
        self._count(peer, write)

    def _outcomes(self, write: Write, by_slot: bytes, replaced: npt.NDArray[np.bool_] | None) -> bytes:
        """Return one `Outcome` per block. `by_slot`: the outcomes as far as the slots alone show them."""
        if replaced is None and _EXISTED not in by_slot:
            return by_slot
        outcomes = np.frombuffer(bytearray(by_slot), dtype=np.uint8)
        if replaced is not None:
            outcomes[replaced] = Outcome.FORCED
        namespace, now = write.namespace, self._state.now
        existed = np.flatnonzero(outcomes == Outcome.EXISTED)
        if len(existed):  # another client may have been writing one of them, and may still do so or have given up
            keys = np.frombuffer(write.keys, dtype=np.uint8).reshape(-1, namespace.key_bytes)[existed]
            outcomes[existed[namespace.pending(keys.tobytes(), now)]] = Outcome.PENDING
        return bytes(outcomes)

    def reply_for_good(
        self,
        peer: Peer,
        reply: wire.Reply,
        held: int = 0,
        timed: TimedRequest | None = None,
    ) -> None:
        """Send a reply when no removed block can come back from disk any more, even if the server dies.

        held: the bytes that the removal holds until the reply is sent.
        timed: the request, if it is to be counted then.
        """
        if self._disk is None:
            peer.outbox.reply(reply)
            if timed is not None and self._state.timing.add(timed.request, timed.began):
                self._note_slow(peer, timed, 0.0)
            return
        waits_since = self._state.now
        peer.share.take(REMOVALS, held)
        send = peer.outbox.hold(reply)

        def removed() -> None:
            peer.share.give_back(REMOVALS, held)
            send()
            if timed is not None and self._state.timing.add(timed.request, timed.began, True):
                self._note_slow(peer, timed, time.monotonic() - waits_since)

        self._disk.after_removals(removed)


def _timed(write: Write) -> TimedRequest:
    nbytes = write.request.count * write.namespace.block_bytes
    return TimedRequest(wire.Set, write.began, write.request.count, nbytes, write.held_back_s)
