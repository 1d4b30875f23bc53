"""docker/compose.yaml, started by podman-compose: nodes are killed, replaced and drained under load, and Prometheus
watches. The commands are those of docs/deployment.md.

podman-compose passes on the file's images, builds, commands, variables, volumes, ports, memory, open files, init,
restarts, rights and grace periods. With the podman of Debian 12 it does not do two things that Docker does, so the
tests check them in other ways:

* `depends_on: condition: service_healthy` and `--wait`: podman-compose starts everything at once, so nodes start before
  etcd answers, and wait for it themselves. The tests run the healthchecks, because there is no systemd that would run
  them every few seconds.
* `read_only`: podman adds a writable /tmp. tests/containers/test_image.py runs servers without one.

Prometheus comes from a stand-in image (scripts/base_images.sh). Grafana does not run: the tests send its dashboard's
queries to Prometheus. Nodes have less memory than in the file (tests/support/compose.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient
from tests.containers.load import Load
from tests.support.compose import LEFT_OUT, Compose, Prometheus, manual_commands, wait_for
from tests.support.deployment import alerts, dashboard, expressions, published, quantity_bytes
from tests.support.harness import MakeNamespace, blocks_of, make_keys, put
from tests.support.podman import podman

pytestmark = pytest.mark.timeout(600)  # a node joins for a minute, and an alert waits for another minute

NODES = ("kvstore-1", "kvstore-2", "kvstore-3")
ENDPOINT = "etcd://etcd:2379/demo"
NETWORK = "kvstore_default"
SCRAPES_S = 40.0  # a few intervals of prometheus.yml
ALERT_S = 150.0  # `for: 1m` of an alert, plus a few intervals
JOIN_S = 150.0  # the grace period of a joining node, plus a start
STEADY = 20  # the number of chains acknowledged before and after an event: a few seconds
OURS = re.compile(r"\bkvstore_[a-z0-9_]+")


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with Compose(tmp_path_factory.mktemp("compose")) as compose:
        compose.manual("up --build --detach")
        compose.wait_for_members(*NODES, of="kvstore-1")
        yield compose


@pytest.fixture
def load(compose: Compose, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Load]:
    """A client in the services' network sets two copies of each block and reads them."""
    with Load(ENDPOINT, NETWORK, tmp_path, request.node.name) as load:
        load.wait_acknowledged(STEADY)
        yield load


@pytest.fixture(scope="module")
def prometheus(compose: Compose, tmp_path_factory: pytest.TempPathFactory) -> Prometheus:
    """Prometheus, after it has scraped all nodes under load long enough for its rates."""
    prometheus = Prometheus()
    wait_for(lambda: set(_targets(prometheus).values()) == {"up"}, SCRAPES_S, "all nodes have been scraped")
    with Load(ENDPOINT, NETWORK, tmp_path_factory.mktemp("load"), "prometheus"):
        busy = "count(sum by (instance, shard) (rate(kvstore_created_blocks_total[1m])) > 0) == 6"
        wait_for(lambda: prometheus.query(busy), SCRAPES_S, "all shards are given blocks")
    return prometheus


def _targets(prometheus: Prometheus) -> dict[str, str]:
    try:
        return prometheus.targets()
    except OSError:  # it is still starting
        return {}


# ---- the services --------------------------------------------------------------------------------------------------


def test_these_tests_run_every_command_of_the_manual() -> None:
    assert manual_commands() == [
        "up --build --detach --wait",
        f"exec kvstore-1 kvstore cluster status --endpoint {ENDPOINT}",
        "stop kvstore-2",
        "down",
    ]


def test_all_services_but_grafana_run(compose: Compose) -> None:
    assert set(compose.services) == {*NODES, "etcd", "prometheus"} == set(compose.file["services"]) - {LEFT_OUT}
    assert all(compose.container(service).running for service in compose.services)


def test_the_manuals_status_command_names_three_nodes_in_three_zones(compose: Compose) -> None:
    said = compose.manual("exec kvstore-1")
    assert all(node in said for node in NODES), said
    nodes = compose.status("kvstore-1")["nodes"]
    assert {node["node"]: node["zone"] for node in nodes} == dict(zip(NODES, "abc", strict=True))
    assert all(node["shards"] == node["shards_up"] == 2 for node in nodes)


