"""The real engine with the real server. The expected token ids always come from an engine that computed everything
itself; ``cached_tokens`` shows what the tested engine loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.engine.engines import BLOCK, Expected, StartEngine, full_blocks, namespaces, prompt
from tests.support.harness import Server


def test_a_second_engine_loads_what_the_first_saved(
    server: Server, start_engine: StartEngine, expected: Expected, model: Path, tmp_path: Path
) -> None:
    question = prompt(1)
    first = start_engine(server.endpoint)
    [computed] = first.generate(question, max_tokens=70)
    assert [computed.token_ids] == expected(question, max_tokens=70)
    assert computed.cached_tokens == 0
    assert first.stop() == 0  # the end sends the remaining blocks

    # The same weights in another folder are the same model.
    second = start_engine(server.endpoint, model=shutil.copytree(model, tmp_path / "elsewhere"))
    # The common prefix with the first engine's prompt is loaded.
    branch = question[:300] + prompt(2, 200)
    [answer] = second.generate(branch)
    assert answer.cached_tokens == full_blocks(300)
    assert [answer.token_ids] == expected(branch)
    # The first prompt's other blocks are loaded, in addition to those in the engine's own cache. Two requests need them
    # at once.
    twins = [question, question]
    answers = second.generate(*twins)
    assert [answer.cached_tokens for answer in answers] == [full_blocks(500)] * 2
    assert [answer.token_ids for answer in answers] == expected(*twins)
    # Generated tokens were saved too: the next turn of the conversation starts where the answer ended.
    turn = question + computed.token_ids + prompt(3, 50)
    [answer] = second.generate(turn)
    assert answer.cached_tokens >= full_blocks(500 + 70 - 1)
    assert [answer.token_ids] == expected(turn)
    # If a prompt consists of whole blocks, the last block is computed.
    aligned = question[: 10 * BLOCK]
    [answer] = second.generate(aligned)
    assert answer.cached_tokens == 9 * BLOCK
    assert [answer.token_ids] == expected(aligned)


def test_blocks_that_do_not_arrive_are_computed(server: Server, start_engine: StartEngine, expected: Expected) -> None:
    question, other = prompt(20), prompt(21)
    filler = start_engine(server.endpoint)
    filler.generate(question, other)
    filler.stop()

    engine = start_engine(server.endpoint)
    engine.deliver(4)
    assert [answer.token_ids for answer in engine.generate(question, other)] == expected(question, other)
    # The engine computed these blocks instead, into its own cache. Only right blocks went to the store.
    assert [answer.token_ids for answer in engine.generate(question, other)] == expected(question, other)
    assert "Recovered from KV load failure" in engine.log_text()
    # Now no block arrives at all.
    engine.settle()
    engine.reset_prefix_cache()
    engine.deliver(0)
    longer = question + prompt(22, 100)
    failed = engine.metrics()["failed_loads"]
    assert [answer.token_ids for answer in engine.generate(longer, other)] == expected(longer, other)
    engine.settle()
    assert engine.metrics()["failed_loads"] > failed


def test_an_engine_starts_and_serves_without_its_server(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    server.kill()
    engine = start_engine(server.endpoint)
    question = prompt(40)
    [answer] = engine.generate(question)
    assert (answer.token_ids, answer.cached_tokens) == (expected(question)[0], 0)
    assert engine.stop() == 0
    assert "counts as a miss" in engine.log_text()


def test_another_model_with_the_same_name_shares_nothing(
    server: Server, start_engine: StartEngine, model: Path, other_model: Path
) -> None:
    question = prompt(50)
    engine = start_engine(server.endpoint)
    [mine] = engine.generate(question)
    engine.stop()
    assert model.name == other_model.name
    stranger = start_engine(server.endpoint, model=other_model)
    [theirs] = stranger.generate(question)
    assert theirs.cached_tokens == 0
    assert theirs.token_ids != mine.token_ids


def test_block_hashes_unknown_to_other_processes_stop_the_engine(start_engine: StartEngine) -> None:
    """Here a real engine fails to start. `test_engine_checks` tests the other reasons without an engine."""
    engine = start_engine("tcp://127.0.0.1:7070", prefix_caching_hash_algo="xxhash", wait=False)
    assert not engine.ready()
    assert engine.stop() == 1
    assert "Set --prefix-caching-hash-algo sha256" in engine.log_text()


def test_blocks_of_bfloat16_are_read_back_unchanged(server: Server, start_engine: StartEngine) -> None:
    engine = start_engine(server.endpoint, dtype="bfloat16", enable_prefix_caching=False)
    question = prompt(60)
    [computed] = engine.generate(question, max_tokens=20)
    engine.settle()
    [loaded] = engine.generate(question, max_tokens=20)
    assert (computed.cached_tokens, loaded.cached_tokens) == (0, full_blocks(500))
    assert computed.token_ids == loaded.token_ids


def test_after_a_reset_an_engine_of_the_same_weights_shares_again(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    """vLLM resets the connector for new weights and for sleep. Here the weights stay the same."""
    question = prompt(61)
    cached = full_blocks(500)
    for options in ({}, {"weights_version": "2026-11"}):
        engine = start_engine(server.endpoint, options=options)
        engine.generate(question)
        engine.settle()
        engine.reset_prefix_cache(connector=True)
        [answer] = engine.generate(question)
        assert [answer.token_ids] == expected(question)
        assert answer.cached_tokens == cached
        engine.settle()
        engine.stop()
    [mine, _] = [json.loads(each.namespace) for each in namespaces(server)]
    assert mine["extra"]["pages"].startswith("page-"), "this engine's own kernels were asked"
