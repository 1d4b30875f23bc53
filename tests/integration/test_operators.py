"""The commands when something is wrong: a shard that hangs, a wrong address, a missing right, a typing mistake."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.test_cli import kvstore
from tests.support.harness import Server
from tests.support.logins import Guarded

BUSY_S = 3.0  # what a busy machine may add


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("two") / "log", "--shards", "2", "--memory", "64MiB")
    yield server
    server.kill()


@contextlib.contextmanager
def hung(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.mark.parametrize("shard", [0, 1])
def test_bench_and_purge_name_a_hung_shard_within_seconds(two_shards: Server, shard: int) -> None:
    at = ("--endpoint", two_shards.endpoint)
    with hung(two_shards.shards()[shard]):
        for command, named in (
            (("bench", *at), f"127.0.0.1:{two_shards.port + shard}"),
            (("purge", "--all", "--yes", *at), f"/{shard} did not answer"),
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
    for endpoint, status, kind in ((guarded.server.endpoint, 5, "refused"), ("127.0.0.1:1", 1, "unreachable")):
        done = kvstore(*command, "--endpoint", endpoint, "--json", status=status, **environment)
        assert json.loads(done.stdout)["error"]["kind"] == kind
