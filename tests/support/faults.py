"""Faults between a client and a server: a relay that cuts connections, and a program that accepts connections and
serves nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import psutil

from kvstore_client import KVStoreClient
from kvstore_client._links.link import Link
from tests.support.harness import Server, wait_until

InBackground = Callable[..., Future[Any]]


def link_to(client: KVStoreClient, node: str) -> Link:
    """Return the link to the one shard of a node."""
    (link,) = (place.link for place in client._pool.view.places if place.node == node)
    return link


def connections_to(port: int) -> int:
    """Return the number of established connections of this process to a port."""
    found = psutil.Process().net_connections("tcp")
    return sum(1 for each in found if each.raddr and each.raddr.port == port and each.status == "ESTABLISHED")


class Cut(NamedTuple):
    """A fault of a `Relay`: after this many bytes from the server, it passes no more bytes to the client, and calls
    `then`."""

    after_bytes: int
    then: Callable[[], None] = lambda: None


class Relay:
    """Relays connections to a server, with a thread for each. `cuts`: the faults of the first connections, one for
    each; later connections have no fault."""

    def __init__(self, server: Server, *cuts: Cut) -> None:
        self._server = server
        self._cuts = cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def connections(self) -> int:
        """Return the number of connections so far."""
        return len(self._pairs)

    def cut(self, number: int) -> None:
        """Close connection `number`, counted from 0. The client still gets the bytes that were passed on before."""
        for sock in self._pairs[number]:
            with contextlib.suppress(OSError):  # it ended before
                sock.shutdown(socket.SHUT_RDWR)  # this also wakes a thread that waits to send
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for number in range(len(self._pairs)):
            self.cut(number)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._server.host, self._server.port))
                cut = self._cuts[len(self._pairs)] if len(self._pairs) < len(self._cuts) else None
                self._pairs.append((client, server))
                threading.Thread(target=self._pass, args=(client, server, cut), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket, cut: Cut | None) -> None:
        left = cut.after_bytes if cut is not None else 1 << 62
        with contextlib.suppress(OSError, ValueError):  # ValueError: the connection has just been cut
            while True:
                ready, _, _ = select.select([client, server] if left else [client], [], [], 0.05)
                for source, sink in ((client, server), (server, client)):
                    if source not in ready:
                        continue
                    data = source.recv(min(65536, left) if source is server else 65536)
                    if not data:
                        self.cut(self._pairs.index((client, server)))
                        return
                    sink.sendall(data)
                    if source is server:
                        left -= len(data)
                        if not left and cut is not None:
                            cut.then()


@contextlib.contextmanager
def impostor(says: bytes = b"", port: int = 0) -> Iterator[int]:
    """Run a foreign program on a port: it accepts connections, sends something or nothing, and waits. Gives the
    port."""
    accepted: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = listener.accept()
                accepted.append(sock)
                if says:
                    sock.sendall(says)

    def listen() -> socket.socket | None:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:  # threads of a killed process may hold its port for an instant
            return None

    with wait_until(listen, what=f"port {port} is free") as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in accepted:
                sock.close()
