"""The files of docker/, unchanged, started without a container engine. Real servers and a real etcd run in
containers of the tests' own (tests/support/containers.py), with exactly the flags and variables of the files. Only the
sizes of memory and disk are smaller.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvstore.cluster.members import Member, decode_member
from tests.support.containers import Container, no_containers
from tests.support.deployment import (
    Node,
    compose,
    compose_nodes,
    dashboard,
    expressions,
    kubernetes,
    pod,
    stage,
    stateful_set,
)
from tests.support.harness import ROOT, START_S, wait_until
from tests.support.network import Network, need

SMALLER = {"memory": "128MiB", "disk_size": "128MiB"}
STARTED = ("kvstore-3",)  # started as in the image; the shards of the others are forks, which are three times as fast
FORKING = ["python", "-m", "tests.support.forked", "kvstore", "--"]
STOP_S = 60.0  # with no blocks to move and little to write; the files allow much more
CLIENT = """
import sys, time, xxhash
from kvstore_client import KVStoreClient, Namespace
keys = [xxhash.xxh3_128_digest(str(number).encode()) for number in range(200)]
blocks = [key * 256 for key in keys]
with KVStoreClient(ENDPOINT, Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=4096)) as client:
    if "set" in sys.argv:
        print(client.set(keys, blocks, deferred=False).created)
    found = client.get(keys)
    while "all" in sys.argv and found.hit < len(keys):
        time.sleep(0.1)
        found = client.get(keys)
    assert all(block is None or bytes(block) == wanted for block, wanted in zip(found.blocks, blocks))
    print(found.hit)
