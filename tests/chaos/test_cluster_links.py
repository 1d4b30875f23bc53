"""The network of the clusters' tests works as described: packets are lost or arrive late, and TCP still delivers all
bytes."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.harness import wait_until
from tests.support.network import Network, need, unavailable

PORT = 5000
MiB = 1 << 20


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need(unavailable())
    with Network() as network:
        for host in ("a", "b", "c"):
            network.add(host)
        yield network


@contextmanager
def echo(network: Network, host: str) -> Iterator[None]:
    """Run a server that sends back what it receives, on every connection."""

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(MiB):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with network.inside(host):
        listener = socket.create_server((network.address(host), PORT))
    accepting = threading.Thread(target=accept)
    accepting.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    accepting.join(10)
    listener.close()


def connect(network: Network, host: str, to: str, timeout_s: float = 5.0) -> socket.socket:
    with network.inside(host):
        return socket.create_connection((network.address(to), PORT), timeout_s)


def ask(sock: socket.socket, said: bytes = b"?") -> float:
    """Return the seconds until these bytes come back."""
    start = time.monotonic()
    sock.sendall(said)
    assert sock.recv(len(said)) == said
    return time.monotonic() - start


def silent(sock: socket.socket, for_s: float) -> bool:
    """Return whether nothing arrives in this time, not even a reset."""
    sock.settimeout(for_s)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    return False


def exchange(sock: socket.socket, size: int) -> float:
    """Send this many bytes and read them back at the same time; all must arrive. Returns the seconds."""
    data = os.urandom(size)
    sender = threading.Thread(target=sock.sendall, args=(data,))
    start = time.monotonic()
    sender.start()
    digest, received = hashlib.sha256(), 0
    while received < size:
        part = sock.recv(MiB)
        assert part
        digest.update(part)
        received += len(part)
    sender.join()
    assert digest.digest() == hashlib.sha256(data).digest()
    return time.monotonic() - start


def test_hosts_reach_each_other_and_nothing_else(network: Network) -> None:
    with echo(network, "a"):
        for host in ("b", "c"):
            with connect(network, host, "a") as sock:
                assert ask(sock) < 0.5
    with network.inside("a"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(OSError):
        sock.connect(("192.0.2.1", 9))
    said = subprocess.run([*network.command("b"), "ip", "-br", "addr"], capture_output=True, text=True, check=True)
    assert network.address("b") in said.stdout and network.address("a") not in said.stdout


def test_a_cut_hosts_packets_vanish_and_its_connections_survive(network: Network) -> None:
    with echo(network, "a"), connect(network, "b", "a") as sock, connect(network, "c", "a") as other:
        ask(sock)
        network.cut("b")
        sock.sendall(b"?")
        assert silent(sock, 0.5)
        with pytest.raises(TimeoutError):
            connect(network, "b", "a", 0.5)
        assert ask(other) < 0.5
        network.heal("b")
        sock.settimeout(10.0)
        assert sock.recv(1) == b"?", "what was sent meanwhile"
        ask(sock)


def test_two_separated_hosts_reach_the_others(network: Network) -> None:
    with echo(network, "a"), connect(network, "b", "a") as sock, connect(network, "c", "a") as other:
        ask(sock)
        network.separate("a", "b")
        sock.sendall(b"?")
        assert silent(sock, 0.5)
        with pytest.raises(TimeoutError):
            connect(network, "b", "a", 0.5)
        assert ask(other) < 0.5
        network.reunite("a", "b")
        sock.settimeout(10.0)
        assert sock.recv(1) == b"?"
        connect(network, "b", "a").close()


def test_an_impaired_host_answers_late_and_every_byte_arrives(network: Network) -> None:
    with echo(network, "a"), connect(network, "b", "a", 30.0) as sock, connect(network, "c", "a") as other:
        assert min(ask(sock) for _ in range(5)) < 0.05
        network.impair("a", delay_s=0.2, loss=0.05)
        times = sorted(ask(sock) for _ in range(15))
        assert times[0] >= 0.2 and times[7] < 0.3, times
        assert times[-1] > 0.3, "of 30 packets and their answers some are lost"
        exchange(sock, MiB // 4)
        network.heal("a")
        wait_until(lambda: ask(sock) < 0.05, what="the delay is gone")
        ask(other)


@pytest.mark.exclusive
def test_a_relayed_link_is_fast_enough_for_a_test(network: Network) -> None:
    with echo(network, "a"), connect(network, "b", "a", 30.0) as sock:
        direct_s = exchange(sock, 32 * MiB)
        network.impair("a", delay_s=0.0, loss=0.0)
        relayed_s = exchange(sock, 32 * MiB)
        network.heal("a")
        print(f"32 MiB each way: {direct_s:.2f} s, relayed {relayed_s:.2f} s")
        assert relayed_s < 15


def test_nothing_is_left_of_a_network() -> None:
    need(unavailable())
    with Network() as network:
        network.add("a")
        network.impair("a", delay_s=0.1, loss=0.0)
        names = [network.namespace("a")]
    with pytest.raises(RuntimeError, match="on purpose"), Network() as network:
        names.append(network.namespace("a"))
        network.add("a")
        raise RuntimeError("on purpose")
    there = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not any(name in there for name in names)
