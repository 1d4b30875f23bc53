"""A shard sends PINGs to clients that must wait for it, so that they can distinguish a slow shard from a dead one."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from tests.support.disk import disk_flags, disk_info, fill, keeper_of, open_client, wait_until_on
from tests.support.harness import (
    DELETE,
    DELETE_REPLY,
    PING,
    PONG,
    SET,
    SET_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    ready_command,
    set_frames,
    sums_of,
)

COMMAND = 4
PING_COMMAND = b"\x04PING\0\0"
SILENCE_S = 1.6  # a client tolerates 2.5 s; a PING comes about every second


def pings_of(raw: RawClient, count: int) -> None:
    """Check that this many PINGs arrive, nothing else, and no pause is longer than a client tolerates."""
    for _ in range(count):
        before = time.monotonic()
        assert raw.read_frame() == (COMMAND, PING_COMMAND)
        assert time.monotonic() - before < SILENCE_S


@pytest.fixture
def disk_server(start_server: StartServer, tmp_path: Path) -> Server:
    return start_server(*disk_flags(tmp_path / "disk"), "--policy", "lru", memory="16MiB")


def test_a_client_waiting_for_the_disk_gets_pings(disk_server: Server, new_namespace: MakeNamespace) -> None:
    namespace, keys = new_namespace(4096), make_keys(4)
    with open_client(disk_server, namespace) as client, RawClient(disk_server) as raw, RawClient(disk_server) as idle:
        wait_until_on(client)
        fill(client, keys, 4096)
        raw.hello(namespace.canonical())
        idle.hello(namespace.canonical())
        keeper = keeper_of(disk_server.shards()[0])
        keeper.suspend()
        try:
            raw.send(pack(DELETE, 5, 20_000, 4, 16), b"".join(keys))
            pings_of(raw, 3)
            assert raw.ask(pack(PING, 6, 1000)) == [PONG, 6]  # the shard also reads meanwhile
        finally:
            keeper.resume()
        assert raw.reply()[0] == [DELETE_REPLY, 5, 4]
        assert idle.ask(pack(PING, 7, 1000)) == [PONG, 7], "who waits for nothing was told something"


def test_a_setting_client_gets_pings_while_the_disk_is_behind(
    disk_server: Server, new_namespace: MakeNamespace
) -> None:
    """While the keeper of the index is stopped, no block counts as written. The client sets blocks until half of the
    memory waits for the disk."""
    namespace = new_namespace(512)
    batch = 512  # one frame
    with open_client(disk_server, namespace) as client, RawClient(disk_server) as raw:
        wait_until_on(client)
        raw.hello(namespace.canonical())
        keeper = keeper_of(disk_server.shards()[0])
        keeper.suspend()
        try:
            raw.sock.settimeout(0.5)
            sent = answered = 0
            try:
                while answered == sent:
                    keys = make_keys(batch, first=sent * batch)
                    blocks = [key * 32 for key in keys]
                    raw.send(*set_frames(1 + sent, keys, blocks))
                    sent += 1
                    assert raw.reply()[0][0] == SET_REPLY
                    answered += 1
            except TimeoutError:
                assert disk_info(client).behind
            raw.sock.settimeout(10)
            pings_of(raw, 3)
        finally:
            keeper.resume()
        flags, data = raw.read_frame()
        while flags == COMMAND:
            flags, data = raw.read_frame()
        assert msgspec.msgpack.decode(data)[:2] == [SET_REPLY, sent]


def test_a_client_in_the_middle_of_a_set_gets_pings(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """The client gets PINGs in the middle of its SET, although it cannot send other requests meanwhile."""
    server, namespace = start_server(), new_namespace(4096)
    keys = make_keys(2)
    blocks = blocks_of(keys, 4096)
    with RawClient(server) as raw:
        raw.hello(namespace.canonical())
        raw.send(pack(SET, 3, 20_000, 2, 16), b"".join(keys), more=True)
        pings_of(raw, 2)
        raw.send(b"".join(blocks), sums_of(blocks))
        assert raw.reply()[0][:4] == [SET_REPLY, 3, 2, 2]


def test_a_peer_with_an_older_zmtp_gets_no_pings(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """ZMTP 3.0 has no PING."""
    server, namespace, (key,) = start_server(), new_namespace(4096), make_keys(1)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\0" + bytes(31)
    block = blocks_of([key], 4096)
    with RawClient(server, handshake=False) as raw:
        raw.sock.sendall(greeting + ready_command())
        raw.read(64)
        assert raw.read_frame()[1].startswith(b"\x05READY")
        raw.hello(namespace.canonical())
        raw.send(pack(SET, 3, 20_000, 1, 16), key, more=True)
        with RawClient(server) as other:  # this client gets PINGs at the same time
            other.hello(namespace.canonical())
            other.send(pack(SET, 3, 20_000, 1, 16), make_keys(1, first=9)[0], more=True)
            pings_of(other, 2)
        raw.send(block[0], sums_of(block))
        assert raw.reply()[0][:4] == [SET_REPLY, 3, 1, 1]
