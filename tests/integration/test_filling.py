"""Nodes that join are filled: real servers with a real etcd, and nobody who reads meanwhile."""

from __future__ import annotations

import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.moving.filling import SETTLE_S
from kvstore.wire import MAX_KEYS
from kvstore.wire.asking import Asking
from kvstore_client import KVStoreClient, Namespace
from tests.support.cluster import Cluster, cluster_name, share_of
from tests.support.etcd import Etcd
from tests.support.harness import MakeNamespace, Server, block_of, blocks_of, make_keys, wait_until

BLOCK_BYTES = 64 << 10
FILL_S = 60.0
OVER = re.compile(r"filling (\S.*?) is over: to_copy=(\d+) copied=(\d+) present=(\d+) failed=(\d+) seconds=([\d.]+)")


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Its nodes say for a long time that they join, but the first, which has nothing to be filled with."""
    with Cluster(etcd.url(cluster_name(request)), tmp_path, segment="1MiB", http="127.0.0.1:0") as cluster:
        yield cluster


def start_serving(cluster: Cluster, *nodes: str, memory: str = "64MiB", **flags: object) -> list[Server]:
    """Nodes that have nothing to be filled with; all but the first say that they join for a long time yet."""
    servers = []
    for node in nodes:
        servers.append(cluster.start(node, memory=memory, **flags))
        cluster.wait_for_members(*nodes[: len(servers)])
    return servers


def held(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
    """Which keys a node of one shard has."""
    found: set[bytes] = set()
    with Asking((server.host, server.port), 10.0, namespace.canonical()) as asking:
        for at in range(0, len(keys), MAX_KEYS):
            some = keys[at : at + MAX_KEYS]
            present = asking.contains(np.frombuffer(b"".join(some), dtype=np.uint8).reshape(len(some), -1))
            found.update(key for key, there in zip(some, present, strict=True) if there)
    return found


def check_bytes(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> None:
    """A node has these blocks, and every byte of them is right."""
    size = namespace.block_bytes
    with Asking((server.host, server.port), 10.0, namespace.canonical()) as asking:
        for at in range(0, len(keys), 64):
            some = keys[at : at + 64]
            right = 0
            for positions, _, _, memory in asking.get(
                np.frombuffer(b"".join(some), dtype=np.uint8).reshape(len(some), -1)
            ):
                for number, position in enumerate(positions.tolist()):
                    assert memory[number * size : (number + 1) * size] == block_of(some[position], size)
                    right += 1
            assert right == len(some)


def put(cluster: Cluster, namespace: Namespace, count: int, replicas: int = 1) -> list[bytes]:
    keys = make_keys(count)
    with cluster.client(namespace, replicas=replicas) as client:
        for at in range(0, count, 64):
            some = keys[at : at + 64]
            assert client.set(some, blocks_of(some, namespace.block_bytes), deferred=False).created == len(some)
    return keys


def fills(server: Server) -> list[tuple[str, int, int, int, int]]:
    """What a node logged of those that are over: for whom; to copy, copied, present, failed."""
    return [(names, int(a), int(b), int(c), int(d)) for names, a, b, c, d, _ in OVER.findall(server.log_text())]


def wait_for_fills(servers: Sequence[Server], *nodes: str) -> list[tuple[str, int, int, int, int]]:
    """Until each of these nodes has filled those, at the end of its log: what that says."""

    def over() -> list[tuple[str, int, int, int, int]] | None:
        last = [fills(server)[-1] for server in servers if fills(server)]
        return last if len([fill for fill in last if {*nodes} <= {*fill[0].split(", ")}]) == len(servers) else None

    found: list[tuple[str, int, int, int, int]] = wait_until(over, FILL_S, f"all have filled {nodes}")
    return found


def fill_metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.labels["what"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvstore_fill_blocks"
    }


class Reading:
    """A client that reads all blocks, again and again, and counts those it did not get. It leaves time to others."""

    def __init__(self, client: KVStoreClient, keys: Sequence[bytes]) -> None:
        self._client = client
        self._keys = keys
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.rounds = self.missed = self.wrong = 0

    def _read(self) -> None:
        while not self._over.is_set():
            for at in range(0, len(self._keys), 64):
                some = self._keys[at : at + 64]
                for key, block in zip(some, self._client.get(some).blocks, strict=True):
                    self.missed += block is None
                    self.wrong += block is not None and bytes(block) != block_of(key, BLOCK_BYTES)
                self._over.wait(0.01)
            self.rounds += 1

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# ---- nodes that join -----------------------------------------------------------------------------------------------


def test_a_node_that_joins_gets_its_share_though_nobody_reads(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = start_serving(cluster, "a", "b")
    assert fill_metrics(old[0]).keys() <= {"to_copy", "copied", "present", "failed"}
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 600)
    joiner = cluster.start("c")
    cluster.wait_for_members("a", "b", "c")
    over = wait_for_fills(old, "c")
    share = share_of(cluster.membership(), "c", keys)
    assert cluster.members()["c"].state == "joining" and len(share) > 100
    assert held(joiner, namespace, keys) == set(share)
    check_bytes(joiner, namespace, share)
    for server, (names, to_copy, moved, present, failed) in zip(old, over, strict=True):
        assert to_copy == moved > 0 and present == failed == 0, names
        assert fill_metrics(server) == {"to_copy": 0, "copied": moved, "present": 0, "failed": 0}
    assert sum(moved for _, _, moved, _, _ in over) == len(share)
    with cluster.client(namespace) as client:
        assert client.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)


def test_of_two_copies_the_one_that_it_owns_is_made(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = start_serving(cluster, "a", "b", "c")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 400, replicas=2)
    joiner = cluster.start("d")
    cluster.wait_for_members("a", "b", "c", "d")
    over = wait_for_fills(old, "d")
    share = share_of(cluster.membership(), "d", keys, replicas=2)
    assert len(share) > 150
    assert held(joiner, namespace, keys) == set(share)
    check_bytes(joiner, namespace, share)
    assert sum(moved for _, _, moved, _, _ in over) == len(share)
    assert sum(moved + present for _, _, moved, present, _ in over) == sum(to_copy for _, to_copy, *_ in over)
    assert len(share) < sum(to_copy for _, to_copy, *_ in over), "a second copy is seen to be there"


def test_of_two_that_join_shortly_after_each_other_both_get_their_share(
    cluster: Cluster, new_namespace: MakeNamespace
) -> None:
    (old,) = start_serving(cluster, "a")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 500)
    first = cluster.start("b")
    wait_until(lambda: "filling b, for at most" in old.log_text(), FILL_S)
    new = make_keys(200, first=10_000)
    cluster.wait_for_members("a", "b")
    with cluster.client(namespace) as client:  # some of it goes to b, which has nothing to be filled with
        client.set(new, blocks_of(new, BLOCK_BYTES), deferred=False)
    second = cluster.start("c")
    cluster.wait_for_members("a", "b", "c")
    wait_for_fills([old], "b", "c")
    wait_for_fills([first], "c")
    for node, server in (("b", first), ("c", second)):
        share = share_of(cluster.membership(), node, [*keys, *new])
        assert held(server, namespace, share) == set(share)
        check_bytes(server, namespace, share)


def test_a_node_that_starts_anew_is_filled_again(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    servers = start_serving(cluster, "a", "b")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 300, replicas=2)
    servers[1].kill()
    servers[1].restart()
    wait_until(lambda: held(servers[1], namespace, keys) == set(keys), FILL_S, "it has its copies again")
    check_bytes(servers[1], namespace, keys)


# ---- trouble -------------------------------------------------------------------------------------------------------


def wait_until_filling(server: Server) -> None:
    """A copy has been made, and not all."""
    wait_until(lambda: (found := fill_metrics(server)).get("copied") and found["to_copy"], FILL_S, "it fills")


def test_a_node_that_dies_while_it_is_filled_ends_that_and_costs_nothing(
    cluster: Cluster, new_namespace: MakeNamespace
) -> None:
    (old,) = start_serving(cluster, "a", memory="512MiB", lease_seconds=60)  # it lives, however slow the machine is
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 6000)
    with cluster.client(namespace) as client, Reading(client, keys[:640]) as reading:
        joiner = cluster.start("b", memory="512MiB")
        wait_until_filling(old)
        joiner.kill()
        cluster.wait_for_members("a")
        wait_for_fills([old], "b")
        rounds = reading.rounds
        wait_until(lambda: reading.rounds > rounds + 1, FILL_S)
        assert (reading.missed, reading.wrong) == (0, 0)
    assert fills(old)[-1][1] > fills(old)[-1][2] > 0
    assert "Traceback" not in old.log_text()
    joiner.restart()  # and it is filled after all
    wait_until(lambda: fills(old)[-1][1] == fills(old)[-1][2] + fills(old)[-1][3] > 0, FILL_S)
    assert held(joiner, namespace, keys) == set(share_of(cluster.membership(), "b", keys))


@pytest.mark.parametrize("silent", ["receiver", "sender"])
def test_a_copy_that_failed_is_made_as_soon_as_the_shard_answers_again(
    cluster: Cluster, new_namespace: MakeNamespace, silent: str
) -> None:
    first, second = start_serving(cluster, "a", "b")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 100, replicas=2)
    (shard,) = second.shards()
    shard.kill()
    wait_until(lambda: "is serving again" in second.log_text(), FILL_S)
    (stopped,) = (second if silent == "receiver" else first).shards()
    stopped.suspend()
    try:
        said = "nothing more is sent to shard b/0" if silent == "receiver" else "blocks of shard a/0 stay"
        wait_until(lambda: said in first.log_text(), FILL_S, "the fill fails")
    finally:
        stopped.resume()
    wait_until(lambda: held(second, namespace, keys) == {*keys}, FILL_S, "all copies are made again")
    wait_until(lambda: fills(first)[-1:] == [("b", 100, 100, 0, 0)], FILL_S, "one fill made all copies, in two passes")
    *_, (*_, seconds) = OVER.findall(first.log_text())
    assert float(seconds) < 10, "it does not rest for three times as long as it waited for an answer"


def test_sigterm_ends_a_fill_at_once(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a", memory="512MiB")
    put(cluster, new_namespace(BLOCK_BYTES), 6000)
    cluster.start("b", memory="512MiB")
    wait_until_filling(old)
    began = time.monotonic()
    assert old.stop() == 0
    assert time.monotonic() - began < 5
    (fill,) = (fill for fill in fills(old) if fill[1])
    assert fill[1] > fill[2] + fill[3] > 0
    assert "Traceback" not in old.log_text() and "nothing more is sent to shard" not in old.log_text()


def test_a_drain_ends_a_fill_and_moves_the_rest(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = cluster.start("a", drain_seconds=60, memory="512MiB")
    cluster.wait_for_members("a")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 6000)
    staying = cluster.start("b", memory="512MiB")
    wait_until_filling(old)
    with cluster.client(namespace) as client, Reading(client, keys[:640]) as reading:
        old.signal(signal.SIGTERM)
        assert old.process.wait(60) == 0
        rounds = reading.rounds
        wait_until(lambda: reading.rounds > rounds + 1, FILL_S)
    assert (reading.missed, reading.wrong) == (0, 0)
    (fill,) = (fill for fill in fills(old) if fill[1])
    assert fill[1] > fill[2] + fill[3] > 0
    assert re.search(r"drained: to_move=6000 moved=\d+ present=[1-9]\d* failed=0", old.log_text())
    assert held(staying, namespace, keys) == set(keys)


def test_a_node_that_is_full_is_not_filled_on(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a", memory="96MiB")
    namespace = new_namespace(256 << 10)
    keys = put(cluster, namespace, 340)
    # As heavy as the other, by what it registers, but with shards that have less.
    joiner = cluster.start("b", memory="96MiB")
    other = new_namespace(256 << 10)
    its_own = make_keys(340, first=5000)
    with KVStoreClient(joiner.endpoint, other) as client:
        client.set(its_own, blocks_of(its_own, 256 << 10), deferred=False)
    wait_for_fills([old], "b")
    _, to_copy, moved, present, failed = fills(old)[-1]
    assert to_copy == len(share_of(cluster.membership(), "b", keys)) > 100
    assert moved <= 44 and not present + failed
    assert re.search(r"shard b/0 is full: nothing more is copied to it", old.log_text())
    assert held(joiner, other, its_own) == set(its_own), "nothing was evicted for it"
    with cluster.client(namespace) as client:
        assert client.contains(keys).all(), "they are where they were"


def test_blocks_can_be_read_all_the_time(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = start_serving(cluster, "a", "b", memory="256MiB")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 2000)
    with cluster.client(namespace) as client, Reading(client, keys) as reading:
        wait_until(lambda: reading.rounds > 0)
        cluster.start("c", memory="256MiB")
        cluster.start("d", memory="256MiB")
        cluster.wait_for_members("a", "b", "c", "d")
        wait_for_fills(old, "c", "d")
        rounds = reading.rounds
        wait_until(lambda: reading.rounds > rounds + 1, FILL_S)
    assert (reading.missed, reading.wrong) == (0, 0)


@pytest.mark.exclusive  # a fill must begin within a grace of seconds, and not end
def test_nothing_is_copied_for_longer_than_the_grace_lasts(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = cluster.start("a", grace_seconds=3, memory="512MiB")
    cluster.wait_for_members("a")
    put(cluster, new_namespace(BLOCK_BYTES), 6000)
    cluster.start("b", memory="512MiB")
    wait_until_filling(old)
    wait_for_fills([old], "b")
    (seconds,) = (float(found[-1]) for found in OVER.findall(old.log_text()))
    assert seconds < 3.5 - SETTLE_S
    assert cluster.members()["b"].state == "joining", "it would have been filled for longer"


@pytest.mark.exclusive  # a fill must begin within a grace of seconds, and not end
def test_who_serves_is_filled_no_more(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a", memory="1GiB")
    put(cluster, new_namespace(BLOCK_BYTES), 14_000)
    # A fill begins 1.5 to 2.5 s after the node has joined, and half of the blocks take longer than what is left then.
    cluster.start("b", grace_seconds=3, memory="1GiB")
    wait_until_filling(old)
    wait_until(lambda: cluster.members()["b"].state == "serving")
    wait_for_fills([old], "b")
    assert fills(old)[-1][1] > fills(old)[-1][2] > 0


def test_as_many_copies_are_made_as_clients_kept_before_all_nodes_were_restarted(
    cluster: Cluster, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    first = cluster.start("a", disk=tmp_path / "a", disk_size="64MiB")
    second = cluster.start("b")
    cluster.wait_for_members("a", "b")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 200, replicas=2)
    assert (second.stop(), first.stop()) == (0, 0)  # b has lost its memory, and no client is there any more
    first.restart()
    wait_until(lambda: held(first, namespace, keys) == {*keys}, FILL_S, "it has its blocks again")
    second.restart()
    wait_until(lambda: held(second, namespace, keys) == {*keys}, FILL_S, "it has its copies again")


@pytest.mark.exclusive  # a node must be filled within seconds
def test_a_shard_that_died_is_filled_from_the_other_copies(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    """Then the other node dies, and nothing that was acknowledged with two copies is lost."""
    first, second = start_serving(cluster, "a", "b")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 200, replicas=2)
    (shard,) = first.shards()
    shard.kill()
    wait_until(lambda: "is serving again" in first.log_text(), FILL_S)
    wait_for_fills([second], "a")
    wait_until(lambda: held(first, namespace, keys) == {*keys}, FILL_S, "all copies are made again")
    check_bytes(first, namespace, keys)
    second.kill()
    with cluster.client(namespace, replicas=2, timeout_s=20) as client:
        assert client.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)
