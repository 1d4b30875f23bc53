"""Foreign programs in place of a server, and servers that lie: misses or errors, in time, and no false data is
accepted."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvstore_client import KVStoreClient, KVStoreError, ProtocolError
from kvstore_client.errors import MAX_QUOTED
from tests.support.harness import (
    ERROR,
    GREETING,
    HELLO,
    MATCH_REPLY,
    PROTOCOL,
    WELCOME,
    MakeNamespace,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    ready_command,
    wait_until,
    zmtp_frame,
)

BLOCK = 64
KEYS = make_keys(8)


def refusal(code: int) -> bytes:
    """A server that refuses every HELLO."""
    return GREETING + ready_command() + zmtp_frame(pack(ERROR, 0, code, "go away\n\x1b[2J" * 100), 0)


STRANGERS = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "random bytes": bytes(range(256)),
    "Redis": b"-ERR unknown command\r\n",
    "nothing": b"",
    "another mechanism": GREETING[:12] + b"PLAIN" + GREETING[17:] + bytes(64),
    "an old ZMTP": b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53),
    "no reply to HELLO": GREETING + ready_command() + zmtp_frame(b"\xc1", 0),
    "a wrong WELCOME": GREETING + ready_command() + zmtp_frame(pack(WELCOME, 0, 99, "9.9", "liar", 0, BLOCK, []), 0),
    **{f"a refusal {code}": refusal(code) for code in (1, 2, 3, 4, 5, 99)},
}


def _listen(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host, port))
    except OSError:
        return None


class Stranger:
    """A foreign program on a port: it sends the same bytes to every client, and closes."""

    def __init__(self, host: str, port: int, says: bytes) -> None:
        self._says = says
        self._listener = wait_until(lambda: _listen(host, port), what="the server's port is free")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    sock.settimeout(5)
                    sock.sendall(self._says)
                    while sock.recv(1 << 16) and len(self._says) > 256:  # it first reads HELLO
                        pass
                except OSError:
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


CALLS: dict[str, tuple[Callable[[KVStoreClient], object], object]] = {
    "get": (lambda client: client.get(KEYS).hit, 0),
    "get_into": (lambda client: int(client.get_into(KEYS, np.zeros((8, BLOCK), dtype=np.uint8)).sum()), 0),
    "contains": (lambda client: int(client.contains(KEYS).sum()), 0),
    "match_prefix": (lambda client: client.match_prefix(KEYS), 0),
    "load_prefix": (lambda client: client.load_prefix(KEYS, np.zeros((8, BLOCK), dtype=np.uint8)), 0),
    "set": (lambda client: client.set(KEYS, blocks_of(KEYS, BLOCK)).created, 0),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_with_fail_open_a_foreign_program_on_the_port_is_a_miss(
    start_server: StartServer, new_namespace: MakeNamespace, kind: str
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), fail_open=True, timeout_s=2.0) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK))
        assert client.get(KEYS).hit == 8
        server.kill()
        stranger = Stranger(server.host, server.port, STRANGERS[kind])
        try:
            for _ in range(2):
                for name, (call, nothing) in CALLS.items():
                    began = time.monotonic()
                    assert call(client) == nothing, name
                    assert time.monotonic() - began < 5.0, name
        finally:
            stranger.close()


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_client_that_never_reached_a_server_reports_a_wrong_address(
    server: Server, new_namespace: MakeNamespace, kind: str
) -> None:
    stranger = Stranger("127.0.0.1", 0, STRANGERS[kind])
    port = stranger._listener.getsockname()[1]
    try:
        with pytest.raises(KVStoreError) as raised:
            KVStoreClient(f"tcp://127.0.0.1:{port}", new_namespace(BLOCK), timeout_s=2.0)
        said = str(raised.value)
        assert said.isprintable() and len(said) < MAX_QUOTED + 200, "no text of a stranger controls a terminal or a log"
    finally:
        stranger.close()


class Liar(threading.Thread):
    """A server that answers HELLO properly, and each other request with what `answer` makes of it."""

    def __init__(self, answer: Callable[[list[Any]], bytes], shards: int = 1) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._shards = shards
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._over = threading.Event()

    def __enter__(self) -> Liar:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self._context.destroy(linger=0)

    def run(self) -> None:
        while not self._over.is_set():
            if self._router.poll(20):
                peer, *frames = self._router.recv_multipart()
                fields = msgspec.msgpack.decode(frames[0])
                reply = self._welcome(fields) if fields[0] == HELLO else self._answer(fields)
                self._router.send_multipart([peer, reply])

    def _welcome(self, fields: list[Any]) -> bytes:
        shards = [[f"liar/{number}", "", self.port, 1.0] for number in range(self._shards)]
        return pack(WELCOME, fields[1], PROTOCOL, "9.9", "liar", 0, BLOCK, shards)


@pytest.fixture(params=[9, 1 << 40, -1])
def length(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


def test_a_prefix_is_no_longer_than_requested(new_namespace: MakeNamespace, length: int) -> None:
    with (
        Liar(lambda fields: pack(MATCH_REPLY, fields[1], length)) as liar,
        KVStoreClient(f"tcp://127.0.0.1:{liar.port}", new_namespace(BLOCK), timeout_s=2.0) as client,
        pytest.raises(ProtocolError),
    ):
        client.match_prefix(KEYS)


def test_a_server_with_impossibly_many_shards_is_refused_at_once(new_namespace: MakeNamespace) -> None:
    with Liar(lambda fields: pack(ERROR, fields[1], 1, ""), shards=100_000) as liar:
        began = time.monotonic()
        with pytest.raises(ProtocolError, match="100000 shards"):
            KVStoreClient(f"tcp://127.0.0.1:{liar.port}", new_namespace(BLOCK), timeout_s=2.0)
        assert time.monotonic() - began < 2.0


def test_an_errors_text_is_one_line_of_bounded_length(new_namespace: MakeNamespace) -> None:
    text = "\x1b[31mred\nINFO forged line\u202e" * 50_000
    with (
        Liar(lambda fields: pack(ERROR, fields[1], 1, text)) as liar,
        KVStoreClient(f"tcp://127.0.0.1:{liar.port}", new_namespace(BLOCK), timeout_s=2.0) as client,
        pytest.raises(KVStoreError) as raised,
    ):
        client.get(KEYS)
    assert str(raised.value).isprintable() and len(str(raised.value)) < MAX_QUOTED + 200
