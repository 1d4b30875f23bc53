"""One shard: one process, one event loop, one index, one arena, one port.

A level-triggered epoll loop over the listening socket and its connections. Everything the shard does happens between
two polls, in this thread; bytes move inside system calls with the GIL released. The loop accepts, reads, flushes,
enforces deadlines, gives the disk tier its turns, and drains; what requests mean is in `answers`.

The supervisor starts it (`kvstore.shard.process`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from typing import Final

from kvstore.disk.tier import DiskTier
from kvstore.shard.answers import Answers
from kvstore.shard.peer import Peer
from kvstore.shard.reader import MessageReader
from kvstore.shard.setup import ShardConfig
from kvstore.shard.state import ShardState
from kvstore.store.namespaces import Store

log = logging.getLogger("kvstore.shard")

MAX_CONNECTIONS: Final = 2048
HOUSEKEEPING_S: Final = 0.1
DISK_TURN_S: Final = 0.02  # how often work of the disk tier is looked after
DISK_FINISH_S: Final = 300.0  # what a clean stop may take to write what is only in memory
QUIET_BYTES: Final = 1 << 20  # less than this in a turn is no traffic
DEAD_PEER_MS: Final = 30_000


class Shard:
    """The event loop and what it serves."""

    def __init__(self, config: ShardConfig, listener: socket.socket) -> None:
        self._config = config
        self._state = ShardState(time.monotonic())
        self._store = Store(config.memory_bytes, config.segment_bytes, config.policy, config.rules)
        log.info("%d bytes of block memory in %s", config.memory_bytes, self._store.arena.pages)
        self._readers: dict[int, MessageReader] = {}  # by descriptor
        self._to_flush: set[Peer] = set()  # who may have something to send
        self._listener = listener
        self._poll = select.epoll()
        self._drain_until: float | None = None
        self._behind = False  # the disk tier is, and who sets must wait
        self._finishing = False  # clients are gone, the disk tier is brought up to date
        self._traffic = (0, 0.0)  # payload bytes so far, and when there were last more of them
        self._disk: DiskTier | None = None
        if config.disk is not None:
            self._disk = DiskTier(self._store, config.disk, self._poll)
        self._answers = Answers(config, self._store, self._disk, self._state)

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drained."""
        listener, poll, state, disk = self._listener, self._poll, self._state, self._disk
        poll.register(listener.fileno(), select.EPOLLIN)
        housekeeping = 0.0
        while not self._drained():
            events = poll.poll(self._patience_s())
            state.now = now = time.monotonic()
            for fd, event in events:
                if fd == listener.fileno():
                    self._accept()
                    continue
                if disk is not None and self._on_disk_event(disk, fd, event):
                    continue
                reader = self._readers.get(fd)
                if reader is None:
                    continue
                if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    reader.on_readable(now)
                if event & select.EPOLLOUT:
                    self._to_flush.add(reader.peer)
            self._answers.purges.step(now)
            if disk is not None:
                self._pump_disk(disk, now)
            self._flush_all(now)
            if now >= housekeeping:
                housekeeping = now + HOUSEKEEPING_S
                self._enforce_deadlines(now)
                self._store.expire(now)
        self._close_all()
        if disk is not None:
            disk.close()
        self._store.arena.close()

    def _patience_s(self) -> float:
        """How long the loop may sleep when nothing happens."""
        if self._answers.purges.pending:
            return 0.0
        disk = self._disk
        if disk is None or not (disk.restless or disk.working):
            return HOUSEKEEPING_S
        return 0.0 if disk.restless else DISK_TURN_S

    @staticmethod
    def _on_disk_event(disk: DiskTier, fd: int, event: int) -> bool:
        try:
            return disk.on_event(fd, event)
        except Exception:  # a defect of ours must cost the disk tier, not everybody the cache
            log.exception("disk: internal error")
            disk.volume.fail_with(errno.EIO)
            return True

    def _pump_disk(self, disk: DiskTier, now: float) -> None:
        payload = self._state.bytes_in + self._state.bytes_out
        if payload - self._traffic[0] > QUIET_BYTES:
            self._traffic = (payload, now)
        try:
            disk.pump(now, self._traffic[1], self._finishing)
        except Exception:  # see `_on_disk_event`
            log.exception("disk: internal error")
            disk.volume.fail_with(errno.EIO)
        if disk.writing.behind != self._behind:
            self._behind = disk.writing.behind
            self._to_flush.update(reader.peer for reader in self._readers.values())  # read no further, or again

    def drain(self) -> None:
        """Finish what has begun, take nothing new; safe to call from a signal handler."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._config.drain_s
            self._state.draining = True

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
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

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client left already, or no descriptor is free: the others go on
                log.warning("accept failed: %s", error)
                return
            if len(self._readers) >= MAX_CONNECTIONS or self._drain_until is not None:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
            peer = Peer(self._state, sock, f"{address[0]}:{address[1]}", self._to_flush, self._forget)
            reader = self._readers[sock.fileno()] = MessageReader(peer, self._answers, self._state)
            self._state.connections += 1
            reader.events = select.EPOLLIN
            self._poll.register(sock.fileno(), reader.events)
            self._to_flush.add(peer)

    def _forget(self, peer: Peer) -> None:
        """The connection is closing: its socket is about to be closed."""
        self._readers.pop(peer.sock.fileno()).abandon()
        self._state.connections -= 1
        with contextlib.suppress(OSError):
            self._poll.unregister(peer.sock.fileno())

    def _flush_all(self, now: float) -> None:
        while self._to_flush:
            peer = self._to_flush.pop()
            if not peer.closed:
                self._flush(peer, now)

    def _flush(self, peer: Peer, now: float) -> None:
        more = peer.flush(now)
        if peer.closed:
            return
        reader = self._readers[peer.sock.fileno()]
        events = select.EPOLLOUT if more else 0
        if not (peer.closing or peer.backed_up or (reader.writer and self._behind)):
            events |= select.EPOLLIN
        if events != reader.events:
            reader.events = events
            self._poll.modify(peer.sock.fileno(), events)

    def _enforce_deadlines(self, now: float) -> None:
        for reader in list(self._readers.values()):
            peer = reader.peer
            held_back = reader.writer and self._behind
            reader.keep_alive(now, held_back)
            if held_back:  # it waits for us, not we for it
                reader.deadline += HOUSEKEEPING_S
                continue
            if now > reader.deadline:
                self._state.errors += 1
                peer.close("a message or handshake was not finished by its deadline")
                continue
            if peer.stalled(now):
                peer.close("the client takes nothing of its replies")
                continue
            if reader.write is not None:  # what breaks the protocol's promise of more may lie below the low-water mark
                reader.on_readable(now)
            for stream in list(peer.streams.values()):
                if now > stream.deadline + 2.0:
                    peer.close("a reply was not taken by its deadline")
                    break
                if now > stream.deadline:
                    stream.give_up_waiting()
                    peer.resume(stream)
        self._flush_all(now)
