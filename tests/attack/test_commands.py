"""ZMTP commands between any two frames: the server is unharmed, and nothing stays being written after its deadline."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.harness import (
    CONTAINS,
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
    set_frames,
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
def test_a_command_in_the_middle_of_a_set_does_not_lift_its_deadline(
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


def test_pings_in_the_middle_of_a_set_are_answered_and_harm_nothing(
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


def test_no_command_between_frames_harms_the_server(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """SETs and look-ups with commands between their frames, some left in the middle."""
    namespace = new_namespace(64)
    server = start_server("--log-level", "warning", memory="32MiB", segment="4MiB")
    rng = random.Random(11)
    keys = make_keys(64)
    sent = 0
    with server.unharmed(), KVStoreClient(server.endpoint, namespace) as client:
        while sent < COMMANDS:
            with contextlib.suppress(Closed, OSError), RawClient(server) as raw:
                raw.hello(namespace.canonical())
                for request_id in range(200):
                    some = rng.sample(keys, rng.randrange(1, 8))
                    frames = rng.choice(
                        (
                            set_frames(request_id, some, [block_of(key, 64) for key in some]),
                            [pack(CONTAINS, request_id, 500, len(some), 16, True, 0.0), b"".join(some)],
                        )
                    )
                    data = bytearray()
                    for number, frame in enumerate(frames):
                        for _ in range(rng.randrange(3)):
                            data += rng.choice(OTHERS) if rng.random() < 0.02 else rng.choice((PING, PONG))
                            sent += 1
                        data += zmtp_frame(frame, number < len(frames) - 1)
                    raw.sock.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.01 else data)
                    if len(data) < 100:
                        break
                raw.sock.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    while raw.sock.recv(1 << 16):
                        pass
        time.sleep(DEADLINE_S)
        wait_until(lambda: namespace_info(client).writing == 0, 1.0, "nothing is left being written")
        found = client.get(keys)
        assert all(block is None or block == block_of(key, 64) for key, block in zip(keys, found.blocks, strict=True))
