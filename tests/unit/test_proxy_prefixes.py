"""What the proxy remembers of prompts, for how long, in how much memory, and what makes it forget them."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore_serving.proxy import prefixes as module
from kvstore_serving.proxy.engine_events import EngineEvents
from kvstore_serving.proxy.kv_identity import identity_of
from kvstore_serving.proxy.pools import Engine, Model
from kvstore_serving.proxy.prefixes import PIECE, Prefixes, Prompt
from tests.support.standing_clock import StandingClock

TOKENS = list(range(10 * PIECE))


@dataclass
class Store:
    since: float = 0.0
    purged_at: float = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    return StandingClock(monkeypatch, module)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def prefixes(store: Store) -> Prefixes:
    return Prefixes(EngineEvents(), store)


def engine(url: str, root: str = "root", weights: str = "") -> Engine:
    found = Engine(url, frozenset({"decode"}), weights, models={"m": Model("m", root, None)})
    found.up()
    return found


def prompt(tokens: list[int] = TOKENS, **body: Any) -> Prompt:
    kv = identity_of({"model": "m", **body}, chat=False)
    assert kv is not None
    return Prompt.of(tokens, kv, "m")


def have(prefixes: Prefixes, asked: Prompt, *engines: Engine) -> list[tuple[int, int]]:
    """Return, for each engine, the number of tokens that it has itself, and the number that the store has for it."""
    found = asyncio.run(prefixes.find(asked, engines))
    return [(found.engines.get(each.url, 0), found.stores.get(each.url, 0)) for each in engines]


def test_a_sent_prompt_is_at_its_engine_and_in_the_store(prefixes: Prefixes) -> None:
    a, b = engine("a"), engine("b")
    prefixes.sent(prompt(TOKENS[: 5 * PIECE]), a)
    assert have(prefixes, prompt(), a, b) == [(320, 320), (0, 320)]
    assert have(prefixes, prompt(cache_salt="x"), a, b) == [(0, 0)] * 2
    assert have(prefixes, prompt([7, *TOKENS]), a, b) == [(0, 0)] * 2


def test_stored_blocks_are_shared_by_engines_of_one_model_and_weights(prefixes: Prefixes) -> None:
    prefixes.sent(prompt(), engine("a", "root", "1"))
    others = engine("b", "root", "1"), engine("c", "root", "2"), engine("d", "another", "1")
    assert have(prefixes, prompt(), *others) == [(0, 640), (0, 0), (0, 0)]


def test_a_prompt_not_sent_for_ten_minutes_is_forgotten(prefixes: Prefixes, clock: StandingClock) -> None:
    """An answer from an engine's own cache does not show that the store still has the prompt."""
    a, b = engine("a"), engine("b")
    prefixes.sent(prompt(), a)
    clock.now += 400
    prefixes.sent(prompt(), a)
    assert have(prefixes, prompt(), a, b) == [(640, 640), (0, 640)]
    clock.now += 300
    assert have(prefixes, prompt(), a, b) == [(640, 0), (0, 0)]
    prefixes.sent(prompt(), b)  # b has loaded the blocks, or computed and saved them
    assert have(prefixes, prompt(), a, b) == [(640, 640), (640, 640)]
    clock.now += 301
    assert have(prefixes, prompt(), a, b) == [(0, 640), (640, 640)]
    clock.now += 300
    assert have(prefixes, prompt(), a, b) == [(0, 0)] * 2


def test_prompts_lost_by_the_store_or_purged_are_forgotten(
    prefixes: Prefixes, store: Store, clock: StandingClock
) -> None:
    a, b = engine("a"), engine("b")
    slow = prompt()  # looked up before the loss, answered after it
    prefixes.sent(prompt(), a)
    clock.now += 1
    store.since = clock.now
    clock.now += 1
    prefixes.sent(slow, a)
    assert have(prefixes, prompt(), a, b) == [(640, 0), (0, 0)]
    prefixes.sent(prompt(), b)
    assert have(prefixes, prompt(), a, b) == [(640, 640), (640, 640)]
    clock.now += 1
    store.since = store.purged_at = clock.now
    assert have(prefixes, prompt(), a, b) == [(0, 0)] * 2
    clock.now += 1
    prefixes.sent(prompt(), a)
    assert have(prefixes, prompt(), a, b) == [(640, 640), (0, 640)]


def test_a_restarted_engine_has_nothing_even_at_its_old_address(prefixes: Prefixes) -> None:
    a = engine("a")
    prefixes.sent(prompt(), a)
    a.down("gone")
    a.up()
    assert have(prefixes, prompt(), a, engine("a")) == [(0, 640)] * 2


def test_prompts_an_engine_missed_are_in_neither_cache(prefixes: Prefixes) -> None:
    a, b, c = engine("a"), engine("b"), engine("c")
    for each in (a, b):
        prefixes.sent(prompt(), each)
    prefixes.missed(prompt(), a, 200)
    assert have(prefixes, prompt(), a, b, c) == [(192, 192), (640, 192), (0, 192)]
    prefixes.sent(prompt(), b)
    assert have(prefixes, prompt(), c) == [(0, 192)], "that it has it itself says nothing of the store"
    prefixes.sent(prompt(), c)
    assert have(prefixes, prompt(), a) == [(192, 640)]


def test_requests_that_bypass_the_store_leave_nothing_in_it(prefixes: Prefixes) -> None:
    a, b = engine("a"), engine("b")
    prefixes.sent(prompt(kv_transfer_params={"kvstore": {"save": False}}), a)
    assert have(prefixes, prompt(), a, b) == [(640, 0), (0, 0)]
    prefixes.sent(prompt(kv_transfer_params={"kvstore": {"max_save_tokens": 200}}), b)
    c = engine("c")
    assert have(prefixes, prompt(), c) == [(0, 192)]
    assert have(prefixes, prompt(kv_transfer_params={"kvstore": {"load": False}}), b, c) == [(640, 192), (0, 0)]
    assert have(prefixes, prompt(kv_transfer_params={"kvstore": {"max_load_tokens": 70}}), c) == [(0, 70)]


def test_memory_stays_within_the_counted_bound(store: Store) -> None:
    prefixes = Prefixes(EngineEvents(), store, 4 << 20)
    engines = [engine(str(number)) for number in range(3)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2000):
            asked = prompt(list(range(number * 1000, number * 1000 + 10 * PIECE)))
            for each in engines[: 1 + number % 3]:
                prefixes.sent(asked, each)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= prefixes.held_bytes * 1.1 and prefixes.held_bytes <= 4 << 20
    newest = list(range(1_999_000, 1_999_000 + 10 * PIECE))
    assert have(prefixes, prompt(newest), engines[0]) == [(640, 640)]
    assert have(prefixes, prompt(list(range(10 * PIECE))), engines[0]) == [(0, 0)], "the oldest went first"
