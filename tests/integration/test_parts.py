"""Blocks that are stored as ranges of heads, and shared by engines with different numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Lookup, Namespace
from kvstore_client.engine.client_store import ClientStore
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Within
from kvstore_client.engine.slices import SlicedStore, slice_keys
from kvstore_client.engine.store import get_into
from kvstore_client.engine.transfer_in import TransferIn
from kvstore_client.engine.transfer_out import BlockOut, SendOutcome, TransferOut
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, namespace_info, wait_until

PART = 4096
OF = 4
KEYS = make_keys(6)
PARENTS = [None, *KEYS[:-1]]
BLOCKS = np.stack([np.frombuffer(each, dtype=np.uint8) for each in blocks_of(KEYS, OF * PART)])


@pytest.fixture
def namespace(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(PART)


@pytest.fixture
def client(server: Server, namespace: Namespace) -> Iterator[ClientStore]:
    with ClientStore(server.endpoint, namespace) as client:
        yield client


def rank(client: ClientStore, place: int, ranks: int) -> tuple[SlicedStore, np.ndarray]:
    """Return the store of a rank, and the rank's parts of the blocks."""
    count = OF // ranks
    parts = range(place * count, (place + 1) * count)
    return SlicedStore(client, parts), np.ascontiguousarray(BLOCKS[:, parts.start * PART : parts.stop * PART])


def read(client: ClientStore, place: int, ranks: int, slots: Sequence[int]) -> tuple[list[bool], bool]:
    """Read all blocks as a rank. Returns which of them it finds, and whether their bytes are right."""
    store, mine = rank(client, place, ranks)
    rows = np.zeros((max(slots) + 1, mine.shape[1]), dtype=np.uint8)
    found = get_into(store, KEYS, rows, slots)
    return found.tolist(), np.array_equal(rows[slots][found], mine[found])


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_other_number_set(client: ClientStore, writers: int, readers: int) -> None:
    everything = SlicedStore(client, range(OF))
    for place in range(writers):
        assert everything.match_prefix(KEYS) == 0 and not everything.contains(KEYS).any()
        store, mine = rank(client, place, writers)
        assert store.set(KEYS, list(mine), parent=PARENTS).created == len(KEYS) * OF // writers
        assert store.contains(KEYS).all() and store.in_remote(KEYS).all()
    assert everything.match_prefix([*KEYS, bytes(len(KEYS[0]))]) == len(KEYS)
    for place in range(readers):
        assert read(client, place, readers, [5, 0, 3, 1, 2, 4]) == ([True] * len(KEYS), True)


def test_a_block_that_lacks_a_part_is_missing(client: ClientStore) -> None:
    store, mine = rank(client, 0, 1)
    store.set(KEYS, list(mine), parent=PARENTS)
    client.delete(slice_keys(KEYS[2:3], range(3, 4)))
    present = [True, True, False, True, True, True]
    assert store.contains(KEYS).tolist() == present and store.match_prefix(KEYS) == 2
    assert read(client, 0, 1, range(len(KEYS))) == (present, True)
    assert read(client, 0, 2, range(len(KEYS))) == ([True] * len(KEYS), True), "its parts are all there"
    assert read(client, 1, 2, range(len(KEYS))) == (present, True)


def test_transfers_move_whole_blocks(server: Server, namespace: Namespace) -> None:
    counters = Counters()
    sent: list[tuple[object, SendOutcome]] = []
    guard = StoreGuard(server.endpoint, namespace, timeout_s=10.0, counters=counters, slices=[range(OF)])
    assert guard.block_bytes == OF * PART
    out = TransferOut(guard, limit=100, counters=counters, done=sent.extend)
    for _ in range(2):
        out.put(map(BlockOut, KEYS, BLOCKS, range(len(KEYS)), PARENTS))
        assert out.drain(10.0)
    out.close(10.0)
    outcomes = [SendOutcome.STORED] * len(KEYS) + [SendOutcome.PRESENT] * len(KEYS)
    assert sent == list(zip([*range(len(KEYS))] * 2, outcomes, strict=True))
    rows = np.zeros_like(BLOCKS)
    ended: list[bool] = []
    into = TransferIn(guard, counters=counters)
    into.submit(
        KEYS,
        rows,
        range(len(KEYS)),
        within=Within(float("inf")),
        arrived=lambda _first, hits: bool(hits.all()),
        done=lambda: ended.append(True),
    )
    wait_until(lambda: ended)
    into.close()
    guard.close()
    assert np.array_equal(rows, BLOCKS)
    counted = counters.take()
    assert counted["transfer_in_bytes"] == counted["transfer_out_bytes"] == BLOCKS.nbytes


def test_a_local_server_stores_parts_too(
    server: Server, start_server: StartServer, namespace: Namespace, tmp_path: Path
) -> None:
    near = start_server("--unix-socket", str(tmp_path / "near.sock"))
    with ClientStore(server.endpoint, namespace) as client:
        store, mine = rank(client, 0, 1)
        store.set(KEYS, list(mine), parent=PARENTS)
    guard = StoreGuard(
        server.endpoint, namespace, timeout_s=10.0, counters=Counters(), local=near.endpoint, slices=[range(2)]
    )
    rows = np.zeros((len(KEYS), 2 * PART), dtype=np.uint8)
    found = guard.call(lambda store: get_into(store, KEYS, rows, range(len(KEYS)), timeout_s=10.0), None)
    assert found is not None and found.all() and np.array_equal(rows, BLOCKS[:, : 2 * PART])
    with ClientStore(near.endpoint, namespace) as client:
        wait_until(lambda: client.contains(slice_keys(KEYS, range(2))).all(), what="they were promoted")
        assert not client.contains(slice_keys(KEYS, range(2, OF))).any()
    guard.close()


def test_a_block_is_promised_with_all_its_parts(server: Server, namespace: Namespace, client: ClientStore) -> None:
    """A block counts as promised by another client if one of its parts is."""
    whole, (half, mine) = SlicedStore(client, range(OF)), rank(client, 0, 2)
    half.set(KEYS[:1], list(mine[:1]), parent=[None])
    with ClientStore(server.endpoint, namespace) as other:
        first = SlicedStore(other, range(3, 4)).promise(KEYS[2:4])
        assert not first.present.any() and not first.others.any()
        promise = whole.promise(KEYS[:5])
        assert not promise.present.any() and promise.others.tolist() == [False, False, True, True, False]
        assert whole.lookup(KEYS) == Lookup(0, 5), "all parts of five blocks are there or promised"
        assert half.lookup(KEYS) == Lookup(1, 5)
        first.withdraw()
        assert whole.lookup(KEYS) == Lookup(0, 2)
        promise.withdraw()
        assert whole.lookup(KEYS) == Lookup(0, 0)


def test_promised_parts_are_waited_for(server: Server, namespace: Namespace, client: ClientStore) -> None:
    store, mine = rank(client, 0, 1)
    promise = store.promise(KEYS)
    rows = np.zeros_like(mine)
    with ClientStore(server.endpoint, namespace) as other, ThreadPoolExecutor(1) as thread:
        reading = thread.submit(
            lambda: get_into(SlicedStore(other, range(OF)), KEYS, rows, range(len(KEYS)), wait_s=30)
        )
        wait_until(lambda: namespace_info(client).awaited, what="somebody waits")
        store.set(KEYS, list(mine), parent=PARENTS)
        assert reading.result(10).all() and np.array_equal(rows, mine)
    promise.withdraw()


def test_the_old_option_name_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="SlicedStore"):
        from kvstore_client.engine.parts import PartsStore
    assert PartsStore is SlicedStore
