"""Handles requests: calls the store and the disk tier, and queues the reply.

A request of one frame goes to `handle`, a request with keys to `handle_keyed`, a SET to `sets`. A request that breaks a
rule raises `WireError`; the reader sends it to the client as ERROR.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from kvstore import __version__, wire
from kvstore.auth.audit import NO_AUDIT, Audit
from kvstore.auth.policy import AuthFile
from kvstore.auth.rights import ALL, EVERY_TENANT, NONE, READ, Rights, own, refuse
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import MAX_HELD_BYTES, REMOVAL_BYTES, LimitReached
from kvstore.shard.background import Background
from kvstore.shard.leases import Leases, Lending
from kvstore.shard.logins import Logins
from kvstore.shard.peer import Peer
from kvstore.shard.places import Places
from kvstore.shard.sets import Sets
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.stream import Stream
from kvstore.shard.tenant import Tenant
from kvstore.shard.tenants import Tenants
from kvstore.store.expected import PROMISE_BYTES, split
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import Store
from kvstore.store.quotas import Quotas
from kvstore.wire import ErrorCode, WireError
from kvstore.wire.remote_memory import Sharing

MAX_PINNED_SHARE: Final = 0.5
COUNT_PINS_S: Final = 0.1
COUNT_PINS_AT_LIMIT_S: Final = 0.01
PREFIX_PIN_S: Final = 2.0  # how long a GET of a prefix pins its blocks; mostly they are sent in less time


class Answers:
    """Handles the requests of all clients of one shard. Used by the loop's thread only."""

    def __init__(
        self,
        config: ShardConfig,
        store: Store,
        disk: DiskTier | None,
        state: ShardState,
        places: Places,
        audit: Audit = NO_AUDIT,
        auth: AuthFile | None = None,
        nixl: Sharing | None = None,
    ) -> None:
        """auth: who may do what; None: everybody everything. nixl: how clients on other hosts may read this shard's
        memory; None: they may not."""
        self.lending = Lending(store.arena)
        self._nixl = nixl
        self.places = places
        self._config = config
        self._store = store
        self._disk = disk
        self._state = state
        self._audit = audit
        self.logins = self.tenants = None
        if auth is not None:
            self.logins = Logins(auth, audit, self._logged_in)
            disk_segment_bytes = store.disk.blocks.space.segment_bytes if store.disk is not None else 1
            self.tenants = Tenants(auth.policy, len(config.shards), config.segment_bytes, disk_segment_bytes, audit)
            store.memory.quotas = Quotas(self.tenants.memory_quota)
            if store.disk is not None:
                store.disk.blocks.quotas = Quotas(self.tenants.disk_quota)
        self.sets = Sets(store, disk, state, self.lending)
        self.background = Background(store, disk, state.account, self.sets.reply_for_good)

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
        elif isinstance(request, wire.Share):
            if peer.files is None:
                raise WireError(ErrorCode.PROTOCOL, "SHARE is possible on the Unix socket only", request.id)
            peer.files.share(request)
            peer.reply(wire.ShareReply(request.id))
        elif isinstance(request, wire.Release):
            if peer.leases is not None:
                peer.leases.collect()
                peer.leases.release(request.id, request.count)
                reading = peer.streams.get(request.id)
                if reading is not None:
                    reading.released(self._state.now)
                for stream in peer.streams.values():  # one may have waited for that
                    peer.resume(stream)
        elif isinstance(request, wire.Ping):
            peer.reply(wire.Pong(request.id))
        elif isinstance(request, wire.Sync):  # every SET before it on this connection is complete already
            peer.reply(wire.SyncReply(request.id))
        elif isinstance(request, wire.Info):
            peer.reply(wire.InfoReply(request.id, msgspec.msgpack.encode(self.info(peer.rights))))
        elif isinstance(request, wire.Scrub):
            self._note(peer, request)
            disk = self._disk
            peer.reply(wire.ScrubReply(request.id, disk.scrubbing.ask() if disk is not None and disk.volume.on else 0))
        elif isinstance(request, wire.Hottest):
            self._hottest(peer, request)
        elif isinstance(request, wire.Purge):
            if not (peer.namespace or request.all):
                raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with one first", request.id)
            self._note(peer, request)
            self.background.purge(peer, request)

    def check_rights(self, peer: Peer, request: wire.Request) -> None:
        """Raise `WireError` for a request that needs a verb which the connection does not have. Whoever reads a block
        that is damaged may have it deleted: the shard itself looks whether it is."""
        if isinstance(request, wire.Delete) and request.damaged and peer.rights.verbs & READ:
            return
        self._state.unauthorized += 1
        if peer.rights is not NONE:
            self._note(peer, request, "denied")
        raise refuse(peer.rights, request)

    def check_tenant(self, peer: Peer, tenant: Tenant) -> None:
        """Count a request of a tenant whose requests or bytes are limited. Raises `LimitReached`."""
        assert self.tenants is not None
        self.tenants.check_request(tenant, peer, self._state.now)

    def _note(self, peer: Peer, request: wire.Request, outcome: str = "begun") -> None:
        """Record what somebody does, or may not do, in the audit log."""
        if peer.member:
            return
        rights = peer.rights
        self._audit.record(
            type(request).__name__.lower(),
            outcome=outcome,
            principal=rights.principal,
            tenant=rights.tenant,
            address=peer.address,
            namespace=peer.namespace.decode(),
            **({"all": request.all} if isinstance(request, wire.Purge) else {}),
        )

    def _hello(self, peer: Peer, request: wire.Hello) -> None:
        wire.agreed_protocol(request)  # before anything else is said of the connection
        self.places.show_cookie(peer, request.cookie)
        if self.logins is not None:
            if self.places.is_cookie(request.cookie):
                peer.rights, peer.namespace = ALL, b""
            elif not self.logins.begin(peer, request, self._state.now):
                return
        self._welcome(peer, request)

    def _logged_in(self, peer: Peer, request: wire.Hello) -> None:
        """Go on with a HELLO that waited for the check of its token."""
        try:
            self._welcome(peer, request)
        except WireError as error:
            peer.refuse(error.request_id, error)
        except Exception:  # a bug must end one client's connection, not the whole cache
            peer.close_after_defect()

    def _welcome(self, peer: Peer, request: wire.Hello) -> None:
        block_bytes, namespace = 0, request.namespace
        if namespace:
            try:
                block_bytes = self._store.check_namespace(namespace)
                namespace = own(namespace, peer.rights)
            except WireError as error:
                error.request_id = request.id
                raise
        if self.tenants is not None:
            try:
                self.tenants.enter(peer, self._state.now)
            except LimitReached as error:  # so that it is closed like others that have not logged in
                peer.rights, peer.login = NONE, None
                error.request_id = request.id
                raise
            self.places.log_in(peer, self._state.now)
        peer.namespace = namespace
        peer.replicas = request.replicas
        self.sets.note_replicas(peer, self._store.get(peer.namespace))
        peer.client = request.client[:64]
        if request.nixl and self._nixl is not None and peer.leases is None:
            self._store.arena.lending = True
            peer.leases = Leases(self.lending, peer.share, self._nixl)
        if peer.leases is not None:
            peer.leases.ring_wanted = request.release_ring
        config = self._config
        peer.reply(
            wire.Welcome(
                id=request.id,
                protocol=wire.agreed_protocol(request),
                version=__version__,
                node=config.node,
                shard=config.shard,
                block_bytes=block_bytes,
                shards=config.shards,
                zone=config.zone,
                unix_socket=config.unix_path,
                instance=self._state.instance,
                nixl=peer.leases is not None and peer.files is None,
            )
        )

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
        self.sets.note_replicas(peer, namespace)
        peer.remember(keys)
        if namespace is not None and namespace.memory.index.transient:
            self.lending.collect()  # what clients have read may be gone by that
        if isinstance(request, wire.Get):
            self._state.gets += 1
            now, pin_until = self._state.now, 0.0
            if request.prefix and namespace is not None and self._may_pin(peer, namespace, request.count):
                pin_until = now + min(PREFIX_PIN_S, request.deadline_ms / 1000)
            stream = Stream(self._store, self._disk, namespace, request, keys, now, peer.resume, pin_until, peer.leases)
            peer.add_stream(stream)  # counts its time when its last part is sent
        elif isinstance(request, wire.Promise):
            self._promise(peer, request, namespace, keys)
            self._state.timing.add("promise", self._state.now)
        elif isinstance(request, wire.Withdraw):
            withdrawn = namespace.promises.withdraw(split(keys, request.key_bytes), peer) if namespace else 0
            peer.reply(wire.WithdrawReply(request.id, withdrawn))
            self._state.timing.add("withdraw", self._state.now)
        elif isinstance(request, wire.Delete):
            self._delete(peer, request, namespace, keys)
        elif isinstance(request, wire.Expire):
            self._expire(peer, request, namespace, keys)
            self._state.timing.add("expire", self._state.now)
        else:
            self._lookup(peer, request, namespace, keys)
            verb = "match_prefix" if isinstance(request, wire.MatchPrefix) else "contains"
            self._state.timing.add(verb, self._state.now)

    def _promise(self, peer: Peer, request: wire.Promise, namespace: NamespaceStore | None, keys: bytes) -> None:
        if self._state.draining:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        named, new = list(split(keys, request.key_bytes)), request.count
        if namespace is not None and namespace.promises.held_by(peer):  # what is renewed takes nothing
            new = namespace.promises.new_to(peer, named)
        if new:
            peer.share.check_lasting(new * PROMISE_BYTES)
        namespace, now = self._store.open(peer.namespace, request.key_bytes), self._state.now
        present = namespace.contains(keys, now, False, 0)
        answers = namespace.promises.make(named, present, peer, now + request.ttl_ms / 1000, peer.promised)
        peer.promises_in(namespace.promises)
        peer.reply(wire.PromiseReply(request.id, answers))

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
        self.sets.reply_for_good(peer, wire.DeleteReply(request.id, deleted), held, "delete", self._state.now)

    def _expire(self, peer: Peer, request: wire.Expire, namespace: NamespaceStore | None, keys: bytes) -> None:
        there = bytes(request.count)
        if namespace is not None:
            now, ttl_s = self._state.now, request.ttl_s or namespace.ttl_s
            there = namespace.expire(keys, now, now + ttl_s if ttl_s else 0.0)
            if self._disk is not None:
                self._disk.writing.write_again(namespace, keys, now)
        peer.reply(wire.ExpireReply(request.id, there))

    def _lookup(
        self,
        peer: Peer,
        request: wire.Contains | wire.MatchPrefix,
        namespace: NamespaceStore | None,
        keys: bytes,
    ) -> None:
        self._state.lookups += 1
        if namespace is None:
            matching = isinstance(request, wire.MatchPrefix)
            reply = wire.MatchReply(request.id, 0) if matching else wire.ContainsReply(request.id, bytes(request.count))
            peer.reply(reply)
            return
        pin_until = 0.0
        if request.pin_s > 0 and self._may_pin(peer, namespace, request.count):
            pin_until = self._state.now + request.pin_s
        tick = self._store.ticks(request.count) if request.refresh else 0
        if isinstance(request, wire.MatchPrefix):
            length = namespace.match_prefix(keys, self._state.now, request.refresh, tick, pin_until)
            peer.reply(wire.MatchReply(request.id, length))
        else:
            look_up = namespace.expected if request.promised else namespace.contains
            present = look_up(keys, self._state.now, request.refresh, tick, pin_until)
            peer.reply(wire.ContainsReply(request.id, present))

    def _may_pin(self, peer: Peer, namespace: NamespaceStore, count: int) -> bool:
        """Whether `count` more blocks may be pinned: pins must leave the namespace room for new blocks.

        Counting the pins of a million blocks takes milliseconds, so it is not done for each request: between two counts
        each pin adds to the number, also one of a block that is pinned already.
        """
        index, now = namespace.memory.index, self._state.now
        slots = index.slots - index.transient_slots + self._store.arena.free * index.slots_per_segment
        room = slots * MAX_PINNED_SHARE - count
        age_s = now - namespace.pins_counted_at
        if age_s > COUNT_PINS_S or (namespace.pins > room and age_s > COUNT_PINS_AT_LIMIT_S):
            namespace.count_pins(now)
        if namespace.pins > room:
            return False
        if self.tenants is not None and not self.tenants.may_pin(peer, namespace, count, self._store, now):
            return False
        namespace.pins += count
        return True

    def info(self, rights: Rights) -> wire.ShardInfo:
        """The state and the counters of this shard, with the namespaces that somebody with these rights may use."""
        config, state, arena = self._config, self._state, self._store.arena
        self.lending.collect()
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
            bytes_out=state.bytes_out + self.lending.total_bytes,
            errors=state.errors,
            namespaces=[
                namespace.info(state.now)
                for namespace in self._store
                if rights.owns(namespace.tenant) and rights.use(namespace.model)
            ],
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
            tenants=self.tenants.info(self._store, rights) if self.tenants is not None else [],
            tenant="" if rights.tenant == EVERY_TENANT else rights.tenant,
            unauthorized=state.unauthorized,
            failed_logins=self.logins.failed if self.logins is not None else 0,
            unix_socket=config.unix_path,
            lent_blocks=self.lending.blocks,
            lent_bytes=self.lending.held_bytes,
            nixl=self._nixl is not None,
            transient_bytes=self._store.memory.transient_segments * arena.segment_bytes,
            transient_limit_bytes=self._store.transient_segments * arena.segment_bytes,
            requests=state.timing.rows(),
        )
