"""Transient blocks as operators and developers see them: options, errors, metrics, commands."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvstore_client import AsyncKVStoreClient, KVStoreClient, Namespace
from tests.support.harness import (
    ERROR,
    SET,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    namespace_info,
    pack,
    sums_of,
)

BLOCK = 64 << 10
SEGMENT = 1 << 20
PER_SEGMENT = SEGMENT // BLOCK


@pytest.fixture
def local(start_server: StartServer) -> Server:
    return start_server(memory="32MiB", segment="1MiB")


@pytest.fixture
def own(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(BLOCK)


def test_a_server_without_transient_memory_refuses_them_all(start_server: StartServer, own: Namespace) -> None:
    server = start_server("--transient-memory", "0", memory="8MiB", segment="1MiB")
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, own) as client:
        assert client.set(keys, blocks_of(keys, BLOCK), reads=1).refused == 3
        assert client.set(keys, blocks_of(keys, BLOCK)).created == 3


def test_nonsensical_options_are_refused(local: Server, own: Namespace) -> None:
    keys = make_keys(1)
    blocks = blocks_of(keys, BLOCK)
    with KVStoreClient(local.endpoint, own) as client:
        with pytest.raises(ValueError, match="reads=256: expected 0 to 255"):
            client.set(keys, blocks, reads=256)
        with pytest.raises(ValueError, match="reads=1 and force=True"):
            client.set(keys, blocks, reads=1, force=True)
        assert client.set(keys, blocks, reads=0).created == 1 and not namespace_info(client).transient_blocks
    with RawClient(local) as raw:
        raw.hello(own.canonical())
        ordinary = [False, b"", b"", 0, b"", 0, b"", False]
        raw.send(pack(SET, 1, 10_000, 1, 16, True, 0, False, 0.0, *ordinary, 1), keys[0], blocks[0], sums_of(blocks))
        header, _ = raw.reply()
        assert header[0] == ERROR and "0 with force" in header[3]


def test_the_async_client_and_the_command_set_them(local: Server, own: Namespace, tmp_path: Path) -> None:
    keys = make_keys(2)

    async def set_and_get() -> list[int]:
        async with AsyncKVStoreClient(local.endpoint, own) as client:
            await client.set(keys[:1], blocks_of(keys[:1], BLOCK), reads=1, ttl_s=30)
            return [(await client.get(keys[:1])).hit for _ in range(2)]

    assert asyncio.run(set_and_get()) == [1, 0]
    file = tmp_path / "block"
    file.write_bytes(blocks_of(keys[1:], BLOCK)[0])
    command = [sys.executable, "-m", "kvstore_cli", "set", keys[1].hex(), str(file), "--reads", "1", "--ttl", "50"]
    command += ["--namespace", own.canonical().decode(), "--endpoint", local.endpoint, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["created"] == 1, done.stderr
    with KVStoreClient(local.endpoint, own) as client:
        assert [client.get(keys[1:]).hit for _ in range(2)] == [1, 0]
    command.append("--force")
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2 and "--reads and --force" in done.stdout + done.stderr


def test_operators_see_them_in_info_and_metrics(start_server: StartServer, own: Namespace) -> None:
    server = start_server("--http", "127.0.0.1:0", "--transient-memory", "2MiB", memory="8MiB", segment="1MiB")
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, own) as client:
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        info = client.info()
        assert (info.full_blocks, info.free_blocks) == (3, 7 * PER_SEGMENT)  # their segment takes no other blocks
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    found = dict(re.findall(r"^(kvstore_transient_\w+)\{.*\} (\S+)$", metrics, re.MULTILINE))
    assert {name.removeprefix("kvstore_transient_"): float(value) for name, value in found.items()} == {
        "bytes": SEGMENT,
        "limit_bytes": 2 * SEGMENT,
        "blocks": 3,
    }
    command = [sys.executable, "-m", "kvstore_cli", "info", "--shards", "--endpoint", server.endpoint]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=60).stdout
    assert re.search(r"Transient blocks *\n(.*\n){2}.*/0 +3 +1.0 MiB +2.0 MiB", shown), shown
