"""The TLS process of a client. It makes TLS connections for the process that started it, and relays their bytes.

It takes requests on a socket pair, to which `outgoing` writes. A request has a connected TCP socket, one end of another
pair, the name that the server's certificate must have, and the names of the files. This process does the handshake,
verifies the server, and joins the two sockets. It first writes to the pair either `READY`, or `CONNECT_FAILED` and the
reason. READY is sent when the server's first byte has arrived, because only then has the server certainly accepted this
client's certificate. Every kvstore server begins with its greeting.

It ends when the process that started it has ended and no connection is left. It imports only the standard library,
because a client waits for this process to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
from typing import Any, Final

from kvstore.tls import TLSError, TLSOptions
from kvstore.tls.contexts import client_context, explain, signature
from kvstore.tls.loop import IN, Loop, Shaking
from kvstore.tls.relay import Joined, prepare_pair
from kvstore.tls.secured import RECORD_BYTES, Secured

READY: Final = b"\0"
CONNECT_FAILED: Final = b"\1"
_MAX_ASKED_BYTES: Final = 64 << 10


class _Contexts:
    """The contexts of all requests so far. If its files have changed, a context is made again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], tuple[object, ssl.SSLContext]] = {}

    def of(self, options: TLSOptions) -> ssl.SSLContext:
        """Return the context of these options. Raises `TLSError`."""
        files = options.ca, options.cert, options.key
        now = signature(*filter(None, files))
        known = self._known.get(files)
        if known is None or known[0] != now:
            known = self._known[files] = now, client_context(options)
        return known[1]


class _Server(Shaking):
    """A connection to a server, from the request until the server's first byte arrives."""

    def __init__(self, loop: Loop, sock: socket.socket, pair: socket.socket, timeout_s: float) -> None:
        super().__init__(loop, sock, timeout_s)
        self._pair = pair
        self._name = self._ca = ""
        self._context: ssl.SSLContext | None = None

    def connect(self, context: ssl.SSLContext, name: str, ca: str) -> None:
        """Begin the TLS connection."""
        self._context, self._name, self._ca = context, name, ca
        self.shake()

    def begin(self) -> Secured:
        assert self._context is not None
        try:
            return Secured(self.sock, self._context, self._name)
        except (OSError, ValueError) as error:  # ValueError for a name that cannot be in a certificate
            raise TLSError(f"{self._name}: {error}") from None

    def done(self) -> None:
        self.loop.watch(self.sock.fileno(), IN, self._hear)
        self._hear(IN)

    def _hear(self, _events: int) -> None:
        assert self.tls is not None
        room = memoryview(bytearray(RECORD_BYTES))
        try:
            with contextlib.suppress(ssl.SSLWantReadError):  # the first byte may have come with the handshake
                self.tls.receive(room)
            size = self.tls.read(room[:1])
        except ssl.SSLWantReadError:
            return
        except OSError as error:
            self.failed(error)
            return
        if not size:
            self.failed(ConnectionResetError())
            return
        self.over()
        with contextlib.suppress(OSError):  # if the client has gone, joining fails later
            self._pair.send(READY + room[:1])
        Joined(self.loop, self.tls, self._pair)

    def failed(self, error: OSError) -> None:
        self.over()
        text = str(error) if isinstance(error, TimeoutError | TLSError) else explain(error, self._name, self._ca)
        with contextlib.suppress(OSError):
            self._pair.send(CONNECT_FAILED + text.encode())
        self._pair.close()
        self.sock.close()


class _Requests:
    """Accepts requests until the other side has ended."""

    def __init__(self, loop: Loop, control: socket.socket) -> None:
        self.over = False
        self._loop = loop
        self._control = control
        self._contexts = _Contexts()
        loop.watch(control.fileno(), IN, self._take)

    def _take(self, _events: int) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MAX_ASKED_BYTES, 2)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self.over = True
            self._loop.forget(self._control.fileno())
            return
        if len(fds) < 2:  # no descriptor was free; the client sees the pair close
            for fd in fds:
                os.close(fd)
            return
        sock, pair = (socket.socket(fileno=fd) for fd in fds)
        sock.setblocking(False)
        prepare_pair(pair)
        request: dict[str, Any] = json.loads(data)
        server = _Server(self._loop, sock, pair, request["timeout_s"])
        options = TLSOptions(*request["options"])
        try:
            context = self._contexts.of(options)
        except TLSError as error:
            server.failed(error)
        else:
            server.connect(context, options.server_name, options.ca)


def main() -> None:
    """Entry point: the descriptor of the requests is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that started it
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(False)
    loop = Loop()
    requests = _Requests(loop, control)
    loop.run(lambda: requests.over and loop.idle, lambda: None)
