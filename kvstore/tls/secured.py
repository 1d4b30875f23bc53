"""A TLS connection over a non-blocking socket. OpenSSL works in memory, not on the socket.

If OpenSSL uses a socket, it reads each record in two system calls, one for its head and one for the rest, and writes
each record in one system call. Here one call moves all records that have arrived or are to be sent. The price is that
the kernel's own TLS (kTLS), which needs sockets, cannot help.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

RECORD_BYTES: Final = 16 << 10  # the most that a TLS record carries


class Secured:
    """`sock` with TLS. Not thread-safe.

    `server_name`: the name that the server's certificate must have; None on the server's side.
    `unsent`: encrypted bytes that the socket has not taken.
    Raises `ssl.SSLError`, or `ValueError` for a name that cannot be in a certificate.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self.sock = sock
        self.unsent = memoryview(b"")
        self._unsent_bytes = 0  # the size of the memory that holds `unsent`
        self._arrived, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived, self._encrypted, server_side=server_name is None, server_hostname=server_name
        )

    @property
    def answers_bytes(self) -> int:
        """The size of the messages that wait behind `unsent` and that OpenSSL itself has made, for example the answer
        to a request for new keys."""
        return self._encrypted.pending

    @property
    def kept_bytes(self) -> int:
        """The size of the memory for bytes that the socket has not taken."""
        return self._unsent_bytes + self._encrypted.pending

    def shake(self) -> None:
        """Continue the handshake. Raises `ssl.SSLWantReadError` or `ssl.SSLWantWriteError` if it must wait for the
        socket. Raises another `OSError` if the handshake has failed. The other side was notified of that."""
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
        """Receive as many of the arrived bytes as fit `room`, which is used only during this call. Return the number of
        bytes, or 0 if the other side has closed the connection. Raises `ssl.SSLWantReadError` when nothing has arrived,
        or another `OSError`."""
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
        """Decrypt one record, or the rest of one, into `room`. Return the number of bytes, or 0 if the other side sends
        no more. Raises `ssl.SSLWantReadError` if the next record is not complete, and `ssl.SSLError` if the record was
        changed on its way."""
        size: int = self._tls.read(len(room), room)  # type: ignore[assignment]  # with a buffer, it returns a size
        return size

    def write(self, data: memoryview) -> None:
        """Encrypt all of `data`. Call `flush` to send it. Raises `ssl.SSLError`."""
        while data:
            data = data[self._tls.write(data) :]

    def flush(self) -> bool:
        """Send encrypted bytes. Bytes that the socket does not take stay in `unsent`. Return whether all bytes were
        sent. Raises `OSError`."""
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
        """Notify the other side that no more bytes come. The other side need not answer. Bytes that the socket does not
        take are lost."""
        with contextlib.suppress(OSError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()

    def _must_flush(self) -> None:
        if not self.flush():
            raise ssl.SSLWantWriteError
