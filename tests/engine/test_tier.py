"""The store as a tier of vLLM's own offloading, with vLLM's manager and CPU tier and a real server. The tests take the
place of the GPU."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import KVStoreClient
from tests.support.harness import RawClient, Server, block_of, set_frames, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the engine's parts about each other
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.request import Request

    from kvstore_client.vllm.tier.secondary_tier import KVStoreTier
    from tests.engine.made_requests import picture
    from tests.engine.tier_engine import BLOCK_TOKENS, CHUNK_BYTES, SLOWEST_CALL_S, TieredEngine, offload_keys

TIMEOUT_S = 1.5
LOOKUP_TIMEOUT_S = 0.5
# The time that a busy machine may add to a deadline.
SLACK_S = 2.0
START_TIER = Callable[..., TieredEngine]


@pytest.fixture
def start_tier(model: Path) -> Iterator[START_TIER]:
    """``start_tier(endpoint, chunks=..., options=...)`` starts an engine, which is shut down after the test. Then no
    call of its scheduler may have waited for the store."""
    engines: list[TieredEngine] = []

    def start(endpoint: str, *, options: dict[str, Any] | None = None, **arguments: Any) -> TieredEngine:
        deadlines = {"timeout_s": TIMEOUT_S, "lookup_timeout_s": LOOKUP_TIMEOUT_S}
        engine = TieredEngine(model, endpoint, options={**deadlines, **(options or {})}, **arguments)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        if hasattr(engine, "rows"):
            engine.shutdown()
        assert engine.slowest_s < SLOWEST_CALL_S, f"the scheduler waited for {engine.slowest_s:.3f} s"


def test_a_restarted_engine_promotes_what_the_first_one_stored(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(12)
    first = start_tier(server.endpoint)
    first.save(keys)
    first.shutdown()
    second = start_tier(server.endpoint)
    assert second.hits(keys) == 12
    assert second.wrong(keys) == []


def test_the_leading_chunks_that_exist_are_promoted(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(8)
    start_tier(server.endpoint).save([*keys[:3], *keys[4:]])
    reader = start_tier(server.endpoint)
    assert reader.hits(keys) == 3
    assert reader.wrong(keys[:3]) == []
    assert reader.hits(offload_keys(4, first=100)) == 0


def test_chunks_return_after_the_cpu_tier_evicted_them(server: Server, start_tier: START_TIER) -> None:
    engine = start_tier(server.endpoint, chunks=4, options={"waiting_chunks": 4})
    keys = offload_keys(12)
    for first in range(0, 12, 4):
        engine.save(keys[first : first + 4])
    for first in range(0, 12, 4):
        part = keys[first : first + 4]
        assert engine.hits(part) == 4
        assert engine.wrong(part) == []


def test_chunks_are_read_and_written_directly_in_the_cpu_tiers_rows(
    server: Server, start_tier: START_TIER, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_blocks, get_into = KVStoreClient.set, KVStoreClient._get_into_steps
    seen: list[Any] = []

    def watched_set(client: KVStoreClient, keys: Any, blocks: Any, *rest: Any, **options: Any) -> Any:
        seen.extend(blocks)
        return set_blocks(client, keys, blocks, *rest, **options)

    def watched_get(client: KVStoreClient, keys: Any, out: Any, *rest: Any, **options: Any) -> Any:
        seen.append(out)
        return get_into(client, keys, out, *rest, **options)

    monkeypatch.setattr(KVStoreClient, "set", watched_set)
    monkeypatch.setattr(KVStoreClient, "_get_into_steps", watched_get)
    keys = offload_keys(3)
    engines = [start_tier(server.endpoint), start_tier(server.endpoint)]
    engines[0].save(keys)
    assert len(seen) == 3
    assert all(np.shares_memory(block, engines[0].rows) for block in seen)
    assert engines[1].hits(keys) == 3
    assert np.shares_memory(seen[3], engines[1].rows)


def test_a_step_queries_the_store_once_for_all_requests(server: Server, start_tier: START_TIER) -> None:
    shared, own = offload_keys(15), offload_keys(15, first=50)
    start_tier(server.endpoint).save(shared)
    engine = start_tier(server.endpoint)
    requests = [engine.request() for _ in range(3)]
    chains = [shared, shared + own[:10], own]
    assert [engine.look(chain, asking) for chain, asking in zip(chains, requests, strict=True)] == [None] * 3
    engine.step()
    assert [engine.hits(chain, asking) for chain, asking in zip(chains, requests, strict=True)] == [15, 15, 0]
    engine.finish(*requests)
    counted = engine.counted()
    assert counted["lookups_total"] == 1
    assert engine.wrong(shared) == []


def test_an_answer_is_forgotten_with_its_request(server: Server, start_tier: START_TIER) -> None:
    engine = start_tier(server.endpoint)
    engine.save(offload_keys(4))
    for _ in range(3):
        engine.hits(offload_keys(4, first=100))
    aborted = engine.request()
    assert engine.look(offload_keys(4, first=200), aborted) is None
    engine.finish(aborted)
    wait_until(lambda: [engine.step(), engine.tier._lookups.known == 0][1], what="nothing is remembered")


def test_chunks_stored_meanwhile_are_found_by_the_next_request(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(4)
    engine = start_tier(server.endpoint)
    running = engine.request()
    assert engine.hits(keys, running) == 0
    start_tier(server.endpoint).save(keys)
    wait_until(lambda: engine.hits(keys) == 4, what="a request that comes later finds them")
    engine.finish(running)


def test_two_engines_share_one_store_at_once(server: Server, start_tier: START_TIER) -> None:
    engines = [start_tier(server.endpoint), start_tier(server.endpoint, num_blocks=99)]
    parts = [offload_keys(12), offload_keys(12, first=6)]  # each request shares half of its chunks with the other one
    for engine, keys in zip(engines, parts, strict=True):
        engine.compute(keys)
    for engine in engines:
        engine.settle()
    for engine, keys in zip(engines, reversed(parts), strict=True):
        assert engine.hits(keys) == 12
        assert engine.wrong(keys) == []


@pytest.mark.parametrize(
    "other", [{"tensor_parallel": 2}, {"blocks_per_chunk": 2}, {"options": {"tenant": "other"}}], ids=str
)
def test_engines_with_different_chunks_share_nothing(
    server: Server, start_tier: START_TIER, other: dict[str, Any]
) -> None:
    keys = offload_keys(4)
    start_tier(server.endpoint).save(keys)
    assert start_tier(server.endpoint, **other).hits(keys) == 0
    assert start_tier(server.endpoint).hits(keys) == 4


def test_engines_with_other_weights_share_nothing(server: Server, start_tier: START_TIER, other_model: Path) -> None:
    keys = offload_keys(4)
    start_tier(server.endpoint).save(keys)
    stranger = TieredEngine(other_model, server.endpoint)
    try:
        assert stranger.hits(keys) == 0
    finally:
        stranger.shutdown()


def test_an_engine_starts_before_its_store_and_outlives_it(
    start_server: Callable[..., Server], start_tier: START_TIER
) -> None:
    server = start_server(memory="256MiB")
    keys = offload_keys(6)
    server.kill()
    engine = start_tier(server.endpoint)
    began = time.monotonic()
    assert engine.hits(keys) == 0
    engine.save(keys)
    assert time.monotonic() - began < LOOKUP_TIMEOUT_S + 2 * TIMEOUT_S + SLACK_S
    assert engine.wrong(keys) == [], "the CPU tier does not need the store"
    server.restart()
    batches = (offload_keys(6, first) for first in itertools.count(100, 6))
    other = start_tier(server.endpoint)

    def hits_return() -> bool:
        batch = next(batches)
        engine.save(batch)
        return other.hits(batch) == 6

    wait_until(hits_return, what="hits return")
    assert engine.counted()["failed_calls_total"] > 0


def test_a_store_killed_during_a_load_misses_and_is_used_after_restart(
    start_server: Callable[..., Server], start_tier: START_TIER
) -> None:
    server = start_server(memory="256MiB")
    keys = offload_keys(32)
    start_tier(server.endpoint, options={"waiting_chunks": 64}).save(keys)
    reader = start_tier(server.endpoint)
    asking = reader.request()
    reader.begin_load(keys, asking)
    reader.step()  # the load is in progress
    server.kill()
    began = time.monotonic()
    assert reader.hits(keys, asking) in range(33)
    assert time.monotonic() - began < TIMEOUT_S + LOOKUP_TIMEOUT_S + SLACK_S
    reader.finish(asking)
    server.restart()
    fresh = offload_keys(4, first=100)
    with reader.store_client() as client:
        client.set(fresh, [block_of(key, CHUNK_BYTES) for key in fresh])
    wait_until(lambda: reader.hits(fresh) == 4, what="hits return")


def test_a_frozen_store_costs_its_deadlines_and_is_used_again_later(server: Server, start_tier: START_TIER) -> None:
    keys, unsaved = offload_keys(8), offload_keys(8, first=50)
    start_tier(server.endpoint).save(keys)
    engine = start_tier(server.endpoint)
    with server.stopped():
        began = time.monotonic()
        assert engine.hits(keys) == 0
        assert time.monotonic() - began < LOOKUP_TIMEOUT_S + SLACK_S
        began = time.monotonic()
        engine.save(unsaved)
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
    wait_until(lambda: engine.hits(keys) == 8, what="hits return")
    assert engine.wrong(keys) == []


def test_a_load_from_a_freezing_store_ends_in_time_without_a_retry(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(8)
    start_tier(server.endpoint).save(keys)
    engine = start_tier(server.endpoint)
    asking = engine.request()
    engine.begin_load(keys, asking)
    with server.stopped():
        began = time.monotonic()
        assert engine.hits(keys, asking) == 0
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert engine.hits(keys, asking) == 0, "a request that failed to load computes"
    engine.finish(asking)
    wait_until(lambda: engine.hits(keys) == 8, what="hits return")
    assert engine.wrong(keys) == []


def test_a_damaged_chunk_misses_and_the_others_of_its_load_arrive(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(5)
    engine = start_tier(server.endpoint)
    blocks = [block_of(key, CHUNK_BYTES) for key in keys]
    with KVStoreClient(server.endpoint, engine.tier.namespace) as client, RawClient(server) as raw:
        client.set([*keys[:2], *keys[3:]], [*blocks[:2], *blocks[3:]])
        raw.hello(engine.tier.namespace.canonical())
        raw.ask(*set_frames(1, keys[2:3], blocks[2:3], sums=bytes(8)))
        wait_until(lambda: client.contains(keys).all())
    assert engine.hits(keys) == 2
    assert engine.hits(keys[3:]) == 2
    assert engine.wrong([*keys[:2], *keys[3:]]) == []
    assert engine.counted()["checksum_errors_total"] == 1


def test_resetting_the_cpu_tier_waits_for_transfers_in_progress(server: Server, start_tier: START_TIER) -> None:
    keys, read = offload_keys(16), offload_keys(8, first=50)
    start_tier(server.endpoint).save(read)
    engine = start_tier(server.endpoint)
    asking = engine.request()
    engine.begin_load(read, asking)
    engine.step()
    engine.compute(keys)
    engine.manager.reset_cache()
    engine.rows[:] = -1  # the engine owns the memory again, so the tier must not touch it
    assert not engine.manager.has_pending_work()
    engine.finish(asking)

    def ended() -> bool:
        return bool(client.contains(keys).sum() + engine.counted().get("dropped_blocks_total", 0) == len(keys))

    with engine.store_client() as client:
        wait_until(ended, what="what was on the wire arrived, the rest was given up")
    assert (engine.rows == -1).all()


def test_a_reset_with_named_weights_forgets_answers_and_sends_nothing_older(
    server: Server, start_tier: START_TIER
) -> None:
    keys, wire, waiting = offload_keys(6), offload_keys(2, first=50), offload_keys(8, first=60)
    engine = start_tier(server.endpoint, options={"weights_version": "2026-11"})
    engine.save(keys)
    engine.compute(offload_keys(64, first=100))  # this evicts all other chunks from the CPU tier
    engine.settle()
    assert engine.hits(keys) == 6
    with engine.store_client() as client:
        client.delete(keys)
        engine.counted()
        with server.stopped():
            engine.compute(wire)
            engine.step()
            wait_until(lambda: engine.tier._out._sending, what="the first chunks are on the wire")
            engine.compute(waiting)
            engine.step()
            engine.manager.reset_cache()
        assert engine.counted()["dropped_blocks_total"] == len(waiting)
        assert engine.hits(keys) == 0
        assert not client.contains([*keys, *waiting]).any()


def test_a_reset_with_unnamed_weights_ends_sharing(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(6)
    engine = start_tier(server.endpoint)
    engine.save(keys)
    engine.manager.reset_cache()
    assert engine.hits(keys) == 0
    later = offload_keys(6, first=50)
    engine.save(later)
    engine.compute(offload_keys(64, first=100))  # this evicts all other chunks from the CPU tier
    engine.settle()
    assert engine.hits(later) == 6
    assert engine.wrong(later) == []
    other = start_tier(server.endpoint)
    assert other.hits(later) == 0
    assert other.hits(keys) == 6


def test_after_a_purge_sharing_stops_until_vllm_empties_its_caches(server: Server, start_tier: START_TIER) -> None:
    """The engine's chunks may be from before the purge, and are offered to the store whenever they return to the CPU
    tier. So the engine shares no chunks until its caches are reset."""
    keys, later = offload_keys(6), offload_keys(6, first=50)
    engine = start_tier(server.endpoint, options={"weights_version": "2026-11"})
    engine.save(keys)
    engine.settle()
    with KVStoreClient(server.endpoint, engine.tier.namespace) as operator:
        assert operator.purge() == 6
        engine.save(later)
        engine.settle()
        assert operator.info().shards[0].namespaces[0].blocks == 0
        other = start_tier(server.endpoint, options={"weights_version": "2026-11"})
        other.save(later)
        other.settle()
        engine.manager.reset_cache()
        assert engine.hits(later) == 6 and engine.wrong(later) == []
        engine.save(keys)
        engine.settle()
        assert other.hits(keys) == 6 and other.wrong(keys) == []


def test_resetting_the_cpu_tier_ends_with_a_frozen_store(server: Server, start_tier: START_TIER) -> None:
    engine = start_tier(server.endpoint)
    with server.stopped():
        engine.compute(offload_keys(16))
        began = time.monotonic()
        engine.manager.reset_cache()
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S


def test_a_slow_store_occupies_a_bounded_share_of_the_cpu_tier(server: Server, start_tier: START_TIER) -> None:
    engine = start_tier(server.endpoint, chunks=32, options={"timeout_s": 5.0})
    with server.stopped():
        for first in range(0, 160, 4):  # five times the CPU tier, which must evict all the time
            engine.compute(offload_keys(4, first))
            engine.step()
        counted = engine.counted()
        assert counted["dropped_blocks_total"] >= 160 - 8 - 8  # a quarter of the tier waits, a quarter is sent
        assert 0 < counted["waiting_blocks"] <= 8 + 8
    engine.settle()
    assert engine.counted().get("waiting_blocks", 0) == 0


def test_if_chunks_cannot_all_wait_the_head_is_stored(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(12)
    engine = start_tier(server.endpoint, options={"waiting_chunks": 5})
    engine.save(keys)
    assert start_tier(server.endpoint).hits(keys) == 5
    assert engine.counted()["dropped_blocks_total"] == 7


def test_touched_chunks_outlive_others(start_server: Callable[..., Server], start_tier: START_TIER) -> None:
    server = start_server(memory="8MiB", segment="1MiB")
    keys = offload_keys(40)
    engine = start_tier(server.endpoint, chunks=200, options={"waiting_chunks": 200})
    engine.save(keys)
    engine.call("touch", keys[20:24], ReqContext("toucher"))
    engine.step()
    wait_until(lambda: engine.tier._lookups.waiting == 0, what="the touch was sent")
    engine.save(offload_keys(30, first=100))
    with engine.store_client() as client:
        present = client.contains(keys)
    assert present[20:24].all()
    assert not present.all()


def test_transfers_and_failures_are_counted_under_defined_names(
    start_server: Callable[..., Server], start_tier: START_TIER
) -> None:
    server = start_server(memory="256MiB")
    keys = offload_keys(6)
    first, second = start_tier(server.endpoint), start_tier(server.endpoint)
    first.save(keys)
    second.save(keys[:2])
    assert second.hits(keys) == 6
    out, into = first.counted(), second.counted()
    assert out["transfer_bytes_total:('out',)"] == 6 * CHUNK_BYTES
    assert out["transfer_seconds_total:('out',)"] > 0
    assert into["transfer_bytes_total:('in',)"] == 4 * CHUNK_BYTES
    assert into["transfer_seconds_total:('in',)"] > 0
    assert into["present_blocks_total"] == 2
    server.kill()
    second.save(offload_keys(3, first=50))
    assert second.counted()["unsaved_blocks_total"] == 3
    second.hits(offload_keys(3, first=60))
    defined = KVStoreTier.build_metric_definitions({})
    collected = second.manager.get_stats()
    assert collected is not None
    ours = {name for name in collected.data["data"] if name.startswith("vllm:kvstore_")}
    assert {"vllm:kvstore_failed_calls_total", "vllm:kvstore_waiting_blocks"} <= ours <= defined.keys()
    for name in ours:
        assert all(len(labels) == len(defined[name].labelnames) for labels in collected.data["data"][name])


def test_the_framework_receives_each_jobs_result(server: Server, start_tier: START_TIER) -> None:
    keys = offload_keys(6)
    engine = start_tier(server.endpoint)
    engine.save(keys)
    stats = engine.manager.get_stats().reduce()
    label = "('1:KVStoreTier',)"
    assert stats[f"vllm:kv_offload_tiering_write_bytes:{label}"] == 6 * CHUNK_BYTES
    reader = start_tier(server.endpoint)
    reader.hits(keys)
    stats = reader.manager.get_stats().reduce()
    assert stats[f"vllm:kv_offload_tiering_read_bytes:{label}"] == 6 * CHUNK_BYTES
    assert stats[f"vllm:kv_offload_tiering_chunk_hits:{label}"] == 6


def test_memory_is_free_after_the_engine_has_shut_down(server: Server, start_tier: START_TIER) -> None:
    engine = start_tier(server.endpoint)
    keys = offload_keys(4)
    engine.save(keys)
    region = engine.manager.primary_tier._mmap_region
    engine.compute(offload_keys(4, first=50))
    engine.shutdown()
    assert region.mmap_obj is None
    assert not Path(region.mmap_path).exists()
    with engine.store_client() as client:
        assert client.contains(offload_keys(4, first=50)).all(), "what waited was sent"


# ---- chunks of more than tokens --------------------------------------------------------------------------------------


@pytest.fixture
def made() -> Callable[..., Request]:
    """``made(*pictures)`` returns a request of five chunks with these pictures, in the form that vLLM's scheduler uses.
    vLLM's hashes identify pictures by their ids."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    numbers = itertools.count()

    def make(*pictures: Any, **more: Any) -> Request:
        tokens = list(range(5 * BLOCK_TOKENS + 3))
        name = f"made-{next(numbers)}"
        return Request(name, tokens, SamplingParams(), None, mm_features=list(pictures), block_hasher=hasher, **more)

    return make


