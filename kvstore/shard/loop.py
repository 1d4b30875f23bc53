"""One shard: one process, one event loop, one index, one arena, one port.

A level-triggered epoll loop over the listening socket and its connections. All work of the shard but that of the disk's
threads is done between two polls, in this thread; bytes move inside system calls with the GIL released. The loop
accepts, reads, flushes, enforces deadlines, gives the disk tier its turns, and drains. `answers` handles the requests.

Over 400 lines because all that happens in a turn, in its order, is in one place.

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

from kvstore import wire
from kvstore.auth.audit import Audit
from kvstore.auth.policy import AuthFile
from kvstore.auth.rights import ALL, NONE
from kvstore.disk.tier import DiskTier
from kvstore.networks import network_of
from kvstore.shard.account import Share
from kvstore.shard.answers import Answers
from kvstore.shard.client_files import ClientFiles, can_take_files
from kvstore.shard.leases import Holders, Leases
from kvstore.shard.logins import LOGIN_S
from kvstore.shard.neighbours import Neighbours
from kvstore.shard.outbox import Outbox
from kvstore.shard.peer import Peer, Place
from kvstore.shard.places import Places
from kvstore.shard.reader import MessageReader
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.shard.tenants import Tenants
from kvstore.shard.turns import Line
from kvstore.shard.waiting import Waiting
from kvstore.store.arena import Arena
from kvstore.store.namespaces import Store
from kvstore.tls.handing import Handed
from kvstore.wire.remote_memory import DESCRIPTORS, UNMAPPED, Sharing, Touched, Transport
from kvstore.wire.shared import peer_credentials

log = logging.getLogger("kvstore.shard")

IDLE_S: Final = 30.0  # a connection that was not used for so long gives way to a new one when all places are taken
BACKED_UP_S: Final = 0.5  # for a client that does not take its replies to take them, and be read further
STRANGER_S: Final = 2.0  # a connection that has not logged in gives way after so long
ACCEPTS: Final = 64  # connections accepted in a turn
NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_PAUSE_S: Final = 1.0  # when there is no descriptor for another connection
HOUSEKEEPING_S: Final = 0.1
PROGRESS_S: Final = 0.001  # how often clients without a network card of their own are helped to read
DISK_TURN_S: Final = 0.02  # how often the loop wakes while the disk tier has work that is started by time
DISK_FINISH_S: Final = 300.0  # how long a clean stop may take to write the blocks that are only in memory
QUIET_BYTES: Final = 1 << 20  # less payload than this does not count as traffic
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
        """local: the Unix socket on which it listens for clients on this host. sharing: how memory is shared there."""
        self._config = config
        self._sharing = sharing
        auth = AuthFile(config.auth) if config.auth else None
        self._audit = Audit(config.audit, node=config.node, shard=config.shard)
        self._state = ShardState(time.monotonic(), ALL if auth is None else NONE)
        self._store = Store(
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
        self._to_read: Line[MessageReader] = Line()  # connections that may have sent bytes
        self._to_flush: Line[Outbox] = Line()  # connections that may have bytes to send
        self._listeners = {each.fileno(): each for each in (listener, local) if each is not None}
        self._poll = select.epoll()
        self._touched = Touched()
        self._holders = Holders(self._poll)
        self._accepts_again = float("inf")  # when to poll the listener again, after a pause
        self._places = Places(self._state.account, config.cookie, self._close_idle)
        self._drain_until: float | None = None
        self._behind = False  # the disk tier is behind with its writes, and clients that set must wait
        self._finishing = False  # all clients are gone, and the disk tier writes the blocks that are only in memory
        self._traffic = (0, 0.0)  # payload bytes at the last turn with traffic, and when that was
        self._disk: DiskTier | None = None
        if config.disk is not None:
            self._disk = DiskTier(self._store, config.disk, self._poll)
        self._transport = Transport.of(config.transport)
        if self._transport is not None:
            self._store.arena.withdraw = self._transport.sharing.withdraw
        self._answers = Answers(
            config, self._store, self._disk, self._state, self._places, self._audit, auth, self._transport
        )
        self._logins = self._answers.logins
        self._neighbours = Neighbours(config, self._store)

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drained. Blocks; at the end closes connections, disk tier and arena."""
        poll, state, disk = self._poll, self._state, self._disk
        turns = state.turns
        for listener in self._listeners:
            poll.register(listener, select.EPOLLIN)
        logins = self._logins
        for fd in (self._neighbours.fd, logins.fd if logins is not None else -1):
            if fd >= 0:
                poll.register(fd, select.EPOLLIN)
        housekeeping, waiting = 0.0, Waiting(poll)
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
                if gone and not self._may_read(reader):  # poll reports it whether we read or not
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
        """What is due by time, and need not be done in each turn."""
        self._enforce_deadlines(now)
        self._store.expire(now, self._state.draining)
        if self._logins is not None and self._logins.step(now):
            self._take_policy()
        if self._transport is not None:
            self._transport.sharing.progress()  # clients connect and leave
        if now >= self._accepts_again:
            self._accepts_again = float("inf")
            for listener in self._listeners:
                self._poll.register(listener, select.EPOLLIN)

    def _take_policy(self) -> None:
        """Another policy is in force: end connections whose token or rights it does not have."""
        if self._answers.tenants is not None and self._logins is not None:
            self._answers.tenants.take_policy(self._logins.policy)
        for reader in list(self._readers.values()):
            peer = reader.peer
            if self._logins is not None and not self._logins.still_valid(peer):
                log.info("client %s: principal %r has other rights now", peer.address, peer.session.rights.principal)
                peer.close("its principal has other rights now")

    def _patience_s(self) -> float:
        """How long the loop may sleep when no event comes, in seconds."""
        if self._to_read or self._to_flush or self._answers.background.pending or self._neighbours.pending:
            return 0.0
        if self._answers.lending.remote_blocks:
            return PROGRESS_S
        disk = self._disk
        if disk is None or not (disk.restless or disk.working):
            return HOUSEKEEPING_S
        return 0.0 if disk.restless else DISK_TURN_S

    def _on_event(self, fd: int, event: int, now: float) -> None:
        """Something else than a client's connection."""
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
            for reader in self._readers.values():  # so that `_flush` polls anew
                reader.peer.outbox.wake()

    def reload(self) -> None:
        """Read the file of principals again. Safe to call in a signal handler."""
        if self._logins is not None:
            self._logins.asked_to_reload = True

    def drain(self) -> None:
        """Finish requests in progress, take no new connections or SETs, then end. Safe to call in a signal handler."""
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
            except OSError as error:  # the client left already, or no descriptor is free; other connections go on
                log.warning("accept failed: %s", error)
                if error.errno in NOTHING_LEFT:  # poll would report the listener for ever
                    for each in self._listeners:
                        self._poll.unregister(each)
                    self._accepts_again = now + ACCEPT_PAUSE_S
                return
            if self._drain_until is not None:
                sock.close()
                continue
            sock.setblocking(False)
            peer = self._remote_peer(sock, address) if address else self._local_peer(sock)  # at the Unix socket: none
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
        if sock.family != socket.AF_UNIX:  # else it was handed over, and another process has the client's socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
        host, port = address[:2]
        share = self._places.share(network_of(host) if self._state.newcomer is NONE else host)
        return Peer(self._state, sock, share, host, port, self._to_flush, self._forget)

    def _local_peer(self, sock: socket.socket) -> Peer | None:
        """-> the peer at a Unix socket; None if its user is not one of those who may connect there."""
        process, user = peer_credentials(sock)
        if user not in self._config.unix_users:
            log.warning(
                "process %d of user %d connected to the Unix socket and was refused: only users %s may",
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
        """Tell clients on this host which files have no memory any more, so that they unmap them."""
        retired, arena.retired = arena.retired, []
        for reader in list(self._readers.values()):
            leases = reader.peer.leases
            numbers = leases.retire(retired) if leases is not None else b""
            if numbers:
                reader.peer.outbox.reply(wire.Retired(0, numbers))

    def _close_idle(self, share: Share | None) -> bool:
        """Close the connection in a place of a client, at one address or any, that was idle for longest, if that is
        long; before those, one that has not logged in. -> whether there was one."""
        placed = [
            reader
            for reader in self._readers.values()
            if reader.peer.place is Place.CLIENT and share in (None, reader.peer.share)
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
        if peer.leases is not None and peer.leases.held_bytes:  # its process may still read what it was lent
            sock = socket.socket(fileno=peer.sock.detach())
            self._holders.keep(sock, peer.leases, lambda: self._places.remove(peer))
        else:
            self._places.remove(peer)

    @staticmethod
    def _grace_s(reader: MessageReader) -> float:
        """How much later than its deadline a message may be finished: what has arrived may wait for us."""
        if not reader.paused:
            return 0.0
        return BACKED_UP_S if reader.peer.outbox.backed_up else float("inf")

    def _held_back(self, reader: MessageReader) -> bool:
        """It sets, and must wait for the disk."""
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
        """Poll does not tell of messages that wait in a paused reader: put it in the line again."""
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
            if held_back:  # the delay is the server's: the client's deadline must not run
                reader.deadline += HOUSEKEEPING_S
                continue
            if now > reader.deadline + self._grace_s(reader):
                self._state.errors += 1
                peer.close("a message or handshake was not finished by its deadline")
                continue
            if peer.outbox.stalled(now):
                peer.close("the client takes nothing of its replies")
                continue
            # Who is logging in has twice as long: one bad token after the other must not keep a place.
            if peer.session.rights is NONE and now > reader.began + LOGIN_S * (2 if peer.session.logging_in else 1):
                peer.close("it has not logged in")
                continue
            # The socket's low-water mark relies on the bytes that the client has still to send. If it sends fewer,
            # epoll never reports them, so read what is there.
            if reader.write is not None:
                self._to_read.add(reader, reader.pace)
            if peer.leases is not None and peer.leases.held_bytes:
                for stream in peer.outbox.streams.values():
                    if stream.impatient(now):
                        peer.outbox.resume(stream)
        self._flush_all(now)

    @staticmethod
    def _pass_time(peer: Peer, now: float, held_back: bool) -> None:
        """Some of its streams may be due. While it is held back, nobody reads whether it has cancelled them."""
        outbox = peer.outbox
        for stream in list(outbox.streams.values()):
            if now > stream.deadline + 2.0 and not held_back:
                peer.close("a reply was not taken by its deadline")
                return
            if now > stream.due:
                stream.time_passed(now)
        outbox.next_due = min((stream.due for stream in outbox.streams.values()), default=float("inf"))
