"""Handles requests: calls the store and the disk tier, and queues the reply.

A request of one frame goes to `handle`, a request with keys to `handle_keyed`. A SET goes to `begin_write`, which
reserves slots for its payload, and to `commit` when all payload has arrived. A request that breaks a rule raises
`WireError`; the reader sends it to the client as ERROR.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import __version__, wire
from kvstore._cext import BlockIndex
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import MAX_HELD_BYTES, REMOVAL_BYTES, REMOVALS
from kvstore.shard.background import Background
from kvstore.shard.peer import Peer
from kvstore.shard.places import Places
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.stream import Stream
from kvstore.store.chains import part_of
from kvstore.store.namespace import NamespaceStore, find_parent
from kvstore.store.namespaces import Priorities, Store
from kvstore.store.tier import Slots
from kvstore.wire import ErrorCode, Outcome, WireError
from kvstore.wire.attributes import TTL_STEP_S, Attributes, attributes_of

MAX_PINNED_SHARE: Final = 0.5
COUNT_PINS_S: Final = 0.1
COUNT_PINS_AT_LIMIT_S: Final = 0.01
PREFIX_PIN_S: Final = 2.0  # how long a GET of a prefix pins its blocks; mostly they are sent in less time
# By the negative of a verdict of `BlockIndex.reserve`; 0 stands for a slot:
_OUTCOME_OF_VERDICT: Final = np.zeros(4, dtype=np.uint8)
_OUTCOME_OF_VERDICT[[0, -BlockIndex.EXISTED, -BlockIndex.DUPLICATE, -BlockIndex.NO_SPACE]] = (
    Outcome.CREATED,
    Outcome.EXISTED,
    Outcome.DUPLICATED,
    Outcome.ERROR,
)


@dataclass
class Write:
    """A SET whose payload is arriving. `slots[i]` < 0: block i is not wanted and is discarded."""

    request: wire.Set
    namespace: NamespaceStore
    slots: Slots
    keys: bytes
    existed: npt.NDArray[np.bool_] | None  # of a SET with `force`: which keys were there before
    before: bytes  # the last key here of the chain that they continue; empty: it begins with them
    parent: bytes  # that key, or what was asked for before the first one: a hint; empty: not known
    ends_chain: bool
    attributes: Attributes | None = None  # of blocks copied from another shard
    evicted: int = 0  # blocks that made room for these
    arrived: int = 0  # blocks


class Answers:
    """Handles the requests of all clients of one shard. Used by the loop's thread only."""

    def __init__(
        self, config: ShardConfig, store: Store, disk: DiskTier | None, state: ShardState, places: Places
    ) -> None:
        self.places = places
        self._config = config
        self._store = store
        self._disk = disk
        self._state = state
        self.background = Background(store, disk, state.account, self._reply_for_good)

    def handle(self, peer: Peer, request: wire.Request) -> None:
        """Handle a request of one frame. Raises `WireError`."""
        if isinstance(request, wire.Hello):
            self._hello(peer, request)
        elif isinstance(request, wire.Credit):
            stream = peer.streams.get(request.id)
            if stream is not None and request.bytes > 0:
                stream.grant(request.bytes, self._state.now)
                peer.resume(stream)
        elif isinstance(request, wire.Cancel):
            stream = peer.streams.get(request.id)
            if stream is not None:
                peer.end_stream(stream)
        elif isinstance(request, wire.Ping):
            peer.reply(wire.Pong(request.id))
        elif isinstance(request, wire.Sync):  # every SET before it on this connection is complete already
            peer.reply(wire.SyncReply(request.id))
        elif isinstance(request, wire.Info):
            peer.reply(wire.InfoReply(request.id, msgspec.msgpack.encode(self.info())))
        elif isinstance(request, wire.Scrub):
            disk = self._disk
            peer.reply(wire.ScrubReply(request.id, disk.scrubbing.ask() if disk is not None and disk.volume.on else 0))
        elif isinstance(request, wire.Hottest):
            self._hottest(peer, request)
        elif isinstance(request, wire.Purge):
            if not (peer.namespace or request.all):
                raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with one first", request.id)
            self.background.purge(peer, request)

    def _hello(self, peer: Peer, request: wire.Hello) -> None:
        if request.protocol != wire.PROTOCOL_VERSION:
            raise WireError(
                ErrorCode.VERSION,
                f"protocol version {request.protocol}: this server speaks {wire.PROTOCOL_VERSION}",
                request.id,
            )
        block_bytes = 0
        if request.namespace:
            try:
                block_bytes = self._store.check_namespace(request.namespace)
            except WireError as error:
                error.request_id = request.id
                raise
        peer.namespace = request.namespace
        peer.replicas = request.replicas
        self._note_replicas(peer, self._store.get(peer.namespace))
        peer.client = request.client[:64]
        self.places.show_cookie(peer, request.cookie)
        config = self._config
        peer.reply(
            wire.Welcome(
                id=request.id,
                protocol=wire.PROTOCOL_VERSION,
                version=__version__,
                node=config.node,
                shard=config.shard,
                block_bytes=block_bytes,
                shards=config.shards,
                zone=config.zone,
            )
        )

    def _note_replicas(self, peer: Peer, namespace: NamespaceStore | None) -> None:
        """Note the largest number of copies that a client keeps: nodes that move blocks make as many copies."""
        if namespace is not None and namespace.replicas < peer.replicas:
            namespace.replicas = peer.replicas
            if self._disk is not None and namespace.disk is not None:
                self._disk.volume.keep_replicas(namespace.disk, peer.replicas)

    def _hottest(self, peer: Peer, request: wire.Hottest) -> None:
        if not peer.namespace:
            raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with one first", request.id)
        namespace = self._store.get(peer.namespace)
        if namespace is None:
            peer.reply(wire.HottestReply(request.id, 0, b"", 0))
            return
        namespace.listed = namespace.listed or request.before
        self.background.hottest(peer, request, namespace)

    def handle_keyed(self, peer: Peer, request: wire.KeyedRequest, keys: bytes) -> None:
        """Handle a request whose keys have arrived. Raises `WireError`."""
        namespace = self._store.find(peer.namespace, request.key_bytes)
        self._note_replicas(peer, namespace)
        peer.remember(keys)
        if isinstance(request, wire.Get):
            self._state.gets += 1
            now, pin_until = self._state.now, 0.0
            if request.prefix and namespace is not None and self._may_pin(namespace, request.count):
                pin_until = now + min(PREFIX_PIN_S, request.deadline_ms / 1000)
            stream = Stream(self._store, self._disk, namespace, request, keys, now, peer.resume, pin_until)
            peer.add_stream(stream)
        elif isinstance(request, wire.Delete):
            self._delete(peer, request, namespace, keys)
        else:
            self._lookup(peer, request, namespace, keys)

    def _delete(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore | None, keys: bytes) -> None:
        if request.damaged and namespace is not None:
            self.background.delete_damaged(peer, request, namespace, keys)
            return
        if request.damaged:
            peer.reply(wire.DeleteReply(request.id, 0))
            return
        disk = self._disk
        # While the disk tier recovers, the blocks may be on disk although the namespace is not known yet.
        if namespace is None and disk is not None and disk.volume.recovering:
            namespace = self._store.open(peer.namespace, request.key_bytes)
        held = 0
        if namespace is not None and disk is not None:
            held = REMOVAL_BYTES * request.count + len(keys)
            peer.share.check(held)
            disk.fetching.disown(namespace, keys)
        deleted = namespace.delete(keys, self._state.now) if namespace else 0
        self._reply_for_good(peer, wire.DeleteReply(request.id, deleted), held)

    def _reply_for_good(self, peer: Peer, reply: wire.Reply, held: int = 0) -> None:
        """Send a reply once no removed block can come back from disk, even if the server dies.

        held: bytes that the removal holds until then.
        """
        if self._disk is None:
            peer.reply(reply)
            return
        peer.share.take(REMOVALS, held)
        promise = peer.promise(reply)

        def keep() -> None:
            peer.share.give_back(REMOVALS, held)
            promise()

        self._disk.volume.after_removals(keep)

    def _lookup(
        self,
        peer: Peer,
        request: wire.Contains | wire.MatchPrefix,
        namespace: NamespaceStore | None,
        keys: bytes,
    ) -> None:
        self._state.lookups += 1
        matching = isinstance(request, wire.MatchPrefix)
        if namespace is None:
            reply = wire.MatchReply(request.id, 0) if matching else wire.ContainsReply(request.id, bytes(request.count))
            peer.reply(reply)
            return
        pin_until = 0.0
        if request.pin_s > 0 and self._may_pin(namespace, request.count):
            pin_until = self._state.now + request.pin_s
        tick = self._store.ticks(request.count) if request.refresh else 0
        if matching:
            length = namespace.match_prefix(keys, self._state.now, request.refresh, tick, pin_until)
            peer.reply(wire.MatchReply(request.id, length))
        else:
            present = namespace.contains(keys, self._state.now, request.refresh, tick, pin_until)
            peer.reply(wire.ContainsReply(request.id, present))

    def _may_pin(self, namespace: NamespaceStore, count: int) -> bool:
        """Whether `count` more blocks may be pinned: pins must leave the namespace room for new blocks.

        Counting the pins of a million blocks takes milliseconds, so it is not done for each request: between two counts
        each pin adds to the number, also one of a block that is pinned already.
        """
        index, now = namespace.memory.index, self._state.now
        slots = index.slots + self._store.arena.free * index.slots_per_segment
        room = slots * MAX_PINNED_SHARE - count
        age_s = now - namespace.pins_counted_at
        if age_s > COUNT_PINS_S or (namespace.pins > room and age_s > COUNT_PINS_AT_LIMIT_S):
            namespace.pins, namespace.pins_counted_at = index.pinned(now), now
        if namespace.pins > room:
            return False
        namespace.pins += count
        return True

    def begin_write(self, peer: Peer, request: wire.Set, keys: bytes) -> Write:
        """Reserve a slot for every block of a SET that is to be stored. Raises `WireError`."""
        self._state.sets += 1
        if self._state.draining:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        namespace = self._store.open(peer.namespace, request.key_bytes)
        self._note_replicas(peer, namespace)
        existed = None
        if request.force:
            existed = np.frombuffer(namespace.contains(keys, self._state.now, False, 0), dtype=np.bool_)
            if self._disk is not None:
                self._disk.fetching.disown(namespace, keys)
        store, now = self._store, self._state.now
        parent, ends_chain = find_parent(peer.chain, keys, request.key_bytes)  # what it asked for may be no chain
        before: bytes | None = b""
        priority: int | Priorities = request.priority
        attributes = None
        if request.attributes:
            attributes = attributes_of(request.attributes, request.key_bytes)
            priority = np.minimum(attributes["priority"], wire.MAX_PRIORITY)
        elif request.chained:  # it ends here, as far as is known, unless its last key went to another shard
            before, ends_chain = store.chains.find(namespace, request.parent), not request.end
        cut = request.chained and attributes is None and store.chains.is_cut(namespace, request.parent, now)
        if not request.force and (cut or (before is None and store.is_full(namespace, request.count))):
            # Blocks behind others that were refused are of no use, so they take nobody's place.
            return Write(request, namespace, store.refuse(namespace, keys, now), keys, existed, b"", b"", ends_chain)
        before = before or b""
        evicted = store.memory.evicted
        slots = store.reserve(namespace, keys, request.force, now, priority, before)
        evicted = store.memory.evicted - evicted
        return Write(
            request, namespace, slots, keys, existed, before, before or parent, ends_chain, attributes, evicted
        )

    def commit(self, peer: Peer, write: Write, sums: bytes) -> None:
        """All blocks of a SET are in their slots: make them readable, and reply."""
        request, namespace, slots = write.request, write.namespace, write.slots
        checksums = np.frombuffer(sums, dtype="<u8")
        index = namespace.memory.index
        attributes = write.attributes
        ttl_s = (request.ttl_s if attributes is None else 0.0) or namespace.ttl_s
        expires: float | npt.NDArray[np.float64] = self._state.now + ttl_s if ttl_s else 0.0
        if attributes is not None:
            expires = np.where(attributes["ttl"], self._state.now + attributes["ttl"] * TTL_STEP_S, expires)
        placed = index.commit(
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
            if write.existed is not None:  # what was not replaced is there
                told = np.where(write.existed & (slots == BlockIndex.NO_SPACE), BlockIndex.EXISTED, slots)
            part = part_of(request, write.keys)
            self._store.chains.join(namespace, write.keys, told, write.before, part, self._state.now)
        replaced = None if write.existed is None else write.existed & (slots >= 0)
        forced = 0 if replaced is None else int(np.count_nonzero(replaced))
        namespace.created += placed
        existed = int((slots == BlockIndex.EXISTED).sum())
        if existed:  # touch the blocks that existed, so that the chain's head is not evicted before its new tail
            namespace.contains(write.keys, self._state.now, True, self._store.ticks(request.count))
        namespace.wake_parked()
        reply = wire.SetReply(
            id=request.id,
            total=request.count,
            created=placed - forced,
            existed=existed,
            forced=forced,
            duplicated=int((slots == BlockIndex.DUPLICATE).sum()),
            error=int((slots == BlockIndex.NO_SPACE).sum()),
            outcomes=self._outcomes(write, replaced) if request.outcomes else b"",
            evicted=write.evicted,
        )
        written = slots[slots >= 0]
        if self._disk is None or not len(written):
            peer.reply(reply)
            return
        if request.force and namespace.disk is not None:  # the copies on disk are outdated
            namespace.disk.delete(index.keys_of(written))
        self._disk.writing.was_set(namespace, written, self._state.now)
        if request.force:
            self._reply_for_good(peer, reply)
        else:
            peer.reply(reply)

    def _outcomes(self, write: Write, replaced: npt.NDArray[np.bool_] | None) -> bytes:
        """-> one `Outcome` a block."""
        outcomes = _OUTCOME_OF_VERDICT[-np.minimum(write.slots, 0)]
        if replaced is not None:
            outcomes[replaced] = Outcome.FORCED
        namespace, now = write.namespace, self._state.now
        existed = np.flatnonzero(outcomes == Outcome.EXISTED)
        if len(existed):  # when this SET began; who was writing one may still be, or have given up
            keys = np.frombuffer(write.keys, dtype=np.uint8).reshape(-1, namespace.key_bytes)[existed]
            found = namespace.memory.index.acquire(keys.tobytes(), now, 0, False)
            namespace.memory.index.release(found)
            absent = found < 0
            if absent.any():
                on_disk = np.frombuffer(namespace.on_disk(keys[absent].tobytes(), now), dtype=np.bool_)
                outcomes[existed[absent][~on_disk]] = Outcome.PENDING
        return bytes(outcomes)

    def info(self) -> wire.ShardInfo:
        """The state and the counters of this shard."""
        config, state, arena = self._config, self._state, self._store.arena
        with open("/proc/self/statm") as statm:
            rss_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return wire.ShardInfo(
            node=config.node,
            shard=config.shard,
            pid=os.getpid(),
            version=__version__,
            uptime_s=state.now - state.started,
            memory_limit_bytes=config.memory_bytes,
            memory_used_bytes=(arena.segments - arena.free) * arena.segment_bytes,
            rss_bytes=rss_bytes,
            segment_bytes=arena.segment_bytes,
            segments_free=arena.free,
            connections=state.connections,
            streams=state.streams,
            draining=state.draining,
            sets=state.sets,
            gets=state.gets,
            lookups=state.lookups,
            bytes_in=state.bytes_in,
            bytes_out=state.bytes_out,
            errors=state.errors,
            namespaces=[namespace.info(state.now) for namespace in self._store],
            policy=config.policy,
            index_bytes=self._store.index_bytes,
            disk=self._disk.info() if self._disk is not None else None,
            name=config.shards[config.shard].name,
            room_bytes=self._store.room_bytes,
            hits=self._store.hits,
            misses=self._store.misses,
            created=self._store.created,
            evicted=self._store.memory.evicted,
            slow_turns=state.turns.slow,
            longest_turn_s=state.turns.longest_s,
            held_bytes=state.account.held,
            held_limit_bytes=MAX_HELD_BYTES,
            refused=state.refused,
        )