@pytest.mark.parametrize("service", [*NODES, "etcd"])
def test_services_are_as_restricted_as_the_file_says(compose: Compose, service: str) -> None:
    said, found = compose.file["services"][service], compose.container(service).inspect()
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] and not found["EffectiveCaps"] and not found["BoundingCaps"]
    assert "no-new-privileges" in str(host["SecurityOpt"])
    assert host["Memory"] == quantity_bytes(said["mem_limit"])
    assert host["RestartPolicy"]["Name"] == said["restart"]
    status = compose.container(service).run("cat", "/proc/self/status").stdout
    assert "NoNewPrivs:\t1" in status and "CapBnd:\t0000000000000000" in status and "Seccomp:\t2" in status
    ports = {(each["HostIp"], int(each["HostPort"])) for given in host["PortBindings"].values() for each in given or ()}
    assert ports == {(address, outside) for address, outside, _ in published(said)}


@pytest.mark.parametrize("node", NODES)
def test_a_node_has_an_init_no_core_dumps_and_enough_open_files(compose: Compose, node: str) -> None:
    container = compose.container(node)
    assert container.run("cat", "/proc/1/comm").stdout.strip() == "podman-init"
    limits = container.run("cat", "/proc/1/limits").stdout
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
    files = re.search(r"^Max open files +(\d+)", limits, re.MULTILINE)
    assert files and int(files[1]) >= min(65536, int(os.sysconf("SC_OPEN_MAX")))


@pytest.mark.parametrize("service", [*NODES, "etcd"])
def test_every_services_healthcheck_succeeds(compose: Compose, service: str) -> None:
    assert compose.container(service).healthy()


def test_programs_on_the_host_reach_the_nodes_at_published_ports(
    compose: Compose, new_namespace: MakeNamespace
) -> None:
    endpoints = [f"tcp://127.0.0.1:{port}" for port in (7070, 7080, 7090)]
    keys = make_keys(200)
    with KVStoreClient(endpoints, new_namespace(4096)) as client:
        assert len(client.shards()) == 6 and not [shard.error for shard in client.shards() if shard.info is None]
        put(client, keys)
        assert [bytes(block) for block in client.get(keys).blocks] == blocks_of(keys, 4096)


# ---- what Prometheus sees ------------------------------------------------------------------------------------------


def test_prometheus_scrapes_all_three_nodes(prometheus: Prometheus) -> None:
    assert prometheus.targets() == {f"{node}:9100": "up" for node in NODES}


def test_nodes_declare_the_format_of_their_metrics(compose: Compose) -> None:
    """Prometheus 3 refuses metrics whose format is not declared. The version in these tests may be older and accept
    them."""
    program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').headers['Content-Type'])"
    said = compose.container("kvstore-1").run("python", "-c", program).stdout
    assert re.match(r"text/plain; version=(0\.0\.4|1\.0\.0)", said), said


def test_all_alert_rules_are_loaded_and_evaluated_without_an_error(prometheus: Prometheus) -> None:
    names = {rule["alert"] for rule in alerts()}
    assert set(prometheus.rules()) == names
    wait_for(lambda: {rule["health"] for rule in prometheus.rules().values()} == {"ok"}, SCRAPES_S, "all are evaluated")


def test_no_alert_is_pending_or_fires_in_normal_operation(prometheus: Prometheus) -> None:
    assert all(rule["lastEvaluation"] for rule in prometheus.rules().values())
    assert prometheus.alerts() == {}


def test_every_query_of_dashboard_and_alerts_has_known_metrics(
    prometheus: Prometheus,
) -> None:
    known = set(prometheus.ask("label/__name__/values")) | set(prometheus.ask("metadata"))
    queries = [as_grafana_asks(query) for query in expressions()]
    assert len(queries) > 40
    for query in queries:
        prometheus.query(query)
        names = {name for name in OURS.findall(query) if not name.startswith("kvstore_tls_")}  # these have no TLS
        assert names <= known, f"{query}: {names - known}"


def test_every_dashboard_panel_with_events_shows_data(prometheus: Prometheus) -> None:
    panels = {panel["title"]: panel["targets"] for panel in dashboard()["panels"] if panel.get("targets")}
    results = {
        title: [row for target in targets for row in prometheus.query(as_grafana_asks(target["expr"]))]
        for title, targets in panels.items()
    }
    empty = {title for title, rows in results.items() if not rows}
    assert empty == {title for title in panels if title == "Drain" or "TLS" in title}


def as_grafana_asks(query: str) -> str:
    """Return the query with a value for each variable of the dashboard."""
    return query.replace("$__rate_interval", "1m").replace("$node", ".*")


def test_the_dashboards_variables_name_the_nodes(prometheus: Prometheus) -> None:
    (variable,) = dashboard()["templating"]["list"]
    found = re.fullmatch(r"label_values\((.+), *(\w+)\)", variable["definition"])
    assert found
    values = prometheus.ask(f"label/{found[2]}/values", **{"match[]": found[1]})
    assert values == [f"{node}:9100" for node in NODES]


