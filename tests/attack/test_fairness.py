"""One address takes everything it can get; other addresses, the members of the cluster and operators are still
served."""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient
from tests.attack.crowd import CLIENTS, KEYS_64, LIMIT, OF_ADDRESS, crowd, hold_memory, kvstore
from tests.attack.scale import ATTACK_S, FULL
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.harness import (
    CONTAINS,
    CONTAINS_REPLY,
    ERROR,
    HOTTEST,
    INFO,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
    shard_info,
    wait_until,
    zmtp_frame,
)

HOTTEST_REPLY = 75
ANSWER_S = 0.5  # the median time from connecting to the answer; without preference it is more than a second
NAMESPACE = make_namespace(64, "fairness")
JOBS = 200  # on each of four connections; 64 may wait
CONNECTIONS = 100  # together they ask for several times the memory that one address may have


def readiness(server: Server) -> int:
    with urllib.request.urlopen(f"{server.http_url}/readyz", timeout=10) as answer:
        return int(answer.status)


def free_bytes(client: KVStoreClient) -> int:
    """Return the bytes that are left for clients."""
    info = shard_info(client)
    return info.held_limit_bytes - (16 << 20) - sum(info.held_bytes.values())


@contextlib.contextmanager
def blocks_that_do_not_come(server: Server) -> Iterator[None]:
    """The 8192 blocks of `KEYS_64` are being written while the body runs: GETs for them wait."""
    with RawClient(server, source="127.0.0.8") as writer:
        writer.hello(NAMESPACE.canonical())
        writer.send(pack(2, 1, 600_000, 8192, 64), KEYS_64, more=True)
        yield


def test_one_address_holds_at_most_its_share(start_server: StartServer) -> None:
    server = start_server()
    with (
        KVStoreClient(server.endpoint, NAMESPACE) as operator,
        blocks_that_do_not_come(server),
        crowd(server, CONNECTIONS, "127.0.0.2", NAMESPACE) as raws,
    ):
        hold_memory(raws)
        assert shard_info(operator).refused["memory_of_address"] > 0
        assert shard_info(operator).refused["memory"] == 0
        assert "requests and replies of clients at 127.0.0.2" in server.log_text()
        left = free_bytes(operator)
        assert left > 16 << 20, "a quarter of what connections leave"
        with RawClient(server, source="127.0.0.3") as other:
            other.hello(NAMESPACE.canonical())
            other.send(pack(CONTAINS, 1, 60_000, 8192, 64, False, 0.0), KEYS_64)
            assert other.reply()[0][0] == CONTAINS_REPLY
        with crowd(server, CONNECTIONS, "127.0.0.4", NAMESPACE) as more:
            hold_memory(more)
            assert free_bytes(operator) > left / 8, "a second one takes no more than three quarters of the rest"
    assert server.running


def test_a_returning_address_may_hold_as_much_as_before(start_server: StartServer) -> None:
    """The memory that an address's closed connections held is free again, and no longer counts for that address."""
    server = start_server()
    with KVStoreClient(server.endpoint, NAMESPACE) as operator, blocks_that_do_not_come(server):
        for _ in range(3):
            with crowd(server, CONNECTIONS, "127.0.0.2", NAMESPACE) as raws:
                hold_memory(raws)
                assert free_bytes(operator) > 16 << 20
            wait_until(lambda: shard_info(operator).connections == 2)


def test_the_jobs_of_one_address_leave_room_for_others(start_server: StartServer) -> None:
    """Lists of the hottest blocks are requested on many connections at once."""
    server = start_server(memory="256MiB", segment="32MiB")
    with KVStoreClient(server.endpoint, NAMESPACE, timeout_s=60) as operator:
        keys = make_keys(50_000)
        operator.set(keys, [bytes(64)] * len(keys))
        with crowd(server, 4, "127.0.0.2", NAMESPACE) as raws, RawClient(server, source="127.0.0.3") as other:
            other.hello(NAMESPACE.canonical())
            for raw in raws:
                raw.sock.sendall(
                    b"".join(zmtp_frame(pack(HOTTEST, request_id, 60_000, 0, 1), 0) for request_id in range(JOBS))
                )
            other.send(pack(HOTTEST, 1, 60_000, 0, 1))
            assert other.reply()[0][0] == HOTTEST_REPLY
            assert shard_info(operator).refused["jobs"] > 0
            assert any(raw.reply()[0][:3:2] == [ERROR, LIMIT] for raw in raws for _ in range(JOBS))


@pytest.mark.exclusive  # it measures time
def test_an_operator_is_answered_while_clients_send_all_they_can(start_server: StartServer) -> None:
    """As many connections as one address may have send as many requests as the shard accepts."""
    server = start_server("--http", "127.0.0.1:0")
    header = pack(CONTAINS, 1, 60_000, 20, 64, False, 0.0)
    message = zmtp_frame(header, 1) + zmtp_frame(KEYS_64[: 20 * 64], 0)
    stop = threading.Event()

    def send(raws: list[RawClient]) -> None:
        left = dict.fromkeys(raws, message)
        for raw in raws:
            raw.sock.setblocking(False)
        while not stop.is_set():
            for raw in raws:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    raw.sock.recv(1 << 16)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    left[raw] = left[raw][raw.sock.send(left[raw]) :] or message

    took = []
    with crowd(server, OF_ADDRESS, "127.0.0.2", NAMESPACE) as raws:
        thread = threading.Thread(target=send, args=(raws,))
        thread.start()
        try:
            end = time.monotonic() + ATTACK_S
            while time.monotonic() < end or len(took) < 5:
                began = time.monotonic()
                with RawClient(server) as operator:
                    operator.hello()
                    operator.ask(pack(INFO, 1, 1000))
                took.append(time.monotonic() - began)
            assert readiness(server) == 200
            assert kvstore("ping", server=server).returncode == 0
        finally:
            stop.set()
            thread.join()
    assert statistics.median(took) < ANSWER_S, took


def test_a_leaving_node_moves_blocks_to_one_with_no_memory_for_clients(
    tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    """On the node that receives the blocks, clients have every place and as much memory as they can get."""
    count = 2000 if FULL else 300
    namespace, keys = new_namespace(4096), make_keys(count)
    with Etcd(tmp_path / "etcd") as etcd, Cluster(etcd.url("full"), tmp_path, drain_seconds=30) as cluster:
        cluster.start("a")
        cluster.wait_for(a="serving")
        with cluster.client(namespace) as client:
            assert client.set(keys, blocks_of(keys, 4096), deferred=False).created == count
        server = cluster.start("b", grace_seconds=1)
        cluster.wait_for_members("a", "b")
        with blocks_that_do_not_come(server), contextlib.ExitStack() as stack:
            hosts = [f"127.0.0.{number}" for number in range(2, 8)]
            crowds = [stack.enter_context(crowd(server, CLIENTS // 6, host, NAMESPACE)) for host in hosts]
            for raws in crowds:
                hold_memory(raws[:60])
            for number in range(20, 40):
                stack.enter_context(RawClient(server, source=f"127.0.0.{number}"))
            cluster.nodes["a"].signal(signal.SIGTERM)
            assert cluster.nodes["a"].process.wait(60) == 0
            assert "failed=0" in cluster.nodes["a"].log_text(), cluster.nodes["a"].log_text()
        with cluster.alone("b", namespace) as client:
            assert client.get(keys).blocks == blocks_of(keys, 4096)
