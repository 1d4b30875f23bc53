"""If more shards run on the client's host than it has cores, a client reads from them in turn. A hanging shard delays
the others only for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from kvstore_client._links import in_turn
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, wait_until

MiB = 1 << 20
BLOCK, COUNT = MiB, 48
KEYS = make_keys(COUNT)
SILENT_S = 1.5  # the client's time-out: after this silence, a shard gets a PING
MOMENT_S = 0.5  # the delay of other shards on a busy machine


@pytest.fixture
def server(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(in_turn, "SHARDS_AT_A_TIME", 1)
    return start_server("--shards", "3", memory="256MiB", segment="8MiB")


@pytest.fixture
def client(server: Server, new_namespace: MakeNamespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=SILENT_S, fail_open=True) as client:
        assert client.set(KEYS, blocks_of(KEYS, BLOCK), deferred=False).created == COUNT
        yield client


def get_into(client: KVStoreClient) -> int:
    out = np.zeros((COUNT, BLOCK), dtype=np.uint8)
    present = client.get_into(KEYS, out)
    for row, block, there in zip(out, blocks_of(KEYS, BLOCK), present, strict=True):
        assert not there or row.tobytes() == block
    return int(present.sum())


def stream(client: KVStoreClient) -> int:
    blocks = blocks_of(KEYS, BLOCK)
    return sum(bytes(block) == blocks[position] for position, block in client.stream_get(KEYS))


def test_blocks_come_from_all_shards(client: KVStoreClient) -> None:
    assert get_into(client) == stream(client) == COUNT


def test_shards_are_asked_one_after_another(client: KVStoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    send = type(client._pool.links[0]).owe

    def owe(link: object, answer: object) -> int:
        nonlocal most
        number: int = send(link, answer)  # type: ignore[arg-type]
        most = max(most, sum(bool(each.pending) for each in client._pool.links))
        return number

    monkeypatch.setattr(type(client._pool.links[0]), "owe", owe)
    monkeypatch.setattr(in_turn, "SHORTEST_TURN_S", 10.0)  # on a busy machine, turns take longer
    monkeypatch.setattr(in_turn, "NEARLY_BYTES", 0)
    assert stream(client) == get_into(client) == COUNT
    assert most == 1


@pytest.mark.exclusive
@pytest.mark.parametrize("read", [get_into, stream])
def test_a_hanging_shard_costs_only_its_own_blocks(
    server: Server, client: KVStoreClient, read: Callable[[KVStoreClient], int]
) -> None:
    namespace = client.namespace.id
    counts = [next(each.blocks for each in shard.namespaces if each.id == namespace) for shard in client.info().shards]
    for number, shard in enumerate(server.shards()):
        shard.suspend()
        try:
            began = time.monotonic()
            assert read(client) == COUNT - counts[number]
            assert time.monotonic() - began < SILENT_S + MOMENT_S
        finally:
            shard.resume()
        while client.get(KEYS).hit < COUNT:  # the client reconnects in the background
            assert time.monotonic() - began < 30
            time.sleep(0.05)


@pytest.mark.exclusive
def test_blocks_are_set_on_other_shards_while_one_hangs(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(COUNT, first=10_000)
    shard = server.shards()[0]
    shard.suspend()
    try:
        began = time.monotonic()
        result = client.set(keys, blocks_of(keys, BLOCK), deferred=False)
        assert time.monotonic() - began < SILENT_S + MOMENT_S
    finally:
        shard.resume()
    assert COUNT // 6 < result.created < COUNT and result.created + result.error == COUNT


@pytest.mark.exclusive
def test_a_call_does_not_wait_for_another_calls_shard(server: Server, client: KVStoreClient) -> None:
    """One caller receives for all calls. It waits only for the link that owes an answer, and also for another link as
    soon as that one owes an answer."""
    promised = next(
        key for key in make_keys(20, 1000) if client.locate(key)[0].shard != client.locate(KEYS[0])[0].shard
    )
    out = np.zeros((1, BLOCK), dtype=np.uint8)
    with KVStoreClient(server.endpoint, client.namespace) as other, other.promise([promised], ttl_s=60):
        waiting = threading.Thread(target=client.get_into, args=([promised], out), kwargs={"wait_s": 3.0})
        waiting.start()
        wait_until(lambda: sum(each.awaited for shard in other.info().shards for each in shard.namespaces))
        began = time.monotonic()
        for _ in range(100):
            assert client.contains(KEYS[:1]).all()
        took_s = time.monotonic() - began
        assert waiting.is_alive()
    waiting.join()
    assert took_s < 1.0, "each waited for what the leader was waiting for"
