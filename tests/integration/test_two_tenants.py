"""Two tenants share a server over TLS, each with a token, a quota and a block secret: all protections work together."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, Namespace, NotAuthorized
from tests.support.certificates import Authority
from tests.support.harness import (
    HELLO,
    PROTOCOL,
    SET_REPLY,
    WELCOME,
    RawClient,
    Server,
    block_of,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
    set_frames,
    wait_until,
)

BLOCK_BYTES = 64 << 10
QUOTA_BYTES = 16 << 20
KEYS = make_keys(16)
SECRETS = {"a": b"the secret of tenant a", "b": b"the secret of tenant b"}


class Shared(NamedTuple):
    """The server, and the tokens of both tenants and of the operator."""

    server: Server
    ca: str
    tokens: dict[str, str]

    def client(self, tenant: str, token: str | None = None, secret: str | None = None) -> KVStoreClient:
        return KVStoreClient(
            self.server.endpoint,
            make_namespace(BLOCK_BYTES, "m", tenant=tenant),
            token=self.tokens[token or tenant],
            block_secret=SECRETS[secret or tenant],
            tls_ca=self.ca,
        )

    def lie(self, namespace: Namespace, blocks: list[bytes], sums: bytes | None = None) -> None:
        """Make the server return these blocks for `KEYS`, as a lying server would."""
        with RawClient(self.server, tls=ssl.create_default_context(cafile=self.ca)) as raw:
            hello = pack(HELLO, 1, PROTOCOL, namespace.canonical(), "liar", self.tokens["operator"].encode())
            assert raw.ask(hello)[0] == WELCOME
            assert raw.ask(*set_frames(2, KEYS, blocks, sums, force=True))[0] == SET_REPLY


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("tenants")
    authority, file = Authority(folder), folder / "auth.toml"
    verbs = ["read", "write", "delete"]
    tokens = {name: add(file, name, name, verbs, quota_bytes=QUOTA_BYTES) for name in SECRETS}
    tokens["operator"] = add(file, "operator", "*", [*verbs, "admin"])
    issued = authority.issue("node")
    server = Server(
        folder / "log",
        *("--auth", str(file), "--memory", "64MiB", "--segment", "1MiB"),
        *("--tls-cert", issued.cert, "--tls-key", issued.key),
    )
    yield Shared(server, authority.file, tokens)
    server.kill()


def test_each_tenant_has_only_its_own_blocks(shared: Shared) -> None:
    with shared.client("a") as a, shared.client("b") as b:
        assert a.stats.path == b.stats.path == "tls"
        assert a.set(KEYS, blocks_of(KEYS, BLOCK_BYTES)).created == len(KEYS)
        assert not b.contains(KEYS).any() and b.get(KEYS).hit == 0
        assert b.set(KEYS, blocks_of(KEYS, BLOCK_BYTES, 1)).created == len(KEYS)
        assert list(a.get(KEYS).blocks) == blocks_of(KEYS, BLOCK_BYTES)
        assert list(b.get(KEYS).blocks) == blocks_of(KEYS, BLOCK_BYTES, 1)
        with shared.client("a", secret="b") as other:  # its own token with another secret
            assert other.get(KEYS).hit == 0
    for secret in SECRETS:  # the token of one tenant, the namespace of the other, with either secret
        with pytest.raises(NotAuthorized, match="names a tenant other than 'b'"):
            shared.client("a", token="b", secret=secret)


def test_a_lying_server_is_a_miss_for_its_tenant(shared: Shared) -> None:
    right = blocks_of(KEYS, BLOCK_BYTES)
    with shared.client("a") as a, shared.client("b") as b:
        for client in (a, b):
            client.set(KEYS, right, force=True)
        shared.lie(a.namespace, blocks_of(KEYS, BLOCK_BYTES, 7))  # other blocks, whose checksums match
        assert a.get(KEYS).hit == 0
        assert a.stats.checksum_errors == len(KEYS)
        assert list(b.get(KEYS).blocks) == right
        wait_until(lambda: not a.contains(KEYS).any(), what="what is wrong is dropped")
        shared.lie(a.namespace, right)  # the right blocks, without the secret
        assert a.get(KEYS).hit == 0
        assert a.set(KEYS, right, force=True).error == 0
        assert list(a.get(KEYS).blocks) == right


def test_a_tenant_that_fills_its_quota_evicts_no_others_blocks(shared: Shared) -> None:
    many = make_keys(2 * QUOTA_BYTES // BLOCK_BYTES, first=1000)
    with shared.client("a") as a, shared.client("b") as b:
        a.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), force=True)
        for key in many:
            b.set([key], [block_of(key, BLOCK_BYTES)])
        assert 0 < b.contains(many).sum() * BLOCK_BYTES <= QUOTA_BYTES
        assert list(a.get(KEYS).blocks) == blocks_of(KEYS, BLOCK_BYTES)
