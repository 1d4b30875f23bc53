"""Generations: after a purge, the purged blocks are misses on all shards, for all clients, permanently."""

from __future__ import annotations

import gc
import select
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore.auth.editing import add
from kvstore.store.generations import FILE
from kvstore.wire import zmtp
from kvstore.wire.dealer import Dealer
from kvstore_client import KVStoreClient
from tests.support.disk import disk_flags, open_client, wait_until_on, wait_until_written
from tests.support.harness import (
    SET_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    make_keys,
    namespace_info,
    set_frames,
    wait_until,
)

BLOCK = 4096
PURGE_REPLY = 76


def rows(count: int, fill: int = 1) -> Any:
    return np.full((count, BLOCK), fill, dtype=np.uint8)


def generations(client: KVStoreClient) -> list[int]:
    """Return the generation of each shard."""
    return [shard.generation for shard in client.info().shards]


@pytest.mark.parametrize("shards", [1, 3])
def test_blocks_made_before_a_purge_are_refused_and_later_ones_stored(
    start_server: StartServer, new_namespace: MakeNamespace, shards: int
) -> None:
    server, keys = start_server("--shards", str(shards)), make_keys(60)
    namespace = new_namespace(BLOCK)
    with (
        KVStoreClient(server.endpoint, namespace, keeps_copies=True) as engine,
        KVStoreClient(server.endpoint, namespace) as other,
    ):
        made = engine.generation
        assert made == 0 and engine.set(keys[:30], rows(30), generation=made).created == 30
        assert other.purge() == 30
        assert engine.generation == other.generation > made, "it has heard of it before the purge returned"
        late = engine.set(keys, rows(60), generation=made)
        assert (late.created, late.error, late.refused, late.stale) == (0, 60, 60, 60)
        assert other.match_prefix(keys) == 0
        assert engine.set(keys, rows(60), generation=engine.generation).created == 60
        assert other.match_prefix(keys) == 60
        assert len(set(generations(other))) == 1


def test_a_purge_counts_blocks_removed_by_an_earlier_notice(server: Server, new_namespace: MakeNamespace) -> None:
    """A client that learned of the purge from another shard tells this shard of it before the PURGE arrives. The purged
    blocks are still counted, and only once."""
    namespace, keys = new_namespace(BLOCK), make_keys(30)
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:
        client.set(keys, rows(30))
        raw.hello(namespace.canonical())
        generation = time.time_ns()
        raw.send(wire.encode(wire.Raise(0, generation)))
        wait_until(lambda: client.match_prefix(keys) == 0, what="its blocks are found no more")
        purges = []
        for number in (1, 2):
            raw.send(wire.encode(wire.Purge(number, 10_000, generation=generation)))
            while (reply := raw.reply()[0])[0] != PURGE_REPLY:
                pass  # notices of the new generation
            purges.append(reply)
        assert [reply[2] for reply in purges] == [30, 0]
        assert purges[0][3] == client.generation == generation and len(purges[0][4]) == 1


