"""Whatever clients send, another client's PING is answered within `LONGEST_S`, and mostly within `MEDIAN_S`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from tests.attack.scale import ATTACK_S, BLOCKS, LONGEST_S, MEDIAN_S
from tests.support.harness import (
    CONTAINS,
    HOTTEST,
    SET,
    Closed,
    RawClient,
    Server,
    make_namespace,
    pack,
    shard_info,
)
from tests.support.pinger import Pinger

NAMESPACE = make_namespace(16, "latency")

pytestmark = pytest.mark.exclusive  # it measures time

Attack = Callable[[Server, threading.Event], None]


@contextlib.contextmanager
def connections(server: Server, count: int) -> Iterator[list[RawClient]]:
    """Return this many clients of the namespace, with receive buffers of at most 16 KiB."""
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(RawClient(server, receive_buffer=16 << 10)) for _ in range(count)]
        for raw in raws:
            raw.hello(NAMESPACE.canonical())
            raw.sock.settimeout(0.05)
        yield raws


def send_for_ever(server: Server, stop: threading.Event, count: int, data: bytes) -> None:
    """Send `data` repeatedly on this many connections, as fast as the server accepts it, without reading anything."""
    with connections(server, count) as raws:
        left = dict.fromkeys(raws, b"")
        for raw in raws:
            raw.sock.setblocking(False)
        while not stop.is_set():
            taken = 0
            for raw in raws:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sent = raw.sock.send(left[raw] or data)
                    left[raw] = (left[raw] or data)[sent:]
                    taken += sent
            if not taken:
                stop.wait(0.005)


def smallest_frames(server: Server, stop: threading.Event) -> None:
    """20 connections send zeros: each two bytes are an empty frame."""
    send_for_ever(server, stop, 20, bytes(1 << 16))


def pings_and_commands(server: Server, stop: threading.Event) -> None:
    """20 connections send ZMTP PINGs and read no PONG."""
    send_for_ever(server, stop, 20, b"\x04\x07\x04PING\0\0" * 5000)


def requests_of_one_key(server: Server, stop: threading.Event) -> None:
    """20 connections look up one key in each request and read no answer."""
    frame = b"\x01" + bytes([len(header := pack(CONTAINS, 1, 1000, 1, 16, False, 0.0))]) + header
    send_for_ever(server, stop, 20, (frame + b"\x00\x10" + bytes(16)) * 2000)


def lists_of_the_hottest(server: Server, stop: threading.Event) -> None:
    """One connection requests the list of the hottest blocks 60 times without a pause."""
    with RawClient(server) as raw:
        raw.hello(NAMESPACE.canonical())
        while not stop.is_set():
            for number in range(60):
                raw.send(pack(HOTTEST, number, 60_000, 0, 10))
            for _ in range(60):
                raw.reply()
                if stop.is_set():
                    return


def lists_of_chains_used_backwards(server: Server, stop: threading.Event) -> None:
    """Clients request the list of a long chain's blocks and disconnect before it is complete. Each block of the chain
    was used earlier than the blocks before it."""
    namespace = make_namespace(16, "backwards")
    keys = np.random.Generator(np.random.SFC64(5)).integers(0, 256, (65_536, 16), dtype=np.uint8)
    with KVStoreClient(server.endpoint, namespace, timeout_s=30) as client:
        for at in range(0, len(keys), 8192):
            some = keys[at : at + 8192]
            client.set(some, np.zeros((len(some), 16), dtype=np.uint8), parent=keys[at - 1].tobytes() if at else None)
        for at in range(len(keys), 0, -8192):
            client.contains(keys[at - 8192 : at][::-1], refresh=True)
    while not stop.is_set():
        with RawClient(server) as raw:
            raw.hello(namespace.canonical())
            raw.send(pack(HOTTEST, 1, 60_000, 0, 10, True))
            stop.wait(0.05)


def periodic_keys(server: Server, stop: threading.Event) -> None:
    """SETs whose first key occurs in the bytes of the chain looked up before, but never at the beginning of a key."""
    keys = (b"ab" * 8)[:15] + b"c"
    chain = (b"ab" * (16 * 32000))[1:] + b"x"
    with connections(server, 20) as raws:
        for raw in raws:
            raw.sock.settimeout(10)
        while not stop.is_set():
            for raw in raws:
                raw.send(pack(CONTAINS, 1, 60_000, len(chain) // 16, 16, False, 0.0), chain)
                raw.reply()
                raw.send(pack(SET, 2, 60_000, 1, 16), keys, bytes(16), bytes(8))
                raw.reply()
                if stop.is_set():
                    return


def pins(server: Server, stop: threading.Event) -> None:
    """20 connections pin a block repeatedly."""
    keys = np.arange(BLOCKS, dtype=np.uint64).repeat(2).tobytes()
    with connections(server, 20) as raws:
        for raw in raws:
            raw.sock.settimeout(10)
        at = 0
        while not stop.is_set():
            for raw in raws:
                raw.send(pack(CONTAINS, 1, 60_000, 1, 16, True, 60.0), keys[at : at + 16])
                at = (at + 16) % len(keys)
            for raw in raws:
                raw.reply()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        smallest_frames,
        pings_and_commands,
        requests_of_one_key,
        lists_of_the_hottest,
        lists_of_chains_used_backwards,
        periodic_keys,
        pins,
    )
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with `BLOCKS` blocks in memory."""
    log = tmp_path_factory.mktemp("full") / "server.log"
    server = Server(log, "--memory", f"{(BLOCKS >> 16 << 20) + 512 * BLOCKS + (256 << 20)}", "--segment", "1MiB")
    try:
        with KVStoreClient(server.endpoint, NAMESPACE, timeout_s=120) as client:
            keys = np.arange(BLOCKS, dtype=np.uint64).repeat(2).view(np.uint8).reshape(-1, 16)
            for at in range(0, BLOCKS, 50_000):
                some = keys[at : at + 50_000]
                client.set(some, np.zeros((len(some), 16), dtype=np.uint8))
            assert sum(each.blocks for each in shard_info(client).namespaces) > 0.9 * BLOCKS
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_ping_is_answered_at_once_during(attack: Attack, full: Server) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            attack(full, stop)
        except (Closed, OSError):
            pass  # the server may close this connection
        except BaseException as error:
            failures.append(error)

    with full.unharmed():
        thread = threading.Thread(target=run)
        with Pinger(full) as pinger:
            thread.start()
            time.sleep(ATTACK_S)
            stop.set()
        thread.join(30)
        assert not failures, failures
    latency = pinger.latency
    assert latency.pings > 20, latency
    assert latency.longest_s <= LONGEST_S and latency.median_s <= MEDIAN_S, latency
