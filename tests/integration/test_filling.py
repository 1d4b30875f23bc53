"""Joining nodes are filled although no client reads: real servers with a real etcd."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.moving.filling import FILL_SETTLE_S
from kvstore.wire import MAX_KEYS
from kvstore.wire.queries import ShardQueries
from kvstore_client import KVStoreClient, Namespace
from tests.support.cluster import Cluster, cluster_name, share_of
from tests.support.etcd import Etcd
from tests.support.harness import MakeNamespace, Server, block_of, blocks_of, make_keys, wait_until
from tests.support.ports import free_ports
from tests.support.slow_link import SlowLink

BLOCK_BYTES = 64 << 10
MANY = 600  # with half of this many blocks, a fill over a slow link takes ten seconds on any machine
SLOW_BYTES_PER_S = 8 << 20
FILL_S = 120.0
OVER = re.compile(r"filling (\S.*?) is over: to_copy=(\d+) copied=(\d+) present=(\d+) failed=(\d+) seconds=([\d.]+)")


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster whose nodes stay `joining` for a long time, except the first one, for which there is nothing to
    copy."""
    with Cluster(etcd.url(cluster_name(request)), tmp_path, segment="1MiB", http="127.0.0.1:0") as cluster:
        yield cluster


def start_serving(cluster: Cluster, *nodes: str, memory: str = "64MiB", **flags: object) -> list[Server]:
    """Start nodes while there are no blocks to fill them with. All but the first stay `joining` for a long time."""
    servers = []
    for node in nodes:
        servers.append(cluster.start(node, memory=memory, **flags))
        cluster.wait_for_members(*nodes[: len(servers)])
    return servers


