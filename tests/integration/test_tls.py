"""TLS on the data port, with real servers, clients and certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from cryptography import x509

from kvstore.node.tls import HANG_S, SILENT_S
from kvstore.tls import TLSOptions
from kvstore.tls.outgoing import dial
from kvstore_client import AsyncKVStoreClient, ConnectionLost, KVStoreClient, KVStoreError, Namespace, ProtocolError
from tests.support.certificates import Authority, Issued
from tests.support.clock import Clock
from tests.support.harness import (
    GET,
    HELLO,
    PROTOCOL,
    WELCOME,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    pack,
    wait_until,
)

BLOCK_BYTES = 64 << 10


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def tls_flags(issued: Issued, *more: str) -> tuple[str, ...]:
    return "--tls-cert", issued.cert, "--tls-key", issued.key, *more


@pytest.fixture(scope="module")
def shared_server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of two shards for the module, with TLS and HTTPS."""
    flags = tls_flags(authority.issue("server"), "--http", "127.0.0.1:0", "--shards", "2")
    server = Server(tmp_path_factory.mktemp("server") / "server.log", "--memory", "128MiB", "--segment", "8MiB", *flags)
    yield server
    server.kill()


def stores_and_reads(client: KVStoreClient, count: int = 64, first: int = 0) -> None:
    keys = make_keys(count, first=first)
    blocks = blocks_of(keys, client.namespace.block_bytes)
    assert client.set(keys, blocks).error == 0
    client.sync()
    out = np.zeros((count, client.namespace.block_bytes), dtype=np.uint8)
    assert client.get_into(keys, out).all()
    assert [bytes(row) for row in out] == blocks


def refusal(server: Server, namespace: Namespace, **options: str) -> str:
    """Return the error of a client that is expected not to connect."""
    with pytest.raises(KVStoreError) as caught:
        KVStoreClient(server.endpoint, namespace, timeout_s=5, **options)
    return str(caught.value)


def served_serial(server: Server) -> int:
    """Return the serial number of the certificate that the server shows on a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((server.host, server.port), 5) as sock,
        context.wrap_socket(sock) as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


# ---- what works --------------------------------------------------------------------------------------------------


def test_blocks_are_transferred_over_tls(server: Server, authority: Authority, namespace: Namespace) -> None:
    assert server.ready_line.startswith("kvstore-server ready tls://127.0.0.1:")
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
        stores_and_reads(client)
        assert client.stats.path == "tls"
        assert {shard.endpoint.partition("://")[0] for shard in client.shards()} == {"tls"}
        keys = make_keys(64)
        assert dict(client.stream_get(keys)) == dict(enumerate(blocks_of(keys, BLOCK_BYTES)))
        assert client.delete(keys) == 64


def test_large_blocks_over_many_connections(server: Server, authority: Authority, new_namespace: MakeNamespace) -> None:
    with KVStoreClient(
        f"localhost:{server.port}", new_namespace(3 << 20), tls_ca=authority.file, connections=3
    ) as client:
        stores_and_reads(client, count=12)


def test_asyncio_through_tls(server: Server, authority: Authority, namespace: Namespace) -> None:
    keys = make_keys(16)
    blocks = blocks_of(keys, BLOCK_BYTES)

    async def store_and_read() -> list[object]:
        async with AsyncKVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
            await client.set(keys, blocks, deferred=False)
            return list((await client.get(keys)).blocks)

    assert asyncio.run(store_and_read()) == blocks


def test_nodes_behind_a_dns_name_are_verified_by_that_name(
    start_server: StartServer, authority: Authority, namespace: Namespace
) -> None:
    server = start_server(*tls_flags(authority.issue("service", hosts=("localhost",))))  # and not for 127.0.0.1
    with KVStoreClient(f"dns://localhost:{server.port}", namespace, tls_ca=authority.file) as client:
        stores_and_reads(client)
        assert client.stats.path == "tls"


def test_a_local_client_switches_from_tls_to_shared_memory(
    start_server: StartServer, authority: Authority, namespace: Namespace, tmp_path: Path
) -> None:
    server = start_server(*tls_flags(authority.issue("local")), "--unix-socket", str(tmp_path / "kv.sock"))
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
        stores_and_reads(client)
        assert client.stats.path == "shared memory"
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:  # libzmq needs no TLS there either
        dealer.linger = 0
        dealer.connect(f"ipc://{tmp_path}/kv.sock")
        assert ask_hello(dealer) == WELCOME


def ask_hello(dealer: zmq.Socket[bytes]) -> int:
    """Send HELLO, and return the type of the reply."""
    dealer.send(pack(HELLO, 0, PROTOCOL, b"", "libzmq"))
    assert dealer.poll(10_000), "no answer"
    kind: int = msgspec.msgpack.decode(dealer.recv())[0]
    return kind


def test_libzmq_can_use_a_tunnel(server: Server, authority: Authority) -> None:
    """A tunnel is a program that makes the TLS connection for libzmq. Here it is the TLS process of a client."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        plain, _ = listener.accept()
        joined = dial(TLSOptions(authority.file), (server.host, server.port), 5)
        with plain, joined, ThreadPoolExecutor(2) as threads:
            threads.submit(pump, plain, joined)
            threads.submit(pump, joined, plain)
            try:
                assert ask_hello(dealer) == WELCOME
            finally:
                for sock in (plain, joined):
                    sock.shutdown(socket.SHUT_RDWR)


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def test_a_child_process_opens_its_own_connections(server: Server, authority: Authority, namespace: Namespace) -> None:
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
        stores_and_reads(client)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                stores_and_reads(client, first=1000)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stores_and_reads(client, first=2000)


