"""Endpoints with TLS, the files that it needs, etcd's URL with TLS, and the loop that connects TLS connections to
socket pairs."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.cluster.etcd_access import EtcdAccess
from kvstore.cluster.members import DirectoryError
from kvstore.cluster.schemes import parse_cluster_url
from kvstore.cluster.url import EtcdOptions, EtcdURL
from kvstore.node.children import StartError
from kvstore.node.settings import ConfigError
from kvstore.node.tls import NodeTLS
from kvstore.tls import TLSError, TLSOptions, accepting, relay
from kvstore.tls.certificate import Certificate
from kvstore.tls.contexts import client_context
from kvstore.tls.handing import Handed, hand_over, pair
from kvstore.tls.loop import Loop
from kvstore.tls.outgoing import dial
from kvstore_client.endpoints import Endpoints, parse_endpoints, with_tls
from tests.support.certificates import Authority
from tests.support.harness import stays, wait_until
from tests.support.settings import load


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


# ---- endpoints ---------------------------------------------------------------------------------------------------


def completed(endpoint: str | list[str], **files: str | None) -> Endpoints:
    given: dict[str, str | None] = {"tls_ca": None, "tls_cert": None, "tls_key": None, **files}
    return with_tls(parse_endpoints(endpoint), **given)


def test_tls_is_used_where_requested(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("tcp://a:1").tls is None
    assert completed("a:1").tls is None
    assert completed("tls://a:1").tls == TLSOptions()
    assert completed(["tls://a:1", "tls://[fd00::1]:2/"]) == Endpoints(
        [("a", 1), ("fd00::1", 2)], scheme="tls", tls=TLSOptions()
    )
    assert completed("a:1", tls_ca=authority.file).tls == TLSOptions(authority.file)
    assert completed("etcd://a:1/n", tls_ca="system").tls == TLSOptions("system")
    assert completed("dns://kv.example:1", tls_ca=authority.file).tls == TLSOptions(
        authority.file, server_name="kv.example"
    )
    monkeypatch.setenv("KVSTORE_TLS_CA", authority.file)
    assert completed("etcd://a:1/n").tls == TLSOptions(authority.file)


def test_tls_is_never_skipped_silently(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tcp:// asks for a plain connection: expected tls://"):
        completed("tcp://a:1", tls_ca=authority.file)
    with pytest.raises(ValueError, match="before each of the nodes, or before none"):
        completed(["tls://a:1", "b:1"])
    monkeypatch.setenv("KVSTORE_TLS_CA", authority.file)
    with pytest.raises(ValueError, match="KVSTORE_TLS_CA="):
        completed("tcp://a:1")


def test_files_are_checked_before_use(authority: Authority) -> None:
    with pytest.raises(ValueError, match=r"tls_ca='/none.pem': No such file"):
        completed("tls://a:1", tls_ca="/none.pem")
    with pytest.raises(ValueError, match="expected both, or none"):
        completed("tls://a:1", tls_cert=authority.file)
    with pytest.raises(TypeError, match="expected the path of a PEM file"):
        completed("tls://a:1", tls_ca=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("node.crt", "other.key"), "is not the key of the certificate in"),
        (("node.crt", "locked.key"), "the key needs a password"),
        (("node.crt", "none.key"), "No such file"),
        (("node.key", "node.key"), "cannot be used"),
        (("node.crt", "node.key", "other.key"), "holds no CA"),
    ],
)
def test_an_unusable_certificate_is_reported_with_the_reason(
    authority: Authority, tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    for name, password in (("node", None), ("other", None), ("locked", b"x")):
        authority.issue(name, password=password)
    cert, key, *client_ca = (str(tmp_path / name) for name in files)
    with pytest.raises(TLSError, match=message):
        Certificate(cert, key, *client_ca or [""])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tls_cert": "c"}, "--tls-cert c: TLS needs a certificate and its key: give --tls-key too"),
        ({"tls_key": "k"}, "give --tls-cert too"),
        ({"tls_client_ca": "a"}, "give --tls-cert too"),
    ],
)
def test_conflicting_settings_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, {}, flags)


def test_nixl_does_not_bypass_tls(authority: Authority) -> None:
    issued = authority.issue("node")
    config = load(None, {}, {"tls_cert": issued.cert, "tls_key": issued.key, "nixl": True})
    with pytest.raises(StartError, match="clients would read blocks without TLS"):
        NodeTLS(config, [], selectors.DefaultSelector())


# ---- etcd --------------------------------------------------------------------------------------------------------


def test_an_etcd_url_with_tls_reads_back_as_written() -> None:
    url = "etcds://a:1,b:2/n?ca=/etc/kv%20store/ca.pem&cert=/c&key=/k&user=kvstore-node&password_file=/p"
    parsed = EtcdURL((("a", 1), ("b", 2)), "n", EtcdOptions("/etc/kv store/ca.pem", "/c", "/k", "kvstore-node", "/p"))
    assert parse_cluster_url(url) == parsed
    assert str(parsed) == url
    assert str(parse_cluster_url("etcds://a:1/n")) == "etcds://a:1/n"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcds://a:1/n?password=secret", "can be read by every user of this host"),
        ("etcd://a:1/n?ca=/x", "expected etcds://"),
        ("etcds://a:1/n?cafile=/x", "options cafile: expected each at most once, and only ca, cert"),
        ("etcds://a:1/n?ca=/x&ca=/y", "unknown or repeated"),
        ("etcds://a:1/n?ca", "expected NAME=VALUE"),
        ("etcds://a:1", "expected etcds://HOST:PORT"),
    ],
)
def test_an_unusable_etcd_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_cluster_url(url)
    assert "secret" not in str(caught.value)


def test_missing_parts_of_the_url_come_from_variables(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    url = EtcdURL((("a", 1),), "n", EtcdOptions())
    monkeypatch.setenv("KVSTORE_ETCD_CA", authority.file)
    assert EtcdAccess(url).endpoint("a:1").session.verify == authority.file
    monkeypatch.setenv("KVSTORE_ETCD_USER", "me")
    with pytest.raises(DirectoryError, match="no password for the user 'me'"):
        EtcdAccess(url)
    monkeypatch.setenv("KVSTORE_ETCD_PASSWORD", "secret")
    assert EtcdAccess(url)._password() == "secret"
    with pytest.raises(DirectoryError, match="/none cannot be read"):
        EtcdAccess(url._replace(options=EtcdOptions(ca="/none")))


# ---- handing over and joining ------------------------------------------------------------------------------------


def test_a_connection_is_handed_over_with_its_address() -> None:
    give, take = pair()
    with give, take:
        handed = Handed(take)
        with pytest.raises(BlockingIOError):
            handed.accept()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                hand_over(give, theirs, ("fd00::1", 4711))
            sock, address = handed.accept()
            with sock:
                assert address == ("fd00::1", 4711)
                ours.sendall(b"x")
                assert sock.recv(1) == b"x"


class Node:
    """The loop of a TLS process, on a thread, and the shard's end of the connections that it passes on."""

    def __init__(self, authority: Authority) -> None:
        issued = authority.issue("node")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.listener.setblocking(False)
        self.give, self.take = pair()
        self.shard = Handed(self.take)
        self.loop = Loop()
        certificate = Certificate(issued.cert, issued.key, "")
        self.acceptor = accepting.Acceptor(self.loop, self.listener, self.give, certificate, b"refused")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.loop.run, args=(self._is_over, lambda: None))
        self._thread.start()
        self._context = client_context(TLSOptions(authority.file))

    def _is_over(self) -> bool:
        """Whether the loop should end. The loop asks this between two steps, as in a TLS process."""
        return self._over.is_set() and self.loop.idle

    def client(self) -> ssl.SSLSocket:
        return self._context.wrap_socket(socket.create_connection(self.address, 5), server_hostname="127.0.0.1")

    def accepted(self) -> socket.socket:
        """Return the shard's end of the next connection."""

        def accept() -> socket.socket | None:
            try:
                return self.shard.accept()[0]
            except BlockingIOError:
                return None

        sock: socket.socket = wait_until(accept)
        sock.settimeout(5)
        return sock

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        assert not self._thread.is_alive(), "its connections end with their clients"
        self.listener.close()
        self.give.close()
        self.take.close()


