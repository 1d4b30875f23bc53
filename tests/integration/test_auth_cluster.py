"""Members of a cluster log in to each other with the secret in their --auth file, and only with that secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.auth.editing import add
from kvstore_client import KVStoreClient, NotAuthorized
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.harness import blocks_of, make_keys, make_namespace, wait_until

BLOCK_BYTES = 4096
SECONDS = 6


def test_members_hand_blocks_over_only_after_a_login(etcd: Etcd, tmp_path: Path) -> None:
    file, foreign = tmp_path / "auth.toml", tmp_path / "foreign.toml"
    token = add(file, "engine", "a", ["read", "write"])
    elsewhere = add(foreign, "engine", "a", ["read", "write"])
    namespace = make_namespace(BLOCK_BYTES, "m")
    keys = make_keys(400)
    with Cluster(etcd.url("logins"), tmp_path, grace_seconds=0, drain_seconds=SECONDS) as cluster:
        first = cluster.start("a", auth=str(file))
        cluster.wait_for(a="serving")
        assert [member.cookie for member in cluster.members().values()] == [""]
        with cluster.client(namespace, token=token) as client:
            client.set(keys, blocks_of(keys, BLOCK_BYTES))
        # Later no node accepts the blocks of node b, so its drain lasts until its deadline.
        cluster.start("b", auth=str(file), drain_seconds=2)
        cluster.wait_for(a="serving", b="serving")
        wait_until(lambda: "joined=[b]" in first.log_text())  # before that, no node would accept the blocks of a
        first.stop()  # this drains first
        cluster.wait_for(b="serving")
        with cluster.client(namespace, token=token) as client:
            assert client.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)
            with pytest.raises(NotAuthorized):
                KVStoreClient(cluster.nodes["b"].endpoint, namespace)

        cluster.start("c", auth=str(foreign))
        cluster.wait_for(b="serving", c="serving")
        leaving = cluster.nodes["b"]
        wait_until(lambda: "joined=[c]" in leaving.log_text())
        leaving.stop()
        assert wait_until(lambda: "this server wants a token" in leaving.log_text())
        with KVStoreClient(cluster.nodes["c"].endpoint, namespace, token=elsewhere) as client:
            assert client.get(keys).hit == 0


def test_a_member_without_a_secret_does_not_start(etcd: Etcd, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    add(file, "engine", "a", ["read"])
    lines = [line for line in file.read_text().splitlines() if not line.startswith("member_secret")]
    file.write_text("\n".join(lines))
    with (
        Cluster(etcd.url("no-secret"), tmp_path) as cluster,
        pytest.raises(AssertionError, match="has no member_secret, which the members"),
    ):
        cluster.start("a", auth=str(file))
