"""Memory is a promise: `--memory` plus 256 MiB per shard, whatever clients send. With the default segment size."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.sizes import format_size
from kvstore_client import KVStoreClient
from tests.attack.crowd import CLIENTS, DOOR, all_places, crowd
from tests.attack.scale import FULL, LONGEST_S, MEDIAN_S
from tests.support.disk import disk_flags, wait_until_on
from tests.support.harness import (
    CONTAINS,
    DELETE,
    GET,
    HOTTEST,
    PING,
    PONG,
    SET,
    MemoryWatch,
    RawClient,
    Server,
    StartServer,
    make_keys,
    make_namespace,
    pack,
    shard_info,
    wait_until,
)
from tests.support.pinger import Pinger

MiB = 1 << 20
MEMORY = 64 * MiB
NAMESPACE = make_namespace(64, "memory")
KEYS_64 = b"".join(make_keys(8192, key_bytes=64))
SENDERS = 30  # at once

pytestmark = pytest.mark.timeout(300)

Attack = Callable[[Server], None]


def connect(stack: contextlib.ExitStack, server: Server, count: int) -> list[RawClient]:
    """Return this many clients of the namespace, with receive buffers of at most 16 KiB. They connect from 20
    addresses, so that together they can take nearly all of the memory for clients."""
    hosts = [f"127.0.1.{number % 20 + 1}" for number in range(count)]
    raws = [stack.enter_context(RawClient(server, receive_buffer=16 << 10, source=host)) for host in hosts]
    for raw in raws:
        raw.hello(NAMESPACE.canonical())
        raw.sock.settimeout(0.2)
    return raws


def answers(server: Server) -> bool:
    """Whether the server answers another client, and so has processed everything that was sent before."""
    with RawClient(server) as raw:
        raw.hello()
        return bool(raw.ask(pack(PING, 1, 1000))[0] == PONG)


def blocks_of_one_byte(server: Server) -> None:
    fill_tiny(server, 1, 3)


def blocks_of_four_bytes_in_many_namespaces(server: Server) -> None:
    fill_tiny(server, 4, 40)


def blocks_of_sixteen_bytes_in_many_namespaces(server: Server) -> None:
    fill_tiny(server, 16, 40)


def fill_tiny(server: Server, block_bytes: int, namespaces: int) -> None:
    """Set one block in each of many namespaces, then a hundred thousand in the first of them."""
    rng = np.random.Generator(np.random.SFC64(block_bytes))
    for number in range(namespaces):
        with KVStoreClient(server.endpoint, make_namespace(block_bytes, f"tiny-{number}"), timeout_s=30) as client:
            result = client.set(make_keys(1, key_bytes=64), [bytes(block_bytes)])
            assert result.created + result.error == 1
    with KVStoreClient(server.endpoint, make_namespace(block_bytes, "tiny-0"), timeout_s=30) as client:
        for _ in range(10 if FULL else 4):
            keys = rng.integers(0, 256, (100_000, 64), dtype=np.uint8)
            result = client.set(keys, np.zeros((100_000, block_bytes), dtype=np.uint8))
            assert result.created + result.error == 100_000


def sets_whose_payload_never_comes(server: Server) -> None:
    """On each of 700 connections, send the header of a SET and 512 KiB of keys."""
    with contextlib.ExitStack() as stack:
        for raw in connect(stack, server, 700):
            with contextlib.suppress(OSError):
                raw.send(pack(SET, 1, 60_000, 8192, 64), KEYS_64, more=True)
        assert answers(server)


def gets_of_little_credit(server: Server) -> None:
    """Send 256 GETs on each of many connections, with credit for one byte."""
    with contextlib.ExitStack() as stack:
        for raw in connect(stack, server, 400 if FULL else 100):
            with contextlib.suppress(OSError):
                for request_id in range(256):
                    raw.send(pack(GET, request_id, 60_000, 1, 64, 1), KEYS_64[:64])
        assert answers(server)


def replies_that_nobody_reads(server: Server) -> None:
    """Look up 8 000 keys on many connections: the requests alone are more than twice what a shard may hold."""

    def ask(raws: list[RawClient]) -> None:
        for request_id in range(30 if FULL else 12):
            for raw in list(raws):
                try:
                    raw.send(pack(CONTAINS, request_id, 60_000, 8000, 64, False, 0.0), KEYS_64[: 64 * 8000])
                except OSError:  # the server reads no more from it
                    raws.remove(raw)

    with contextlib.ExitStack() as stack:
        raws = connect(stack, server, 300 if FULL else 120)
        with ThreadPoolExecutor(SENDERS) as senders:  # one thread would wait for the time-outs one after another
            list(senders.map(ask, (raws[number::SENDERS] for number in range(SENDERS))))
        assert answers(server)


def pings_inside_a_set(server: Server) -> None:
    """Send PINGs on 20 connections, in the middle of a message, without reading a PONG."""
    pings = b"\x04\x07\x04PING\0\0" * 20_000
    with contextlib.ExitStack() as stack:
        raws = connect(stack, server, 20)
        for raw in raws:
            raw.send(pack(SET, 1, 60_000, 1, 64), KEYS_64[:64], more=True)
        for _ in range(40 if FULL else 10):
            for raw in raws:
                with contextlib.suppress(OSError):
                    raw.sock.sendall(pings)
        assert answers(server)


def connections_that_do_nothing(server: Server) -> None:
    """Open as many connections as there are places, and more that wait for one."""
    with all_places(server), crowd(server, 2 * DOOR, "127.0.0.4"):
        assert answers(server)
        with KVStoreClient(server.endpoint, NAMESPACE) as client:
            assert CLIENTS < shard_info(client).connections <= CLIENTS + DOOR


def lists_that_nobody_reads(server: Server) -> None:
    """Request the keys of 131 072 blocks, which are 8 MiB, 20 times without a pause on each of three connections."""
    with KVStoreClient(server.endpoint, NAMESPACE, timeout_s=60) as client:
        keys = np.random.Generator(np.random.SFC64(2)).integers(0, 256, (131_072, 64), dtype=np.uint8)
        client.set(keys, np.zeros((len(keys), 64), dtype=np.uint8))
    with contextlib.ExitStack() as stack:
        for raw in connect(stack, server, 3):
            with contextlib.suppress(OSError):
                for request_id in range(20):
                    raw.send(pack(HOTTEST, request_id, 60_000, 0, 1 << 20))
        assert answers(server)
        with KVStoreClient(server.endpoint, NAMESPACE) as client:  # the lists are made one after another
            wait_until(lambda: shard_info(client).errors > 0, what="a list that does not fit is refused")


def all_of_it_at_random(server: Server) -> None:
    rng = random.Random(1)
    with contextlib.ExitStack() as stack:
        for raw in connect(stack, server, 300 if FULL else 150):
            with contextlib.suppress(OSError):
                for request_id in range(40):
                    count = rng.choice([1, 100, 8192])
                    tag = rng.choice([GET, CONTAINS, DELETE])
                    more = (False, 0.0) if tag == CONTAINS else (1,) if tag == GET else ()
                    raw.send(pack(tag, request_id, 60_000, count, 64, *more), KEYS_64[: 64 * count])
                raw.send(pack(SET, 99, 60_000, 8192, 64), KEYS_64, more=True)
        assert answers(server)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        blocks_of_one_byte,
        blocks_of_four_bytes_in_many_namespaces,
        blocks_of_sixteen_bytes_in_many_namespaces,
        sets_whose_payload_never_comes,
        gets_of_little_credit,
        replies_that_nobody_reads,
        pings_inside_a_set,
        connections_that_do_nothing,
        lists_that_nobody_reads,
        all_of_it_at_random,
    )
}


@pytest.mark.parametrize("memory", [MEMORY, 4 << 30] if FULL else [MEMORY], ids=format_size)
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_shard_takes_no_more_memory_than_its_promise_during(
    attack: Attack, memory: int, start_server: StartServer
) -> None:
    server = start_server(memory=str(memory), segment="32MiB")
    with server.unharmed(), MemoryWatch(server, memory), contextlib.ExitStack() as stack:
        pinger = stack.enter_context(Pinger(server)) if FULL else None  # other tests run with the short form
        attack(server)
        assert answers(server)
    if pinger is not None:
        print(pinger.latency)
        assert pinger.latency.longest_s <= LONGEST_S and pinger.latency.median_s <= MEDIAN_S, pinger.latency
    with KVStoreClient(server.endpoint, NAMESPACE) as client:
        wait_until(
            lambda: sum(shard_info(client).held_bytes.values()) < 4 * MiB,
            30,
            "what clients that are gone held is given back",
        )
        keys = make_keys(10, key_bytes=64)
        assert client.set(keys, [bytes(64)] * 10).error == 0


def test_deletions_that_wait_for_the_disk_are_bounded(start_server: StartServer, tmp_path: Path) -> None:
    """14 connections send 64 DELETEs each, of 8 192 keys, without waiting for the replies."""
    flags = disk_flags(tmp_path / "disk", "256MiB")
    server = start_server(*flags, memory=str(MEMORY), segment="32MiB")
    with KVStoreClient(server.endpoint, NAMESPACE, timeout_s=30) as client:
        wait_until_on(client)
        client.set(make_keys(1, key_bytes=64), [bytes(64)])
        with server.unharmed(), MemoryWatch(server, MEMORY), contextlib.ExitStack() as stack:
            for raw in connect(stack, server, 14):
                with contextlib.suppress(OSError):
                    for request_id in range(64):
                        raw.send(pack(DELETE, request_id, 60_000, 8192, 64), KEYS_64)
            assert client.delete(make_keys(2, key_bytes=64)) <= 1


def test_a_quiet_servers_account_has_only_its_connections(start_server: StartServer) -> None:
    with KVStoreClient(start_server().endpoint, NAMESPACE) as client:
        keys = make_keys(100)
        client.set(keys, [bytes(64)] * 100)
        client.get(keys)
        held = shard_info(client).held_bytes
        assert held.pop("connections") > 0 and held.pop("chains") == 1600 and not any(held.values()), held
