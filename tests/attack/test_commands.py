"""ZMTP commands between any two frames do not harm the server, and no block stays half-written after its deadline."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.harness import (
    CONTAINS,
    SANITIZED,
    SET,
    Closed,
    MakeNamespace,
    RawClient,
    StartServer,
    block_of,
    make_keys,
    namespace_info,
    pack,
    ready_command,
    rss_bytes,
    set_frames,
    shard_info,
    sums_of,
    wait_until,
    zmtp_frame,
)

COMMANDS = 100_000 if FULL else 4_000
DEADLINE_S = 0.5

PING, PONG = zmtp_frame(b"\x04PING\0\0ctx", 4), zmtp_frame(b"\x04PONGctx", 4)
OTHERS = (
    ready_command(),
    ready_command(b"ROUTER"),
    zmtp_frame(b"\x05ERROR\x02no", 4),
    zmtp_frame(b"\x09SUBSCRIBEx", 4),
    zmtp_frame(b"\x06CANCELx", 4),
    zmtp_frame(b"\x05READY", 4),
    zmtp_frame(b"\x00", 4),
)


@pytest.mark.parametrize("command", [ready_command(), zmtp_frame(b"\x09SUBSCRIBEx", 4)], ids=["READY", "SUBSCRIBE"])
def test_commands_within_a_set_do_not_extend_its_deadline(
    command: bytes, start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    namespace, keys = new_namespace(64), make_keys(63)
    server = start_server()
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:
        raw.hello(namespace.canonical())
        raw.send(pack(SET, 1, int(DEADLINE_S * 1000), 63, 16), b"".join(keys), more=True)
        wait_until(lambda: namespace_info(client).writing == 63)
        raw.sock.sendall(command)
        assert raw.closed()
        wait_until(lambda: namespace_info(client).writing == 0, 1.0, "its blocks are given up")
        blocks = [block_of(key, 64) for key in keys]
        assert client.set(keys, blocks).created == 63
        assert client.get(keys).blocks == blocks


def test_pings_within_a_set_are_answered_and_harm_nothing(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    namespace, keys = new_namespace(64), make_keys(5)
    frames = set_frames(1, keys, [block_of(key, 64) for key in keys])
    with RawClient(server := start_server()) as raw, KVStoreClient(server.endpoint, namespace) as client:
        raw.hello(namespace.canonical())
        for number, frame in enumerate(frames):
            raw.sock.sendall(PING + zmtp_frame(frame, number < len(frames) - 1))
        for _ in frames:
            assert raw.read_frame() == (4, b"\x04PONGctx")
        assert raw.reply()[0][:4] == [66, 1, 5, 5]
        assert client.get(keys).blocks == [block_of(key, 64) for key in keys]


class Hostile:
    """Makes messages with commands between their frames; most commands are valid. sent: the number of commands so
    far."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.keys = make_keys(64)
        self.sent = 0

    def message(self, request_id: int) -> list[bytes]:
        """Return a SET or a lookup, divided into pieces; a test may stop sending after any piece."""
        rng = self.rng
        some = rng.sample(self.keys, rng.randrange(1, 8))
        blocks = [block_of(key, 64) for key in some]
        header = pack(SET, request_id, int(DEADLINE_S * 1000), len(some), 16, rng.random() < 0.3)
        frames = rng.choice(
            (
                [header, b"".join(some), b"".join(blocks), sums_of(blocks)],
                [pack(CONTAINS, request_id, 500, len(some), 16, True, 0.0), b"".join(some)],
            )
        )
        pieces = []
        for number, frame in enumerate(frames):
            for _ in range(rng.randrange(4)):
                pieces.append(rng.choice(OTHERS) if rng.random() < 0.02 else rng.choice((PING, PONG)))
                self.sent += 1
            pieces.append(zmtp_frame(frame, number < len(frames) - 1))
        return pieces


def hold_on(raw: RawClient) -> None:
    """Receive pending bytes, so that the server continues to read."""
    raw.sock.settimeout(0.01)
    with contextlib.suppress(TimeoutError):
        while raw.sock.recv(1 << 16):
            pass


def test_no_command_between_frames_harms_the_server(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """SETs and lookups have commands between their frames. Some messages stop after a frame, and some of those
    connections stay open. One second after the deadline, nothing of them is left, and memory has not grown."""
    namespace = new_namespace(64)
    server = start_server("--log-level", "warning", memory="32MiB", segment="4MiB")
    (shard,) = server.shards()
    hostile = Hostile(11)
    rng = hostile.rng
    at_half = 0
    with server.unharmed(), KVStoreClient(server.endpoint, namespace) as client, contextlib.ExitStack() as stack:
        while hostile.sent < COMMANDS:
            raw = RawClient(server)
            with contextlib.suppress(Closed, OSError):
                raw.hello(namespace.canonical())
                for request_id in range(200):
                    pieces = hostile.message(request_id)
                    cut = rng.randrange(1, len(pieces) + 1) if rng.random() < 0.05 else len(pieces)
                    raw.sock.sendall(b"".join(pieces[:cut]))
                    if cut < len(pieces):
                        break
                hold_on(raw)
            if rng.random() < 0.2:
                stack.callback(raw.close)
            else:
                raw.close()
            if not at_half and hostile.sent > COMMANDS / 2:
                at_half = rss_bytes(shard.pid)
        last = [stack.enter_context(RawClient(server)) for _ in range(20)]
        for number, raw in enumerate(last):  # each message lacks its last frame, so its blocks are still being written
            raw.hello(namespace.canonical())
            (key,) = make_keys(1, first=1000 + number)
            frames = [pack(SET, 1, int(DEADLINE_S * 1000), 1, 16), key, block_of(key, 64)][: 2 + number % 2]
            raw.sock.sendall(b"".join(PING + zmtp_frame(frame, 1) for frame in frames) + PONG)
        time.sleep(DEADLINE_S)
        wait_until(lambda: namespace_info(client).writing == 0, 1.0, "nothing is left being written")
        held = shard_info(client).held_bytes
        assert not any(held[holder] for holder in ("frames", "writes", "streams", "replies")), held
        assert all(raw.closed() for raw in last)
        assert rss_bytes(shard.pid) < at_half + (8 << 20) or SANITIZED
        keys = hostile.keys
        found = client.get(keys)
        assert all(block is None or block == block_of(key, 64) for key, block in zip(keys, found.blocks, strict=True))
        assert found.hit > 0
