"""A network link between two processes, which a test controls: a TCP relay that can be slow, held or cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Final

# On one of these hosts, the server's port is free. The relay needs the same port, because clients that reconnect use
# the port that the server names.
RELAY_HOSTS: Final = [f"127.0.0.{last}" for last in range(3, 32)]
PIECE_BYTES: Final = 1 << 16
LOOK_S: Final = 0.005


class SlowLink:
    """Relays connections at ``endpoint`` to 127.0.0.1:``port``, and back. When one side ends a connection, the relay
    ends the other side, also while the link is held. It has two threads for each connection; any thread may call its
    methods.
    """

    def __init__(self, port: int) -> None:
        self.bytes_per_s: float | None = None  # for each direction of each connection
        self._port = port
        self._held = False
        self._hold_after: int | None = None  # the bytes that still pass before the link is held
        self._counts_back = True  # whether bytes from the server are counted, and not bytes to it
        self._cut = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._listener = _listen(port)
        self.endpoint = f"tcp://{self._listener.getsockname()[0]}:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, after_bytes: int = 0, *, back: bool = True) -> None:
        """Let nothing pass after this many bytes from the server or, without `back`, after this many bytes to the
        server."""
        with self._lock:
            self._hold_after, self._counts_back = after_bytes, back
            self._held = not after_bytes

    def cut(self) -> None:
        """Close all connections, and close every new one at once."""
        with self._lock:
            self._cut = True
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            _end(sock)

    @property
    def held(self) -> bool:
        """Whether nothing passes."""
        return self._held

    def release(self) -> None:
        """Let bytes pass again, beginning with the held ones. Connections that were cut stay closed."""
        with self._lock:
            self._held, self._hold_after, self._cut = False, None, False

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._closed = True
        _end(self._listener)
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)  # held bytes wait at the server
            try:
                far.connect(("127.0.0.1", self._port))
            except OSError:
                _end(far)
                _end(near)
                continue
            with self._lock:
                cut = self._cut
                self._sockets += [] if cut else [near, far]
            if cut:
                _end(far)
                _end(near)
                continue
            for source, sink, back in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pump, args=(source, sink, back), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(PIECE_BYTES):
                if self.bytes_per_s is not None:  # a piece arrives when its last byte arrives
                    time.sleep(len(data) / self.bytes_per_s)
                while self._held and not self._closed:
                    time.sleep(LOOK_S)
                sink.sendall(data)
                self._count(len(data), back)
        _end(source)
        _end(sink)

    def _count(self, passed: int, back: bool) -> None:
        with self._lock:
            if self._hold_after is not None and not self._held and back == self._counts_back:
                self._hold_after -= passed
                self._held = self._hold_after <= 0


def _listen(port: int) -> socket.socket:
    for host in RELAY_HOSTS[:-1]:
        with contextlib.suppress(OSError):  # a relay of another test listens there
            return socket.create_server((host, port))
    return socket.create_server((RELAY_HOSTS[-1], port))


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
