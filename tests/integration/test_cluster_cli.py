"""`kvstore cluster` and `kvstore drain` against a real etcd and real nodes: what they print, and their exit status."""

from __future__ import annotations

import json
import os
import pty
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.harness import blocks_of, environment, make_keys, make_namespace, wait_until

BLOCK = 4096
COUNT = 200
KEYS = make_keys(COUNT)
KEY = KEYS[0].hex()
LONG_ID = "kvstore-17.an-id-as-long-as-a-pod-of-kubernetes-may-have-at-most"
ZONES = {"n1": "a", "n2": "b", LONG_ID: ""}
SERVE_S = 15.0
PATIENT = ("--timeout", "15")  # etcd and the nodes share the machine with other tests
TURN_S = 15.0  # the time within which a watching command must show a change


def kvstore(*arguments: str, status: int = 0, columns: int = 80) -> subprocess.CompletedProcess[str]:
    done = forked.run("kvstore_cli", *arguments, env=environment(COLUMNS=str(columns)))
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def answer(*arguments: str, status: int = 0) -> Any:
    return json.loads(kvstore(*arguments, "--json", status=status).stdout)


def start_all(cluster: Cluster, zones: dict[str, str]) -> Cluster:
    """Start nodes in these zones, and wait until all of them serve."""
    for node, zone in zones.items():
        cluster.start(node, zone=zone)
    cluster.wait_for(SERVE_S, **dict.fromkeys(zones, "serving"))
    return cluster


StartCluster = Callable[..., Cluster]


@pytest.fixture
def start_cluster(etcd: Etcd, tmp_path: Path) -> Iterator[StartCluster]:
    """`start_cluster("name", "n1", "n2", lease_seconds=60)` starts a cluster that the test may damage."""
    with ExitStack() as stack:

        def start(name: str, *nodes: str, **flags: object) -> Cluster:
            cluster = Cluster(etcd.url(name), tmp_path, grace_seconds=0, segment="2MiB", **flags)
            return start_all(stack.enter_context(cluster), dict.fromkeys(nodes, ""))

        yield start


def names_in(cluster: Cluster) -> list[str]:
    """Return the nodes that `cluster status` lists."""
    return [node["node"] for node in answer("cluster", "status", "--endpoint", cluster.url, *PATIENT)["nodes"]]


def fill(cluster: Cluster, namespace: Namespace, replicas: int) -> None:
    """Set all keys, and read them once."""
    with cluster.client(namespace, replicas=replicas) as client:
        assert client.set(KEYS, blocks_of(KEYS, BLOCK), deferred=False).error == 0
        assert client.get(KEYS).hit == COUNT


