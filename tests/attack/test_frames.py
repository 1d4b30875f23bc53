"""No frame of any kind stops the server or leaves anything behind."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from typing import Any

import msgspec

from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.harness import (
    CANCEL,
    CONTAINS,
    CREDIT,
    DELETE,
    GET,
    HELLO,
    HOTTEST,
    INFO,
    MATCH_PREFIX,
    PING,
    PONG,
    PROTOCOL,
    SET,
    SYNC,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    shard_info,
    sums_of,
    wait_until,
    zmtp_frame,
)

MiB = 1 << 20
FRAMES = 1_000_000 if FULL else 100_000
TAGS = (HELLO, SET, GET, CONTAINS, MATCH_PREFIX, DELETE, SYNC, INFO, PING, CREDIT, CANCEL, HOTTEST)


class Fuzzer:
    """Makes messages with errors of every kind; a seed decides each message."""

    def __init__(self, canonical: bytes, seed: int) -> None:
        self.rng = random.Random(seed)
        self.canonical = canonical
        self.keys = make_keys(64)

    def valid(self) -> list[bytes]:
        rng = self.rng
        tag = rng.choice(TAGS)
        request_id, deadline = rng.randrange(1000), rng.randrange(1, 2000)
        count = rng.randrange(8)
        joined = b"".join(rng.choice(self.keys) for _ in range(count))
        if tag == HELLO:
            return [pack(HELLO, request_id, PROTOCOL, self.canonical, "fuzzer")]
        if tag == SET:
            blocks = [bytes(64)] * count
            payload = [b"".join(blocks)] if count else []
            parent, end = (rng.choice((b"", rng.choice(self.keys), rng.randbytes(16))) for _ in range(2))
            copied = rng.choice((b"", b"".join(rng.randbytes(5) + rng.choice(self.keys) for _ in range(count))))
            call = rng.randrange(99), rng.choice((b"", rng.randbytes(4 * count)))
            chain = (0, False, 0.0, True, parent, end, rng.randrange(99), copied, *call) if rng.random() < 0.5 else ()
            header = pack(SET, request_id, deadline, count, 16, rng.random() < 0.5, *chain)
            return [header, joined, *payload, sums_of(blocks)]
        if tag == GET:
            return [pack(tag, request_id, deadline, count, 16, 0, True, False, rng.random() < 0.5), joined]
        if tag == DELETE:
            return [pack(tag, request_id, deadline, count, 16), joined]
        if tag == HOTTEST:
            return [pack(tag, request_id, deadline, rng.randrange(99), rng.randrange(99), rng.random() < 0.5)]
        if tag in {CONTAINS, MATCH_PREFIX}:
            return [pack(tag, request_id, deadline, count, 16, rng.random() < 0.5, rng.random()), joined]
        if tag == CREDIT:
            return [pack(CREDIT, request_id, rng.randrange(-5, 1 << 40))]
        if tag == CANCEL:
            return [pack(CANCEL, request_id)]
        return [pack(tag, request_id, deadline)]

    def any_value(self) -> Any:
        rng = self.rng
        return rng.choice(
            [None, True, -1, 0, 1, 8, 16, 2**63, 2**64 - 1, 1.5, float("nan"), b"", b"x" * 20, "", "é" * 9, [], [1], {}]
        )

    def mutated(self) -> list[bytes]:
        rng = self.rng
        frames = self.valid()
        kind = rng.randrange(6)
        if kind == 0:  # change a byte of a frame
            at = rng.randrange(len(frames))
            if frames[at]:
                data = bytearray(frames[at])
                data[rng.randrange(len(data))] = rng.randrange(256)
                frames[at] = bytes(data)
        elif kind == 1:  # change a field of the header
            fields = msgspec.msgpack.decode(frames[0])
            fields[rng.randrange(len(fields))] = self.any_value()
            frames[0] = pack(*fields)
        elif kind == 2:  # remove a frame
            del frames[rng.randrange(len(frames))]
            frames = frames or [b""]
        elif kind == 3:  # add a frame
            frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(300)))
        elif kind == 4:  # change a frame's length
            at = rng.randrange(len(frames))
            frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)] + rng.randbytes(rng.randrange(20))
        else:  # change the order
            rng.shuffle(frames)
        return frames

    def message(self) -> list[bytes]:
        rng = self.rng
        kind = rng.randrange(10)
        if kind < 5:
            return self.mutated()
        if kind < 7:
            return self.valid()
        if kind == 7:
            return [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 12))]
        if kind == 8:
            return [rng.randbytes(rng.randrange(2000))]
        return [pack(*(self.any_value() for _ in range(rng.randrange(9))))]


class Reader(threading.Thread):
    """Reads all replies, and notes when one particular reply arrives."""

    def __init__(self, raw: RawClient, awaited: bytes) -> None:
        super().__init__(daemon=True)
        self.raw = raw
        self.awaited = awaited
        self.seen = threading.Event()

    def run(self) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while data := self.raw.sock.recv(1 << 16):
                if self.awaited in tail + data:
                    self.seen.set()
                tail = data[-len(self.awaited) :]


def test_no_sequence_of_frames_stops_the_server(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """Messages that are nearly right, random ones, and bytes that are not even ZMTP."""
    # Some of the messages purge their namespace, and some create new namespaces, each of which takes a segment.
    server = start_server("--log-level", "warning", memory="32MiB", segment="1MiB")
    attacked, namespace = new_namespace(64), new_namespace(64)
    rng = random.Random(7)
    fuzzer = Fuzzer(attacked.canonical(), seed=8)
    sent = 0
    good = make_keys(20, first=10**6)
    last = 2**50
    with server.unharmed(), MemoryWatch(server, 32 * MiB), KVStoreClient(server.endpoint, namespace) as client:
        client.set(good, blocks_of(good, 64))
        while sent < FRAMES:
            with RawClient(server) as raw:
                reader = Reader(raw, zmtp_frame(pack(PONG, last), 0))
                reader.start()
                messages = [[pack(HELLO, 1, PROTOCOL, attacked.canonical())]]
                messages += [fuzzer.message() for _ in range(1000)]
                messages += [[pack(PING, last, 1)]]
                for frames in messages:
                    raw.sock.sendall(
                        b"".join(zmtp_frame(frame, number < len(frames) - 1) for number, frame in enumerate(frames))
                    )
                sent += sum(map(len, messages))
                assert reader.seen.wait(20), "every message was read, whatever was before it"
                with contextlib.suppress(OSError):
                    raw.sock.sendall(rng.randbytes(rng.randrange(1, 200)))  # followed by bytes that are no frame
                    raw.sock.shutdown(socket.SHUT_WR)
                reader.join(20)
                assert not reader.is_alive()
            assert client.get(good).blocks == blocks_of(good, 64)
        wait_until(lambda: shard_info(client).streams == 0)
        wait_until(lambda: shard_info(client).connections == 1)
        assert not any(each.writing for each in shard_info(client).namespaces)
        assert client.set(make_keys(5, first=10**7), blocks_of(make_keys(5, first=10**7), 64)).created == 5
        assert shard_info(client).errors > FRAMES // 10
    assert "Traceback" not in server.log_text() and "defect" not in server.log_text()


def test_no_bytes_in_place_of_a_handshake_stop_the_server(start_server: StartServer) -> None:
    server = start_server()
    rng = random.Random(9)
    prefixes = [b"", b"\xff", b"\xff" + bytes(8) + b"\x7f", b"\xff" + bytes(8) + b"\x7f\x03", struct.pack(">Q", 1)]
    with server.unharmed():
        for _ in range(300):
            with RawClient(server, handshake=False) as raw, contextlib.suppress(OSError):
                raw.sock.sendall(rng.choice(prefixes) + rng.randbytes(rng.randrange(200)))
        with RawClient(server) as raw:
            raw.hello()
            connections = lambda: msgspec.msgpack.decode(raw.ask(pack(INFO, 1, 1000))[2])["connections"]  # noqa: E731
            wait_until(lambda: connections() == 1)
