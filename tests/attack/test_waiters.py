"""Ten thousand waiting reads, and a hundred thousand promises. Meanwhile, a shard serves other clients as usual and
stays within its memory; it releases everything when the promises end."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from tests.attack.crowd import crowd
from tests.attack.scale import ATTACK_S, FULL, LONGEST_S, MEDIAN_S
from tests.support.harness import (
    CONTAINS,
    CONTAINS_REPLY,
    GET,
    PART,
    PROMISE,
    PROMISE_REPLY,
    WITHDRAW,
    WITHDRAW_REPLY,
    MemoryWatch,
    StartServer,
    blocks_of,
    make_keys,
    make_namespace,
    namespace_info,
    pack,
    shard_info,
    wait_until,
)
from tests.support.pinger import Pinger

MEMORY = 64 << 20
NAMESPACE = make_namespace(4096, "waiters")
CONNECTIONS = 40
READS = 250
GETS = 250 if FULL else 50  # waiting, per connection
PROMISES = 100_000 if FULL else 20_000

pytestmark = pytest.mark.timeout(300)


def test_many_waiters_and_promises_disturb_no_other_client(start_server: StartServer) -> None:
    server = start_server(memory="64MiB", segment="4MiB")
    count = CONNECTIONS * GETS
    keys = make_keys(PROMISES)
    with (
        MemoryWatch(server, MEMORY),
        KVStoreClient(server.endpoint, NAMESPACE, timeout_s=20) as other,
        KVStoreClient(server.endpoint, NAMESPACE, timeout_s=20) as producer,
        crowd(server, CONNECTIONS, "127.0.0.9", NAMESPACE) as waiting,
    ):
        promise = producer.promise(keys, ttl_s=600)
        assert promise.mine.all()
        for number, raw in enumerate(waiting):
            for request_id in range(GETS):
                key = keys[number * GETS + request_id]
                raw.send(pack(GET, request_id, 600_000, 1, 16, 0, True, False, False, False, 600_000), key)
        wait_until(lambda: namespace_info(other).awaited == count, what=f"{count} GETs wait")
        assert shard_info(other).streams == count and namespace_info(other).promised == PROMISES

        with Pinger(server) as pinger:
            own = make_keys(64, first=PROMISES)
            until = time.monotonic() + ATTACK_S
            while time.monotonic() < until:
                assert other.set(own, blocks_of(own, 4096)).error == 0
                assert other.contains(own).all()
                other.delete(own)
        assert pinger.latency.longest_s <= LONGEST_S and pinger.latency.median_s <= MEDIAN_S, pinger.latency

        some = keys[:GETS]  # everything that the first connection waits for
        producer.set(some, blocks_of(some, 4096))
        for _ in range(GETS):
            header, frames = waiting[0].reply()
            assert header[0] == PART and len(frames) == 1
            assert frames[0] == blocks_of([keys[header[1]]], 4096)[0]
        assert shard_info(other).streams == count - GETS

        with Pinger(server) as pinger:
            promise.withdraw()
            for raw in waiting[1:]:
                answered = {raw.reply()[0][1] for _ in range(GETS)}
                assert answered == set(range(GETS)), "a waiter was forgotten"
        assert pinger.latency.longest_s <= LONGEST_S, pinger.latency
        info = shard_info(other)
        assert (info.streams, info.held_bytes["promises"]) == (0, 0)
        assert namespace_info(other).awaited == namespace_info(other).promised == 0


def test_reads_of_many_promised_blocks_are_woken_in_short_turns(start_server: StartServer) -> None:
    """Each read names 8192 promised blocks and waits for the first ones, which are withdrawn one by one."""
    server = start_server(memory="64MiB", segment="4MiB")
    namespace = make_namespace(64, "short-turns")
    keys = make_keys(8192)
    packed = b"".join(keys)
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=20) as other,
        crowd(server, 1, "127.0.0.9", namespace) as [waiting],
        crowd(server, 1, "127.0.0.8", namespace) as [producer],
    ):
        assert producer.ask(pack(PROMISE, 1, 1000, 8192, 16, 600_000), packed)[0] == PROMISE_REPLY
        for request_id in range(READS):
            waiting.send(pack(GET, request_id, 600_000, 8192, 16, 0, True, False, False, False, 600_000), packed)
        wait_until(lambda: shard_info(other).streams == READS)
        with Pinger(server) as pinger:
            for key in keys[:40]:
                assert producer.ask(pack(WITHDRAW, 1, 1000, 1, 16), key) == [WITHDRAW_REPLY, 1, 1]
        assert pinger.latency.longest_s <= LONGEST_S / 4, pinger.latency


def test_promises_in_ever_new_namespaces_take_no_memory(start_server: StartServer) -> None:
    """Some of the promises have no key; the others have a key that is withdrawn at once."""
    server = start_server(memory="64MiB", segment="4MiB")
    rounds = 100_000 if FULL else 4_000
    with MemoryWatch(server, MEMORY), crowd(server, 1, "127.0.0.9", NAMESPACE) as [raw]:
        for number in range(rounds):
            raw.hello(make_namespace(4096, f"namespace-{number}").canonical())
            key = b"%16d" % number
            raw.ask(pack(PROMISE, 1, 1000, 0, 16, 600_000), b"")
            raw.ask(pack(PROMISE, 1, 1000, 1, 16, 600_000), key)
            raw.ask(pack(WITHDRAW, 1, 1000, 1, 16), key)


def test_promises_of_closed_connections_take_no_memory(start_server: StartServer) -> None:
    """When a connection closes, its records are removed, although its promise would have lasted much longer."""
    server = start_server(memory="64MiB", segment="4MiB")
    with (
        MemoryWatch(server, MEMORY),
        KVStoreClient(server.endpoint, NAMESPACE, timeout_s=20) as keeper,
    ):
        kept = [keeper.promise([key], ttl_s=590) for key in make_keys(1000, first=100_000, key_bytes=64)]
        keys = b"".join(make_keys(8192, key_bytes=64))
        for _ in range(2000 if FULL else 800):
            with crowd(server, 1, "127.0.0.9", NAMESPACE) as [raw]:
                assert raw.ask(pack(CONTAINS, 1, 5000, 8192, 64, False), keys)[0] == CONTAINS_REPLY
                assert raw.ask(pack(PROMISE, 2, 5000, 1, 64, 600_000), keys[:64]) == [PROMISE_REPLY, 2, bytes(1)]
        for promise in kept:
            promise.withdraw()


def test_waiters_beyond_the_available_memory_are_refused(start_server: StartServer) -> None:
    """Connections that read nothing send GETs of 8192 keys each, all of which wait."""
    server = start_server(memory="64MiB", segment="4MiB")
    keys = make_keys(8192)
    packed = np.frombuffer(b"".join(keys), dtype=np.uint8).tobytes()
    with (
        MemoryWatch(server, MEMORY),
        KVStoreClient(server.endpoint, NAMESPACE, timeout_s=20) as other,
        crowd(server, 16, "127.0.0.9", NAMESPACE) as waiting,
    ):
        promise = other.promise(keys, ttl_s=600)
        for raw in waiting:
            raw.sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                for request_id in range(64):
                    raw.send(pack(GET, request_id, 600_000, 8192, 16, 0, True, False, False, False, 600_000), packed)
        info = wait_until(lambda: (info := shard_info(other)).refused["memory_of_address"] and info)
        assert sum(info.held_bytes.values()) <= info.held_limit_bytes
        assert other.lookup(keys[:100]).promised == 100, "others are served"
        promise.withdraw()
    with KVStoreClient(server.endpoint, NAMESPACE) as other:
        wait_until(lambda: shard_info(other).streams == 0)
