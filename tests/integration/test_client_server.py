"""Every call of the client against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore_client import (
    AsyncKVStoreClient,
    BlockSizeMismatch,
    ConnectionLost,
    KVStoreClient,
    Namespace,
    OutOfMemory,
    SetResult,
)
from tests.support.harness import (
    CONTAINS,
    GET,
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
)

KiB, MiB = 1 << 10, 1 << 20
SIZES = [1, 7, 4 * KiB, 917_504, 5 * MiB]


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., KVStoreClient]]:
    """`connect(namespace)`: return a client of the shared server."""
    with contextlib.ExitStack() as clients:
        yield lambda namespace, **options: clients.enter_context(KVStoreClient(server.endpoint, namespace, **options))


@pytest.fixture
def client(connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace) -> KVStoreClient:
    return connect(new_namespace(4 * KiB))


def rows(blocks: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(len(blocks), -1)


# ---- set and get ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", SIZES)
def test_set_blocks_are_read_by_every_call(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace, block_bytes: int
) -> None:
    client = connect(new_namespace(block_bytes))
    keys = make_keys(12)
    blocks = blocks_of(keys, block_bytes)
    there, asked = slice(0, 9), [*keys[3:], *keys[:3]]
    expected = [blocks[keys.index(key)] if key in keys[there] else None for key in asked]

    assert client.set(keys[there], rows(blocks[there])) == SetResult(9, 9, 0, 0, 0, 0, copies=1)
    result = client.get(asked)
    assert (result.total, result.hit, result.miss, result.duplicate) == (12, 9, 3, 0)
    assert result.blocks == expected
    assert all(block is None or block.readonly for block in result.blocks)

    out = np.zeros((12, block_bytes), dtype=np.uint8)
    present = client.get_into(asked, out)
    assert present.tolist() == [block is not None for block in expected]
    assert all(out[number].tobytes() == block for number, block in enumerate(expected) if block is not None)

    streamed = {position: bytes(block) for position, block in client.stream_get(asked)}
    assert streamed == {number: block for number, block in enumerate(expected) if block is not None}

    assert client.contains(asked).tolist() == present.tolist()
    assert client.match_prefix(keys) == 9
    assert client.delete(asked) == 9 and not client.contains(keys).any()


def test_blocks_may_have_any_form(client: KVStoreClient) -> None:
    keys, size = make_keys(6), 4 * KiB
    blocks = blocks_of(keys, size)
    table = np.zeros((6, 3 * size), dtype=np.uint8)
    table[:, size : 2 * size] = rows(blocks)
    for form in (
        blocks,
        [bytearray(block) for block in blocks],
        [memoryview(block) for block in blocks],
        rows(blocks),
        rows(blocks).view(np.float32).reshape(6, 2, -1),
        table[:, size : 2 * size],
        np.concatenate(rows(blocks)),
    ):
        assert client.set(keys, form).created == 6
        assert client.get(keys).blocks == blocks
        assert client.delete(keys) == 6


def test_tensor_blocks_are_read_into_a_tensor(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    torch = pytest.importorskip("torch")
    client = connect(new_namespace(8 * KiB))
    keys = make_keys(5)
    source = torch.arange(5 * 4 * KiB, dtype=torch.float32).to(torch.bfloat16).reshape(5, 2, -1)
    assert client.set(keys, source).created == 5
    target = torch.zeros(8, 2, 2 * KiB, dtype=torch.bfloat16)
    assert client.get_into(keys, target, [7, 5, 3, 1, 0]).all()
    assert torch.equal(target[[7, 5, 3, 1, 0]], source) and not target[[2, 4, 6]].any()


@pytest.mark.parametrize("key_bytes", [8, 13, 32, 64])
def test_keys_may_have_any_length(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace, key_bytes: int
) -> None:
    client = connect(new_namespace(100))
    keys = make_keys(50, key_bytes=key_bytes)
    array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(50, key_bytes)
    assert client.set(array, blocks_of(keys, 100)).created == 50
    assert client.get(keys).blocks == blocks_of(keys, 100)
    assert client.contains(array).all()


def test_existing_blocks_stay_unless_forced(client: KVStoreClient) -> None:
    keys = make_keys(4)
    first, second = blocks_of(keys, 4 * KiB), blocks_of(keys, 4 * KiB, version=1)
    assert client.set(keys[:3], first[:3]) == SetResult(3, 3, 0, 0, 0, 0, copies=1)
    assert client.set(keys, second) == SetResult(4, 1, 3, 0, 0, 0, copies=1)
    assert client.get(keys).blocks == [*first[:3], second[3]]
    assert client.set(keys, second, force=True) == SetResult(4, 0, 0, 4, 0, 0, copies=1)
    assert client.get(keys).blocks == second
    assert client.set(make_keys(2, first=3), blocks_of(make_keys(2, first=3), 4 * KiB), force=True) == (
        SetResult(2, 1, 0, 1, 0, 0, copies=1)
    )


def test_a_non_deferred_set_is_readable_at_once_by_others(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    namespace = new_namespace(4 * KiB)
    writer, reader = connect(namespace), connect(namespace)
    keys = make_keys(5)
    writer.set(keys, blocks_of(keys, 4 * KiB), deferred=False)
    assert reader.get(keys).blocks == blocks_of(keys, 4 * KiB)


def test_after_a_sync_every_deferred_set_is_readable_by_others(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    namespace = new_namespace(64 * KiB)
    writer, reader = connect(namespace), connect(namespace)
    for round_ in range(5):
        keys = make_keys(40, first=40 * round_)
        writer.set(keys, blocks_of(keys, 64 * KiB), deferred=True)
        writer.sync()
        assert reader.contains(keys).all()


def test_repeated_keys_are_handled(client: KVStoreClient) -> None:
    a, b, c = make_keys(3)
    blocks = blocks_of([a, b], 4 * KiB)
    result = client.set([a, b, a, a], [*blocks, *blocks_of([a, a], 4 * KiB, version=9)])
    assert result == SetResult(4, 2, 0, 0, 2, 0, copies=1)
    got = client.get([a, c, b, a, c])
    assert (got.total, got.hit, got.miss, got.duplicate) == (5, 3, 2, 2)
    assert got.blocks == [blocks[0], None, blocks[1], blocks[0], None]
    out = np.zeros((5, 4 * KiB), dtype=np.uint8)
    assert client.get_into([a, c, b, a, c], out).tolist() == [True, False, True, True, False]
    assert out[0].tobytes() == out[3].tobytes() == blocks[0]
    assert sorted(position for position, _ in client.stream_get([a, c, b, a])) == [0, 2, 3]
    assert client.contains([a, a, c]).tolist() == [True, True, False]
    assert client.delete([a, a, b]) == 2


def test_empty_batches_are_accepted(client: KVStoreClient) -> None:
    empty = np.empty((0, 4 * KiB), dtype=np.uint8)
    assert client.set([], []) == client.set([], empty) == SetResult(0, 0, 0, 0, 0, 0, copies=0)
    assert client.get([]).total == 0 and list(client.get([]).blocks) == []
    assert len(client.get_into([], empty)) == 0 and len(client.contains([])) == 0
    assert list(client.stream_get([])) == []
    assert client.match_prefix([]) == 0 and client.delete([]) == 0


def test_more_keys_than_fit_one_request_are_split(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    client = connect(new_namespace(16))
    keys = make_keys(20_000)
    blocks = rows(blocks_of(keys, 16))
    assert client.set(keys, blocks).created == 20_000
    assert client.set(keys, blocks).existed == 20_000
    assert client.contains(keys).all() and client.match_prefix(keys) == 20_000
    out = np.zeros_like(blocks)
    assert client.get_into(keys, out).all() and (out == blocks).all()
    streamed = np.zeros_like(blocks)
    for position, block in client.stream_get(keys):
        streamed[position] = np.frombuffer(block, dtype=np.uint8)
    assert (streamed == blocks).all()
    client.delete(keys[15_000:15_001])
    assert client.match_prefix(keys) == 15_000
    assert client.delete(keys) == 19_999


# ---- get_into ------------------------------------------------------------------------------------------------------


def test_get_into_places_blocks_in_the_given_slots(client: KVStoreClient) -> None:
    keys = make_keys(4)
    blocks = blocks_of(keys, 4 * KiB)
    client.set(keys[:3], blocks[:3])
    out = np.full((10, 4 * KiB), 7, dtype=np.uint8)
    assert client.get_into(keys, out, slots=[9, 0, 4, 5]).tolist() == [True, True, True, False]
    for slot, block in ((9, blocks[0]), (0, blocks[1]), (4, blocks[2])):
        assert out[slot].tobytes() == block
    assert (out[[1, 2, 3, 6, 7, 8]] == 7).all()


def test_get_into_fills_non_contiguous_rows(client: KVStoreClient) -> None:
    keys, size = make_keys(5), 4 * KiB
    blocks = blocks_of(keys, size)
    client.set(keys, blocks)
    table = np.full((6, 3 * size), 7, dtype=np.uint8)
    assert client.get_into(keys, table[:, size : 2 * size], slots=[5, 4, 3, 2, 1]).all()
    assert [table[5 - number, size : 2 * size].tobytes() for number in range(5)] == blocks
    assert (table[:, :size] == 7).all() and (table[:, 2 * size :] == 7).all() and (table[0] == 7).all()


@pytest.mark.parametrize("slots", [[0, 2], [-1, 0], [2, 3], [0, 10**12]])
def test_a_slot_outside_out_is_refused(client: KVStoreClient, slots: list[int]) -> None:
    out = np.zeros((2, 4 * KiB), dtype=np.uint8)
    wrong = next(slot for slot in slots if not 0 <= slot < 2)
    with pytest.raises(IndexError, match=f"slot {wrong} does not exist: out has 2 rows"):
        client.get_into(make_keys(2), out, slots)


def test_slots_that_do_not_match_the_keys_are_refused(client: KVStoreClient) -> None:
    out = np.zeros((3, 4 * KiB), dtype=np.uint8)
    with pytest.raises(ValueError, match="2 keys and 1 slots"):
        client.get_into(make_keys(2), out, [0])
    with pytest.raises(ValueError, match="twice"):
        client.get_into(make_keys(2), out, [1, 1])
    with pytest.raises(IndexError, match="slot 3 does not exist: out has 3 rows"):
        client.get_into(make_keys(4), out)


def test_memory_that_does_not_fit_is_refused(client: KVStoreClient) -> None:
    with pytest.raises(BlockSizeMismatch, match=r"100 bytes: expected block_bytes=4096"):
        client.get_into(make_keys(1), np.zeros((1, 100), dtype=np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        client.get_into(make_keys(1), bytes(4 * KiB))


# ---- stream_get ----------------------------------------------------------------------------------------------------


def test_an_abandoned_stream_leaves_the_client_usable(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    client = connect(new_namespace(256 * KiB))
    keys = make_keys(120)
    client.set(keys, blocks_of(keys, 256 * KiB))
    for _ in range(5):
        for position, block in client.stream_get(keys):
            assert bytes(block) == block_of(keys[position], 256 * KiB)
            break
        assert client.get(keys[:2]).blocks == blocks_of(keys[:2], 256 * KiB)
    abandoned = client.stream_get(keys)
    next(abandoned)
    del abandoned
    wait_until(lambda: shard_info(client).streams == 0, what="the server ends the streams nobody reads")
    assert client.get(keys).blocks == blocks_of(keys, 256 * KiB)


@pytest.mark.parametrize("block_bytes", [1, 4 * KiB, 917_504])
def test_buffers_of_a_stream_stay_valid_while_they_are_kept(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace, block_bytes: int
) -> None:
    client = connect(new_namespace(block_bytes))
    keys = make_keys(min(3000, 40 * MiB // block_bytes))
    client.set(keys, blocks_of(keys, block_bytes))
    kept = dict(client.stream_get(keys))
    assert len(kept) == len(keys) and all(block.readonly for block in kept.values())
    client.get(keys[:10])
    for position, block in kept.items():
        assert bytes(block) == block_of(keys[position], block_bytes)


def test_other_calls_run_between_the_blocks_of_a_stream(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    client = connect(new_namespace(MiB))
    keys = make_keys(40)
    client.set(keys, blocks_of(keys, MiB))
    seen = []
    for position, block in client.stream_get(keys):
        seen.append(position)
        other = (position + 7) % 40
        assert client.get([keys[other]]).blocks[0] == block_of(keys[other], MiB)
        assert bytes(block) == block_of(keys[position], MiB)
    assert sorted(seen) == list(range(40))


# ---- present or not ------------------------------------------------------------------------------------------------


def test_match_prefix_counts_up_to_the_first_gap(client: KVStoreClient) -> None:
    chain = make_keys(10)
    client.set(chain, blocks_of(chain, 4 * KiB))
    assert client.match_prefix(chain) == 10
    assert client.match_prefix([*chain, *make_keys(3, first=50)]) == 10
    client.delete([chain[4]])
    assert client.match_prefix(chain) == 4
    client.delete([chain[0]])
    assert client.match_prefix(chain) == 0 and client.match_prefix(chain[5:]) == 5


@pytest.fixture
def small(start_server: StartServer, new_namespace: MakeNamespace) -> Iterator[KVStoreClient]:
    """A client of a server that holds 64 blocks."""
    server = start_server(memory="16MiB", segment="4MiB")
    with server.unharmed(), KVStoreClient(server.endpoint, new_namespace(256 * KiB)) as client:
        yield client


def fill(client: KVStoreClient, count: int, first: int) -> SetResult:
    keys = make_keys(count, first=first)
    return client.set(keys, blocks_of(keys, client.namespace.block_bytes))


def test_the_tail_of_a_chain_is_evicted_before_its_head(small: KVStoreClient) -> None:
    chain = make_keys(40)
    small.set(chain, blocks_of(chain, 256 * KiB))
    fill(small, 40, first=1000)
    present = small.contains(chain)
    length = small.match_prefix(chain)
    assert 0 < length < 40 and present[:length].all() and not present[length:].any()
    assert namespace_info(small).evicted == 16


def test_a_refresh_protects_blocks_and_a_plain_lookup_does_not(small: KVStoreClient) -> None:
    old, used, filler = make_keys(16), make_keys(16, first=100), make_keys(16, first=200)
    for keys in (used, old, filler):
        small.set(keys, blocks_of(keys, 256 * KiB))
    assert small.contains(used, refresh=True).all()
    assert small.contains(old, refresh=False).all()
    fill(small, 32, first=1000)
    assert small.contains(used).all()
    # On a slow link a set is sent in parts; then the last block of `filler` may be evicted before the first of `old`.
    left = int(small.contains(old).sum())
    assert left <= 1 and small.contains(filler).sum() == 16 - left
    assert small.match_prefix(used, refresh=True) == 16
    fill(small, 48, first=2000)
    assert small.match_prefix(used) == 16


def test_a_get_does_not_refresh_missing_blocks(small: KVStoreClient) -> None:
    assert small.get(make_keys(70)).hit == 0
    assert fill(small, 64, first=0).created == 64


def test_a_pin_keeps_blocks_until_it_expires(small: KVStoreClient) -> None:
    pinned = make_keys(10)
    small.set(pinned, blocks_of(pinned, 256 * KiB))
    assert fill(small, 54, first=500).created == 54
    start = time.monotonic()
    assert small.contains(pinned, pin_s=1.5).all()
    assert namespace_info(small).pinned == 10
    assert fill(small, 64, first=1000) == SetResult(64, 54, 0, 0, 0, 10, copies=0, evicted=54, refused=10, stale=0)
    if time.monotonic() < start + 1.4:
        assert small.contains(pinned).all() and small.get(pinned).hit == 10
    wait_until(lambda: namespace_info(small).pinned == 0, what="the pins expire")
    assert time.monotonic() >= start + 1.5
    assert fill(small, 64, first=2000).created == 64
    assert not small.contains(pinned).any()


def test_pins_never_take_a_whole_namespace(small: KVStoreClient) -> None:
    keys = make_keys(64)
    fill(small, 64, first=0)
    assert small.contains(keys, pin_s=30.0).all()
    assert namespace_info(small).pinned == 32
    assert small.match_prefix(keys, pin_s=30.0) == 64
    assert namespace_info(small).pinned == 32
    assert fill(small, 64, first=1000).created == 32
    assert small.match_prefix(keys) == 32, "the first blocks of the request are pinned"


def test_a_batch_larger_than_memory_is_stored_as_far_as_it_fits(small: KVStoreClient) -> None:
    result = fill(small, 200, first=0)
    assert result.total == 200 == result.created + result.error
    got = small.get(make_keys(200))
    assert 32 <= got.hit <= 64
    keys = make_keys(200)
    assert all(block is None or block == block_of(key, 256 * KiB) for key, block in zip(keys, got.blocks, strict=True))


def test_a_block_that_can_never_fit_is_refused(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(segment="4MiB")
    with pytest.raises(OutOfMemory, match=f"{4 * MiB + 1} bytes do not fit a segment of {4 * MiB}"):
        KVStoreClient(server.endpoint, new_namespace(4 * MiB + 1))


# ---- while a block is written --------------------------------------------------------------------------------------


def half_set(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> tuple[RawClient, list[bytes]]:
    """Begin a SET. Returns the raw client, and the frames that complete the SET."""
    raw = RawClient(server)
    raw.hello(namespace.canonical())
    header, joined, payload, sums = set_frames(5, keys, blocks_of(keys, namespace.block_bytes))
    raw.send(header, joined, more=True)
    return raw, [payload, sums]


def test_a_get_waits_for_a_block_being_written(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(3)
    client.set(keys[:1], blocks_of(keys[:1], 4 * KiB))
    raw, rest = half_set(server, client.namespace, keys[1:])
    with raw, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: namespace_info(client).writing == 2)
        assert client.contains(keys).all() and client.match_prefix(keys) == 3
        future = pool.submit(client.get, keys)
        wait_until(lambda: shard_info(client).streams == 1)
        assert not future.done()
        raw.send(*rest)
        assert raw.reply()[0][2:4] == [2, 2]
        assert future.result(10).blocks == blocks_of(keys, 4 * KiB)


def test_a_block_whose_writer_vanished_is_a_miss(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(2)
    client.set(keys[:1], blocks_of(keys[:1], 4 * KiB))
    raw, _ = half_set(server, client.namespace, keys[1:])
    with ThreadPoolExecutor(1) as pool:
        wait_until(lambda: namespace_info(client).writing == 1)
        future = pool.submit(client.get, keys)
        wait_until(lambda: shard_info(client).streams == 1)
        raw.close()
        assert future.result(10).blocks == [block_of(keys[0], 4 * KiB), None]
    assert client.set(keys, blocks_of(keys, 4 * KiB)) == SetResult(2, 1, 1, 0, 0, 0, copies=1)


@pytest.mark.exclusive
def test_a_get_waits_until_its_deadline_at_most(
    server: Server, connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    client = connect(new_namespace(4 * KiB), timeout_s=0.5)
    keys = make_keys(1)
    raw, _ = half_set(server, client.namespace, keys)
    with raw:
        wait_until(lambda: namespace_info(client).writing == 1)
        start = time.monotonic()
        with contextlib.suppress(Exception):
            assert client.get(keys).miss == 1
        assert time.monotonic() - start < 1.0


def test_a_block_being_replaced_is_read_in_its_old_version(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(1)
    old, new = blocks_of(keys, 4 * KiB), blocks_of(keys, 4 * KiB, version=1)
    client.set(keys, old)
    with RawClient(server) as raw:
        raw.hello(client.namespace.canonical())
        header, joined, payload, sums = set_frames(5, keys, new, force=True)
        raw.send(header, joined, more=True)
        wait_until(lambda: namespace_info(client).writing == 1)
        assert client.get(keys).blocks == old
        raw.send(payload, sums)
        assert raw.reply()[0][2:8] == [1, 0, 0, 1, 0, 0]
    assert client.get(keys).blocks == new


# ---- namespaces ----------------------------------------------------------------------------------------------------


def test_namespaces_share_a_server_but_no_blocks(
    connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    keys = make_keys(8)
    clients = [connect(new_namespace(size)) for size in (1, 4 * KiB, 4 * KiB, 300_000)]
    for version, client in enumerate(clients):
        assert not client.contains(keys).any()
        client.set(keys, blocks_of(keys, client.namespace.block_bytes, version))
    for version, client in enumerate(clients):
        assert client.get(keys).blocks == blocks_of(keys, client.namespace.block_bytes, version)
    assert clients[1].delete(keys) == 8
    assert clients[2].contains(keys).all() and clients[3].contains(keys).all()


@pytest.mark.parametrize("changed", [{"rank": 1, "world": 2}, {"tenant": "other"}, {"extra": {"lora": "x"}}])
def test_a_namespace_with_one_different_field_sees_nothing(
    connect: Callable[..., KVStoreClient], client: KVStoreClient, changed: dict[str, object]
) -> None:
    keys = make_keys(3)
    client.set(keys, blocks_of(keys, 4 * KiB))
    other = Namespace(
        **{
            "model": client.namespace.model,
            "dtype": "uint8",
            "block_tokens": 16,
            "block_bytes": 4 * KiB,
            **changed,
        }
    )
    assert connect(other).get(keys).miss == 3


def test_info_reports_the_state(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(10)
    client.set(keys, blocks_of(keys, 4 * KiB))
    client.get([*keys, *make_keys(4, first=50)])
    info = client.info()
    (shard,) = info.shards
    mine = namespace_info(client)
    assert (info.block_bytes, info.full_blocks) == (4 * KiB, 10)
    assert info.total_blocks == 256 * MiB // (4 * KiB)
    assert 8 * MiB // (4 * KiB) - 10 <= info.free_blocks <= info.total_blocks - info.full_blocks
    assert (mine.blocks, mine.hits, mine.misses, mine.created, mine.writing) == (10, 10, 4, 10, 0)
    assert shard.pid == server.shards()[0].pid and shard.memory_limit_bytes == 256 * MiB
    assert shard.segment_bytes == 8 * MiB and shard.connections >= 1 and not shard.draining
    assert shard.memory_used_bytes <= shard.memory_limit_bytes and shard.rss_bytes > 10 * MiB
    assert 0 < client.ping() < 10


def test_the_clients_counters_follow_its_calls(client: KVStoreClient) -> None:
    keys = make_keys(6)
    client.set(keys[:4], blocks_of(keys[:4], 4 * KiB))
    client.get(keys)
    list(client.stream_get(keys[:2]))
    stats = client.stats
    assert (stats.blocks_set, stats.hits, stats.misses) == (4, 6, 2)
    assert (stats.bytes_in, stats.bytes_out) == (6 * 4 * KiB, 4 * 4 * KiB)
    assert (stats.checksum_errors, stats.failures, stats.reconnects) == (0, 0, 0)


# ---- checksums -----------------------------------------------------------------------------------------------------


def set_with_wrong_sums(server: Server, namespace: Namespace, keys: Sequence[bytes]) -> None:
    with RawClient(server) as raw:
        raw.hello(namespace.canonical())
        for key in keys:
            block = block_of(key, namespace.block_bytes)
            assert raw.ask(*set_frames(1, [key], [block], sums=bytes(8)))[3] == 1


def test_a_block_with_a_wrong_checksum_is_a_miss_and_dropped(server: Server, client: KVStoreClient) -> None:
    good, bad = make_keys(3), make_keys(2, first=10)
    client.set(good, blocks_of(good, 4 * KiB))
    set_with_wrong_sums(server, client.namespace, bad)
    keys = [good[0], bad[0], good[1], bad[1], good[2]]
    assert client.contains(keys).all()
    got = client.get(keys)
    assert [block is None for block in got.blocks] == [False, True, False, True, False]
    assert client.stats.checksum_errors == 2
    assert client.contains(keys).tolist() == [True, False, True, False, True]
    assert client.set(bad, blocks_of(bad, 4 * KiB)).created == 2
    assert client.get(keys).hit == 5


def test_a_wrong_checksum_is_a_miss_for_get_into_and_stream_get(server: Server, client: KVStoreClient) -> None:
    good, bad = make_keys(2)
    client.set([good], blocks_of([good], 4 * KiB))
    for read in (
        lambda: client.get_into([bad, good], np.zeros((2, 4 * KiB), dtype=np.uint8)).tolist() == [False, True],
        lambda: [position for position, _ in client.stream_get([bad, good])] == [1],
    ):
        set_with_wrong_sums(server, client.namespace, [bad])
        assert read() and not client.contains([bad])[0]


def test_a_stream_with_many_wrong_blocks_ends_normally(
    server: Server, connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    """The stream has more wrong blocks than credit, so the client must also renew the credit for blocks that it
    drops."""
    client = connect(new_namespace(MiB), timeout_s=5.0)
    keys = make_keys(24)
    set_with_wrong_sums(server, client.namespace, keys)
    good = make_keys(2, first=100)
    client.set(good, blocks_of(good, MiB))
    assert [position for position, _ in client.stream_get([*keys, *good])] == [24, 25]
    assert client.stats.checksum_errors == 24


def test_without_verification_bytes_are_accepted_unchecked(
    server: Server, connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace
) -> None:
    client = connect(new_namespace(4 * KiB), checksum=False)
    keys = make_keys(1)
    set_with_wrong_sums(server, client.namespace, keys)
    assert client.get(keys).blocks == blocks_of(keys, 4 * KiB)


# ---- several shards, several nodes ---------------------------------------------------------------------------------


def exercise(client: KVStoreClient, block_bytes: int) -> None:
    """Check that results are in the caller's order, wherever the blocks are stored."""
    keys = make_keys(300)
    blocks = blocks_of(keys, block_bytes)
    there = [number for number in range(300) if number % 7]
    assert client.set([keys[number] for number in there], [blocks[number] for number in there]).created == len(there)
    expected = [number % 7 != 0 for number in range(300)]
    assert client.contains(keys).tolist() == expected
    assert client.get(keys).blocks == [block if hit else None for block, hit in zip(blocks, expected, strict=True)]
    out = np.zeros((300, block_bytes), dtype=np.uint8)
    slots = list(range(299, -1, -1))
    assert client.get_into(keys, out, slots).tolist() == expected
    assert all(out[slots[number]].tobytes() == blocks[number] for number in there)
    streamed = {position: bytes(block) for position, block in client.stream_get(keys)}
    assert streamed == {number: blocks[number] for number in there}
    assert client.match_prefix(keys[1:]) == 6 and client.match_prefix(keys) == 0
    client.sync()
    assert client.info().full_blocks == len(there)
    assert client.delete(keys) == len(there)


