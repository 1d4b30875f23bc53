"""`kvstore cluster` and `kvstore drain` against a real etcd and real nodes: what they print, and their exit status."""

from __future__ import annotations

import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.cluster.etcd import EtcdDirectory
from kvstore.cluster.url import EtcdURL, parse_cluster_url
from kvstore_client import KVStoreClient, Namespace
from tests.support.etcd import Etcd
from tests.support.harness import Server, StartServer, blocks_of, environment, make_keys, make_namespace, wait_until

BLOCK = 4096
COUNT = 200
KEYS = make_keys(COUNT)
KEY = KEYS[0].hex()
LONG_ID = "kvstore-17.an-id-as-long-as-a-pod-of-kubernetes-may-have-at-most"
ZONES = {"n1": "a", "n2": "b", LONG_ID: ""}
SERVE_S = 15.0
TURN_S = 15.0  # for a command that watches to show what it is to show


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore_cli", *arguments]


def kvstore(*arguments: str, status: int = 0, columns: int = 80) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(COLUMNS=str(columns)),
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def answer(*arguments: str, status: int = 0) -> Any:
    return json.loads(kvstore(*arguments, "--json", status=status).stdout)


class Nodes:
    """Servers that are the members of a cluster."""

    def __init__(self, url: str, servers: dict[str, Server]) -> None:
        self.url = url
        self.servers = servers
        parsed = parse_cluster_url(url)
        assert isinstance(parsed, EtcdURL)
        directory = EtcdDirectory(parsed, 2.0)
        wait_until(lambda: self._serve(directory), SERVE_S, "all nodes serve")
        self.epoch = directory.membership().epoch
        directory.close()

    def _serve(self, directory: EtcdDirectory) -> bool:
        members = directory.membership().members
        return {member.node for member in members if member.state == "serving"} == set(self.servers)

    def fill(self, namespace: Namespace, replicas: int) -> None:
        """Set all keys, and read them once."""
        with KVStoreClient(self.url, namespace, replicas=replicas) as client:
            assert client.set(KEYS, blocks_of(KEYS, BLOCK), deferred=False).error == 0
            assert client.get(KEYS).hit == COUNT

    def held(self, node: str, namespace: Namespace) -> set[str]:
        """The keys of the blocks a node has."""
        with KVStoreClient(self.servers[node].endpoint, namespace) as client:
            there = client.contains(KEYS)
        return {key.hex() for key, present in zip(KEYS, there.tolist(), strict=True) if present}


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


def flags(url: str, node: str, zone: str = "") -> list[str]:
    return ["--cluster", url, "--node-id", node, "--zone", zone, "--grace-seconds", "0", "--segment", "2MiB"]