def held(cluster: Cluster, node: str, namespace: Namespace) -> set[str]:
    """Return the keys of the blocks on a node."""
    with cluster.alone(node, namespace) as client:
        there = client.contains(KEYS)
    return {key.hex() for key, present in zip(KEYS, there.tolist(), strict=True) if present}


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def shared(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of two shards each; a test that damages one must repair it."""
    folder = tmp_path_factory.mktemp("nodes")
    sizes = {"memory": "32MiB", "segment": "2MiB", "shards": 2}
    with Cluster(etcd.url("shared"), folder, grace_seconds=0, **sizes) as cluster:
        yield start_all(cluster, ZONES)


@pytest.fixture(scope="module")
def namespace(shared: Cluster) -> Namespace:
    """A namespace with two copies of each key's block on the shared nodes."""
    namespace = make_namespace(BLOCK, "cluster-cli")
    fill(shared, namespace, replicas=2)
    return namespace


# ---- status ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 200])
def test_status_shows_every_nodes_full_id(shared: Cluster, namespace: Namespace, columns: int) -> None:
    shown = kvstore("cluster", "status", "--endpoint", shared.url, *PATIENT, columns=columns).stdout
    assert max(map(len, shown.splitlines())) <= columns
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for node in ZONES:
        assert re.search(r"serving .*2/2", rows[node]), shown
    assert f"epoch {shared.membership().epoch}, 3 node(s)" in shown
    assert "balance 1." in shown and "hit rate 100.0%" in shown
    assert ("in / out" in rows["node"]) == (columns == 200)
    assert ("a wider terminal also shows: zone, clients" in shown) == (columns == 80)
    assert "b" in rows["n2"].split() or columns == 80


def test_status_as_json_has_the_shards_reports(shared: Cluster, namespace: Namespace) -> None:
    status = answer("cluster", "status", "--endpoint", shared.url, *PATIENT)
    assert (status["epoch"], status["directory"]) == (shared.membership().epoch, "")
    assert 1.0 <= status["balance"] < 3.0
    assert status["hit_rate"] == 1.0
    nodes = {node["node"]: node for node in status["nodes"]}
    assert {name: node["zone"] for name, node in nodes.items()} == ZONES
    for name, node in nodes.items():
        assert (node["state"], node["shards"], node["shards_up"], node["draining"]) == ("serving", 2, 2, False)
        assert node["endpoint"].startswith("tcp://127.0.0.1:")
        assert node["memory_limit_bytes"] == 32 << 20 and 0 < node["memory_used_bytes"] <= 32 << 20
        assert node["blocks"] == len(held(shared, name, namespace))
        assert node["block_bytes"] == node["blocks"] * BLOCK
        assert node["version"] and node["uptime_s"] > 0
    assert sum(node["blocks"] for node in nodes.values()) == 2 * COUNT
    assert sum(node["hits"] for node in nodes.values()) == COUNT


def test_status_works_for_nodes_without_a_directory(shared: Cluster) -> None:
    endpoints = [shared.nodes[node].endpoint for node in ("n1", "n2")]
    status = answer("cluster", "status", "--endpoint", endpoints[0], "--endpoint", endpoints[1])
    assert [(node["state"], node["shards_up"]) for node in status["nodes"]] == [("listed", 2)] * 2
    assert {node["zone"] for node in status["nodes"]} == {"a", "b"}


def test_an_unresponsive_shard_is_status_1_and_shown(shared: Cluster) -> None:
    arguments = ("cluster", "status", "--endpoint", shared.url, "--timeout", "1")
    shard = shared.nodes["n1"].shards()[1]
    shard.suspend()
    try:
        status = answer(*arguments, status=1)
        shown = kvstore(*arguments, status=1).stdout
    finally:
        shard.resume()
    assert {node["node"]: node["shards_up"] for node in status["nodes"]} == {"n1": 1, "n2": 2, LONG_ID: 2}
    assert re.search(r"^n1 .*1/2", shown, re.MULTILINE), shown
    assert all(node["shards_up"] == 2 for node in answer(*arguments)["nodes"])


def test_a_dead_node_is_shown_until_its_lease_ends(start_cluster: StartCluster) -> None:
    cluster = start_cluster("dead", "n1", "n2", lease_seconds=60)
    cluster.nodes["n2"].kill()
    status = answer("cluster", "status", "--endpoint", cluster.url, *PATIENT, status=1)
    assert [(node["node"], node["state"], node["shards_up"]) for node in status["nodes"]] == [
        ("n1", "serving", 1),
        ("n2", "serving", 0),
    ]
    assert re.search(
        r"^n2 +serving .*0/1", kvstore("cluster", "status", "--endpoint", cluster.url, *PATIENT, status=1).stdout, re.M
    )
    refused = kvstore("cluster", "where", KEY, "--replicas", "2", "--endpoint", cluster.url)
    assert "n2" in refused.stdout, "who owns a key can be said without the owner"


def test_an_unreachable_cluster_is_status_1_with_the_reason(etcd: Etcd) -> None:
    gone = "etcd://127.0.0.1:1/gone"
    failed = kvstore("cluster", "status", "--endpoint", gone, "--timeout", "1", status=1)
    assert failed.stderr.count("connection refused") == 1 and "no node is known" in failed.stderr
    assert failed.stderr.count("\n") == 1 and not failed.stdout.strip()
    found = answer("cluster", "status", "--endpoint", gone, "--timeout", "1", status=1)
    assert found["nodes"] == [] and found["error"]["kind"] == "unreachable"
    empty = etcd.url("nobody")
    for asked in (("status",), ("where", KEY)):
        failed = kvstore("cluster", *asked, "--endpoint", empty, "--timeout", "1", status=1)
        assert "no node is registered" in failed.stderr
    assert "127.0.0.1:1" in kvstore("drain", "n1", "--endpoint", gone, status=1).stderr


# ---- watching ----------------------------------------------------------------------------------------------------


class Watching:
    """A command that runs until it is interrupted. `next` returns the next part or line of its output."""

    def __init__(self, process: Any, stderr: IO[bytes], output: int, lines: bool) -> None:
        self.process = process
        self._stderr = stderr
        self.shown = b""
        self._parts: queue.Queue[bytes] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(output, lines), daemon=True)
        self._thread.start()

    def _read(self, output: int, lines: bool) -> None:
        with open(output, "rb", buffering=0) as file:
            while True:
                try:
                    part = file.readline() if lines else file.read(4096)
                except OSError:  # a terminal that no process writes to any more
                    part = b""
                if not part:
                    return
                self._parts.put(part)

    def next(self) -> bytes:
        part = self._parts.get(timeout=TURN_S)
        self.shown += part
        return part

    def interrupt(self) -> None:
        """Send SIGINT, and check that the command ends normally."""
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(TURN_S)
        self._thread.join(TURN_S)
        self._stderr.seek(0)
        assert (status, self._stderr.read()) == (0, b""), self.shown[-2000:]


