"""A cluster of real nodes on a network of its own: etcd, kvstore-servers, and hosts for clients, each with an address.

The thread that uses a `Cluster` is on the host `observer` meanwhile, so that what it connects to is the cluster's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.cluster.etcd import EtcdDirectory
from kvstore.cluster.members import DirectoryError, Member, Membership
from kvstore.cluster.placement import Placement
from kvstore.cluster.url import EtcdURL, parse_cluster_url
from tests.support.etcd import Etcd
from tests.support.harness import Server, environment, wait_until
from tests.support.network import Network

PORT = 7070
HTTP_PORT = 9090
SERVE_S = 30.0  # for a node to register, or its grace to end
CLIENTS = ("client1", "client2")


class Node(Server):
    """A member: its host has its id for a name."""

    def __init__(self, cluster: Cluster, node: str, zone: str, **flags: object) -> None:
        self.id = node
        address = cluster.network.address(node)
        given = {
            "host": address,
            "advertise": address,
            "cluster": cluster.url,
            "node-id": node,
            "zone": zone,
            "memory": cluster.memory,
            "segment": "2MiB",
            "http": f"{address}:{HTTP_PORT}",
            **flags,
        }
        arguments = [f"--{name}={value}" for name, value in given.items()]
        log = cluster.folder / f"{node}.log"
        super().__init__(log, *arguments, prefix=cluster.network.command(node), port=PORT)


class Cluster:
    """Nodes n1, n2 ... that have registered; made by `with`, which also ends everything.

    `flags`: of every node, as kvstore-server names them without the dashes (`grace_seconds=5`). `memory`: of each.
    """

    def __init__(self, folder: Path, *, nodes: int = 4, memory: str = "256MiB", **flags: object) -> None:
        self.folder = folder
        self.memory = memory
        self.network = Network()
        self.nodes: dict[str, Node] = {}
        self._first = [f"n{number}" for number in range(1, nodes + 1)]
        self._flags = {name.replace("_", "-"): value for name, value in flags.items()}
        self._cleanup = ExitStack()

    def __enter__(self) -> Cluster:
        try:
            self._cleanup.enter_context(self.network)
            for host in ("etcd", "observer", *CLIENTS, *self._first):
                self.network.add(host)
            self._cleanup.enter_context(self.network.inside("observer"))
            prefix = self.network.command("etcd")
            etcd = Etcd(self.folder / "etcd", prefix=prefix, host=self.network.address("etcd"))
            self.etcd = self._cleanup.enter_context(etcd)
            self.url = self.etcd.url("tests")
            parsed = parse_cluster_url(self.url)
            assert isinstance(parsed, EtcdURL)
            self._directory = EtcdDirectory(parsed, 2.0)
            self._cleanup.callback(self._directory.close)
            self._cleanup.callback(self._kill_all)
            for node in self._first:
                self.add(node)
            self.wait_for_members(*self._first)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cleanup.close()

    def _kill_all(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def __getitem__(self, node: str) -> Node:
        return self.nodes[node]

    def add(self, node: str, **flags: object) -> Node:
        """Start one more node, or one of the first anew, in a zone of its own. It may not have registered yet."""
        if node not in self._first:
            self.network.add(node)
        given = {name.replace("_", "-"): value for name, value in flags.items()}
        self.nodes[node] = Node(self, node, f"zone-{node}", **{**self._flags, **given})
        return self.nodes[node]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of `kvstore`, on a client's host."""
        command = [*self.network.command(CLIENTS[0]), sys.executable, "-m", "kvstore_cli", *arguments]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)

    # ---- members -------------------------------------------------------------------------------------------------

    def membership(self) -> Membership | None:
        """What etcd holds; None: it does not answer."""
        try:
            return self._directory.membership()
        except DirectoryError:
            return None

    def state(self, node: str) -> str:
        """`joining`, `serving`, `draining`; empty for a node that is no member."""
        return self._states().get(node, "")

    def _states(self) -> dict[str, str]:
        membership = self.membership()
        return {member.node: member.state for member in membership.members} if membership is not None else {}

    def wait_for(self, state: str, *nodes: str, deadline_s: float = SERVE_S) -> None:
        """Until all these nodes are members in this state; empty: until none of them is a member."""
        self._wait(lambda states: all(states.get(node, "") == state for node in nodes), deadline_s)

    def wait_for_members(self, *nodes: str, deadline_s: float = SERVE_S) -> None:
        """Until exactly these nodes are members, and none of them drains."""
        self._wait(lambda states: set(states) == set(nodes) and "draining" not in states.values(), deadline_s)

    def _wait(self, condition: Callable[[dict[str, str]], bool], deadline_s: float) -> None:
        try:
            wait_until(lambda: condition(self._states()), deadline_s)
        except AssertionError:
            raise AssertionError(f"not within {deadline_s:g} s; the members are {self._states()}") from None

    def mend(self) -> None:
        """The first nodes run and are the members, and everybody reaches everybody."""
        if not self.etcd.running:
            self.etcd.restart()
        for node in list(self.nodes.values()):
            if node.id not in self._first:
                node.stop()
                del self.nodes[node.id]
            elif not node.running:
                node.restart()
            elif not self.state(node.id):
                node.stop()
                node.restart()
        self.wait_for_members(*self._first)


def owner_nodes(
    membership: Membership, keys: npt.NDArray[np.uint8], replicas: int, among: Callable[[Member], bool]
) -> npt.NDArray[np.str_]:
    """The nodes that hold each key when those members of `among` are there: (n, replicas), the owner first."""
    shards = [(member, shard) for member in membership.members if among(member) for shard in member.shards]
    nodes = [member.node for member, _ in shards]
    placement = Placement(
        [shard.name for _, shard in shards],
        [shard.weight for _, shard in shards],
        nodes,
        [member.zone for member, _ in shards],
    )
    return np.array(nodes)[placement.replicas(keys, replicas)]
