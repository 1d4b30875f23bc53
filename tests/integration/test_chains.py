"""Chains keep their heads, whichever clients set their blocks, in any number of calls, on any number of shards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.wire import frame_blocks
from kvstore_client import KVStoreClient
from kvstore_client.errors import KeySizeMismatch
from kvstore_client.keys import pack_keys
from tests.support.disk import disk_flags, open_client, wait_until_durable, wait_until_on, wait_until_written
from tests.support.harness import (
    SET,
    SET_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    sums_of,
    wait_until,
)

KiB = 1024
BLOCK = 64 * KiB
SLOTS = 1024  # of 64 MiB
CALL = 64  # the blocks in one set
every_policy = pytest.mark.parametrize("policy", ["lru", "default"])


def rows(count: int, block_bytes: int = BLOCK) -> Any:
    return np.zeros((count, block_bytes), dtype=np.uint8)


def set_chain(clients: Sequence[KVStoreClient], keys: Sequence[bytes], call: int = CALL) -> tuple[int, int]:
    """Set a chain in calls of `call` blocks, with each client in turn. Returns the numbers of refused and of evicted
    blocks."""
    refused = evicted = 0
    for number, start in enumerate(range(0, len(keys), call)):
        part = keys[start : start + call]
        result = clients[number % len(clients)].set(
            part, rows(len(part)), deferred=False, parent=keys[start - 1] if start else None, position=start
        )
        assert result.error == result.refused
        refused, evicted = refused + result.refused, evicted + result.evicted
    return refused, evicted


def payload(blocks: Sequence[bytes]) -> list[bytes]:
    """Return the frames of a SET after its keys."""
    per_frame = frame_blocks(BLOCK)
    frames = [b"".join(blocks[start : start + per_frame]) for start in range(0, len(blocks), per_frame)]
    return [*frames, sums_of(blocks)]


def present_and_usable(client: KVStoreClient, keys: Sequence[bytes]) -> tuple[int, int]:
    return int(client.contains(keys).sum()), client.match_prefix(keys)


def assert_heads_are_kept(client: KVStoreClient, keys: Sequence[bytes]) -> None:
    """Check that, of the chain's blocks that a shard owns, it has the first ones without a gap."""
    owners = client._pool.view.owners(pack_keys(keys), 1)[:, 0]
    present = client.contains(keys)
    for shard in range(len(client._pool.links)):
        there = present[owners == shard]
        assert there[: int(there.sum())].all(), f"shard {shard} has a block behind a gap"


def evicted_of(client: KVStoreClient) -> int:
    """Return how many blocks of the client's namespace its node's shards have evicted."""
    infos = [each for shard in client.info().shards for each in shard.namespaces if each.id == client.namespace.id]
    return sum(info.evicted for info in infos)


def present_by_owner(client: KVStoreClient, keys: Sequence[bytes]) -> list[bytes]:
    """Return the key of one present block for each shard."""
    owners = client._pool.view.owners(pack_keys(keys), 1)[:, 0]
    present = client.contains(keys)
    return [keys[int(np.flatnonzero(present & (owners == shard))[0])] for shard in range(len(client._pool.links))]


@pytest.mark.parametrize("call", [8, CALL])
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_sets_count_every_block_evicted_for_them(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path, shards: int, disk: bool, call: int
) -> None:
    flags = disk_flags(tmp_path / "disk", size="64MiB") if disk else []
    server = start_server("--shards", str(shards), "--node-id", "n1", *flags, memory="16MiB", segment="1MiB")
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        chains = [make_keys(CALL, first=1000 * number) for number in range(1, 21)]
        told = sum(set_chain([client], chain, call)[1] for chain in chains)
        assert told >= (20 * CALL - 256) / 2
        # A shard counts the blocks that it evicted because of another shard in its next answer.
        known = present_by_owner(client, chains[-1])

        def counted() -> int:
            nonlocal told
            result = client.set(known, rows(len(known)), parent=[None] * len(known))
            assert result.existed == len(known)
            told += result.evicted
            return told

        wait_until(lambda: counted() == evicted_of(client), what="every evicted block is counted")


