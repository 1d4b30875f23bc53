"""A failure between a client and a shard costs only blocks of that shard. Blocks of other shards, other calls and the
caller's time are never lost, and no byte is wrong."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from kvstore.cluster.members import Member
from kvstore.wire import ShardAddress
from kvstore_client import ConnectionLost, KVStoreClient, Namespace, Timeout
from kvstore_client._calls.repairs import Repairs
from kvstore_client._links import sending, watching
from kvstore_client._links.link_pool import LinkPool
from kvstore_client._links.view import View
from tests.support.cluster import Cluster, nodes_of, owned_by
from tests.support.faults import Cut, InBackground, Relay, connections_to, impostor, link_to
from tests.support.harness import MakeNamespace, StartServer, blocks_of, lasts, make_keys, stays, wait_until

BLOCK_BYTES = 4096
BIG = 1 << 20
COUNT = 60
KEYS = make_keys(COUNT)
BLOCKS = blocks_of(KEYS, BLOCK_BYTES)


@pytest.fixture
def big(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(BIG)


@pytest.fixture
def one_preferred_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make clients always ask the first replica first."""
    monkeypatch.setattr(LinkPool, "preferred_replica", 0)
    monkeypatch.setattr(View, "_prefer_the_faster", lambda self, found: None)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    assert took_s < seconds, f"took {took_s:.2f} s: expected less than {seconds:g} s"


# ---- bytes -------------------------------------------------------------------------------------------------------


def test_a_row_partly_overwritten_by_a_retry_counts_as_missing(cluster: Cluster, big: Namespace) -> None:
    cluster.start_listed("a")
    keys = make_keys(2)
    old, new = blocks_of(keys, BIG, 1), blocks_of(keys, BIG, 2)
    with cluster.alone("a", big) as writer:
        writer.set(keys, old, deferred=False)

        def replace() -> None:
            assert writer.set(keys, new, force=True, deferred=False).forced == 2
            relay.cut(0)

        # The first connection ends in the second block. The next one ends in the first block, which has another version
        # by then.
        with Relay(cluster.nodes["a"], Cut(BIG + 400_000, replace), Cut(500_000)) as relay:
            cluster.register("a", "serving", port=relay.port)
            with cluster.client(big, timeout_s=1.0, fail_open=True) as client:
                out = np.zeros((2, BIG), dtype=np.uint8)
                present = client.get_into(keys, out)
                assert relay.connections >= 2
                assert out[0].tobytes() not in (old[0], new[0]), "the row is of two versions"
                assert not present.any()


def test_a_torn_row_is_not_used_for_repair(cluster: Cluster, big: Namespace, one_preferred_replica: None) -> None:
    cluster.start_listed("a", "b")
    with cluster.alone("b", big) as writer:

        def replace() -> None:
            assert writer.set(keys, new, force=True, deferred=False).forced == 2
            relay.cut(0)

        with Relay(cluster.nodes["b"], Cut(BIG + 400_000, replace), Cut(500_000)) as relay:
            cluster.register("b", "serving", port=relay.port)
            with cluster.client(big, timeout_s=2.0, fail_open=True, replicas=2) as client:
                wait_until(lambda: nodes_of(client) == {"a", "b"})
                keys = owned_by(client, "a", make_keys(40))[:2]
                old, new = blocks_of(keys, BIG, 1), blocks_of(keys, BIG, 2)
                writer.set(keys, old, deferred=False)
                out = np.zeros((2, BIG), dtype=np.uint8)
                present = client.get_into(keys, out)
                assert relay.connections >= 2
                assert not present.any()
                wait_until(lambda: not client._repairs._running)
                with cluster.alone("a", big) as alone:
                    assert not alone.contains(keys).any()


