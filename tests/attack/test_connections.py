"""Connections as a weapon: too many, idle ones, and a server that has no descriptor left."""

from __future__ import annotations

import contextlib
import time

import psutil
import pytest

from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.harness import (
    INFO,
    Closed,
    MakeNamespace,
    RawClient,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    shard_info,
    wait_until,
)


def test_one_address_cannot_take_all_connections(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server()
    with contextlib.ExitStack() as stack:
        open_ones = []
        with contextlib.suppress(Closed, OSError):
            for _ in range(1100):
                open_ones.append(stack.enter_context(RawClient(server)))
        assert len(open_ones) == 1024
        open_ones[0].hello()
        assert open_ones[0].ask(pack(INFO, 1, 1000))[0] == 72, "those that are open go on"
    with KVStoreClient(server.endpoint, new_namespace(64), timeout_s=10) as client:
        wait_until(lambda: shard_info(client).connections == 1, 10, "their places are free again")


def test_without_descriptors_a_shard_serves_whom_it_has_and_does_not_spin(
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
        time.sleep(0.5)
        before = process.cpu_times()
        time.sleep(2)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.5, "it spins"
        assert client.get(keys).hit == 10
        assert server.log_text().count("accept failed") <= 25
        process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
        del waiting
        with RawClient(server) as raw:
            raw.hello()


@pytest.mark.skipif(not FULL, reason="takes half a minute: make attack")
def test_an_idle_connection_gives_way_when_all_are_taken(start_server: StartServer) -> None:
    """Two addresses hold all connections and do nothing."""
    server = start_server()
    with contextlib.ExitStack() as stack:
        for host in ("127.0.0.2", "127.0.0.3"):
            for _ in range(1024):
                stack.enter_context(RawClient(server, source=host))
        with pytest.raises((Closed, OSError)):
            RawClient(server)
        time.sleep(31)
        with RawClient(server) as raw:
            raw.hello()
            assert raw.ask(pack(INFO, 1, 1000))[0] == 72
