"""One shard: one process, one event loop, one index, one arena, one port.

It is a level-triggered epoll loop over the listening socket and its connections. Its thread does all work of the shard
between two polls, except for the work of the disk's threads. Bytes move inside system calls, with the GIL released. The
loop accepts, reads, flushes, enforces deadlines, lets the disk tier work, and drains. `answers` handles the requests.

Over 400 lines because everything that happens in a turn is in one place, in the order in which it happens.

The supervisor starts a shard (`kvstore.shard.process`).
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

from kvstore import wire
from kvstore.auth.audit import Audit
from kvstore.auth.policy import AuthFile
from kvstore.auth.rights import ALL, NONE
from kvstore.disk.tier import DiskTier
from kvstore.networks import network_of
from kvstore.shard.account import AddressBudget
from kvstore.shard.client_files import ClientFiles, can_take_files
from kvstore.shard.connection_limits import ConnectionLimits
from kvstore.shard.handlers import RequestHandlers
from kvstore.shard.leases import Holders, Leases
from kvstore.shard.logins import LOGIN_S
from kvstore.shard.neighbours import Neighbours
from kvstore.shard.outbox import Outbox
from kvstore.shard.peer import ConnectionClass, Peer
from kvstore.shard.reader import MessageReader
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.tenants import Tenants
from kvstore.shard.turns import SliceQueue
from kvstore.shard.waiting import EventWait
from kvstore.store.arena import Arena
from kvstore.store.namespaces import ShardStore
from kvstore.tls.handing import Handed
from kvstore.wire.remote_memory import DESCRIPTORS, UNMAPPED, Sharing, Touched, Transport
from kvstore.wire.shared import peer_credentials

log = logging.getLogger("kvstore.shard")

IDLE_S: Final = 30.0  # when all places are taken, a connection that was idle for this long is closed
BACKED_UP_S: Final = 0.5  # extra time for a message if its client does not read its replies
STRANGER_S: Final = 2.0  # a connection that has not logged in by then is closed if its place is needed
ACCEPTS: Final = 64  # the most connections accepted in a turn
NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_PAUSE_S: Final = 1.0  # the pause in accepting when no descriptor was free for a connection
HOUSEKEEPING_S: Final = 0.1
PROGRESS_S: Final = 0.001  # how often the loop helps clients without a network card to read blocks
DISK_TURN_S: Final = 0.02  # how often the loop wakes while the disk tier has work that is due later
DISK_FINISH_S: Final = 300.0  # how long a clean stop may take to write the blocks that are only in memory
QUIET_BYTES: Final = 1 << 20  # a turn with less payload than this does not count as traffic
DEAD_PEER_MS: Final = 30_000


class Shard:
    """The event loop, and the connections, store and disk tier that it serves. One thread."""

    def __init__(
        self,
        config: ShardConfig,
        listener: socket.socket | Handed,
        local: socket.socket | None = None,
        sharing: Sharing = DESCRIPTORS,
    ) -> None:
        """local: the Unix socket for clients on this host. sharing: how memory is shared with these clients."""
        self._config = config
        self._sharing = sharing
        auth = AuthFile(config.auth) if config.auth else None
        self._audit = Audit(config.audit, node=config.node, shard=config.shard)
        self._state = ShardState(time.monotonic(), ALL if auth is None else NONE)
        self._state.keep_slow_requests(config.slowlog_ms)
        self._store = ShardStore(
            config.memory_bytes,
            config.segment_bytes,
            config.policy,
            config.rules,
            shared=len(config.shards) > 1,
            lends=local is not None or bool(config.transport),
            transient_bytes=config.transient_bytes,
        )
        log.info("%d bytes of block memory in %s", config.memory_bytes, self._store.arena.pages)
        self._readers: dict[int, MessageReader] = {}  # by descriptor
        self._to_read: SliceQueue[MessageReader] = SliceQueue()  # connections that may have sent bytes
        self._to_flush: SliceQueue[Outbox] = SliceQueue()  # connections that may have bytes to send
        self._listeners = {each.fileno(): each for each in (listener, local) if each is not None}
        self._poll = select.epoll()
        self._touched = Touched()
        self._holders = Holders(self._poll)
        self._accepts_again = float("inf")  # when to poll the listeners again, after a pause
        self._places = ConnectionLimits(self._state.account, config.cookie, self._close_idle)
        self._drain_until: float | None = None
        self._behind = False  # the disk tier is behind with its writes, so clients that send SETs must wait
        self._finishing = False  # all clients are gone, and the disk tier writes the blocks that are only in memory
        self._traffic = (0, 0.0)  # the payload bytes at the last turn with traffic, and the time of that turn
        self._disk: DiskTier | None = None
        if config.disk is not None:
            self._disk = DiskTier(self._store, config.disk, self._poll)
        self._transport = Transport.of(config.transport)
        if self._transport is not None:
            self._store.arena.withdraw = self._transport.sharing.withdraw
        self._answers = RequestHandlers(
            config,
            self._store,
            self._disk,
            self._state,
            self._places,
            self._audit,
            auth,
            self._transport,
            self._readers.values(),
        )
        self._logins = self._answers.logins
        self._neighbours = Neighbours(config, self._store)

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drained. Blocks. At the end, close the connections, the disk tier and the arena."""
        poll, state, disk = self._poll, self._state, self._disk
        turns = state.turns
        for listener in self._listeners:
            poll.register(listener, select.EPOLLIN)
        logins = self._logins
        for fd in (self._neighbours.fd, logins.fd if logins is not None else -1):
            if fd >= 0:
                poll.register(fd, select.EPOLLIN)
        housekeeping, waiting = 0.0, EventWait(poll)
        while self._drain_until is None or not self._drained():
            events = waiting.events(self._patience_s())
            state.now = now = time.monotonic()
            turns.begin(now)
            for fd, event in events:
                reader = self._readers.get(fd)
                if reader is None:
                    self._on_event(fd, event, now)
                    turns.done("events")
                    continue
                gone = event & (select.EPOLLHUP | select.EPOLLERR)
                if gone and not self._may_read(reader):  # poll reports the end even of a connection that is not read
                    reader.peer.close("the client is gone")
                    continue
                if gone or event & select.EPOLLIN:
                    self._to_read.add(reader, reader.pace)
                if event & select.EPOLLOUT:
                    reader.peer.outbox.wake()
            self._read_all(now)
            self._neighbours.tell()
            turns.done("requests")
            self._answers.background.step(now)
            self._neighbours.cut(now)
            turns.done("background")
            if disk is not None:
                self._pump_disk(disk, now)
                turns.done("disk")
            if self._store.arena.retired:
                self._tell_retired(self._store.arena)
            self._flush_all(now)
            turns.done("replies")
            if self._transport is not None and self._answers.lending.remote_blocks:
                self._transport.sharing.progress()
                turns.done("transport")
            if now >= housekeeping:
                housekeeping = now + HOUSEKEEPING_S
                self._keep_house(now)
                turns.done("housekeeping")
            turns.end()
        self._close_all()
        if disk is not None:
            disk.close()
        self._store.arena.close()
        self._audit.close()

    def _keep_house(self, now: float) -> None:
        """Do the work that must be done from time to time, but not in each turn."""
        self._enforce_deadlines(now)
        self._store.expire(now, self._state.draining)
        if self._logins is not None and self._logins.step(now):
            self._take_policy()
        if self._transport is not None:
            self._transport.sharing.progress()  # for clients that connect or leave
        if now >= self._accepts_again:
            self._accepts_again = float("inf")
            for listener in self._listeners:
                self._poll.register(listener, select.EPOLLIN)

    def _take_policy(self) -> None:
        """Apply a new policy, and close the connections whose token or rights are not in it."""
        if self._logins is not None:
            self._answers.configuring.take_policy(self._logins.policy)
        for reader in list(self._readers.values()):
            peer = reader.peer
            if self._logins is not None and not self._logins.still_valid(peer):
                log.info("client %s: the rights of principal %r changed", peer.address, peer.session.rights.principal)
                peer.close("its principal has other rights now")

    def _patience_s(self) -> float:
        """Return the number of seconds for which the loop may sleep if no event comes."""
        if self._to_read or self._to_flush or self._answers.background.pending or self._neighbours.pending:
            return 0.0
        if self._answers.lending.remote_blocks:
            return PROGRESS_S
        disk = self._disk
        if disk is None or not (disk.restless or disk.working):
            return HOUSEKEEPING_S
        return 0.0 if disk.restless else DISK_TURN_S

    def _on_event(self, fd: int, event: int, now: float) -> None:
        """Handle an event that does not belong to a client's connection."""
        if fd in self._listeners:
            self._accept(self._listeners[fd], now)
        elif fd == self._neighbours.fd:
            self._neighbours.hear()
        elif self._logins is not None and fd == self._logins.fd:
            self._logins.finish()
        elif self._disk is None or not self._on_disk_event(self._disk, fd, event):
            self._holders.on_event(fd)

    @staticmethod
    def _on_disk_event(disk: DiskTier, fd: int, event: int) -> bool:
        try:
            return disk.on_event(fd, event)
        except Exception:  # a bug must turn the disk tier off, not end the whole cache
            log.exception("disk: internal error")
            disk.fail_with(errno.EIO)
            return True

    def _pump_disk(self, disk: DiskTier, now: float) -> None:
        payload = self._state.bytes_in + self._state.bytes_out + self._answers.lending.total_bytes
        if payload - self._traffic[0] > QUIET_BYTES:
            self._traffic = (payload, now)
        try:
            disk.pump(now, self._traffic[1], self._finishing)
        except Exception:  # see `_on_disk_event`
            log.exception("disk: internal error")
            disk.fail_with(errno.EIO)
        if disk.behind != self._behind:
            self._behind = disk.behind
            for reader in self._readers.values():  # so that `_flush` polls them for other events
                reader.peer.outbox.wake()

    def reload(self) -> None:
        """Read the file of principals again. Safe to call in a signal handler."""
        if self._logins is not None:
            self._logins.asked_to_reload = True

    def drain(self) -> None:
        """Finish requests in progress, accept no new connections or SETs, then end. Safe to call in a signal
        handler."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._config.drain_s
            self._state.draining = True

    def _drained(self) -> bool:
        assert self._drain_until is not None
        disk = self._disk
        if not self._finishing:
            if time.monotonic() < self._drain_until and not all(reader.idle for reader in self._readers.values()):
                return False
            if disk is None:
                return True
            self._close_all()
            self._finishing = True
            disk.finish(time.monotonic())
        return disk is None or disk.finished or time.monotonic() > self._drain_until + DISK_FINISH_S

    def _close_all(self) -> None:
        for reader in list(self._readers.values()):
            reader.peer.close("the server is shutting down")

    def _accept(self, listener: socket.socket | Handed, now: float) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client has left, or no descriptor is free; other connections continue
                log.warning("accept failed: %s", error)
                if error.errno in NOTHING_LEFT:  # otherwise poll would report the listener again and again
                    for each in self._listeners:
                        self._poll.unregister(each)
                    self._accepts_again = now + ACCEPT_PAUSE_S
                return
            if self._drain_until is not None:
                sock.close()
                continue
            sock.setblocking(False)
            peer = self._remote_peer(sock, address) if address else self._local_peer(sock)  # none at the Unix socket
            if peer is None:
                sock.close()
                continue
            self._places.add(peer, now)
            reader = self._readers[sock.fileno()] = MessageReader(peer, self._answers, self._state)
            self._state.connections += 1
            reader.events = select.EPOLLIN
            self._poll.register(sock.fileno(), reader.events)
            peer.outbox.wake()

    def _remote_peer(self, sock: socket.socket, address: tuple[str, int]) -> Peer:
        if sock.family != socket.AF_UNIX:  # otherwise it was handed over, and another process has the client's socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
        host, port = address[:2]
        share = self._places.share(network_of(host) if self._state.newcomer is NONE else host)
        return Peer(self._state, sock, share, host, port, self._to_flush, self._forget)

    def _local_peer(self, sock: socket.socket) -> Peer | None:
        """Return the peer at a Unix socket, or None if its user may not connect there."""
        process, user = peer_credentials(sock)
        if user not in self._config.unix_users:
            log.warning(
                "process %d of user %d connected to the Unix socket and was refused: only users %s may connect",
                process,
                user,
                ", ".join(map(str, self._config.unix_users)),
            )
            return None
        if not can_take_files():
            log.warning(
                "process %d of user %d was refused at the Unix socket: files that clients shared cannot be closed",
                process,
                user,
            )
            return None
        self._store.arena.lending = True
        trusted = user in (0, os.getuid()) or not self._sharing.mapped
        share = self._places.share(f"user {user} of this host")
        return Peer(
            self._state,
            sock,
            share,
            share.address,
            process,
            self._to_flush,
            self._forget,
            Leases(self._answers.lending, share, self._sharing),
            ClientFiles(self._sharing if trusted else UNMAPPED, self._touched),
        )

    def _tell_retired(self, arena: Arena) -> None:
        """Tell clients on this host which files were truncated, so that the clients unmap these files."""
        retired, arena.retired = arena.retired, []
        for reader in list(self._readers.values()):
            leases = reader.peer.leases
            numbers = leases.retire(retired) if leases is not None else b""
            if numbers:
                reader.peer.outbox.reply(wire.Retired(0, numbers))

    def _close_idle(self, share: AddressBudget | None) -> bool:
        """Free a place of a client, either at one address or at any. Close the oldest connection that has not logged in
        within `STRANGER_S`. If there is none, close the connection that was idle for longest, if it was idle for at
        least `IDLE_S`. Return whether a connection was closed."""
        placed = [
            reader
            for reader in self._readers.values()
            if reader.peer.place is ConnectionClass.CLIENT and share in (None, reader.peer.share)
        ]
        strangers = (reader for reader in placed if reader.peer.session.rights is NONE)
        stranger = min(strangers, key=lambda reader: reader.began, default=None)
        if stranger is not None and self._state.now - stranger.began >= STRANGER_S:
            stranger.peer.close("it has not logged in, and its place is needed")
            return True
        idle = min((reader for reader in placed if reader.idle), key=lambda reader: reader.last_heard, default=None)
        if idle is None or self._state.now - idle.last_heard < IDLE_S:
            return False
        idle.peer.close("idle, and its place is needed")
        return True

    def _forget(self, peer: Peer) -> None:
        """Drop a connection whose socket is about to be closed."""
        self._readers.pop(peer.sock.fileno()).abandon()
        self._answers.purging.leave(peer)
        Tenants.leave(peer)
        self._state.connections -= 1
        with contextlib.suppress(OSError):
            self._poll.unregister(peer.sock.fileno())
        if peer.leases is not None and peer.leases.held_bytes:  # the client's process may still read blocks lent to it
            sock = socket.socket(fileno=peer.sock.detach())
            self._holders.keep(sock, peer.leases, lambda: self._places.remove(peer))
        else:
            self._places.remove(peer)

    @staticmethod
    def _grace_s(reader: MessageReader) -> float:
        """Return how long after its deadline a message may still end, because received bytes may wait for this loop."""
        if not reader.paused:
            return 0.0
        return BACKED_UP_S if reader.peer.outbox.backed_up else float("inf")

    def _held_back(self, reader: MessageReader) -> bool:
        """Return whether the client is not read now, because it sends SETs and the disk is behind."""
        return reader.writer and self._behind

    def _may_read(self, reader: MessageReader) -> bool:
        outbox = reader.peer.outbox
        stopped = outbox.closed or outbox.closing or outbox.backed_up or reader.peer.session.logging_in
        return not (stopped or self._held_back(reader))

    def _read_all(self, now: float) -> None:
        for reader in self._to_read.turn():
            if self._may_read(reader):
                reader.on_readable(now)
                self._read_on(reader)

    def _read_on(self, reader: MessageReader) -> None:
        """Queue a paused reader again, because poll does not report the messages that wait in the reader."""
        if reader.paused and self._may_read(reader):
            self._to_read.add(reader, reader.pace)

    def _flush_all(self, now: float) -> None:
        for outbox in self._to_flush.turn():
            if not outbox.closed:
                self._flush(self._readers[outbox.sock.fileno()], outbox, now)

    def _flush(self, reader: MessageReader, outbox: Outbox, now: float) -> None:
        try:
            more = outbox.flush(now)
        except OSError as error:
            reader.peer.close(f"connection lost: {error}")
            return
        except Exception:  # a bug must end one client's connection, not the whole cache
            reader.peer.close_after_defect()
            return
        if outbox.closing and not more:
            reader.peer.close("closed after an error")
            return
        self._read_on(reader)
        events = select.EPOLLOUT if more else 0
        if self._may_read(reader):
            events |= select.EPOLLIN
        if events != reader.events:
            reader.events = events
            self._poll.modify(outbox.sock.fileno(), events)

    def _enforce_deadlines(self, now: float) -> None:
        self._answers.lending.collect()
        for reader in list(self._readers.values()):
            peer = reader.peer
            held_back = self._held_back(reader)
            reader.keep_alive(now, held_back)
            if now > peer.outbox.next_due:
                self._pass_time(peer, now, held_back)
                if peer.outbox.closed:
                    continue
            if held_back:  # the server causes the delay, so the client's deadline must not run
                reader.deadline += HOUSEKEEPING_S
                if reader.write is not None:
                    reader.write.held_back_s += HOUSEKEEPING_S
                continue
            if now > reader.deadline + self._grace_s(reader):
                self._state.errors += 1
                peer.close("a message or handshake was not finished by its deadline")
                continue
            if peer.outbox.stalled(now):
                peer.close("the client does not read its replies")
                continue
            # A client that is logging in has twice as long, but no longer: a client that sends one bad token after the
            # other must not keep a place.
            if peer.session.rights is NONE and now > reader.began + LOGIN_S * (2 if peer.session.logging_in else 1):
                peer.close("it has not logged in")
                continue
            # The socket's low-water mark is based on the bytes that the client must still send. If the client sends
            # fewer, epoll never reports them. So read the bytes that have arrived.
            if reader.write is not None:
                self._to_read.add(reader, reader.pace)
            if peer.leases is not None and peer.leases.held_bytes:
                for stream in peer.outbox.streams.values():
                    if stream.impatient(now):
                        peer.outbox.resume(stream)
        self._flush_all(now)

    @staticmethod
    def _pass_time(peer: Peer, now: float, held_back: bool) -> None:
        """Serve the streams of a connection that are due. While the connection is held back (`held_back`), its CANCELs
        are not read."""
        outbox = peer.outbox
        for stream in list(outbox.streams.values()):
            if now > stream.deadline + 2.0 and not held_back:
                peer.close("a reply was not taken by its deadline")
                return
            if now > stream.due:
                stream.time_passed(now)
        outbox.next_due = min((stream.due for stream in outbox.streams.values()), default=float("inf"))
