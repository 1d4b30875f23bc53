"""Logins over TCP, TLS and the Unix socket: which clients are admitted, for how long, and where this is recorded."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from kvstore.auth.editing import add, rotate
from kvstore_client import AsyncKVStoreClient, ConnectionLost, KVStoreClient, NotAuthorized
from kvstore_client.engine.client_store import ClientOptions
from kvstore_client.engine.guard import Counters, StoreGuard
from tests.support import harness
from tests.support.harness import (
    ERROR,
    HELLO,
    PROTOCOL,
    ROOT,
    RawClient,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    pack,
    wait_until,
)
from tests.support.logins import (
    BLOCK_BYTES,
    KEYED,
    KEYS,
    NOT_AUTHORIZED,
    PATHS,
    Guarded,
    connect,
    connect_when_known,
    keep_as_before,
    log_in,
)


def run(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def silent(guarded: Guarded) -> Iterator[Future[float]]:
    """The seconds until a connection without a login is closed. The connection is opened before the first test, and
    waits while the other tests run."""
    with ThreadPoolExecutor(1) as waiting, RawClient(guarded.server) as raw:
        raw.sock.settimeout(20.0)
        began = time.monotonic()
        yield waiting.submit(lambda: time.monotonic() - began if raw.closed() else float("inf"))
        with contextlib.suppress(OSError):
            raw.sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_token_is_refused_late_along_with_later_requests(guarded: Guarded, path: str) -> None:
    canonical = make_namespace(BLOCK_BYTES, "wrong").canonical()
    wrong = [guarded.tokens["wrong"], "kvs_nobody." + "A" * 43, "no token at all", "\xff" * 300]
    raws = [connect(guarded, path) for _ in wrong]
    began = time.monotonic()
    for raw, token in zip(raws, wrong, strict=True):  # the request right behind the HELLO must not be answered first
        raw.send(pack(HELLO, 5, PROTOCOL, canonical, "raw", token.encode("latin-1")))
        raw.send(pack(harness.GET, 6, *KEYED), b"".join(KEYS))
    for raw in raws:
        assert raw.reply()[0][:3] == [ERROR, 5, NOT_AUTHORIZED]
        assert 0.9 < time.monotonic() - began < 5.0
        assert raw.reply()[0][:3] == [ERROR, 6, NOT_AUTHORIZED]
        raw.close()


def test_requests_behind_a_hello_wait_for_the_token_check(guarded: Guarded) -> None:
    token = rotate(guarded.file, "patterns")  # the shard has not seen this token
    keep_as_before(guarded.file, {"patterns": token})  # and the token's hash takes long to check
    guarded.tokens["patterns"] = token
    canonical = make_namespace(BLOCK_BYTES, "Qwen/x").canonical()

    def answered() -> bool:
        with RawClient(guarded.server) as raw:
            raw.send(pack(HELLO, 0, PROTOCOL, canonical, "raw", token.encode()))
            for frame in range(3):
                raw.send(pack(harness.CONTAINS, 10 + frame, *KEYED), b"".join(KEYS))
            tags = [raw.reply()[0][0]]
            if tags == [ERROR]:  # the shard has not read the file again yet
                return False
            tags += [raw.reply()[0][0] for _ in range(3)]
            assert tags == [harness.WELCOME, *[harness.CONTAINS_REPLY] * 3]
            return True

    wait_until(answered)


def test_the_command_line_logs_in_with_a_file_and_purges_its_tenant(guarded: Guarded, tmp_path: Path) -> None:
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


def test_secrets_appear_nowhere(guarded: Guarded) -> None:
    server = guarded.server
    secrets = list(guarded.tokens.values()) + [
        line.split('"')[1] for line in guarded.file.read_text().splitlines() if line.startswith(("tokens", "member"))
    ]
    with KVStoreClient(server.endpoint, make_namespace(BLOCK_BYTES, "m"), token=guarded.tokens["all"]) as client:
        said = [repr(client), repr(client._pool.__dict__), repr(client.info()), server.log_text()]
    with pytest.raises(NotAuthorized) as refused:
        KVStoreClient(server.endpoint, make_namespace(BLOCK_BYTES, "m"), token=guarded.tokens["wrong"])
    said.append(str(refused.value))
    said.append(guarded.audit.read_text())
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
    lines = [json.loads(line) for line in guarded.audit.read_text().splitlines()]
    assert any(line["event"] == "login_failed" and line["principal"] == "mallory" for line in lines)
    purges = [line for line in lines if line["event"] == "purge" and '"audited"' in line["namespace"]]
    assert [(line["principal"], line["tenant"], line["outcome"]) for line in purges] == [("admin", "a", "begun")]
    assert any(line["event"] == "delete" and line["outcome"] == "denied" for line in lines)
    assert stat.S_IMODE(os.stat(guarded.audit).st_mode) == 0o600


def test_an_engine_with_a_refused_token_only_misses(guarded: Guarded) -> None:
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


def test_a_revoked_token_ends_its_connections_and_its_replacement_is_used(guarded: Guarded, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(rotate(guarded.file, "other"))
    guarded.server.signal(signal.SIGHUP)
    namespace = make_namespace(BLOCK_BYTES, "rotated")
    with connect_when_known(guarded, namespace, token) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        token.write_text(rotate(guarded.file, "other", end_old=True))
        # The file is read again within about a second; then the old connection ends, and the client logs in again.
        wait_until(lambda: "the rights of principal 'other' changed" in guarded.server.log_text())
        assert wait_until(lambda: hits(client) == 2)


def hits(client: KVStoreClient) -> int:
    try:
        return client.get(KEYS).hit
    except (ConnectionLost, NotAuthorized):
        return -1


def test_a_bad_file_is_refused_and_the_last_valid_policy_stays(guarded: Guarded) -> None:
    good = guarded.file.read_text()
    try:
        guarded.file.write_text(good.replace('verbs = ["read"]', 'verbs = ["reed"]'))
        wait_until(lambda: "verb 'reed': expected one of read" in guarded.server.log_text())
        with KVStoreClient(
            guarded.server.endpoint, make_namespace(BLOCK_BYTES, "m"), token=guarded.tokens["read"]
        ) as client:
            assert client.contains(KEYS).tolist() == [False, False]
    finally:
        guarded.file.write_text(good)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], ["--host", "give --auth FILE, or --insecure"]),
        (["--http", "0.0.0.0:0"], ["--http", "give --auth FILE, or --insecure"]),
        (["--auth", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["--auth", "FILE", "--nixl"], ["--nixl", "--insecure"]),
    ],
)
def test_a_server_open_to_everybody_does_not_start(arguments: list[str], said: list[str], tmp_path: Path) -> None:
    ran = run([*harness.server_command("--port", "0", "--memory", "64MiB"), *arguments], tmp_path)
    assert ran.returncode in (1, 2)
    for text in said:
        assert text in ran.stderr, ran.stderr


def test_http_requires_a_token_with_access_to_all_tenants(guarded: Guarded) -> None:
    url = guarded.server.http_url
    basic = base64.b64encode(f"anybody:{guarded.tokens['operator']}".encode()).decode()
    bearer = f"Bearer {guarded.tokens['operator']}"

    def status(path: str, authorization: str = "") -> int:
        headers = {"Authorization": authorization} if authorization else {}
        return requests.get(url + path, headers=headers, timeout=10).status_code

    assert [status(path) for path in ("/healthz", "/readyz")] == [200, 200]
    for path in ("/", "/metrics", "/status.json", "/page.js"):
        assert status(path) == 401
        assert status(path, bearer) == 200
        assert status(path, f"Basic {basic}") == 200
        assert status(path, f"Bearer {guarded.tokens['monitor']}") == 403  # of one tenant
    assert requests.get(url + "/", timeout=10).headers["WWW-Authenticate"].startswith("Basic")
    began = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        wrong = [threads.submit(status, "/metrics", f"Bearer kvs_operator.{'A' * 43}") for _ in range(20)]
        assert status("/metrics", bearer) == 200 and time.monotonic() - began < 0.9
        codes = {each.result() for each in wrong}
    assert codes <= {401, 429} and 401 in codes
    text = requests.get(url + "/metrics", headers={"Authorization": bearer}, timeout=10).text
    assert 'kvstore_tenant_connections{shard="0",tenant="a"}' in text and "kvstore_failed_logins_total" in text


def test_a_token_that_ended_before_the_first_http_request_opens_no_page(
    start_server: StartServer, tmp_path: Path
) -> None:
    file = tmp_path / "auth.toml"
    ended = add(file, "operator", "*", ["admin"])
    server = start_server("--auth", str(file), "--http", "127.0.0.1:0")
    new = rotate(file, "operator", end_old=True)
    wait_until(lambda: server.log_text().count("is in force") == 2, what="the shard and the supervisor know it")
    for token, status in ((ended, 401), (new, 200)):
        headers = {"Authorization": f"Bearer {token}"}
        assert requests.get(server.http_url + "/metrics", headers=headers, timeout=10).status_code == status


def test_a_half_decodable_namespace_is_an_error_for_its_sender_only(guarded: Guarded) -> None:
    """The check of a namespace skips members that the server does not use. The code that inserts the tenant decodes all
    members, and must not fail."""
    strange = (b'"x":1e999', b'"x":' + b"9" * 5000, b'"x":"\\ud800"')
    token = guarded.tokens["write"] = rotate(guarded.file, "write")  # a token that the shard has not checked yet
    with guarded.server.unharmed():
        for member in strange:
            canonical = b'{"block_bytes":4096,"model":"m","version":1,' + member + b"}"

            def answered(canonical: bytes = canonical) -> bool:
                with RawClient(guarded.server) as raw:
                    reply = log_in(raw, canonical, token)
                    return reply[0] == ERROR and reply[2] == 1  # PROTOCOL, and not NOT_AUTHORIZED

            wait_until(answered)


def test_a_connection_without_a_login_is_closed(silent: Future[float]) -> None:
    assert 9.0 < silent.result() < 15.0