def test_several_shards_form_one_store(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "3", memory="96MiB")
    namespace = new_namespace(4 * KiB)
    with server.unharmed(), KVStoreClient(server.endpoint, namespace) as client:
        exercise(client, 4 * KiB)
        keys = make_keys(300)
        client.set(keys, blocks_of(keys, 4 * KiB))
        shards = client.info().shards
        assert {shard.shard for shard in shards} == {0, 1, 2}
        counts = [next(ns.blocks for ns in shard.namespaces if ns.id == namespace.id) for shard in shards]
        assert sum(counts) == 300 and min(counts) > 50, "the keys are spread over all shards"
        with KVStoreClient(server.endpoint, namespace) as other:
            assert other.get(keys).hit == 300


@pytest.mark.parametrize("checksum", [True, False])
def test_blocks_of_several_shards_arrive_interleaved(
    start_server: StartServer, new_namespace: MakeNamespace, checksum: bool
) -> None:
    server = start_server("--shards", "3", memory="384MiB", segment="8MiB")  # each shard has room for 32 of the blocks
    with KVStoreClient(server.endpoint, new_namespace(3 * MiB), checksum=checksum) as client:
        keys = make_keys(45)
        client.set(keys, blocks_of(keys, 3 * MiB))
        kept = {}
        for position, block in client.stream_get(keys):
            assert bytes(block) == block_of(keys[position], 3 * MiB)
            if position % 4 == 0:
                kept[position] = block
        assert all(bytes(block) == block_of(keys[position], 3 * MiB) for position, block in kept.items())
        assert len(kept) == 12 and client.stats.hits == 45 and client.stats.checksum_errors == 0
        assert client.get(keys).blocks == blocks_of(keys, 3 * MiB)


