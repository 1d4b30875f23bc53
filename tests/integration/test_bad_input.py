"""Requests that no client should send, but some client will. Each gives its sender a clear error, and the server
continues to serve the others."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.shard.reader import HANDSHAKE_S
from kvstore.wire import ErrorCode
from kvstore_client import BlockSizeMismatch, KeySizeMismatch, KVStoreClient, ProtocolError
from tests.support import forked
from tests.support.clock import Clock
from tests.support.harness import (
    CONTAINS,
    DELETE,
    ERROR,
    GET,
    GREETING,
    HELLO,
    INFO,
    MATCH_PREFIX,
    PING,
    PONG,
    PROTOCOL,
    SET,
    SET_REPLY,
    WELCOME,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    Server,
    StartServer,
    block_of,
    blocks_of,
    environment,
    make_keys,
    namespace_info,
    pack,
    ready_command,
    set_frames,
    shard_info,
    sums_of,
    wait_until,
    zmtp_frame,
)

KiB, MiB = 1 << 10, 1 << 20
BLOCK = 4 * KiB


@pytest.fixture
def client(server: Server, new_namespace: MakeNamespace) -> Iterator[KVStoreClient]:
    """Another client, which must not be affected."""
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=5.0) as client:
        keys = make_keys(4, first=5000)
        client.set(keys, blocks_of(keys, BLOCK))
        yield client
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)
        assert client.stats.reconnects == 0
        assert namespace_info(client).writing == 0


@pytest.fixture
def raw(server: Server, client: KVStoreClient) -> Iterator[RawClient]:
    """A connection in the namespace of `client`, after its HELLO."""
    with RawClient(server) as raw:
        assert raw.hello(client.namespace.canonical())[0] == WELCOME
        yield raw


def refused(raw: RawClient, code: ErrorCode, request_id: int, *parts: object) -> None:
    """Check that the next reply is an ERROR that names `parts`, and that the connection stays open."""
    reply, rest = raw.reply()
    assert reply[:3] == [ERROR, request_id, int(code)] and not rest, reply
    assert all(str(part) in reply[3] for part in parts), reply
    assert raw.ask(pack(PING, 99, 1000)) == [PONG, 99]


# ---- requests that break a rule ------------------------------------------------------------------------------------

K = make_keys(3)
KEYS = b"".join(K)
PAYLOAD = b"".join(blocks_of(K, BLOCK))
SUMS = sums_of(blocks_of(K, BLOCK))
SET3 = pack(SET, 7, 1000, 3, 16)


@pytest.mark.parametrize(
    ("frames", "code", "request_id", "parts"),
    [
        ([b""], ErrorCode.PROTOCOL, 0, ["not a request"]),
        ([b"\xc1"], ErrorCode.PROTOCOL, 0, ["not a request"]),
        ([b"hello"], ErrorCode.PROTOCOL, 0, ["not a request"]),
        ([msgspec.msgpack.encode({"tag": 1})], ErrorCode.PROTOCOL, 0, ["not a request"]),
        ([pack(99, 7)], ErrorCode.PROTOCOL, 7, ["not a request"]),
        ([pack(SET, 7, "soon", 1, 16), KEYS], ErrorCode.PROTOCOL, 7, ["int"]),
        ([pack(HELLO, 7, PROTOCOL, b"", b"\xff\xff")], ErrorCode.PROTOCOL, 7, ["not a request"]),
        ([b"\x95\x01\x07\x01\xc4\x00\xa1\xff"], ErrorCode.PROTOCOL, 7, ["not a request"]),
        ([pack(PING, -1, 5)], ErrorCode.PROTOCOL, 0, ["-1", "2**63"]),
        ([bytes(64 * KiB + 1)], ErrorCode.LIMIT, 0, [64 * KiB + 1, 64 * KiB]),
        (
            [pack(HELLO, 7, 1)],
            ErrorCode.VERSION,
            7,
            ["version 1 ", "speaks versions 3 to 4", "upgrade the client"],
        ),
        ([pack(PING, 7, 5), b"more"], ErrorCode.PROTOCOL, 7, ["PING", "one frame"]),
        ([SET3], ErrorCode.PROTOCOL, 7, ["SET", "keys frame"]),
        ([pack(GET, 7, 1000, 1, 16)], ErrorCode.PROTOCOL, 7, ["GET", "keys frame"]),
        ([SET3, KEYS], ErrorCode.PROTOCOL, 7, ["SET", "payload"]),
        ([SET3, KEYS, PAYLOAD], ErrorCode.PROTOCOL, 7, ["3 of 3 blocks", "checksums"]),
        ([SET3, KEYS, PAYLOAD[:BLOCK]], ErrorCode.BLOCK_SIZE, 7, [BLOCK, 3 * BLOCK]),
        ([SET3, KEYS, PAYLOAD + b"x", SUMS], ErrorCode.BLOCK_SIZE, 7, [3 * BLOCK + 1, f"3 block(s) of {BLOCK}"]),
        ([SET3, KEYS, b"", SUMS], ErrorCode.BLOCK_SIZE, 7, ["of 0 bytes", 3 * BLOCK]),
        ([SET3, KEYS, PAYLOAD, SUMS[:-1]], ErrorCode.PROTOCOL, 7, ["23 bytes", "24 bytes"]),
        ([SET3, KEYS, PAYLOAD, b""], ErrorCode.PROTOCOL, 7, ["0 bytes", "24 bytes"]),
        ([SET3, KEYS, PAYLOAD, PAYLOAD, SUMS], ErrorCode.PROTOCOL, 7, ["checksums", 3 * BLOCK]),
        ([SET3, KEYS, PAYLOAD, SUMS, b"more"], ErrorCode.PROTOCOL, 7, ["after the checksums"]),
        ([SET3, KEYS[:-1], PAYLOAD, SUMS], ErrorCode.PROTOCOL, 7, ["47 bytes", "48 bytes"]),
        ([SET3, b"", PAYLOAD, SUMS], ErrorCode.PROTOCOL, 7, ["0 bytes", "48 bytes"]),
        ([pack(GET, 7, 1000, 3, 16), KEYS, b"more"], ErrorCode.PROTOCOL, 7, ["GET", "more frames follow"]),
        ([pack(DELETE, 7, 1000, 3, 16), KEYS, b""], ErrorCode.PROTOCOL, 7, ["DELETE", "more frames follow"]),
        ([pack(SET, 7, 1000, 3, 7), KEYS], ErrorCode.KEY_SIZE, 7, ["7 bytes", "8 to 64"]),
        ([pack(GET, 7, 1000, 3, 65), KEYS], ErrorCode.KEY_SIZE, 7, ["65 bytes", "8 to 64"]),
        ([pack(GET, 7, 1000, 6, 8), KEYS], ErrorCode.KEY_SIZE, 7, ["8 bytes", "16 bytes"]),
        ([pack(SET, 7, 1000, 1, 32), KEYS[:32], PAYLOAD], ErrorCode.KEY_SIZE, 7, ["32 bytes", "16 bytes"]),
        ([pack(CONTAINS, 7, 1000, 8193, 8), bytes(8 * 8193)], ErrorCode.LIMIT, 7, ["8193", "8192"]),
        ([pack(DELETE, 7, 1000, -1, 8), b""], ErrorCode.LIMIT, 7, ["-1"]),
        ([pack(MATCH_PREFIX, 7, 0, 3, 16), KEYS], ErrorCode.LIMIT, 7, ["0 ms", "600000"]),
        ([pack(CONTAINS, 7, 1000, 3, 16, False, 61.0), KEYS], ErrorCode.LIMIT, 7, ["61.0 s", "60 s"]),
        ([pack(GET, 7, 1000, 3, 16, -5), KEYS], ErrorCode.PROTOCOL, 7, ["-5"]),
    ],
)
def test_a_rule_violation_is_answered_with_the_reason(
    raw: RawClient, frames: list[bytes], code: ErrorCode, request_id: int, parts: list[object]
) -> None:
    raw.send(*frames)
    refused(raw, code, request_id, *parts)


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_message_that_is_too_long_is_one_error(raw: RawClient, cut: int) -> None:
    raw.send(*[SET3, KEYS[:-1], PAYLOAD][:cut], *[bytes(100_000)] * 50)
    reply = raw.reply()[0]
    assert reply[0] == ERROR
    assert raw.ask(pack(PING, 1, 1000)) == [PONG, 1], "one message, one error"


def test_a_refused_set_stores_nothing(raw: RawClient, client: KVStoreClient) -> None:
    raw.send(SET3, KEYS, PAYLOAD, SUMS[:-1])
    refused(raw, ErrorCode.PROTOCOL, 7)
    assert not client.contains(K).any()
    assert raw.ask(SET3, KEYS, PAYLOAD, SUMS)[:8] == [SET_REPLY, 7, 3, 3, 0, 0, 0, 0]
    assert client.get(K).blocks == blocks_of(K, BLOCK)


def test_empty_sets_and_gets_are_no_error(raw: RawClient) -> None:
    assert raw.ask(pack(SET, 7, 1000, 0, 16), b"", b"")[:8] == [SET_REPLY, 7, 0, 0, 0, 0, 0, 0]
    assert raw.ask(pack(GET, 8, 1000, 0, 16), b"") == [67, 8, b"", b"", True, 0, 0, 0, b"", b""]
    assert raw.ask(pack(CONTAINS, 9, 1000, 0, 16), b"") == [68, 9, b""]


def test_a_key_given_twice_is_stored_once(raw: RawClient, client: KVStoreClient) -> None:
    frames = set_frames(7, [K[0], K[1], K[0]], [block_of(K[0], BLOCK), block_of(K[1], BLOCK), bytes(BLOCK)])
    assert raw.ask(*frames)[:8] == [SET_REPLY, 7, 3, 2, 0, 0, 1, 0]
    assert client.get(K[:2]).blocks == blocks_of(K[:2], BLOCK)


def test_a_key_is_written_by_one_client_at_a_time(server: Server, raw: RawClient, client: KVStoreClient) -> None:
    with RawClient(server) as other:
        other.hello(client.namespace.canonical())
        other.send(SET3, KEYS, more=True)
        wait_until(lambda: namespace_info(client).writing == 3)
        assert raw.ask(SET3, KEYS, bytes(3 * BLOCK), sums_of([bytes(BLOCK)] * 3))[:8] == [
            SET_REPLY,
            7,
            3,
            0,
            3,
            0,
            0,
            0,
        ]
        other.send(PAYLOAD, SUMS)
        assert other.reply()[0][:8] == [SET_REPLY, 7, 3, 3, 0, 0, 0, 0]
    assert client.get(K).blocks == blocks_of(K, BLOCK)


def test_a_block_request_without_namespace_asks_for_hello(server: Server) -> None:
    with RawClient(server) as raw:
        for frames in ([SET3, KEYS, PAYLOAD, SUMS], [pack(GET, 7, 1000, 3, 16), KEYS]):
            raw.send(*frames)
            refused(raw, ErrorCode.NO_NAMESPACE, 7, "HELLO")
        assert raw.hello()[0] == WELCOME
        raw.send(pack(DELETE, 7, 1000, 3, 16), KEYS)
        refused(raw, ErrorCode.NO_NAMESPACE, 7, "HELLO")


@pytest.mark.parametrize(
    ("canonical", "code", "parts"),
    [
        (b"no JSON", ErrorCode.PROTOCOL, ["JSON"]),
        (b'{"version":2,"block_bytes":8,"model":"m"}', ErrorCode.VERSION, ["version 2", "version 1"]),
        (b'{"version":1,"block_bytes":0,"model":"m"}', ErrorCode.BLOCK_SIZE, ["0 bytes", 64 * MiB]),
        (b'{"version":1,"block_bytes":99999999,"model":"m"}', ErrorCode.BLOCK_SIZE, [99999999, 64 * MiB]),
        (b'{"version":1,"block_bytes":9000000,"model":"m"}', ErrorCode.OUT_OF_MEMORY, [9000000, 8 * MiB, "--segment"]),
        (b'{"version":1,"block_bytes":8,"model":"\xff"}', ErrorCode.PROTOCOL, ["utf-8"]),
        (b'{"version":1,"block_bytes":8,"model":"m","x":"\xff"}', ErrorCode.PROTOCOL, ["utf-8"]),
        (b"x" * 8193, ErrorCode.LIMIT, [8193, 8192]),
    ],
)
def test_an_invalid_namespace_is_refused(
    raw: RawClient, canonical: bytes, code: ErrorCode, parts: list[object]
) -> None:
    raw.send(pack(HELLO, 5, PROTOCOL, canonical))
    refused(raw, code, 5, *parts)
    assert raw.ask(pack(INFO, 6, 1000))[0] == 72


def test_the_client_raises_the_servers_refusals(server: Server, new_namespace: MakeNamespace) -> None:
    with pytest.raises(ProtocolError, match="namespace version 2"):
        KVStoreClient(server.endpoint, new_namespace(64, version=2))
    with KVStoreClient(server.endpoint, new_namespace(64), fail_open=True) as client:
        client.set(make_keys(1), blocks_of(make_keys(1), 64))
        for call in (client.contains, client.get, client.delete, client.match_prefix):
            with pytest.raises(KeySizeMismatch, match=r"keys of 8 bytes.*16 bytes"):
                call(make_keys(1, key_bytes=8))
        with pytest.raises(BlockSizeMismatch):
            client.set(make_keys(1), [b"short"])


def test_a_get_with_an_id_in_use_is_refused(raw: RawClient, client: KVStoreClient) -> None:
    client.set(K, blocks_of(K, BLOCK))
    raw.send(pack(GET, 7, 10_000, 3, 16, 1), KEYS)  # credit for less than a block, so the GET waits
    wait_until(lambda: shard_info(client).streams == 1)
    raw.send(pack(GET, 7, 10_000, 3, 16), KEYS)
    refused(raw, ErrorCode.PROTOCOL, 7, "in use")


def test_gets_in_progress_are_limited(raw: RawClient, client: KVStoreClient) -> None:
    client.set(K, blocks_of(K, BLOCK))
    for request_id in range(256):
        raw.send(pack(GET, request_id, 10_000, 3, 16, 1), KEYS)
    raw.send(pack(GET, 1000, 10_000, 3, 16, 1), KEYS)
    refused(raw, ErrorCode.LIMIT, 1000, "256")
    assert shard_info(client).streams == 256
    raw.send(pack(11, 0))
    raw.send(pack(GET, 1000, 10_000, 1, 16), K[0])
    assert raw.reply()[0][:2] == [67, 1000]


def test_info_of_many_large_namespaces_is_sent_without_flooding_readers(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server(memory="64MiB", segment="1MiB")
    with (
        server.unharmed(),
        KVStoreClient(server.endpoint, new_namespace(64)) as client,
        MemoryWatch(server, 64 * MiB),
        RawClient(server, receive_buffer=64 * KiB) as raw,
    ):
        for number in range(1100):
            canonical = b'{"block_bytes":64,"model":"%d%s","version":1}' % (number, b"x" * 8000)
            assert raw.hello(canonical)[0] == WELCOME
            assert raw.ask(*set_frames(1, K[:1], [bytes(64)]))[0] in {SET_REPLY, ERROR}
        assert 64 <= len(shard_info(client).namespaces) <= 1024, "those that gave way and are empty disappear"
        raw.sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            for _ in range(10):
                raw.sock.sendall(zmtp_frame(pack(INFO, 1, 1000), 0) * 1000)
        assert client.ping() < 5


def test_repeated_refusals_do_not_fill_the_log(server: Server, raw: RawClient) -> None:
    before = server.log_text()
    for _ in range(500):
        assert raw.ask(b"garbage")[0] == ERROR
    assert server.log_text()[len(before) :].count("\n") < 10


def test_many_small_messages_do_not_delay_other_clients(server: Server, client: KVStoreClient) -> None:
    with RawClient(server, receive_buffer=64 * KiB) as flood:
        flood.sock.settimeout(0.2)
        for message in (b"\0\0", zmtp_frame(pack(PING, 1, 1000), 0), zmtp_frame(b"garbage", 0)):
            with contextlib.suppress(TimeoutError):
                for _ in range(20):
                    flood.sock.send(message * (200_000 // len(message)))
            assert client.ping() < 5.0
    shard = shard_info(client)
    assert shard.rss_bytes < shard.memory_limit_bytes + 256 * MiB


def test_credit_and_cancel_without_a_request_are_ignored(raw: RawClient) -> None:
    raw.send(pack(10, 12345, 1 << 40))
    raw.send(pack(10, 1, -5))
    raw.send(pack(11, 12345))
    assert raw.ask(pack(PING, 1, 1)) == [PONG, 1]


# ---- frames and connections that break ZMTP ------------------------------------------------------------------------


def test_a_frame_over_the_limit_is_refused_unread(server: Server, raw: RawClient) -> None:
    size = 64 * MiB + 1
    raw.sock.sendall(b"\x02" + struct.pack(">Q", size))
    reply = raw.reply()[0]
    assert reply[:3] == [ERROR, 0, int(ErrorCode.LIMIT)]
    assert str(size) in reply[3] and str(64 * MiB) in reply[3]
    assert raw.closed()


@pytest.mark.parametrize("size", [2**63, 2**64 - 16_384, 2**64 - 50, 2**64 - 1])
def test_a_frame_of_absurd_size_closes_the_connection(raw: RawClient, size: int) -> None:
    raw.sock.sendall(b"\x03" + struct.pack(">Q", size))
    assert raw.reply()[0][:3] == [ERROR, 0, int(ErrorCode.LIMIT)]
    assert raw.closed()


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x00",
        b"\xff" * 100,
        b"\x04\x00",
        b"\x04\x05\xffREAD",
        b"\x06" + struct.pack(">Q", 5000),
        zmtp_frame(b"\x05ERROR\x04oops", 4),
    ],
    ids=["reserved bit", "all bits", "no name", "short name", "long command", "ERROR"],
)
def test_an_invalid_zmtp_frame_closes_the_connection(raw: RawClient, data: bytes) -> None:
    raw.sock.sendall(data)
    assert raw.closed()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        bytes(64),
        b"\xff" * 64,
        GREETING[:10] + b"\x02\x00" + GREETING[12:],
        GREETING[:12] + b"PLAIN" + GREETING[17:],
        GREETING + zmtp_frame(b"\x93\x09\x01\x01", 0),
        GREETING + ready_command(b"PUB"),
        GREETING + ready_command(b"a\nforged log line"),
        GREETING + zmtp_frame(b"\x05READY", 4),
    ],
    ids=["HTTP", "TLS", "zeros", "ones", "ZMTP 2", "PLAIN", "frame before READY", "PUB", "newline", "no type"],
)
def test_a_foreign_program_on_the_port_is_rejected(server: Server, client: KVStoreClient, data: bytes) -> None:
    with RawClient(server, handshake=False) as stranger:
        stranger.sock.sendall(data)
        assert stranger.closed()
    assert "\nforged" not in server.log_text()


def test_an_unfinished_handshake_is_dropped(start_server: StartServer, clock: Clock) -> None:
    server = start_server(**clock.environment)
    with RawClient(server, handshake=False) as silent, RawClient(server, handshake=False) as half:
        half.sock.sendall(GREETING[:30])
        for stranger in (silent, half):
            assert stranger.read(10) == GREETING[:10], "the server has greeted it"
        clock.advance(HANDSHAKE_S)
        for stranger in (silent, half):
            assert stranger.closed()


def test_a_message_unfinished_at_its_deadline_is_dropped(server: Server, raw: RawClient, client: KVStoreClient) -> None:
    raw.send(pack(SET, 7, 300, 3, 16), KEYS, more=True)
    wait_until(lambda: namespace_info(client).writing == 3)
    assert raw.closed()
    assert namespace_info(client).writing == 0 and not client.contains(K).any()


@pytest.mark.parametrize("kind", ["close", "reset"])
@pytest.mark.parametrize("sent", [0, 1, BLOCK, 3 * BLOCK])
def test_a_client_that_vanishes_during_a_set_leaves_nothing_behind(
    raw: RawClient, client: KVStoreClient, sent: int, kind: str
) -> None:
    before = namespace_info(client)
    connections = shard_info(client).connections
    raw.send(SET3, KEYS, more=True)
    if sent:
        raw.sock.sendall((b"\x03" + struct.pack(">Q", 3 * BLOCK) + PAYLOAD)[: 9 + sent])
    wait_until(lambda: namespace_info(client).writing == 3)
    if kind == "reset":
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()
    wait_until(lambda: namespace_info(client).writing == 0, what="its slots are free again")
    after = namespace_info(client)
    assert (after.blocks, after.slots) == (before.blocks, before.slots)
    assert not client.contains(K).any()
    wait_until(lambda: shard_info(client).connections == connections - 1)


def test_a_client_that_vanishes_during_a_stream_leaves_nothing_behind(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server(memory="64MiB", segment="8MiB")
    namespace = new_namespace(MiB)
    with server.unharmed(), KVStoreClient(server.endpoint, namespace) as client:
        keys = make_keys(64)
        client.set(keys, blocks_of(keys, MiB))
        raw = RawClient(server, receive_buffer=64 * KiB)
        raw.hello(namespace.canonical())
        raw.send(pack(GET, 1, 60_000, 64, 16), b"".join(keys))
        raw.read(100_000)
        assert shard_info(client).streams == 1
        raw.close()
        wait_until(lambda: shard_info(client).streams == 0)
        new = make_keys(64, first=1000)
        assert client.set(new, blocks_of(new, MiB)).created == 64, "no block is held any more"


def test_a_reader_that_never_reads_harms_no_other_client(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server("--policy", "lru", memory="64MiB", segment="8MiB")  # new blocks push old ones out
    namespace = new_namespace(MiB)
    keys = make_keys(48)
    with (
        server.unharmed(),
        KVStoreClient(server.endpoint, namespace, timeout_s=5.0) as client,
        contextlib.ExitStack() as lazy,
    ):
        client.set(keys, blocks_of(keys, MiB))
        for _ in range(10):
            raw = lazy.enter_context(RawClient(server, receive_buffer=64 * KiB))
            raw.hello(namespace.canonical())
            for request_id in range(10):
                raw.send(pack(GET, request_id, 60_000, 48, 16), b"".join(keys))
        wait_until(lambda: shard_info(client).streams > 50)
        for _ in range(3):
            assert client.get(keys).blocks == blocks_of(keys, MiB)
        new = make_keys(30, first=1000)
        assert client.set(new, blocks_of(new, MiB)).created == 30
        assert client.get(new).hit == 30
        shard = shard_info(client)
        assert shard.rss_bytes < shard.memory_limit_bytes + 256 * MiB


def test_unread_replies_stop_further_requests(start_server: StartServer) -> None:
    """The server reads no more requests from a client that does not read its replies. So the unread replies are
    bounded."""
    server = start_server()
    with server.unharmed(), RawClient(server, receive_buffer=64 * KiB) as flood, RawClient(server) as other:
        flood.sock.settimeout(0.5)
        message = zmtp_frame(pack(INFO, 1, 1000), 0) * 5000
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 * MiB:
                sent += flood.sock.send(message)
        assert sent < 64 * MiB
        assert other.ask(pack(PING, 5, 1000)) == [PONG, 5]
        info = msgspec.msgpack.decode(other.ask(pack(INFO, 6, 1000))[2])
        assert info["rss_bytes"] < info["memory_limit_bytes"] + 256 * MiB


# ---- the command line ----------------------------------------------------------------------------------------------


def run_server(*arguments: str, **extra: str) -> tuple[int, str]:
    """Run a server that is expected not to start. Returns its exit status and output."""
    done = forked.run("kvstore", *arguments, env=environment(**extra), timeout=30)
    assert "Traceback" not in done.stderr, done.stderr
    assert "ready" not in done.stdout
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "status", "parts"),
    [
        (["--memory", "16MiB"], 2, ["--memory 16MiB", "one segment", "32MiB", "--segment"]),
        (["--memory", "64MiB", "--shards", "3"], 2, ["3 shard", "--shards"]),
        (["--memory", "lots"], 2, ["--memory lots", "4GiB"]),
        (["--segment", "1"], 2, ["--segment 1:", "1MiB"]),
        (["--memory", "100000TiB"], 1, ["109951162777600000", "--memory"]),
        (["--port", "70000"], 2, ["port", "70000", "65535"]),
        (["--port", "x"], 2, ["--port x", "whole number from 0 to 65535"]),
        (["--shards", "0"], 2, ["shards", "0", "1"]),
        (["--log-level", "loud"], 2, ["--log-level loud", "debug"]),
        (["--memroy", "1GiB"], 2, ["--memroy"]),
        (["extra"], 2, ["extra"]),
        (["--config", "/nowhere/server.toml"], 2, ["/nowhere/server.toml", "No such file"]),
        (["--host", "no.such.host.invalid", "--insecure", "--port", "0"], 1, ["no.such.host.invalid", "--host"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and str(value[0]).startswith("-") else "",
)
def test_a_server_that_cannot_start_gives_the_reason(arguments: list[str], status: int, parts: list[str]) -> None:
    returned, said = run_server(*arguments)
    assert returned == status, said
    assert all(part in said for part in parts), said


def test_an_unknown_key_of_the_configuration_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('memory = "64MiB"\nevction = "lru"\n')
    status, said = run_server("--config", str(file), "--port", "0")
    assert status == 2 and "'evction'" in said and str(file) in said


def test_an_unknown_variable_is_named() -> None:
    status, said = run_server("--port", "0", KVSTORE_SERVER_MEMROY="1GiB")
    assert status == 2 and "'KVSTORE_SERVER_MEMROY'" in said and "KVSTORE_SERVER_MEMORY" in said


def test_a_port_in_use_is_named(server: Server) -> None:
    status, said = run_server("--port", str(server.port), "--memory", "64MiB")
    assert status == 1 and str(server.port) in said and "in use" in said and "--port" in said


def test_settings_of_all_sources_reach_the_server(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('memory = "1GiB"\nsegment = "8MiB"\nshards = 4\nlog_level = "debug"\n')
    log = tmp_path / "server.log"
    server = Server(log, "--config", str(file), "--memory", "32MiB", KVSTORE_SERVER_SHARDS="2")
    try:
        assert server.ready_line.endswith("shards=2 memory=33554432\n")
        with RawClient(server) as raw:
            assert len(raw.hello()[7]) == 2
            info = msgspec.msgpack.decode(raw.ask(pack(INFO, 1, 1000))[2])
        assert info["segment_bytes"] == 8 * MiB and info["memory_limit_bytes"] == 16 * MiB
    finally:
        assert server.stop() == 0


def test_version_and_help_are_printed() -> None:
    for argument, part in (("--version", "kvstore-server "), ("--help", "--memory")):
        done = forked.run("kvstore", argument, env=environment())
        assert done.returncode == 0 and part in done.stdout


def test_importing_the_client_is_quick_and_loads_no_framework() -> None:
    code = "import sys, kvstore_client; print([m for m in ('torch', 'vllm', 'typer', 'zmq') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environment(), check=True
    )
    assert done.stdout == "[]\n" and os.path.basename(sys.executable)
