"""Logins: exactly what a principal's verbs allow, in the tenant of its token, over TCP, TLS and the Unix socket."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import requests as requests_package

from kvstore.auth.editing import add, rotate
from kvstore_client import AsyncKVStoreClient, ConnectionLost, KVStoreClient, NotAuthorized
from kvstore_client.engine.client_options import ClientOptions
from kvstore_client.engine.guard import Counters, StoreGuard
from tests.support import harness
from tests.support.certificates import Authority
from tests.support.harness import (
    ERROR,
    HELLO,
    PROTOCOL,
    ROOT,
    RawClient,
    Server,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    pack,
    set_frames,
    sums_of,
    wait_until,
)

NOT_AUTHORIZED = 7
BLOCK_BYTES = 4096
SCRUB, EXPIRE = 12, 19
PATHS = ["tcp", "tls", "unix"]
EVERYTHING = ["read", "write", "delete", "admin", "monitor"]


@dataclasses.dataclass
class Guarded:
    """A server with ``--auth``, and a token for each principal."""

    server: Server
    encrypted: Server  # another one with the same file, which speaks TLS
    ca: str
    file: Path
    socket: Path
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("auth")
    file = folder / "auth.toml"
    tokens = {verb: add(file, verb, "a", [verb]) for verb in EVERYTHING}
    tokens["all"] = add(file, "all", "a", EVERYTHING)
    tokens["other"] = add(file, "other", "b", EVERYTHING)
    tokens["patterns"] = add(file, "patterns", "a", ["read", "write"], ["Qwen/*"])
    tokens["operator"] = add(file, "operator", "*", ["admin"])
    tokens["wrong"] = "kvs_all." + "A" * 43
    path = folder / "socket"
    server = Server(
        folder / "log",
        *("--auth", str(file), "--audit", str(folder / "audit.jsonl"), "--memory", "64MiB"),
        *("--http", "127.0.0.1:0", "--unix-socket", str(path), "--disk", str(folder / "disk"), "--disk-size", "64MiB"),
    )
    authority = Authority(folder)
    issued = authority.issue("node")
    encrypted = Server(
        folder / "tls-log",
        *("--auth", str(file), "--memory", "64MiB", "--tls-cert", issued.cert, "--tls-key", issued.key),
    )
    yield Guarded(server, encrypted, authority.file, file, path, tokens)
    for each in (server, encrypted):
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


class EncryptedRaw(RawClient):
    """A `RawClient` over TLS."""

    def __init__(self, server: Server, ca: str) -> None:
        super().__init__(server, handshake=False)
        self.sock = ssl.create_default_context(cafile=ca).wrap_socket(self.sock, server_hostname="localhost")
        self._shake_hands()


def connect(guarded: Guarded, path: str) -> RawClient:
    if path == "tls":
        return EncryptedRaw(guarded.encrypted, guarded.ca)
    return RawClient(guarded.server) if path == "tcp" else LocalRaw(str(guarded.socket))


def log_in(raw: RawClient, canonical: bytes, token: str) -> list[object]:
    return raw.ask(pack(HELLO, 0, PROTOCOL, canonical, "raw", token.encode()))


def run(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


KEYS = make_keys(2)
KEYED = [10_000, len(KEYS), len(KEYS[0])]


def requests() -> dict[str, tuple[set[str], list[bytes]]]:
    """For each request the principals that may make it, and its frames."""
    keys = b"".join(KEYS)
    blocks = blocks_of(KEYS, BLOCK_BYTES)

    def keyed(tag: int, *more: object) -> list[bytes]:
        return [pack(tag, 7, *KEYED, *more), keys]

    return {
        "PING": ({*EVERYTHING, "none"}, [pack(harness.PING, 7, 1000)]),
        "SYNC": ({*EVERYTHING}, [pack(harness.SYNC, 7, 1000)]),
        "INFO": ({"admin", "monitor"}, [pack(harness.INFO, 7, 1000)]),
        "GET": ({"read"}, keyed(harness.GET)),
        "CONTAINS": ({"read"}, keyed(harness.CONTAINS)),
        "MATCH_PREFIX": ({"read"}, keyed(harness.MATCH_PREFIX)),
        "SET": ({"write"}, set_frames(7, KEYS, blocks)),
        "SET with force": ({"write"}, set_frames(7, KEYS, blocks, force=True)),
        "PROMISE": ({"write"}, keyed(harness.PROMISE, 1000)),
        "WITHDRAW": ({"write"}, keyed(harness.WITHDRAW)),
        "EXPIRE": ({"write"}, keyed(EXPIRE, 100.0)),
        "DELETE": ({"delete"}, keyed(harness.DELETE)),
        "DELETE of damaged blocks": ({"delete", "read"}, keyed(harness.DELETE, True)),
        "SCRUB": ({"admin"}, [pack(SCRUB, 7, 1000)]),
        "HOTTEST": ({"admin"}, [pack(harness.HOTTEST, 7, 1000, 0, 10)]),
        "PURGE": ({"admin"}, [pack(harness.PURGE, 7, 1000)]),
        "PURGE of all": ({"admin"}, [pack(harness.PURGE, 7, 1000, True)]),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("principal", ["none", *EVERYTHING, "all"])
def test_exactly_the_requests_of_a_principals_verbs_pass(guarded: Guarded, path: str, principal: str) -> None:
    canonical = make_namespace(BLOCK_BYTES, "matrix").canonical()
    with connect(guarded, path) as raw:
        if principal != "none":
            assert log_in(raw, canonical, guarded.tokens[principal])[0] == harness.WELCOME
        for name, (allowed, frames) in requests().items():
            if principal == "none":
                with connect(guarded, path) as fresh:
                    reply = fresh.ask(*frames)
            else:
                reply = raw.ask(*frames)
            passes = principal in allowed or (principal == "all" and allowed - {"none"})
            if passes:
                assert reply[0] != ERROR and reply[1] == 7, (name, reply)
            else:
                assert reply[:3] == [ERROR, 7, NOT_AUTHORIZED], (name, reply)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_token_is_refused_late_and_what_follows_it_too(guarded: Guarded, path: str) -> None:
    canonical = make_namespace(BLOCK_BYTES, "wrong").canonical()
    wrong = [guarded.tokens["wrong"], "kvs_nobody." + "A" * 43, "no token at all", "\xff" * 300]
    raws = [connect(guarded, path) for _ in wrong]
    began = time.monotonic()
    for raw, token in zip(raws, wrong, strict=True):  # and what follows it at once must not be answered before it
        raw.send(pack(HELLO, 5, PROTOCOL, canonical, "raw", token.encode("latin-1")))
        raw.send(pack(harness.GET, 6, *KEYED), b"".join(KEYS))
    for raw in raws:
        assert raw.reply()[0][:3] == [ERROR, 5, NOT_AUTHORIZED]
        assert 0.9 < time.monotonic() - began < 5.0
        assert raw.reply()[0][:3] == [ERROR, 6, NOT_AUTHORIZED]
        raw.close()


def test_requests_behind_a_hello_wait_until_the_token_is_checked(guarded: Guarded) -> None:
    token = rotate(guarded.file, "patterns")  # the shard has not seen it
    guarded.tokens["patterns"] = token
    canonical = make_namespace(BLOCK_BYTES, "Qwen/x").canonical()

    def answered() -> bool:
        with RawClient(guarded.server) as raw:
            raw.send(pack(HELLO, 0, PROTOCOL, canonical, "raw", token.encode()))
            for frame in range(3):
                raw.send(pack(harness.CONTAINS, 10 + frame, *KEYED), b"".join(KEYS))
            tags = [raw.reply()[0][0]]
            if tags == [ERROR]:  # the file was not read again yet
                return False
            tags += [raw.reply()[0][0] for _ in range(3)]
            assert tags == [harness.WELCOME, *[harness.CONTAINS_REPLY] * 3]
            return True

    wait_until(answered, 15.0)


def test_a_tenant_cannot_name_read_or_remove_what_another_one_has(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "shared name")
    keys = make_keys(4, 100)
    server = guarded.server
    with KVStoreClient(server.endpoint, namespace, token=guarded.tokens["all"]) as a:
        assert a.set(keys, blocks_of(keys, BLOCK_BYTES)).created == 4
        with KVStoreClient(server.endpoint, namespace, token=guarded.tokens["other"]) as b:
            assert b.get(keys).hit == 0
            assert b.set(keys, blocks_of(keys, BLOCK_BYTES, version=1)).created == 4
            assert b.delete(keys) == 4
            b.purge(all_namespaces=True)
            assert [shard.namespaces for shard in b.info().shards] == [[]] or all(
                json.loads(each.namespace)["tenant"] == "b" for shard in b.info().shards for each in shard.namespaces
            )
        assert a.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)
        names = [json.loads(each.namespace)["tenant"] for each in a.info().shards[0].namespaces]
        assert set(names) == {"a"}
    # The tenant's own name is no other namespace than the one without it; a foreign one is refused.
    with KVStoreClient(
        server.endpoint, msgspec.structs.replace(namespace, tenant="a"), token=guarded.tokens["all"]
    ) as a:
        assert a.get(keys).hit == 4
    with pytest.raises(NotAuthorized, match="names a tenant other than 'b'"):
        KVStoreClient(server.endpoint, msgspec.structs.replace(namespace, tenant="a"), token=guarded.tokens["other"])


def test_a_principal_uses_the_models_of_its_patterns_only(guarded: Guarded) -> None:
    token = guarded.tokens["patterns"]
    with pytest.raises(NotAuthorized, match=r"may not use the model of this namespace: its patterns are Qwen/\*"):
        KVStoreClient(guarded.server.endpoint, make_namespace(BLOCK_BYTES, "meta/l"), token=token)


def test_an_operator_of_all_tenants_sees_and_empties_each(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "to be purged")
    keys = make_keys(2, 200)
    server = guarded.server
    with KVStoreClient(server.endpoint, namespace, token=guarded.tokens["all"]) as a:
        a.set(keys, blocks_of(keys, BLOCK_BYTES))
        owned = msgspec.structs.replace(namespace, tenant="a")
        with KVStoreClient(server.endpoint, owned, token=guarded.tokens["operator"]) as operator:
            assert owned.id in {each.id for each in operator.info().shards[0].namespaces}
            with pytest.raises(NotAuthorized, match="needs the verb read"):
                operator.get(keys)
            assert operator.purge() == 2
        assert a.get(keys).hit == 0


def test_the_command_line_logs_in_with_a_file_and_purges_its_tenants_namespace(
    guarded: Guarded, tmp_path: Path
) -> None:
    namespace = make_namespace(BLOCK_BYTES, "purged by command")
    keys = make_keys(3, 300)
    with KVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens["all"]) as client:
        client.set(keys, blocks_of(keys, BLOCK_BYTES))
    token = tmp_path / "token"
    token.write_text(guarded.tokens["all"] + "\n")
    command = [sys.executable, "-m", "kvstore_cli", "--token-file", str(token), "purge", "--yes", "--json"]
    command += ["--endpoint", guarded.server.endpoint, "--namespace", namespace.canonical().decode()]
    ran = run(command)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"namespaces": 1, "blocks": 3}
    without = run([*command[:3], *command[5:]])
    assert without.returncode == 1
    assert "this server wants a token" in without.stderr


def test_no_secret_is_told_anywhere(guarded: Guarded) -> None:
    server = guarded.server
    secrets = list(guarded.tokens.values()) + [
        line.split('"')[1] for line in guarded.file.read_text().splitlines() if line.startswith(("tokens", "member"))
    ]
    with KVStoreClient(server.endpoint, make_namespace(BLOCK_BYTES, "m"), token=guarded.tokens["all"]) as client:
        said = [repr(client), repr(client._core.__dict__), repr(client.info()), server.log_text()]
    with pytest.raises(NotAuthorized) as refused:
        KVStoreClient(server.endpoint, make_namespace(BLOCK_BYTES, "m"), token=guarded.tokens["wrong"])
    said.append(str(refused.value))
    said.append((guarded.file.parent / "audit.jsonl").read_text())
    for process in (psutil.Process(server.process.pid), *server.shards()):
        said += [" ".join(process.cmdline()), repr(process.environ())]
    for secret in secrets:
        assert not any(secret in text for text in said)


def test_failed_logins_and_administrative_acts_are_in_the_audit_log(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "audited")
    with pytest.raises(NotAuthorized):
        KVStoreClient(guarded.server.endpoint, namespace, token="kvs_mallory." + "B" * 43)
    with KVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens["admin"]) as client:
        client.purge()
        with pytest.raises(NotAuthorized):
            client.delete(KEYS)
    lines = [json.loads(line) for line in (guarded.file.parent / "audit.jsonl").read_text().splitlines()]
    assert any(line["event"] == "login_failed" and line["principal"] == "mallory" for line in lines)
    purges = [line for line in lines if line["event"] == "purge" and '"audited"' in line["namespace"]]
    assert [(line["principal"], line["tenant"], line["outcome"]) for line in purges] == [("admin", "a", "begun")]
    assert any(line["event"] == "delete" and line["outcome"] == "denied" for line in lines)
    assert stat.S_IMODE(os.stat(guarded.file.parent / "audit.jsonl").st_mode) == 0o600


def test_an_engine_whose_token_is_refused_only_misses(guarded: Guarded) -> None:
    counters = Counters()
    guard = StoreGuard(
        guarded.server.endpoint,
        make_namespace(BLOCK_BYTES, "engine"),
        ClientOptions(token=guarded.tokens["wrong"]),
        timeout_s=3.0,
        counters=counters,
    )
    assert guard.call(lambda store: store.match_prefix(KEYS), -1) == -1
    assert counters.take()["failed_calls"] >= 1
    guard.close()


def test_the_async_client_logs_in(guarded: Guarded) -> None:
    async def use() -> int:
        namespace = make_namespace(BLOCK_BYTES, "async")
        async with AsyncKVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens["all"]) as client:
            return (await client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))).created

    assert asyncio.run(use()) == 2


def test_a_revoked_token_ends_its_connections_and_a_new_one_in_the_file_is_used(
    guarded: Guarded, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(rotate(guarded.file, "other"))
    guarded.server.signal(signal.SIGHUP)
    namespace = make_namespace(BLOCK_BYTES, "rotated")
    client = wait_until(lambda: connected(guarded, namespace, token), 15.0)
    try:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        token.write_text(rotate(guarded.file, "other", end_old=True))
        # The file is looked at within a second or so; then the old connection ends, and the client logs in again.
        wait_until(lambda: "has other rights now" in guarded.server.log_text(), 15.0)
        assert wait_until(lambda: hits(client) == 2, 15.0)
    finally:
        client.close()


def connected(guarded: Guarded, namespace: harness.Namespace, token: Path) -> KVStoreClient | None:
    try:
        return KVStoreClient(guarded.server.endpoint, namespace, token=token, timeout_s=5.0)
    except NotAuthorized:
        return None


def hits(client: KVStoreClient) -> int:
    try:
        return client.get(KEYS).hit
    except (ConnectionLost, NotAuthorized):
        return -1


def test_a_bad_file_is_refused_and_the_last_good_policy_stays(guarded: Guarded) -> None:
    good = guarded.file.read_text()
    try:
        guarded.file.write_text(good.replace('verbs = ["read"]', 'verbs = ["reed"]'))
        wait_until(lambda: "verb 'reed': expected one of read" in guarded.server.log_text(), 15.0)
        with KVStoreClient(
            guarded.server.endpoint, make_namespace(BLOCK_BYTES, "m"), token=guarded.tokens["read"]
        ) as client:
            assert client.contains(KEYS).tolist() == [False, False]
    finally:
        guarded.file.write_text(good)


def test_a_connection_that_does_not_log_in_is_closed(guarded: Guarded) -> None:
    with RawClient(guarded.server) as raw:
        raw.sock.settimeout(20.0)
        began = time.monotonic()
        assert raw.closed()
        assert 9.0 < time.monotonic() - began < 15.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], ["--host", "give --auth FILE, or --insecure"]),
        (["--http", "0.0.0.0:0"], ["--http", "give --auth FILE, or --insecure"]),
        (["--auth", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["--auth", "FILE", "--nixl"], ["--nixl", "--insecure"]),
    ],
)
def test_a_server_that_anybody_could_use_does_not_start(arguments: list[str], said: list[str], tmp_path: Path) -> None:
    ran = run([*harness.server_command("--port", "0", "--memory", "64MiB"), *arguments], tmp_path)
    assert ran.returncode in (1, 2)
    for text in said:
        assert text in ran.stderr, ran.stderr


def test_a_set_that_is_not_allowed_is_read_to_its_end(guarded: Guarded) -> None:
    """A SET by who may only read is refused with its header, and the connection goes on."""
    blocks = blocks_of(KEYS, BLOCK_BYTES)
    with RawClient(guarded.server) as raw:
        canonical = make_namespace(BLOCK_BYTES, "matrix").canonical()
        log_in(raw, canonical, guarded.tokens["read"])
        raw.send(*set_frames(3, KEYS, blocks, sums_of(blocks)))
        assert raw.reply()[0][:3] == [ERROR, 3, NOT_AUTHORIZED]
        assert raw.ask(pack(harness.PING, 4, 1000))[0] == harness.PONG


def test_the_http_port_asks_for_a_token_of_who_may_see_all_tenants(guarded: Guarded) -> None:
    url = guarded.server.http_url
    basic = base64.b64encode(f"anybody:{guarded.tokens['operator']}".encode()).decode()
    bearer = f"Bearer {guarded.tokens['operator']}"

    def status(path: str, authorization: str = "") -> int:
        headers = {"Authorization": authorization} if authorization else {}
        return requests_package.get(url + path, headers=headers, timeout=10).status_code

    assert [status(path) for path in ("/healthz", "/readyz")] == [200, 200]
    for path in ("/", "/metrics", "/status.json", "/page.js"):
        assert status(path) == 401
        assert status(path, bearer) == 200
        assert status(path, f"Basic {basic}") == 200
        assert status(path, f"Bearer {guarded.tokens['monitor']}") == 403  # of one tenant
    assert requests_package.get(url + "/", timeout=10).headers["WWW-Authenticate"].startswith("Basic")
    began = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        wrong = [threads.submit(status, "/metrics", f"Bearer kvs_operator.{'A' * 43}") for _ in range(20)]
        assert status("/metrics", bearer) == 200 and time.monotonic() - began < 0.9
        codes = {each.result() for each in wrong}
    assert codes <= {401, 429} and 401 in codes
    text = requests_package.get(url + "/metrics", headers={"Authorization": bearer}, timeout=10).text
    assert 'kvstore_tenant_connections{shard="0",tenant="a"}' in text and "kvstore_failed_logins_total" in text


def test_a_namespace_that_only_half_decodes_costs_its_sender_an_error(guarded: Guarded) -> None:
    """Members that the server does not use are passed over by its check, but not when the tenant is put in."""
    strange = (b'"x":1e999', b'"x":' + b"9" * 5000, b'"x":"\\ud800"')
    token = guarded.tokens["write"] = rotate(guarded.file, "write")  # one that the shard has not checked yet
    with guarded.server.unharmed():
        for member in strange:
            canonical = b'{"block_bytes":4096,"model":"m","version":1,' + member + b"}"

            def answered(canonical: bytes = canonical) -> bool:
                with RawClient(guarded.server) as raw:
                    reply = log_in(raw, canonical, token)
                    return reply[0] == ERROR and reply[2] == 1  # PROTOCOL, and not NOT_AUTHORIZED

            wait_until(answered, 15.0)


def test_a_hello_that_fails_leaves_no_rights_in_the_namespace_before_it(guarded: Guarded) -> None:
    namespace = make_namespace(BLOCK_BYTES, "kept")
    with KVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens["all"]) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        with RawClient(guarded.server) as raw:
            assert log_in(raw, namespace.canonical(), guarded.tokens["read"])[0] == harness.WELCOME
            foreign = msgspec.structs.replace(namespace, tenant="a").canonical()
            assert log_in(raw, foreign, guarded.tokens["other"])[2] == NOT_AUTHORIZED
            reply = raw.ask(pack(harness.DELETE, 7, *KEYED), b"".join(KEYS))
            assert reply[0] == ERROR
        assert client.contains(KEYS).all()


def test_a_purge_empties_what_it_was_asked_to_although_a_hello_follows(guarded: Guarded) -> None:
    first, second = make_namespace(BLOCK_BYTES, "purged first"), make_namespace(BLOCK_BYTES, "kept second")
    token = guarded.tokens["all"]
    with (
        KVStoreClient(guarded.server.endpoint, first, token=token) as one,
        KVStoreClient(guarded.server.endpoint, second, token=token) as two,
        RawClient(guarded.server) as raw,
    ):
        for client in (one, two):
            client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        assert log_in(raw, first.canonical(), token)[0] == harness.WELCOME
        raw.send(pack(harness.PURGE, 5, 10_000))
        raw.send(pack(HELLO, 6, PROTOCOL, second.canonical(), "raw", token.encode()))
        assert {raw.reply()[0][0] for _ in range(2)} == {harness.WELCOME, 76}
        assert not one.contains(KEYS).any() and two.contains(KEYS).all()


def test_patterns_of_models_hold_for_lists_and_purges_of_all(guarded: Guarded) -> None:
    token = add(guarded.file, "qwen", "a", ["admin"], ["Qwen/*"])
    namespaces = [make_namespace(BLOCK_BYTES, "Qwen/q"), make_namespace(BLOCK_BYTES, "meta/l")]
    endpoint = guarded.server.endpoint
    for namespace in namespaces:
        with KVStoreClient(endpoint, namespace, token=guarded.tokens["all"]) as client:
            client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
    guarded.tokens["qwen"] = token

    def connected() -> KVStoreClient | None:
        try:
            return KVStoreClient(endpoint, namespaces[0], token=token, timeout_s=5.0)
        except NotAuthorized:
            return None

    with wait_until(connected, 15.0) as admin:
        models = {json.loads(each.namespace)["model"] for each in admin.info().shards[0].namespaces}
        assert models == {"Qwen/q"}
        assert admin.purge(all_namespaces=True) == 2
    with KVStoreClient(endpoint, namespaces[1], token=guarded.tokens["all"]) as client:
        assert client.contains(KEYS).all()