def test_several_nodes_form_one_store(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    nodes = [start_server(), start_server("--shards", "2")]
    with KVStoreClient([node.endpoint for node in nodes], new_namespace(4 * KiB)) as client:
        exercise(client, 4 * KiB)
        assert len(client.info().shards) == 3
        keys = make_keys(300)
        client.set(keys, blocks_of(keys, 4 * KiB))
    with KVStoreClient([node.endpoint for node in reversed(nodes)], client.namespace) as other:
        assert other.get(keys).blocks == blocks_of(keys, 4 * KiB), "the order of nodes does not matter"


# ---- threads, processes, event loops -------------------------------------------------------------------------------


def test_threads_can_share_a_client(connect: Callable[..., KVStoreClient], new_namespace: MakeNamespace) -> None:
    client = connect(new_namespace(64 * KiB))
    shared = make_keys(16, first=10_000)
    client.set(shared, blocks_of(shared, 64 * KiB))

    def work(number: int) -> None:
        mine = make_keys(16, first=100 * number)
        blocks = blocks_of(mine, 64 * KiB)
        for round_ in range(6):
            assert client.set(mine, blocks, force=round_ % 2 == 1).error == 0
            assert client.get([*mine, *shared]).hit == 32
            out = np.zeros((16, 64 * KiB), dtype=np.uint8)
            assert client.get_into(mine, out).all() and out.tobytes() == b"".join(blocks)
            for position, block in client.stream_get(mine):
                assert bytes(block) == blocks[position]
            assert client.contains(shared, refresh=True).all()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(8)]:
            future.result(60)


