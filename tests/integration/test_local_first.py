"""A server on the engine's host in front of the store that the fleet shares. Both together act as one store."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Lookup, Namespace
from kvstore_client.engine.client_store import ClientStore
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Within
from kvstore_client.engine.local_first import LocalFirstStore
from kvstore_client.engine.store import get_into
from kvstore_client.engine.transfer_in import TransferIn
from kvstore_client.engine.transfer_out import BlockOut, SendOutcome, TransferOut
from kvstore_client.vllm.connector.options import ConnectorOptions
from kvstore_client.vllm.shared.store_options import parse_options
from tests.support.clock import Clock
from tests.support.harness import (
    Server,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    namespace_info,
    wait_until,
)

BLOCK_BYTES = 64 << 10


@pytest.fixture
def near(start_server: StartServer, tmp_path: Path) -> Server:
    return start_server("--unix-socket", str(tmp_path / "near.sock"))


@pytest.fixture
def far(start_server: StartServer) -> Server:
    return start_server()


@pytest.fixture
def store(near: Server, far: Server, namespace: Namespace) -> Iterator[LocalFirstStore]:
    opened = LocalFirstStore(
        ClientStore(near.endpoint, namespace, fail_open=True, timeout_s=10.0, keeps_copies=True),
        ClientStore(far.endpoint, namespace, fail_open=True, timeout_s=10.0, keeps_copies=True),
    )
    yield opened
    opened.close()


def test_a_set_goes_to_both_stores_and_is_read_locally(store: LocalFirstStore, far: Server) -> None:
    keys = make_keys(6)
    assert store.set(keys, blocks_of(keys, BLOCK_BYTES), parent=[None, *keys[:-1]]).created == 6
    assert store.local.contains(keys).all() and store.remote.contains(keys).all()
    gets = namespace_info(store.remote).hits
    out = np.zeros((6, BLOCK_BYTES), dtype=np.uint8)
    assert get_into(store, keys, out, range(6)).all() and [bytes(row) for row in out] == blocks_of(keys, BLOCK_BYTES)
    assert namespace_info(store.remote).hits == gets and store.stats.path == "shared memory"


def test_blocks_only_in_the_remote_store_are_found_read_and_promoted(store: LocalFirstStore) -> None:
    keys = make_keys(6)
    store.remote.set(keys, blocks_of(keys, BLOCK_BYTES))
    store.local.set(keys[:2], blocks_of(keys[:2], BLOCK_BYTES))
    assert store.match_prefix(keys, refresh=True, pin_s=1.0) == 6 and store.contains(keys).all()
    out = np.zeros((8, BLOCK_BYTES), dtype=np.uint8)
    assert get_into(store, keys, out, [7, 6, 5, 4, 3, 2]).all()
    assert [bytes(out[7 - at]) for at in range(6)] == blocks_of(keys, BLOCK_BYTES)
    out[:] = 0  # the caller may reuse its memory at once
    wait_until(lambda: store.local.contains(keys).all())
    assert store.local.get(keys).blocks == blocks_of(keys, BLOCK_BYTES)


def test_blocks_promised_in_the_remote_store_are_waited_for(store: LocalFirstStore) -> None:
    keys = make_keys(6)
    store.local.set(keys[:2], blocks_of(keys[:2], BLOCK_BYTES))
    promise = store.promise(keys)
    assert not promise.present.any() and not promise.others.any() and store.lookup(keys) == Lookup(0, 6)
    out = np.zeros((6, BLOCK_BYTES), dtype=np.uint8)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(lambda: get_into(store, keys, out, range(6), wait_s=30))
        wait_until(lambda: namespace_info(store.remote).awaited, what="somebody waits")
        store.set(keys, blocks_of(keys, BLOCK_BYTES), parent=[None, *keys[:-1]])
        assert reading.result(10).all() and [bytes(row) for row in out] == blocks_of(keys, BLOCK_BYTES)
    promise.withdraw()


def test_expire_changes_both_stores(
    start_server: StartServer, namespace: Namespace, clock: Clock, tmp_path: Path
) -> None:
    keys = make_keys(4)
    near, far = (
        ClientStore(start_server("--unix-socket", where, **clock.environment).endpoint, namespace)
        for where in (str(tmp_path / "near.sock"), "off")
    )
    store = LocalFirstStore(near, far)
    store.set(keys, blocks_of(keys, BLOCK_BYTES), ttl_s=10)
    near.delete(keys[3:])
    assert store.expire(keys[1:], ttl_s=60).all(), "the fleet's store has them all"
    clock.advance(11)
    assert near.contains(keys).tolist() == [False, True, True, False]
    assert far.contains(keys).tolist() == [False, True, True, True]
    store.close()


def test_a_chain_is_followed_across_both_stores(store: LocalFirstStore) -> None:
    keys = make_keys(9)
    store.local.set([keys[at] for at in (0, 1, 4)], blocks_of([keys[at] for at in (0, 1, 4)], BLOCK_BYTES))
    store.remote.set([keys[at] for at in (2, 3, 5, 7)], blocks_of([keys[at] for at in (2, 3, 5, 7)], BLOCK_BYTES))
    assert store.match_prefix(keys) == 6
    assert store.match_prefix(make_keys(2, first=50)) == 0
    assert store.contains(keys).tolist() == [True] * 6 + [False, True, False]


@pytest.mark.parametrize("how", ["gone", "asleep"])
def test_a_failing_local_server_costs_its_copies_and_half_a_timeout(
    how: str, store: LocalFirstStore, near: Server
) -> None:
    keys = make_keys(6)
    store.set(keys, blocks_of(keys, BLOCK_BYTES))
    (shard,) = near.shards()
    if how == "gone":
        near.kill()
    else:
        shard.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert store.match_prefix(keys, timeout_s=2.0) == 6
        out = np.zeros((6, BLOCK_BYTES), dtype=np.uint8)
        assert get_into(store, keys, out, range(6), timeout_s=2.0).all()
        assert time.monotonic() - began < 6.0
        more = make_keys(2, first=50)
        assert store.set(more, blocks_of(more, BLOCK_BYTES)).created == 2
    finally:
        if how == "asleep":
            shard.send_signal(signal.SIGCONT)


def test_without_the_remote_store_the_local_one_still_serves(store: LocalFirstStore, far: Server) -> None:
    keys = make_keys(6)
    store.set(keys[:3], blocks_of(keys[:3], BLOCK_BYTES))
    far.kill()
    assert store.match_prefix(keys, timeout_s=1.0) == 3
    assert store.set(keys[3:], blocks_of(keys[3:], BLOCK_BYTES)).error == 3  # not in the fleet's store
    out = np.zeros((6, BLOCK_BYTES), dtype=np.uint8)
    assert get_into(store, keys, out, range(6), timeout_s=1.0).all()


def test_transfers_use_both_stores(near: Server, far: Server, namespace: Namespace) -> None:
    """Blocks are sent to the fleet's store even if the local store has them. Blocks are fetched from either store."""
    keys, counters = make_keys(8), Counters()
    guard = StoreGuard(far.endpoint, namespace, timeout_s=2.0, counters=counters, local=near.endpoint)
    sent: list[tuple[object, SendOutcome]] = []
    rows = np.frombuffer(b"".join(blocks_of(keys, BLOCK_BYTES)), dtype=np.uint8).reshape(8, BLOCK_BYTES)
    out, into = TransferOut(guard, limit=8, counters=counters, done=sent.extend), None
    try:
        with ClientStore(near.endpoint, namespace) as client:
            client.set(keys[:4], rows[:4])
        out.put(map(BlockOut, keys, rows, range(8), [None, *keys[:-1]]))
        wait_until(lambda: len(sent) == 8)
        assert {outcome for _, outcome in sent} == {SendOutcome.STORED}
        with ClientStore(far.endpoint, namespace) as client:
            assert client.contains(keys).all()
        into = TransferIn(guard, counters=counters)
        target, finished = np.zeros((8, BLOCK_BYTES), dtype=np.uint8), []
        into.submit(
            keys,
            target,
            range(8),
            within=Within(2),
            arrived=lambda first, hits: bool(hits.all()),
            done=lambda: finished.append(True),
        )
        wait_until(lambda: finished)
        assert (target == rows).all()
    finally:
        out.close(1.0)
        if into is not None:
            into.close()
        guard.close()