@pytest.fixture(scope="module")
def shared(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes of two shards; none of the tests may harm it for longer than it lasts."""
    folder = tmp_path_factory.mktemp("nodes")
    url = etcd.url("shared")
    servers = {}
    try:
        for node, zone in ZONES.items():
            sizes = ("--shards", "2", "--memory", "32MiB")
            servers[node] = Server(folder / f"{node}.log", *sizes, *flags(url, node, zone))
        yield Nodes(url, servers)
    finally:
        for server in servers.values():
            server.kill()


@pytest.fixture(scope="module")
def namespace(shared: Nodes) -> Namespace:
    """Two copies of each of the keys' blocks are on the shared nodes."""
    namespace = make_namespace(BLOCK, "cluster-cli")
    shared.fill(namespace, replicas=2)
    return namespace


# ---- status ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 200])
def test_status_shows_every_node_by_its_full_id(shared: Nodes, namespace: Namespace, columns: int) -> None:
    shown = kvstore("cluster", "status", "--endpoint", shared.url, columns=columns).stdout
    assert max(map(len, shown.splitlines())) <= columns
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for node in ZONES:
        assert re.search(r"serving .*2/2", rows[node]), shown
    assert f"epoch {shared.epoch}, 3 node(s)" in shown
    assert "balance 1." in shown and "hit rate 100.0%" in shown
    assert ("in / out" in rows["node"]) == (columns == 200)
    assert ("a wider terminal also shows: zone, clients" in shown) == (columns == 80)
    assert "b" in rows["n2"].split() or columns == 80


def test_status_in_json_has_what_the_shards_say(shared: Nodes, namespace: Namespace) -> None:
    status = answer("cluster", "status", "--endpoint", shared.url)
    assert (status["epoch"], status["directory"]) == (shared.epoch, "")
    assert 1.0 <= status["balance"] < 3.0
    assert status["hit_rate"] == 1.0
    nodes = {node["node"]: node for node in status["nodes"]}
    assert {name: node["zone"] for name, node in nodes.items()} == ZONES
    for name, node in nodes.items():
        assert (node["state"], node["shards"], node["shards_up"], node["draining"]) == ("serving", 2, 2, False)
        assert node["endpoint"].startswith("tcp://127.0.0.1:")
        assert node["memory_limit_bytes"] == 32 << 20 and 0 < node["memory_used_bytes"] <= 32 << 20
        assert node["blocks"] == len(shared.held(name, namespace))
        assert node["block_bytes"] == node["blocks"] * BLOCK
        assert node["version"] and node["uptime_s"] > 0
    assert sum(node["blocks"] for node in nodes.values()) == 2 * COUNT
    assert sum(node["hits"] for node in nodes.values()) == COUNT


def test_status_of_nodes_without_a_directory(shared: Nodes) -> None:
    endpoints = [shared.servers[node].endpoint for node in ("n1", "n2")]
    status = answer("cluster", "status", "--endpoint", endpoints[0], "--endpoint", endpoints[1])
    assert [(node["state"], node["shards_up"]) for node in status["nodes"]] == [("listed", 2)] * 2
    assert {node["zone"] for node in status["nodes"]} == {"a", "b"}


def test_a_shard_that_does_not_answer_is_status_1_and_shown(shared: Nodes) -> None:
    arguments = ("cluster", "status", "--endpoint", shared.url, "--timeout", "1")
    shard = shared.servers["n1"].shards()[1]
    shard.suspend()
    try:
        status = answer(*arguments, status=1)
        shown = kvstore(*arguments, status=1).stdout
    finally:
        shard.resume()
    assert {node["node"]: node["shards_up"] for node in status["nodes"]} == {"n1": 1, "n2": 2, LONG_ID: 2}
    assert re.search(r"^n1 .*1/2", shown, re.MULTILINE), shown
    assert all(node["shards_up"] == 2 for node in answer(*arguments)["nodes"])


def test_a_dead_node_is_shown_until_its_lease_ends(etcd: Etcd, start_server: StartServer) -> None:
    url = etcd.url("dead")
    nodes = Nodes(
        url, {node: start_server(*flags(url, node), "--lease-seconds", "60", segment="2MiB") for node in ("n1", "n2")}
    )
    nodes.servers["n2"].kill()
    status = answer("cluster", "status", "--endpoint", url, status=1)
    assert [(node["node"], node["state"], node["shards_up"]) for node in status["nodes"]] == [
        ("n1", "serving", 1),
        ("n2", "serving", 0),
    ]
    assert re.search(r"^n2 +serving .*0/1", kvstore("cluster", "status", "--endpoint", url, status=1).stdout, re.M)
    refused = kvstore("cluster", "where", KEY, "--replicas", "2", "--endpoint", url)
    assert "n2" in refused.stdout, "who owns a key can be said without the owner"


def test_a_cluster_that_cannot_be_asked_is_status_1_and_says_why(etcd: Etcd) -> None:
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
    """A command that runs until it is interrupted; `next` is what it printed next, a chunk or a line."""

    def __init__(self, process: subprocess.Popen[bytes], output: int, lines: bool) -> None:
        self.process = process
        self.shown = b""
        self._parts: queue.Queue[bytes] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(output, lines), daemon=True)
        self._thread.start()

    def _read(self, output: int, lines: bool) -> None:
        with open(output, "rb", buffering=0) as file:
            while True:
                try:
                    part = file.readline() if lines else file.read(4096)
                except OSError:  # a terminal nobody writes to any more
                    part = b""
                if not part:
                    return
                self._parts.put(part)

    def next(self) -> bytes:
        part = self._parts.get(timeout=TURN_S)
        self.shown += part
        return part

    def interrupt(self) -> None:
        """SIGINT: it ends as if it had come to its end."""
        self.process.send_signal(signal.SIGINT)
        stderr = self.process.communicate(timeout=TURN_S)[1]
        self._thread.join(TURN_S)
        assert (self.process.returncode, stderr) == (0, b""), self.shown[-2000:]


