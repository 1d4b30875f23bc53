"""A TLS connection over a socket that does not block; OpenSSL works in memory, not on the socket.

Over a socket, OpenSSL reads each record in two system calls, its head and the rest, and writes it in one. Here one call
moves as many records as there are. The price is that the kernel's own TLS (kTLS), which needs sockets, cannot help.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

RECORD_BYTES: Final = 16 << 10  # the most that a TLS record carries


class Secured:
    """`sock` with TLS. server_name: whose certificate it must be; None: this is the server's side.

    unsent: what is encrypted and the socket has not taken. Not thread-safe. Raises `ssl.SSLError`, or `ValueError` for
    a name that cannot be in a certificate.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self.sock = sock
        self.unsent = memoryview(b"")
        self._unsent_bytes = 0  # memory that has it
        self._arrived, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived, self._encrypted, server_side=server_name is None, server_hostname=server_name
        )

    @property
    def answers_bytes(self) -> int:
        """What OpenSSL answers by itself, as when it is asked for new keys, while `unsent` has not gone."""
        return self._encrypted.pending

    @property
    def kept_bytes(self) -> int:
        """Memory that has what the socket has not taken."""
        return self._unsent_bytes + self._encrypted.pending

    def shake(self) -> None:
        """Go on with the handshake. Raises `ssl.SSLWantReadError` or `ssl.SSLWantWriteError` when it waits for the
        socket, and another `OSError` when it has failed, of which the other side was told."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._must_flush()
                self.receive(memoryview(bytearray(RECORD_BYTES)))
            except OSError:
                with contextlib.suppress(OSError):
                    self.flush()
                raise
            else:
                self._must_flush()
                return

    def receive(self, room: memoryview) -> int:
        """Take up what has arrived, `room` at most, which is memory for this call. -> bytes; 0: the other side has
        closed the connection. Raises `ssl.SSLWantReadError` when nothing has arrived, or another `OSError`."""
        try:
            size = self.sock.recv_into(room)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if size:
            self._arrived.write(room[:size])
        else:
            self._arrived.write_eof()
        return size

    def read(self, room: memoryview) -> int:
        """Decrypt one record, or the rest of one. -> bytes; 0: the other side sends no more. Raises
        `ssl.SSLWantReadError` when the next record is not complete, and `ssl.SSLError` when it was changed."""
        size: int = self._tls.read(len(room), room)  # type: ignore[assignment]  # into memory it returns a size
        return size

    def write(self, data: memoryview) -> None:
        """Encrypt all of `data`. Call `flush` to send it. Raises `ssl.SSLError`."""
        while data:
            data = data[self._tls.write(data) :]

    def flush(self) -> bool:
        """Send what is encrypted; what the socket does not take stays in `unsent`. -> whether nothing stays. Raises
        `OSError`."""
        while self.unsent or self._encrypted.pending:
            if not self.unsent:
                self.unsent = memoryview(self._encrypted.read())
                self._unsent_bytes = len(self.unsent)
            try:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
            except BlockingIOError:
                return False
        self._unsent_bytes = 0
        return True

    def say_goodbye(self) -> None:
        """Tell the other side that no more comes; it need not answer. What the socket does not take is lost."""
        with contextlib.suppress(OSError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()

    def _must_flush(self) -> None:
        if not self.flush():
            raise ssl.SSLWantWriteError
