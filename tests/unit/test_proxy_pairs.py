"""When the proxy avoids a prefill engine whose blocks do not arrive, and when it tries that engine again."""

from __future__ import annotations

import pytest

from kvstore_serving.proxy import pairs as module
from kvstore_serving.proxy.pairs import Pairs
from kvstore_serving.proxy.pools import Engine
from tests.support.standing_clock import StandingClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    return StandingClock(monkeypatch, module)


P, Q, D, E = (Engine(url, frozenset({"prefill", "decode"})) for url in "pqde")
ENGINES = {engine.url: engine for engine in (P, Q, D, E)}


@pytest.fixture
def pairs(clock: StandingClock) -> Pairs:
    for engine in ENGINES.values():
        engine.down("anew")
        engine.up()
    return Pairs(1.0)


def off(pairs: Pairs, decode: Engine = D) -> str:
    return "".join(sorted(pairs.off(decode, ENGINES)))


def test_two_losses_in_a_row_disable_only_this_pair(pairs: Pairs) -> None:
    for _ in range(3):
        pairs.lost(P, D)
        pairs.arrived(P, D)
    pairs.lost(P, D)
    assert off(pairs) == "" and pairs.status() == []
    pairs.lost(P, D)
    assert off(pairs) == "p" and off(pairs, E) == ""
    assert [(each["prefill"], each["decode"], each["lost"]) for each in pairs.status()] == [("p", "d", 2)]


def test_a_pair_is_retried_with_one_prompt_after_doubling_times(pairs: Pairs, clock: StandingClock) -> None:
    for _ in range(8):
        pairs.lost(P, D)  # requests in flight at the same time count as one loss
    for wait_s in (10, 20, 40, 80, 160, 300, 300):
        clock.now += wait_s - 0.1
        assert off(pairs) == "p"
        clock.now += 0.2
        assert off(pairs) == ""
        pairs.taken(P, D)
        assert off(pairs) == "p", "no other prompt goes before this one has shown something"
        pairs.lost(P, D)
    clock.now += 301
    pairs.taken(P, D)
    pairs.arrived(P, D)
    assert off(pairs) == "" and pairs.status() == []


def test_a_restart_of_either_engine_enables_the_pair(pairs: Pairs) -> None:
    for engine in (P, D):
        for _ in range(2):
            pairs.lost(P, D)
        assert off(pairs) == "p"
        engine.down("gone")
        engine.up()
        assert off(pairs) == "" and pairs.status() == []
    pairs.lost(Q, D)
    pairs.lost(Q, D)
    assert pairs.off(D, {"d": D}) == frozenset() and pairs.status() == [], "engines that left are forgotten"