@contextmanager
def watching(*arguments: str, terminal: bool = False) -> Iterator[Watching]:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    # A child of a process that ignores SIGINT would ignore it, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command(*arguments),
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=environment(COLUMNS="80", LINES="40", TERM="xterm"),
        )
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(theirs)
    try:
        yield Watching(process, ours, lines=not terminal)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_shows_a_table_again_and_again_until_interrupted(
    shared: Nodes, namespace: Namespace, terminal: bool
) -> None:
    arguments = ("cluster", "status", "--watch", "--interval", "0.2", "--endpoint", shared.url)
    with watching(*arguments, terminal=terminal) as watch:
        while watch.shown.count(LONG_ID.encode()) < 3:
            watch.next()
        watch.interrupt()


def test_watch_in_json_is_a_document_a_line_and_follows_the_members(etcd: Etcd, start_server: StartServer) -> None:
    url = etcd.url("watched")
    nodes = Nodes(url, {node: start_server(*flags(url, node), segment="2MiB") for node in ("n1", "n2")})
    with watching("cluster", "status", "--watch", "--interval", "0.2", "--json", "--endpoint", url) as watch:
        first = json.loads(watch.next())
        assert [node["node"] for node in first["nodes"]] == ["n1", "n2"]
        assert json.loads(watch.next())["time"] > first["time"]
        assert nodes.servers["n2"].stop() == 0
        while len((last := json.loads(watch.next()))["nodes"]) > 1:
            pass
        assert last["epoch"] > first["epoch"]
        watch.interrupt()


# ---- where -------------------------------------------------------------------------------------------------------


def test_where_names_the_nodes_that_have_the_block(shared: Nodes, namespace: Namespace) -> None:
    held = {node: shared.held(node, namespace) for node in ZONES}
    ask = ("--endpoint", shared.url, "--replicas", "2", "--namespace", namespace.canonical().decode())
    for key in [key.hex() for key in KEYS[:5]]:
        found = answer("cluster", "where", key, *ask)
        assert [place["role"] for place in found] == ["owner", "replica"]
        assert {place["node"] for place in found if place["present"]} == {n for n in ZONES if key in held[n]}
        for place in found:
            assert place["zone"] == ZONES[place["node"]] and place["state"] == "serving"
            assert place["shard"].startswith(place["node"] + "/")
            with KVStoreClient(place["endpoint"], namespace) as client:
                assert client.contains([bytes.fromhex(key)]).all()
    unknown = answer("cluster", "where", "ab" * 16, *ask)
    assert [place["present"] for place in unknown] == [False, False]


def test_where_without_a_namespace_asks_no_shard(shared: Nodes, namespace: Namespace) -> None:
    (alone,) = answer("cluster", "where", KEY, "--endpoint", shared.url)
    two = answer("cluster", "where", KEY, "--endpoint", shared.url, "--replicas", "2")
    assert two[0] == alone and alone["role"] == "owner" and alone["present"] is None
    shown = kvstore("cluster", "where", KEY, "--endpoint", shared.url, "--replicas", "3").stdout
    assert LONG_ID in shown, shown
    assert shown.count("replica") == 2 and shown.count("tcp:") == 3


def test_where_changes_nothing_of_a_namespace(shared: Nodes) -> None:
    """Shards remember how many copies clients of a namespace keep, and a drain leaves out what has another copy."""
    namespace = make_namespace(BLOCK, "only-looked-at")
    with KVStoreClient(shared.url, namespace) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK), deferred=False)
    ask = ("--endpoint", shared.url, "--namespace", namespace.canonical().decode())
    kvstore("cluster", "where", KEY, "--replicas", "3", *ask)
    for server in shared.servers.values():
        with KVStoreClient(server.endpoint, namespace) as client:
            told = [some.replicas for shard in client.info().shards for some in shard.namespaces]
            mine = [some for shard in client.info().shards for some in shard.namespaces if some.id == namespace.id]
        assert told and {some.replicas for some in mine} == {1}


# ---- purge -------------------------------------------------------------------------------------------------------


def test_purge_removes_all_copies_from_all_nodes(shared: Nodes, namespace: Namespace) -> None:
    purged = make_namespace(BLOCK, "purged")
    shared.fill(purged, replicas=2)
    assert sum(len(shared.held(node, purged)) for node in ZONES) == 2 * COUNT
    report = answer("purge", "--namespace", purged.canonical().decode(), "--yes", "--endpoint", shared.url)
    assert report == {"namespaces": 1, "blocks": 2 * COUNT}
    assert not any(shared.held(node, purged) for node in ZONES)
    assert sum(len(shared.held(node, namespace)) for node in ZONES) == 2 * COUNT, "others keep theirs"


