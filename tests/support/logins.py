"""Servers with ``--auth``, a token for each principal, and raw connections that log in over each transport."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import secrets
import socket
import ssl
from pathlib import Path

from kvstore.auth.editing import add
from kvstore.auth.policy import parse_policy
from kvstore_client import KVStoreClient, Namespace, NotAuthorized
from tests.support import harness
from tests.support.certificates import Authority
from tests.support.harness import HELLO, PROTOCOL, RawClient, Server, make_keys, pack, wait_until

NOT_AUTHORIZED = 7
BLOCK_BYTES = 4096
PATHS = ["tcp", "tls", "unix"]
EVERYTHING = ["read", "write", "delete", "admin", "monitor"]
KEYS = make_keys(2)
KEYED = [10_000, len(KEYS), len(KEYS[0])]  # the fields after the number, in requests for these keys


def scrypt_hash(token: str, cost: tuple[int, int, int] = (4096, 8, 1)) -> str:
    """Return the hash of a token in the form of earlier releases."""
    salt = secrets.token_bytes(16)
    n, r, p = cost
    hashed = hashlib.scrypt(token.encode(), salt=salt, n=n, r=r, p=p)
    return f"scrypt:{n}:{r}:{p}:{base64.b64encode(salt).decode()}:{base64.b64encode(hashed).decode()}"


def keep_as_before(file: Path, tokens: dict[str, str], cost: tuple[int, int, int] = (4096, 8, 1)) -> None:
    """Replace the hashes of these principals' newest tokens by hashes in the form of earlier releases."""
    text = file.read_text()
    policy = parse_policy(text, str(file))
    for name, token in tokens.items():
        text = text.replace(policy.principals[name].tokens[0], scrypt_hash(token, cost))
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.chmod(0o600)
    beside.rename(file)


class Guarded:
    """A server with ``--auth``, and a token for each principal. There is a principal for each verb, and a few
    others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = file = folder / "auth.toml"
        self.audit = folder / "audit.jsonl"
        self.socket = folder / "socket"
        self.tokens = {verb: add(file, verb, "a", [verb]) for verb in EVERYTHING}
        self.tokens["all"] = add(file, "all", "a", EVERYTHING)
        self.tokens["other"] = add(file, "other", "b", EVERYTHING)
        self.tokens["patterns"] = add(file, "patterns", "a", ["read", "write"], ["Qwen/*"])
        self.tokens["operator"] = add(file, "operator", "*", ["admin"])
        self.tokens["wrong"] = "kvs_all." + "A" * 43
        self.authority = Authority(folder)
        self.server = Server(
            folder / "log",
            *("--auth", str(file), "--audit", str(self.audit), "--http", "127.0.0.1:0"),
            *("--memory", "64MiB", "--segment", "1MiB"),  # so that each test's namespace has room
            *("--unix-socket", str(self.socket), "--disk", str(folder / "disk"), "--disk-size", "64MiB"),
        )
        self._servers = [self.server]

    @functools.cached_property
    def encrypted(self) -> Server:
        """Start another server with the same file, with TLS."""
        issued = self.authority.issue("node")
        server = Server(
            self._folder / "tls-log",
            *(
                "--auth",
                str(self.file),
                "--memory",
                "64MiB",
                "--segment",
                "1MiB",
                "--tls-cert",
                issued.cert,
                "--tls-key",
                issued.key,
            ),
        )
        self._servers.append(server)
        return server

    def stop(self) -> None:
        for each in self._servers:
            if each.running:
                each.stop()


class LocalRaw(RawClient):
    """A `RawClient` at the Unix socket."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(harness.ANSWER_S)
        self.sock.connect(path)
        self._data = b""
        self._shake_hands()


def connect(guarded: Guarded, path: str) -> RawClient:
    if path == "tls":
        return RawClient(guarded.encrypted, tls=ssl.create_default_context(cafile=guarded.authority.file))
    return RawClient(guarded.server) if path == "tcp" else LocalRaw(str(guarded.socket))


def log_in(raw: RawClient, canonical: bytes, token: str) -> list[object]:
    return raw.ask(pack(HELLO, 0, PROTOCOL, canonical, "raw", token.encode()))


def connect_when_known(guarded: Guarded, namespace: Namespace, token: str | os.PathLike[str]) -> KVStoreClient:
    """Return a client with a token that is new in the file. Retries until the server has read the file."""

    def connected() -> KVStoreClient | None:
        try:
            return KVStoreClient(guarded.server.endpoint, namespace, token=token, timeout_s=5.0)
        except NotAuthorized:
            return None

    return wait_until(connected)
