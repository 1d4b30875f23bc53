"""HOTTEST lists a namespace's keys in both tiers by recency, in pages, with bounded memory in the shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.shard.account import MAX_HELD_BYTES
from kvstore.wire import ErrorCode
from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.disk import disk_flags, fill, wait_until_on, wait_until_written
from tests.support.harness import (
    ERROR,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    environment,
    make_keys,
    pack,
    put,
    wait_until,
)
from tests.support.logins import Guarded

HOTTEST, HOTTEST_REPLY = 13, 75
LRU = ("--policy", "lru")


def hottest(server: Server, namespace: Namespace, skip: int = 0, limit: int = 1 << 20) -> tuple[list[bytes], int]:
    """Return the keys, most recently used first, and the number of blocks."""
    with RawClient(server) as raw:
        raw.hello(namespace.canonical())
        tag, request_id, key_bytes, keys, total, before = raw.ask(pack(HOTTEST, 7, 10_000, skip, limit))
        assert (tag, request_id, before) == (HOTTEST_REPLY, 7, b"")
        assert len(keys) <= wire.MAX_HOTTEST_BYTES and len(keys) % max(1, key_bytes) == 0
        return [keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes or 1)], total


def test_the_most_recently_used_come_first(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(), make_keys(30)
    with KVStoreClient(server.endpoint, namespace) as client:
        for at in range(0, 30, 10):
            put(client, keys[at : at + 10])
        assert hottest(server, namespace) == (keys[20:] + keys[10:20] + keys[:10], 30)
        client.get(keys[3:5])
        assert hottest(server, namespace)[0][:6] == [*keys[:5], keys[20]], "a chain's head counts as used, too"
        client.contains(keys[12:13], refresh=True)
        client.contains(keys[13:14])
        assert hottest(server, namespace)[0][:5] == [keys[10], keys[11], keys[12], keys[0], keys[1]]
        client.delete(keys[3:13])
        assert hottest(server, namespace) == (keys[20:] + keys[13:20] + keys[:3], 20)


def test_its_pages_add_up_to_the_whole_list(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(), make_keys(25)
    with KVStoreClient(server.endpoint, namespace) as client:
        put(client, keys)
    for limit in (1, 7, 25, 26):
        pages = [hottest(server, namespace, skip, limit) for skip in range(0, 25, limit)]
        assert [key for page, _ in pages for key in page] == keys
        assert all(total == 25 for _, total in pages)
    assert hottest(server, namespace, 25, 10) == ([], 25)
    assert hottest(server, namespace, 2**62, 2**62) == ([], 25)
    assert hottest(server, namespace, 3, 0) == ([], 25)


def test_an_unused_namespace_has_no_hottest_keys(server: Server, new_namespace: MakeNamespace) -> None:
    namespace = new_namespace()
    assert hottest(server, namespace) == ([], 0)
    with KVStoreClient(server.endpoint, namespace) as client:
        put(client, make_keys(3))
        client.delete(make_keys(3))
    assert hottest(server, namespace) == ([], 0)


def test_it_takes_a_namespace_and_numbers_within_limits(server: Server, new_namespace: MakeNamespace) -> None:
    with RawClient(server) as raw:
        raw.hello()
        refused = raw.ask(pack(HOTTEST, 3, 1000, 0, 10))
        assert refused[:3] == [ERROR, 3, ErrorCode.NO_NAMESPACE] and "HELLO" in refused[3]
        raw.hello(new_namespace().canonical())
        for fields in ((0, 0, 10), (1000, -1, 10), (1000, 0, -1)):
            assert raw.ask(pack(HOTTEST, 4, *fields))[:3] == [ERROR, 4, ErrorCode.LIMIT]
        assert raw.ask(pack(HOTTEST, 5, 1000, 0, 10)) == [HOTTEST_REPLY, 5, 0, b"", 0, b""]


def test_a_reply_has_at_most_its_limit_of_keys(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(64), make_keys(140_000, key_bytes=64)
    block = bytes(64)
    with KVStoreClient(server.endpoint, namespace) as client:
        for at in range(0, len(keys), 8192):
            some = keys[at : at + 8192]
            assert client.set(some, [block] * len(some)).error == 0
    first, total = hottest(server, namespace)
    assert total == len(keys) and len(first) == wire.MAX_HOTTEST_BYTES // 64
    rest, _ = hottest(server, namespace, len(first))
    assert len(rest) == total - len(first) and sorted(first + rest) == sorted(keys)


def test_unread_replies_are_bounded_for_all_clients_together(start_server: StartServer) -> None:
    server = start_server(memory="128MiB")
    namespace = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=64)
    block, keys = bytes(64), make_keys(135_000, key_bytes=64)
    with KVStoreClient(server.endpoint, namespace) as client:
        for at in range(0, len(keys), 8192):
            some = keys[at : at + 8192]
            assert client.set(some, [block] * len(some)).error == 0
    raws = [RawClient(server, receive_buffer=1 << 16) for _ in range(24)]
    try:
        for raw in raws:
            raw.sock.settimeout(60)  # the shard makes the lists one after another
            raw.hello(namespace.canonical())
            raw.send(pack(HOTTEST, 1, 10_000, 0, 1 << 20))
        answers = [raw.reply()[0] for raw in reversed(raws)]  # the last requests are refused
        refused = [answer for answer in answers if answer[0] == ERROR]
        assert 24 - len(refused) <= MAX_HELD_BYTES // wire.MAX_HOTTEST_BYTES + 4  # some are in the kernel's buffers
        assert refused and all(answer[:3] == [ERROR, 1, ErrorCode.LIMIT] for answer in refused)
        # The memory is free again.
        assert raws[0].ask(pack(HOTTEST, 2, 10_000, 0, 1 << 20))[0] == HOTTEST_REPLY
    finally:
        for raw in raws:
            raw.close()
    assert wait_until(lambda: hottest(server, namespace)[1] == len(keys))


@pytest.mark.parametrize("restarted", [False, True])
def test_both_tiers_form_one_list(
    start_server: StartServer, tmp_path: Path, new_namespace: MakeNamespace, restarted: bool
) -> None:
    block_bytes = 64 << 10
    namespace, keys = new_namespace(block_bytes), make_keys(400)  # memory holds 256
    server = start_server(*disk_flags(tmp_path / "disk"), *LRU, memory="16MiB")
    with KVStoreClient(server.endpoint, namespace, timeout_s=20) as client:
        wait_until_on(client)
        for at in range(0, len(keys), 40):
            fill(client, keys[at : at + 40], block_bytes)
            wait_until_written(client)
        if restarted:
            server.stop()
            server.restart()
            wait_until_on(client)
        listed, total = hottest(server, namespace)
        assert total == 400 and sorted(listed) == sorted(keys)
        places = {key: place for place, key in enumerate(listed)}
        newest, oldest = keys[200:], keys[:100]
        assert max(places[key] for key in newest) < min(places[key] for key in oldest)
        client.get(oldest[:10])  # from disk
        assert set(hottest(server, namespace, 0, 10)[0]) == set(oldest[:10])
        assert hottest(server, namespace)[1] == 400


# ---- the call and the command --------------------------------------------------------------------------------------


def kvstore_keys(server: Server, namespace: Namespace, *arguments: str, status: int = 0, **variables: str) -> str:
    done = forked.run(
        *("kvstore_cli", "keys", "--namespace", namespace.canonical().decode(), "--endpoint", server.endpoint),
        *arguments,
        env=environment(**variables),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def test_the_command_shows_the_keys_used_last(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server, namespace, keys = start_server("--shards", "2"), new_namespace(), make_keys(60)
    with KVStoreClient(server.endpoint, namespace) as client:
        assert "there is no such namespace; the store has none" in kvstore_keys(server, namespace, status=3)
        for key in keys:
            put(client, [key])
        client.get(keys[7:8])
        client.get(keys[3:4])
        lists = client.hottest(count=60)
        assert sorted(key for found in lists.values() for key in found) == sorted(keys)
        document = json.loads(kvstore_keys(server, namespace, "--hottest", "60", "--json"))
        assert document["silent"] == [] and document["block_bytes"] == namespace.block_bytes
        rows = document["keys"]
        assert [row["rank"] for row in rows] == sorted(row["rank"] for row in rows)
        numbers = {shard.name: f"{shard.node}/{shard.info.shard}" for shard in client.shards() if shard.info}
        by_shard = {numbers[name]: [key.hex() for key in found] for name, found in lists.items()}
        for shard, found in by_shard.items():
            assert [row["key"] for row in rows if row["shards"] == [shard]] == found
        used = [keys[3].hex(), keys[7].hex(), *(key.hex() for key in reversed(keys))]
        for found in by_shard.values():
            assert found == list(dict.fromkeys(key for key in used if key in found)), "the last use comes first"
        shown = kvstore_keys(server, namespace, "--hottest", "4").splitlines()
        assert [line.split()[:2] for line in shown] == [[str(row["rank"]), row["key"]] for row in rows[:4]]
        assert keys[3].hex() in [row["key"] for row in rows[:2]]
        assert "--hottest" in kvstore_keys(server, namespace, "--hottest", "0", status=2)
        with pytest.raises(ValueError, match="count"):
            client.hottest(count=0)


def test_a_key_that_several_shards_have_is_shown_once(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    servers, namespace, keys = [start_server(), start_server()], new_namespace(), make_keys(5)
    endpoints = [server.endpoint for server in servers]
    with KVStoreClient(endpoints, namespace, replicas=2) as client:
        put(client, keys)
    rows = json.loads(kvstore_keys(servers[0], namespace, "--endpoint", endpoints[1], "--json"))["keys"]
    assert [row["key"] for row in rows] == [key.hex() for key in keys]
    assert all(len(row["shards"]) == 2 for row in rows)


def test_the_command_needs_the_verb_admin(guarded: Guarded, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(), make_keys(3)
    with KVStoreClient(guarded.server.endpoint, namespace, token=guarded.tokens["all"]) as client:
        put(client, keys)
    shown = kvstore_keys(guarded.server, namespace, KVSTORE_TOKEN=guarded.tokens["admin"])
    assert [line.split()[1] for line in shown.splitlines()] == [key.hex() for key in keys]
    for who in ("read", "monitor"):
        refused = kvstore_keys(guarded.server, namespace, status=1, KVSTORE_TOKEN=guarded.tokens[who])
        assert f"HOTTEST: principal '{who}' may not: this needs the verb admin" in refused
    other = kvstore_keys(guarded.server, namespace, status=3, KVSTORE_TOKEN=guarded.tokens["other"])
    assert "there is no such namespace" in other and namespace.model not in other, "another tenant's is not seen"
