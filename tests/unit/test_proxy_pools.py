"""Which engine gets a request: this depends on the requests in flight and on the cached blocks of the prompt."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvstore_serving.proxy.pools import Engine, Model, Pools, Role

M = "m"


def pools_of(*engines: tuple[str, Iterable[Role]]) -> Pools:
    pools = Pools()
    for url, roles in engines:
        found = pools.set(url, list(roles))
        found.models = {M: Model(M, "root", 4096)}
        found.up()
    return pools


@pytest.fixture
def pools() -> Pools:
    return pools_of(("p1", ["prefill"]), ("p2", ["prefill"]), ("d1", ["decode"]), ("d2", ["decode"]))


def decoder(pools: Pools, tokens: int = 1000, have: dict[str, int] | None = None) -> Engine:
    found = pools.decoder(M, have or {}, tokens)
    assert found is not None
    return found


def prefiller(pools: Pools, tokens: int = 1000, have: dict[str, int] | None = None) -> Engine:
    found = pools.prefiller(M, have or {}, tokens)
    assert found is not None
    return found


def test_the_decode_engine_with_less_load_is_chosen(pools: Pools) -> None:
    with pools.running(pools.engines["d1"], 100):
        assert decoder(pools).url == "d2"
        with pools.running(pools.engines["d2"], 100), pools.running(pools.engines["d2"], 100):
            assert decoder(pools).url == "d1"
    with pools.running(pools.engines["d2"], 100):
        assert decoder(pools).url == "d1"


def test_the_prefill_engine_with_the_shorter_queue_is_chosen(pools: Pools) -> None:
    with pools.prefilling(pools.engines["p1"], 500):
        assert prefiller(pools).url == "p2"
        with pools.prefilling(pools.engines["p2"], 501):
            assert prefiller(pools).url == "p1"


def test_cached_prompt_tokens_count_as_much_as_load(pools: Pools) -> None:
    assert decoder(pools, 1000, {"d2": 900}).url == "d2"
    assert prefiller(pools, 1000, {"p2": 900}).url == "p2"
    with pools.prefilling(pools.engines["p2"], 901):
        assert prefiller(pools, 1000, {"p2": 900}).url == "p1", "it is sooner done where nothing waits"
    with pools.running(pools.engines["d2"], 2000):
        assert decoder(pools, 1000, {"d2": 900}).url == "d1"


def test_a_failed_engine_is_chosen_only_if_all_have_failed(pools: Pools) -> None:
    pools.engines["d1"].failed()
    with pools.running(pools.engines["d2"], 5000):
        assert decoder(pools).url == "d2"
        pools.engines["d2"].failed()
        assert decoder(pools).url == "d1"
    pools.engines["d1"].down("gone")
    assert decoder(pools).url == "d2"


def test_only_engines_of_one_model_and_version_are_paired(pools: Pools) -> None:
    decode = pools.engines["d1"]
    pools.engines["p1"].models = {M: Model(M, "another root", 4096)}
    found = pools.prefiller(M, {"p1": 1000}, 1000, beside=decode)
    assert found is not None and found.url == "p2"
    pools.engines["p2"].models = {M: Model(M, "another root", 4096)}
    assert pools.prefiller(M, {}, 1000, beside=decode) is None
    unpaired = pools.unpaired()[0]
    assert unpaired["decode"]["root"] == "root" and unpaired["prefill"][0]["root"] == "another root"
    for url in ("p1", "p2"):
        pools.engines[url].models = {M: Model(M, "root", 4096)}
    decode.weights, pools.engines["p1"].weights, pools.engines["p2"].weights = "1", "2", "1"
    found = pools.prefiller(M, {"p1": 1000}, 1000, beside=decode)
    assert found is not None and found.url == "p2"


def test_an_engine_does_not_prefill_for_itself() -> None:
    pools = pools_of(("a", ["prefill", "decode"]), ("b", ["prefill", "decode"]))
    decode = decoder(pools)
    found = pools.prefiller(M, {decode.url: 1000}, 1000, beside=decode)
    assert found is not None and found is not decode


def test_without_an_engine_of_the_role_another_answers() -> None:
    pools = pools_of(("p", ["prefill"]))
    assert decoder(pools).url == "p"
    assert pools.decoder("another model", {}, 10) is None
