"""What `kvstore_client.engine.store` promises for every store, tested with each kind of store and with nested ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore_client import KVStoreClient, KVStoreError, Namespace
from kvstore_client.engine.client_store import ClientStore
from kvstore_client.engine.local_first import LocalFirstStore
from kvstore_client.engine.slices import SlicedStore
from kvstore_client.engine.store import Store, get_into
from tests.support.harness import MakeNamespace, Server, StartServer, block_of, blocks_of, make_keys, stays, wait_until

BLOCK = 64 << 10
SLICES = 4


class Open:
    """Opens stores of one kind, for one namespace with blocks of `BLOCK` bytes. `timeout_s` is the limit of each
    call."""

    def __init__(self, kind: str, far: Server, near: Server | None, namespace: Namespace) -> None:
        self._kind, self._far, self._near, self._namespace = kind, far, near, namespace
        self._opened: list[Store] = []

    def __call__(self, timeout_s: float = 10.0) -> Store:
        store: Store
        store = remote = self._client(self._far, timeout_s)
        if self._near is not None:
            store = LocalFirstStore(self._client(self._near, timeout_s), remote)
        if self._kind.startswith("sliced"):
            store = SlicedStore(store, range(SLICES))
        self._opened.append(store)
        return store

    def _client(self, server: Server, timeout_s: float) -> ClientStore:
        return ClientStore(server.endpoint, self._namespace, fail_open=True, timeout_s=timeout_s, keeps_copies=True)

    def purge(self) -> None:
        """Purge the store that the fleet shares, as an operator does."""
        with KVStoreClient(self._far.endpoint, self._namespace) as operator:
            operator.purge()

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture
def far(start_server: StartServer) -> Server:
    return start_server()


@pytest.fixture(params=["client", "local first", "sliced", "sliced, local first"])
def open_store(
    request: pytest.FixtureRequest, far: Server, start_server: StartServer, new_namespace: MakeNamespace
) -> Iterator[Open]:
    kind: str = request.param
    namespace = new_namespace(BLOCK // SLICES if kind.startswith("sliced") else BLOCK)
    opened = Open(kind, far, start_server() if kind.endswith("local first") else None, namespace)
    yield opened
    opened.close()


def set_chain(store: Store, keys: list[bytes], version: int = 0, generation: int | None = None) -> int:
    """Set a chain. Returns the number of blocks that were not stored."""
    blocks = [block_of(key, BLOCK, version) for key in keys]
    return store.set(keys, blocks, parent=[None, *keys[:-1]], generation=generation).error


def test_blocks_arrive_in_their_places_and_others_miss(open_store: Open) -> None:
    store, keys = open_store(), make_keys(6)
    assert set_chain(store, keys[:4]) == 0
    out = np.zeros((8, BLOCK), dtype=np.uint8)
    slots = [7, 0, 5, 2, 1, 3]
    assert get_into(store, keys, out, slots).tolist() == [True] * 4 + [False] * 2
    assert [bytes(out[slot]) for slot in slots[:4]] == blocks_of(keys[:4], BLOCK)
    assert not out[[4, 6]].any(), "rows that no block goes to"
    assert store.contains(keys).tolist() == store.in_remote(keys).tolist() == [True] * 4 + [False] * 2
    assert store.match_prefix(keys, refresh=True, pin_s=0.1) == 4 == store.lookup(keys).present
    assert store.match_prefix([keys[5], *keys[:4]]) == 0, "a chain ends at its first gap"
    assert store.expire(keys, ttl_s=60.0).tolist() == [True] * 4 + [False] * 2


def test_an_existing_block_is_left_unchanged(open_store: Open) -> None:
    store, keys = open_store(), make_keys(2)
    assert set_chain(store, keys) == 0 and set_chain(store, keys, version=1) == 0
    out = np.zeros((2, BLOCK), dtype=np.uint8)
    assert get_into(store, keys, out, range(2)).all()
    assert [bytes(row) for row in out] == blocks_of(keys, BLOCK)


def test_a_promised_block_is_waited_for(open_store: Open) -> None:
    store, other, keys = open_store(), open_store(), make_keys(3)
    promise = other.promise(keys)
    assert not promise.present.any() and not promise.others.any()
    assert store.promise(keys).others.all()
    assert (store.lookup(keys).present, store.lookup(keys).promised) == (0, 3)
    out = np.zeros((3, BLOCK), dtype=np.uint8)
    found: list[bool] = []
    reader = threading.Thread(target=lambda: found.extend(get_into(store, keys, out, range(3), wait_s=10.0)))
    reader.start()
    stays(reader.is_alive, 0.1)
    assert set_chain(other, keys) == 0
    reader.join()
    assert all(found) and [bytes(row) for row in out] == blocks_of(keys, BLOCK)


def test_a_silent_store_is_a_miss_by_the_deadline_with_a_reason(open_store: Open, far: Server) -> None:
    store, keys = open_store(0.5), make_keys(3)
    assert not store.contains(keys).any() and store.reached
    with far.stopped():
        began = time.monotonic()
        out = np.zeros((3, BLOCK), dtype=np.uint8)
        assert not get_into(store, keys, out, range(3)).any()
        assert store.match_prefix(keys) == 0 and not store.contains(keys).any()
        assert set_chain(store, keys) > 0
        assert time.monotonic() - began < 4 * 0.5 + 2.0
        assert store.stats.unanswered > 0 and isinstance(store.why_unanswered(), KVStoreError)


def test_blocks_made_before_a_purge_are_refused_and_stored_ones_miss(open_store: Open) -> None:
    store, keys = open_store(), make_keys(4)
    assert set_chain(store, keys[:2]) == 0
    before = store.generation
    open_store.purge()
    wait_until(lambda: store.generation > before)
    assert not store.contains(keys).any()
    assert not get_into(store, keys, np.zeros((4, BLOCK), dtype=np.uint8), range(4)).any()
    assert set_chain(store, keys[2:], generation=before) > 0
    assert not store.in_remote(keys).any()
    assert set_chain(store, keys, generation=store.generation) == 0 and store.contains(keys).all()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ValueError, lambda store, out: get_into(store, make_keys(2), out, [1, 1])),
        (IndexError, lambda store, out: get_into(store, make_keys(2), out, [0, 9])),
        (ValueError, lambda store, out: get_into(store, make_keys(2), out, [0])),
        (ValueError, lambda store, out: store.set([b"short"], [bytes(BLOCK)], parent=[None])),
        (ValueError, lambda store, out: store.set(make_keys(1), [bytes(BLOCK - 4)], parent=[None])),
        (ValueError, lambda store, out: store.contains(make_keys(1), timeout_s=-1.0)),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(
    open_store: Open, kind: type[Exception], wrong: Callable[[Store, object], object]
) -> None:
    store, keys = open_store(), make_keys(2)
    set_chain(store, keys)
    out = np.zeros((2, BLOCK), dtype=np.uint8)
    with pytest.raises(kind):
        wrong(store, out)
    assert not out.any() and store.contains(keys).all()


def test_closed_steps_give_up_their_requests(open_store: Open) -> None:
    store, other, keys = open_store(), open_store(), make_keys(2)
    promise = other.promise(keys)
    out = np.zeros((2, BLOCK), dtype=np.uint8)
    steps = store.get_into_steps(keys, out, range(2), wait_s=10.0)
    next(steps)
    steps.close()
    assert set_chain(other, keys) == 0
    promise.withdraw()
    assert store.contains(keys).all() and not out.any(), "nothing is written after the steps were closed"


def test_many_threads_and_a_child_may_call(open_store: Open) -> None:
    store, keys = open_store(), make_keys(40)
    failed: list[str] = []

    def use(number: int) -> None:
        mine = keys[4 * number : 4 * number + 4]
        out = np.zeros((4, BLOCK), dtype=np.uint8)
        if set_chain(store, mine) or not get_into(store, mine, out, range(4)).all():
            failed.append(f"{number}: blocks are missing")
        elif [bytes(row) for row in out] != blocks_of(mine, BLOCK):
            failed.append(f"{number}: other bytes")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        try:
            use(9)
            os._exit(1 if failed else 0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    use(9)
    assert not failed