# ---- drain -------------------------------------------------------------------------------------------------------


def test_a_drained_node_hands_its_blocks_over_and_is_listed_no_more(etcd: Etcd, start_server: StartServer) -> None:
    url = etcd.url("drained")
    names = ("n1", "n2", "n3")
    nodes = Nodes(url, {node: start_server(*flags(url, node), segment="2MiB") for node in names})
    namespace = make_namespace(BLOCK, "drained")
    nodes.fill(namespace, replicas=1)

    held = nodes.held("n2", namespace)
    report = answer("drain", "n2", "--endpoint", url, "--seconds", "30")
    assert report == {"node": "n2", "moved": len(held), "present": 0, "failed": 0, "total": len(held)}
    assert len(held) > COUNT / 6
    status = answer("cluster", "status", "--endpoint", url)
    assert [node["node"] for node in status["nodes"]] == ["n1", "n3"]
    assert nodes.held("n1", namespace) | nodes.held("n3", namespace) == {key.hex() for key in KEYS}
    key = next(iter(held))
    (found,) = answer("cluster", "where", key, "--endpoint", url, "--namespace", namespace.canonical().decode())
    assert found["node"] != "n2" and found["present"]
    assert nodes.servers["n2"].running, "it goes on, outside of the cluster"
    again = kvstore("drain", "n2", "--endpoint", url, status=1)
    assert f"{url} has no node 'n2': it has 'n1', 'n3'" in again.stderr
    assert answer("drain", "n2", "--endpoint", url, status=1)["error"]["kind"] == "failed"

    held = nodes.held("n3", namespace)
    done = kvstore("drain", "n3", "--endpoint", url, "--seconds", "30")
    assert f"n3 has left the cluster. Of its {len(held)} blocks, {len(held)} were moved" in done.stdout
    assert "0 were not moved in time" in done.stdout
    assert f"{len(held)}/{len(held)} blocks" in done.stderr
    with KVStoreClient(url, namespace) as client:
        assert client.get(KEYS).hit == COUNT
    assert nodes.servers["n2"].stop() == 0

    # One that was drained joins again when it is started anew.
    nodes.servers["n2"].restart()
    names_of = lambda: [node["node"] for node in answer("cluster", "status", "--endpoint", url)["nodes"]]  # noqa: E731
    wait_until(lambda: names_of() == ["n1", "n2"], SERVE_S)


def test_a_drain_that_has_no_time_says_what_was_not_moved(etcd: Etcd, start_server: StartServer) -> None:
    url = etcd.url("hasty")
    nodes = Nodes(url, {node: start_server(*flags(url, node), segment="2MiB") for node in ("n1", "n2")})
    namespace = make_namespace(BLOCK, "hasty")
    nodes.fill(namespace, replicas=1)
    report = answer("drain", "n2", "--endpoint", url, "--seconds", "0")
    assert (report["moved"], report["present"]) == (0, 0)
    assert [node["node"] for node in answer("cluster", "status", "--endpoint", url)["nodes"]] == ["n1"]


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
        (("drain", "n1"), "tcp://127.0.0.1:7070: expected one etcd://HOST:PORT/NAME"),
        (("drain", "n1", "--endpoint", "tcp://127.0.0.1:1"), "tcp://127.0.0.1:1: expected one etcd://HOST:PORT/NAME"),
        (("drain", "n1", "--endpoint", "dns://kvstore:7070"), "expected one etcd://HOST:PORT/NAME"),
        (("drain", "n1", "--endpoint", "etcd://a:1/c", "--endpoint", "etcd://b:1/c"), "expected one etcd://"),
        (("drain", "n1", "--endpoint", "etcd://127.0.0.1:2379"), "etcd://HOST:PORT[,HOST:PORT...]/NAME"),
        (("drain", "n1", "--endpoint", "etcd://127.0.0.1:1/c", "--seconds", "-1"), "--seconds"),
        (("drain", "--endpoint", "etcd://127.0.0.1:1/c"), "node"),
    ],
)
def test_bad_usage_is_status_2_and_names_what_was_wrong(arguments: tuple[str, ...], named: str) -> None:
    assert named in kvstore(*arguments, status=2, columns=200).stderr


def test_a_node_that_the_cluster_does_not_have_is_status_1_and_names_those_it_has(shared: Nodes) -> None:
    failed = kvstore("drain", "n9", "--endpoint", shared.url, status=1)
    assert "has no node 'n9'" in failed.stderr and all(repr(node) in failed.stderr for node in ZONES)
