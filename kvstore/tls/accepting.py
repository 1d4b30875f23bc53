"""A shard's TLS process. It accepts TLS connections on the shard's port. For each connection, it hands the shard one
end of a socket pair.

The supervisor starts this process in the same way as a shard: the configuration is JSON on standard input, and the
process writes to a pipe when it is ready. It ends with the supervisor. After SIGTERM it accepts no more clients, and
ends when its connections have ended.

A client that has not finished its handshake costs the shard nothing. In this process it takes one of `MOST_SHAKING`
places, for at most `SHAKING_S` seconds. When all places are taken, the network with the most handshakes loses its
oldest handshake. A client that does not speak TLS gets an error in ZMTP, so that it does not wait for an answer.

The certificate is read again at SIGHUP, and when its files have changed (`certificate`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from typing import Final

import msgspec

from kvstore.logs import configure as configure_logs
from kvstore.networks import network_of
from kvstore.tls import TLSError
from kvstore.tls.certificate import Certificate
from kvstore.tls.counting import Counts, CountsPage
from kvstore.tls.handing import hand_over
from kvstore.tls.loop import IN, LingeringClose, Loop, Shaking
from kvstore.tls.relay import Joined, prepare_pair
from kvstore.tls.secured import Secured

log = logging.getLogger("kvstore.tls")

SHAKING_S: Final = 10.0
MOST_SHAKING: Final = 256
_ACCEPTS: Final = 2  # the most clients accepted in one turn, because data wait meanwhile
_PAUSE_S: Final = 1.0  # the pause when there is no descriptor for another connection
_DEAD_PEER_MS: Final = 30_000
_HANDSHAKE_RECORD: Final = b"\x16"  # the first byte of TLS
_PR_SET_PDEATHSIG: Final = 1
_NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class AcceptConfig(msgspec.Struct, frozen=True):
    """The configuration of a TLS process; the descriptors are inherited."""

    shard: int
    listen_fd: int
    give_fd: int  # the giving end of `handing`
    ready_fd: int
    counts_fd: int  # the page of `counting`
    cert: str
    key: str
    client_ca: str  # if empty, clients need no certificate
    refusal: bytes  # sent to a client that does not speak TLS
    log_level: str
    log_format: str


_read_config: Final = msgspec.json.Decoder(AcceptConfig).decode


class _Client(Shaking):
    """A client, from `accept` until the end of its handshake. The client's first byte shows whether it speaks TLS."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket, address: tuple[str, int]) -> None:
        super().__init__(acceptor.loop, sock, SHAKING_S, network_of(address[0]))
        self.address = address
        self._acceptor = acceptor
        acceptor.shaking[self] = None
        self.loop.watch(sock.fileno(), IN, self._look)

    def _look(self, _events: int) -> None:
        try:
            first = self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if first == _HANDSHAKE_RECORD:
            self.shake()
            return
        self.over()
        self._acceptor.failed += 1
        if first:
            log.warning("%s:%d does not speak TLS and was refused", *self.address)
            with contextlib.suppress(OSError):
                self.sock.send(self._acceptor.refusal)
            LingeringClose(self.loop, self.sock)
        else:
            self.sock.close()

    def begin(self) -> Secured:
        return Secured(self.sock, self._acceptor.certificate.context)

    def done(self) -> None:
        assert self.tls is not None
        self.over()
        self._acceptor.handshakes += 1
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # no descriptor is left
            log.warning("%s:%d: no TLS connection: %s", *self.address, error)
            self.sock.close()
            return
        with theirs:
            prepare_pair(ours)
            prepare_pair(theirs)
            try:
                hand_over(self._acceptor.give, theirs, self.address)
            except OSError as error:  # the shard takes no connections, and the queue of waiting ones is full
                log.warning("%s:%d: the shard did not accept the connection: %s", *self.address, error)
                ours.close()
                self.sock.close()
                return
        Joined(self.loop, self.tls, ours)

    def failed(self, error: OSError) -> None:
        self.over()
        self._acceptor.failed += 1
        log.warning("%s:%d: no TLS connection: %s", *self.address, getattr(error, "reason", None) or error)
        self.sock.close()

    def over(self) -> None:
        super().over()
        self._acceptor.shaking.pop(self, None)


class Acceptor:
    """Accepts clients on `listener`, until `stop`. `give`: the giving end of `handing`. `refusal`: see
    `AcceptConfig`."""

    def __init__(
        self, loop: Loop, listener: socket.socket, give: socket.socket, certificate: Certificate, refusal: bytes
    ) -> None:
        self.loop = loop
        self.give = give
        self.certificate = certificate
        self.refusal = refusal
        self.handshakes = self.failed = 0  # completed handshakes, and connections that ended during their handshakes
        self.shaking: dict[_Client, None] = {}  # the oldest first
        self._listener = listener
        self._accepts_again = float("inf")
        loop.watch(listener.fileno(), IN, self._accept)

    def stop(self) -> None:
        """Accept no more clients."""
        self._accepts_again = float("inf")
        self.loop.forget(self._listener.fileno())
        self._listener.close()

    def look(self) -> None:
        """Accept clients again when a pause has ended."""
        if self.loop.now >= self._accepts_again:
            self._accepts_again = float("inf")
            self.loop.watch(self._listener.fileno(), IN, self._accept)

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client has left, or no descriptor is free; other connections continue
                log.warning("accept failed: %s", error)
                if error.errno in _NOTHING_LEFT:  # otherwise poll would report the listener again and again
                    self.loop.forget(self._listener.fileno())
                    self._accepts_again = self.loop.now + _PAUSE_S
                return
            if len(self.shaking) >= MOST_SHAKING:
                self._make_room()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)
            _Client(self, sock, address[:2])

    def _make_room(self) -> None:
        waiting = Counter(client.network for client in self.shaking)
        most = max(waiting.values())
        oldest = next(client for client in self.shaking if waiting[client.network] == most)
        oldest.failed(ConnectionAbortedError("too many handshakes at once, most of them from its network"))


def main() -> None:
    """Entry point of a TLS process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    config = _read_config(sys.stdin.buffer.read())
    configure_logs(config.log_level, f"tls={config.shard}", config.log_format)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # two descriptors for each connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        certificate = Certificate(config.cert, config.key, config.client_ca)
    except TLSError as error:
        log.error("%s", error)
        sys.exit(1)
    listener = socket.socket(fileno=config.listen_fd)
    listener.setblocking(False)
    page = CountsPage(config.counts_fd)
    page.write(Counts(seen_ms=int(time.monotonic() * 1000)))
    certificate.watch.start()
    loop = Loop()
    acceptor = Acceptor(loop, listener, socket.socket(fileno=config.give_fd), certificate, config.refusal)
    asked: set[int] = set()  # the signals that came; Python handles them between two steps of the loop
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked.add(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when its processes end
    stopping = False

    def housekeeping() -> None:
        nonlocal stopping
        if signal.SIGTERM in asked and not stopping:
            stopping = True
            acceptor.stop()
        if signal.SIGHUP in asked:
            asked.discard(signal.SIGHUP)
            certificate.watch.ask()
        page.write(Counts(loop.joined, acceptor.handshakes, acceptor.failed, int(loop.now * 1000)))
        if not stopping:
            acceptor.look()

    os.write(config.ready_fd, b"1")
    os.close(config.ready_fd)
    loop.run(lambda: stopping and loop.idle, housekeeping)
