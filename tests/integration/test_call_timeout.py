"""The ``timeout_s`` of a single call, which may be shorter or longer than the client's own and affects no other
call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore_client import AsyncKVStoreClient, KVStoreClient, Timeout
from kvstore_client.results import SetResult
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, wait_until

BLOCK_BYTES = 4096
SHORT_S = 0.2
LONG_S = 30.0
SLACK_S = 1.0  # what a busy machine may add to a deadline

KEYS = make_keys(3)
CALLS: dict[str, Callable[..., Any]] = {
    "set": lambda client, **timeout: client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), **timeout),
    "contains": lambda client, **timeout: client.contains(KEYS, **timeout),
    "match_prefix": lambda client, **timeout: client.match_prefix(KEYS, **timeout),
    "get_into": lambda client, **timeout: client.get_into(KEYS, np.empty((3, BLOCK_BYTES), np.uint8), **timeout),
}

calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.mark.exclusive
@calls
@pytest.mark.parametrize("shards", [1, 3])
def test_a_call_ends_within_its_own_timeout(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any], shards: int
) -> None:
    server = start_server("--shards", str(shards))
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=LONG_S) as client:
        call(client)  # to connect to every shard
        with server.stopped():
            started = time.monotonic()
            with pytest.raises(Timeout):
                call(client, timeout_s=SHORT_S)
            assert SHORT_S * 0.9 < time.monotonic() - started < SHORT_S + SLACK_S
        call(client)


@calls
def test_a_call_may_take_longer_than_the_clients_timeout(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any]
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=SHORT_S) as client:
        call(client)
        with server.stopped():
            thawing = threading.Timer(4 * SHORT_S, lambda: [process.resume() for process in server.shards()])
            thawing.start()
            started = time.monotonic()
            call(client, timeout_s=LONG_S)
            assert time.monotonic() - started > 2 * SHORT_S
            thawing.join()


@pytest.mark.exclusive
@calls
def test_a_fail_open_client_misses_at_the_calls_deadline(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any]
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=LONG_S, fail_open=True) as client:
        with server.stopped():
            started = time.monotonic()
            missed = call(client, timeout_s=SHORT_S)
            assert time.monotonic() - started < SHORT_S + SLACK_S
        assert getattr(missed, "error", 3) == 3 and not np.any(getattr(missed, "created", missed))


@calls
@pytest.mark.parametrize("timeout_s", [0, -1, wire.MAX_DEADLINE_MS / 1000 + 1, float("nan")])
def test_an_invalid_timeout_is_an_error(
    server: Server, new_namespace: MakeNamespace, call: Callable[..., Any], timeout_s: float
) -> None:
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES)) as client:
        with pytest.raises(ValueError, match="timeout_s="):
            call(client, timeout_s=timeout_s)
        assert not client.contains(KEYS).any()


@pytest.mark.exclusive
@calls
def test_the_asynchronous_client_passes_the_timeout_on(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any]
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)

    async def run() -> float:
        async with AsyncKVStoreClient(server.endpoint, namespace, timeout_s=LONG_S) as client:
            await call(client)
            with pytest.raises(ValueError, match="timeout_s="):
                await call(client, timeout_s=0)
            with server.stopped():
                started = time.monotonic()
                with pytest.raises(Timeout):
                    await call(client, timeout_s=SHORT_S)
                return time.monotonic() - started

    assert asyncio.run(run()) < SHORT_S + SLACK_S


def test_an_impatient_call_takes_nothing_from_a_patient_one(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """A call with a short timeout fails, but the shard is not given up: it was silent for less than the client's
    timeout."""
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=LONG_S) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), deferred=False)
        found: list[int] = []
        with server.stopped():
            patient = threading.Thread(target=lambda: found.append(client.match_prefix(KEYS)))
            patient.start()
            wait_until(lambda: client._pool.links[0].pending)
            with pytest.raises(Timeout):
                client.contains(KEYS, timeout_s=SHORT_S)
        patient.join(10)
        assert found == [3] and client.stats.failures == 0


def test_a_call_that_never_got_to_send_breaks_nothing(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """The shard stops for a moment, and the blocks of another call fill the connection, so the short call cannot send
    anything."""
    server = start_server(memory="256MiB")
    keys = make_keys(64)
    with KVStoreClient(server.endpoint, new_namespace(1 << 20), timeout_s=LONG_S) as client:
        results: list[SetResult] = []
        with server.stopped():
            blocks = np.zeros((64, 1 << 20), dtype=np.uint8)
            sender = threading.Thread(target=lambda: results.append(client.set(keys, blocks)))
            sender.start()
            wait_until(lambda: client._pool.links[0].sending.owner is not None)
            with pytest.raises(Timeout):
                client.contains(keys, timeout_s=SHORT_S)
        started = time.monotonic()
        sender.join(LONG_S)
        assert time.monotonic() - started < LONG_S / 2
        assert results and results[0].created == 64
        assert client.stats.failures == 0 and client.stats.reconnects == 0


def test_impatient_calls_do_not_slow_down_large_ones(server: Server, new_namespace: MakeNamespace) -> None:
    keys = make_keys(64)
    blocks = np.zeros((64, 1 << 20), dtype=np.uint8)
    with KVStoreClient(server.endpoint, new_namespace(1 << 20), timeout_s=LONG_S) as client:
        results: list[SetResult] = []
        sender = threading.Thread(target=lambda: results.extend(client.set(keys, blocks, force=True) for _ in range(3)))
        sender.start()
        while sender.is_alive():
            with contextlib.suppress(Timeout):
                client.contains(keys, timeout_s=0.002)
        assert [result.error for result in results] == [0, 0, 0]
        assert client.stats.failures == 0 and client.stats.reconnects == 0


@pytest.mark.exclusive
def test_a_call_waits_for_anothers_connect_only_within_its_timeout(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=5.0) as client:
        with server.stopped():
            client._pool.links[0].close()  # as if the connection had been found dead
            patient = threading.Thread(target=lambda: client.contains(KEYS))
            patient.start()
            wait_until(lambda: client._pool.links[0].connecting.owner is not None)
            started = time.monotonic()
            with pytest.raises(Timeout):
                client.contains(KEYS, timeout_s=SHORT_S)
            assert time.monotonic() - started < SHORT_S + SLACK_S
        patient.join(10)
        assert not patient.is_alive()