def test_close_ends_the_calls_of_other_threads(server: Server, new_namespace: MakeNamespace) -> None:
    client = KVStoreClient(server.endpoint, new_namespace(4 * KiB))
    keys = make_keys(1)
    raw, _ = half_set(server, client.namespace, keys)
    with raw, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: namespace_info(client).writing == 1)
        future = pool.submit(client.get, keys)
        wait_until(lambda: shard_info(client).streams == 1)
        client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            future.result(5)
    with pytest.raises(ConnectionLost, match="closed"):
        client.get(keys)
    client.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_and_its_parent_can_use_the_same_client(client: KVStoreClient) -> None:
    keys = make_keys(40)
    client.set(keys, blocks_of(keys, 4 * KiB))
    stop = threading.Event()
    failures: list[BaseException] = []

    def go_on() -> None:
        try:
            while not stop.is_set():
                assert client.get(keys).blocks == blocks_of(keys, 4 * KiB)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mine = make_keys(10, first=1000 + 10 * number)
                assert client.set(mine, blocks_of(mine, 4 * KiB)).created == 10
                for _ in range(5):
                    assert client.get([*keys, *mine]).blocks == blocks_of([*keys, *mine], 4 * KiB)
                client.close()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert client.contains(make_keys(30, first=1000)).all()