def test_the_connection_process_ends_with_its_client(server: Server, authority: Authority) -> None:
    code = (
        "import sys, psutil; from kvstore_client import KVStoreClient, Namespace\n"
        "namespace = Namespace(model='m', dtype='uint8', block_tokens=1, block_bytes=4096)\n"
        "client = KVStoreClient(sys.argv[1], namespace)\n"
        "print(*[child.pid for child in psutil.Process().children()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.endpoint],
        env=environment(KVSTORE_TLS_CA=authority.file),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (pid,) = map(int, done.stdout.split())
    wait_until(lambda: not psutil.pid_exists(pid), what="the TLS process ends")
    assert not done.stderr


def test_commands_accept_the_ca(server: Server, authority: Authority) -> None:
    command = [sys.executable, "-m", "kvstore_cli", "ping", "--endpoint", server.endpoint]
    variables = environment()
    done = subprocess.run([*command, "--tls-ca", authority.file], env=variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    without = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert without.returncode == 1 and "give the CA that signed it" in without.stderr


def test_http_speaks_tls_too(server: Server, authority: Authority) -> None:
    assert server.http_url.startswith("https://")
    context = ssl.create_default_context(cafile=authority.file)
    with urllib.request.urlopen(f"{server.http_url}/readyz", timeout=10, context=context) as answer:
        assert answer.status == 200
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(server.http_url.replace("https", "http"), timeout=10)


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_a_client_without_tls_gets_an_error_that_recommends_it(server: Server, namespace: Namespace) -> None:
    with pytest.raises(ProtocolError, match=r"it reports: this port speaks TLS 1\.3 only.*--tls-ca"):
        KVStoreClient(f"tcp://{server.host}:{server.port}", namespace, timeout_s=5)


def test_tls_1_2_is_refused(server: Server, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((server.host, server.port), 5) as sock,
        pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"),
    ):
        context.wrap_socket(sock, server_hostname=server.host)


def test_a_server_without_tls_is_not_used(
    start_server: StartServer, authority: Authority, namespace: Namespace
) -> None:
    server = start_server()
    with pytest.raises(ConnectionLost, match="it does not speak TLS"):
        KVStoreClient(f"tls://{server.host}:{server.port}", namespace, tls_ca=authority.file, timeout_s=5)


def test_an_untrusted_certificate_is_explained(start_server: StartServer, tmp_path: Path, namespace: Namespace) -> None:
    """A server gets one bad certificate after another, and uses each from the next connection on."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    good = authority.issue("node")
    server = start_server(*tls_flags(good))
    assert "is not signed by the CA in" in refusal(server, namespace, tls_ca=other.file)
    assert "is not signed by a CA that this system trusts" in refusal(server, namespace)
    for change, message in (
        ({"hosts": ("cache-1.example",)}, "the server's certificate is not for 127.0.0.1"),
        ({"days": -1}, "has expired: renew it on the server"),
        ({"own": True}, "is not signed by the CA in"),
    ):
        before = served_serial(server)
        authority.issue("node", **change)  # type: ignore[arg-type]
        server.signal(signal.SIGHUP)
        wait_until(lambda before=before: served_serial(server) != before, what="the new certificate is in use")
        assert message in refusal(server, namespace, tls_ca=authority.file)


def test_client_certificates_can_be_required(
    start_server: StartServer, tmp_path: Path, authority: Authority, namespace: Namespace
) -> None:
    other = Authority(tmp_path, "other").issue("stranger")
    server = start_server(*tls_flags(authority.issue("mutual"), "--tls-client-ca", authority.file))
    assert "the server asks for a certificate" in refusal(server, namespace, tls_ca=authority.file)
    stranger = {"tls_ca": authority.file, "tls_cert": other.cert, "tls_key": other.key}
    assert "the server refuses this client's certificate" in refusal(server, namespace, **stranger)
    mine = authority.issue("engine", hosts=())
    with KVStoreClient(
        server.endpoint, namespace, tls_ca=authority.file, tls_cert=mine.cert, tls_key=mine.key
    ) as client:
        stores_and_reads(client)


def test_a_server_does_not_start_with_unusable_files(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("locked", password=b"x")
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "--port", "0", "--memory", "32MiB", "--tls-cert", cert, "--tls-key", key],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and f"TLS: {key}: the key needs a password" in done.stderr, done.stderr


# ---- while it runs -----------------------------------------------------------------------------------------------


def test_a_new_certificate_drops_no_connection(start_server: StartServer, tmp_path: Path, namespace: Namespace) -> None:
    authority = Authority(tmp_path)
    server = start_server(*tls_flags(authority.issue("node")))
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
        stores_and_reads(client)
        first = served_serial(server)
        authority.issue("node")  # without a signal, because the files have changed
        wait_until(lambda: served_serial(server) != first, what="the new certificate is in use")
        second = served_serial(server)
        Path(tmp_path / "node.crt").write_text("nothing")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "the old one stays" in server.log_text(), what="the bad certificate is logged")
        assert served_serial(server) == second
        stores_and_reads(client, first=500)
        assert client.stats.reconnects == 0 and client.stats.failures == 0
        assert "PRIVATE" not in server.log_text()


def tls_metrics(server: Server, authority: Authority) -> dict[str, float]:
    """Return the metrics of the TLS processes, summed over the shards. The names lack the prefix ``kvstore_tls_``."""
    context = ssl.create_default_context(cafile=authority.file)
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10, context=context) as answer:
        lines = answer.read().decode().splitlines()
    values: dict[str, float] = {}
    for line in lines:
        if line.startswith("kvstore_tls_"):
            name = line.partition("{")[0].removeprefix("kvstore_tls_")
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values


def test_a_scrape_has_the_tls_processes_metrics(
    authority: Authority, namespace: Namespace, start_server: StartServer
) -> None:
    server = start_server(*tls_flags(authority.issue("metrics"), "--http", "127.0.0.1:0"))
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
        stores_and_reads(client)
        with socket.create_connection((server.host, server.port), 5) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert stranger.recv(1)
        values = wait_until(lambda: (found := tls_metrics(server, authority))["failed_handshakes_total"] and found)
        assert values["failed_handshakes_total"] == values["up"] == 1
        assert values["connections"] == values["handshakes_total"] >= 1
        assert values["cpu_seconds_total"] > 0
        processes = psutil.Process(server.process.pid).children()
        tls = next(each for each in processes if "kvstore.tls.accepting" in " ".join(each.cmdline()))
        tls.kill()
        wait_until(lambda: tls_metrics(server, authority)["handshakes_total"] < values["handshakes_total"])
        wait_until(lambda: tls_metrics(server, authority)["up"] == 1, what="another process accepts connections")


def test_unfinished_handshakes_keep_no_client_out(server: Server, authority: Authority, namespace: Namespace) -> None:
    silent = []
    try:
        for _ in range(300):  # more than the limit of handshakes
            sock = socket.create_connection((server.host, server.port), 5)
            sock.sendall(b"\x16\x03\x01")
            silent.append(sock)
        with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
            stores_and_reads(client)
            shards = client.info().shards
            assert all(shard.connections < 16 for shard in shards), "an unfinished handshake is no shard's connection"
        wait_until(lambda: "too many handshakes" in server.log_text(), what="the oldest ones give way")
    finally:
        for sock in silent:
            sock.close()


def own_bytes(process: psutil.Process) -> int:
    """Return the memory of a process without files and without shared memory, such as that of its blocks."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def test_a_client_that_reads_nothing_costs_the_node_little(
    server: Server, authority: Authority, namespace: Namespace
) -> None:
    """The client asks for 16 MiB eight times and reads nothing, so its shard stops reading from that client."""
    keys = make_keys(256)
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file) as client:
        client.set(keys, blocks_of(keys, BLOCK_BYTES))
        client.sync()
        before = {process.pid: own_bytes(process) for process in server.shards()}
        context = ssl.create_default_context(cafile=authority.file)
        with RawClient(server, tls=context) as raw:
            raw.hello(namespace.canonical())
            for number in range(1, 9):
                raw.send(pack(GET, number, 60_000, len(keys), len(keys[0])), b"".join(keys))
            for _ in range(20):
                grown = sum(own_bytes(process) - before[process.pid] for process in server.shards())
                assert grown < 32 << 20, "a quarter of what it has asked for"
                stores_and_reads(client, count=8, first=5000)