"""
OURS = re.compile(r"\bkvstore_[a-z0-9_]+")


class Deployment:
    """Containers that resolve each other's names, the servers in them, and a container for clients."""

    def __init__(
        self,
        network: Network,
        etcd: Container,
        etcd_flags: list[str],
        nodes: dict[Container, Node],
        client: Container,
    ) -> None:
        self.network = network
        self.nodes = nodes
        self.client = client
        everybody = [etcd, client, *nodes]
        names = {container.name: [container.address] for container in everybody}
        names["kvstore"] = [container.address for container in nodes]  # as a headless service with that name resolves
        for container in everybody:
            container.knows(names)
        (entrypoint,) = (json.loads(rest) for name, rest in stage("etcd") if name == "ENTRYPOINT")
        self.etcd = etcd
        self.etcd_command = [*entrypoint, *etcd_flags]
        etcd.start(self.etcd_command)
        wait_until(self.etcd_is_healthy, START_S, "etcd is healthy")
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        for container in nodes:
            self.start(container)
        for container in nodes:
            self.wait_ready(container)
        for container in nodes:
            wait_until(
                lambda container=container: self.value(container, "kvstore_cluster_members") == len(nodes),
                START_S,
                f"{container.name} sees all members",
            )

    @property
    def url(self) -> str:
        """Return the cluster's URL, which the files give to the servers and clients use, too."""
        (url,) = {node.settings().cluster for node in self.nodes.values()}
        assert url
        return url

    def client_script(self) -> str:
        return CLIENT.replace("ENDPOINT", repr(self.url))

    def etcd_is_healthy(self) -> bool:
        try:
            return "true" in self.get(self.etcd, 2379, "/health")
        except OSError:
            return False

    @functools.cached_property
    def filled(self) -> str:
        """Set the blocks with a client, once. Returns its output."""
        return self.python(self.client_script(), "set")

    def start(self, container: Container) -> None:
        node = self.nodes[container]
        command = ["kvstore-server"] if node.name in STARTED else FORKING
        self.servers[node.name] = container.start([*command, *node.flags], node.environment)

    def wait_ready(self, container: Container) -> None:
        server = self.servers[container.name]
        wait_until(
            lambda: "kvstore-server ready" in container.log_text() or server.poll() is not None,
            START_S,
            f"{container.name} is ready",
        )
        assert server.poll() is None, container.log_text()

    def python(self, script: str, *arguments: str) -> str:
        done = self.client.run([sys.executable, "-c", script, *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, host: Container, port: int, path: str) -> str:
        """Return a container's HTTP answer. This process itself asks, in the client container's network, because a new
        process for each request would be slow."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of this machine
        with (
            self.network.inside(self.client.name),
            opener.open(f"http://{host.address}:{port}{path}", timeout=10) as answer,
        ):
            return str(answer.read(), "utf-8")

    def families(self, node: Container) -> list[Metric]:
        return list(text_string_to_metric_families(self.get(node, 9100, "/metrics")))

    def metrics(self, node: Container) -> dict[str, set[str]]:
        """Return the names of a node's samples, with their labels."""
        samples: dict[str, set[str]] = {}
        for family in self.families(node):
            samples.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
        return samples

    def value(self, node: Container, metric: str) -> float:
        return sum(sample.value for family in self.families(node) for sample in family.samples if sample.name == metric)

    def members(self) -> list[Member]:
        """Return the records that the nodes have written to etcd."""
        prefix = f"/kvstore/{self.url.rpartition('/')[2]}/nodes/"
        found = self.etcd.run(["etcdctl", "get", "--prefix", prefix, "--print-value-only"], {"ETCDCTL_API": "3"})
        return [decode_member(line.encode()) for line in found.stdout.splitlines() if line]

    def terminate(self, container: Container) -> float:
        """Send SIGTERM. Returns the seconds until the end."""
        server = self.servers[container.name]
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0, container.log_text()
        return time.monotonic() - started


@pytest.fixture(scope="module")
def of_compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    need(no_containers())
    folder = tmp_path_factory.mktemp("compose")
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        nodes = {
            stack.enter_context(Container(network, node.name, folder, [node.volume])): node.with_settings(**SMALLER)
            for node in compose_nodes()
        }
        etcd = stack.enter_context(Container(network, "etcd", folder, ["/var/lib/kvstore-etcd"]))
        client = stack.enter_context(Container(network, "client", folder))
        yield Deployment(network, etcd, compose()["services"]["etcd"]["command"], nodes, client)


@pytest.fixture(scope="module")
def of_kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The deployment of docker/kubernetes with two of its three pods, because the test machine is small."""
    need(no_containers())
    folder = tmp_path_factory.mktemp("kubernetes")
    (etcd_container,) = kubernetes("etcd.yaml")["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    service = kubernetes("etcd.yaml")["Service"]["metadata"]["name"]
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        nodes = {}
        for ordinal in range(2):
            name = f"{stateful_set()['metadata']['name']}-{ordinal}"
            container = stack.enter_context(Container(network, name, folder, [pod(ordinal, "").volume]))
            nodes[container] = pod(ordinal, container.address, "ab"[ordinal]).with_settings(**SMALLER)
        etcd = stack.enter_context(Container(network, service, folder, ["/var/lib/kvstore-etcd"]))
        client = stack.enter_context(Container(network, "client", folder))
        yield Deployment(network, etcd, etcd_container["args"], nodes, client)


def test_the_test_containers_are_as_restricted_as_the_files_say(of_compose: Deployment) -> None:
    container, node = next(iter(of_compose.nodes.items()))
    told = container.run(["sh", "-c", "id -u; id -g; grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status"])
    assert told.stdout.split() == ["10001", "10001", "CapPrm:", "0" * 16, "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    for folder in ("/", "/tmp", "/usr", "/var/lib", str(container.folder)):
        assert "Read-only" in container.run(["touch", f"{folder}/written"]).stderr
    assert container.run(["touch", f"{node.volume}/written"]).returncode == 0


def test_compose_forms_one_cluster_of_three_zones(of_compose: Deployment) -> None:
    members = of_compose.members()
    assert {member.node: (member.zone, member.shards[0].host) for member in members} == {
        "kvstore-1": ("a", "kvstore-1"),
        "kvstore-2": ("b", "kvstore-2"),
        "kvstore-3": ("c", "kvstore-3"),
    }
    assert of_compose.filled
    held = [of_compose.value(node, "kvstore_blocks") for node in of_compose.nodes]
    assert sum(held) == 200 and min(held) > 0


def test_the_manuals_status_command_names_every_member(of_compose: Deployment) -> None:
    (container, *_) = of_compose.nodes  # `compose exec` runs it in a node's container
    manual = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    found = re.search(r"exec kvstore-1 (kvstore cluster status .*)", manual)
    assert found
    asked = container.run(shlex.split(found[1]), {"COLUMNS": "160"})  # a terminal wide enough
    assert asked.returncode == 0, asked.stderr
    assert all(node.name in asked.stdout for node in of_compose.nodes.values())


def test_the_published_ports_lead_to_the_same_blocks(of_compose: Deployment) -> None:
    assert of_compose.filled
    endpoints = [f"tcp://{node.name}:{node.settings().port}" for node in of_compose.nodes.values()]
    assert int(of_compose.python(CLIENT.replace("ENDPOINT", repr(endpoints)))) == 200


def test_composes_healthchecks_succeed_only_where_the_server_runs(of_compose: Deployment) -> None:
    for container, node in of_compose.nodes.items():
        for probe in node.probes:
            done = container.run(probe, node.environment)
            assert done.returncode == 0, done.stderr
            assert of_compose.client.run(probe, node.environment).returncode == 1
    check, *command = compose()["services"]["etcd"]["healthcheck"]["test"]
    assert check == "CMD"
    assert of_compose.etcd.run(command, {"ETCDCTL_API": "3"}).returncode == 0  # 3.4 needs it, 3.5 does not


def test_every_metric_and_label_used_by_dashboard_and_alerts_is_served(of_compose: Deployment) -> None:
    assert of_compose.filled
    served = of_compose.metrics(next(iter(of_compose.nodes)))
    asked = expressions()
    asked += [variable["definition"] for variable in dashboard()["templating"]["list"]]
    names = {name for expression in asked for name in OURS.findall(expression)}
    names -= {name for name in names if name.startswith("kvstore_tls_")}  # these nodes have no TLS; see test_tls.py
    assert len(names) > 30
    assert not names - set(served)
    labels = {"job", "instance"} | {label for name in names for label in served[name]}
    used = {label for text in asked for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")}
    used |= {label for text in asked for label in re.findall(r"(\w+)=~?\"", text)}
    assert used <= labels, used - labels


def test_a_compose_node_ends_on_sigterm_and_returns_with_its_blocks(of_compose: Deployment) -> None:
    assert of_compose.filled
    container = next(iter(of_compose.nodes))
    assert of_compose.terminate(container) < of_compose.nodes[container].stop_s
    container.log.write_text("")
    of_compose.start(container)
    of_compose.wait_ready(container)
    assert int(of_compose.python(of_compose.client_script(), "all")) == 200, "all blocks are hits again"


def test_pods_form_one_cluster_at_their_own_addresses(of_kubernetes: Deployment) -> None:
    members = {member.node: member for member in of_kubernetes.members()}
    assert len(members) == len(of_kubernetes.nodes)
    for container, node in of_kubernetes.nodes.items():
        assert {shard.host for shard in members[node.name].shards} == {container.address}
        assert members[node.name].zone == node.settings().zone
    assert int(of_kubernetes.filled.split()[-1]) == 200


def test_the_headless_service_reaches_the_same_blocks_without_etcd(of_kubernetes: Deployment) -> None:
    assert of_kubernetes.filled
    service = kubernetes("kvstore.yaml")["Service"]
    endpoint = f"dns://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert f'"endpoint": "{endpoint}"' in (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert int(of_kubernetes.python(CLIENT.replace("ENDPOINT", repr(endpoint)))) == 200


def test_a_pods_probes_succeed_within_their_time(of_kubernetes: Deployment) -> None:
    (limits,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    for container, node in of_kubernetes.nodes.items():
        for probe in node.probes:
            done = container.run(probe, timeout_s=limits["livenessProbe"]["timeoutSeconds"])
            assert done.returncode == 0, done.stderr


def test_etcd_answers_its_pods_probes(of_kubernetes: Deployment) -> None:
    (container,) = kubernetes("etcd.yaml")["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert "true" in of_kubernetes.get(of_kubernetes.etcd, 2379, container[probe]["httpGet"]["path"])


def test_a_pod_ends_on_sigterm_within_its_grace_period(of_kubernetes: Deployment) -> None:
    assert of_kubernetes.filled
    *_, last = of_kubernetes.nodes  # as in a scale-down
    assert of_kubernetes.terminate(last) < of_kubernetes.nodes[last].stop_s
    assert last.name not in {member.node for member in of_kubernetes.members()}
    # Its blocks have moved to the node that stays.
    assert int(of_kubernetes.python(of_kubernetes.client_script())) == 200
