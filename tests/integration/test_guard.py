"""A store guard cannot harm its engine: it starts before its store, never raises exceptions, counts failures, and does
not flood the log."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvstore_client import KVStoreClient, KVStoreError, Namespace
from kvstore_client.engine.guard import Counters, StoreGuard
from tests.support.harness import ANSWER_S, MakeNamespace, Server, StartServer, blocks_of, make_keys, wait_until

NO_SERVER = "tcp://127.0.0.1:1"  # no server listens there
TIMEOUT_S = 1.0
SLACK_S = 1.0  # what a busy machine may add to a deadline

MakeGuard: TypeAlias = Callable[..., StoreGuard]


@pytest.fixture
def make_guard() -> Iterator[MakeGuard]:
    guards: list[StoreGuard] = []

    def make(endpoint: str, namespace: Namespace, counters: Counters | None = None, **options: Any) -> StoreGuard:
        guard = StoreGuard(endpoint, namespace, timeout_s=TIMEOUT_S, counters=counters or Counters(), **options)
        guards.append(guard)
        return guard

    yield make
    for guard in guards:
        guard.close()


def holds(guard: StoreGuard, keys: list[bytes]) -> int:
    """Return how many of the keys the store has, or -1 if it does not answer."""

    def count(client: KVStoreClient) -> int:
        before = client.stats.unanswered
        present = int(client.contains(keys).sum())
        return present if client.stats.unanswered == before else -1

    return guard.call(count, -1)


def test_adding_zero_leaves_no_counter_and_take_resets() -> None:
    counters = Counters()
    counters.add("drops", 0)
    assert counters.take() == {}
    counters.add("drops")
    counters.add("drops", 2.5)
    assert counters.take() == {"drops": 3.5}
    assert counters.take() == {}


def test_counts_from_many_threads_add_up() -> None:
    counters, taken = Counters(), Counters()

    def count() -> None:
        for _ in range(500):
            counters.add("calls")
            for name, amount in counters.take().items():
                taken.add(name, amount)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken.take() == {"calls": 2000}


def test_an_engine_may_start_before_its_store(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    server = start_server()
    server.kill()
    counters = Counters()
    started = time.monotonic()
    guard = make_guard(server.endpoint, new_namespace(), counters)
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    keys = make_keys(3)
    assert holds(guard, keys) == -1
    assert counters.take()["failed_calls"] >= 1
    server.restart()
    wait_until(lambda: holds(guard, keys) == 0)
    assert guard.call(lambda client: client.set(keys, blocks_of(keys, 4096)).created, 0) == 3


def test_a_late_store_is_waited_for(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does not know the store's generation cannot save blocks, because they might be from before a
    purge. So it waits a while for the store."""
    monkeypatch.setattr(f"{__name__}.TIMEOUT_S", 0.05)
    server = start_server()
    with ThreadPoolExecutor(1) as thread:
        with server.stopped():
            guard = make_guard(server.endpoint, new_namespace())
            assert not guard.await_store(0.2) and guard.generation == -1
            answered = thread.submit(guard.await_store, ANSWER_S)
        assert answered.result() and guard.generation == 0
    assert guard.await_store(0.0)