@every_policy
@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("shards", [1, 4])
def test_present_blocks_of_new_chains_are_usable(
    start_server: StartServer, new_namespace: MakeNamespace, policy: str, connections: int, shards: int
) -> None:
    server = start_server("--policy", policy, "--shards", str(shards), memory="64MiB")
    namespace = new_namespace(BLOCK)
    chains = [make_keys(600, first=1000 * number) for number in range(1, 4)]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(KVStoreClient(server.endpoint, namespace, timeout_s=20)) for _ in range(connections)
        ]
        made_room = 0
        for chain in chains:
            refused, evicted = set_chain(clients, chain)
            assert refused == 0
            made_room += evicted
        found = [present_and_usable(clients[0], chain) for chain in chains]
        for chain in chains:
            assert_heads_are_kept(clients[0], chain)
        gone = 3 * 600 - sum(present for present, _ in found)
        assert gone == evicted_of(clients[0]) and 0 < made_room <= gone
        assert made_room == gone or shards > 1, "what is behind a block that another shard evicted goes, too"
    # No block is behind a gap. Of four shards, the one that owns the most blocks of a chain limits how much of the
    # chain is kept.
    assert all(usable >= 0.95 * present for present, usable in found), found
    assert sum(usable for _, usable in found) >= (0.95 if shards == 1 else 0.8) * SLOTS, found


@every_policy
@pytest.mark.parametrize("call", [64, 2000])
def test_the_head_of_a_chain_longer_than_the_cache_is_kept(
    start_server: StartServer, new_namespace: MakeNamespace, policy: str, call: int
) -> None:
    server = start_server("--policy", policy, memory="64MiB")
    keys = make_keys(2000)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        refused, evicted = set_chain([client], keys, call)
        present, usable = present_and_usable(client, keys)
        assert present == usable == 2000 - refused and evicted == 0
        assert usable >= 0.95 * SLOTS
        # The first chain's tail makes room for another chain. Both chains keep their heads.
        other = make_keys(100, first=5000)
        assert set_chain([client], other) == (0, 100 - (SLOTS - usable))
        assert present_and_usable(client, other) == (100, 100)
        assert present_and_usable(client, keys) == (SLOTS - 100, SLOTS - 100)


@every_policy
def test_shards_agree_where_a_too_long_chain_ends(
    start_server: StartServer, new_namespace: MakeNamespace, policy: str
) -> None:
    # With a fixed node id, the shards' names and so the shard of each key are the same in every run.
    server = start_server("--policy", policy, "--shards", "4", "--node-id", "n1", memory="64MiB")
    keys, other = make_keys(2000), make_keys(300, first=5000)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        for shard in server.shards()[1:3]:  # the pipes between the shards outlive these processes
            shard.kill()
        wait_until(lambda: len(server.shards()) == 4 and client.info() and not client.contains(keys[:100]).any())
        refused, _ = set_chain([client], keys)
        present, usable = present_and_usable(client, keys)
        assert usable >= 0.95 * present and usable >= 0.8 * SLOTS
        wait_until(  # a shard learns of the others' evictions with a small delay
            lambda: present_and_usable(client, keys)[0] + refused + evicted_of(client) == 2000, 10, "every block counts"
        )
        assert set_chain([client], other)[0] == 0
        assert present_and_usable(client, other) == (300, 300)
        present, usable = present_and_usable(client, keys)
        assert usable >= 0.95 * present and usable >= 0.8 * (SLOTS - 300)
        # The lost blocks are set again, as an engine does. If a shard learns late of an earlier eviction, it drops the
        # blocks behind the evicted one again, so they are set until all are there.
        client.delete(other)

        def whole_again() -> bool:
            there = client.match_prefix(keys)
            if rest := keys[there : SLOTS - 150]:
                client.set(rest, rows(len(rest)), deferred=False, parent=keys[there - 1], position=there)
            return client.match_prefix(keys) >= SLOTS - 150

        wait_until(whole_again, what="what was lost is there again")