def test_the_asyncio_client_behaves_the_same(server: Server, new_namespace: MakeNamespace) -> None:
    keys, size = make_keys(20), 4 * KiB
    blocks = blocks_of(keys, size)

    async def main() -> None:
        async with AsyncKVStoreClient(server.endpoint, new_namespace(size), concurrency=4) as client:
            result = await client.set(keys[:18], blocks[:18])
            assert result == SetResult(18, 18, 0, 0, 0, 0, copies=1, evicted=result.evicted)
            await client.sync()
            assert (await client.contains(keys, refresh=True)).tolist() == [True] * 18 + [False] * 2
            assert await client.match_prefix(keys) == 18
            assert (await client.get(keys)).blocks == [*blocks[:18], None, None]
            out = np.zeros((20, size), dtype=np.uint8)
            assert (await client.get_into(keys, out, list(range(19, -1, -1)))).sum() == 18
            assert out[19].tobytes() == blocks[0]
            streamed = {position: bytes(block) async for position, block in client.stream_get(keys)}
            assert streamed == dict(enumerate(blocks[:18]))
            results = await asyncio.gather(*(client.get(keys[n : n + 1]) for n in range(18)))
            assert [result.blocks[0] for result in results] == blocks[:18]
            assert (await client.info()).full_blocks == 18 and await client.ping() > 0
            assert await client.delete(keys) == 18
            assert client.stats.blocks_set == 18
            with pytest.raises(BlockSizeMismatch):
                await client.set(keys, [b"short"] * 20)

    asyncio.run(main())


