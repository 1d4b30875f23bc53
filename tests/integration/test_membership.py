"""Nodes as members of a cluster: real servers that register in a real etcd, leave, lose etcd and return."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.cluster.etcd import Drain
from kvstore.cluster.members import Member
from kvstore.cluster.schemes import parse_cluster_url
from kvstore.cluster.url import EtcdURL
from kvstore.node.registration import Registration
from kvstore.wire import ShardAddress
from kvstore.wire.queries import ShardQueries
from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.cluster import Cluster, Following, cluster_name, states_of
from tests.support.etcd import Etcd
from tests.support.harness import (
    ROOT,
    MakeNamespace,
    Server,
    blocks_of,
    environment,
    make_keys,
    server_command,
    stays,
    wait_until,
)
from tests.support.ports import free_ports

DEATH_S = 3.0  # the time within which a dead node disappears from every view
SIZES = {"memory": "16MiB", "segment": "1MiB", "grace_seconds": 300}


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster that no other test uses, with no node yet."""
    with Cluster(etcd.url(cluster_name(request)), tmp_path, **SIZES) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(own_etcd: Etcd, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose etcd the test may stop."""
    with Cluster(own_etcd.url("own"), tmp_path, **SIZES) as cluster:
        yield cluster


@pytest.fixture
def following(cluster: Cluster) -> Iterator[Following]:
    with Following(cluster.url) as following:
        yield following


@pytest.fixture
def own_following(own_cluster: Cluster) -> Iterator[Following]:
    with Following(own_cluster.url) as following:
        yield following


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """Return a server's metrics of the cluster: (metric, label) -> value."""
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("kvstore_cluster", "kvstore_drain"))
    }


# ---- joining and leaving -------------------------------------------------------------------------------------------


def test_a_node_registers_its_shards_and_withdraws_on_sigterm(cluster: Cluster) -> None:
    server = cluster.start("a", shards=2, zone="rack-1", http="127.0.0.1:0")
    cluster.wait_for(a="serving")  # at once, because no other node could fill it
    member = cluster.members()["a"]
    assert [(shard.name, shard.host, shard.port) for shard in member.shards] == [
        ("a/0", "127.0.0.1", server.port),
        ("a/1", "127.0.0.1", member.shards[1].port),
    ]
    assert all(shard.weight == 8 << 20 for shard in member.shards)
    assert member.zone == "rack-1" and member.version and member.instance and abs(member.started - time.time()) < 60
    assert re.fullmatch(r"127\.0\.0\.1:\d+", member.metrics)
    with ShardQueries(("127.0.0.1", server.port), 5.0) as asking:
        assert (asking.welcome.node, asking.welcome.zone) == ("a", "rack-1")
        assert [shard.name for shard in asking.welcome.shards] == ["a/0", "a/1"]
    values = wait_until(lambda: (found := metrics(server))["kvstore_cluster_epoch", ""] and found)
    assert values["kvstore_cluster_registered", ""] == values["kvstore_cluster_directory_up", ""] == 1
    assert values["kvstore_cluster_state", "serving"] == values["kvstore_cluster_members", "serving"] == 1
    assert values["kvstore_cluster_changes_total", ""] == 1
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    cluster.wait_for(1.0)
    assert server.running, "it withdraws before it stops"
    assert server.stop() == 0
    assert time.monotonic() - began < 5
    assert "has withdrawn from" in server.log_text()


@pytest.mark.exclusive
def test_a_killed_node_leaves_every_view_within_three_seconds(cluster: Cluster, following: Following) -> None:
    cluster.start("a")
    cluster.wait_for(a="serving")
    doomed = cluster.start("b")
    wait_until(lambda: following.states().keys() == {"a", "b"})
    began = time.monotonic()
    doomed.kill()
    wait_until(lambda: following.states().keys() == {"a"})
    assert time.monotonic() - began < DEATH_S


