"""A client with several connections to each shard: what it reads over them, and what happens if one is lost."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import KVStoreClient, Namespace
from kvstore_client._links.link import Link
from tests.attack.crowd import OF_ADDRESS, crowd
from tests.support.harness import Server, StartServer, make_keys, shard_info, wait_until

BLOCK_BYTES = 1 << 20
COUNT = 24
KEYS = make_keys(COUNT)
BLOCKS = np.random.default_rng(1).integers(0, 256, (COUNT, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def remote(start_server: StartServer) -> Server:
    """A server without shared memory."""
    return start_server(memory="128MiB")


@pytest.fixture
def client(remote: Server, namespace: Namespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(remote.endpoint, namespace, connections=3) as client:
        wait_until(lambda: connected(client) == 3, what="all lanes are connected")
        yield client


def lanes_of(client: KVStoreClient) -> list[Link]:
    return list(client._pool.links[0].lanes)


def connected(client: KVStoreClient) -> int:
    return sum(lane.sock is not None for lane in lanes_of(client))


def received(lane: Link) -> int:
    assert lane._dealer is not None
    return lane._dealer.receiver.received


def check(client: KVStoreClient) -> None:
    """Read all blocks in every way, and check their bytes."""
    out = np.zeros_like(BLOCKS)
    assert client.get_into(KEYS, out).all() and np.array_equal(out, BLOCKS)
    assert [bytes(block) for block in client.get(KEYS).blocks if block is not None] == [b.tobytes() for b in BLOCKS]
    found = {position: bytes(block) for position, block in client.stream_get(KEYS)}
    assert found == {position: block.tobytes() for position, block in enumerate(BLOCKS)}
    out[:] = 0
    assert client.load_prefix(KEYS, out) == COUNT and np.array_equal(out, BLOCKS)


def test_a_large_read_uses_all_connections(client: KVStoreClient) -> None:
    assert client.set(KEYS, BLOCKS).created == COUNT
    check(client)
    shares = [received(lane) for lane in lanes_of(client)]
    assert min(shares) > COUNT // 3 * BLOCK_BYTES
    assert shard_info(client).connections == 3


def test_threads_use_all_connections_concurrently(client: KVStoreClient) -> None:
    def work(number: int) -> None:
        keys = make_keys(8, first=1000 + 8 * number)
        blocks = np.full((8, BLOCK_BYTES), number, dtype=np.uint8)
        out = np.zeros_like(blocks)
        for _ in range(5):
            assert client.set(keys, blocks, force=True, deferred=False).error == 0
            assert client.get_into(keys, out).all() and np.array_equal(out, blocks)
            client.sync()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))


def test_a_lost_connection_is_reopened_without_a_miss(client: KVStoreClient) -> None:
    client.set(KEYS, BLOCKS)
    for number in (1, 2, 0):
        sock = lanes_of(client)[number].sock
        assert sock is not None
        sock.shutdown(socket.SHUT_RDWR)
        check(client)
        wait_until(lambda: client.ping() and connected(client) == 3, what="the lane is connected again")
        check(client)


def test_a_restarted_server_gets_all_connections_again(remote: Server, client: KVStoreClient) -> None:
    remote.kill()
    remote.restart()
    wait_until(lambda: client.contains(KEYS[:1]) is not None and connected(client) == 3, what="all lanes again")
    client.set(KEYS, BLOCKS)
    check(client)


def test_the_client_works_with_fewer_connections_than_wanted(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server(memory="128MiB")
    with (
        crowd(server, OF_ADDRESS - 1, "127.0.0.1"),
        KVStoreClient(server.endpoint, namespace, connections=3) as client,
    ):
        wait_until(lambda: connected(client) == 3)
        assert client.set(KEYS, BLOCKS).created == COUNT
        check(client)
        assert len(lanes_of(client)) == 1
        check(client)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_opens_its_own_connections(client: KVStoreClient) -> None:
    client.set(KEYS, BLOCKS)
    check(client)
    child = os.fork()
    if not child:
        try:
            check(client)
            wait_until(lambda: client.ping() and connected(client) == 3)
            check(client)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check(client)


def test_with_shared_memory_one_connection_is_enough(
    start_server: StartServer, namespace: Namespace, tmp_path: Path
) -> None:
    server = start_server("--unix-socket", str(tmp_path / "kv.sock"), memory="128MiB")
    with KVStoreClient(server.endpoint, namespace, connections=3) as client:
        assert client.stats.path == "shared memory"
        client.set(KEYS, BLOCKS)
        check(client)
        assert connected(client) == 1
        wait_until(lambda: shard_info(client).connections == 1, what="the connection over TCP is closed")


def test_close_releases_all_threads_and_descriptors(remote: Server, namespace: Namespace) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with KVStoreClient(remote.endpoint, namespace, connections=4) as client:
            wait_until(lambda client=client: connected(client) == 4)  # type: ignore[misc] # mypy cannot infer it
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-lane")]
    # There may be fewer, because objects of an earlier test may have been collected in the meantime.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, what="all descriptors are closed")


@pytest.mark.parametrize("connections", [0, 17, 1.5, True, "2", None])
def test_a_wrong_number_of_connections_is_refused(remote: Server, namespace: Namespace, connections: object) -> None:
    with pytest.raises((ValueError, TypeError), match="connections"):
        KVStoreClient(remote.endpoint, namespace, connections=connections)  # type: ignore[arg-type] # on purpose
