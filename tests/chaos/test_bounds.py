"""Whatever clients do, a server stays within its memory, and a read returns the right bytes or misses."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import KVStoreClient, ProtocolError
from tests.chaos.worker import soak
from tests.support.harness import (
    GET,
    INFO,
    PING,
    SET,
    Closed,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    Server,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    make_namespace,
    namespace_info,
    pack,
    shard_info,
    sums_of,
    wait_until,
    zmtp_frame,
)

KiB, MiB = 1 << 10, 1 << 20
SOAK_S = float(os.environ.get("KVSTORE_SOAK_S", "3"))
MEMORY = 96 * MiB
FILLED = 1500  # blocks of 512 KiB in three namespaces: the memory is full, and hundreds of them were evicted


# ---- memory --------------------------------------------------------------------------------------------------------


def write_much(server: Server, number: int, stop: threading.Event, created: list[int]) -> None:
    """Run one of eight writers, each of which sets more blocks than fit into the server's memory. The other attackers
    have the same address and may have used up its share, so some sets are refused."""
    size = 512 * KiB
    blocks = np.zeros((32, size), dtype=np.uint8)
    with KVStoreClient(server.endpoint, make_namespace(size, f"writer {number % 3}"), timeout_s=30) as client:
        first = 100_000 * number
        while not stop.is_set():
            keys = make_keys(32, first=first)
            first += 32
            try:
                result = client.set(keys, blocks)
                assert result.created + result.error == 32
                created.append(result.created)
                client.get(keys[:4])
            except ProtocolError as error:
                assert "of clients at 127.0.0.1" in str(error)


def read_slowly(server: Server, stop: threading.Event) -> None:
    """Request many blocks and read the replies in small steps."""
    namespace = make_namespace(512 * KiB, "writer 0")
    keys = make_keys(2000)
    while not stop.is_set():
        with RawClient(server, receive_buffer=16 * KiB) as raw, contextlib.suppress(Closed, OSError):
            raw.hello(namespace.canonical())
            raw.sock.settimeout(1.0)  # if blocks are missing, the replies are shorter than the reads below
            for request_id in range(20):
                raw.send(pack(GET, request_id, 60_000, 2000, 16), b"".join(keys))
            for _ in range(20):
                if stop.wait(0.05):
                    return
                raw.read(50_000)


def never_read(server: Server, stop: threading.Event) -> None:
    """Keep twenty connections sending requests without reading."""
    namespace = make_namespace(512 * KiB, "writer 1")
    keys = make_keys(800)
    requests = [
        (pack(GET, number, 60_000, 500, 16), b"".join(keys[number : number + 500]), pack(INFO, 1000 + number, 1000))
        for number in range(300)
    ]
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            raw = stack.enter_context(RawClient(server, receive_buffer=16 * KiB))
            raw.hello(namespace.canonical())
            raw.sock.settimeout(0.1)
            with contextlib.suppress(OSError):
                for get, some, info in requests:
                    raw.send(get, some)
                    raw.send(info)
        stop.wait()


def flood(server: Server, stop: threading.Event) -> None:
    """Send endless multi-part messages, of large and of small frames, and SETs that are begun and abandoned."""
    namespace = make_namespace(8, "tiny")
    keys = b"".join(make_keys(8192, key_bytes=8))
    begun = pack(SET, 1, 60_000, 8192, 8)
    rng = random.Random(1)
    while not stop.is_set():
        with contextlib.suppress(Closed, OSError), contextlib.ExitStack() as stack:
            raws = [stack.enter_context(RawClient(server, receive_buffer=16 * KiB)) for _ in range(8)]
            for raw in raws:
                raw.hello(namespace.canonical())
                raw.sock.settimeout(1.0)
                kind = rng.randrange(4)
                if kind == 0:
                    raw.send(*[bytes(60_000)] * 200, more=True)
                elif kind == 1:
                    raw.sock.sendall(b"\x01\x00" * 100_000)
                elif kind == 2:
                    raw.send(begun, keys, more=True)
                else:
                    for request_id in range(100):
                        raw.send(pack(GET, request_id, 60_000, 8192, 8), keys)
            stop.wait(0.1)


@pytest.mark.soak  # of at most 12 seconds
def test_a_shards_memory_stays_within_limit_and_fixed_overhead(start_server: StartServer) -> None:
    server = start_server(memory=f"{MEMORY}", segment="4MiB")
    stop = threading.Event()
    failures: list[BaseException] = []
    created: list[int] = []  # the number of blocks created by each call

    def guarded(function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    work: list[tuple[Any, ...]] = [(write_much, server, number, stop, created) for number in range(8)]
    work += [(read_slowly, server, stop), (never_read, server, stop), (flood, server, stop)]
    with server.unharmed():
        with MemoryWatch(server, MEMORY) as watch:
            threads = [threading.Thread(target=guarded, args=arguments) for arguments in work]
            for thread in threads:
                thread.start()
            end = time.monotonic() + min(SOAK_S, 12)
            while (time.monotonic() < end or sum(created) < FILLED) and not failures:
                time.sleep(0.05)
            stop.set()
            for thread in threads:
                thread.join(60)
        assert not failures, failures
        assert not any(thread.is_alive() for thread in threads), "every client ends when it is told to"
        with KVStoreClient(server.endpoint, make_namespace(512 * KiB, "writer 0")) as client:
            keys = make_keys(10, first=10**9)
            assert client.set(keys, blocks_of(keys, 512 * KiB)).created == 10
            assert client.get(keys).blocks == blocks_of(keys, 512 * KiB)
            assert namespace_info(client).evicted > 100
    assert watch.highest > MEMORY // 2, "the server was filled"


def test_small_blocks_take_no_more_memory_than_large_ones(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """The index of tiny blocks is many times larger than the blocks, and counts as memory."""
    server = start_server(memory="64MiB", segment="4MiB")
    with (
        server.unharmed(),
        MemoryWatch(server, 64 * MiB),
        KVStoreClient(server.endpoint, new_namespace(16)) as client,
    ):
        rng = np.random.Generator(np.random.SFC64(1))
        blocks = np.zeros((100_000, 16), dtype=np.uint8)
        for _ in range(10):
            client.set(rng.integers(0, 256, (100_000, 64), dtype=np.uint8), blocks)
        info = namespace_info(client)
        assert info.created == 1_000_000 and info.blocks == info.created - info.evicted > 300_000


def test_many_waiting_reads_take_bounded_memory(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """The GETs wait for blocks that a client has begun to write and never finishes."""
    server = start_server(memory="64MiB", segment="4MiB")
    namespace = new_namespace(8)
    joined = b"".join(make_keys(8192, key_bytes=8))
    with (
        server.unharmed(),
        MemoryWatch(server, 64 * MiB),
        KVStoreClient(server.endpoint, namespace) as client,
        RawClient(server) as writer,
        contextlib.ExitStack() as stack,
    ):
        writer.hello(namespace.canonical())
        writer.send(pack(SET, 1, 60_000, 8192, 8), joined, more=True)
        wait_until(lambda: namespace_info(client).writing == 8192)
        refused = 0
        for _ in range(6):
            raw = stack.enter_context(RawClient(server))
            raw.hello(namespace.canonical())
            for request_id in range(200):
                raw.send(pack(GET, request_id, 60_000, 8192, 8), joined)
            raw.send(pack(PING, 1000, 1000))
            while (reply := raw.reply()[0])[0] != 73:
                assert reply[2] == 6, reply  # LIMIT
                refused += 1
        assert refused > 0 and shard_info(client).streams > 100
        assert client.ping() < 5


# ---- right bytes or a miss -----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 120)
def test_processes_that_share_keys_under_eviction_read_right_bytes_or_miss(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Processes set 2 000 blocks of 64 KiB in a server of 64 MiB: half of them fit. Every key has three versions, any
    of which is right."""
    server = start_server("--shards", "2", memory="64MiB", segment="4MiB")
    with server.unharmed(), MemoryWatch(server, 32 * MiB):
        results = soak(server, workers=8, seconds=SOAK_S)
    totals: dict[str, int] = {}
    for result in results:
        for name, count in result.items():
            totals[name] = totals.get(name, 0) + count
    assert totals["wrong"] == totals["checksum_errors"] == totals["failures"] == 0, totals
    assert totals["hits"] > 500 and totals["misses"] > 500 and totals["sets"] > 500, totals


