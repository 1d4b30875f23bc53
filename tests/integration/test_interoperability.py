"""libzmq as the peer: a plain pyzmq DEALER against the server, and the client against a pyzmq ROUTER.

All messages here are written from docs/protocol.md, without code of `kvstore`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from kvstore import wire
from kvstore_client import ConnectionLost, KVStoreClient, Namespace, ProtocolError
from kvstore_client._links.link import Link
from tests.support.harness import (
    CONTAINS,
    CONTAINS_REPLY,
    DELETE,
    DELETE_REPLY,
    GET,
    HELLO,
    INFO,
    MATCH_PREFIX,
    MATCH_REPLY,
    PART,
    PING,
    PONG,
    PROTOCOL,
    ROOT,
    SET,
    SET_REPLY,
    SYNC,
    SYNC_REPLY,
    WELCOME,
    MakeNamespace,
    Server,
    blocks_of,
    make_keys,
    pack,
    sums_of,
)

ANSWER_MS = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def dealer(server: Server, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = dealer.sndtimeo = ANSWER_MS
        dealer.connect(server.endpoint)
        yield dealer


def ask(dealer: zmq.Socket[bytes], *frames: bytes) -> tuple[list[Any], list[bytes]]:
    dealer.send_multipart(frames)
    header, *rest = dealer.recv_multipart()
    return msgspec.msgpack.decode(header), rest


def hello(dealer: zmq.Socket[bytes], block_bytes: int, model: str) -> list[Any]:
    fields = {"model": model, "dtype": "uint8", "block_tokens": 16, "block_bytes": block_bytes, "version": 1}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    reply, _ = ask(dealer, pack(HELLO, 1, PROTOCOL, canonical))
    return reply


def test_a_pyzmq_dealer_works_as_a_client(server: Server, dealer: zmq.Socket[bytes]) -> None:
    size, keys = 4096, make_keys(300)
    blocks = blocks_of(keys, size)
    joined = b"".join(keys)
    tag, request_id, protocol, _, _, shard, block_bytes, shards, zone, *_ = hello(dealer, size, "pyzmq")
    assert (tag, request_id, protocol, shard, block_bytes, zone) == (WELCOME, 1, PROTOCOL, 0, size, "")
    assert [address[1:3] for address in shards] == [["", server.port]]

    payload = [b"".join(blocks[:256]), b"".join(blocks[256:])]  # as many blocks as fit into a frame of 1 MiB
    reply, _ = ask(dealer, pack(SET, 2, 10_000, 300, 16), joined, *payload, sums_of(blocks))
    assert reply[:8] == [SET_REPLY, 2, 300, 300, 0, 0, 0, 0]
    assert ask(dealer, pack(SYNC, 3, 10_000))[0] == [SYNC_REPLY, 3]
    present = ask(dealer, pack(CONTAINS, 4, 10_000, 301, 16), joined + bytes(16))[0]
    assert present == [CONTAINS_REPLY, 4, b"\x01" * 300 + b"\x00"]
    assert ask(dealer, pack(MATCH_PREFIX, 5, 10_000, 300, 16), joined)[0] == [MATCH_REPLY, 5, 300]

    dealer.send_multipart([pack(GET, 6, 10_000, 300, 16), joined])
    got: dict[int, bytes] = {}
    last = False
    while not last:
        header, *payload = dealer.recv_multipart()
        tag, request_id, positions, sums, last, hit, miss, *_ = msgspec.msgpack.decode(header)
        assert (tag, request_id) == (PART, 6) and len(payload) == 1
        of_part = [int.from_bytes(positions[at : at + 4], "little") for at in range(0, len(positions), 4)]
        part = [payload[0][at : at + size] for at in range(0, len(payload[0]), size)]
        assert sums == sums_of(part)
        got.update(zip(of_part, part, strict=True))
    assert got == dict(enumerate(blocks)) and (hit, miss) == (300, 0)

    info = msgspec.msgpack.decode(ask(dealer, pack(INFO, 7, 10_000))[0][2])
    assert info["shard"] == 0 and sum(ns["blocks"] for ns in info["namespaces"]) >= 300
    assert ask(dealer, pack(DELETE, 8, 10_000, 300, 16), joined)[0] == [DELETE_REPLY, 8, 300]
    assert ask(dealer, pack(PING, 9, 10_000))[0] == [PONG, 9]


def test_either_client_reads_what_the_other_set(server: Server, dealer: zmq.Socket[bytes]) -> None:
    size, keys = 917_504, make_keys(6)
    namespace = Namespace(model="both", dtype="uint8", block_tokens=16, block_bytes=size)
    blocks = blocks_of(keys, size)
    assert ask(dealer, pack(HELLO, 1, PROTOCOL, namespace.canonical()))[0][0] == WELCOME
    with KVStoreClient(server.endpoint, namespace) as client:
        head = pack(SET, 2, 10_000, 3, 16)
        reply, _ = ask(dealer, head, b"".join(keys[:3]), *blocks[:3], sums_of(blocks[:3]))
        assert reply[3] == 3
        client.set(keys[3:], blocks[3:])
        assert client.get(keys).blocks == blocks
        dealer.send_multipart([pack(GET, 3, 10_000, 3, 16), b"".join(keys[3:])])
        received = [dealer.recv_multipart() for _ in range(3)]
        assert [parts[1] for parts in received] == blocks[3:]
        assert msgspec.msgpack.decode(received[-1][0])[4] is True


def test_concurrent_requests_are_distinguished_by_id(dealer: zmq.Socket[bytes]) -> None:
    hello(dealer, 64, "in flight")
    keys = make_keys(50)
    for number, key in enumerate(keys):
        block = blocks_of([key], 64)
        dealer.send_multipart([pack(SET, 100 + number, 10_000, 1, 16), key, *block, sums_of(block)])
        dealer.send_multipart([pack(CONTAINS, 200 + number, 10_000, 1, 16), key])
    replies = [msgspec.msgpack.decode(dealer.recv_multipart()[0]) for _ in range(100)]
    by_id = {reply[1]: reply for reply in replies}
    assert all(by_id[100 + number][3] == 1 and by_id[200 + number][2] == b"\x01" for number in range(50))


def test_heartbeats_of_libzmq_are_answered(server: Server, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = ANSWER_MS
        dealer.heartbeat_ivl, dealer.heartbeat_timeout = 50, 400
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(server.endpoint)
        assert ask(dealer, pack(HELLO, 1, PROTOCOL))[0][0] == WELCOME
        assert not monitor.poll(1000), "libzmq gave the connection up: its PING was not answered"
        assert ask(dealer, pack(PING, 2, 1000))[0] == [PONG, 2]
        dealer.disable_monitor()
        monitor.close()


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.SUB, zmq.PAIR])
def test_a_socket_of_another_type_is_rejected(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], kind: int, dealer: zmq.Socket[bytes]
) -> None:
    with context.socket(kind) as stranger:
        stranger.linger = 0
        stranger.reconnect_ivl = -1
        stranger.connect(server.endpoint)
        assert not stranger.poll(300, zmq.POLLIN)
    hello(dealer, 64, "after a stranger")


# ---- our client, their server --------------------------------------------------------------------------------------


@pytest.fixture
def router(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = ANSWER_MS
        yield router


LINK_NAMESPACE = b'{"block_bytes":64,"model":"link","version":1}'


def link_to(router: zmq.Socket[bytes]) -> Link:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    return Link(
        "fake", "127.0.0.1", port, lambda: wire.Hello(0, PROTOCOL, LINK_NAMESPACE, "link", newest=4), lambda: None
    )


def welcome(request_id: int, port: int = 1, block_bytes: int = 64, shard: int = 0, protocol: int = PROTOCOL) -> bytes:
    return pack(WELCOME, request_id, protocol, "9.9", "fake", shard, block_bytes, [["fake/0", "", port, 1.0]])


def test_a_link_connects_to_a_pyzmq_router(router: zmq.Socket[bytes]) -> None:
    link = link_to(router)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(link.connect, 5.0)
        peer, header = router.recv_multipart()
        assert msgspec.msgpack.decode(header) == [
            HELLO,
            0,
            PROTOCOL,
            LINK_NAMESPACE,
            "link",
            b"",
            1,
            "",
            False,
            False,
            4,
            0,
            False,
            "",
        ]
        router.send_multipart([peer, welcome(0)])
        reply = connecting.result(5)
    assert (reply.version, reply.node, reply.block_bytes) == ("9.9", "fake", 64)
    link.close()


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (pack(127, 0, 2, "protocol version 2: this server speaks 7"), "this server speaks 7"),
        (pack(PONG, 0), "answered HELLO with Pong"),
        (b"\xc1 no msgpack", "not a reply"),
    ],
)
def test_a_router_with_other_answers_is_no_server(router: zmq.Socket[bytes], answer: bytes, part: str) -> None:
    link = link_to(router)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(link.connect, 5.0)
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, answer])
        with pytest.raises(ProtocolError, match=part):
            connecting.result(5)
    assert link.sock is None


class FakeShard(threading.Thread):
    """A ROUTER that answers HELLO correctly, and every other request with the frames that `answer` returns. `spoken`:
    the version of the protocol. `block_bytes`: the size of the blocks in its clients' namespaces."""

    def __init__(self, router: zmq.Socket[bytes], answer: Any, spoken: int = PROTOCOL, block_bytes: int = 64) -> None:
        super().__init__(daemon=True)
        self.router = router
        self.answer = answer
        self.spoken = spoken
        self.block_bytes = block_bytes
        self.port = router.bind_to_random_port("tcp://127.0.0.1")
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            if not self.router.poll(50):
                continue
            peer, *frames = self.router.recv_multipart()
            fields = msgspec.msgpack.decode(frames[0])
            if fields[0] == HELLO:
                replies = [[welcome(fields[1], self.port, self.block_bytes, protocol=self.spoken)]]
            else:
                replies = self.answer(fields, frames)
            for reply in replies:
                self.router.send_multipart([peer, *reply])


