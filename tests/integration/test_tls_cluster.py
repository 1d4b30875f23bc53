"""A cluster whose nodes, clients and etcd use TLS for all connections, with users and their roles in etcd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.cluster.etcd import EtcdDirectory
from kvstore.cluster.members import DirectoryError
from kvstore.cluster.url import EtcdOptions, EtcdURL
from kvstore_client import ConnectionLost, KVStoreClient
from tests.support.certificates import Authority, Issued
from tests.support.cluster import Cluster, nodes_of, share_of
from tests.support.etcd import Etcd
from tests.support.harness import ROOT, MakeNamespace, blocks_of, make_keys, wait_until

NAME = "prod"
PASSWORDS = {"root": "root's", "kvstore-node": "the node's", "kvstore-client": "the client's"}
BLOCK = 4096
# The roles are those of docs/security.md. Users get passwords here.
ROLES = [
    line.removeprefix("etcdctl ").replace("NAME", NAME)
    for line in (ROOT / "docs" / "security.md").read_text().splitlines()
    if line.startswith(("etcdctl role ", "etcdctl user grant-role "))
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Issued:
    return authority.issue("node")


@pytest.fixture(scope="module")
def secure_etcd(authority: Authority, issued: Issued, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd with TLS, client certificates, users and roles."""
    with Etcd(tmp_path_factory.mktemp("etcd"), certificate=issued, ca=authority.file) as etcd:
        for user, password in PASSWORDS.items():
            etcd.control("user", "add", f"{user}:{password}")
        etcd.control("user", "grant-role", "root", "root")
        assert len(ROLES) == 6
        for command in ROLES:
            etcd.control(*command.split())
        etcd.control("auth", "enable")
        yield etcd


def url_of(etcd: Etcd, authority: Authority, folder: Path, user: str) -> EtcdURL:
    """Return the cluster's URL for a user."""
    file = folder / f"{user}.password"
    file.write_text(f"{PASSWORDS[user]}\n")
    mine = authority.issue(user, hosts=(), common_name=False)
    return EtcdURL(((etcd.host, etcd.port),), NAME, EtcdOptions(authority.file, *mine, user, str(file)))


@pytest.fixture
def url(secure_etcd: Etcd, authority: Authority, tmp_path: Path) -> EtcdURL:
    return url_of(secure_etcd, authority, tmp_path, "kvstore-node")


def test_a_cluster_works_with_tls_on_every_connection(
    secure_etcd: Etcd, authority: Authority, issued: Issued, url: EtcdURL, tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    """A second node joins and is filled, and then leaves. Its blocks move over TLS both times."""
    flags = {"tls_cert": issued.cert, "tls_key": issued.key, "tls_client_ca": authority.file}
    client_url = str(url_of(secure_etcd, authority, tmp_path, "kvstore-client"))
    tls = {"tls_ca": authority.file, "tls_cert": issued.cert, "tls_key": issued.key}
    namespace = new_namespace(BLOCK)
    keys = make_keys(400)
    blocks = blocks_of(keys, BLOCK)
    with Cluster(str(url), tmp_path, grace_seconds=60, **flags) as cluster:
        cluster.start("a")
        cluster.wait_for(a="serving")  # at once, because it is the only node
        with KVStoreClient(client_url, namespace, **tls) as client:  # type: ignore[arg-type]
            assert client.set(keys, blocks, deferred=False).error == 0
            cluster.start("b", drain_seconds=20)
            cluster.wait_for_members("a", "b")
            moved = share_of(cluster.membership(), "b", keys)
            assert moved
            at_b = cluster.nodes["b"].endpoint
            assert at_b.startswith("tls://")
            with KVStoreClient(at_b, namespace, **tls) as alone:  # type: ignore[arg-type]
                wait_until(lambda: alone.contains(moved).all(), what="node a fills node b")
            assert client.stats.path == "tls"
            wait_until(lambda: nodes_of(client) == {"a", "b"}, what="the client sees both")
            later = make_keys(100, first=1000)
            assert client.set(later, blocks_of(later, BLOCK), deferred=False).error == 0
            assert cluster.nodes["b"].stop() == 0  # the drain moves to node a the blocks that only b has
            cluster.wait_for_members("a")
            keys, blocks = [*keys, *later], [*blocks, *blocks_of(later, BLOCK)]
            out = np.zeros((len(keys), BLOCK), dtype=np.uint8)
            assert client.get_into(keys, out).all()
            assert [bytes(row) for row in out] == blocks
        log = cluster.nodes["a"].log_text() + cluster.nodes["b"].log_text()
        assert not any(password in log for password in PASSWORDS.values())
        with pytest.raises(ConnectionLost, match=r"TLS 1\.3 only"):  # no fallback without TLS
            KVStoreClient(client_url, namespace, timeout_s=2)


def test_a_password_may_change_while_a_node_runs(secure_etcd: Etcd, url: EtcdURL) -> None:
    """After the change of its password, etcd no longer accepts the node's token, as after the token has expired."""
    directory = EtcdDirectory(url, 2.0)
    lease = directory.grant(30)
    directory.put_record("x", b"{}", lease)
    assert url.options is not None
    Path(url.options.password_file).write_text("another")
    root = f"root:{PASSWORDS['root']}"
    secure_etcd.control("user", "passwd", "kvstore-node", "--interactive=false", user=root, says="another\n")
    try:
        assert "x" in directory.records()[1]
        directory.withdraw("x", lease)
        directory.close()
    finally:
        before = PASSWORDS["kvstore-node"]
        secure_etcd.control("user", "passwd", "kvstore-node", "--interactive=false", user=root, says=f"{before}\n")


def test_a_clients_user_may_read_but_not_write(secure_etcd: Etcd, authority: Authority, tmp_path: Path) -> None:
    directory = EtcdDirectory(url_of(secure_etcd, authority, tmp_path, "kvstore-client"), 2.0)
    directory.records()
    with pytest.raises(DirectoryError, match="permission denied"):
        directory.put_record("x", b"{}", 0)
    other = EtcdDirectory(directory.url._replace(name="other"), 2.0)
    with pytest.raises(DirectoryError, match="permission denied"):
        other.records()
    directory.close()
    other.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ca": ""}, "its certificate cannot be verified"),
        ({"cert": "", "key": ""}, "it may ask for a certificate"),
        ({"cert": "with a common name"}, "issue the certificate without a Common Name"),
        ({"user": ""}, "user name is empty|permission denied"),
        ({"password_file": os.devnull}, "refuses the user 'kvstore-node'"),
    ],
)
def test_a_user_without_access_to_etcd_gets_the_reason(
    url: EtcdURL, issued: Issued, change: dict[str, str], message: str
) -> None:
    if change.get("cert"):
        change = issued._asdict()
    assert url.options is not None
    directory = EtcdDirectory(url._replace(options=url.options._replace(**change)), 2.0)
    with pytest.raises(DirectoryError, match=message):
        directory.records()
    directory.close()
