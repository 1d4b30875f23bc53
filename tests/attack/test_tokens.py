"""Guessing tokens: no guess logs in, and clients with a token are served in the meantime.

A shard answers at most 256 wrong tokens a second, and a scrypt hash of an earlier release takes 10 ms of a core. The
long form has two shards and the cheapest hashes that the file may have, so that 100 000 guesses end in minutes. The
shards still check every guess; the test would notice a guess whose hash was skipped.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore.wire import ShardAddress
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
    wait_until,
)
from tests.support.logins import keep_as_before

GUESSES = {"sha256": 100_000 if FULL else 400, "scrypt": 100_000 if FULL else 200}  # for each kind of hash
CHANGES = 5 if FULL else 3  # of the file
SHARDS = 2 if FULL else 1
GUESSERS = 512 if FULL else 100
ODD = 50 if FULL else 2  # one guess in this many has a name that is not in the file, and so no cheap hash
NOT_AUTHORIZED, NO_PLACE = 7, 10
BLOCK_BYTES = 4096


class Guessers:
    """Threads that try tokens until this many were refused. Any other answer is kept in `wrong`."""

    def __init__(self, server: Server, names: list[str], canonical: bytes, guesses: int, addresses: int = 100) -> None:
        self.refused = 0
        self.wrong: list[object] = []
        self._server, self._names, self._canonical = server, names, canonical
        self._addresses = addresses
        self._guesses = guesses
        self._lock = threading.Lock()
        guessers = max(GUESSERS, addresses)
        self._threads = [threading.Thread(target=self._guess, args=(number,)) for number in range(guessers)]

    @property
    def done(self) -> bool:
        return self.refused >= self._guesses or bool(self.wrong)

    def _token(self, rng: random.Random) -> bytes:
        kind = rng.randrange(4 if rng.randrange(ODD) == 0 else 2)
        name = rng.choice(self._names if kind < 2 else ["root", "", "admin"])
        if kind == 0 and rng.randrange(2):
            return f"kvs_{name}.".encode()
        if kind == 3:
            return rng.randbytes(rng.randrange(1, 400))
        return f"kvs_{name}.{secrets.token_urlsafe(32)}".encode()

    def _guess(self, number: int) -> None:
        rng = random.Random(number)
        address = number % self._addresses
        source = f"127.0.{address // 100}.{2 + address % 100}"
        shard = ShardAddress("", self._server.host, self._server.port + number % SHARDS, 1.0)
        while not self.done:
            try:
                with RawClient(shard, source=source) as raw:
                    while not self.done:
                        reply = raw.ask(pack(HELLO, 1, PROTOCOL, self._canonical, "guess", self._token(rng)))
                        with self._lock:
                            if reply[0] != ERROR or reply[2] not in (NOT_AUTHORIZED, NO_PLACE):
                                self.wrong.append(reply)
                            self.refused += reply[2] == NOT_AUTHORIZED
            except (Closed, ConnectionError, TimeoutError):
                continue  # it took too long to log in, so it connects again

    def __enter__(self) -> Guessers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refused = self._guesses
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kept", ["sha256", "scrypt"])
def test_no_guessed_token_logs_in_while_valid_clients_are_served(tmp_path: Path, kept: str) -> None:
    file = tmp_path / "auth.toml"
    tokens = {name: add(file, name, "a", ["read", "write"]) for name in ("chat", "batch")}
    if kept == "scrypt":
        keep_as_before(file, tokens, (2, 1, 1) if FULL else (4096, 8, 1))
    server = Server(tmp_path / "log", "--auth", str(file), "--memory", "64MiB", "--shards", str(SHARDS))
    namespace = make_namespace(BLOCK_BYTES, "m")
    keys = make_keys(8)
    try:
        with server.unharmed(), KVStoreClient(server.endpoint, namespace, token=tokens["chat"]) as client:
            client.set(keys, blocks_of(keys, BLOCK_BYTES))
            slowest = 0.0
            with Guessers(server, ["chat", "batch"], namespace.canonical(), GUESSES[kept]) as guessers:
                while not guessers.done:
                    began = time.monotonic()
                    assert client.get(keys).hit == len(keys)
                    slowest = max(slowest, time.monotonic() - began)
                    # A known token on a new connection is not checked again, so its login does not wait behind the
                    # guesses.
                    with KVStoreClient(server.endpoint, namespace, token=tokens["chat"], timeout_s=10.0) as another:
                        assert another.contains(keys).all()
                    time.sleep(0.05)
                assert not guessers.wrong
                tried = guessers.refused
            assert tried >= GUESSES[kept]
            print(f"{tried} guesses were checked, the slowest read took {slowest:.2f} s")
            assert slowest < 2.0, f"a read took {slowest:.2f} s"
        log = server.log_text()
        assert "more lines of this kind were left out" in log or log.count("a login failed") <= 25 * (
            1 + GUESSES[kept] // 200
        )
    finally:
        server.kill()


def test_an_unseen_valid_token_logs_in_while_hundreds_of_addresses_guess(tmp_path: Path) -> None:
    """A new token logs in after each change of the file, although each change clears the cache of known tokens."""
    file = tmp_path / "auth.toml"
    add(file, "chat", "a", ["read", "write"])
    server = Server(tmp_path / "log", "--auth", str(file), "--memory", "64MiB")
    namespace = make_namespace(BLOCK_BYTES, "m")
    try:
        guesses = GUESSES["sha256"]
        with server.unharmed(), Guessers(server, ["chat"], namespace.canonical(), guesses, addresses=400) as guessers:
            wait_until(lambda: guessers.refused > 200, what="the places of those who guess are taken")
            for number in range(CHANGES):
                token = add(file, f"new{number}", "a", ["read", "write"])
                said = f"{number + 2} principals"
                wait_until(lambda said=said: said in server.log_text())
                with KVStoreClient(server.endpoint, namespace, token=token, timeout_s=3.0) as client:
                    assert not client.contains(make_keys(8)).any()
            assert not guessers.wrong
    finally:
        server.kill()
