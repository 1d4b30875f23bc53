"""The server's own connection to a shard. A correct shard gives right answers; with any other, calls raise
`ShardQueryError` in time.

The client's connections share the code of its dealer half, so the same wrong answers test both.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore._cext import checksum, checksum_into
from kvstore.wire import ShardAddress
from kvstore.wire.queries import KeyArray, Refused, ShardQueries, ShardQueryError
from kvstore_client import KVStoreClient, ProtocolError
from tests.support.harness import (
    CONTAINS,
    CONTAINS_REPLY,
    ERROR,
    GET,
    GREETING,
    HELLO,
    INFO,
    INFO_REPLY,
    PART,
    PROTOCOL,
    SET_REPLY,
    WELCOME,
    MakeNamespace,
    Server,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
    ready_command,
    zmtp_frame,
)

HOTTEST, HOTTEST_REPLY = 13, 75
TIMEOUT_S = 5.0
NAMESPACE = make_namespace(64, "m")


def matrix(keys: Sequence[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)


def sums_of(blocks: Sequence[bytes]) -> np.ndarray:
    sums = np.empty(len(blocks), dtype=np.uint64)
    checksum_into(blocks, sums)
    return sums


def address(server: Server) -> tuple[str, int]:
    return server.host, server.port


# ---- a right shard ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_bytes", "count"), [(917_504, 9), (4096, 700), (5 << 20, 2), (1, 1300)])
def test_blocks_are_sent_and_received(
    server: Server, new_namespace: MakeNamespace, block_bytes: int, count: int
) -> None:
    namespace, keys = new_namespace(block_bytes), make_keys(count)
    blocks = blocks_of(keys, block_bytes)
    sums = sums_of(blocks)
    with ShardQueries(address(server), TIMEOUT_S, namespace.canonical()) as asking:
        reply = asking.set(matrix(keys), [memoryview(block) for block in blocks], sums)
        assert (reply.total, reply.created) == (count, count)
        assert asking.set(matrix(keys[:1]), [memoryview(blocks[0])], sums[:1]).existed == 1
        assert asking.contains(matrix([keys[0], b"absent-absent-00"])).tolist() == [True, False]
        asked = [*keys, b"absent-absent-00"]
        came: dict[int, bytes] = {}
        for positions, found, _, memory in asking.get(matrix(asked)):
            for number, position in enumerate(positions.tolist()):
                came[position] = bytes(memory[number * block_bytes : (number + 1) * block_bytes])
                assert found[number] == sums[position]
            memory[:] = bytes(len(memory))  # the memory belongs to the caller
        assert came == dict(enumerate(blocks))
        listed, _, total = asking.hottest(0, 2)
        assert listed.tobytes() == keys[0] + keys[1] if count < 1000 else len(listed) == 2
        assert total == count
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.get(keys).hit == count  # the client verifies the checksums


def test_moving_a_block_does_not_count_as_use(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(4096), make_keys(4)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(keys, blocks_of(keys, 4096))
        with ShardQueries(address(server), TIMEOUT_S, namespace.canonical()) as asking:
            hottest, *_ = asking.hottest(0, 4)
            assert sum(len(positions) for positions, *_ in asking.get(hottest[::-1].copy())) == 4
            assert (asking.hottest(0, 4)[0] == hottest).all()
        mine = next(each for each in client.info().shards[0].namespaces if each.id == namespace.id)
        assert (mine.hits, mine.misses) == (0, 0)


def test_a_shard_reports_its_identity_and_state(server: Server, new_namespace: MakeNamespace) -> None:
    with ShardQueries(address(server), TIMEOUT_S) as asking:
        assert asking.welcome.shards[0].port == server.port and asking.welcome.block_bytes == 0
        assert asking.info().name == asking.welcome.shards[0].name
        assert asking.hello(new_namespace(4096).canonical(), 2).block_bytes == 4096
        assert asking.hottest(0, 10)[0].shape[0] == 0
        assert list(asking.get(matrix(make_keys(3)))) == []


def test_a_refused_request_has_no_other_effect(server: Server, new_namespace: MakeNamespace) -> None:
    keys = matrix(make_keys(1))
    with ShardQueries(address(server), TIMEOUT_S) as asking:
        for ask in (lambda: asking.contains(keys), lambda: list(asking.get(keys)), lambda: asking.hottest(0, 1)):
            with pytest.raises(Refused, match="HELLO"):
                ask()
        with pytest.raises(Refused, match="JSON"):
            asking.hello(b"none")
        asking.hello(new_namespace(4096).canonical())
        with pytest.raises(Refused, match="8193"):
            asking.contains(matrix(make_keys(8193)))
        assert asking.contains(keys).tolist() == [False]


def test_a_block_of_the_wrong_size_is_not_sent(server: Server, new_namespace: MakeNamespace) -> None:
    (key,) = make_keys(1)
    with ShardQueries(address(server), TIMEOUT_S, new_namespace(4096).canonical()) as asking:
        with pytest.raises(ValueError, match="4096"):
            asking.set(matrix([key]), [memoryview(bytes(4095))], np.zeros(1, dtype=np.uint64))
        with pytest.raises(ValueError, match="2 blocks"):
            asking.set(matrix([key]), [memoryview(bytes(4096))] * 2, np.zeros(1, dtype=np.uint64))
        assert not asking.contains(matrix([key])).any()


def test_unread_blocks_close_the_connection(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(1 << 20), make_keys(8)
    blocks = blocks_of(keys, 1 << 20)
    with ShardQueries(address(server), TIMEOUT_S, namespace.canonical()) as asking:
        asking.set(matrix(keys), [memoryview(block) for block in blocks], sums_of(blocks))
        next(coming := asking.get(matrix(keys)))
        coming.close()
        with pytest.raises(ShardQueryError, match="closed"):
            asking.info()


def test_blocks_in_use_are_not_overwritten(server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(256 << 10), make_keys(64)
    blocks = blocks_of(keys, 256 << 10)
    with ShardQueries(address(server), TIMEOUT_S, namespace.canonical()) as asking:
        asking.set(matrix(keys), [memoryview(block) for block in blocks], sums_of(blocks))
        kept: list[tuple[np.ndarray, memoryview]] = []
        for turn in range(4):
            came = [(positions, memory) for positions, _, _, memory in asking.get(matrix(keys))]
            kept += came[turn::4]  # the other parts are released, and their memory is reused
            del came
        for positions, memory in kept:
            assert bytes(memory) == b"".join(blocks[position] for position in positions.tolist())


# ---- a wrong one -----------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ShardQueryError, match="refused"):
            ShardQueries(taken.getsockname(), TIMEOUT_S)


@pytest.mark.exclusive
def test_a_silent_shard_is_an_error_in_time(start_server: StartServer) -> None:
    server = start_server()
    with ShardQueries(address(server), 0.4, NAMESPACE.canonical()) as asking, server.stopped():
        before = time.monotonic()
        with pytest.raises(ShardQueryError, match=r"0\.4 s"):
            asking.info()
        with pytest.raises(ShardQueryError, match="closed"):
            asking.info()
        with pytest.raises(ShardQueryError, match=r"0\.3 s"):
            ShardQueries(address(server), 0.3)
        assert time.monotonic() - before < 1.5


@pytest.mark.exclusive
def test_a_shard_that_reads_nothing_is_an_error_in_time(start_server: StartServer) -> None:
    server = start_server()
    namespace, keys = make_namespace(1 << 20, "m"), make_keys(40)
    block = memoryview(bytes(1 << 20))
    with ShardQueries(address(server), TIMEOUT_S, namespace.canonical()) as asking, server.stopped():
        asking.timeout_s, before = 0.4, time.monotonic()
        with pytest.raises(ShardQueryError, match=r"0\.4 s"):
            asking.set(matrix(keys), [block] * 40, np.zeros(40, dtype=np.uint64))
        assert time.monotonic() - before < 1.5


def test_another_thread_can_interrupt_a_call(start_server: StartServer) -> None:
    server = start_server()
    with ShardQueries(address(server), 30.0) as asking, server.stopped():
        before = time.monotonic()
        threading.Timer(0.2, asking.interrupt).start()
        with pytest.raises(ShardQueryError):
            asking.info()
        assert time.monotonic() - before < 5
    asking.interrupt()  # the connection is closed, so this has no effect


Answer = Callable[[list[Any], list[bytes]], list[bytes]]


@contextmanager
def lying_shard(answer: Answer, hello: bytes = GREETING + ready_command(b"ROUTER")) -> Iterator[tuple[str, int]]:
    """Run a shard that answers each message with the bytes that `answer` returns for its header's fields and its other
    frames."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with suppress(OSError), sock, sock.makefile("rb") as received:  # the other side may reset the connection
            sock.sendall(hello)
            received.read(64)
            frames: list[bytes] = []
            while head := received.read(2):
                size = int.from_bytes(head[1:] + received.read(7), "big") if head[0] & 2 else head[1]
                data = received.read(size)
                if head[0] & 4:
                    commands.append(data)
                    continue
                frames.append(data)
                if head[0] & 1:
                    continue
                fields = msgspec.msgpack.decode(frames[0])
                sock.sendall(b"".join(welcome(fields) if fields[0] == HELLO else answer(fields, frames[1:])))
                frames = []

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.close()
        thread.join(10)


