"""The commands when something is wrong: a shard that hangs, a wrong address, a missing right, a typing mistake."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import KVStoreClient
from tests.integration.test_cli import answer, kvstore
from tests.support.harness import Server, hung, make_keys, make_namespace, put
from tests.support.logins import Guarded

BUSY_S = 12.0  # what a busy machine may add; the timeout is 30 s


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("two") / "log", "--shards", "2", "--memory", "64MiB")
    yield server
    server.kill()


@pytest.mark.parametrize("shard", [0, 1])
def test_bench_and_purge_name_a_hung_shard_within_seconds(two_shards: Server, shard: int) -> None:
    at = ("--endpoint", two_shards.endpoint)
    with hung(two_shards.shards()[shard]):
        for command, named in (
            (("bench", *at), f"127.0.0.1:{two_shards.port + shard}"),
            (("purge", "--all", "--yes", *at), f"127.0.0.1:{two_shards.port + shard} did not answer"),
        ):
            began = time.monotonic()
            done = kvstore(*command, status=1)
            assert time.monotonic() - began < 3 + BUSY_S
            assert named in done.stderr and done.stderr.count("\n") == 1, done.stderr


NAMESPACE = '{"model":"cli","dtype":"uint8","block_tokens":16,"block_bytes":4096}'


@pytest.mark.parametrize(
    "command",
    [
        ("ping",),
        ("info",),
        ("slowlog",),
        ("keys", "--namespace", NAMESPACE),
        ("config", "get"),
        ("purge", "--all", "--yes"),
        ("bench", "--evict"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_script_can_tell_a_refusal_from_a_server_that_is_down(
    guarded: Guarded, command: tuple[str, ...], token: str
) -> None:
    environment = {"KVSTORE_TOKEN": guarded.tokens[token]} if token else {}
    for endpoint, kind in ((guarded.server.endpoint, "refused"), ("127.0.0.1:1", "unreachable")):
        done = kvstore(*command, "--endpoint", endpoint, "--json", status=1, **environment)
        assert json.loads(done.stdout)["error"]["kind"] == kind


def test_keys_finds_a_tenants_namespace_by_its_id_or_model(guarded: Guarded) -> None:
    ours, theirs = make_namespace(4096, "keys-of"), make_namespace(8192, "keys-off")
    keys = [key.hex() for key in make_keys(3)]
    for namespace, who in ((ours, "all"), (theirs, "other")):
        with KVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens[who]) as client:
            put(client, make_keys(3))
    token = {"KVSTORE_TOKEN": guarded.tokens["operator"]}

    def shown(*arguments: str, status: int = 0, **extra: str) -> Any:
        done = kvstore("keys", *arguments, "-e", guarded.server.endpoint, "--json", status=status, **token, **extra)
        return json.loads(done.stdout)

    found = shown("--model", "keys-of")
    assert found["block_bytes"] == 4096 and [row["key"] for row in found["keys"]] == keys
    several = shown("--model", "keys-*", status=2)["error"]["message"]
    ids = dict(re.findall(r"([0-9a-f]{12}) \((keys-off?), tenant \w+\)", several))
    assert sorted(ids.values()) == ["keys-of", "keys-off"] and "--namespace-id" in several
    for id_, model in ids.items():
        assert shown("--namespace-id", id_, KVSTORE_NAMESPACE="{}")["block_bytes"] == {"keys-of": 4096}.get(model, 8192)
    for arguments in (("--model", "none-*"), ("--namespace", ours.canonical().decode())):
        error = shown(*arguments, status=3)["error"]
        assert error["kind"] == "not_found" and all(id_ in error["message"] for id_ in ids)
    assert "expected one of" in shown(status=2)["error"]["message"]


def test_sizes_have_units_and_an_error_names_the_forms(server: Server) -> None:
    common = ("bench", "--blocks", "2", "--rounds", "1", "--endpoint", server.endpoint, "--block-bytes")
    for given, size in (("64KiB", 65536), ("4k", 4000), ("2e3", 2000), ("512", 512)):
        assert answer(*common, given)["block_bytes"] == size
    for wrong in ("64zb", "0", "-5", "1e999", "KiB"):
        message = answer(*common, wrong, status=2)["error"]["message"]
        assert "--block-bytes" in message and repr(wrong) in message and "64KiB" in message


def test_bench_warms_up_before_it_measures(two_shards: Server) -> None:
    report = answer("bench", "--blocks", "8", "--block-bytes", "5000", "--rounds", "1", "-e", two_shards.endpoint)
    assert report["rounds"] == 1
    with KVStoreClient(two_shards.endpoint, make_namespace(5000, "look")) as client:
        spaces = [some for shard in client.info().shards for some in shard.namespaces if some.block_bytes == 5000]
    assert sum(some.created for some in spaces if "kvstore-bench" in some.namespace) == 16


def test_the_http_port_is_named_at_once(guarded: Guarded) -> None:
    for command in (("ping",), ("info",), ("bench",), ("purge", "--all", "--yes")):
        began = time.monotonic()
        message = answer(*command, "-e", guarded.server.http_url.split("//")[1], status=1)["error"]["message"]
        assert "it speaks HTTP" in message and "--port" in message and "7070" in message
        assert time.monotonic() - began < BUSY_S


@pytest.mark.parametrize("command", ["rotate", "list"])
def test_a_missing_file_of_logins_is_named(tmp_path: Path, command: str) -> None:
    file = tmp_path / "auth.toml"
    name = ("--name", "chat") if command == "rotate" else ()
    message = answer("auth", command, "--file", str(file), *name, status=1)["error"]["message"]
    assert message.startswith(f"{file}: ") and "no such file" in message.lower() and "kvstore auth add" in message
    assert not file.exists()
