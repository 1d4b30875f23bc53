"""One shard: one process, one event loop, one index, one arena, one port.

A level-triggered epoll loop over the listening socket and its peers. Everything the shard does happens between two
polls, in this thread; bytes move inside system calls with the GIL released. The loop's state is three sets: all
peers, the peers that may have something to send, and the streams parked on a block being written.

The supervisor starts it (`kvstore.shard.process`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import __version__, wire
from kvstore._cext import BlockIndex
from kvstore.disk.tier import DiskTier
from kvstore.shard.peer import Peer, Write
from kvstore.shard.setup import ShardConfig
from kvstore.shard.stream import Stream
from kvstore.store.namespaces import NamespaceStore, Store, find_parent
from kvstore.store.tier import Slots
from kvstore.wire import ErrorCode, Outcome, WireError

log = logging.getLogger("kvstore.shard")

MAX_CONNECTIONS: Final = 2048
MAX_BUFFERED_BYTES: Final = 64 << 20  # headers, keys and checksums of all peers together
MAX_REMEMBERED_BYTES: Final = 16 << 20  # while they take less than this, what peers asked for last is remembered
SMALL_BUFFER_BYTES: Final = 8 << 10  # a frame this small is always taken
HOUSEKEEPING_S: Final = 0.1
MAX_PINNED_SHARE: Final = 0.5
DISK_TURN_S: Final = 0.02  # how often work of the disk tier is looked after
DISK_FINISH_S: Final = 300.0  # what a clean stop may take to write what is only in memory
QUIET_BYTES: Final = 1 << 20  # less than this in a turn is no traffic
DEAD_PEER_MS: Final = 30_000
_OUTCOME_OF_VERDICT: Final = np.zeros(4, dtype=np.uint8)  # by its negative: `BlockIndex.reserve`; 0 is a slot
_OUTCOME_OF_VERDICT[[0, -BlockIndex.EXISTED, -BlockIndex.DUPLICATE, -BlockIndex.NO_SPACE]] = (
    Outcome.CREATED,
    Outcome.EXISTED,
    Outcome.DUPLICATED,
    Outcome.ERROR,
)


class Shard:
    """The event loop and what it serves."""

    def __init__(self, config: ShardConfig, listener: socket.socket) -> None:
        self.config = config
        self.now = self._started = time.monotonic()
        self.store = Store(config.memory_bytes, config.segment_bytes, config.policy, config.rules)
        log.info("%d bytes of block memory in %s", config.memory_bytes, self.store.arena.pages)
        self.to_flush: set[Peer] = set()
        self.buffered_bytes = 0
        self.bytes_in = self.bytes_out = self.errors = 0
        self._sets = self._gets = self._lookups = 0
        self._peers: dict[int, Peer] = {}
        self._listener = listener
        self._poll = select.epoll()
        self._drain_until: float | None = None
        self._behind = False  # the disk tier is, and who sets must wait
        self._finishing = False  # clients are gone, the disk tier is brought up to date
        self._traffic = (0, 0.0)  # payload bytes so far, and when there were last more of them
        self.disk: DiskTier | None = None
        if config.disk is not None:
            self.disk = self.store.disk = DiskTier(self.store, config.disk, self._poll)

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drained."""
        listener, poll = self._listener, self._poll
        poll.register(listener.fileno(), select.EPOLLIN)
        housekeeping = 0.0
        while not self._drained():
            events = poll.poll(self._patience_s())
            self.now = now = time.monotonic()
            for fd, event in events:
                if fd == listener.fileno():
                    self._accept()
                    continue
                if self.disk is not None and self._on_disk_event(self.disk, fd, event):
                    continue
                peer = self._peers.get(fd)
                if peer is None:
                    continue
                if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    peer.on_readable(now)
                if event & select.EPOLLOUT:
                    self.to_flush.add(peer)
            if self.disk is not None:
                self._pump_disk(self.disk, now)
            while self.to_flush:
                self._flush(self.to_flush.pop(), now)
            if now >= housekeeping:
                housekeeping = now + HOUSEKEEPING_S
                self._enforce_deadlines(now)
                self.store.expire(now)
        for peer in list(self._peers.values()):
            peer.close("the server is shutting down")
        if self.disk is not None:
            self.disk.close()
        self.store.arena.close()

    def _patience_s(self) -> float:
        """How long the loop may sleep when nothing happens."""
        disk = self.disk
        if disk is None or not (disk.restless or disk.working):
            return HOUSEKEEPING_S
        return 0.0 if disk.restless else DISK_TURN_S

    @staticmethod
    def _on_disk_event(disk: DiskTier, fd: int, event: int) -> bool:
        try:
            return disk.on_event(fd, event)
        except Exception:  # a defect of ours must cost the disk tier, not everybody the cache
            log.exception("disk: internal error")
            disk.fail_with(errno.EIO)
            return True

    def _pump_disk(self, disk: DiskTier, now: float) -> None:
        payload = self.bytes_in + self.bytes_out
        if payload - self._traffic[0] > QUIET_BYTES:
            self._traffic = (payload, now)
        try:
            disk.pump(now, self._traffic[1], self._finishing)
        except Exception:  # see `_on_disk_event`
            log.exception("disk: internal error")
            disk.fail_with(errno.EIO)
        if disk.writing.behind != self._behind:
            self._behind = disk.writing.behind
            self.to_flush.update(self._peers.values())  # writers are read no further, or again

    def drain(self) -> None:
        """Finish what has begun, take nothing new; safe to call from a signal handler."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self.config.drain_s

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        disk = self.disk
        if not self._finishing:
            if time.monotonic() < self._drain_until and not all(peer.idle for peer in self._peers.values()):
                return False
            if disk is None:
                return True
            for peer in list(self._peers.values()):
                peer.close("the server is shutting down")
            self._finishing = True
            disk.finish(time.monotonic())
        return disk is None or disk.finished or time.monotonic() > self._drain_until + DISK_FINISH_S

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client left already, or no descriptor is free: the others go on
                log.warning("accept failed: %s", error)
                return
            if len(self._peers) >= MAX_CONNECTIONS or self._drain_until is not None:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
            peer = Peer(self, sock, f"{address[0]}:{address[1]}", self.now)
            self._peers[sock.fileno()] = peer
            peer.events = select.EPOLLIN
            self._poll.register(sock.fileno(), peer.events)
            self.to_flush.add(peer)

    def _flush(self, peer: Peer, now: float) -> None:
        if peer.closed:
            return
        more = peer.flush(now)
        if peer.closed:
            return
        events = select.EPOLLOUT if more else 0
        if not (peer.closing or peer.backed_up or (peer.writer and self._behind)):
            events |= select.EPOLLIN
        if events != peer.events:
            peer.events = events
            self._poll.modify(peer.sock.fileno(), events)

    def forget(self, peer: Peer) -> None:
        """The peer is closing: its socket is about to be closed."""
        self._peers.pop(peer.sock.fileno(), None)
        with contextlib.suppress(OSError):
            self._poll.unregister(peer.sock.fileno())

    def _enforce_deadlines(self, now: float) -> None:
        for peer in list(self._peers.values()):
            peer.keep_alive(now, peer.writer and self._behind)
            if peer.writer and self._behind:  # it waits for us, not we for it
                peer.message_deadline += HOUSEKEEPING_S
                continue
            if now > peer.message_deadline:
                self.errors += 1
                peer.close("a message or handshake was not finished by its deadline")
                continue
            if peer.stalled(now):
                peer.close("the client takes nothing of its replies")
                continue
            if peer.write is not None:  # what breaks the protocol's promise of more may lie below the low-water mark
                peer.on_readable(now)
            for stream in list(peer.streams.values()):
                if now > stream.deadline + 2.0:
                    peer.close("a reply was not taken by its deadline")
                    break
                if now > stream.deadline:
                    stream.give_up_waiting()
                    peer.resume(stream)
        while self.to_flush:
            self._flush(self.to_flush.pop(), now)

    # ---- bounds ----------------------------------------------------------------------------------------------

    def check_buffer_room(self, size: int, request_id: int = 0) -> None:
        """Raise `WireError` when frames being collected and large replies would take more memory than a shard allows
        itself."""
        if size > SMALL_BUFFER_BYTES and self.buffered_bytes + size > MAX_BUFFERED_BYTES:
            raise WireError(ErrorCode.LIMIT, "the server is holding too many requests; try again", request_id)

    # ---- requests --------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, request: wire.Request) -> None:
        """A request of one frame."""
        if isinstance(request, wire.Hello):
            self._hello(peer, request)
        elif isinstance(request, wire.Credit):
            stream = peer.streams.get(request.id)
            if stream is not None and request.bytes > 0:
                stream.grant(request.bytes, self.now)
                peer.resume(stream)
        elif isinstance(request, wire.Cancel):
            stream = peer.streams.get(request.id)
            if stream is not None:
                peer.end_stream(stream)
        elif isinstance(request, wire.Ping):
            peer.reply(wire.Pong(request.id))
        elif isinstance(request, wire.Sync):  # every SET before it was placed as it arrived
            peer.reply(wire.SyncReply(request.id))
        elif isinstance(request, wire.Info):
            peer.reply(wire.InfoReply(request.id, msgspec.msgpack.encode(self.info())))
        elif isinstance(request, wire.Scrub):
            disk = self.disk
            peer.reply(wire.ScrubReply(request.id, disk.scrubbing.ask() if disk is not None and disk.on else 0))
        elif isinstance(request, wire.Hottest):
            self._hottest(peer, request)

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
                block_bytes = self.store.check_namespace(request.namespace)
            except WireError as error:
                error.request_id = request.id
                raise
        peer.namespace = request.namespace
        peer.replicas = request.replicas
        self._note_replicas(peer, self.store.get(peer.namespace))
        peer.client = request.client[:64]
        config = self.config
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

    @staticmethod
    def _note_replicas(peer: Peer, namespace: NamespaceStore | None) -> None:
        """Whoever moves this namespace's blocks keeps as many copies as its clients do."""
        if namespace is not None and namespace.replicas < peer.replicas:
            namespace.replicas = peer.replicas

    def _hottest(self, peer: Peer, request: wire.Hottest) -> None:
        if not peer.namespace:
            raise WireError(ErrorCode.NO_NAMESPACE, "no namespace yet: send HELLO with one first", request.id)
        namespace = self.store.get(peer.namespace)
        if namespace is None:
            peer.reply(wire.HottestReply(request.id, 0, b"", 0))
            return
        limit = min(request.limit, wire.MAX_HOTTEST_BYTES // namespace.key_bytes)
        keys, total = namespace.hottest(request.skip, limit, self.now)
        self.check_buffer_room(len(keys), request.id)
        peer.reply(wire.HottestReply(request.id, namespace.key_bytes, keys, total))

    def handle_keyed(self, peer: Peer, request: wire.KeyedRequest, keys: bytes) -> None:
        """A request whose keys have arrived."""
        namespace = self.store.find(peer.namespace, request.key_bytes)
        self._note_replicas(peer, namespace)
        self._remember(peer, keys)
        if isinstance(request, wire.Get):
            self._gets += 1
            stream = Stream(self.store, self.disk, namespace, request, keys, self.now, peer.resume)
            if self.buffered_bytes + stream.nbytes > MAX_BUFFERED_BYTES:
                raise WireError(ErrorCode.LIMIT, "the server is holding too many requests; try again")
            peer.add_stream(stream)
            self.buffered_bytes += stream.nbytes
        elif isinstance(request, wire.Delete):
            self._delete(peer, request, namespace, keys)
        else:
            self._lookup(peer, request, namespace, keys)

    def _delete(self, peer: Peer, request: wire.Delete, namespace: NamespaceStore | None, keys: bytes) -> None:
        disk = self.disk
        if namespace is None and disk is not None and disk.recovering:  # it may turn out to be on disk
            namespace = self.store.open(peer.namespace, request.key_bytes)
        if namespace is not None and disk is not None:
            disk.fetching.disown(namespace, keys)
        deleted = namespace.delete(keys, self.now) if namespace else 0
        self._reply_for_good(peer, wire.DeleteReply(request.id, deleted))

    def _reply_for_good(self, peer: Peer, reply: wire.Reply) -> None:
        """Tell the client what holds even if the server dies now: what was removed does not come back from disk."""
        if self.disk is None:
            peer.reply(reply)
        else:
            peer.promised += 1
            self.disk.after_removals(lambda: self._keep_promise(peer, reply))

    def _keep_promise(self, peer: Peer, reply: wire.Reply) -> None:
        peer.promised -= 1
        if not peer.closed:
            peer.reply(reply)

    def _lookup(
        self,
        peer: Peer,
        request: wire.Contains | wire.MatchPrefix,
        namespace: NamespaceStore | None,
        keys: bytes,
    ) -> None:
        self._lookups += 1
        matching = isinstance(request, wire.MatchPrefix)
        if namespace is None:
            reply = wire.MatchReply(request.id, 0) if matching else wire.ContainsReply(request.id, bytes(request.count))
            peer.reply(reply)
            return
        pin_until = 0.0
        if request.pin_s > 0 and self._may_pin(namespace, request.count):
            pin_until = self.now + request.pin_s
        tick = self.store.ticks(request.count) if request.refresh else 0
        if matching:
            length = namespace.match_prefix(keys, self.now, request.refresh, tick, pin_until)
            peer.reply(wire.MatchReply(request.id, length))
        else:
            present = namespace.contains(keys, self.now, request.refresh, tick, pin_until)
            peer.reply(wire.ContainsReply(request.id, present))

    def _may_pin(self, namespace: NamespaceStore, count: int) -> bool:
        """Pins never cover so much of a namespace that it could not take new blocks."""
        index = namespace.memory.index
        slots = index.slots + self.store.arena.free * index.slots_per_segment
        return index.pinned(self.now) + count <= slots * MAX_PINNED_SHARE

    def _remember(self, peer: Peer, keys: bytes) -> None:
        """What a peer asks for tells where in its chain the blocks belong that it sets next."""
        if peer.chain.startswith(keys):  # a GET of what the question before it found
            return
        self.buffered_bytes -= len(peer.chain)
        peer.chain = keys if self.buffered_bytes + len(keys) <= MAX_REMEMBERED_BYTES else b""
        self.buffered_bytes += len(peer.chain)

    def begin_write(self, peer: Peer, request: wire.Set, keys: bytes) -> Write:
        """Reserve a slot for every block that is wanted."""
        self._sets += 1
        if self._drain_until is not None:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        namespace = self.store.open(peer.namespace, request.key_bytes)
        self._note_replicas(peer, namespace)
        existed = None
        if request.force:
            existed = np.frombuffer(namespace.contains(keys, self.now, False, 0), dtype=np.bool_)
            if self.disk is not None:
                self.disk.fetching.disown(namespace, keys)
        slots = self.store.reserve(namespace, keys, request.force, self.now, request.priority)
        parent, ends_chain = find_parent(peer.chain, keys, request.key_bytes)
        return Write(request, namespace, slots, keys, existed, parent, ends_chain)

    def commit(self, peer: Peer, write: Write, sums: bytes) -> None:
        """All blocks of a SET are in their slots: they are readable from here on."""
        request, namespace, slots = write.request, write.namespace, write.slots
        checksums = np.frombuffer(sums, dtype="<u8")
        index = namespace.memory.index
        expires = self.now + namespace.ttl_s if namespace.ttl_s else 0.0
        placed = index.commit(
            slots, checksums, self.store.ticks(request.count), expires, write.parent, write.ends_chain
        )
        replaced = None if write.existed is None else write.existed & (slots >= 0)
        forced = 0 if replaced is None else int(np.count_nonzero(replaced))
        namespace.created += placed
        existed = int((slots == BlockIndex.EXISTED).sum())
        if existed:  # the chain's new tail must not outlive the head it hangs on
            namespace.contains(write.keys, self.now, True, self.store.ticks(request.count))
        namespace.wake_parked()
        reply = wire.SetReply(
            id=request.id,
            total=request.count,
            created=placed - forced,
            existed=existed,
            forced=forced,
            duplicated=int((slots == BlockIndex.DUPLICATE).sum()),
            error=int((slots == BlockIndex.NO_SPACE).sum()),
            outcomes=_outcomes(slots, replaced) if request.outcomes else b"",
        )
        written = slots[slots >= 0]
        if self.disk is None or not len(written):
            peer.reply(reply)
            return
        if request.force and namespace.disk is not None:  # what is on disk was replaced
            namespace.disk.delete(index.keys_of(written))
        self.disk.writing.was_set(namespace, written, self.now)
        if request.force:
            self._reply_for_good(peer, reply)
        else:
            peer.reply(reply)

    def stream_ended(self, stream: Stream) -> None:
        """Its memory is free again."""
        self.buffered_bytes -= stream.nbytes
        if stream.namespace is not None:
            stream.namespace.parked.discard(stream)

    def info(self) -> wire.ShardInfo:
        """This shard's state."""
        config, arena = self.config, self.store.arena
        with open("/proc/self/statm") as statm:
            rss_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return wire.ShardInfo(
            node=config.node,
            shard=config.shard,
            pid=os.getpid(),
            version=__version__,
            uptime_s=self.now - self._started,
            memory_limit_bytes=config.memory_bytes,
            memory_used_bytes=(arena.segments - arena.free) * arena.segment_bytes,
            rss_bytes=rss_bytes,
            segment_bytes=arena.segment_bytes,
            segments_free=arena.free,
            connections=len(self._peers),
            streams=sum(len(peer.streams) for peer in self._peers.values()),
            draining=self._drain_until is not None,
            sets=self._sets,
            gets=self._gets,
            lookups=self._lookups,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            errors=self.errors,
            namespaces=[namespace.info(self.now) for namespace in self.store],
            policy=config.policy,
            index_bytes=self.store.index_bytes,
            disk=self.disk.info() if self.disk is not None else None,
            name=config.shards[config.shard].name,
        )


def _outcomes(slots: Slots, replaced: npt.NDArray[np.bool_] | None) -> bytes:
    """One `Outcome` a block."""
    outcomes = _OUTCOME_OF_VERDICT[-np.minimum(slots, 0)]
    if replaced is not None:
        outcomes[replaced] = Outcome.FORCED
    return bytes(outcomes)
