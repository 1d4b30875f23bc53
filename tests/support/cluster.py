"""A cluster of real nodes for a test: servers, and the etcd directory that they register in.

with Cluster(etcd.url("name"), tmp_path, segment="1MiB") as cluster:
    cluster.start("a")
    cluster.wait_for(a="serving")

`Site` is a cluster with its etcd on a network of its own, where each node has an address and connections can be cut.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvstore.cluster.etcd import EtcdDirectory
from kvstore.cluster.following import Follower
from kvstore.cluster.members import DirectoryError, Member, Membership, State
from kvstore.cluster.placement import Placement
from kvstore.cluster.schemes import parse_cluster_url
from kvstore.cluster.url import EtcdURL
from kvstore.wire import MAX_KEYS, MAX_REPLICAS, ShardAddress
from kvstore.wire.queries import ShardQueries, ShardQueryError
from kvstore_client import ConnectionLost, KVStoreClient, Namespace
from kvstore_client.keys import pack_keys
from tests.support import forked
from tests.support.etcd import Etcd
from tests.support.harness import ANSWER_S, Server, environment, wait_until
from tests.support.network import Network

PORT = 7070  # the port of every node that has an address of its own
HTTP_PORT = 9090
SERVE_S = 30.0  # deadline for a node to register, or for its grace period to end
CLIENTS = ("client1", "client2")  # the hosts of a `Site` that run clients


def open_directory(url: str, timeout_s: float = 1.0) -> EtcdDirectory:
    """Return the directory in etcd of the cluster with this URL."""
    parsed = parse_cluster_url(url)
    assert isinstance(parsed, EtcdURL)
    return EtcdDirectory(parsed, timeout_s)


def cluster_name(request: pytest.FixtureRequest) -> str:
    """Return a name for the cluster of a test, different from those of the module's other tests."""
    return re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[-60:]


class Cluster:
    """The nodes of a cluster by id, and its directory in etcd. `with` or `close` ends all nodes.

    `folder`: for the nodes' logs. `network`: each node runs on the host of this network whose name is the node's id;
    without a network, all nodes run on loopback. `flags`: flags of kvstore-server for every node, with underscores
    instead of dashes (`grace_seconds=5`).
    """

    def __init__(self, url: str, folder: Path, *, network: Network | None = None, **flags: object) -> None:
        self.url = url
        self.nodes: dict[str, Server] = {}
        self.directory = open_directory(url, 2.0)
        self._folder = folder
        self._network = network
        self._flags = {"memory": "64MiB", "segment": "4MiB", **flags}
        self._started: list[Server] = []  # all servers, including those whose id another one took over
        self._leases: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for server in self._started:
            server.kill()
        self.directory.close()

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def start(
        self,
        node: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        port: int = 0,
        **flags: object,
    ) -> Server:
        """Start a node that registers itself, and wait for its ready line. The node may not have registered yet.

        `environment`: more variables of its environment. `prefix`, `port`: as for `Server`."""
        flags = {"cluster": self.url, "node_id": node, **self._flags, **flags}
        return self._start(node, flags, environment, prefix, port)

    def start_listed(self, *nodes: str, state: State = "serving", **flags: object) -> None:
        """Start servers that know of no cluster, and write their records for them, so that each state lasts as long as
        a test needs."""
        for node in nodes:
            self._start(node, {**self._flags, **flags})
            self.register(node, state)

    def _start(
        self,
        node: str,
        flags: dict[str, object],
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        port: int = 0,
    ) -> Server:
        if self._network is not None:
            address = self._network.address(node)
            flags = {"host": address, "advertise": address, "http": f"{address}:{HTTP_PORT}", **flags}
            prefix, port = self._network.command(node), PORT
            environment = {forked.FORKED: "1", **(environment or {})}
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        log = self._folder / f"{node}-{len(self._started)}.log"
        self.nodes[node] = Server(log, *arguments, prefix=prefix, port=port, **(environment or {}))
        self._started.append(self.nodes[node])
        return self.nodes[node]

    # ---- clients -------------------------------------------------------------------------------------------------

    def client(self, namespace: Namespace, **options: object) -> KVStoreClient:
        return KVStoreClient(self.url, namespace, **options)  # type: ignore[arg-type]

    def alone(self, node: str, namespace: Namespace) -> KVStoreClient:
        """Return a client of this node only."""
        return KVStoreClient(self.nodes[node].endpoint, namespace)

    # ---- members -------------------------------------------------------------------------------------------------

    def membership(self) -> Membership:
        """Return the membership in etcd. Raises `DirectoryError`."""
        return self.directory.membership()

    def members(self) -> dict[str, Member]:
        return {member.node: member for member in self.membership().members}

    def states(self) -> dict[str, str]:
        """Return the state of each node: `joining`, `serving` or `draining`."""
        return states_of(self.membership())

    def wait_for(self, deadline_s: float = ANSWER_S, **states: str) -> None:
        """Wait until exactly these nodes are members, in these states."""
        self.wait_until(lambda found: found == states, deadline_s, f"the members are {states}")

    def wait_for_members(self, *nodes: str, deadline_s: float = ANSWER_S) -> None:
        """Wait until exactly these nodes are members, and none of them is draining."""
        self.wait_until(
            lambda found: set(found) == set(nodes) and "draining" not in found.values(),
            deadline_s,
            f"the members are {nodes}",
        )

    def wait_until(self, condition: Callable[[dict[str, str]], bool], deadline_s: float, what: str) -> None:
        """Wait until `states()` meets the condition. Meanwhile, etcd need not answer."""
        found: object = None

        def holds() -> bool:
            nonlocal found
            try:
                states = self.states()
            except DirectoryError as error:
                found = error
                return False
            found = states
            return condition(states)

        try:
            wait_until(holds, deadline_s)
        except AssertionError:
            raise AssertionError(f"not within {deadline_s:g} s: {what}; they are {found}") from None

    # ---- records by hand -----------------------------------------------------------------------------------------

    def register(self, node: str, state: State, zone: str = "", port: int = 0) -> None:
        """Write the record of a started node. `port`: another port for its one shard, if not 0."""
        member = member_of(self.nodes[node], state, zone)
        if port:
            (shard,) = member.shards
            member = msgspec.structs.replace(member, shards=[msgspec.structs.replace(shard, port=port)])
        self.put(msgspec.structs.replace(member, node=node))

    def put(self, member: Member) -> None:
        if member.node not in self._leases:
            self._leases[member.node] = self.directory.grant(600)
        assert self.directory.register(member, self._leases[member.node], replace=True)

    def withdraw(self, node: str) -> None:
        self.directory.withdraw(node, self._leases.pop(node))


