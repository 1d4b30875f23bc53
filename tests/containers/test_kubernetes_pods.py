"""The pods of docker/kubernetes and of the Helm chart's default values, run in the built images by podman as the
kubelet would run them (tests/support/kubelet.py). Only their flags for the sizes of memory and disk are changed.

What only a real cluster has is not tested: scheduling, updates, the disruption budget, network policies, and volumes
other than folders of this machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support.deployment import kubernetes, quantity_bytes
from tests.support.harness import ROOT, blocks_of, make_keys, put, wait_until
from tests.support.kubelet import Pod, expand, give_group, new_file_system
from tests.support.podman import SERVER, Container, Network
from tests.unit.test_helm import rendered

SMALLER = {"--memory": "256MiB", "--disk-size": "512MiB"}
SOURCES = {"manifests": kubernetes("kvstore.yaml"), "chart": rendered()}
USER = 10001
NAMESPACE = Namespace(model="pods", dtype="uint8", block_tokens=16, block_bytes=4096)
KEYS = make_keys(200)


class Pods:
    """An etcd and two of the nodes: kvstore-0 and kvstore-1, with a disk each."""

    def __init__(self, objects: Any, folder: Path, stack: ExitStack) -> None:
        self.network = stack.enter_context(Network())
        self.template = objects["StatefulSet"]["spec"]["template"]
        self.service = objects["Service"]["metadata"]["name"]
        etcd = kubernetes("etcd.yaml")
        name = etcd["StatefulSet"]["metadata"]["name"]
        disk = new_file_system(folder / "etcd")
        self.etcd = stack.enter_context(
            Pod(
                etcd["StatefulSet"]["spec"]["template"],
                f"{name}-0",
                self.network,
                claims={"data": disk},
                aliases=[etcd["Service"]["metadata"]["name"]],
            )
        )
        self.disks = [new_file_system(folder / f"blocks-{number}") for number in range(2)]
        self._stack = stack
        self.nodes = [self.start(number) for number in range(2)]

    def start(self, number: int) -> Pod:
        """Start a pod, which may have run before."""
        pod = Pod(
            self.template,
            f"{self.service}-{number}",
            self.network,
            claims={"blocks": self.disks[number]},
            args=SMALLER,
            aliases=[self.service],
        )
        return self._stack.enter_context(pod)

    def restart(self, number: int) -> None:
        """Restart a pod as after an update or a move: with a new container and address, and the same name and disk."""
        self.nodes[number].container.remove()
        self.nodes[number] = self.start(number)
        self.nodes[number].wait_started()

    def client(self) -> KVStoreClient:
        """Return a client in the pods' network, as in an engine."""
        return KVStoreClient(f"etcd://{self.etcd.address}:2379/kvstore", NAMESPACE)

    def wait_hits(self) -> None:
        """Wait until the blocks of all `KEYS` are found, with the right bytes."""
        with self.client() as client:
            wait_until(lambda: client.contains(KEYS).all(), what="all blocks are there")
            assert [bytes(block) for block in client.get(KEYS).blocks] == blocks_of(KEYS, NAMESPACE.block_bytes)