@pytest.mark.exclusive
def test_a_joining_node_serves_after_its_grace_period(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.wait_for(a="serving")
    second = cluster.start("b", grace_seconds=2)
    cluster.wait_for(a="serving", b="serving")
    wait_until(lambda: "state=serving (was joining)" in second.log_text())
    joined, served = (
        datetime.fromisoformat(re.findall(rf"^(\S+)Z .* {line}", second.log_text(), re.MULTILINE)[0])
        for line in ("state=joining", r"state=serving \(was joining\)")
    )
    assert 1.9 < (served - joined).total_seconds() < 12  # the times are from the log, because this process may be slow


def test_a_joining_node_serves_at_once_only_if_alone(cluster: Cluster) -> None:
    """If no node is `serving`, joining nodes do not begin to serve: they may have blocks that a leaving node moved to
    them."""
    first = cluster.start("a")
    cluster.wait_for(a="serving")
    waiting = {"grace_seconds": 60, "lease_seconds": 30}  # on a slow machine, a node whose lease ends joins again
    cluster.start("b", **waiting)
    cluster.wait_for(a="serving", b="joining")
    first.kill()
    cluster.wait_for(b="joining")
    cluster.start("c", **waiting)
    cluster.wait_for(b="joining", c="joining")


def test_a_restarted_node_takes_over_its_record_at_once(cluster: Cluster) -> None:
    server = cluster.start("a", lease_seconds=30)
    cluster.wait_for(a="serving")
    before = cluster.members()["a"].instance
    server.kill()
    server.restart()
    wait_until(lambda: cluster.members()["a"].instance != before, 3.0, "the record is the new process's")
    assert server.stop() == 0
    assert cluster.states() == {}


def test_a_duplicate_id_is_refused_until_the_member_is_gone(cluster: Cluster) -> None:
    first = cluster.start("a")
    cluster.wait_for(a="serving")
    second = cluster.start("a", http="127.0.0.1:0")
    wait_until(
        lambda: "another process is registered with this node id" in second.log_text(), what="the second says so"
    )
    assert f"at 127.0.0.1:{first.port}" in second.log_text() and "--node-id" in second.log_text()
    assert cluster.members()["a"].shards[0].port == first.port
    assert metrics(second)["kvstore_cluster_registered", ""] == 0
    assert first.stop() == 0
    wait_until(lambda: cluster.states() and cluster.members()["a"].shards[0].port == second.port)
    assert second.log_text().count("another process is registered with this node id") == 1  # though it retries


# ---- trouble -------------------------------------------------------------------------------------------------------


def test_a_supervisor_stopped_for_longer_than_its_lease_rejoins(cluster: Cluster) -> None:
    cluster.start("a", grace_seconds=1)  # on a busy machine this node may lose its lease, too
    cluster.wait_for(a="serving")
    server = cluster.start("b", grace_seconds=1)
    cluster.wait_for(a="serving", b="serving")
    os.kill(server.process.pid, signal.SIGSTOP)
    cluster.wait_for(DEATH_S + 0.5, a="serving")
    os.kill(server.process.pid, signal.SIGCONT)
    wait_until(lambda: "b" in cluster.states())
    cluster.wait_for(a="serving", b="serving")
    assert "; joining again" in server.log_text()


def test_a_removed_record_is_written_again(cluster: Cluster) -> None:
    server = cluster.start("a")
    cluster.wait_for(a="serving")
    cluster.directory._post("/kv/deleterange", key="L2t2c3RvcmUv", range_end="L2t2c3RvcmUw")  # an operator may do this
    wait_until(lambda: "its record is gone" in server.log_text())
    cluster.wait_for(a="serving")


def test_without_etcd_no_node_leaves_and_later_all_catch_up(
    own_etcd: Etcd, own_cluster: Cluster, own_following: Following, new_namespace: MakeNamespace
) -> None:
    servers = [own_cluster.start("a", http="127.0.0.1:0")]
    own_cluster.wait_for(a="serving")
    servers.append(own_cluster.start("b"))
    own_cluster.wait_for(a="serving", b="joining")
    wait_until(lambda: own_following.states().keys() == {"a", "b"})
    own_etcd.stop()
    wait_until(lambda: all("cannot reach etcd" in server.log_text() for server in servers), what="every node says so")
    wait_until(lambda: metrics(servers[0])["kvstore_cluster_directory_up", ""] == 0)
    stays(lambda: own_following.states().keys() == {"a", "b"}, 2.2, "for longer than the lease")
    for server in servers:
        with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
            client.set(make_keys(4), blocks_of(make_keys(4), 4096))
            assert client.contains(make_keys(4)).all()
    own_etcd.restart()
    for server in servers:
        wait_until(lambda server=server: "etcd answers again" in server.log_text(), what="every node says so")
    wait_until(lambda: metrics(servers[0])["kvstore_cluster_directory_up", ""] == 1)
    stays(lambda: own_cluster.states() == {"a": "serving", "b": "joining"}, 2.5)
    assert all("lease has ended" not in server.log_text() for server in servers)
    assert [sorted(member.node for member in view.members) for view in own_following.views] == [["a"], ["a", "b"]]
    servers.append(own_cluster.start("c"))
    wait_until(lambda: own_following.states().keys() == {"a", "b", "c"}, what="what happens later is seen")


def test_after_etcd_lost_its_data_the_nodes_register_again(
    own_etcd: Etcd, own_cluster: Cluster, own_following: Following
) -> None:
    for node in "ab":
        own_cluster.start(node)
        wait_until(lambda node=node: node in own_following.states())
    views = len(own_following.views)
    own_etcd.kill()
    own_etcd.restart(empty=True)
    wait_until(lambda: sorted(own_cluster.states()) == ["a", "b"])
    stays(lambda: own_following.states().keys() == {"a", "b"}, 1.0)
    assert all({member.node for member in view.members} == {"a", "b"} for view in own_following.views[views:])


def test_without_etcd_a_node_serves_and_registers_later(
    own_etcd: Etcd, own_cluster: Cluster, new_namespace: MakeNamespace
) -> None:
    own_etcd.stop()
    server = own_cluster.start("a")
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        client.set(make_keys(4), blocks_of(make_keys(4), 4096))
        assert client.contains(make_keys(4)).all()
    wait_until(lambda: "cannot reach etcd" in server.log_text())
    own_etcd.restart()
    wait_until(lambda: own_cluster.states() == {"a": "serving"})


def test_a_node_stops_promptly_without_etcd(own_etcd: Etcd, own_cluster: Cluster) -> None:
    server = own_cluster.start("a")
    own_cluster.wait_for(a="serving")
    own_etcd.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 10


def test_one_working_endpoint_is_enough(cluster: Cluster, etcd: Etcd) -> None:
    (dead,) = free_ports(1)
    name = cluster.url.rpartition("/")[2]
    cluster.start("a", cluster=f"etcd://127.0.0.1:{dead},127.0.0.1:{etcd.port}/{name}")
    cluster.wait_for(a="serving")
    stays(lambda: cluster.states() == {"a": "serving"}, 2.5)


def test_an_invalid_record_is_named_and_the_others_count(cluster: Cluster, following: Following) -> None:
    junk = cluster.url.rpartition("/")[2]
    key = cluster.directory.grant(60)
    assert key
    garbage = Member("junk", "serving", [])
    assert cluster.directory.register(garbage, key)
    server = cluster.start("a")
    wait_until(lambda: following.states().keys() == {"a"})
    wait_until(lambda: "ignoring the record of node 'junk'" in server.log_text())
    assert server.log_text().count("ignoring the record of node 'junk'") <= 2, junk  # at registration and in the view


# ---- draining ------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 4096


def fill(servers: Sequence[Server], namespace: Namespace, count: int) -> list[bytes]:
    """Set blocks on their owners."""
    keys = make_keys(count)
    with KVStoreClient([server.endpoint for server in servers], namespace) as client:
        assert client.set(keys, blocks_of(keys, BLOCK_BYTES), deferred=False).created == count
    return keys


def test_a_requested_drain_moves_blocks_and_the_node_runs_on_unlisted(
    cluster: Cluster, following: Following, new_namespace: MakeNamespace
) -> None:
    leaving = cluster.start("a", http="127.0.0.1:0")
    cluster.wait_for(a="serving")
    staying = cluster.start("b", grace_seconds=0)
    cluster.wait_for(a="serving", b="serving")
    namespace = new_namespace(BLOCK_BYTES)
    keys = fill([leaving, staying], namespace, 200)
    wait_until(lambda: metrics(leaving)["kvstore_cluster_members", "serving"] == 2, what="it knows the other")
    cluster.directory.write_drain("a", Drain(cluster.members()["a"].instance, 20.0))

    def done() -> Drain | None:
        drain = cluster.directory.read_drain("a")
        return drain if drain is not None and drain.state == "done" else None

    drain = wait_until(done)
    assert 0 < drain.moved == drain.total == drain.done < len(keys) and drain.failed == drain.present == 0
    assert cluster.states() == {"b": "serving"}
    with KVStoreClient(staying.endpoint, namespace) as client:
        assert client.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)
    with KVStoreClient(leaving.endpoint, namespace) as client:
        assert client.contains(keys).sum() == drain.moved, "it still serves who comes"
    values = metrics(leaving)
    assert values["kvstore_cluster_registered", ""] == 0 and values["kvstore_cluster_state", "out"] == 1
    assert values["kvstore_drain_blocks", "moved"] == drain.moved and values["kvstore_drain_blocks", "to_move"] == 0
    states = [states_of(view).get("a") for view in following.views]
    assert "draining" in states
    assert leaving.stop() == 0
    leaving.restart()
    cluster.wait_for(a="joining", b="serving")
    wait_until(lambda: cluster.directory.read_drain("a") is None, what="what was asked of an earlier run is removed")