def test_a_client_unaware_of_a_purge_stores_newly_given_blocks(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server, namespace, keys = start_server("--shards", "2"), new_namespace(BLOCK), make_keys(40)
    with KVStoreClient(server.endpoint, namespace) as first, KVStoreClient(server.endpoint, namespace) as second:
        first.set(keys, rows(40))
        for _ in range(3):
            assert second.purge() == 40
            assert first.set(keys, rows(40)).created == 40
            assert second.match_prefix(keys) == 40


def test_a_set_in_progress_at_a_purge_is_refused(server: Server, new_namespace: MakeNamespace) -> None:
    """The blocks of the SET were made before the purge, no matter how many of their bytes had arrived by then."""
    namespace, keys, blocks = new_namespace(BLOCK), make_keys(2), [bytes(BLOCK)] * 2
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:
        raw.hello(namespace.canonical())
        header, packed, payload, sums = set_frames(7, keys, blocks)
        raw.send(header, packed, more=True)
        raw.sock.sendall(zmtp.frame_head(len(payload), True) + payload[:BLOCK])
        wait_until(lambda: namespace_info(client).writing == 2, what="it is being written")
        assert client.purge() == 0
        raw.sock.sendall(payload[BLOCK:] + zmtp.frame(sums, False))
        reply = raw.reply()[0]
        assert reply[:3] == [SET_REPLY, 7, 2] and reply[7] == 2 and reply[10] == client.generation, reply
        assert client.match_prefix(keys) == 0 and namespace_info(client).writing == 0


def test_readers_see_no_older_block_after_a_purge_returned(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """Other clients set and read blocks all the time. Each block contains the generation in which it was made."""
    server, namespace, keys = start_server("--shards", "2"), new_namespace(BLOCK), make_keys(64)
    purged = 0  # the generation of the last purge that has returned
    read_blocks, wrong = 0, 0
    stop = threading.Event()

    def read() -> None:
        nonlocal read_blocks, wrong
        with KVStoreClient(server.endpoint, namespace) as client:
            while not stop.is_set():
                least = purged
                made = [int.from_bytes(block[:8], "little") for block in client.get(keys).blocks if block is not None]
                read_blocks += len(made)
                wrong += sum(each < least for each in made)

    def write() -> None:
        """Act as an engine that sets blocks of one generation until it learns of the next one."""
        with KVStoreClient(server.endpoint, namespace, keeps_copies=True) as engine:
            while not stop.is_set():
                made = engine.generation
                blocks = [made.to_bytes(8, "little") * (BLOCK // 8)] * 64
                for at in range(0, 64, 8):
                    engine.set(keys[at : at + 8], blocks[at : at + 8], generation=made)

    threads = [threading.Thread(target=run) for run in (read, read, write, write)]
    for thread in threads:
        thread.start()
    try:
        with KVStoreClient(server.endpoint, namespace) as client:
            for _ in range(40):
                client.purge()
                purged = client.generation
                before = read_blocks
                wait_until(lambda before=before: read_blocks > before, what="blocks of this generation are read")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert read_blocks and not wrong


def test_a_client_that_connects_during_a_purge_gets_its_generation(
    start_server: StartServer, new_namespace: MakeNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shard's reply to HELLO and the notice of the purge arrive together."""
    server, namespace = start_server("--unix-socket", str(tmp_path / "kv.sock")), new_namespace(BLOCK)
    purges: list[int] = []  # the generation after each purge
    receive = Dealer._receive

    def receive_late(dealer: Dealer, deadline: float) -> None:
        if dealer.pending and len(purges) < 2:  # HELLO was sent; the connection to the Unix socket sends another one
            dealer.wait(select.POLLIN, deadline)
            operator.purge()
            purges.append(operator.generation)
        receive(dealer, deadline)

    with KVStoreClient(server.endpoint, namespace) as operator:
        monkeypatch.setattr(Dealer, "_receive", receive_late)
        with KVStoreClient(server.endpoint, namespace) as client:
            assert 0 < purges[0] < purges[1] == client.generation


def test_promises_of_an_earlier_generation_end(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server, namespace, keys = start_server(), new_namespace(BLOCK), make_keys(4)
    with KVStoreClient(server.endpoint, namespace) as producer, KVStoreClient(server.endpoint, namespace) as reader:
        found: list[int] = []
        with producer.promise(keys, ttl_s=60):
            out = np.zeros((4, BLOCK), dtype=np.uint8)
            waiting = threading.Thread(target=lambda: found.append(int(reader.get_into(keys, out, wait_s=30).sum())))
            waiting.start()
            wait_until(
                lambda: any(each.awaited for each in producer.info().shards[0].namespaces), what="somebody waits"
            )
            with KVStoreClient(server.endpoint, namespace) as operator:
                began = time.monotonic()
                operator.purge()
            waiting.join(10)
            assert found == [0] and time.monotonic() - began < 10
            assert reader.lookup(keys).promised == 0


def test_a_restarted_empty_shard_learns_the_generation(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """A store without a disk forgets its generation when it restarts, but its clients know it."""
    server, namespace, keys = start_server("--shards", "2"), new_namespace(BLOCK), make_keys(60)
    with KVStoreClient(server.endpoint, namespace, keeps_copies=True, fail_open=True) as engine:
        engine.set(keys, rows(60))
        engine.purge()
        known = engine.generation
        for shard in server.shards():
            shard.kill()
        wait_until(lambda: engine.set(keys, rows(60), generation=known).existed == 60, what="all is stored again")
        assert engine.set(keys, rows(60), generation=0).stale == 60
        with KVStoreClient(server.endpoint, namespace) as fresh:
            assert fresh.generation == known
            assert fresh.purge() == 60
            assert fresh.generation > known, "it is not used twice"


def test_a_client_tells_a_returned_shard_to_empty_itself(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    one, two = (start_server("--node-id", name) for name in ("one", "two"))
    namespace, keys = new_namespace(BLOCK), make_keys(80)
    both = [one.endpoint, two.endpoint]
    with KVStoreClient(both, namespace, keeps_copies=True) as engine:
        engine.set(keys, rows(80))
        with KVStoreClient(one.endpoint, namespace) as half:
            assert 0 < half.purge() < 80
            known = half.generation
        wait_until(lambda: engine.generation == known, what="the engine has heard of it")
        assert engine.match_prefix(keys) == 0 and not engine.contains(keys).any()
        assert engine.set(keys, rows(80), generation=known).created == 80
        with KVStoreClient(two.endpoint, namespace) as other:
            assert other.generation == known


def test_a_client_without_purge_rights_treats_an_outdated_shard_as_empty(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "auth.toml"
    writer = add(file, "writer", "a", ["read", "write"])
    operator_token = add(file, "operator", "a", ["read", "admin"])
    auth = ("--auth", str(file))
    one, two = (start_server("--node-id", name, *auth) for name in ("one", "two"))
    namespace, keys = new_namespace(BLOCK), make_keys(80)
    both = [one.endpoint, two.endpoint]
    with KVStoreClient(both, namespace, token=writer, keeps_copies=True, fail_open=True) as engine:
        engine.set(keys, rows(80))
        with KVStoreClient(one.endpoint, namespace, token=operator_token) as operator:
            here = operator.purge()
        wait_until(lambda: engine.generation > 0, what="the engine has heard of it")
        wait_until(lambda: not engine.contains(keys).any(), what="the blocks of the other shard are misses")
        with KVStoreClient(two.endpoint, namespace, token=operator_token) as operator:
            assert int(operator.contains(keys).sum()) == 80 - here, "they are still there"
        with KVStoreClient(both, namespace, token=operator_token) as operator:
            operator.purge()
        wait_until(lambda: engine.set(keys, rows(80)).error == 0, what="after another purge it has all shards again")


def test_generations_survive_a_restart_with_a_disk_tier(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    flags = disk_flags(tmp_path / "disk")
    server, namespace, keys = start_server(*flags), new_namespace(BLOCK), make_keys(50)
    with open_client(server, namespace) as client:
        client.set(keys, rows(50))
        wait_until_written(client)
        assert client.purge() == 50
        known = client.generation
        client.set(keys[:10], rows(10, 2))
        wait_until_written(client)
    server.stop()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert client.generation == known
        assert client.match_prefix(keys) == 10
        assert client.set(keys, rows(50), generation=known - 1).refused == 50


def test_a_damaged_generations_file_is_logged_and_costs_no_block(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    flags = disk_flags(tmp_path / "disk")
    server, namespace, keys = start_server(*flags), new_namespace(BLOCK), make_keys(20)
    with open_client(server, namespace) as client:
        client.purge()
        client.set(keys, rows(20))
        wait_until_written(client)
    server.stop()
    [path] = tmp_path.rglob(FILE)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert client.generation == 0 and client.match_prefix(keys) == 20
    assert "is damaged" in server.log_text()


def test_a_generation_from_the_future_is_refused(server: Server, new_namespace: MakeNamespace) -> None:
    with KVStoreClient(server.endpoint, new_namespace(BLOCK)) as client:
        client.set(make_keys(1), rows(1))
        with pytest.raises(Exception, match="at most a day ahead"):
            client.set(make_keys(2), rows(2), generation=time.time_ns() + 2 * 86_400 * 10**9)
        assert client.generation == 0 and client.match_prefix(make_keys(2)) == 1


def test_a_client_with_several_connections_hears_once_and_answers_on_all(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server, namespace, keys = start_server(), new_namespace(BLOCK), make_keys(20)
    with (
        KVStoreClient(server.endpoint, namespace, keeps_copies=True, connections=3, shared_memory=False) as engine,
        KVStoreClient(server.endpoint, namespace) as operator,
    ):
        engine.set(keys, rows(20))
        wait_until(lambda: all(lane.sock is not None for lane in engine._pool.connections), what="all are connected")
        [reply] = operator._shards.purge(operator._repairs, operator._options(10.0)).values()
        assert (reply.purged, reply.told, reply.silent) == (20, 3, [])
        assert engine.generation == operator.generation


@pytest.mark.filterwarnings("ignore:unclosed <socket", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_unclosed_client_with_copies_is_garbage_collected(server: Server, new_namespace: MakeNamespace) -> None:
    before = set(threading.enumerate())
    client = KVStoreClient(server.endpoint, new_namespace(BLOCK), keeps_copies=True)
    core = weakref.ref(client._pool)
    assert any(each.name == "kvstore-listen" for each in set(threading.enumerate()) - before)
    del client

    def is_gone() -> bool:
        gc.collect()
        own = set(threading.enumerate()) - before
        return core() is None and not any(each.name == "kvstore-listen" for each in own)

    wait_until(is_gone, what="the client is gone, and its thread")