def saved(engine: TieredEngine, request: Request) -> None:
    keys, context = engine.ask(request)
    engine.compute(keys, context)
    engine.settle()


def found(engine: TieredEngine, request: Request) -> int:
    return engine.hits(*engine.ask(request))


def test_chunks_behind_another_picture_with_that_id_are_not_found(
    server: Server, start_tier: START_TIER, made: Callable[..., Request]
) -> None:
    engines = [start_tier(server.endpoint, takes_embeddings=True) for _ in range(4)]
    saved(engines[0], made(picture(1, offset=40)))
    assert found(engines[1], made(picture(2, offset=40))) == 1, "the chunk before it"
    assert found(engines[2], made(picture(1, offset=40))) == 5
    assert found(engines[2], made(picture(1, "img-2", offset=40))) == 1
    # If an engine has seen an id with two contents, it trusts that id for neither.
    mixed = made(picture(3, offset=40))
    engines[2].ask(mixed)
    saved(engines[2], made(picture(3, offset=40)))
    assert found(engines[3], mixed) == 1
    assert found(engines[3], made()) == 1, "of a prompt without a picture, what it has in common with them"


def test_trusted_ids_find_what_was_stored_under_them(
    server: Server, start_tier: START_TIER, made: Callable[..., Request]
) -> None:
    trusting = {"trust_media_ids": True}
    first, second = (start_tier(server.endpoint, takes_embeddings=True, options=trusting) for _ in range(2))
    saved(first, made(picture(1, offset=40)))
    assert found(second, made(picture(2, offset=40))) == 5


def test_chunks_of_unknown_requests_are_shared_only_if_inputs_are_tokens(
    server: Server, start_tier: START_TIER
) -> None:
    """Lookups without a request, as in this test, come from other tiers that look for chunks of other engines."""
    keys = offload_keys(4)
    for takes_embeddings, hits in ((True, 0), (False, 4)):
        first, second = (start_tier(server.endpoint, takes_embeddings=takes_embeddings) for _ in range(2))
        first.save(keys)
        assert second.hits(keys) == hits


def test_chunks_of_unreadable_content_are_computed(
    server: Server, start_tier: START_TIER, made: Callable[..., Request]
) -> None:
    first, second = (start_tier(server.endpoint, takes_embeddings=True) for _ in range(2))
    saved(first, made(picture(1, offset=40, data=None)))
    assert found(second, made(picture(1, offset=40, data=None))) == 1