def test_a_message_is_not_continued_on_another_connection(
    cluster: Cluster, big: Namespace, in_background: InBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start_listed("a")
    keys, others = make_keys(8), make_keys(8, first=100)
    blocks = blocks_of(keys, BIG)
    server = cluster.nodes["a"]
    with cluster.alone("a", big) as writer, Relay(server, Cut(700)) as relay:
        writer.set(keys, blocks, deferred=False)
        cluster.register("a", "serving", port=relay.port)
        with cluster.client(big, timeout_s=5.0) as client:
            link = link_to(client, "a")
            reading = in_background(client.get_into, keys, np.empty((8, BIG), dtype=np.uint8))
            wait_until(lambda: link.pending)
            assert link.sock is not None
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # so that it fills up
            send_some = sending.Sending._send_some
            cuts = 0

            def lose_the_connection_in_the_middle(self: sending.Sending, sock: socket.socket) -> bool:
                nonlocal cuts
                sent = send_some(self, sock)
                if not (sent or cuts):  # the socket is full
                    cuts += 1
                    relay.cut(0)
                    wait_until(lambda: link.connections == 2 and link.sock is not None, what="the reader connects")
                return sent

            monkeypatch.setattr(sending, "READ_WAIT_S", 0.0)
            monkeypatch.setattr(sending.Sending, "_send_some", lose_the_connection_in_the_middle)
            assert client.set(others, blocks, deferred=False).created == 8, "the whole message is sent again"
            assert reading.result().all()
            assert relay.connections == 2 and cuts == 1
    assert "refused" not in server.log_text()


# ---- one shard ---------------------------------------------------------------------------------------------------


@pytest.mark.exclusive
def test_connections_to_silently_dead_replicas_cost_a_set_nothing(
    start_server: StartServer, namespace: Namespace
) -> None:
    servers = [start_server(), start_server()]
    with KVStoreClient([server.endpoint for server in servers], namespace, replicas=2, timeout_s=5.0) as client:
        client.set(KEYS, BLOCKS)
        for server in servers:
            server.kill()
            server.restart()
        with within(1.0):
            result = client.set(KEYS, BLOCKS, deferred=True)
        assert (result.created, result.error) == (COUNT, 0)


@pytest.mark.exclusive
def test_a_shard_that_hangs_at_connect_costs_only_its_blocks(
    cluster: Cluster, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, in_background: InBackground
) -> None:
    cluster.start_listed("a", "b", "c")
    monkeypatch.setattr(random, "shuffle", lambda places: places.sort(key=lambda place: place.node))
    with cluster.nodes["a"].stopped(), cluster.client(namespace, timeout_s=2.0, fail_open=True) as client:
        for link in client._pool.links:
            link.broken = None  # forget that the shard hangs
        lost = len(owned_by(client, "a", KEYS))
        with cluster.alone("b", namespace) as b, cluster.alone("c", namespace) as c, within(2.3):
            setting = in_background(client.set, KEYS, BLOCKS)
            wait_until(lambda: b.contains(KEYS).sum() + c.contains(KEYS).sum() == COUNT - lost, 1.0)
            assert not setting.done(), "the others do not wait for it"
            result = setting.result()
        assert (result.created, result.error) == (COUNT - lost, lost)
        assert client.get(KEYS).hit == COUNT - lost
        assert [place.node for place in client._pool.view.places if place.link.broken] == ["a"]


@pytest.mark.exclusive
def test_a_hanging_shard_does_not_keep_a_client_from_starting(
    cluster: Cluster, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start_listed("a", "b", "c")
    monkeypatch.setattr(random, "shuffle", lambda places: places.sort(key=lambda place: place.node))
    with cluster.nodes["a"].stopped(), within(1.4), cluster.client(namespace, timeout_s=1.5) as client:
        assert link_to(client, "b").sock is not None
        assert link_to(client, "c").broken is None


def pause(client: KVStoreClient, seconds: float) -> None:
    """Make the client believe that its shards have been silent for this long."""
    for link in client._pool.links:
        link.liveness.last_received -= seconds
        link.liveness.last_moved -= seconds


def test_a_short_call_after_a_pause_breaks_no_link(
    start_server: StartServer, namespace: Namespace, in_background: InBackground
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace, timeout_s=1.0) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        pause(client, 1.1)
        with server.stopped():
            reading = in_background(client.get, KEYS)
            wait_until(lambda: client._pool.links[0].pending)
            with pytest.raises(Timeout):
                client.get_into(KEYS, np.empty((COUNT, BLOCK_BYTES), dtype=np.uint8), timeout_s=0.05)
        assert reading.result().hit == COUNT, "another thread's call on the same link"
        assert (client.stats.failures, client.stats.reconnects) == (0, 0)


def test_a_slow_replica_after_a_pause_is_not_taken_for_dead(start_server: StartServer, namespace: Namespace) -> None:
    servers = [start_server(), start_server()]
    with KVStoreClient([server.endpoint for server in servers], namespace, replicas=2, timeout_s=1.0) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        pause(client, 1.1)
        out = np.empty((COUNT, BLOCK_BYTES), dtype=np.uint8)
        port = min(client._pool.links, key=lambda link: link.load_s).port  # the client asks the less busy replica
        with next(server for server in servers if server.port == port).stopped():
            assert client.get_into(KEYS, out, timeout_s=0.2).all(), "the other replica has them"
        assert client.stats.found_elsewhere > 0
        assert client.stats.failures == 0


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_an_impossible_host_counts_as_unreachable(namespace: Namespace, host: str) -> None:
    endpoint = f"tcp://{host}:7070"
    with pytest.raises(ConnectionLost, match=host):
        KVStoreClient(endpoint, namespace)
    with KVStoreClient(endpoint, namespace, fail_open=True) as client:
        assert client.set(KEYS, BLOCKS).error == COUNT
        assert not client.contains(KEYS).any()


# ---- a replica ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cluster", "list"])
def test_a_foreign_program_on_a_dead_replicas_port_fails_no_call(
    cluster: Cluster, namespace: Namespace, how: str
) -> None:
    cluster.start_listed("a", "b")
    servers = cluster.nodes
    nodes = cluster.url if how == "cluster" else [server.endpoint for server in servers.values()]
    with KVStoreClient(nodes, namespace, replicas=2, timeout_s=3.0) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        servers["a"].kill()
        with impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 64, servers["a"].port):
            assert client.contains(KEYS).all()
            assert list(client.get(KEYS).blocks) == BLOCKS
            assert client.set(KEYS, BLOCKS).error == 0
            assert client.match_prefix(KEYS) == COUNT


@pytest.mark.exclusive
def test_reconnecting_to_a_silent_host_leaves_time_for_the_replica(
    start_server: StartServer, namespace: Namespace
) -> None:
    a, b = start_server(), start_server()
    with KVStoreClient([a.endpoint, b.endpoint], namespace, replicas=2, timeout_s=2.0) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        shards = a.shards()
        psutil.Process(a.process.pid).suspend()  # the supervisor keeps the port open, so connections are accepted
        for shard in shards:
            shard.kill()
        wait_until(lambda: connections_to(a.port) == 0)
        with within(1.8):
            assert list(client.get(KEYS).blocks) == BLOCKS


@pytest.mark.exclusive
def test_a_read_behind_a_stuck_upload_uses_the_replica(
    start_server: StartServer, big: Namespace, in_background: InBackground, one_preferred_replica: None
) -> None:
    a, b = (start_server(memory="128MiB") for _ in range(2))
    with KVStoreClient([a.endpoint, b.endpoint], big, replicas=2, timeout_s=10.0, fail_open=True) as client:
        keys = owned_by(client, a.endpoint.removeprefix("tcp://"), make_keys(40))[:8]
        client.set(keys, blocks_of(keys, BIG), deferred=False)
        more = make_keys(24, first=1000)
        with a.stopped():
            uploading = in_background(client.set, more, blocks_of(more, BIG))
            link = client._pool.links[0]
            wait_until(lambda: link.pending and lasts(lambda: link.sending.owner is not None, 0.2), what="it is stuck")
            out = np.empty((8, BIG), dtype=np.uint8)
            with within(1.3):
                assert client.get_into(keys, out, timeout_s=1.5).all()
        assert uploading.result().error == 0


# ---- time --------------------------------------------------------------------------------------------------------


@pytest.mark.exclusive
def test_a_hanging_resolver_takes_no_longer_than_the_deadline(
    start_server: StartServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    answer = threading.Event()
    getaddrinfo = socket.getaddrinfo

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "slow-host":
            return getaddrinfo(host, *arguments, **options)
        answer.wait(3.0)
        return getaddrinfo("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with within(1.0):
        client = KVStoreClient(f"tcp://slow-host:{server.port}", namespace, fail_open=True, timeout_s=0.2)
    with client:
        with within(1.0):
            assert not client.contains(KEYS).any()
        answer.set()
        wait_until(lambda: client.set(KEYS, BLOCKS).error == 0, what="the name is known now")


@pytest.mark.exclusive
def test_close_does_not_wait_for_hanging_shards(cluster: Cluster, namespace: Namespace) -> None:
    with impostor() as port:
        shards = [ShardAddress(f"hung/{number}", "127.0.0.1", port, 1.0) for number in range(8)]
        cluster.put(Member(node="hung", state="serving", shards=shards))
        client = cluster.client(namespace, timeout_s=0.5, fail_open=True)
        assert not client.contains(KEYS).any()
        wait_until(lambda: all(link.broken for link in client._pool.links))
        wait_until(lambda: all(link.connecting.owner is not None for link in client._pool.links), what="all are probed")
        with within(0.5):
            client.close()


# ---- change ------------------------------------------------------------------------------------------------------


def test_a_delete_cancels_repairs(
    start_server: StartServer,
    new_namespace: MakeNamespace,
    monkeypatch: pytest.MonkeyPatch,
    one_preferred_replica: None,
) -> None:
    namespace = new_namespace(65536)
    keys = make_keys(400)
    blocks = blocks_of(keys, 65536)
    a, b = start_server(), start_server()
    repair, cancel = Repairs._repair, Repairs.cancel
    deleting = threading.Event()

    def once_it_is_deleted(self: Repairs, batch: Any) -> None:
        assert deleting.wait(60)
        repair(self, batch)

    def told(self: Repairs, keys: Any, timeout_s: float) -> None:
        deleting.set()
        cancel(self, keys, timeout_s)

    monkeypatch.setattr(Repairs, "_repair", once_it_is_deleted)
    with KVStoreClient([a.endpoint, b.endpoint], namespace, replicas=2) as client:
        client.set(keys, blocks, deferred=False)
        with KVStoreClient(a.endpoint, namespace) as alone:
            alone.delete(keys)
        assert client.get(keys).hit == len(keys)
        assert client._repairs._running
        monkeypatch.setattr(Repairs, "cancel", told)
        assert client.delete(keys) == len(keys)
        assert deleting.is_set() and not client.contains(keys).any()
        wait_until(lambda: not client._repairs._running)
        assert not client.contains(keys).any(), "what was deleted is back"


def test_blocks_replaced_during_a_join_stay_replaced_after_the_node_left(
    cluster: Cluster, namespace: Namespace
) -> None:
    old, new = blocks_of(KEYS, BLOCK_BYTES, 1), blocks_of(KEYS, BLOCK_BYTES, 2)
    cluster.start_listed("a")
    with cluster.client(namespace) as client:
        client.set(KEYS, old, deferred=False)
        cluster.start_listed("b", state="joining")
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        assert client.set(KEYS, new, force=True, deferred=False).error == 0
        assert list(client.get(KEYS).blocks) == new
        cluster.withdraw("b")
        wait_until(lambda: nodes_of(client) == {"a"})
        left = list(client.get(KEYS).blocks)
        assert all(block in (None, right) for block, right in zip(left, new, strict=True))
        assert any(block is not None for block in left)


@pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_unclosed_client_is_garbage_collected(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a")
    port = cluster.nodes["a"].port
    clients = [cluster.client(namespace) for _ in range(3)] + [cluster.alone("a", namespace) for _ in range(3)]
    assert [int(client.contains(KEYS).sum()) for client in clients] == [0] * 6
    assert connections_to(port) == 6
    pools = [weakref.ref(client._pool) for client in clients]
    clients.clear()
    gc.collect()
    assert [pool() for pool in pools] == [None] * 6
    assert connections_to(port) == 0
    cluster.register("a", "draining")
    wait_until(lambda: cluster.url not in watching._shared, what="nobody follows the cluster any more")


def test_a_removed_link_serves_its_current_call_and_is_closed(
    cluster: Cluster, namespace: Namespace, in_background: InBackground
) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, timeout_s=1.0) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        link = link_to(client, "b")
        keys = make_keys(COUNT, first=1000)
        with cluster.nodes["b"].stopped():
            setting = in_background(client.set, keys, BLOCKS, deferred=False, timeout_s=8.0)
            wait_until(lambda: link.pending)
            cluster.withdraw("b")
            wait_until(lambda: nodes_of(client) == {"a"})
            stays(lambda: not setting.done(), 1.3, "for longer than the client's timeout, shorter than the call's")
        result = setting.result()
        assert (result.created, result.error) == (COUNT, 0), "each block is set once"
        assert not client.contains(keys).all(), "by the shard that it was sent to"
        wait_until(lambda: client.contains(keys).any() and link.sock is None, what="the link is closed")
        with pytest.raises(ConnectionLost, match="left the cluster"):
            client._pool.dialer.ensure_up(link, time.monotonic() + 1.0)
        assert link.sock is None


def test_a_link_removed_while_connecting_is_closed(
    cluster: Cluster, namespace: Namespace, in_background: InBackground
) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, timeout_s=1.0) as client:
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        link = link_to(client, "b")
        link.close()
        with cluster.nodes["b"].stopped():
            setting = in_background(client.set, KEYS, BLOCKS, timeout_s=8.0)
            wait_until(lambda: link.connecting.owner is not None)
            cluster.withdraw("b")
            wait_until(lambda: nodes_of(client) == {"a"})
        assert setting.result().error == 0
        wait_until(lambda: client.contains(KEYS).any() and link.sock is None, what="the link is closed")
        assert connections_to(cluster.nodes["b"].port) == 0


def test_view_changes_start_no_threads(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, timeout_s=10.0) as client:
        client.contains(KEYS)
        before = threading.active_count()
        for _ in range(8):
            cluster.withdraw("b")
            wait_until(lambda: nodes_of(client) == {"a"})
            cluster.register("b", "serving")
            wait_until(lambda: nodes_of(client) == {"a", "b"})
            client.contains(KEYS)
        assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("fail_open", "said"),
    [(True, "its blocks are misses until it is back"), (False, "calls that need it raise an error until it is back")],
)
def test_the_log_says_what_the_loss_of_a_shard_means_for_calls(
    start_server: StartServer, namespace: Namespace, caplog: pytest.LogCaptureFixture, fail_open: bool, said: str
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace, fail_open=fail_open, timeout_s=5) as client:
        server.kill()
        with contextlib.nullcontext() if fail_open else pytest.raises(ConnectionLost):
            wait_until(lambda: client.stats.failures or client.contains([b"12345678"]).any(), what="the link is broken")
        assert caplog.messages and all(each.endswith(said) for each in caplog.messages), caplog.messages


@pytest.mark.parametrize("fail_open", [True, False])
def test_one_server_under_two_names_is_refused(
    start_server: StartServer, namespace: Namespace, fail_open: bool
) -> None:
    server = start_server("--shards", "2")
    name, port = server.endpoint.removeprefix("tcp://"), server.port
    for other in (f"localhost:{port}", f"127.0.0.1:{port + 1}"):
        for endpoints in ([name, other], [other, name]):
            with pytest.raises(ValueError, match=r"^endpoints \S+ and \S+ are one server, .*: expected each") as caught:
                KVStoreClient(endpoints, namespace, fail_open=fail_open)
            assert name in str(caught.value) and other in str(caught.value)


def test_a_server_that_turns_out_to_be_another_endpoint_is_ignored(
    start_server: StartServer, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    name, other = f"127.0.0.1:{server.port}", f"localhost:{server.port}"
    server.stop()
    with KVStoreClient([name, other], namespace, fail_open=True) as client:
        assert client.shard_count == 2
        server.restart()
        wait_until(lambda: client.shard_count == 1, what="the client knows that both are one server")
        wait_until(lambda: client.set(KEYS, BLOCKS).created == COUNT or client.contains(KEYS).all())
        assert client.get(KEYS).hit == COUNT
    assert f"endpoints {name} and {other} are one server" in caplog.text or f"{other} and {name} are" in caplog.text
