"""The outcome of each block, which a SET reports on request, and what a shard remembers of a HELLO."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import ErrorCode, Outcome
from kvstore_client import KVStoreClient, Namespace
from tests.support.disk import disk_flags, open_client, wait_until_on, wait_until_written
from tests.support.harness import (
    ERROR,
    HELLO,
    INFO,
    PROTOCOL,
    SET,
    SET_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    namespace_info,
    pack,
    sums_of,
    wait_until,
)

CREATED, EXISTED, FORCED, DUPLICATED, ERRED, PENDING = Outcome


def set_blocks(raw: RawClient, keys: list[bytes], block_bytes: int, force: bool = False, outcomes: bool = True) -> list:
    """Send a SET of blocks that fit one frame. Returns the reply's counts and outcomes."""
    header = pack(SET, 1, 10_000, len(keys), len(keys[0]), force, 0, *([True] if outcomes else []))
    blocks = blocks_of(keys, block_bytes)
    reply = raw.ask(header, b"".join(keys), b"".join(blocks), sums_of(blocks))
    assert reply[:3] == [SET_REPLY, 1, len(keys)]
    return reply[3:9]


def test_each_block_has_its_outcome(server: Server, new_namespace: MakeNamespace) -> None:
    a, b, c, d = make_keys(4)
    with RawClient(server) as raw:
        raw.hello(new_namespace(256).canonical())
        assert set_blocks(raw, [a, b], 256) == [2, 0, 0, 0, 0, bytes([CREATED, CREATED])]
        assert set_blocks(raw, [c, a, c, b], 256) == [1, 2, 0, 1, 0, bytes([CREATED, EXISTED, DUPLICATED, EXISTED])]
        assert set_blocks(raw, [d, a, a, d], 256, force=True) == [
            1,
            0,
            1,
            2,
            0,
            bytes([CREATED, FORCED, DUPLICATED, DUPLICATED]),
        ]


def test_outcomes_are_sent_only_on_request(server: Server, new_namespace: MakeNamespace) -> None:
    keys = make_keys(3)
    with RawClient(server) as raw:
        raw.hello(new_namespace(256).canonical())
        assert set_blocks(raw, keys, 256, outcomes=False) == [3, 0, 0, 0, 0, b""]
        assert set_blocks(raw, keys[:2] + make_keys(1, first=9), 256, force=True, outcomes=False) == [
            1,
            0,
            2,
            0,
            0,
            b"",
        ]


