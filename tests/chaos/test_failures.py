"""Servers that die, hang and return: until a server is back, its clients get misses, in time, and no errors."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvstore_client import ConnectionLost, KVStoreClient, Namespace, Timeout
from tests.support.harness import (
    MakeNamespace,
    RawClient,
    StartServer,
    alive,
    block_of,
    blocks_of,
    make_keys,
    namespace_info,
    set_frames,
    shard_info,
    wait_until,
)

KiB, MiB = 1 << 10, 1 << 20
BLOCK = 64 * KiB
SLACK_S = 0.5  # by how much a call may exceed its timeout

Result = tuple[str, float]


class Load:
    """Threads that set and get through one fail-open client, check every block and time every call."""

    def __init__(self, endpoint: str | list[str], namespace: Namespace, timeout_s: float = 5.0) -> None:
        self.client = KVStoreClient(endpoint, namespace, timeout_s=timeout_s, fail_open=True)
        self.failures: list[BaseException] = []
        self.rounds = 0
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(3)]

    def _run(self, number: int) -> None:
        keys = make_keys(24, first=1000 * number)
        blocks = blocks_of(keys, BLOCK)
        out = np.zeros((24, BLOCK), dtype=np.uint8)
        try:
            while not self._stop.is_set():
                start = time.monotonic()
                self.client.set(keys, blocks)
                middle = time.monotonic()
                present = self.client.get_into(keys, out)
                end = time.monotonic()
                self.longest_s = max(self.longest_s, middle - start, end - middle)
                for position in np.flatnonzero(present):
                    assert out[position].tobytes() == blocks[position]
                for position, block in self.client.stream_get(keys[:4]):
                    assert bytes(block) == blocks[position]
                self.rounds += 1
                if not present.any():
                    time.sleep(0.01)
        except BaseException as error:
            self.failures.append(error)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        self.client.close()
        assert not self.failures, self.failures

    def wait_for_hits(self) -> None:
        """Wait until the load makes progress and has hits."""
        hits, rounds = self.client.stats.hits, self.rounds
        wait_until(
            lambda: self.failures or (self.client.stats.hits > hits + 48 and self.rounds > rounds + 3),
            20,
            "the load hits again",
        )


# ---- processes that die --------------------------------------------------------------------------------------------


def test_a_killed_shard_is_restarted_and_its_blocks_are_misses(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server("--shards", "2", memory="128MiB", segment="8MiB")
    with Load(server.endpoint, new_namespace(BLOCK)) as load:
        load.wait_for_hits()
        victim = server.shards()[1]
        victim.kill()
        wait_until(lambda: f"(pid {victim.pid}) died: signal 9" in server.log_text())
        wait_until(lambda: "shard 1 is serving again" in server.log_text())
        load.wait_for_hits()
        wait_until(lambda: len(load.client.info().shards) == 2)
        assert load.client.stats.reconnects >= 1
    log = server.log_text()
    assert "its blocks in memory are gone and count as misses; restarting" in log and "Traceback" not in log
    assert server.running and len(server.shards()) == 2


def test_blocks_of_surviving_shards_stay(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "2", memory="128MiB", segment="8MiB")
    keys = make_keys(200)
    with KVStoreClient(server.endpoint, new_namespace(4 * KiB)) as client:
        client.set(keys, blocks_of(keys, 4 * KiB))
        there = [ns.blocks for shard in client.info().shards for ns in shard.namespaces]
        server.shards()[0].kill()
        wait_until(lambda: "shard 0 is serving again" in server.log_text())
        got = client.get(keys)
        assert got.hit == there[1]
        assert all(
            block is None or block == block_of(key, 4 * KiB) for key, block in zip(keys, got.blocks, strict=True)
        )


def test_a_shard_that_dies_repeatedly_is_restarted_less_often(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server()
    for number in range(3):
        (victim,) = wait_until(server.shards)
        victim.kill()
        wait_until(lambda number=number: server.log_text().count("is serving again") == number + 1)
    log = server.log_text()
    assert all(f"restarting in {delay}" in log for delay in ("0.1", "0.2", "0.4"))
    with KVStoreClient(server.endpoint, new_namespace()) as client:
        assert client.set(make_keys(1), blocks_of(make_keys(1), 4096)).created == 1


def test_a_killed_server_leaves_no_shard_and_its_port_free(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server("--shards", "2", memory="128MiB", segment="8MiB")
    shards = server.shards()
    with Load(server.endpoint, new_namespace(BLOCK)) as load:
        load.wait_for_hits()
        server.kill()
        assert not any(alive(shard) for shard in shards)
        misses = load.client.stats.misses
        wait_until(lambda: load.client.stats.misses > misses + 100, what="calls go on, and miss")
        server.restart()
        load.wait_for_hits()
        wait_until(lambda: load.client.stats.reconnects >= 2, what="both shards are connected again")


def test_when_one_of_two_nodes_is_gone_the_other_serves(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    nodes = [start_server(), start_server()]
    keys = make_keys(200)
    with KVStoreClient([node.endpoint for node in nodes], new_namespace(4 * KiB), fail_open=True) as client:
        client.set(keys, blocks_of(keys, 4 * KiB))
        full = [ns.blocks for shard in client.info().shards for ns in shard.namespaces]
        nodes[0].kill()
        wait_until(lambda: client.get(keys).hit == full[1])
        result = client.set(keys, blocks_of(keys, 4 * KiB))
        assert result.existed == full[1] and result.error == full[0]
        assert client.contains(keys).sum() == full[1] == len(dict(client.stream_get(keys)))
        nodes[0].restart()
        wait_until(lambda: client.set(keys, blocks_of(keys, 4 * KiB)).error == 0)
        assert client.get(keys).hit == 200


# ---- servers that hang ---------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.monotonic()
    try:
        result = call()
    except (Timeout, ConnectionLost) as error:
        result = error
    return result, time.monotonic() - start


def calls_of(client: KVStoreClient) -> dict[str, Callable[[], Any]]:
    keys = make_keys(20)
    blocks = blocks_of(keys, BLOCK)
    out = np.zeros((20, BLOCK), dtype=np.uint8)
    return {
        "set": lambda: client.set(keys, blocks).error,
        "set of much": lambda: client.set(make_keys(600, first=100), np.zeros((600, BLOCK), dtype=np.uint8)).error,
        "get": lambda: client.get(keys).miss,
        "get_into": lambda: int((~client.get_into(keys, out)).sum()),
        "stream_get": lambda: 20 - len(list(client.stream_get(keys))),
        "contains": lambda: int((~client.contains(keys)).sum()),
        "match_prefix": lambda: 20 - client.match_prefix(keys),
        "delete": lambda: 20 - client.delete(keys),
        "sync": client.sync,
        "info": lambda: 20 - len(client.info().shards),
    }


@pytest.mark.exclusive
@pytest.mark.parametrize("name", ["set", "set of much", "get", "get_into", "stream_get", "contains", "sync"])
def test_a_call_on_a_server_that_hangs_returns_in_time(
    start_server: StartServer, new_namespace: MakeNamespace, name: str
) -> None:
    server = start_server(memory="64MiB", segment="8MiB")
    for fail_open in (True, False):
        with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=0.5, fail_open=fail_open) as client:
            call = calls_of(client)[name]
            with server.stopped():
                result, took = timed(call)
                assert took < 0.5 + SLACK_S
                if fail_open:
                    assert result in {20, 600, None}
                else:
                    assert isinstance(result, Timeout)


@pytest.mark.exclusive
def test_a_hanging_server_is_an_immediate_miss_until_it_continues(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server(memory="64MiB", segment="8MiB")
    keys = make_keys(20)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=0.5, fail_open=True) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        with server.stopped():
            result, took = timed(lambda: client.get(keys).miss)
            assert result == 20 and took < 0.5 + SLACK_S
            for name, call in calls_of(client).items():
                result, took = timed(call)
                assert took < SLACK_S, f"{name} took {took:.3f} s"
                assert result in {20, 600, None}, name
        wait_until(lambda: client.get(keys).hit == 20, what="the blocks are there again")
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)


@contextmanager
def hanging_under_load(load: Load, server: Any) -> Iterator[None]:
    load.wait_for_hits()
    with server.stopped():
        misses = load.client.stats.misses
        wait_until(lambda: load.client.stats.misses > misses + 100, what="calls go on, and miss")
        yield
    load.wait_for_hits()


@pytest.mark.exclusive
def test_threads_in_calls_survive_a_hanging_server(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="64MiB", segment="8MiB")
    with Load(server.endpoint, new_namespace(BLOCK), timeout_s=0.5) as load:
        for _ in range(3):
            with hanging_under_load(load, server):
                pass
        assert load.longest_s < 0.5 + 2 * SLACK_S


# ---- errors or misses ----------------------------------------------------------------------------------------------


def test_without_fail_open_a_lost_server_is_an_error(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=2.0) as client:
        server.kill()
        for name, call in calls_of(client).items():
            with pytest.raises(ConnectionLost, match=f"127.0.0.1:{server.port}"):
                call()
                pytest.fail(f"{name} did not raise")
        server.restart()

        def again() -> bool:
            try:
                return client.set(make_keys(1), blocks_of(make_keys(1), BLOCK)).created == 1
            except ConnectionLost:
                return False

        wait_until(again)
        assert client.get(make_keys(1)).hit == 1


def test_with_fail_open_a_lost_server_is_misses(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), timeout_s=2.0, fail_open=True) as client:
        server.kill()
        for name, call in calls_of(client).items():
            assert call() in {20, 600, None}, name
        with pytest.raises(ConnectionLost):
            client.ping()
        assert client.stats.failures >= 1


def test_a_client_may_start_before_its_server(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "2")
    server.kill()
    with pytest.raises(ConnectionLost, match=f"127.0.0.1:{server.port}"):
        KVStoreClient(server.endpoint, new_namespace())
    keys = make_keys(50)
    with KVStoreClient(server.endpoint, new_namespace(), fail_open=True) as client:
        assert client.get(keys).miss == 50 and client.set(keys, blocks_of(keys, 4096)).error == 50
        server.restart()
        wait_until(lambda: client.set(keys, blocks_of(keys, 4096)).error == 0)
        assert client.get(keys).hit == 50 and len(client.info().shards) == 2


def test_a_stream_that_loses_its_server_ends(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="128MiB", segment="8MiB")
    keys = make_keys(60)
    with KVStoreClient(server.endpoint, new_namespace(MiB), timeout_s=2.0, fail_open=True) as client:
        client.set(keys, blocks_of(keys, MiB))
        seen = 0
        for position, block in client.stream_get(keys):
            assert bytes(block) == block_of(keys[position], MiB)
            seen += 1
            if seen == 3:
                server.kill()
        assert 3 <= seen < 60


# ---- ends that are meant -------------------------------------------------------------------------------------------


def test_sigterm_ends_an_idle_server_with_status_0(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "3")
    shards = server.shards()
    with KVStoreClient(server.endpoint, new_namespace()) as client:
        client.set(make_keys(10), blocks_of(make_keys(10), 4096))
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 5
    assert not any(alive(shard) for shard in shards)
    assert "Traceback" not in server.log_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_set_in_progress_finish(
    start_server: StartServer, new_namespace: MakeNamespace, number: int
) -> None:
    server = start_server()
    namespace = new_namespace(4096)
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:
        raw.hello(namespace.canonical())
        header, joined, payload, sums = set_frames(5, keys, blocks_of(keys, 4096))
        raw.send(header, joined, more=True)
        wait_until(lambda: namespace_info(client).writing == 3)
        server.signal(number)
        wait_until(lambda: shard_info(client).draining)
        with RawClient(server, handshake=False) as late:
            assert late.closed(), "no new connection is taken"
        with pytest.raises(ConnectionLost, match="shutting down"):
            client.set(make_keys(1, first=50), blocks_of(make_keys(1, first=50), 4096))
        raw.send(payload, sums)
        assert raw.reply()[0][2:8] == [3, 3, 0, 0, 0, 0]
        assert server.stop() == 0


def test_a_drain_ends_at_its_deadline(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server()
    namespace = new_namespace(4096)
    with RawClient(server) as raw:
        raw.hello(namespace.canonical())
        raw.send(*set_frames(5, make_keys(3), blocks_of(make_keys(3), 4096))[:2], more=True)
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 9


def test_a_server_under_load_drains_and_restarts(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "2", memory="128MiB", segment="8MiB")
    with Load(server.endpoint, new_namespace(BLOCK)) as load:
        load.wait_for_hits()
        assert server.stop() == 0
        server.restart()
        load.wait_for_hits()
    assert "Traceback" not in server.log_text()
