"""Handles requests: calls the store and the disk tier, and queues the reply.

Each row of `wire.VERBS` has a handler. Handlers of requests of one frame are in `handlers`. Handlers of requests with
keys are in `keyed_handlers`, and `handle_keyed` calls them. `sets` handles a SET. The reader has already checked what
the row demands. If a request breaks a rule, a handler raises `WireError`, which the reader sends to the client as
ERROR.

Over 400 lines because each request has a handler here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import msgspec

from kvstore import __version__, wire
from kvstore.auth.audit import NO_AUDIT, Audit
from kvstore.auth.policy import AuthFile
from kvstore.auth.rights import ALL, NONE, own, refuse, refuse_to_owner_of_some
from kvstore.disk.tier import DiskTier
from kvstore.shard.account import REMOVAL_BYTES, LimitReached
from kvstore.shard.background import Background
from kvstore.shard.clients import ClientList, Connection
from kvstore.shard.configuring import Configuring
from kvstore.shard.connection_limits import ConnectionLimits
from kvstore.shard.leases import Leases, LeaseTotals
from kvstore.shard.logins import Logins
from kvstore.shard.peer import Peer
from kvstore.shard.purging import Purging
from kvstore.shard.report import Report
from kvstore.shard.sets import Sets, TimedRequest
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.stream import ReplyStream
from kvstore.shard.tenant import Tenant
from kvstore.shard.tenants import Tenants
from kvstore.store.expected import PROMISE_BYTES, split
from kvstore.store.generations import Generations
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore.store.quotas import Quotas
from kvstore.wire import READ, ErrorCode, WireError
from kvstore.wire.remote_memory import Transport

PREFIX_PIN_S: Final = 2.0  # how long a GET of a prefix pins its blocks, in seconds; they are usually sent sooner

KeyedHandler: TypeAlias = Callable[[Peer, Any, NamespaceStore | None, bytes], None]


class RequestHandlers:
    """Handles the requests of all clients of one shard. Used by the loop's thread only."""

    def __init__(
        self,
        config: ShardConfig,
        store: ShardStore,
        disk: DiskTier | None,
        state: ShardState,
        places: ConnectionLimits,
        audit: Audit = NO_AUDIT,
        auth: AuthFile | None = None,
        transport: Transport | None = None,
        connections: Collection[Connection] = (),
    ) -> None:
        """auth: the rights of principals, or None if every client may do everything.
        transport: how clients on other hosts may read this shard's memory, or None if they may not.
        connections: a view of the open connections, in the order in which they were made.
        """
        self.lending = LeaseTotals(store.arena)
        self._transport = transport
        self.places = places
        self._config = config
        self._store = store
        self._disk = disk
        self._state = state
        self._audit = audit
        self.logins = self.tenants = None
        if auth is not None:
            self.logins = Logins(auth, audit, self._logged_in)
            disk_segment_bytes = config.disk.segment_bytes if config.disk is not None else 1
            self.tenants = Tenants(auth.policy, len(config.shards), config.segment_bytes, disk_segment_bytes, audit)
            store.use_quotas(Quotas(self.tenants.memory_quota), Quotas(self.tenants.disk_quota))
        self.configuring = Configuring(config, disk, self.tenants)
        generations = Generations()
        if disk is not None:
            generations.keep_in(disk.directory)
            disk.when_on_again = generations.save_again
        self.background = Background(store, disk, state.account, generations)
        self.purging = Purging(store, generations, self.background.remove, lambda: disk is not None and disk.recovering)
        self.sets = Sets(store, disk, state, self.lending, self.purging)
        self.background.answer = self.sets.reply_for_good
        self._report = Report(config, state, store, disk, self.lending, generations, self.logins, self.tenants)
        self._clients = ClientList(connections, config.transport)
        self.handlers: Final[dict[type[wire.Request], Callable[[Peer, Any], None]]] = {
            wire.Hello: self._hello,
            wire.Sync: self._sync,
            wire.Info: self._info,
            wire.Ping: self._ping,
            wire.Credit: self._credit,
            wire.Cancel: self._cancel,
            wire.Scrub: self._scrub,
            wire.Hottest: self._hottest,
            wire.Purge: self._purge,
            wire.Release: self._release,
            wire.Share: self._share,
            wire.Raise: self._raise,
            wire.Noted: self._noted,
            wire.Clients: self._list_clients,
            wire.Slowlog: self._slowlog,
            wire.Configure: self._configure,
        }
        self.keyed_handlers: Final[dict[type[wire.Request], KeyedHandler]] = {
            wire.Get: self._get,
            wire.Contains: self._look_up,
            wire.MatchPrefix: self._look_up,
            wire.Delete: self._delete,
            wire.MakePromise: self._promise,
            wire.Withdraw: self._withdraw,
            wire.Expire: self._expire,
        }

    def check_rights(self, peer: Peer, request: wire.Request) -> None:
        """Raise `WireError` for a request whose verb the connection may not use. A client that may read a block may
        also have it deleted as damaged, because the shard itself checks whether the block is damaged."""
        if isinstance(request, wire.Delete) and request.damaged and peer.session.rights.verbs & READ:
            return
        raise self._denied(peer, request, refuse(peer.session.rights, request))

    def _denied(self, peer: Peer, request: wire.Request, error: WireError) -> WireError:
        """Count and record a request that the connection may not make. Return the error to raise."""
        self._state.unauthorized += 1
        if peer.session.rights is not NONE:
            self._note(peer, request, "denied")
        return error

    def check_tenant(self, peer: Peer, tenant: Tenant) -> None:
        """Count a request of a tenant whose requests or bytes are limited. Raises `LimitReached`."""
        assert self.tenants is not None
        self.tenants.check_request(tenant, peer, self._state.now)

    def _note(self, peer: Peer, request: wire.Request, outcome: str = "begun", **more: str) -> None:
        """Record in the audit log what a principal does, or what it was not allowed to do. `more`: further fields."""
        if peer.member:
            return
        rights = peer.session.rights
        self._audit.record(
            wire.VERBS[type(request)].name,
            outcome=outcome,
            principal=rights.principal,
            tenant=rights.tenant,
            address=peer.address,
            namespace=peer.session.namespace.decode(),
            **({"all": request.all} if isinstance(request, wire.Purge) else {}),
            **more,
        )

    def _hello(self, peer: Peer, request: wire.Hello) -> None:
        wire.agreed_protocol(request)  # before any other reply or error about the connection
        self.places.show_cookie(peer, request.cookie)
        if self.logins is not None:
            if self.places.is_cookie(request.cookie):
                peer.session.rights, peer.session.namespace = ALL, b""
            elif not self.logins.begin(peer, request, self._state.now):
                return
        self._welcome(peer, request)

    def _logged_in(self, peer: Peer, request: wire.Hello) -> None:
        """Continue with a HELLO that waited for the check of its token."""
        try:
            self._welcome(peer, request)
        except WireError as error:
            peer.refuse(request.id, error)
        except Exception:  # a bug must end one client's connection, not the whole cache
            peer.close_after_defect()

    def _welcome(self, peer: Peer, request: wire.Hello) -> None:
        block_bytes, namespace = 0, request.namespace
        if namespace:
            block_bytes = self._store.check_namespace(namespace)
            namespace = own(namespace, peer.session.rights)
        if self.tenants is not None:
            try:
                self.tenants.enter(peer, self._state.now)
            except LimitReached:  # then it is closed like other connections that have not logged in
                peer.session.rights, peer.session.login = NONE, None
                raise
            self.places.log_in(peer, self._state.now)
        self.purging.leave(peer)
        peer.session.namespace = namespace
        generation = self.purging.enter(peer, request)
        peer.session.replicas = request.replicas
        self.sets.note_replicas(peer, self._store.get(peer.session.namespace))
        peer.session.client = request.client[: wire.MAX_SHOWN_NAME]
        transport = self._transport
        if transport is not None and peer.leases is None and wire.transport_of(request) == transport.name:
            self._store.arena.lending = True
            peer.leases = Leases(self.lending, peer.share, transport.sharing)
        if peer.leases is not None:
            peer.leases.ring_wanted = request.release_ring
        config = self._config
        welcome = wire.Welcome(
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
            generation=generation,
        )
        if transport is not None and peer.leases is not None and peer.files is None:
            welcome = wire.with_transport(welcome, transport.name)
        peer.outbox.reply(welcome)

    def _sync(self, peer: Peer, request: wire.Sync) -> None:
        peer.outbox.reply(wire.SyncReply(request.id))  # earlier SETs on this connection are already complete

    def _info(self, peer: Peer, request: wire.Info) -> None:
        peer.outbox.reply(wire.InfoReply(request.id, msgspec.msgpack.encode(self._report.info(peer.session.rights))))

    def _ping(self, peer: Peer, request: wire.Ping) -> None:
        peer.outbox.reply(wire.Pong(request.id))

    def _credit(self, peer: Peer, request: wire.Credit) -> None:
        stream = peer.outbox.streams.get(request.id)
        if stream is not None and request.bytes > 0:
            stream.grant(request.bytes, self._state.now)
            peer.outbox.resume(stream)

    def _cancel(self, peer: Peer, request: wire.Cancel) -> None:
        stream = peer.outbox.streams.get(request.id)
        if stream is not None:
            peer.outbox.end_stream(stream)

    def _scrub(self, peer: Peer, request: wire.Scrub) -> None:
        self._note(peer, request)
        peer.outbox.reply(wire.ScrubReply(request.id, self._disk.scrub() if self._disk is not None else 0))

    def _hottest(self, peer: Peer, request: wire.Hottest) -> None:
        namespace = self._store.get(peer.session.namespace)
        if namespace is None:
            peer.outbox.reply(wire.HottestReply(request.id, 0, b"", 0))
            return
        namespace.listed = namespace.listed or request.before
        self.background.hottest(peer, request, namespace)

    def _purge(self, peer: Peer, request: wire.Purge) -> None:
        if not (peer.session.namespace or request.all):
            raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with a namespace first")
        self._note(peer, request)
        self.background.purge(peer, request, self.purging)

    def _release(self, peer: Peer, request: wire.Release) -> None:
        if peer.leases is not None:
            peer.leases.collect()
            peer.leases.release(request.id, request.count)
            reading = peer.outbox.streams.get(request.id)
            if reading is not None:
                reading.released(self._state.now)
            for stream in peer.outbox.streams.values():  # a stream may have waited for this RELEASE
                peer.outbox.resume(stream)

    def _share(self, peer: Peer, request: wire.Share) -> None:
        if peer.files is None:
            raise WireError(ErrorCode.PROTOCOL, "SHARE is possible on the Unix socket only")
        peer.files.share(request)
        peer.outbox.reply(wire.ShareReply(request.id))

    def _raise(self, peer: Peer, request: wire.Raise) -> None:
        if (generation := self.purging.learn(peer, request.generation)) < request.generation:
            peer.outbox.reply(wire.Raised(0, generation))

    def _noted(self, peer: Peer, request: wire.Noted) -> None:
        self.purging.noted(peer, request.generation)

    def _list_clients(self, peer: Peer, request: wire.Clients) -> None:
        rows = self._clients.rows(request.after, peer.session.rights, self._state.now)
        peer.outbox.reply(wire.ClientsReply(request.id, rows))

    def _slowlog(self, peer: Peer, request: wire.Slowlog) -> None:
        slow = self._state.slow
        peer.outbox.reply(wire.SlowlogReply(request.id, slow.rows(peer.session.rights), slow.limit_ms))

    def _configure(self, peer: Peer, request: wire.Configure) -> None:
        if not peer.session.rights.owns_all:  # settings concern all tenants and models
            raise self._denied(peer, request, refuse_to_owner_of_some(peer.session.rights, request))
        if not request.name:
            peer.outbox.reply(wire.ConfigureReply(request.id, self.configuring.all()))
            return
        setting, before = self.configuring.change(request.name, request.value, peer)
        self._note(peer, request, "done", setting=setting.name, value=setting.value, before=before)
        peer.outbox.reply(wire.ConfigureReply(request.id, [setting], before))

    # ---- requests with keys ----------------------------------------------------------------------------------

    def handle_keyed(self, peer: Peer, request: wire.KeyedRequest, keys: bytes) -> None:
        """Handle a request whose keys have arrived. Raises `WireError`."""
        kind = type(request)
        verb = wire.VERBS[kind]
        namespace = self._store.find(peer.session.namespace, request.key_bytes)
        if self.purging.generations.is_emptying(peer.session.namespace_id) and verb.right == READ:
            namespace = None  # blocks that are still there belong to an earlier generation
        self.sets.note_replicas(peer, namespace)
        peer.session.remember(keys)
        if namespace is not None and namespace.memory.transient:
            self.lending.collect()  # transient blocks that clients have read may then be free
        self.keyed_handlers[kind](peer, request, namespace, keys)
        state = self._state
        if verb.timed and not verb.disk and state.timing.add(kind, state.now):  # others are counted when answered
            state.slow.add(peer.session, kind, state.now, request.count)

    def _get(self, peer: Peer, request: wire.Get, namespace: NamespaceStore | None, keys: bytes) -> None:
        self._state.gets += 1
        now, pin_until = self._state.now, 0.0
        count = request.count
        if request.prefix and namespace is not None and self._pinnable(peer, namespace, count) == count:
            pin_until = now + min(PREFIX_PIN_S, request.deadline_ms / 1000)
            namespace.pins += count
        stream = ReplyStream(
            self._store, self._disk, namespace, request, keys, now, peer.outbox.resume, pin_until, peer.leases
        )
        peer.outbox.add_stream(stream)  # the GET's time is counted when its last part is sent

    def _withdraw(self, peer: Peer, request: wire.Withdraw, namespace: NamespaceStore | None, keys: bytes) -> None:
        withdrawn = namespace.promises.withdraw(split(keys, request.key_bytes), peer) if namespace else 0
        peer.outbox.reply(wire.WithdrawReply(request.id, withdrawn))

    def _promise(self, peer: Peer, request: wire.MakePromise, namespace: NamespaceStore | None, keys: bytes) -> None:
        if self._state.draining:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        named, new = list(split(keys, request.key_bytes)), request.count
        if namespace is not None and namespace.promises.held_by(peer):  # renewed promises take no more memory
            new = namespace.promises.new_to(peer, named)
        if new:
            peer.share.check_lasting(new * PROMISE_BYTES)
        namespace, now = self._store.open(peer.session.namespace, request.key_bytes), self._state.now
        present = namespace.contains(keys, now, False, 0)
        if self.purging.generations.is_emptying(peer.session.namespace_id):
            present = bytes(request.count)
        answers = namespace.promises.make(named, present, peer, now + request.ttl_ms / 1000, peer.promised)
        peer.promises_in(namespace.promises)
        peer.outbox.reply(wire.PromiseReply(request.id, answers))

    def _delete(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore | None, keys: bytes) -> None:
        if request.damaged and namespace is not None:
            self.background.delete_damaged(peer, request, namespace, keys)
            return
        if request.damaged:
            peer.outbox.reply(wire.DeleteReply(request.id, 0))
            return
        disk = self._disk
        # While the disk tier recovers, the blocks may be on disk although the namespace is not known yet.
        if namespace is None and disk is not None and disk.recovering:
            namespace = self._store.open(peer.session.namespace, request.key_bytes)
        held = 0
        if namespace is not None and disk is not None:
            held = REMOVAL_BYTES * request.count + len(keys)
            peer.share.check(held)
            disk.disown(namespace, keys)
        deleted = namespace.delete(keys, self._state.now) if namespace else 0
        timed = TimedRequest(wire.Delete, self._state.now, request.count)
        self.sets.reply_for_good(peer, wire.DeleteReply(request.id, deleted), held, timed)

    def _expire(self, peer: Peer, request: wire.Expire, namespace: NamespaceStore | None, keys: bytes) -> None:
        there = bytes(request.count)
        if namespace is not None:
            now, ttl_s = self._state.now, request.ttl_s or namespace.ttl_s
            there = namespace.expire(keys, now, now + ttl_s if ttl_s else 0.0)
            if self._disk is not None:
                self._disk.write_again(namespace, keys, now)
        peer.outbox.reply(wire.ExpireReply(request.id, there))

    def _look_up(
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
            peer.outbox.reply(reply)
            return
        pins = self._pinnable(peer, namespace, request.count) if request.pin_s > 0 else 0
        namespace.pins += pins  # they count from now on
        pinned_until = self._state.now + request.pin_s
        pin_until = pinned_until if pins == request.count else 0.0
        tick = self._store.ticks(request.count) if request.refresh else 0
        if isinstance(request, wire.MatchPrefix):
            length = namespace.match_prefix(keys, self._state.now, request.refresh, tick, pin_until)
            peer.outbox.reply(wire.MatchReply(request.id, length))
        else:
            look_up = namespace.expected if request.promised else namespace.contains
            present = look_up(keys, self._state.now, request.refresh, tick, pin_until)
            length = request.count
            peer.outbox.reply(wire.ContainsReply(request.id, present))
        if 0 < pins < request.count:  # the first blocks, because the others of a chain are useless without them
            namespace.contains(keys[: min(pins, length) * request.key_bytes], self._state.now, False, 0, pinned_until)

    def _pinnable(self, peer: Peer, namespace: NamespaceStore, count: int) -> int:
        """Return how many of `count` more blocks a client may pin."""
        now = self._state.now
        count = namespace.pinnable(count, now)
        if self.tenants is not None and count:
            count = self.tenants.pinnable(peer, namespace, count, self._store, now)
        return count
