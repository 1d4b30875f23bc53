"""Ten thousand clients' reads that wait, and a hundred thousand promises: a shard serves others as if they were not
there, takes no more memory than it may, and lets all go when the promises end."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from tests.attack.crowd import crowd
from tests.attack.scale import FULL, LONGEST_S, MEDIAN_S
from tests.support.harness import (
    GET,
    PART,
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
GETS = 250 if FULL else 50  # waiting, a connection
PROMISES = 100_000 if FULL else 20_000

pytestmark = pytest.mark.timeout(300)


def test_many_waiters_and_promises_disturb_nobody(start_server: StartServer) -> None:
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
        wait_until(lambda: namespace_info(other).awaited == count, 30, f"{count} GETs wait")
        assert shard_info(other).streams == count and namespace_info(other).promised == PROMISES

        with Pinger(server) as pinger:
            own = make_keys(64, first=PROMISES)
            until = time.monotonic() + 5.0
            while time.monotonic() < until:
                assert other.set(own, blocks_of(own, 4096)).error == 0
                assert other.contains(own).all()
                other.delete(own)
        assert pinger.latency.longest_s <= LONGEST_S and pinger.latency.median_s <= MEDIAN_S, pinger.latency

        some = keys[:GETS]  # all that the first connection waits for
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


def test_waiters_beyond_what_memory_there_is_are_refused(start_server: StartServer) -> None:
    """GETs of 8192 keys that all wait, from connections that read nothing."""
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
        info = wait_until(lambda: (info := shard_info(other)).refused["memory_of_address"] and info, 30)
        assert sum(info.held_bytes.values()) <= info.held_limit_bytes
        assert other.lookup(keys[:100]).promised == 100, "others are served"
        promise.withdraw()
    with KVStoreClient(server.endpoint, NAMESPACE) as other:
        wait_until(lambda: shard_info(other).streams == 0)