def test_sigterm_with_drain_seconds_moves_the_blocks_first(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    leaving = cluster.start("a", shards=2, drain_seconds=20)
    cluster.wait_for(a="serving")
    staying = cluster.start("b", drain_seconds=20, grace_seconds=0)
    cluster.wait_for(a="serving", b="serving")
    wait_until(lambda: "joined=[b]" in leaving.log_text(), what="it knows the other")
    namespace = new_namespace(BLOCK_BYTES)
    keys = fill([leaving, staying], namespace, 200)
    leaving.signal(signal.SIGTERM)
    cluster.wait_for(1.0, a="draining", b="serving")
    assert leaving.process.wait(20) == 0
    assert cluster.states() == {"b": "serving"}
    with KVStoreClient(staying.endpoint, namespace) as client:
        assert client.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)
    began = time.monotonic()
    staying.signal(signal.SIGTERM)  # the last node has no other to move blocks to
    assert staying.process.wait(20) == 0
    assert time.monotonic() - began < 6
    assert cluster.states() == {}


def test_a_second_sigterm_ends_the_drain(cluster: Cluster) -> None:
    server = cluster.start("a", drain_seconds=300)
    cluster.wait_for(a="serving")
    server.signal(signal.SIGTERM)
    wait_until(lambda: "state=draining" in server.log_text())
    assert server.stop() == 0
    assert cluster.states() == {}