# ---- nodes that die, are replaced and leave ------------------------------------------------------------------------


@pytest.fixture
def nodes(compose: Compose) -> tuple[str, ...]:
    """Make all nodes members: restart them if an earlier test left a node stopped."""
    if set(compose.states("kvstore-3")) != set(NODES):
        compose.manual("up --build --detach")
    compose.wait_for_members(*NODES, of="kvstore-3")
    return NODES


def test_a_killed_node_loses_no_acknowledged_block_and_is_reported(
    compose: Compose, prometheus: Prometheus, nodes: tuple[str, ...], load: Load
) -> None:
    compose.run("kill", "kvstore-2")
    load.wait_acknowledged(STEADY)
    assert load.assert_all_there().acknowledged > 1000
    down = "KVStoreNodeDown kvstore-2:9100"
    wait_for(lambda: prometheus.alerts().get(down) == {"pending"}, ALERT_S, f"{down} is pending")
    wait_for(lambda: prometheus.alerts().get(down) == {"firing"}, ALERT_S, f"{down} fires")
    assert {name for name, states in prometheus.alerts().items() if "firing" in states} == {down}
    load.assert_all_there()


def test_after_a_replaced_node_is_filled_another_may_be_lost(compose: Compose, load: Load) -> None:
    """A node loses its container and its blocks. While its successor is `joining`, the other nodes copy to it the
    blocks that it owns. After that, another node may be lost."""
    compose.container("kvstore-2").remove()
    podman("volume", "rm", "--force", "kvstore_blocks-2")
    compose.wait_for_members("kvstore-1", "kvstore-3", of="kvstore-3")
    load.wait_acknowledged(STEADY)
    load.assert_all_there()
    compose.manual("up --build --detach")
    compose.wait_for_members(*NODES, of="kvstore-3", serving=True, deadline_s=JOIN_S)
    compose.run("kill", "kvstore-1")
    load.wait_acknowledged(STEADY)
    assert load.assert_all_there().acknowledged > 2000


def test_the_engine_restarts_a_dead_node_with_its_disks_blocks(
    compose: Compose, nodes: tuple[str, ...], new_namespace: MakeNamespace
) -> None:
    with KVStoreClient(f"tcp://{compose.container('kvstore-1').address}:7070", new_namespace(4096)) as client:
        put(client, make_keys(100))
    wait_for(lambda: _disk_blocks(compose, "kvstore-1") >= 100, 60.0, "the blocks are on disk")
    container = compose.container("kvstore-1")
    os.kill(container.pid, 9)  # from outside, as the kernel does when memory is short
    wait_for(lambda: container.inspect()["RestartCount"] == 1, 60.0, "the engine starts it again")

    def recovered() -> int:
        since_start = container.logs().rpartition("kvstore-server 0.1.0 starts")[2]
        found = re.findall(r"(\d+) blocks recovered .* 0 lost", since_start)
        return sum(map(int, found)) if len(found) == 2 else 0

    assert wait_for(recovered, 60.0, "both shards have read their disk") >= 100
    compose.wait_for_members(*NODES, of="kvstore-1")


def _disk_blocks(compose: Compose, node: str) -> int:
    return sum(each["disk_blocks"] for each in compose.status(node)["nodes"] if each["node"] == node)


def test_a_node_stopped_as_the_manual_says_drains_under_load(
    compose: Compose, nodes: tuple[str, ...], load: Load
) -> None:
    before = len(load.client.calls)
    compose.manual("stop kvstore-2", timeout_s=500)
    assert compose.container("kvstore-2").inspect()["State"]["ExitCode"] == 0
    log = compose.container("kvstore-2").logs()
    assert "exit status 0" in log, log[-3000:]
    compose.wait_for_members("kvstore-1", "kvstore-3", of="kvstore-3")
    load.wait_acknowledged(STEADY)
    load.assert_all_there()
    failed = [call for call in load.client.calls[before:] if call.errors or call.missed]
    assert not failed, failed[:3]


def test_down_ends_everything_and_keeps_the_blocks(compose: Compose) -> None:
    compose.manual("down", timeout_s=500)
    mine = f"label=io.podman.compose.project={compose.file['name']}"
    assert podman("ps", "--all", "--quiet", "--filter", mine).stdout == ""
    volumes = podman("volume", "ls", "--format", "{{.Name}}").stdout.split()
    assert {f"kvstore_blocks-{number}" for number in (1, 2, 3)} <= set(volumes)
