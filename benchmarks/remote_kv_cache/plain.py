"""The plain socket: `sendall` in one process, `recv_into` in another one, with one thread each.

It is the physical limit of one TCP connection, with which every transfer here is compared. The peer keeps its own rows,
so that bytes sent to it can be fetched back. No bytes are copied except by the kernel. A request is `_HEAD`: a
command and two counts. With a certificate the same exchange goes through OpenSSL, which is the limit of TLS.
"""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from benchmarks.remote_kv_cache.processes import environment, serving_process
from benchmarks.remote_kv_cache.shapes import Rows

_HEAD: Final = struct.Struct("<BII")
_SEND, _RECEIVE, _ANSWER = 1, 2, 3


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises `ConnectionError` if the other side closes."""
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the plain socket")
        view = view[got:]


class PlainSocket:
    """The client side. Not thread-safe: it has one connection."""

    def __init__(self, port: int, ca: str = "", address: str = "127.0.0.1") -> None:
        self._sock = socket.create_connection((address, port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if ca:
            context = ssl.create_default_context(cafile=ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._sock = context.wrap_socket(self._sock, server_hostname="127.0.0.1")

    def close(self) -> None:
        """Tell the peer to stop serving this connection."""
        self._sock.close()

    def set(self, rows: Rows, start: int, end: int) -> None:
        """Send rows start … end-1 and wait for one byte of acknowledgement."""
        self._sock.sendall(_HEAD.pack(_RECEIVE, start, end - start))
        for row in rows[start:end]:
            self._sock.sendall(row)
        receive(self._sock, memoryview(bytearray(1)))

    def get_into(self, rows: Rows, start: int, end: int) -> None:
        """Receive the peer's rows start … end-1 into ours."""
        self._sock.sendall(_HEAD.pack(_SEND, start, end - start))
        for row in rows[start:end]:
            receive(self._sock, memoryview(row))

    def ask(self, request_bytes: int, answer_bytes: int) -> None:
        """Send a request of this many bytes, and receive an answer of this many. Both are read whole."""
        self._sock.sendall(_HEAD.pack(_ANSWER, request_bytes, answer_bytes) + bytes(request_bytes))
        receive(self._sock, memoryview(bytearray(answer_bytes)))


def _serve(pipe: Connection, count: int, row_bytes: int, certificate: Sequence[str] = ()) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        _converse_for_ever(server, count, row_bytes, certificate)


def _converse_for_ever(server: socket.socket, count: int, row_bytes: int, certificate: Sequence[str] = ()) -> None:
    rows = np.zeros((count, row_bytes), dtype=np.uint8)
    while True:
        sock, _ = server.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            sock = context.wrap_socket(sock, server_side=True)
        with sock:
            try:
                _converse(sock, rows)
            except ConnectionError:
                continue


def _converse(sock: socket.socket, rows: Rows) -> None:
    head = bytearray(_HEAD.size)
    while True:
        receive(sock, memoryview(head))
        what, first, second = _HEAD.unpack(head)
        if what == _SEND:
            for row in rows[first : first + second]:
                sock.sendall(row)
        elif what == _RECEIVE:
            for row in rows[first : first + second]:
                receive(sock, memoryview(row))
            sock.sendall(b"\1")
        else:
            receive(sock, memoryview(bytearray(first)))
            sock.sendall(bytes(second))


@contextmanager
def plain_peer(count: int, row_bytes: int, certificate: Sequence[str] = ()) -> Iterator[int]:
    """Start a process that holds `count` rows and serves one `PlainSocket` after the other. Yield its port.
    `certificate`: the files of a certificate and its key; with them it speaks TLS."""
    with serving_process(_serve, count, row_bytes, certificate, what="the plain socket's peer") as port:
        yield port


@contextmanager
def plain_socket(count: int, row_bytes: int) -> Iterator[PlainSocket]:
    """Yield a `PlainSocket`, with its peer process."""
    with plain_peer(count, row_bytes) as port:
        sock = PlainSocket(port)
        try:
            yield sock
        finally:
            sock.close()


@contextmanager
def plain_socket_at(address: str, prefix: Sequence[str], count: int, row_bytes: int) -> Iterator[PlainSocket]:
    """Yield a `PlainSocket` with its peer on another host: at this address, and started through the command
    `prefix`."""
    command = [*prefix, sys.executable, "-m", __name__, address, str(count), str(row_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        sock = PlainSocket(int(process.stdout.readline()), address=address)
        try:
            yield sock
        finally:
            sock.close()
    finally:
        process.kill()
        process.communicate()


def main(address: str, count: str, row_bytes: str) -> None:
    """Serve one `PlainSocket` after the other at this address, and print the port."""
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        _converse_for_ever(server, int(count), int(row_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