def test_blocks_behind_a_gap_are_stored_where_there_is_room(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server(memory="16MiB")
    keys, other = make_keys(400), make_keys(64, first=1000)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        refused, _ = set_chain([client], keys)
        assert refused == 400 - 256
        assert client.set(keys[384:], rows(16), parent=keys[383], position=384).refused == 16
        set_chain([client], other)
        assert client.set(keys[384:], rows(16), parent=keys[383], position=384).refused == 16
        client.purge()
        assert client.set(keys[384:], rows(16), parent=keys[383], position=384).created == 16
        set_chain([client], keys[:192])
        assert present_and_usable(client, keys) == (192 + 16, 192)


@every_policy
def test_parts_may_come_in_any_order(start_server: StartServer, new_namespace: MakeNamespace, policy: str) -> None:
    server = start_server("--policy", policy, memory="16MiB")
    chain, other = make_keys(192), make_keys(128, first=1000)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        for start in (64, 128, 0):
            client.set(chain[start : start + 64], rows(64), parent=chain[start - 1] if start else None, position=start)
        set_chain([client], other)
        assert present_and_usable(client, chain) == (128, 128)


@every_policy
def test_using_deeper_blocks_keeps_the_head(
    start_server: StartServer, new_namespace: MakeNamespace, policy: str
) -> None:
    """A client uses only the later blocks of a chain, like an engine that has the first ones in its own cache."""
    server = start_server("--policy", policy, memory="16MiB")
    chain = make_keys(64)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        set_chain([client], chain)
        for number in range(1, 11):
            set_chain([client], make_keys(64, first=1000 * number))
            assert client.get(chain[32:]).hit == 32
        assert present_and_usable(client, chain) == (64, 64)


def test_one_call_can_set_blocks_of_several_chains(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="16MiB")
    one, two = make_keys(100), make_keys(100, first=1000)
    parents_of_one, parents_of_two = [None, *one[:-1]], [None, *two[:-1]]
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client:
        for start in range(0, 100, 10):
            some = slice(start, start + 10)
            result = client.set(
                [*one[some], *two[some]], rows(20), parent=[*parents_of_one[some], *parents_of_two[some]]
            )
            assert result.created == 20
        set_chain([client], make_keys(156, first=5000))
        for chain in (one, two):
            present, usable = present_and_usable(client, chain)
            assert present == usable
        assert sum(int(client.contains(chain).sum()) for chain in (one, two)) == 100


def test_many_clients_can_write_one_chain(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """Four clients set the same chain at once, like engines that compute the same new prompt."""
    server = start_server(memory="16MiB")
    namespace, chain = new_namespace(BLOCK), make_keys(200)

    def write() -> None:
        with KVStoreClient(server.endpoint, namespace, timeout_s=20) as client:
            set_chain([client], chain, 20)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with KVStoreClient(server.endpoint, namespace, timeout_s=20) as client, server.unharmed():
        assert present_and_usable(client, chain) == (200, 200)
        set_chain([client], make_keys(156, first=1000))
        assert present_and_usable(client, chain) == (100, 100)


@pytest.mark.parametrize("arrives", [True, False], ids=["arrives", "given_up"])
def test_a_chain_is_whole_after_one_client_was_slower_than_another(
    start_server: StartServer, new_namespace: MakeNamespace, arrives: bool
) -> None:
    server = start_server(memory="16MiB")
    namespace, chain = new_namespace(BLOCK), make_keys(200)
    blocks = blocks_of(chain, BLOCK)
    with KVStoreClient(server.endpoint, namespace, timeout_s=20) as client, RawClient(server) as slow:
        client.set(chain[:40], blocks[:40])
        with RawClient(server) as fast:
            for raw, count in ((slow, 20), (fast, 160)):
                raw.hello(namespace.canonical())
                header = pack(SET, 1, 10_000, count, 16, False, 0, False, 0.0, True, chain[39], b"", 40)
                raw.send(header, b"".join(chain[40 : 40 + count]), more=True)
                wait_until(lambda: client.contains(chain[40:60]).all())
            fast.send(*payload(blocks[40:]))
            assert fast.reply()[0][:5] == [SET_REPLY, 1, 160, 140, 20]
        if arrives:
            slow.send(*payload(blocks[40:60]))
            assert slow.reply()[0][:4] == [SET_REPLY, 1, 20, 20]
        else:
            slow.close()
            wait_until(lambda: not client.contains(chain[40:60]).any())
            client.set(chain[40:60], blocks[40:60], parent=chain[39], position=40)
        assert present_and_usable(client, chain) == (200, 200)
        set_chain([client], make_keys(156, first=1000))
        assert present_and_usable(client, chain) == (100, 100)


@every_policy
def test_on_disk_tails_are_evicted_before_heads_too(
    start_server: StartServer, new_namespace: MakeNamespace, folder: Path, policy: str
) -> None:
    server = start_server("--policy", policy, *disk_flags(folder, "32MiB"), memory="64MiB")
    namespace = new_namespace(BLOCK)
    one, two = make_keys(300), make_keys(400, first=1000)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        set_chain([client], one)
        wait_until_written(client)
        set_chain([client], two)
        wait_until_durable(client)
        server.kill()  # a clean stop would write the blocks that are only in memory
        server.restart()
        wait_until_on(client)
        for chain in (one, two):
            present, usable = present_and_usable(client, chain)
            assert present == usable
        assert 0 < int(client.contains(one).sum()) < 300 and client.contains(two).sum() == 400


@every_policy
@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_tails_are_evicted_before_heads_after_a_restart_too(
    start_server: StartServer, new_namespace: MakeNamespace, folder: Path, policy: str, clean: bool
) -> None:
    server = start_server("--policy", policy, *disk_flags(folder, "32MiB"), memory="64MiB")
    namespace = new_namespace(BLOCK)
    one, two = make_keys(300), make_keys(400, first=1000)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        set_chain([client], one)
        wait_until_durable(client)
        if clean:
            server.stop()
        else:
            server.kill()
        server.restart()
        wait_until_on(client)
        assert present_and_usable(client, one) == (300, 300)
        client.get(one[200:210])
        set_chain([client], two)
        wait_until_durable(client)
        server.kill()
        server.restart()
        wait_until_on(client)
        present, usable = present_and_usable(client, one)
        assert present == usable and 0 < present < 300


def test_an_invalid_parent_is_refused(server: Server, new_namespace: MakeNamespace) -> None:
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, new_namespace(256)) as client:
        with pytest.raises(ValueError, match="parent of 9 bytes for keys of 16"):
            client.set(keys, rows(3, 256), parent=b"x" * 9)
        with pytest.raises(KeySizeMismatch, match="3 bytes"):
            client.set(keys, rows(3, 256), parent=b"abc")
        with pytest.raises(ValueError, match="3 keys and 2 parents"):
            client.set(keys, rows(3, 256), parent=[None, keys[0]])
        with pytest.raises(ValueError, match="position=-1: expected 0 to"):
            client.set(keys, rows(3, 256), position=-1)
        assert client.set(keys, rows(3, 256), parent=make_keys(1, first=9)[0], position=7).created == 3
        packed = pack_keys(make_keys(4))
        assert client.set(packed[3:], rows(1, 256), parent=packed[2]).created == 1
        assert client.set(packed[1:], rows(3, 256), parent=packed[:3]).existed == 3
