"""Attacks with connections: too many, idle ones, and a server without free descriptors."""

from __future__ import annotations

import contextlib
import urllib.request

import msgspec
import psutil
import pytest

from kvstore_client import ConnectionLost, KVStoreClient
from tests.attack.crowd import CLIENTS, DOOR, OF_ADDRESS, all_places, crowd, has_place, kvstore, pings
from tests.attack.scale import FULL
from tests.support.clock import Clock
from tests.support.harness import (
    CREDIT,
    GET,
    PART,
    PROMISE,
    PROMISE_REPLY,
    SET,
    SET_REPLY,
    WITHDRAW,
    WITHDRAW_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    namespace_info,
    pack,
    set_frames,
    shard_info,
    wait_until,
    zmtp_frame,
)

IDLE_S = 31


def readiness(server: Server) -> int:
    with urllib.request.urlopen(f"{server.http_url}/readyz", timeout=10) as answer:
        return int(answer.status)


def connections_told(server: Server) -> int:
    """Return the numbers of connections that `kvstore info` shows to an operator."""
    info = kvstore("info", "--json", server=server)
    assert info.returncode == 0, info.stderr
    return int(msgspec.json.decode(info.stdout)["shards"][0]["connections"])


def test_one_address_cannot_take_all_connections(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server, namespace = start_server("--http", "127.0.0.1:0"), new_namespace(64)
    with KVStoreClient(server.endpoint, namespace, timeout_s=10) as client:
        client.set(keys := make_keys(3), blocks_of(keys, 64))
        with (
            crowd(server, OF_ADDRESS, "127.0.0.2", namespace) as raws,
            RawClient(server, source="127.0.0.2") as late,
        ):
            late.hello(namespace.canonical())
            assert pings(late) and not has_place(late)
            assert has_place(raws[0]) and has_place(raws[-1]), "those that have a place go on"
            assert client.get(keys).hit == 3, "another address has places"
            info = shard_info(client)
            assert info.refused["connections_of_address"] == 1 and info.connections == OF_ADDRESS + 2
            with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
                assert b'limit="connections_of_address",shard="0"} 1.0' in answer.read()
            assert "1024 connections from 127.0.0.2 are open, the most that a shard gives one" in server.log_text()
            raws[0].close()
            wait_until(lambda: has_place(late), 5, "who waits has the place of one that ends")
        wait_until(lambda: shard_info(client).connections == 1, 10, "their places are free again")


def test_a_client_without_a_place_misses_until_there_is_one(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server, namespace, keys = start_server(), new_namespace(64), make_keys(3)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(keys, blocks_of(keys, 64))
    with (
        crowd(server, OF_ADDRESS, "127.0.0.1") as raws,
        KVStoreClient(server.endpoint, namespace, fail_open=True) as client,
        KVStoreClient(server.endpoint, namespace) as strict,
    ):
        assert client.get(keys).hit == 0
        with pytest.raises(ConnectionLost, match=r"1024 connections from 127\.0\.0\.1 are open"):
            strict.get(keys)
        for raw in raws[:2]:
            raw.close()
        wait_until(lambda: client.get(keys).hit == 3, 5, "its place is free")
        assert strict.get(keys).blocks == blocks_of(keys, 64)


def test_operators_and_health_checks_connect_when_clients_have_all_places(start_server: StartServer) -> None:
    server = start_server("--http", "127.0.0.1:0")
    with all_places(server) as raws:
        assert kvstore("ping", server=server).returncode == 0
        assert connections_told(server) == CLIENTS + 1
        assert all(readiness(server) == 200 for _ in range(DOOR + 4))
        with RawClient(server) as late:
            late.hello(b"")
            assert pings(late)
        assert pings(raws[0]) and pings(raws[-1]), "nobody had to go"


def test_silent_waiting_connections_keep_no_client_out(start_server: StartServer) -> None:
    """300 more connections of one address send nothing, and stay; an operator of the same address connects and
    leaves."""
    server = start_server("--http", "127.0.0.1:0")
    with (
        all_places(server),
        RawClient(server, source="127.0.0.9") as first,
        crowd(server, 300, "127.0.0.1") as silent,
    ):
        assert pings(first), "the one of another address is not the one to go"
        assert silent[0].closed() and pings(silent[-1]), "the oldest has gone"
        assert kvstore("ping", server=server).returncode == 0
        assert readiness(server) == 200
        with RawClient(server) as raw:
            assert connections_told(server) == CLIENTS + DOOR, "no more than there are places"
            assert pings(raw)


def test_idle_connections_give_way_to_new_ones_and_busy_ones_stay(
    start_server: StartServer, new_namespace: MakeNamespace, clock: Clock
) -> None:
    """All places are taken for a long time. Four of the connections are busy: with a SET, with a GET that waits for its
    block, with a GET whose reply is not read, and with a promise."""
    server, namespace = start_server(**clock.environment), new_namespace(64)
    awaited, there, promised = make_keys(3)
    with all_places(server) as raws:
        writer, reader, slow, producer, idle = raws[:5]
        for raw in (writer, reader, slow, producer, idle):
            raw.hello(namespace.canonical())
        assert producer.ask(pack(PROMISE, 1, 60_000, 1, 16, 600_000), promised) == [PROMISE_REPLY, 1, bytes(1)]
        slow.ask(*set_frames(1, [there], [block_of(there, 64)]))
        frames = [pack(SET, 1, 600_000, 1, 16), *set_frames(1, [awaited], [block_of(awaited, 64)])[1:]]
        writer.send(*frames[:2], more=True)
        with KVStoreClient(server.endpoint, namespace) as operator:
            wait_until(lambda: namespace_info(operator).writing == 1)
        reader.send(pack(GET, 2, 600_000, 1, 16), awaited)
        slow.send(pack(GET, 2, 600_000, 1, 16, 1), there)
        with RawClient(server) as raw:
            raw.hello(namespace.canonical())
            assert not has_place(raw), "nobody has been idle for long"
            clock.advance(IDLE_S)
            wait_until(lambda: has_place(raw), 5, "an idle one has given way")
        with crowd(server, 20, "127.0.0.4", namespace) as others, crowd(server, 4, "127.0.0.2", namespace) as own:
            assert all(has_place(other) for other in others), "another one for each"
            assert all(has_place(other) for other in own), "and of an address that has all that it may have, its own"
            writer.sock.sendall(b"".join(zmtp_frame(frame, frame is not frames[-1]) for frame in frames[2:]))
            assert writer.reply()[0][:4] == [SET_REPLY, 1, 1, 1]
            for raw, key in ((reader, awaited), (slow, there)):
                if raw is slow:
                    raw.send(pack(CREDIT, 2, 64))
                header, payload = raw.reply()
                assert header[0] == PART and payload == [block_of(key, 64)], header
            producer.send(pack(WITHDRAW, 2, 60_000, 1, 16), promised)
            assert producer.reply()[0] == [WITHDRAW_REPLY, 2, 1]


def test_without_descriptors_a_shard_serves_its_connections_and_does_not_spin(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server()
    namespace, keys = new_namespace(64), make_keys(10)
    (shard,) = server.shards()
    process = psutil.Process(shard.pid)
    with KVStoreClient(server.endpoint, namespace, timeout_s=10) as client, contextlib.ExitStack() as stack:
        client.set(keys, blocks_of(keys, 64))
        most = process.num_fds() + 20
        _, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (most, hard))
        waiting = [stack.enter_context(RawClient(server, handshake=False)) for _ in range(40)]
        wait_until(lambda: "accept failed" in server.log_text(), what="it cannot accept")
        assert process.cpu_percent(2.0) < 25, "it spins"
        assert client.get(keys).hit == 10
        assert server.log_text().count("accept failed") <= 25
        process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
        del waiting
        with RawClient(server) as raw:
            raw.hello()


def test_engines_of_one_host_have_enough_places(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """40 engines, each with 8 ranks and a scheduler, request a prompt of 32 768 tokens at the same moment."""
    server, namespace = start_server(), new_namespace(64)
    keys = b"".join(make_keys(2048, key_bytes=32))
    with crowd(server, 40 * 9, "127.0.0.2", namespace) as raws, KVStoreClient(server.endpoint, namespace) as client:
        client.set(make_keys(2048, key_bytes=32), [bytes(64)] * 2048)
        for _ in range(5 if FULL else 1):
            for raw in raws:
                raw.send(pack(GET, 1, 60_000, 2048, 32), keys)
            for raw in raws:
                hits = 0
                while True:
                    header, _ = raw.reply()
                    assert header[0] == PART, header
                    hits = header[5]
                    if header[4]:
                        break
                assert hits == 2048
        assert not any(shard_info(client).refused.values())
