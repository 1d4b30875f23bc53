"""A cluster of the last release is upgraded node by node while clients of both releases read and set blocks.

Only `make upgrade` runs it, because the last release must be built first. The short form, which always runs, is
tests/integration/test_last_release.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.wire.queries import ShardQueries
from tests.support import last_release
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.harness import environment, wait_until
from tests.support.last_release import THIS, Release
from tests.upgrade.client import KEYS

pytestmark = [
    pytest.mark.skipif(os.environ.get("KVSTORE_UPGRADE") != "full", reason="builds the last release: make upgrade"),
    pytest.mark.timeout(900),
]
NODES = ("n1", "n2", "n3")
ROUNDS = 5  # the rounds of each client between two steps
SERVE_S = 60.0
OLD, NEW = 3, 4  # versions of the protocol


class Client:
    """A client in a process of its own, and its results so far."""

    def __init__(self, name: str, release: Release, kind: str, url: str) -> None:
        self.name = name
        self.rounds: list[dict[str, object]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("client.py")), url, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(**release.environment),
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.rounds.append(json.loads(line))

    def work(self) -> None:
        """Wait until the client has done some more rounds."""
        wanted = len(self.rounds) + ROUNDS
        wait_until(
            lambda: len(self.rounds) >= wanted or self._process.poll() is not None, SERVE_S, f"{self.name} works"
        )
        assert self._process.poll() is None, f"{self.name} ended with {self._process.poll()}"

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(SERVE_S) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SERVE_S)
        self._thread.join(SERVE_S)
        for file in (self._process.stdin, self._process.stdout):
            assert file is not None
            file.close()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return last_release.build(tmp_path_factory.mktemp("release"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with (
        Etcd(tmp_path / "etcd") as etcd,
        Cluster(etcd.url("upgrade"), tmp_path, drain_seconds=5, grace_seconds=3, disk_size="64MiB") as cluster,
    ):
        yield cluster


def start(cluster: Cluster, node: str, release: Release, folder: Path) -> None:
    cluster.start(node, release.environment, release.prefix, disk=folder / f"disk-{node}")


def spoken(cluster: Cluster) -> list[int]:
    """Return the protocol version that this release uses with each node."""
    versions = []
    for node in NODES:
        server = cluster.nodes[node]
        with ShardQueries((server.host, server.port), 5.0) as asking:
            versions.append(asking.welcome.protocol)
    return versions


def test_nodes_are_upgraded_one_by_one_while_clients_of_both_releases_work(
    old: Release, cluster: Cluster, tmp_path: Path
) -> None:
    for node in NODES:
        start(cluster, node, old, tmp_path)
    cluster.wait_for(SERVE_S, n1="serving", n2="serving", n3="serving")
    assert spoken(cluster) == [OLD, OLD, OLD]
    clients = [
        Client(f"{kind} client of the {name} release", release, kind, cluster.url)
        for name, release in (("last", old), ("new", THIS))
        for kind in ("sync", "async")
    ]
    try:
        for client in clients:
            client.work()
        warm = [len(client.rounds) for client in clients]
        for step, node in enumerate(NODES, 1):
            assert cluster.nodes[node].stop() == 0
            for client in clients:
                client.work()
            start(cluster, node, THIS, tmp_path)
            cluster.wait_for(SERVE_S, n1="serving", n2="serving", n3="serving")
            assert spoken(cluster) == [NEW] * step + [OLD] * (len(NODES) - step)
            for client in clients:
                client.work()
            command = [sys.executable, "-m", "kvstore_cli", "cluster", "status", "--json", "--endpoint", cluster.url]
            status = json.loads(subprocess.run(command, capture_output=True, env=environment(), check=True).stdout)
            assert [each["shards_up"] for each in status["nodes"]] == [1, 1, 1]
        for client in clients:
            client.end()
    finally:
        for client in clients:
            client.kill()
    for client, first in zip(clients, warm, strict=True):
        hits = [int(str(each["hit"])) for each in client.rounds[first:]]
        print(f"{client.name}: {len(hits)} rounds, hits {min(hits)} to {max(hits)} of {len(KEYS)}")
        assert not any(each["wrong"] for each in client.rounds), client.name
        assert not any(each["failed"] for each in client.rounds), [each for each in client.rounds if each["failed"]]
        assert min(hits) > 0 and hits[-1] == len(KEYS), hits
    for node in NODES:
        assert "refused: " not in cluster.nodes[node].log_text(), "no request was one that the other release lacks"