def test_a_block_being_written_existed_for_a_second_client(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(256), make_keys(2)
    blocks = blocks_of(keys, 256)
    with RawClient(server) as first, RawClient(server) as second:
        first.hello(namespace.canonical())
        second.hello(namespace.canonical())
        first.send(pack(SET, 5, 10_000, 1, 16), keys[0], more=True)
        while not second.ask(pack(4, 1, 1000, 1, 16), keys[0])[2][0]:
            pass
        for force in (False, True):
            assert set_blocks(second, keys, 256, force)[-1][0] == PENDING
        first.send(blocks[0], sums_of(blocks[:1]))
        assert first.reply()[0][:4] == [SET_REPLY, 5, 1, 1]


def test_a_block_without_room_is_named(start_server: StartServer) -> None:
    server = start_server(memory="4MiB", segment="4MiB")
    namespace = Namespace(model="m", dtype="uint8", block_tokens=16, block_bytes=1 << 19)
    keys = make_keys(8)  # all that fit
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as reader, RawClient(server) as raw:
        client.set(keys, blocks_of(keys, 1 << 19))
        reader.hello(namespace.canonical())
        # Another client has begun to write into all slots but two, and never finishes.
        new = make_keys(6, first=100)
        reader.send(pack(SET, 5, 60_000, 6, 16), b"".join(new), more=True)
        raw.hello(namespace.canonical())
        while sum(raw.ask(pack(4, 1, 1000, 6, 16), b"".join(new))[2]) < 6:
            pass
        last = make_keys(3, first=200)
        blocks = blocks_of(last, 1 << 19)
        frames = [b"".join(blocks[:2]), blocks[2]]
        reply = raw.ask(pack(SET, 1, 10_000, 3, 16, False, 0, True), b"".join(last), *frames, sums_of(blocks))
        assert reply[3:] == [2, 0, 0, 0, 1, bytes([CREATED, CREATED, ERRED]), 2, 0]


def test_a_block_only_on_disk_existed_or_is_replaced(
    start_server: StartServer, tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    block_bytes = 64 << 10
    server = start_server(*disk_flags(tmp_path / "disk"), "--no-warm-start", memory="16MiB")
    namespace, keys = new_namespace(block_bytes), make_keys(4)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        client.set(keys[:2], blocks_of(keys[:2], block_bytes))
        wait_until_written(client)
        server.stop()
        server.restart()
        wait_until_on(client)
        with RawClient(server) as raw:
            raw.hello(namespace.canonical())
            assert set_blocks(raw, [keys[0], keys[2]], block_bytes)[-1] == bytes([EXISTED, CREATED])
            assert set_blocks(raw, [keys[1], keys[3]], block_bytes, force=True)[-1] == bytes([FORCED, CREATED])


# ---- HELLO ---------------------------------------------------------------------------------------------------------


def test_the_highest_number_of_copies_is_remembered(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(256), make_keys(3)
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:

        def hello(replicas: int) -> None:
            raw.ask(pack(HELLO, 0, PROTOCOL, namespace.canonical(), "raw", b"", replicas))

        client.set(keys[:1], blocks_of(keys[:1], 256))
        assert namespace_info(client).replicas == 1
        hello(2)
        assert namespace_info(client).replicas == 2
        hello(1)
        assert namespace_info(client).replicas == 2


def test_a_namespace_created_after_the_hello_knows_its_copies(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(256), make_keys(3)
    with RawClient(server) as raw, KVStoreClient(server.endpoint, namespace) as client:
        raw.ask(pack(HELLO, 0, PROTOCOL, namespace.canonical(), "raw", b"", 3))
        set_blocks(raw, keys, 256)
        assert namespace_info(client).replicas == 3


@pytest.mark.parametrize("replicas", [0, 4, -1])
def test_copies_out_of_range_are_refused(server: Server, replicas: int) -> None:
    with RawClient(server) as raw:
        answer = raw.ask(pack(HELLO, 6, PROTOCOL, b"", "raw", b"", replicas))
        assert answer[:3] == [ERROR, 6, ErrorCode.LIMIT] and f"{replicas}" in answer[3]
        assert raw.ask(pack(INFO, 7, 1000))[1] == 7


def test_a_node_without_a_zone_says_so(server: Server) -> None:
    with RawClient(server) as raw:
        assert raw.hello()[8] == ""
        assert len(raw.hello()) == len(wire.Welcome.__struct_fields__) + 1


def test_a_non_deferred_set_waits_for_another_clients_write(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """If the other client does not finish its write in time, the waiting client stores the blocks."""
    namespace, keys = new_namespace(256), make_keys(4)
    server, blocks = start_server(), blocks_of(keys, 256)
    with RawClient(server) as other, KVStoreClient(server.endpoint, namespace, timeout_s=10) as client:
        other.hello(namespace.canonical())
        other.send(pack(SET, 1, 1000, 2, 16), b"".join(keys[:2]), more=True)
        wait_until(lambda: namespace_info(client).writing == 2)
        with RawClient(server) as raw:
            raw.hello(namespace.canonical())
            assert set_blocks(raw, keys[:3], 256) == [1, 2, 0, 0, 0, bytes([PENDING, PENDING, CREATED])]
        deferred = client.set(keys, blocks)
        assert (deferred.created, deferred.existed, deferred.error) == (1, 3, 0)
        began = time.monotonic()
        result = client.set(keys, blocks, deferred=False)
        assert time.monotonic() - began < 5
        assert (result.created, result.existed, result.error, result.copies) == (2, 2, 0, 1)
        assert client.get(keys).blocks == blocks


def test_a_block_not_finished_in_time_is_an_error(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(256), make_keys(2)
    server, blocks = start_server(), blocks_of(keys, 256)
    with RawClient(server) as other, KVStoreClient(server.endpoint, namespace, timeout_s=1) as client:
        other.hello(namespace.canonical())
        other.send(pack(SET, 1, 60_000, 1, 16), keys[0], more=True)
        wait_until(lambda: namespace_info(client).writing == 1)
        result = client.set(keys, blocks, deferred=False)
        assert (result.created, result.error, result.copies) == (1, 1, 0)
        # The result is the same if the server is silent at the last check.
        (shard,) = server.shards()
        stopping = threading.Timer(0.5, shard.suspend)
        stopping.start()
        try:
            result = client.set(keys, blocks, deferred=False)
        finally:
            stopping.join()
            shard.resume()
        assert (result.existed, result.error, result.copies) == (1, 1, 0)