@pytest.fixture(scope="module", params=SOURCES)
def pods(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with ExitStack() as stack:
        pods = Pods(SOURCES[request.param], tmp_path_factory.mktemp("pods"), stack)
        for pod in [pods.etcd, *pods.nodes]:
            pod.wait_started()
        with pods.client() as client:
            wait_until(lambda: len({shard.node for shard in client.shards()}) == 2, what="both nodes are members")
            put(client, KEYS)
        yield pods


def everybody(pods: Pods) -> list[Pod]:
    return [pods.etcd, *pods.nodes]


def test_everything_in_the_templates_reaches_the_containers(pods: Pods) -> None:
    for pod in everybody(pods):
        found = pod.container.inspect()
        variables = dict(each.split("=", 1) for each in found["Config"]["Env"])
        for said, given in zip(pod.said["args"], found["Args"][-len(pod.said["args"]) :], strict=True):
            flag = expand(said, variables).partition("=")
            assert given == flag[0] + flag[1] + SMALLER.get(flag[0], flag[2]) and "$" not in given
        assert variables.get("POD_IP", pod.address) == pod.address
        assert found["HostConfig"]["Memory"] == quantity_bytes(pod.said["resources"]["limits"]["memory"])
        assert found["Config"]["Image"].removeprefix("localhost/") == pod.said["image"]


def test_every_probe_succeeds_within_its_time(pods: Pods) -> None:
    for pod in everybody(pods):
        assert set(pod.probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
        for kind, probe in pod.probes.items():
            right, took_s = probe.ask()
            assert right and took_s < probe.timeout_s, f"{pod.name}: {kind} took {took_s:.2f} s"


def test_the_first_process_is_the_program_and_has_no_other_rights(pods: Pods) -> None:
    for pod in everybody(pods):
        lines = pod.container.run("cat", "/proc/1/status").stdout.splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        assert status["Name"] == [{"kvstore": "kvstore-server"}.get(pod.said["name"], "etcd")]
        assert status["Uid"] == status["Gid"] == [str(USER)] * 4 and status["Groups"] == [str(USER)]
        assert status["NoNewPrivs"] == ["1"] and status["Seccomp"] == ["2"]
        assert all(int(status[f"Cap{kind}"][0], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
        for place in ("/x", "/tmp/x", "/run/x", "/var/lib/x"):
            assert "Read-only file system" in pod.container.run("touch", place, check=False).stderr, place


def test_a_new_root_owned_file_system_is_writable_through_the_pods_group(pods: Pods) -> None:
    for disk, made in [
        (pods.disks[0], "blocks"),
        (pods.disks[1], "blocks"),
        (pods.disks[0].with_name("etcd"), "member"),
    ]:
        root = disk.stat()
        assert (root.st_uid, root.st_gid, oct(root.st_mode & 0o7777)) == (0, USER, "0o2775")
        inside = (disk / made).stat()
        assert (inside.st_uid, inside.st_gid) == (USER, USER)


def test_nodes_are_members_at_their_pods_addresses(pods: Pods) -> None:
    with pods.client() as client:
        found = {(shard.node, shard.endpoint.rpartition(":")[0]) for shard in client.shards()}
        assert found == {(pod.name, f"tcp://{pod.address}") for pod in pods.nodes}
        assert len(client.shards()) == 8 and all(shard.info is not None for shard in client.shards())


def test_the_manuals_status_command_names_every_node(pods: Pods) -> None:
    manual = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (line,) = (line for line in manual.splitlines() if line.startswith("kubectl exec kvstore-0 "))
    said = pods.nodes[0].container.run(*shlex.split(line.partition(" -- ")[2])).stdout
    assert all(pod.name in said for pod in pods.nodes), said


def test_the_headless_service_reaches_the_nodes_from_another_pod(pods: Pods) -> None:
    with Container(
        *("ping", "--endpoint", f"dns://{pods.service}:7070"), network=pods.network, entrypoint="kvstore", image=SERVER
    ) as other:
        assert other.wait() == 0, other.logs()
        assert "8 shard(s) answered" in other.logs()


def test_the_annotations_lead_prometheus_to_the_metrics(pods: Pods) -> None:
    annotations = pods.template["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    url = f"http://{pods.nodes[0].address}:{annotations['prometheus.io/port']}{annotations['prometheus.io/path']}"
    program = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode())"
    assert "\nkvstore_shard_up{" in pods.nodes[1].container.run("python", "-c", program, url).stdout


def test_a_pod_drains_on_sigterm_within_its_grace_period(pods: Pods) -> None:
    status, took_s = pods.nodes[1].terminate()
    assert status == 0 and took_s < pods.nodes[1].grace_s, pods.nodes[1].container.logs()[-3000:]
    print(f"it ended after {took_s:.1f} s of {pods.nodes[1].grace_s}")
    assert "exit status 0" in pods.nodes[1].container.logs()
    pods.wait_hits()
    pods.restart(1)


def test_a_moved_pod_has_its_disks_blocks_after_the_group_is_restored(pods: Pods) -> None:
    """All pods stop at once, so that no node drains its blocks to another. Then the kubelet gives all files of the
    volume to the group: if its root does not belong to the group, or at every start if OnRootMismatch is missing."""
    for pod in pods.nodes:
        pod.container.signal("SIGTERM")
    for number, pod in enumerate(pods.nodes):
        assert pod.container.wait() == 0
        pod.container.remove()
        give_group(pods.disks[number], USER)
    for number in range(2):
        pods.restart(number)
    with pods.client() as client:
        wait_until(lambda: len({shard.node for shard in client.shards()}) == 2, what="both nodes are members")
    pods.wait_hits()


def test_etcd_ends_on_sigterm_in_its_grace_period_and_keeps_the_members(pods: Pods) -> None:
    status, took_s = pods.etcd.terminate()
    assert status == 0 and took_s < pods.etcd.grace_s, pods.etcd.container.logs()[-3000:]
    pods.etcd.container.start()
    pods.etcd.wait_started()
    with pods.client() as client:
        wait_until(lambda: len({shard.node for shard in client.shards()}) == 2, what="both nodes are members")
