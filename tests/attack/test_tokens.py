"""Guessing tokens: none logs in, and who has one is served meanwhile."""

from __future__ import annotations

import random
import secrets
import threading
import time
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.harness import (
    ERROR,
    HELLO,
    PROTOCOL,
    Closed,
    RawClient,
    Server,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
)

GUESSES = 100_000 if FULL else 400
GUESSERS = 240 if FULL else 100
NOT_AUTHORIZED, NO_PLACE = 7, 10
BLOCK_BYTES = 4096


class Guessers:
    """Threads that try tokens until so many were refused. Any other answer is kept in `wrong`."""

    def __init__(self, server: Server, names: list[str], canonical: bytes) -> None:
        self.refused = 0
        self.wrong: list[object] = []
        self._server, self._names, self._canonical = server, names, canonical
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._guess, args=(number,)) for number in range(GUESSERS)]

    @property
    def done(self) -> bool:
        return self.refused >= GUESSES or bool(self.wrong)

    def _token(self, rng: random.Random) -> bytes:
        name = rng.choice([*self._names, "root", "", "admin"])
        kind = rng.randrange(4)
        if kind == 0:
            return rng.randbytes(rng.randrange(1, 400))
        if kind == 1:
            return f"kvs_{name}.".encode()
        return f"kvs_{name}.{secrets.token_urlsafe(32)}".encode()

    def _guess(self, number: int) -> None:
        rng = random.Random(number)
        source = f"127.0.0.{2 + number % 100}"
        while not self.done:
            try:
                with RawClient(self._server, source=source) as raw:
                    while not self.done:
                        reply = raw.ask(pack(HELLO, 1, PROTOCOL, self._canonical, "guess", self._token(rng)))
                        with self._lock:
                            if reply[0] != ERROR or reply[2] not in (NOT_AUTHORIZED, NO_PLACE):
                                self.wrong.append(reply)
                            self.refused += reply[2] == NOT_AUTHORIZED
            except (Closed, ConnectionError, TimeoutError):
                continue  # it has not logged in for too long: it connects again

    def __enter__(self) -> Guessers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refused = GUESSES
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(3600)
def test_no_guessed_token_logs_in_and_who_has_one_is_served_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    tokens = [add(file, name, "a", ["read", "write"]) for name in ("chat", "batch")]
    server = Server(tmp_path / "log", "--auth", str(file), "--memory", "64MiB")
    namespace = make_namespace(BLOCK_BYTES, "m")
    keys = make_keys(8)
    try:
        with server.unharmed(), KVStoreClient(server.endpoint, namespace, token=tokens[0]) as client:
            client.set(keys, blocks_of(keys, BLOCK_BYTES))
            slowest = 0.0
            with Guessers(server, ["chat", "batch"], namespace.canonical()) as guessers:
                while not guessers.done:
                    began = time.monotonic()
                    assert client.get(keys).hit == len(keys)
                    slowest = max(slowest, time.monotonic() - began)
                    # The same token on a new connection is not checked again, so it does not wait behind the guesses.
                    with KVStoreClient(server.endpoint, namespace, token=tokens[0], timeout_s=10.0) as another:
                        assert another.contains(keys).all()
                    time.sleep(0.05)
                assert not guessers.wrong
                tried = guessers.refused
            assert tried >= GUESSES
            assert slowest < 2.0, f"a read took {slowest:.2f} s"
        log = server.log_text()
        assert "more lines of this kind were left out" in log or log.count("a login failed") <= 25 * (
            1 + GUESSES // 200
        )
    finally:
        server.kill()