def test_a_block_is_never_seen_half_written(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """One writer repeatedly replaces blocks and sends them in small pieces. Readers, which verify no checksums, always
    get one whole version of a block."""
    server = start_server(memory="64MiB", segment="8MiB")
    namespace = new_namespace(MiB)
    (key,) = make_keys(1)
    versions = [block_of(key, MiB, version) for version in range(2)]
    stop = threading.Event()

    def replace() -> None:
        with RawClient(server) as raw:
            raw.hello(namespace.canonical())
            version = 0
            while not stop.is_set():
                version = 1 - version
                header = pack(SET, 1, 10_000, 1, 16, True)
                data = zmtp_frame(header, 1) + zmtp_frame(key, 1) + zmtp_frame(versions[version], 1)
                data += zmtp_frame(sums_of([versions[version]]), 0)
                for at in range(0, len(data), 200_000):
                    raw.sock.sendall(data[at : at + 200_000])
                assert raw.reply()[0][0] == 66

    with server.unharmed(), KVStoreClient(server.endpoint, namespace, checksum=False) as client:
        client.set([key], versions[:1])
        writer = threading.Thread(target=replace)
        writer.start()
        try:
            seen = set()
            end = time.monotonic() + 20
            while len(seen) < 2 or time.monotonic() < end - 18:
                block = client.get([key]).blocks[0]
                assert block is not None and block in versions
                seen.add(versions.index(block))
                assert time.monotonic() < end
        finally:
            stop.set()
            writer.join()