def test_a_hanging_tls_process_is_reported_and_replaced(
    start_server: StartServer, authority: Authority, namespace: Namespace, tmp_path: Path
) -> None:
    clock = Clock(tmp_path / "clock")
    flags = tls_flags(authority.issue("hanging"), "--http", "127.0.0.1:0")
    server = start_server(*flags, **clock.environment)
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file, timeout_s=5) as client:
        stores_and_reads(client)
        assert tls_metrics(server, authority)["up"] == 1 and readiness(server, authority) == (200, "")
        (process,) = [
            child for child in server.shards() if any("kvstore.tls.accepting" in part for part in child.cmdline())
        ]
        process.suspend()
        clock.advance(SILENT_S + 1)
        assert tls_metrics(server, authority)["up"] == 0
        status, reason = readiness(server, authority)
        assert status == 503 and "TLS: its process has hung for" in reason
        clock.advance(HANG_S)
        wait_until(lambda: "TLS process 0 is serving again" in server.log_text(), what="it is replaced")
        assert "has hung for" in server.log_text()
        wait_until(lambda: readiness(server, authority) == (200, ""), what="the node is ready again")
        wait_until(lambda: readable(client), what="the client connects again")


def readiness(server: Server, authority: Authority) -> tuple[int, str]:
    """Return the status of /readyz, and the reason if shard 0 is not ready."""
    context = ssl.create_default_context(cafile=authority.file)
    try:
        with urllib.request.urlopen(f"{server.http_url}/readyz", timeout=10, context=context) as answer:
            return answer.status, json.load(answer)["shards"][0]["reason"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["shards"][0]["reason"]


def readable(client: KVStoreClient) -> bool:
    """Return whether the blocks that `stores_and_reads` has set are there."""
    try:
        return bool(client.contains(make_keys(64)).all())
    except KVStoreError:
        return False


def test_a_dead_tls_process_is_replaced(start_server: StartServer, authority: Authority, namespace: Namespace) -> None:
    server = start_server(*tls_flags(authority.issue("dying")))
    with KVStoreClient(server.endpoint, namespace, tls_ca=authority.file, timeout_s=5) as client:
        stores_and_reads(client)
        (process,) = [
            child for child in server.shards() if any("kvstore.tls.accepting" in part for part in child.cmdline())
        ]
        process.kill()
        wait_until(lambda: "TLS process 0 is serving again" in server.log_text(), what="it is replaced")
        wait_until(lambda: readable(client), what="the client connects again, and no block is lost")
    assert server.stop() == 0
