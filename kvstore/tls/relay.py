"""Joins TLS connections to socket pairs.

A `Joined` connection takes a chunk at a time through the loop's own memory. What the other side did not take is kept,
and then nothing more is read in this direction until it was taken. So a slow reader on either side slows its writer
down, as one TCP connection would, and neither direction waits for the other. Chunks are as large as a TLS record, until
a direction of a connection has more to move: then it gets chunks of `READ_BYTES` or `WRITE_BYTES`, and OpenSSL memory
for them, which it keeps. All that is kept is bounded: beyond `KEPT_BYTES` each connection has two records in each
direction.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from kvstore.tls.loop import IN, OUT, SCRATCH_BYTES, Lingering, Loop
from kvstore.tls.secured import RECORD_BYTES, Secured

READ_BYTES: Final = SCRATCH_BYTES - 2 * RECORD_BYTES  # a chunk from a TLS connection, before which a record had begun
WRITE_BYTES: Final = 112 << 10  # a chunk to one; larger and smaller ones take more processor time
KEPT_BYTES: Final = 64 << 20
PAIR_BYTES: Final = 512 << 10  # in the kernel, for each direction of a pair


class Joined:
    """A TLS connection after its handshake, and the pair to which it is joined. Both sockets do not block."""

    def __init__(self, loop: Loop, tls: Secured, pair: socket.socket) -> None:
        self._loop = loop
        self._tls = tls
        self._pair = pair
        self._to_pair = memoryview(b"")  # what it did not take
        self._reads = Room(loop, READ_BYTES)
        self._writes = Room(loop, WRITE_BYTES)
        self._kept_bytes = 0  # of `loop.kept_bytes`, without rooms
        self._tls_over = False
        self._closed = False
        loop.joined += 1
        self._decrypt()  # what came with the handshake
        self.on_tls(IN)
        self.on_pair(IN)

    def on_tls(self, events: int) -> None:
        """The TLS side is ready."""
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
        """Whether more may come from the TLS side."""
        over = self._closed or self._tls_over
        return not (over or self._to_pair or self._tls.answers_bytes > RECORD_BYTES)

    def on_pair(self, events: int) -> None:
        """The pair is ready."""
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
        """Give the pair what has arrived in whole records."""
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
        self._flush()  # what OpenSSL answered by itself

    def _give(self, data: memoryview) -> None:
        """Send decrypted bytes to the pair, and keep what it does not take."""
        self._loop.flowed = self._loop.now
        try:
            sent = self._pair.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # its owner has closed it
            self.close()
            return
        # What was kept before is not in the loop's memory.
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
        """Count what is kept, and watch for what can go on."""
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
        """The pair's owner has closed it, and all that it sent was sent on: close the connection in good order."""
        self._tls.say_goodbye()
        self._leave()
        Lingering(self._loop, self._tls.sock)

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
    """How much one direction of a connection may take at a time: a record, or a chunk once it has had a record's worth
    at once, if there is memory for the chunk, which OpenSSL then keeps until the connection ends."""

    def __init__(self, loop: Loop, most: int) -> None:
        """most: bytes of a chunk."""
        self._loop = loop
        self._most = most
        self._kept_bytes = 0

    def chunk(self) -> memoryview:
        """Memory for the next chunk, of the loop."""
        loop = self._loop
        return loop.scratch[: self._most if self._kept_bytes and loop.kept_bytes <= KEPT_BYTES else RECORD_BYTES]

    def filled(self, size: int) -> None:
        """So many bytes came."""
        if not self._kept_bytes and size >= RECORD_BYTES:
            kept_bytes = (self._most + RECORD_BYTES) * 4 // 3  # OpenSSL takes a third more than it needs
            if self._loop.kept_bytes + kept_bytes <= KEPT_BYTES:
                self._loop.kept_bytes += kept_bytes
                self._kept_bytes = kept_bytes

    def close(self) -> None:
        """The connection ends."""
        self._loop.kept_bytes -= self._kept_bytes


def prepare_pair(sock: socket.socket) -> None:
    """Make room in the kernel for large pieces, in one direction of a pair."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PAIR_BYTES)