BLOCK = bytes(range(64))
PART_OF_ONE = [b"\0\0\0\0", sums_of([BLOCK])]


@pytest.mark.parametrize(
    "reply",
    [
        [pack(PART, 0, b"\x05\0\0\0", sums_of([BLOCK]), True, 1, 0), BLOCK],
        [pack(PART, 0, b"\0\0\0\0", b"", True, 1, 0), BLOCK],
        [pack(PART, 0, b"\0\0\0", sums_of([BLOCK]), True, 1, 0), BLOCK],
        [pack(PART, 0, *PART_OF_ONE, True, 1, 0)],
        [pack(PART, 0, *PART_OF_ONE, True, 1, 0), BLOCK[:63]],
        [pack(PART, 0, *PART_OF_ONE, True, 1, 0), BLOCK, BLOCK],
        [pack(PONG, 0), BLOCK],
        [pack(PONG, 0)],
        [pack(200, 0)],
        [b""],
        [pack(127, 0, 99, "an error of 127.0.0.1 that this client does not know")],
    ],
)
def test_a_lying_server_causes_errors_or_misses_but_never_wrong_bytes(
    router: zmq.Socket[bytes], new_namespace: MakeNamespace, reply: list[bytes]
) -> None:
    def answer(fields: list[Any], _: list[bytes]) -> list[list[bytes]]:
        if fields[0] != GET:
            return [[pack(DELETE_REPLY, fields[1], 0)]]
        try:
            header = msgspec.msgpack.decode(reply[0])
        except msgspec.DecodeError:
            return [reply]
        return [[pack(header[0], fields[1], *header[2:]), *reply[1:]]]

    shard = FakeShard(router, answer)
    shard.start()
    try:
        with KVStoreClient(f"tcp://127.0.0.1:{shard.port}", new_namespace(64), timeout_s=2.0) as client:
            try:
                assert client.get([bytes(16)]).miss == 1
            except (ProtocolError, ConnectionLost) as error:
                assert "127.0.0.1" in str(error)
            assert client.delete([bytes(16)]) == 0, "the client connects again"
    finally:
        shard.stop.set()
        shard.join()


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_server_that_does_not_know_a_request_is_named(
    router: zmq.Socket[bytes], new_namespace: MakeNamespace, protocol: int
) -> None:
    """A server of version 3 is not asked. Another server that does not know the request answers with ERROR."""
    asked: list[int] = []

    def answer(fields: list[Any], _: list[bytes]) -> list[list[bytes]]:
        asked.append(fields[0])
        return [[pack(127, fields[1], 1, "the header is not a request of protocol 4: Invalid value 22 - at `$[0]`")]]

    shard = FakeShard(router, answer, protocol)
    shard.start()
    try:
        with KVStoreClient(f"tcp://127.0.0.1:{shard.port}", new_namespace(64), timeout_s=5.0) as client:
            expected = rf"127\.0\.0\.1:{shard.port}: this server has an earlier release, .* clients: upgrade the server"
            with pytest.raises(ProtocolError, match=expected):
                client.clients()
            with pytest.raises(ProtocolError, match=expected.replace("clients", "log")):
                client.slow_requests()
    finally:
        shard.stop.set()
        shard.join()
    assert asked == ([] if protocol == 3 else [22, 23])


