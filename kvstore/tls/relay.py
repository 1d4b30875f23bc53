"""Joins TLS connections to socket pairs.

A `Joined` connection moves one chunk at a time through the loop's own memory. Bytes that the other side did not take
are kept, and until they are taken, nothing more is read in this direction. So a slow reader on either side slows its
writer down, as in one TCP connection, and neither direction waits for the other. At first, a chunk is as large as a TLS
record. A direction with more bytes to move gets chunks of `READ_BYTES` or `RELAY_CHUNK_BYTES`, and keeps the memory
that OpenSSL needs for them. The memory that all connections keep is limited: beyond `RELAY_BUFFERS`, each connection
has two records in each direction.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from kvstore.tls.loop import IN, OUT, SCRATCH_BYTES, LingeringClose, Loop
from kvstore.tls.secured import RECORD_BYTES, Secured

READ_BYTES: Final = SCRATCH_BYTES - 2 * RECORD_BYTES  # a chunk from a TLS connection, which may follow part of a record
RELAY_CHUNK_BYTES: Final = 112 << 10  # a chunk to a TLS connection; larger and smaller chunks take more CPU time
RELAY_BUFFERS: Final = 64 << 20
PAIR_BYTES: Final = 512 << 10  # in the kernel, for each direction of a pair


class Joined:
    """A TLS connection after its handshake, and the socket of a pair to which it is joined. Both sockets are
    non-blocking."""

    def __init__(self, loop: Loop, tls: Secured, pair: socket.socket) -> None:
        self._loop = loop
        self._tls = tls
        self._pair = pair
        self._to_pair = memoryview(b"")  # bytes that the pair did not take
        self._reads = Room(loop, READ_BYTES)
        self._writes = Room(loop, RELAY_CHUNK_BYTES)
        self._kept_bytes = 0  # the bytes counted in `loop.kept_bytes`, except for those of `Room`
        self._tls_over = False
        self._closed = False
        loop.joined += 1
        self._decrypt()  # bytes may have come with the handshake
        self.on_tls(IN)
        self.on_pair(IN)

    def on_tls(self, events: int) -> None:
        """Handle events of the TLS side."""
        if self._closed:
            return
        if events & OUT:
            self._flush()
        if events & ~OUT and self._reads_tls:
            try:
                self._reads.filled(self._tls.receive(self._reads.chunk()))
            except ssl.SSLWantReadError:
                pass
            except OSError:  # the connection is lost
                self._tls_over = True
            self._decrypt()
        self._settle()

    @property
    def _reads_tls(self) -> bool:
        """Whether the TLS side may send more."""
        over = self._closed or self._tls_over
        return not (over or self._to_pair or self._tls.answers_bytes > RECORD_BYTES)

    def on_pair(self, events: int) -> None:
        """Handle events of the pair."""
        if self._closed:
            return
        if events & OUT:
            self._give(self._to_pair)
        if events & ~OUT and not (self._closed or self._tls.unsent):
            room = self._writes.chunk()
            try:
                size = self._pair.recv_into(room)
            except BlockingIOError:
                size = -1
            except OSError:
                size = 0
            if size > 0:
                self._writes.filled(size)
                self._encrypt(room[:size])
            elif size == 0:
                self._end()
        self._settle()

    def _decrypt(self) -> None:
        """Decrypt the records that have arrived whole, and send their bytes to the pair."""
        room, got = self._loop.scratch, 0
        try:
            while size := self._tls.read(room[got : got + RECORD_BYTES]):
                got += size
            self._tls_over = True
        except ssl.SSLWantReadError:
            pass
        except OSError:  # the connection has ended, or a record was changed on its way
            self._tls_over = True
        if got:
            self._give(room[:got])
        self._flush()  # sends OpenSSL's own answers

    def _give(self, data: memoryview) -> None:
        """Send decrypted bytes to the pair, and keep what it does not take."""
        self._loop.flowed = self._loop.now
        try:
            sent = self._pair.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # the pair's owner has closed it
            self.close()
            return
        # Bytes that were kept before are not in the loop's memory.
        self._to_pair = data[sent:] if self._to_pair else memoryview(bytes(data[sent:]))

    def _encrypt(self, data: memoryview) -> None:
        """Send plain bytes over TLS."""
        self._loop.flowed = self._loop.now
        try:
            self._tls.write(data)
        except OSError:
            self.close()
        else:
            self._flush()

    def _flush(self) -> None:
        if not self._closed:
            try:
                self._tls.flush()
            except OSError:
                self.close()

    def _settle(self) -> None:
        """Count the bytes that are kept, and watch for the events after which each direction can continue."""
        if self._tls_over and not self._to_pair:
            self.close()
        if self._closed:
            return
        loop, unsent = self._loop, self._tls.unsent
        kept = len(self._to_pair) + self._tls.kept_bytes
        loop.kept_bytes += kept - self._kept_bytes
        self._kept_bytes = kept
        tls = (IN if self._reads_tls else 0) | (OUT if unsent else 0)
        loop.watch(self._tls.sock.fileno(), tls, self.on_tls)
        loop.watch(self._pair.fileno(), (0 if unsent else IN) | (OUT if self._to_pair else 0), self.on_pair)

    def _end(self) -> None:
        """Close the connection in good order, after the pair's owner has closed the pair and all its bytes were
        forwarded."""
        self._tls.say_goodbye()
        self._leave()
        LingeringClose(self._loop, self._tls.sock)

    def close(self) -> None:
        """Close both sides now."""
        if not self._closed:
            self._leave()
            self._tls.sock.close()

    def _leave(self) -> None:
        self._closed = True
        loop = self._loop
        loop.joined -= 1
        loop.kept_bytes -= self._kept_bytes
        self._reads.close()
        self._writes.close()
        loop.forget(self._tls.sock.fileno())
        loop.forget(self._pair.fileno())
        self._pair.close()


class Room:
    """The room for one direction of a connection: how many bytes it may move at a time. At first this is one record.
    After the direction has moved a full record at once, it gets a chunk if there is memory for that. OpenSSL keeps this
    memory until the connection ends."""

    def __init__(self, loop: Loop, most: int) -> None:
        """`most`: the size of a chunk in bytes."""
        self._loop = loop
        self._most = most
        self._kept_bytes = 0

    def chunk(self) -> memoryview:
        """Return the part of the loop's memory that the next chunk may use."""
        loop = self._loop
        return loop.scratch[: self._most if self._kept_bytes and loop.kept_bytes <= RELAY_BUFFERS else RECORD_BYTES]

    def filled(self, size: int) -> None:
        """Record that `size` bytes came at once."""
        if not self._kept_bytes and size >= RECORD_BYTES:
            kept_bytes = (self._most + RECORD_BYTES) * 4 // 3  # OpenSSL allocates a third more than it needs
            if self._loop.kept_bytes + kept_bytes <= RELAY_BUFFERS:
                self._loop.kept_bytes += kept_bytes
                self._kept_bytes = kept_bytes

    def close(self) -> None:
        """Release the memory, because the connection ends."""
        self._loop.kept_bytes -= self._kept_bytes


def prepare_pair(sock: socket.socket) -> None:
    """Give one direction of a pair enough room in the kernel for large pieces."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PAIR_BYTES)
