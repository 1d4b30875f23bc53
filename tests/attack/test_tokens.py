"""Guessing tokens: none logs in, and who has one is served meanwhile.

A shard answers 256 wrong tokens a second at most, and a hash takes 10 ms of a core. So that 100 000 guesses end in
minutes, the long form has two shards, and hashes of the least cost that the file may have: every guess is checked all
the same, and one that was not slowed down by its hash would show it.
"""

from __future__ import annotations

import base64
import hashlib
import random
import secrets
import threading
import time
from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore.auth.policy import Policy, parse_policy
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
)

GUESSES = 100_000 if FULL else 400
SHARDS = 2 if FULL else 1
GUESSERS = 512 if FULL else 100
ODD = 50 if FULL else 2  # one guess in so many has no name of the file, and so no cheap hash
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
        kind = rng.randrange(4 if rng.randrange(ODD) == 0 else 2)
        name = rng.choice(self._names if kind < 2 else ["root", "", "admin"])
        if kind == 0 and rng.randrange(2):
            return f"kvs_{name}.".encode()
        if kind == 3:
            return rng.randbytes(rng.randrange(1, 400))
        return f"kvs_{name}.{secrets.token_urlsafe(32)}".encode()

    def _guess(self, number: int) -> None:
        rng = random.Random(number)
        source = f"127.0.0.{2 + number % 100}"
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
                continue  # it has not logged in for too long: it connects again

    def __enter__(self) -> Guessers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refused = GUESSES
        for thread in self._threads:
            thread.join()


def cheap_hash(token: str) -> str:
    """What the file keeps of a token, at the least cost."""
    salt = secrets.token_bytes(16)
    hashed = hashlib.scrypt(token.encode(), salt=salt, n=2, r=1, p=1)
    return f"scrypt:2:1:1:{base64.b64encode(salt).decode()}:{base64.b64encode(hashed).decode()}"


def make_cheap(file: Path, tokens: dict[str, str]) -> None:
    """Replace the hashes in a file of principals."""
    text = file.read_text()
    policy: Policy = parse_policy(text, str(file))
    for name, token in tokens.items():
        text = text.replace(policy.principals[name].tokens[0], cheap_hash(token))
    file.write_text(text)


@pytest.mark.timeout(1800)
def test_no_guessed_token_logs_in_and_who_has_one_is_served_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    tokens = {name: add(file, name, "a", ["read", "write"]) for name in ("chat", "batch")}
    if FULL:
        make_cheap(file, tokens)
    server = Server(tmp_path / "log", "--auth", str(file), "--memory", "64MiB", "--shards", str(SHARDS))
    namespace = make_namespace(BLOCK_BYTES, "m")
    keys = make_keys(8)
    try:
        with server.unharmed(), KVStoreClient(server.endpoint, namespace, token=tokens["chat"]) as client:
            client.set(keys, blocks_of(keys, BLOCK_BYTES))
            slowest = 0.0
            with Guessers(server, ["chat", "batch"], namespace.canonical()) as guessers:
                while not guessers.done:
                    began = time.monotonic()
                    assert client.get(keys).hit == len(keys)
                    slowest = max(slowest, time.monotonic() - began)
                    # The same token on a new connection is not checked again, so it does not wait behind the guesses.
                    with KVStoreClient(server.endpoint, namespace, token=tokens["chat"], timeout_s=10.0) as another:
                        assert another.contains(keys).all()
                    time.sleep(0.05)
                assert not guessers.wrong
                tried = guessers.refused
            assert tried >= GUESSES
            print(f"{tried} guesses were checked, the slowest read took {slowest:.2f} s")
            assert slowest < 2.0, f"a read took {slowest:.2f} s"
        log = server.log_text()
        assert "more lines of this kind were left out" in log or log.count("a login failed") <= 25 * (
            1 + GUESSES // 200
        )
    finally:
        server.kill()
