"""The connector's decisions, without an engine around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_client import KVStoreClient, KVStoreError, Namespace
from kvstore_client.vllm import guard as guard_module
from kvstore_client.vllm.guard import StoreGuard
from kvstore_client.vllm.scheduler import SchedulerHalf

TOKENS = 16


class FakeClient:
    """A namespace that has the first ``stored`` blocks of every chain."""

    def __init__(self, stored: int) -> None:
        self.stored = stored
        self.asked = 0

    def match_prefix(self, keys: list[bytes], **_: Any) -> int:
        self.asked += 1
        return min(self.stored, len(keys))

    def close(self) -> None:
        raise KVStoreError("closed twice")


def scheduler(*clients: FakeClient, min_hit_tokens: int = 0) -> SchedulerHalf:
    def connect(client: FakeClient) -> Callable[[], Any]:
        return lambda: client

    counters: Counter[str] = Counter()
    return SchedulerHalf(
        [StoreGuard(connect(client), "test", counters) for client in clients],
        block_tokens=TOKENS,
        min_hit_tokens=min_hit_tokens,
        may_load=True,
        may_save=True,
        counters=counters,
    )


def request(tokens: int, name: str = "r", computed: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_computed_tokens=computed,
        block_hashes=[bytes([index]) * 32 for index in range(tokens // TOKENS)],
        skip_reading_prefix_cache=False,
    )


def blocks(*block_ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(block_ids),))


def step(asked: Any, tokens: int, *block_ids: int) -> Any:
    """The engine's plan of a step in which the request gets these tokens; its blocks are ``block_ids``."""
    state = SimpleNamespace(get_block_ids=lambda request_id: (list(block_ids),))
    return SimpleNamespace(num_scheduled_tokens={asked.request_id: tokens}, kv_connector_block_state=state)


def saves(half: SchedulerHalf, output: Any) -> list[int]:
    return half.completed_blocks(output).block_ids


def test_a_hit_is_what_every_rank_has() -> None:
    assert scheduler(FakeClient(5), FakeClient(3)).matched_tokens(request(100), 0) == 3 * TOKENS


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    assert scheduler(FakeClient(99)).matched_tokens(request(4 * TOKENS), 0) == 3 * TOKENS
    assert scheduler(FakeClient(99)).matched_tokens(request(4 * TOKENS + 1), 0) == 4 * TOKENS


def test_what_the_engine_has_itself_is_not_loaded() -> None:
    half = scheduler(FakeClient(5))
    assert half.matched_tokens(request(100), 2 * TOKENS) == 3 * TOKENS
    assert half.matched_tokens(request(100, "other"), 5 * TOKENS) == 0


def test_a_hit_below_the_minimum_is_ignored() -> None:
    assert scheduler(FakeClient(2), min_hit_tokens=3 * TOKENS).matched_tokens(request(100), 0) == 0
    assert scheduler(FakeClient(3), min_hit_tokens=3 * TOKENS).matched_tokens(request(100), 0) == 3 * TOKENS


def test_a_request_that_must_wait_for_room_does_not_ask_in_every_step() -> None:
    client = FakeClient(5)
    half = scheduler(client)
    for _ in range(10):
        assert half.matched_tokens(request(100), 0) == 5 * TOKENS
    assert client.asked == 1


def test_loads_go_to_the_blocks_behind_those_the_engine_has() -> None:
    half = scheduler(FakeClient(5))
    asked = request(100)
    half.allocated(asked, blocks(7, 8, 9, 10, 11), half.matched_tokens(asked, 2 * TOKENS))
    [load] = half.take_loads()
    assert (load.block_ids, load.keys) == ([9, 10, 11], asked.block_hashes[2:5])
    assert half.take_loads() == []


def test_blocks_that_only_the_engine_has_are_saved_with_the_new_ones() -> None:
    half = scheduler(FakeClient(1))
    asked = request(6 * TOKENS + 1, computed=3 * TOKENS)
    half.allocated(asked, blocks(1, 2, 3, 4, 5), half.matched_tokens(asked, 3 * TOKENS))
    assert saves(half, step(asked, 2 * TOKENS + 3, 1, 2, 3, 4, 5, 6)) == [2, 3, 4, 5]
    asked.num_computed_tokens += 2 * TOKENS + 3
    assert saves(half, step(asked, TOKENS, 1, 2, 3, 4, 5, 6, 7)) == [6]


def test_after_a_failed_load_the_computed_blocks_are_saved_and_the_store_is_not_asked_again() -> None:
    client = FakeClient(5)
    half = scheduler(client)
    asked = request(100)
    half.allocated(asked, blocks(1, 2, 3, 4, 5), half.matched_tokens(asked, 0))
    half.loaded(SimpleNamespace(finished_recving={"r"}, invalid_block_ids={3, 4, 5}))
    asked.num_computed_tokens = 2 * TOKENS
    assert saves(half, step(asked, 100 - 2 * TOKENS, 1, 2, 3, 4, 5, 6, 7)) == [3, 4, 5, 6]
    assert half.matched_tokens(asked, 0) == 0
    assert client.asked == 1


def test_a_failing_store_is_asked_again_only_after_a_pause_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(guard_module.time, "monotonic", lambda: now)
    attempts: list[float] = []

    def connect() -> Any:
        attempts.append(now)
        raise KVStoreError("nobody there")

    counters: Counter[str] = Counter()
    guard = StoreGuard(connect, "test", counters)
    for _ in range(100):
        assert guard.call(lambda client: client.match_prefix([]), -1) == -1
        now += 0.5
    assert [later - earlier for earlier, later in pairwise(attempts)] == [1, 2, 4, 8, 16]
    assert counters == {"failed_calls": 6, "skipped_calls": 94}


def test_a_store_out_of_reach_is_reported_at_start_and_a_wrong_endpoint_raised() -> None:
    counters: Counter[str] = Counter()
    namespace = Namespace(model="m", dtype="uint8", block_tokens=1, block_bytes=8)
    StoreGuard(lambda: KVStoreClient("tcp://127.0.0.1:1", namespace, timeout_s=1), "test", counters).probe()
    assert counters == {"failed_calls": 1}
    with pytest.raises(ValueError, match="endpoint"):
        StoreGuard(lambda: KVStoreClient("tcp://127.0.0.1", namespace), "test", counters).probe()


def test_closing_never_raises() -> None:
    half = scheduler(FakeClient(1))
    half.matched_tokens(request(100), 0)
    half.close()
    half.close()