def test_a_server_that_names_a_nonexistent_shard_is_refused(
    router: zmq.Socket[bytes], new_namespace: MakeNamespace
) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(KVStoreClient, f"tcp://127.0.0.1:{port}", new_namespace(64), timeout_s=2.0)
        peer, header = router.recv_multipart()
        router.send_multipart([peer, welcome(msgspec.msgpack.decode(header)[1], port, shard=3)])
        with pytest.raises(ProtocolError, match="shard 3"):
            connecting.result(5)


def test_the_client_in_the_specification_works(server: Server) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for said in ("created 300 existed 0\nhit 300 miss 0\n", "created 0 existed 300\nhit 300 miss 0\n"):
        done = subprocess.run(
            [sys.executable, "-c", example, server.endpoint], capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_the_specification_names_every_error_and_limit() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    for code in wire.ErrorCode:
        assert f"| {int(code)} | {code.name} |" in text
    for message in (*wire.VERBS, *wire.Reply.__subclasses__()):
        fields = ", ".join(message.__struct_fields__[1:])
        heading = re.search(rf"`\[{message.__struct_config__.tag}, id(.*?)\]`", text)
        assert heading is not None, message
        named = ", ".join(re.findall(r"(\w+):", heading[1]))
        assert named == fields, message
    for field in (*wire.ShardInfo.__struct_fields__, *wire.NamespaceInfo.__struct_fields__):
        assert f"`{field}`" in text
