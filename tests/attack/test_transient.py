"""Unread transient blocks take no memory from other blocks, and reads that race with expiry get right bytes."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore_client import KVStoreClient
from tests.attack.scale import ATTACK_S
from tests.support.harness import (
    GET,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    StartServer,
    blocks_of,
    make_keys,
    namespace_info,
    pack,
    shard_info,
    wait_until,
)

BLOCK = 16 << 10
SEGMENT = 1 << 20
PER_SEGMENT = SEGMENT // BLOCK
SEGMENTS = 32


def test_unread_transient_blocks_take_no_memory_of_others(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """One client sets transient blocks with a time to live of ten years, in several namespaces, together or one at a
    time between ordinary blocks."""
    server = start_server("--transient-memory", "25%", memory=f"{SEGMENTS}MiB", segment="1MiB")
    limit = SEGMENTS // 4
    tenant = make_keys((SEGMENTS - limit) * PER_SEGMENT)
    blocks = blocks_of(tenant, BLOCK)
    hogs = [new_namespace(BLOCK) for _ in range(5)]
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=20) as client, server.unharmed():
        end, taken, number = time.monotonic() + ATTACK_S, 0, 0
        with MemoryWatch(server, SEGMENTS << 20):
            while time.monotonic() < end:
                with KVStoreClient(server.endpoint, hogs[number % len(hogs)], timeout_s=20) as hog:
                    for _ in range(10):
                        number += 1
                        keys = make_keys(20, first=number * 100)
                        hog.set(keys[:10], blocks_of(keys[:10], BLOCK))
                        many = keys[10:] if number % 2 else keys[10:11]
                        result = hog.set(many, blocks_of(many, BLOCK), reads=255, ttl_s=10 * 365 * 86400)
                        taken += result.created
                shard = shard_info(client)
                assert shard.transient_bytes <= shard.transient_limit_bytes == limit * SEGMENT
        with KVStoreClient(server.endpoint, hogs[0], timeout_s=20) as hog:
            for number in range(limit * PER_SEGMENT):  # the rest of the limit, and more
                many = make_keys(PER_SEGMENT, first=(1 << 30) + number * PER_SEGMENT)
                result = hog.set(many, blocks_of(many, BLOCK), reads=255, ttl_s=10 * 365 * 86400)
                taken += result.created
                if not result.created:
                    break
            assert result.refused == len(many)
        assert 0 < taken <= limit * PER_SEGMENT
        for at in range(0, len(tenant), PER_SEGMENT):
            assert client.set(tenant[at : at + PER_SEGMENT], blocks[at : at + PER_SEGMENT]).error == 0
        assert client.contains(tenant).all(), "all memory but the limit is for the others"
        assert sum(each.transient_blocks for each in shard_info(client).namespaces) == taken


def test_reads_that_race_with_block_expiry_get_right_bytes(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    """The clients verify no checksums, so the test would notice the bytes of another block in a reused slot."""
    server = start_server("--unix-socket", str(tmp_path / "kv.sock"), memory="8MiB", segment="1MiB")
    namespace, keys = new_namespace(BLOCK), make_keys(3 * PER_SEGMENT)
    blocks = blocks_of(keys, BLOCK)
    stop, read = threading.Event(), [0] * 6

    def set_them(seed: int) -> None:
        choice = random.Random(seed)
        with KVStoreClient(server.endpoint, namespace, timeout_s=20, shared_memory=bool(seed % 2)) as client:
            while not stop.is_set():
                some = choice.sample(range(len(keys)), 20)
                reads = choice.choice([0, 1, 1, 2, 3])
                ttl_s = choice.choice([0.13, 1, 60])
                names, values = [keys[row] for row in some], [blocks[row] for row in some]
                client.set(names, values, reads=reads, ttl_s=ttl_s)
                if choice.random() < 0.2:
                    client.delete(names[:10])

    def read_them(number: int) -> None:
        choice = random.Random(100 + number)
        out = np.zeros((20, BLOCK), dtype=np.uint8)
        options = {"timeout_s": 20.0, "checksum": False, "shared_memory": bool(number % 2)}
        with KVStoreClient(server.endpoint, namespace, **options) as client:  # type: ignore[arg-type]
            while not stop.is_set():
                some = choice.sample(range(len(keys)), 20)
                names = [keys[row] for row in some]
                if choice.random() < 0.3:
                    with client.borrow(names) as borrowed:
                        found = [None if block is None else bytes(block) for block in borrowed]
                else:
                    there = client.get_into(names, out)
                    found = [out[at].tobytes() if hit else None for at, hit in enumerate(there.tolist())]
                for row, block in zip(some, found, strict=True):
                    assert block is None or block == blocks[row], f"wrong bytes of block {row}"
                    read[number] += block is not None

    def break_off() -> None:
        while not stop.is_set():
            with RawClient(server, receive_buffer=4096) as raw:
                raw.hello(namespace.canonical())
                raw.send(pack(GET, 1, 10_000, 100, 16), b"".join(random.sample(keys, 100)))
                time.sleep(0.005)

    with server.unharmed(), MemoryWatch(server, 8 << 20), ThreadPoolExecutor(12) as threads:
        work = [threads.submit(set_them, seed) for seed in range(3)]
        work += [threads.submit(read_them, number) for number in range(len(read))]
        work.append(threads.submit(break_off))
        time.sleep(2 * ATTACK_S)
        stop.set()
        for each in work:
            each.result(60)
    assert all(read), read
    with KVStoreClient(server.endpoint, namespace, timeout_s=20) as client:
        wait_until(lambda: not shard_info(client).streams and not shard_info(client).lent_blocks)
        client.purge()
        info = namespace_info(client)
        assert (info.blocks, info.writing, info.transient_blocks) == (0, 0, 0)
        room = shard_info(client).transient_limit_bytes // BLOCK
        every = make_keys(room, first=1 << 20)
        assert client.set(every, blocks_of(every, BLOCK), reads=1).created == room, "no slot leaked"