@contextmanager
def watching(*arguments: str, terminal: bool = False) -> Iterator[Watching]:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    variables = environment(COLUMNS="80", LINES="40", TERM="xterm")
    with TemporaryFile() as stderr:
        with open(theirs, "wb", buffering=0) as output, open(os.devnull, "rb") as nothing:
            process = forked.start("kvstore_cli", arguments, stdin=nothing, stdout=output, stderr=stderr, env=variables)
        try:
            yield Watching(process, stderr, ours, lines=not terminal)
        finally:
            process.kill()
            process.wait(TURN_S)


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_repeats_a_table_until_interrupted(shared: Cluster, namespace: Namespace, terminal: bool) -> None:
    arguments = ("cluster", "status", "--watch", "--interval", "0.2", "--endpoint", shared.url)
    with watching(*arguments, terminal=terminal) as watch:
        while watch.shown.count(LONG_ID.encode()) < 3:
            watch.next()
        watch.interrupt()


def test_watch_as_json_prints_documents_and_follows_the_members(start_cluster: StartCluster) -> None:
    cluster = start_cluster("watched", "n1", "n2")
    with watching("cluster", "status", "--watch", "--interval", "0.2", "--json", "--endpoint", cluster.url) as watch:
        first = json.loads(watch.next())
        assert [node["node"] for node in first["nodes"]] == ["n1", "n2"]
        assert json.loads(watch.next())["time"] > first["time"]
        assert cluster.nodes["n2"].stop() == 0
        while len((last := json.loads(watch.next()))["nodes"]) > 1:
            pass
        assert last["epoch"] > first["epoch"]
        watch.interrupt()


# ---- where -------------------------------------------------------------------------------------------------------


def test_where_names_the_nodes_that_hold_a_block(shared: Cluster, namespace: Namespace) -> None:
    there = {node: held(shared, node, namespace) for node in ZONES}
    ask = ("--endpoint", shared.url, "--replicas", "2", "--namespace", namespace.canonical().decode())
    for key in [key.hex() for key in KEYS[:5]]:
        found = answer("cluster", "where", key, *ask)
        assert [place["role"] for place in found] == ["owner", "replica"]
        assert {place["node"] for place in found if place["present"]} == {n for n in ZONES if key in there[n]}
        for place in found:
            assert place["zone"] == ZONES[place["node"]] and place["state"] == "serving"
            assert place["shard"].startswith(place["node"] + "/")
            with KVStoreClient(place["endpoint"], namespace) as client:
                assert client.contains([bytes.fromhex(key)]).all()
    unknown = answer("cluster", "where", "ab" * 16, *ask)
    assert [place["present"] for place in unknown] == [False, False]