def test_a_remote_purge_empties_the_local_store_before_its_next_use(
    store: LocalFirstStore, near: Server, far: Server, namespace: Namespace
) -> None:
    """After the purge, neither store returns older blocks, and neither accepts older blocks that an engine is still
    sending."""
    keys = make_keys(6)
    made = store.generation
    store.set(keys, blocks_of(keys, BLOCK_BYTES), generation=made)
    with ClientStore(far.endpoint, namespace) as operator:
        assert operator.purge() == 6
        wait_until(lambda: store.remote.generation == operator.generation, what="the engine has heard of it")
    assert store.generation > made and not store.contains(keys).any()
    with ClientStore(near.endpoint, namespace) as looks:
        assert not looks.contains(keys).any() and looks.generation == store.remote.generation
        assert store.set(keys, blocks_of(keys, BLOCK_BYTES), generation=made).refused == 6
        assert not looks.contains(keys).any() and not store.remote.contains(keys).any()
        assert store.set(keys, blocks_of(keys, BLOCK_BYTES), generation=store.generation).created == 6
        assert looks.contains(keys).all() and store.remote.contains(keys).all()


def test_an_engine_started_after_a_purge_finds_nothing_older_locally(
    near: Server, far: Server, namespace: Namespace
) -> None:
    keys = make_keys(6)
    with ClientStore(near.endpoint, namespace) as client:
        client.set(keys, blocks_of(keys, BLOCK_BYTES))
    with ClientStore(far.endpoint, namespace) as operator:
        operator.purge()
    fresh = LocalFirstStore(
        ClientStore(near.endpoint, namespace, fail_open=True), ClientStore(far.endpoint, namespace, fail_open=True)
    )
    try:
        out = np.zeros((6, BLOCK_BYTES), dtype=np.uint8)
        assert not get_into(fresh, keys, out, range(6)).any() and fresh.match_prefix(keys) == 0
    finally:
        fresh.close()