def test_a_store_that_refuses_connections_is_not_waited_for(
    new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    guard = make_guard(NO_SERVER, new_namespace())
    started = time.monotonic()
    assert not guard.await_store(ANSWER_S) and guard.generation == -1
    assert time.monotonic() - started < ANSWER_S / 2
    guard.close()
    assert not guard.await_store(ANSWER_S), "a guard that is closed does not wait either"


def test_a_store_that_returns_is_used_again(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    server = start_server()
    guard = make_guard(server.endpoint, new_namespace())
    keys = make_keys(2)
    guard.call(lambda client: client.set(keys, blocks_of(keys, 4096)), None)
    assert holds(guard, keys) == 2
    server.kill()
    assert holds(guard, keys) == -1
    server.restart()
    wait_until(lambda: holds(guard, keys) == 0)


@pytest.mark.exclusive
def test_a_frozen_store_costs_the_first_call_its_deadline_only(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    server = start_server()
    guard = make_guard(server.endpoint, new_namespace())
    keys = make_keys(1)
    with server.stopped():
        started = time.monotonic()
        assert holds(guard, keys) == -1
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
        started = time.monotonic()
        for _ in range(100):
            assert holds(guard, keys) == -1
        assert time.monotonic() - started < TIMEOUT_S
    wait_until(lambda: holds(guard, keys) == 0)


def test_a_frozen_store_does_not_keep_an_engine_from_starting(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    server = start_server()
    with server.stopped():
        started = time.monotonic()
        guard = make_guard(server.endpoint, new_namespace())
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
        assert holds(guard, make_keys(1)) == -1
    wait_until(lambda: holds(guard, make_keys(1)) == 0)


def test_a_dead_node_costs_only_its_blocks_and_is_counted(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    servers, counters = [start_server(), start_server()], Counters()
    guard = make_guard([server.endpoint for server in servers], new_namespace(), counters)
    keys = make_keys(100)
    guard.call(lambda client: client.set(keys, blocks_of(keys, 4096), deferred=False), None)
    servers[0].kill()
    found = wait_until(lambda: guard.call(lambda client: int(client.contains(keys).sum()), 0))
    assert 10 < found < 90
    assert counters.take()["failed_calls"] >= 1


def test_an_unusable_endpoint_stops_the_engine_with_the_reason(new_namespace: MakeNamespace) -> None:
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT"):
        StoreGuard("http://somewhere", new_namespace(), timeout_s=TIMEOUT_S, counters=Counters())


def test_no_call_raises_an_exception(server: Server, new_namespace: MakeNamespace, make_guard: MakeGuard) -> None:
    counters = Counters()
    guard = make_guard(server.endpoint, new_namespace(), counters)

    def defect(client: KVStoreClient) -> int:
        raise ZeroDivisionError("ours")

    assert guard.call(defect, 7) == 7
    assert guard.call(lambda client: client.get_into(make_keys(1), np.empty((1, 5), dtype=np.uint8)), None) is None
    assert counters.take() == {"failed_calls": 2}


def test_defects_are_logged_with_traceback_and_store_failures_without(
    server: Server, new_namespace: MakeNamespace, make_guard: MakeGuard, caplog: pytest.LogCaptureFixture
) -> None:
    make_guard(server.endpoint, new_namespace()).call(lambda client: 1 // 0, 0)
    [record] = caplog.records
    assert record.exc_info and "ZeroDivisionError" in record.getMessage()
    caplog.clear()
    guard = make_guard(NO_SERVER, new_namespace(rank=3, world=4))
    assert holds(guard, make_keys(1)) == -1
    record = next(record for record in caplog.records if "counts as a miss" in record.getMessage())
    assert not record.exc_info and "rank 3" in record.getMessage() and NO_SERVER in record.getMessage()


def test_many_failures_are_one_log_line_and_a_later_summary(
    new_namespace: MakeNamespace, make_guard: MakeGuard, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    counters = Counters()
    guard = make_guard(NO_SERVER, new_namespace(), counters, logger=logging.getLogger("engine"))
    threads = [
        threading.Thread(target=lambda: [holds(guard, make_keys(1)) for _ in range(50)], daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "engine"]

    [failed] = counters.take().values()
    assert 50 <= failed <= 200, "those of different threads that fail at the same instant may count as one"
    assert len(lines()) == 1
    monkeypatch.setattr("kvstore_client.engine.guard.FAILURE_LOG_INTERVAL_S", 0.0)
    guard._next_log = 0.0  # as if the interval between log lines had passed
    holds(guard, make_keys(1))
    assert len(lines()) == 2 and f"{failed - 1:.0f} more since" in lines()[1]


@pytest.mark.exclusive
def test_a_store_that_refuses_is_asked_again_after_a_pause(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard, monkeypatch: Any
) -> None:
    """The store refuses the namespace because its blocks are larger than a segment. The next store on the same port
    accepts it."""
    monkeypatch.setattr("kvstore_client.engine.guard.REFUSED_PAUSE_S", 0.5)
    server = start_server(memory="8MiB", segment="1MiB")
    counters = Counters()
    guard = make_guard(server.endpoint, new_namespace(2 << 20), counters)
    asked = len(server.log_text())
    started = time.monotonic()
    for _ in range(1000):
        assert holds(guard, make_keys(1)) == -1
    assert time.monotonic() - started < 0.5, "every call asked anew"
    assert counters.take() == {"failed_calls": 1001}
    assert len(server.log_text()) - asked < 1000
    server.kill()
    server._arguments = ("--memory", "8MiB", "--segment", "4MiB")
    server.restart()
    wait_until(lambda: holds(guard, make_keys(1)) == 0)


def test_after_close_every_call_misses_without_a_log_line(
    server: Server, new_namespace: MakeNamespace, make_guard: MakeGuard, caplog: pytest.LogCaptureFixture
) -> None:
    guard = make_guard(server.endpoint, new_namespace())
    guard.close()
    guard.close()
    assert holds(guard, make_keys(1)) == -1
    assert not caplog.records


def test_close_ends_calls_that_wait_for_a_frozen_store(
    start_server: StartServer, new_namespace: MakeNamespace, make_guard: MakeGuard
) -> None:
    server = start_server()
    guard = make_guard(server.endpoint, new_namespace())
    answers: list[int] = []
    with server.stopped():
        thread = threading.Thread(target=lambda: answers.append(holds(guard, make_keys(1))))
        thread.start()
        guard.close()
        thread.join(TIMEOUT_S + SLACK_S)
    assert answers == [-1]


def test_a_forked_child_does_not_wait_for_locks_held_in_its_parent(
    make_guard: MakeGuard, server: Server, new_namespace: MakeNamespace
) -> None:
    namespace, keys = new_namespace(64), make_keys(3)
    guard = make_guard(server.endpoint, namespace)
    assert guard.call(lambda client: client.set(keys, blocks_of(keys, 64)).created, -1) == 3
    guard._lock.acquire()
    guard._log_lock.acquire()
    try:
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            found = holds(guard, keys)
            guard.failed(KVStoreError("what is logged"))
            guard.close()
            os._exit(0 if found == 3 else 1)
    finally:
        guard._lock.release()
        guard._log_lock.release()
    assert os.waitpid(pid, 0)[1] == 0