def test_where_without_a_namespace_asks_no_shard(shared: Cluster, namespace: Namespace) -> None:
    (alone,) = answer("cluster", "where", KEY, "--endpoint", shared.url)
    two = answer("cluster", "where", KEY, "--endpoint", shared.url, "--replicas", "2")
    assert two[0] == alone and alone["role"] == "owner" and alone["present"] is None
    shown = kvstore("cluster", "where", KEY, "--endpoint", shared.url, "--replicas", "3").stdout
    assert LONG_ID in shown, shown
    assert shown.count("replica") == 2 and shown.count("tcp:") == 3


def test_where_does_not_change_a_namespace(shared: Cluster) -> None:
    """Shards remember the number of copies that clients of a namespace keep, and a drain skips blocks with another
    copy. So `where --replicas` must not change that number."""
    namespace = make_namespace(BLOCK, "only-looked-at")
    with KVStoreClient(shared.url, namespace) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK), deferred=False)
    ask = ("--endpoint", shared.url, "--namespace", namespace.canonical().decode())
    kvstore("cluster", "where", KEY, "--replicas", "3", *ask)
    for server in shared.nodes.values():
        with KVStoreClient(server.endpoint, namespace) as client:
            told = [some.replicas for shard in client.info().shards for some in shard.namespaces]
            mine = [some for shard in client.info().shards for some in shard.namespaces if some.id == namespace.id]
        assert told and {some.replicas for some in mine} == {1}


# ---- purge -------------------------------------------------------------------------------------------------------


def test_purge_removes_all_copies_from_all_nodes(shared: Cluster, namespace: Namespace) -> None:
    purged = make_namespace(BLOCK, "purged")
    fill(shared, purged, replicas=2)
    assert sum(len(held(shared, node, purged)) for node in ZONES) == 2 * COUNT
    report = answer("purge", "--namespace", purged.canonical().decode(), "--yes", "--endpoint", shared.url)
    assert report == {"namespaces": 1, "blocks": 2 * COUNT}
    assert not any(held(shared, node, purged) for node in ZONES)
    assert sum(len(held(shared, node, namespace)) for node in ZONES) == 2 * COUNT, "others keep theirs"


# ---- drain -------------------------------------------------------------------------------------------------------


def test_a_drained_node_hands_its_blocks_over_and_is_unlisted(start_cluster: StartCluster) -> None:
    cluster = start_cluster("drained", "n1", "n2", "n3")
    namespace = make_namespace(BLOCK, "drained")
    fill(cluster, namespace, replicas=1)

    there = held(cluster, "n2", namespace)
    report = answer("drain", "n2", "--endpoint", cluster.url, "--seconds", "30")
    assert report == {
        "node": "n2",
        "moved": len(there),
        "present": 0,
        "failed": 0,
        "total": len(there),
        "shards_left": [],
    }
    assert len(there) > COUNT / 6
    assert names_in(cluster) == ["n1", "n3"]
    assert held(cluster, "n1", namespace) | held(cluster, "n3", namespace) == {key.hex() for key in KEYS}
    key = next(iter(there))
    (found,) = answer("cluster", "where", key, "--endpoint", cluster.url, "--namespace", namespace.canonical().decode())
    assert found["node"] != "n2" and found["present"]
    assert cluster.nodes["n2"].running, "it goes on, outside of the cluster"
    again = kvstore("drain", "n2", "--endpoint", cluster.url, status=1)
    assert f"{cluster.url} has no node 'n2': it has 'n1', 'n3'" in again.stderr
    assert answer("drain", "n2", "--endpoint", cluster.url, status=1)["error"]["kind"] == "failed"

    there = held(cluster, "n3", namespace)
    done = kvstore("drain", "n3", "--endpoint", cluster.url, "--seconds", "30")
    assert f"n3 has left the cluster. Of its {len(there)} blocks, {len(there)} were moved" in done.stdout
    assert "0 were not moved in time" in done.stdout
    with KVStoreClient(cluster.url, namespace) as client:
        assert client.get(KEYS).hit == COUNT
    assert cluster.nodes["n2"].stop() == 0

    # A drained node joins again when it is restarted.
    cluster.nodes["n2"].restart()
    wait_until(lambda: names_in(cluster) == ["n1", "n2"], SERVE_S)