def held(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
    """Return which of these keys a node of one shard has."""
    found: set[bytes] = set()
    with ShardQueries((server.host, server.port), 10.0, namespace.canonical()) as asking:
        for at in range(0, len(keys), MAX_KEYS):
            some = keys[at : at + MAX_KEYS]
            present = asking.contains(np.frombuffer(b"".join(some), dtype=np.uint8).reshape(len(some), -1))
            found.update(key for key, there in zip(some, present, strict=True) if there)
    return found


def check_bytes(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> None:
    """Check that a node has these blocks, with the right bytes."""
    size = namespace.block_bytes
    with ShardQueries((server.host, server.port), 10.0, namespace.canonical()) as asking:
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
    """Return the fills that a node logged as finished: the names of the nodes, and the counts of blocks to copy,
    copied, present and failed."""
    return [(names, int(a), int(b), int(c), int(d)) for names, a, b, c, d, _ in OVER.findall(server.log_text())]


def wait_for_fills(servers: Sequence[Server], *nodes: str) -> list[tuple[str, int, int, int, int]]:
    """Wait until the last fill in each server's log is that of the given nodes. Returns those fills."""

    def over() -> list[tuple[str, int, int, int, int]] | None:
        last = [fills(server)[-1] for server in servers if fills(server)]
        return last if len([fill for fill in last if {*nodes} <= {*fill[0].split(", ")}]) == len(servers) else None

    found: list[tuple[str, int, int, int, int]] = wait_until(over, FILL_S, f"all have filled {nodes}")
    return found


def fill_metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        text = "".join(line for line in answer.read().decode().splitlines(True) if "kvstore_fill_blocks" in line)
    return {
        sample.labels["what"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvstore_fill_blocks"
    }


class Reading:
    """A client that reads all blocks repeatedly, with pauses, and counts missing and wrong blocks."""

    def __init__(self, client: KVStoreClient, keys: Sequence[bytes]) -> None:
        self._client = client
        self._keys = keys
        self._right = blocks_of(keys, BLOCK_BYTES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.rounds = self.missed = self.wrong = 0

    def _read(self) -> None:
        while not self._over.is_set():
            for at in range(0, len(self._keys), 64):
                blocks = self._client.get(self._keys[at : at + 64]).blocks
                for block, right in zip(blocks, self._right[at : at + 64], strict=True):
                    self.missed += block is None
                    self.wrong += block is not None and bytes(block) != right
                self._over.wait(0.02)
            self.rounds += 1

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# ---- nodes that join -----------------------------------------------------------------------------------------------


def test_a_joining_node_gets_its_share_without_any_reader(cluster: Cluster, new_namespace: MakeNamespace) -> None:
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


def test_only_the_owned_one_of_two_copies_is_made(cluster: Cluster, new_namespace: MakeNamespace) -> None:
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


def test_two_nodes_that_join_in_succession_both_get_their_share(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 500)
    first = cluster.start("b")
    wait_until(lambda: "filling b for at most" in old.log_text(), FILL_S)
    new = make_keys(200, first=10_000)
    cluster.wait_for_members("a", "b")
    with cluster.client(namespace) as client:  # some of these blocks are set on b
        client.set(new, blocks_of(new, BLOCK_BYTES), deferred=False)
    second = cluster.start("c")
    cluster.wait_for_members("a", "b", "c")
    wait_for_fills([old], "b", "c")
    wait_for_fills([first], "c")
    for node, server in (("b", first), ("c", second)):
        share = share_of(cluster.membership(), node, [*keys, *new])
        assert held(server, namespace, share) == set(share)
        check_bytes(server, namespace, share)


def test_a_restarted_node_is_filled_again(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    servers = start_serving(cluster, "a", "b")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 300, replicas=2)
    servers[1].kill()
    servers[1].restart()
    wait_until(lambda: held(servers[1], namespace, keys) == set(keys), FILL_S, "it has its copies again")
    check_bytes(servers[1], namespace, keys)


# ---- trouble -------------------------------------------------------------------------------------------------------


@contextmanager
def slow_joiner(cluster: Cluster, node: str, **flags: object) -> Iterator[tuple[Server, SlowLink]]:
    """Start a joining node that all other nodes reach over a slow link."""
    (port,) = free_ports(1)
    with SlowLink(port) as link:
        link.bytes_per_s = SLOW_BYTES_PER_S
        yield cluster.start(node, port=port, advertise=urlsplit(link.endpoint).hostname, **flags), link


def wait_until_filling(server: Server) -> None:
    """Wait until at least one block has been copied, but not all."""
    wait_until(lambda: (found := fill_metrics(server)).get("copied") and found["to_copy"], FILL_S, "it fills")


def test_a_node_that_dies_during_its_fill_ends_it_without_harm(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a", lease_seconds=60)  # a lease that does not end, however slow the machine is
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, MANY)
    with slow_joiner(cluster, "b") as (joiner, link):
        with cluster.client(namespace) as client, Reading(client, keys[:192]) as reading:
            wait_until_filling(old)
            joiner.kill()
            cluster.wait_for_members("a")
            wait_for_fills([old], "b")
            rounds = reading.rounds
            wait_until(lambda: reading.rounds > rounds + 1, FILL_S)
            assert (reading.missed, reading.wrong) == (0, 0)
        assert fills(old)[-1][1] > fills(old)[-1][2] > 0
        assert "Traceback" not in old.log_text()
        link.bytes_per_s = None
        joiner.restart()  # after the restart the node is filled completely
        wait_until(lambda: fills(old)[-1][1] == fills(old)[-1][2] + fills(old)[-1][3] > 0, FILL_S)
        assert held(joiner, namespace, keys) == set(share_of(cluster.membership(), "b", keys))


@pytest.mark.parametrize("silent", ["receiver", "sender"])
def test_a_failed_copy_is_made_once_the_shard_answers_again(
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
    (old,) = start_serving(cluster, "a")
    put(cluster, new_namespace(BLOCK_BYTES), MANY)
    with slow_joiner(cluster, "b"):
        wait_until_filling(old)
        began = time.monotonic()
        assert old.stop() == 0
        assert time.monotonic() - began < 5
    (fill,) = (fill for fill in fills(old) if fill[1])
    assert fill[1] > fill[2] + fill[3] > 0
    assert "Traceback" not in old.log_text() and "nothing more is sent to shard" not in old.log_text()


def notes(server: Server) -> str:
    with urllib.request.urlopen(f"{server.http_url}/status.json", timeout=10) as answer:
        return "\n".join(each["text"] for each in json.load(answer)["messages"])


def test_the_page_shows_how_far_a_fill_is_and_how_long_it_takes(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a")
    put(cluster, new_namespace(BLOCK_BYTES), MANY)
    with slow_joiner(cluster, "b") as (joining, link):
        wait_until_filling(old)
        shown = r"([\d,]+) of ([\d,]+) blocks are copied to b, which takes about (\d+) s more\."
        found = wait_until(lambda: re.search(shown, notes(old)), what="the page shows the fill")
        done, total, left_s = (int(each) for each in found.groups())
        assert 0 < done < total <= MANY and left_s > 0
        wait_until(lambda: int(re.search(shown, notes(old))[1]) > done, what="it goes on")  # type: ignore[index]
        assert "This node is joining: the other nodes copy its blocks to it." in notes(joining)
        link.bytes_per_s = None
        wait_until(lambda: "are copied to b" not in notes(old), what="the note goes when the fill is over")


def test_a_drain_ends_a_fill_and_moves_the_remaining_blocks(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = cluster.start("a", drain_seconds=60)
    cluster.wait_for_members("a")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, MANY)
    with slow_joiner(cluster, "b") as (staying, link):
        wait_until_filling(old)
        with cluster.client(namespace) as client, Reading(client, keys[:192]) as reading:
            old.signal(signal.SIGTERM)
            wait_until(lambda: fills(old), FILL_S, "the fill ends")
            link.bytes_per_s = None
            assert old.process.wait(60) == 0
            rounds = reading.rounds
            wait_until(lambda: reading.rounds > rounds + 1, FILL_S)
    assert (reading.missed, reading.wrong) == (0, 0)
    (fill,) = (fill for fill in fills(old) if fill[1])
    assert fill[1] > fill[2] + fill[3] > 0
    assert re.search(rf"drained: to_move={MANY} moved=\d+ present=[1-9]\d* failed=0", old.log_text())
    assert held(staying, namespace, keys) == set(keys)


def test_a_full_node_is_filled_no_further(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a", memory="96MiB")
    namespace = new_namespace(256 << 10)
    keys = put(cluster, namespace, 340)
    # Both nodes register the same weight, but the blocks of another namespace leave this one less memory.
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


def test_blocks_can_be_read_throughout(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    # On a busy machine, a node may be late to renew a lease of 2 s. Then it leaves, and its blocks are missing.
    options = {"memory": "256MiB", "lease_seconds": 30}
    old = start_serving(cluster, "a", "b", **options)
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 1000)
    with cluster.client(namespace) as client, Reading(client, keys) as reading:
        wait_until(lambda: reading.rounds > 0)
        cluster.start("c", **options)
        cluster.start("d", **options)
        cluster.wait_for_members("a", "b", "c", "d")
        wait_for_fills(old, "c", "d")
        rounds = reading.rounds
        wait_until(lambda: reading.rounds > rounds + 1, FILL_S)
    assert (reading.missed, reading.wrong) == (0, 0)


@pytest.mark.exclusive  # a fill must begin, but not end, within a grace period of seconds
def test_copying_stops_when_the_grace_period_ends(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    old = cluster.start("a", grace_seconds=3)
    cluster.wait_for_members("a")
    put(cluster, new_namespace(BLOCK_BYTES), MANY)
    with slow_joiner(cluster, "b"):
        wait_until_filling(old)
        wait_for_fills([old], "b")
    (seconds,) = (float(found[-1]) for found in OVER.findall(old.log_text()))
    assert seconds < 3.5 - FILL_SETTLE_S
    assert cluster.members()["b"].state == "joining", "it would have been filled for longer"


@pytest.mark.exclusive  # a fill must begin, but not end, within a grace period of seconds
def test_a_serving_node_is_filled_no_further(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    (old,) = start_serving(cluster, "a")
    put(cluster, new_namespace(BLOCK_BYTES), MANY)
    # A fill begins 1.5 to 2.5 s after the node has joined, later on a busy machine. Half of the blocks take 9 s, which
    # is longer than the remaining grace period.
    with slow_joiner(cluster, "b", grace_seconds=8) as (_, link):
        link.bytes_per_s = SLOW_BYTES_PER_S // 4
        wait_until_filling(old)
        wait_until(lambda: cluster.members()["b"].state == "serving")
        wait_for_fills([old], "b")
    assert fills(old)[-1][1] > fills(old)[-1][2] > 0


def test_copies_are_made_as_before_after_all_nodes_restarted(
    cluster: Cluster, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    first = cluster.start("a", disk=tmp_path / "a", disk_size="64MiB")
    second = cluster.start("b")
    cluster.wait_for_members("a", "b")
    namespace = new_namespace(BLOCK_BYTES)
    keys = put(cluster, namespace, 200, replicas=2)
    assert (second.stop(), first.stop()) == (0, 0)  # b has lost its blocks, and no client is connected
    first.restart()
    wait_until(lambda: held(first, namespace, keys) == {*keys}, FILL_S, "it has its blocks again")
    second.restart()
    wait_until(lambda: held(second, namespace, keys) == {*keys}, FILL_S, "it has its copies again")


@pytest.mark.exclusive  # a node must be filled within seconds
def test_a_restarted_shard_is_filled_from_the_other_copies(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    """After the fill, the other node dies, and no block that was acknowledged with two copies is lost."""
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
