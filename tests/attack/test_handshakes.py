"""Strangers that only begin TLS handshakes: data are served first, and each connecting client is served in turn.

An attacker need not compute anything: it sends the same first message again and again, and the server signs each time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.certificates import Authority
from tests.support.harness import Server, blocks_of, make_keys, make_namespace, wait_until

BLOCK_BYTES = 1 << 20
TURN_BYTES = 256 << 10  # bytes of data in one turn of the TLS process
STRANGERS = 48
READS = 20 if FULL else 2
MOST_A_TURN = 8


def first_message() -> bytes:
    """Return a client's first message."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


class Strangers:
    """Threads that begin handshakes and leave when the server has answered."""

    def __init__(self, server: Server) -> None:
        self.answered = 0
        self._server = server
        self._hello = first_message()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._shake) for _ in range(STRANGERS)]

    def _shake(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError), socket.socket() as sock:
                sock.settimeout(5.0)
                sock.bind(("127.0.0.2", 0))
                sock.connect((self._server.host, self._server.port))
                sock.sendall(self._hello)
                if sock.recv(1):
                    with self._lock:
                        self.answered += 1

    def __enter__(self) -> Strangers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(120)
def test_data_goes_before_handshakes(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    server = Server(
        tmp_path / "log", "--memory", "128MiB", "--tls-cert", issued.cert, "--tls-key", issued.key, "--segment", "8MiB"
    )
    namespace, keys = make_namespace(BLOCK_BYTES, "m"), make_keys(32)
    out = np.zeros((len(keys), BLOCK_BYTES), dtype=np.uint8)
    try:
        with (
            server.unharmed(),
            KVStoreClient(server.endpoint, namespace, tls_ca=authority.file, timeout_s=30.0) as client,
        ):
            assert client.set(keys, blocks_of(keys, BLOCK_BYTES)).error == 0
            with Strangers(server) as strangers:
                wait_until(lambda: strangers.answered > 2 * STRANGERS, what="handshakes without data are not held up")
                before, began = strangers.answered, time.monotonic()
                for _ in range(READS):
                    assert client.get_into(keys, out).all()
                answered, took_s = strangers.answered - before, time.monotonic() - began
                turns = READS * out.nbytes / TURN_BYTES
                print(f"{answered} handshakes in {turns:.0f} turns of data, {took_s:.2f} s")
                # Without a bound, a turn would have as many handshakes as there are strangers.
                assert answered <= MOST_A_TURN * turns
                # A client at another address does not wait for the handshakes of the strangers.
                with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file, timeout_s=10.0) as late:
                    assert late.contains(keys).all()
    finally:
        server.kill()
