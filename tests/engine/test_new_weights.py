"""Weights that change while the engine runs. Only blocks of the current weights are used, and no other blocks
get the name of these weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, LONGEST, Engine, Expected, StartEngine, full_blocks, prompt, stored_blocks
from tests.engine.served import MODEL, ServedEngine, post, save_served_model
from tests.support.harness import Server, wait_until

CACHED = full_blocks(500)
TIERS = pytest.mark.parametrize("options", [{}, {"cpu_bytes": "64MiB"}], ids=["no tier", "a CPU tier"])
STOPPED = "from now on nothing is loaded or saved"


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without any cache, whose weights tests may change."""
    log = tmp_path_factory.mktemp("alone") / "engine.log"
    engine = Engine(model, log, connector=None, enable_prefix_caching=False, max_model_len=LONGEST)
    yield engine
    engine.stop()


def trained(alone: Engine, seed: int, question: list[int]) -> list[int]:
    """Return the answer of an engine with the weights of this seed."""
    alone.change_weights(seed)
    [answer] = alone.generate(question)
    return answer.token_ids


def check(engine: Engine, question: list[int], expected: list[int], cached: int) -> None:
    [answer] = engine.generate(question)
    assert answer.token_ids == expected
    assert answer.cached_tokens == cached
    engine.settle()


@TIERS
def test_weights_changed_in_place_are_noticed_without_a_reset(
    server: Server, start_engine: StartEngine, expected: Expected, alone: Engine, options: dict[str, Any]
) -> None:
    question, other = prompt(70), prompt(71)
    [old], new, other_new = expected(question), trained(alone, 1, question), trained(alone, 1, other)
    assert old != new
    engine = start_engine(server.endpoint, options=options)
    check(engine, question, old, 0)
    # The blocks wait for a check of the weights, which may need another step on a busy machine.
    wait_until(lambda: stored_blocks(server) or engine.generate(question) is None, what="the blocks are stored")
    before = stored_blocks(server)
    engine.change_weights(1)
    engine.reset_prefix_cache()
    [answer] = engine.generate(question)
    assert answer.token_ids == new
    engine.settle()
    assert STOPPED in engine.log_text()
    check(engine, other, other_new, 0)
    assert stored_blocks(server) == before, "blocks of the new weights went to the store"
    # A new engine with the original weights finds the blocks of these weights, and no others.
    fresh = start_engine(server.endpoint)
    check(fresh, question, old, CACHED)
    check(fresh, other, expected(other)[0], 0)


def test_blocks_of_changed_weights_are_not_sent_before_the_change_is_noticed(
    server: Server, start_engine: StartEngine, expected: Expected, alone: Engine
) -> None:
    """vLLM resets nothing after the change, and the engine loads no block."""
    question = prompt(72)
    engine = start_engine(server.endpoint)
    engine.change_weights(2)
    [answer] = engine.generate(question, max_tokens=70)
    assert answer.token_ids[:8] == trained(alone, 2, question)
    engine.settle()
    engine.stop()
    assert stored_blocks(server) == 0
    fresh = start_engine(server.endpoint)
    check(fresh, question, expected(question)[0], 0)


@TIERS
def test_a_sleeping_engine_loads_nothing_until_it_wakes(
    server: Server, start_engine: StartEngine, expected: Expected, options: dict[str, Any]
) -> None:
    """The test calls the connector as vLLM 0.33 does. On a CPU the engine's cache stays in place, so the engine can
    answer in the meantime."""
    question = prompt(78)
    [right] = expected(question)
    engine = start_engine(server.endpoint, options=options)
    check(engine, question, right, 0)
    for away, cached in ((True, 0), (False, CACHED)):
        engine.take_cache_away(away)
        engine.take_cache_away(away)  # vLLM may make the call twice
        engine.reset_prefix_cache()
        check(engine, question, right, cached)
        assert engine.metrics()["failed_loads"] == 1
    assert engine.metrics()["defects"] == 0


@TIERS
def test_after_a_reset_with_the_same_weights_sharing_resumes_by_itself(
    server: Server, start_engine: StartEngine, expected: Expected, options: dict[str, Any]
) -> None:
    question, other = prompt(73), prompt(74)
    engine = start_engine(server.endpoint, options=options)
    check(engine, question, expected(question)[0], 0)
    engine.reset_prefix_cache(connector=True)
    held = engine.metrics()
    check(engine, question, expected(question)[0], CACHED)  # under the same keys as before
    after = engine.metrics()
    assert after["hit_tokens/cpu"] == held["hit_tokens/cpu"], "a reset drops what the engine holds"
    check(engine, other, expected(other)[0], 0)
    second = start_engine(server.endpoint)
    check(second, other, expected(other)[0], CACHED)
    assert STOPPED not in engine.log_text()