def test_a_registration_never_started_can_be_stopped_and_drained() -> None:
    url = parse_cluster_url("etcd://127.0.0.1:1/none")
    assert isinstance(url, EtcdURL)
    drained: list[bool] = []
    member = Member("a", "joining", [ShardAddress("a/0", "127.0.0.1", 7070, 1.0)])
    registration = Registration(
        url, member, member.shards, lease_s=2, grace_s=1.0, drained=lambda: drained.append(True)
    )
    registration.drain(60)
    assert drained, "nothing is to be waited for"
    registration.stop()


def test_a_signal_after_an_ended_drain_does_not_kill_the_shards(cluster: Cluster) -> None:
    server = cluster.start("a", drain_seconds=20)
    cluster.wait_for(a="serving")
    (shard,) = server.shards()
    shard.suspend()  # like a shard that is busy writing its memory to disk
    try:
        server.signal(signal.SIGTERM)
        wait_until(lambda: "has withdrawn" in server.log_text())
        stays(lambda: server.running, 1.0, "the supervisor waits for its shard")
        server.signal(signal.SIGTERM)
        stays(lambda: shard.is_running() and shard.status() == "stopped", 0.3)
        server.signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
    finally:
        if shard.is_running():
            shard.resume()


def test_a_shard_that_dies_during_a_drain_is_restarted(cluster: Cluster) -> None:
    server = cluster.start("a", shards=2, drain_seconds=20)
    cluster.wait_for(a="serving")
    server.signal(signal.SIGTERM)
    wait_until(lambda: "state=draining" in server.log_text())
    server.shards()[1].kill()
    assert server.process.wait(20) == 0
    assert "shard 1" in server.log_text() and "died" in server.log_text()


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--cluster", "127.0.0.1:2379"], ["--cluster 127.0.0.1:2379: expected etcd://HOST:PORT"]),
        (["--cluster", "etcd://127.0.0.1:1/n", "--host", "0.0.0.0"], ["0.0.0.0", "--advertise"]),
        (["--drain-seconds", "5"], ["--drain-seconds 5: ", "--cluster"]),
        (["--clutser", "x"], ["--clutser"]),
    ],
)
def test_invalid_flags_are_named_with_status_2(flags: list[str], parts: list[str]) -> None:
    sizes = ("--memory", "16MiB", "--segment", "1MiB")
    ended = forked.run("kvstore", "--port", "0", *sizes, *flags, env=environment())
    assert ended.returncode == 2 and ended.stdout == ""
    assert all(part in ended.stderr for part in parts), ended.stderr


def test_without_the_requests_package_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "requests.py").write_text("raise ImportError(\"No module named 'requests'\")\n")
    ended = subprocess.run(
        server_command("--port", "0", "--memory", "16MiB", "--segment", "1MiB", "--cluster", "etcd://127.0.0.1:1/n"),
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1 and "pip install 'llm-kvstore[cluster]'" in ended.stderr, ended.stderr