def test_a_local_purge_leaves_the_remote_store_unchanged(
    store: LocalFirstStore, near: Server, namespace: Namespace
) -> None:
    keys = make_keys(6)
    made = store.generation
    store.set(keys, blocks_of(keys, BLOCK_BYTES), generation=made)
    with ClientStore(near.endpoint, namespace) as operator:
        assert operator.purge() == 6
        wait_until(lambda: store.local.generation == operator.generation, what="the engine has heard of it")
    assert store.remote.contains(keys).all() and store.generation > made
    assert store.match_prefix(keys) == 6


def test_only_some_of_many_blocks_are_promoted(store: LocalFirstStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_client.engine.local_first.PROMOTED_BYTES", 4 * BLOCK_BYTES)
    keys = make_keys(12)
    store.remote.set(keys, blocks_of(keys, BLOCK_BYTES))
    out = np.zeros((12, BLOCK_BYTES), dtype=np.uint8)
    assert get_into(store, keys, out, range(12)).all() and store.dropped == 12
    assert get_into(store, keys[:3], out, range(3)).all()
    wait_until(lambda: store.local.contains(keys[:3]).all())
    assert bytes(out[1]) == block_of(keys[1], BLOCK_BYTES)


@pytest.mark.parametrize("local", ["tcp://127.0.0.1:7070", "a:1,b:2", "etcd://a:2379/n"])
def test_an_operator_names_one_server_on_the_host(local: str) -> None:
    with pytest.raises(ValueError, match="expected the address of one server on this host"):
        parse_options(ConnectorOptions, {"endpoint": "127.0.0.1:7070", "local": local}, "test")
    options = {"endpoint": "etcd://a:2379/n", "local": "127.0.0.1:7070"}
    assert parse_options(ConnectorOptions, options, "test").local == "127.0.0.1:7070"