def test_an_abandoned_asyncio_stream_leaves_the_client_usable(server: Server, new_namespace: MakeNamespace) -> None:
    keys, size = make_keys(60), 256 * KiB

    async def main() -> None:
        async with AsyncKVStoreClient(server.endpoint, new_namespace(size)) as client:
            await client.set(keys, blocks_of(keys, size))
            stream = client.stream_get(keys)
            async for position, block in stream:
                assert bytes(block) == block_of(keys[position], size)
                break
            await stream.aclose()  # type: ignore[attr-defined]  # a generator
            assert (await client.get(keys)).hit == 60

    asyncio.run(main())


# ---- mistakes ------------------------------------------------------------------------------------------------------


def test_blocks_of_the_wrong_size_are_refused_before_sending(client: KVStoreClient) -> None:
    keys = make_keys(2)
    for blocks in ([bytes(4096), bytes(4095)], np.zeros((2, 4095), dtype=np.uint8)):
        with pytest.raises(BlockSizeMismatch, match=r"4095 bytes: expected block_bytes=4096"):
            client.set(keys, blocks)
    with pytest.raises(ValueError, match="2 keys and 3 blocks"):
        client.set(keys, np.zeros((3, 4096), dtype=np.uint8))
    assert not client.contains(keys).any()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": 601}, "timeout_s=601: expected more than 0, at most 600"),
        ({"replicas": 4}, "replicas=4: expected 1 to 3"),
        ({"replicas": 0}, "replicas=0: expected 1 to 3"),
    ],
)
def test_invalid_options_are_named(
    server: Server, new_namespace: MakeNamespace, options: dict[str, float], part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        KVStoreClient(server.endpoint, new_namespace(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://host", "tcp://host:x", "udp://h:1", "tcp://h:70707", []])
def test_an_invalid_endpoint_is_named(new_namespace: MakeNamespace, endpoint: str) -> None:
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT"):
        KVStoreClient(endpoint, new_namespace())


def test_a_client_closes_its_connections(server: Server, client: KVStoreClient) -> None:
    wait_until(lambda: shard_info(client).connections == 1, what="only this client is connected")
    others = [KVStoreClient(server.endpoint, client.namespace) for _ in range(5)]
    wait_until(lambda: shard_info(client).connections == 6, what="each has one connection")
    for other in others:
        other.close()
    wait_until(lambda: shard_info(client).connections == 1, what="their connections are closed")


# ---- by hand -------------------------------------------------------------------------------------------------------


def test_a_get_without_credit_arrives_in_parts_of_whole_frames(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(2500)
    client.set(keys, blocks_of(keys, 4 * KiB))
    with RawClient(server) as raw:
        raw.hello(client.namespace.canonical())
        raw.send(pack(GET, 3, 10_000, 2500, 16), b"".join(keys))
        seen: list[int] = []
        last = False
        while not last:
            (tag, request_id, positions, sums, last, hit, miss, following, *_), frames = raw.reply()
            assert (tag, request_id) == (67, 3)
            of_part = np.frombuffer(positions, dtype="<u4").tolist()
            assert len(sums) == 8 * len(of_part) and len(of_part) <= 512
            (payload,) = frames
            assert last or len(payload) == MiB
            assert following <= 3 * MiB and not (last and following)
            assert payload == b"".join(blocks_of([keys[number] for number in of_part], 4 * KiB))
            seen += of_part
        assert sorted(seen) == list(range(2500)) and (hit, miss) == (2500, 0)


def test_credit_bounds_what_is_sent_in_advance(server: Server, client: KVStoreClient) -> None:
    keys = make_keys(30)
    client.set(keys, blocks_of(keys, 4 * KiB))
    with RawClient(server) as raw:
        raw.hello(client.namespace.canonical())
        raw.send(pack(GET, 3, 10_000, 30, 16, 10 * 4 * KiB + 5), b"".join(keys))
        (_, _, positions, _, last, *_), _ = raw.reply()
        assert len(positions) == 4 * 10 and not last
        assert raw.ask(pack(9, 4, 1000)) == [73, 4], "a PONG, and no further PART before it"
        raw.send(pack(10, 3, 12 * 4 * KiB))
        (_, _, positions, _, last, *_), _ = raw.reply()
        assert len(positions) == 4 * 12 and not last
        raw.send(pack(11, 3))
        assert raw.ask(pack(9, 5, 1000)) == [73, 5]
        assert raw.ask(pack(CONTAINS, 6, 1000, 1, 16), keys[0]) == [68, 6, b"\x01"]
    wait_until(lambda: shard_info(client).streams == 0)