def test_a_drain_names_the_shards_whose_blocks_it_could_not_see(start_cluster: StartCluster) -> None:
    cluster = start_cluster("hung", "n1", "n2")
    fill(cluster, make_namespace(BLOCK, "hung"), replicas=1)
    [shard] = cluster.nodes["n2"].shards()
    shard.suspend()
    try:
        report = answer("drain", "n2", "--endpoint", cluster.url, "--seconds", "5", status=1)
    finally:
        shard.resume()
    assert report["shards_left"] == ["n2/0"] and report["total"] == 0
    assert "n2/0 did not answer, so their blocks stayed on n2" in report["error"]["message"]


def test_the_only_node_is_drained_only_by_force(start_cluster: StartCluster) -> None:
    cluster = start_cluster("alone", "n1")
    refused = kvstore("drain", "n1", "--endpoint", cluster.url, status=1)
    assert "no other node can take the blocks of n1" in refused.stderr and "nothing was done" in refused.stderr
    assert names_in(cluster) == ["n1"]
    answer("drain", "n1", "--force", "--endpoint", cluster.url, "--seconds", "1")
    assert answer("cluster", "status", "--endpoint", cluster.url, status=1)["nodes"] == []
    keys = ("keys", "--namespace", make_namespace(BLOCK, "alone").canonical().decode())
    for command in (("info",), ("clients",), ("slowlog",), keys):
        failed = kvstore(*command, "--endpoint", cluster.url, status=1)
        assert "no node" in failed.stderr, failed


def test_a_drain_without_time_reports_the_blocks_not_moved(start_cluster: StartCluster) -> None:
    cluster = start_cluster("hasty", "n1", "n2")
    namespace = make_namespace(BLOCK, "hasty")
    fill(cluster, namespace, replicas=1)
    report = answer("drain", "n2", "--endpoint", cluster.url, "--seconds", "0")
    assert (report["moved"], report["present"]) == (0, 0)
    assert names_in(cluster) == ["n1"]


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("cluster", "status", "--endpoint", "etcd://127.0.0.1:2379"), "etcd://HOST:PORT[,HOST:PORT...]/NAME"),
        (("cluster", "status", "--endpoint", "http://127.0.0.1:2379/c"), "http://127.0.0.1:2379/c"),
        (("cluster", "status", "--interval", "0"), "--interval"),
        (("cluster", "where", "xyz"), "xyz"),
        (("cluster", "where", "001122"), "'001122' has 3 bytes: expected 8 to 64"),
        (("cluster", "where", "00" * 65), "65 bytes: expected 8 to 64"),
        (("cluster", "where", KEY, "--replicas", "4"), "--replicas"),
        (("cluster", "where", KEY, "--replicas", "0"), "--replicas"),
        (("cluster", "where", KEY, "--namespace", '{"modle":"m"}'), "modle"),
        (("cluster", "where"), "key"),
        (("cluster", "frobnicate"), "frobnicate"),
        (("drain", "n1"), "127.0.0.1:7070: expected one etcd://HOST:PORT/NAME"),
        (("drain", "n1", "--endpoint", "tcp://127.0.0.1:1"), "tcp://127.0.0.1:1: expected one etcd://HOST:PORT/NAME"),
        (("drain", "n1", "--endpoint", "dns://kvstore:7070"), "expected one etcd://HOST:PORT/NAME"),
        (("drain", "n1", "--endpoint", "etcd://a:1/c", "--endpoint", "etcd://b:1/c"), "expected one etcd://"),
        (("drain", "n1", "--endpoint", "etcd://127.0.0.1:2379"), "etcd://HOST:PORT[,HOST:PORT...]/NAME"),
        (("drain", "n1", "--endpoint", "etcd://127.0.0.1:1/c", "--seconds", "-1"), "--seconds"),
        (("drain", "--endpoint", "etcd://127.0.0.1:1/c"), "node"),
    ],
)
def test_bad_usage_is_status_2_and_names_the_mistake(arguments: tuple[str, ...], named: str) -> None:
    assert named in kvstore(*arguments, status=2, columns=200).stderr


def test_an_unknown_node_is_status_1_and_the_known_ones_are_named(shared: Cluster) -> None:
    failed = kvstore("drain", "n9", "--endpoint", shared.url, status=1)
    assert "has no node 'n9'" in failed.stderr and all(repr(node) in failed.stderr for node in ZONES)