@TIERS
def test_engines_with_weights_of_one_name_share_with_each_other(
    server: Server, start_engine: StartEngine, expected: Expected, alone: Engine, options: dict[str, Any]
) -> None:
    question, other = prompt(75), prompt(76)
    [old], new, other_new = expected(question), trained(alone, 3, question), trained(alone, 3, other)
    first = start_engine(server.endpoint, options=options)
    check(first, question, old, 0)
    second = start_engine(server.endpoint, options=options)
    check(second, question, old, CACHED)
    for engine in (first, second):
        engine.change_weights(3)
        engine.name_weights("step-3")
        engine.reset_prefix_cache(connector=engine is first)
    check(first, question, new, 0)
    check(second, question, new, CACHED)
    check(second, other, other_new, 0)
    check(first, other, other_new, CACHED)
    # The engine gets its initial weights again, and notices that by itself.
    first.change_weights(0)
    first.reset_prefix_cache()
    [answer] = first.generate(question)
    assert answer.token_ids == old
    first.settle()
    assert STOPPED in first.log_text()
    fresh = start_engine(server.endpoint)
    check(fresh, question, old, CACHED)
    check(fresh, other, expected(other)[0], 0)


def test_all_ranks_must_get_and_agree_on_a_name(
    server: Server, start_engine: StartEngine, expected: Expected, alone: Engine
) -> None:
    question, other = prompt(80), prompt(81)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    engine = start_engine(
        server.endpoint,
        environment={**environment, "OMP_NUM_THREADS": "1"},
        fork=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    parts = 2 * CACHED // BLOCK

    def ask(asked: list[int]) -> tuple[list[int], int]:
        [answer] = engine.generate(asked)
        return answer.token_ids, answer.cached_tokens

    assert ask(question) == (expected(question)[0], 0)
    wait_until(lambda: ask([1]) and stored_blocks(server) >= parts, what="both ranks have saved")
    before = stored_blocks(server)
    engine.change_rank(1)
    engine.reset_prefix_cache()
    assert ask(question)[1] == 0, "one rank has other weights"
    ask(other)
    ask([2])
    assert STOPPED in engine.log_text()
    assert stored_blocks(server) == before
    engine.restore_rank(1)
    wait_until(lambda: ask([3]) and "blocks are shared again" in engine.log_text(), what="the ranks agree again")
    engine.reset_prefix_cache()
    assert ask(question) == (expected(question)[0], CACHED)
    engine.name_weights("step-1")
    engine.reset_prefix_cache()
    assert ask(question) == (expected(question)[0], 0)
    wait_until(lambda: ask([4]) and stored_blocks(server) >= before + parts, what="saved under the new name")


def test_a_reset_that_vllm_reports_as_failed_ends_no_sharing(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    """The reset fails because a request is running. The blocks of that request are neither saved nor found by other
    requests."""
    question, other = prompt(77), prompt(78)
    engine = start_engine(server.endpoint, max_num_batched_tokens=64, max_num_seqs=4)
    check(engine, other, expected(other)[0], 0)
    engine.begin(Ask(question))
    engine.compute(128)
    engine._send("reset_prefix_cache", True)
    assert engine.result() is False
    before = stored_blocks(server)
    [twin] = engine.play(Ask(question))
    assert [twin.token_ids] == expected(question)
    assert twin.cached_tokens == 0, "it found blocks that are older than the reset"
    check(engine, other, expected(other)[0], CACHED)
    assert "Their blocks are neither saved nor used for other requests" in engine.log_text()
    assert stored_blocks(server) >= before
    second = start_engine(server.endpoint)
    check(second, other, expected(other)[0], CACHED)


def test_an_operator_can_name_the_weights_over_http(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point is that of an installed kvstore: it makes vLLM load the HTTP endpoint."""
    folder = tmp_path / "site" / "llm_kvstore-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-kvstore\nVersion: 0.1.0\n")
    entry = "kvstore = kvstore_client.vllm.weights_endpoint:WeightsEndpoint"
    (folder / "entry_points.txt").write_text(f"[vllm.endpoint_plugins]\n{entry}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("VLLM_PLUGINS", "kvstore")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    model = save_served_model(tmp_path / "model")
    ask = {"model": MODEL, "prompt": prompt(79), "max_tokens": 1, "temperature": 0}
    with ServedEngine(model, tmp_path / "engine.log", server.endpoint, "--api-key", "sesame") as engine:
        key = {"Authorization": "Bearer sesame"}
        assert post(engine.url, "/kvstore/weights", {"version": "step-1"})[0] == 401
        for wrong in ({}, {"version": ""}, {"version": 7}):
            status, reply = post(engine.url, "/kvstore/weights", wrong, **key)
            assert status == 400 and "expected" in reply["error"]

        def cached() -> int:
            status, reply = post(engine.url, "/v1/completions", ask, **key)
            assert status == 200
            return int((reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        def forget() -> None:
            assert post(engine.url, "/reset_prefix_cache?reset_external=true", {}, **key)[1]["success"]

        wait_until(lambda: cached() == CACHED, what="the prompt is cached")
        forget()
        wait_until(lambda: stored_blocks(server) >= CACHED // 32, what="it is stored")
        assert post(engine.url, "/kvstore/weights", {"version": "step-1"}, **key) == (200, {"version": "step-1"})
        assert cached() == 0, "what is stored has another name"
        forget()
        wait_until(lambda: cached() == CACHED, what="it is stored under the new name")