commands: list[bytes] = []
SHARDS = [ShardAddress("m/0", "", 7070, 1.0)]


def message(*fields: Any, payload: bytes | None = None) -> bytes:
    last = b"" if payload is None else zmtp_frame(payload, 0)
    return zmtp_frame(pack(*fields), 0 if payload is None else 1) + last


def welcome(fields: list[Any], **changed: Any) -> list[bytes]:
    values = {"protocol": PROTOCOL, "block_bytes": 64 if fields[3] else 0, "shard": 0, "shards": SHARDS, **changed}
    return [
        message(
            WELCOME,
            fields[1],
            values["protocol"],
            "1",
            "n",
            values["shard"],
            values["block_bytes"],
            values["shards"],
        )
    ]


def u32(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<u4").tobytes()


BLOCK = block_of(b"key", 64)
SUM = checksum(BLOCK).to_bytes(8, "little")

LIES: dict[str, tuple[int, Answer]] = {
    "of another request": (INFO, lambda fields, _: [message(INFO_REPLY, fields[1] + 1, b"")]),
    "of another kind": (INFO, lambda fields, _: [message(CONTAINS_REPLY, fields[1], b"")]),
    "no INFO": (INFO, lambda fields, _: [message(INFO_REPLY, fields[1], b"\x80")]),
    "no message": (INFO, lambda *_: [zmtp_frame(b"\xc1", 0)]),
    "no frame": (INFO, lambda *_: [b"\xff\xff\xff"]),
    "endless header": (INFO, lambda *_: [b"\x02" + (1 << 40).to_bytes(8, "big")]),
    "a payload nobody asked for": (INFO, lambda fields, _: [message(INFO_REPLY, fields[1], b"", payload=b"x")]),
    "an error of no request": (INFO, lambda *_: [message(ERROR, 0, 1, "you make no sense")]),
    "the end": (INFO, lambda *_: [ready_command(b"ROUTER"), zmtp_frame(b"\x05ERROR\x04oops", 4)]),
    "too few answers": (CONTAINS, lambda fields, _: [message(CONTAINS_REPLY, fields[1], b"\1")]),
    "too many keys": (HOTTEST, lambda fields, _: [message(HOTTEST_REPLY, fields[1], 16, bytes(16 * 4), 9)]),
    "half a key": (HOTTEST, lambda fields, _: [message(HOTTEST_REPLY, fields[1], 16, bytes(17), 9)]),
    "keys of no size": (HOTTEST, lambda fields, _: [message(HOTTEST_REPLY, fields[1], 0, bytes(16), 9)]),
    "a position of no key": (GET, lambda fields, _: [message(PART, fields[1], u32(3), SUM, False, payload=BLOCK)]),
    "a position twice": (
        GET,
        lambda fields, _: [message(PART, fields[1], u32(0), SUM, False, payload=BLOCK)] * 2,
    ),
    "a position twice in a part": (
        GET,
        lambda fields, _: [message(PART, fields[1], u32(1, 1), SUM * 2, True, payload=BLOCK * 2)],
    ),
    "more than was announced": (
        GET,
        lambda fields, _: [message(PART, fields[1], u32(0), SUM, True, payload=BLOCK + b"x")],
    ),
    "less than was announced": (
        GET,
        lambda fields, _: [message(PART, fields[1], u32(0), SUM, True, payload=BLOCK[1:])],
    ),
    "more blocks than a frame holds": (
        GET,
        lambda fields, _: [message(PART, fields[1], u32(*range(513)), SUM * 513, True, payload=BLOCK * 513)],
    ),
    "a header over the limit": (GET, lambda *_: [b"\x02" + ((16 << 20) + 1).to_bytes(8, "big")]),
    "a part of a request that was never sent": (
        GET,
        lambda fields, _: [message(PART, fields[1] + 1, u32(0), SUM, True, payload=BLOCK)],
    ),
    "no payload": (GET, lambda fields, _: [message(PART, fields[1], u32(0), SUM, True)]),
    "no checksum": (GET, lambda fields, _: [message(PART, fields[1], u32(0), b"", True, payload=BLOCK)]),
    "wrong counts": (2, lambda fields, _: [message(SET_REPLY, fields[1], 3, 1, 1, 0, 0, 0)]),
    "negative counts": (2, lambda fields, _: [message(SET_REPLY, fields[1], 3, 4, -1, 0, 0, 0)]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_is_an_error_and_closes_the_connection(lie: str) -> None:
    request, answer = LIES[lie]
    keys = matrix(make_keys(3))
    with lying_shard(answer) as where, ShardQueries(where, TIMEOUT_S, NAMESPACE.canonical()) as asking:
        asks: dict[int, Callable[[], object]] = {
            INFO: asking.info,
            CONTAINS: lambda: asking.contains(keys),
            HOTTEST: lambda: asking.hottest(0, 3),
            GET: lambda: list(asking.get(keys)),
            2: lambda: asking.set(keys, [memoryview(BLOCK)] * 3, np.zeros(3, dtype=np.uint64)),
        }
        before = time.monotonic()
        with pytest.raises(ShardQueryError) as caught:
            asks[request]()
        assert not isinstance(caught.value, Refused) and time.monotonic() - before < TIMEOUT_S
        with pytest.raises(ShardQueryError, match="closed"):
            asking.info()


LIES_ABOUT_BLOCKS = [lie for lie, (request, _) in LIES.items() if request == GET]


def tell_the_client(lie: str, read: Callable[[KVStoreClient], object]) -> None:
    with lying_shard(LIES[lie][1]) as where, a_client(where) as client:
        before = time.monotonic()
        with pytest.raises(ProtocolError, match=re.escape(where[0])):
            read(client)
        assert time.monotonic() - before < TIMEOUT_S


def a_client(where: tuple[str, int]) -> KVStoreClient:
    return KVStoreClient(f"tcp://{where[0]}:{where[1]}", NAMESPACE, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("lie", LIES_ABOUT_BLOCKS)
def test_wrong_block_data_is_a_client_error_and_touches_no_other_memory(lie: str) -> None:
    out = np.full((5, 64), 0xEE, dtype=np.uint8)
    tell_the_client(lie, lambda client: client.get_into(make_keys(3), out, slots=[1, 2, 3]))
    assert (out[[0, 4]] == 0xEE).all()


@pytest.mark.parametrize("lie", LIES_ABOUT_BLOCKS)
def test_wrong_block_data_is_an_error_of_a_stream(lie: str) -> None:
    tell_the_client(lie, lambda client: list(client.stream_get(make_keys(3))))


@pytest.mark.parametrize("connect", [lambda where: ShardQueries(where, TIMEOUT_S, NAMESPACE.canonical()), a_client])
@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": 1},
        {"block_bytes": 63},
        {"shard": 1},
        {"shard": -1},
        {"shards": []},
        {"shards": [ShardAddress("m/0", "", 0, 1.0)]},
        {"shards": [ShardAddress("m/0", "", 7070, float("nan"))]},
        {"shards": [ShardAddress("", "", 7070, 1.0)]},
        {"shards": SHARDS * 2},
    ],
)
def test_an_impossible_welcome_is_an_error(
    changed: dict[str, Any], connect: Callable[[tuple[str, int]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = welcome
    monkeypatch.setitem(globals(), "welcome", lambda fields: honest(fields, **changed))
    with lying_shard(lambda *_: []) as where, pytest.raises((ShardQueryError, ProtocolError)):
        connect(where)


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), GREETING + b"\0\1x", b""],
    ids=["a web server", "a frame before READY", "silence"],
)
def test_another_program_on_the_port_is_an_error(greeting: bytes) -> None:
    with lying_shard(lambda *_: [], greeting) as where, pytest.raises(ShardQueryError):
        ShardQueries(where, 0.5)


def test_a_ping_is_answered() -> None:
    def answer(fields: list[Any], _: list[bytes]) -> list[bytes]:
        if fields[0] == INFO:
            return [zmtp_frame(b"\x04PING\0\0context", 4), message(CONTAINS_REPLY, fields[1], b"")]
        return []

    commands.clear()
    with (
        lying_shard(answer) as where,
        ShardQueries(where, TIMEOUT_S) as asking,
        pytest.raises(ShardQueryError, match="ContainsReply"),
    ):
        asking.info()
    assert b"\x04PONGcontext" in commands