@pytest.fixture
def node(authority: Authority) -> Iterator[Node]:
    node = Node(authority)
    yield node
    node.close()


def test_a_slow_reader_slows_the_writer(node: Node) -> None:
    """In both directions, a writer must wait for a slow reader. Afterwards all bytes of the client arrive, in order."""
    data = os.urandom(1 << 20)
    with node.client() as client, node.accepted() as shard:
        for writer, reader in ((client, shard), (shard, client)):
            writer.settimeout(0.5)
            sent = 0
            with pytest.raises(TimeoutError):
                while True:
                    sent += writer.send(data[sent % len(data) :])
            assert sent < 64 << 20, "what nobody reads must not be taken"
            assert node.loop.kept_bytes <= 3 * (relay.READ_BYTES + relay.RELAY_CHUNK_BYTES)
            if writer is client:
                got = bytearray()
                while len(got) < sent - (64 << 10):  # only a part of the last record may have been sent
                    got += reader.recv(1 << 20)
                expected = data * (len(got) // len(data) + 1)
                assert got == expected[: len(got)]


def test_both_directions_continue_after_both_were_full(node: Node, authority: Authority) -> None:
    """The TLS process of each side has bytes that the other one does not accept yet. In the end, each side must get all
    bytes."""
    data = os.urandom(24 << 20)
    with ThreadPoolExecutor(1) as threads:
        dialling = threads.submit(dial, TLSOptions(authority.file), node.address, 5)
        shard = node.accepted()
        shard.sendall(b"!")  # the server speaks first
        client = dialling.result()
    with client, shard:
        assert client.recv(1) == b"!"
        client.settimeout(20)
        shard.settimeout(20)
        writers = [threading.Thread(target=each.sendall, args=[data], daemon=True) for each in (client, shard)]
        for writer in writers:
            writer.start()
        # Both sides fill the buffers between them. If a writer ends here, the data fit into the buffers: the test must
        # send more.
        stays(lambda: all(writer.is_alive() for writer in writers), 1.0)
        for reader in (client, shard):
            got = bytearray()
            while len(got) < len(data):
                got += reader.recv(1 << 20)
            assert got == data
        for writer in writers:
            writer.join()


def test_the_last_bytes_of_a_shard_reach_the_client(node: Node) -> None:
    with node.client() as client:
        with node.accepted() as shard:
            shard.sendall(b"goodbye" * 50_000)
        got = b""
        while data := client.recv(1 << 16):
            got += data
    assert got == b"goodbye" * 50_000
    wait_until(lambda: node.loop.idle, what="nothing is left of it")


def test_a_handshake_has_a_deadline(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "SHAKING_S", 0.2)
    with socket.create_connection(node.address, 5) as slow:
        slow.sendall(b"\x16\x03\x01\x02")
        with contextlib.suppress(ConnectionError):
            assert slow.recv(1) == b""
    wait_until(lambda: node.loop.idle)


def test_a_client_without_tls_gets_an_error_that_says_so(node: Node) -> None:
    with socket.create_connection(node.address, 5) as plain:
        plain.sendall(b"\xff" + bytes(63))
        assert plain.recv(100) == b"refused"
        assert plain.recv(100) == b""


def test_the_address_with_most_handshakes_loses_some(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "MOST_SHAKING", 4)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.create_connection(node.address, 5, source_address=("127.0.0.2", 0)))
        wait_until(lambda: len(node.acceptor.shaking) == 1)
        many = [stack.enter_context(socket.create_connection(node.address, 5)) for _ in range(6)]
        wait_until(lambda: sum(not client.address[0].endswith(".2") for client in node.acceptor.shaking) == 3)
        assert any(client.address[0] == "127.0.0.2" for client in node.acceptor.shaking)
        many[0].settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert many[0].recv(1) == b"", "the oldest one"
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)