def states_of(membership: Membership) -> dict[str, str]:
    """Return the state of each node: `joining`, `serving` or `draining`."""
    return {member.node: member.state for member in membership.members}


def member_of(server: Server, state: State = "serving", zone: str = "") -> Member:
    """Return the record that a server would register."""
    with ShardQueries((server.host, server.port), ANSWER_S) as asking:
        welcome = asking.welcome
    shards = [msgspec.structs.replace(shard, host=server.host) for shard in welcome.shards]
    return Member(node=welcome.node, state=state, shards=shards, zone=zone)


# ---- where keys are ----------------------------------------------------------------------------------------------


def place(members: Iterable[Member]) -> tuple[list[tuple[Member, ShardAddress]], Placement]:
    """Return the shards of these members, and a placement over them, which refers to shards by their index in that
    list."""
    shards = [(member, shard) for member in members for shard in member.shards]
    placement = Placement(
        [shard.name for _, shard in shards],
        [shard.weight for _, shard in shards],
        [member.node for member, _ in shards],
        [member.zone or member.node for member, _ in shards],
    )
    return shards, placement


def owner_nodes(members: Iterable[Member], keys: npt.NDArray[np.uint8], replicas: int) -> npt.NDArray[np.str_]:
    """Return, with these members, the nodes that hold each key, the owner first. The shape is (keys, replicas)."""
    shards, placement = place(members)
    return np.array([member.node for member, _ in shards])[placement.replicas(keys, replicas)]


def new_owners(membership: Membership) -> list[Member]:
    """Return the members on which new blocks are set."""
    return [member for member in membership.members if member.is_new_owner]


def nodes_of(client: KVStoreClient) -> set[str]:
    """Return the nodes that a client knows. The cluster may have at most `MAX_REPLICAS` nodes, so that each can hold
    any key."""
    try:
        return {found.node for found in client.locate(bytes(16), replicas=MAX_REPLICAS, ask=False)}
    except ConnectionLost:  # the client knows no node
        return set()


def owned_by(client: KVStoreClient, node: str, keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys whose first replica is on `node`."""
    return [key for key in keys if client.locate(key, ask=False)[0].node == node]


def share_of(membership: Membership, node: str, keys: Sequence[bytes], replicas: int = 1) -> list[bytes]:
    """Return the keys of the blocks that `node` should hold, in the placement over all members that are not
    draining."""
    holders = owner_nodes(new_owners(membership), pack_keys(keys), replicas)
    return [keys[row] for row in np.flatnonzero((holders == node).any(axis=1))]


def lacking(membership: Membership, namespace: Namespace, keys: npt.NDArray[np.uint8], replicas: int) -> list[str]:
    """Return the shards that lack copies, with the number that each lacks. The result is empty if no copy is missing.

    The shards are asked directly, so the check repairs nothing. A shard that does not answer counts as lacking all
    copies.
    """
    owners = new_owners(membership)
    if len(owners) < replicas:
        return [f"{len(owners)} nodes for {replicas} copies"]
    shards, placement = place(owners)
    holders = placement.replicas(keys, replicas)
    found = []
    for number, (member, shard) in enumerate(shards):
        mine = keys[(holders == number).any(axis=1)]
        try:
            with ShardQueries((shard.host, shard.port), 2.0, namespace.canonical()) as asking:
                parts = [asking.contains(mine[at : at + MAX_KEYS]) for at in range(0, len(mine), MAX_KEYS)]
            missing = sum(int((~part).sum()) for part in parts)
            said = f"{missing} of {len(mine)}"
        except ShardQueryError as error:
            missing, said = len(mine), str(error)
        if missing:
            found.append(f"{shard.name} of {member.node}: {said}")
    return found


class Following:
    """A follower of a cluster, and all views that it has reported."""

    def __init__(self, url: str) -> None:
        self.views: list[Membership] = []
        self.follower = Follower(url, self.views.append, name="test")
        self.follower.start()

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.close()

    def states(self) -> dict[str, str]:
        """Return the state of each node in the latest view."""
        return states_of(self.views[-1]) if self.views else {}

    def wait_for(self, expected: dict[str, str], deadline_s: float = ANSWER_S) -> None:
        wait_until(lambda: self.views and self.states() == expected, deadline_s, f"{expected}")


# ---- a network of its own ----------------------------------------------------------------------------------------


class Site:
    """A cluster with its etcd, on a network that also has hosts for clients. `with` starts everything, and ends it
    afterwards.

    In the body, the nodes n1, n2 ... have registered, each in a zone of its own. The calling thread runs on the host
    `observer`, so that it can connect to the cluster. `flags`: as for `Cluster`.
    """

    def __init__(self, folder: Path, *, nodes: int = 4, **flags: object) -> None:
        self.folder = folder
        self.network = Network()
        self._first = [f"n{number}" for number in range(1, nodes + 1)]
        self._flags = {"memory": "256MiB", "segment": "2MiB", **flags}
        self._cleanup = ExitStack()

    def __enter__(self) -> Site:
        with ExitStack() as stack:
            stack.enter_context(self.network)
            for host in ("etcd", "observer", *CLIENTS, *self._first):
                self.network.add(host)
            stack.enter_context(self.network.inside("observer"))
            prefix = self.network.command("etcd")
            self.etcd = stack.enter_context(
                Etcd(self.folder / "etcd", prefix=prefix, host=self.network.address("etcd"))
            )
            self.cluster = stack.enter_context(
                Cluster(self.etcd.url("tests"), self.folder, network=self.network, **self._flags)
            )
            for node in self._first:
                self.add(node)
            self.cluster.wait_for_members(*self._first, deadline_s=SERVE_S)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def add(self, node: str, environment: Mapping[str, str] | None = None, **flags: object) -> Server:
        """Start one more node, or start one of the first nodes again. It may not have registered yet."""
        if node not in self._first:
            self.network.add(node)
        return self.cluster.start(node, environment, zone=f"zone-{node}", **flags)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `kvstore` on a client's host."""
        command = [*self.network.command(CLIENTS[0]), sys.executable, "-m", "kvstore_cli", *arguments]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)

    def mend(self) -> None:
        """Repair the cluster: restart etcd and the first nodes if needed, and stop all other nodes. Returns when
        exactly the first nodes are members. This does not heal connections that were cut."""
        if not self.etcd.running:
            self.etcd.restart()
        for node, server in list(self.cluster.nodes.items()):
            if node not in self._first:
                server.stop()
                del self.cluster.nodes[node]
            elif not server.running:
                server.restart()
            elif node not in self.cluster.states():
                server.stop()
                server.restart()
        self.cluster.wait_for_members(*self._first, deadline_s=SERVE_S)
