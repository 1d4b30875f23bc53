"""Other kinds of engines: with a cache too small for all requests, with a core in its own process, with several ranks,
with roles.

The expected token ids always come from an engine that computed everything itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.engines import (
    BLOCK,
    BLOCK_BYTES,
    Ask,
    Engine,
    Expected,
    StartEngine,
    check_answers,
    full_blocks,
    namespaces,
    prompt,
    save_model,
    stored_blocks,
)
from tests.support.harness import Server, wait_until

SEPARATE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the engine's core in a process of its own
TINY_TIER = 8 * BLOCK_BYTES  # the smallest CPU tier


def blocks(tokens: int) -> int:
    return tokens // BLOCK


@pytest.mark.parametrize(
    ("prefix_caching", "cpu_bytes"), [(False, 0), (False, TINY_TIER), (False, 64 << 20), (True, 64 << 20)]
)
def test_chunks_and_preemption_change_nothing(
    server: Server, start_engine: StartEngine, expected: Expected, cpu_bytes: int, prefix_caching: bool
) -> None:
    engine = start_engine(
        server.endpoint,
        options={"cpu_bytes": cpu_bytes},
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=80,  # a prompt is computed in pieces that do not end where blocks end
        num_gpu_blocks_override=33,  # too few blocks for all requests, so some are preempted and resumed
        max_model_len=512,
    )
    stem = prompt(30, 100)
    prompts = [stem + prompt(seed, 150) for seed in range(31, 35)] + [prompt(seed, 250) for seed in (36, 37)]
    for _ in range(3):
        answers = engine.generate(*prompts, max_tokens=30)
        assert [answer.token_ids for answer in answers] == expected(*prompts, max_tokens=30)
    assert sum(answer.preemptions for answer in answers) > 0
    engine.settle()
    numbers = engine.metrics()
    assert (numbers["defects"], numbers["failed_loads"], numbers["failed_calls"]) == (0, 0, 0)
    assert numbers["hit_tokens/store"] > 0 if cpu_bytes < 64 << 20 else numbers["hit_tokens/cpu"] > 0
    for each in prompts:
        check_answers(engine, expected, each, cached=None if cpu_bytes == TINY_TIER else full_blocks(250))


def test_an_engine_in_separate_processes_works(server: Server, start_engine: StartEngine, expected: Expected) -> None:
    engine = start_engine(
        server.endpoint,
        options={"cpu_bytes": "32MiB"},
        environment=SEPARATE,
        fork=True,
        enable_prefix_caching=False,
    )
    prompts = [prompt(seed, 400) for seed in range(40, 44)]
    check_answers(engine, expected, *prompts[:2], cached=0)
    wait_until(lambda: stored_blocks(server) == 2 * blocks(400), what="all is saved")
    check_answers(engine, expected, *prompts[:2], cached=full_blocks(400))
    # Some requests are aborted, after a moment or at once.
    asks = [Ask(each, 20, abort=abort) for each in prompts for abort in (None, 0.0, 0.05, 0.2)]
    played = engine.play(*asks)
    for ask, answer in zip(asks, played, strict=True):
        assert answer.aborted or [answer.token_ids] == expected(ask.prompt, max_tokens=20)
    assert any(answer.aborted for answer in played)
    check_answers(engine, expected, *prompts, tokens=20)

    def numbers() -> bool:
        engine.generate([0], max_tokens=1)
        said = engine.metrics()
        assert said["defects"] == 0
        return said["hit_tokens/cpu"] >= 2 * full_blocks(400) and said["transfer_blocks/out"] >= 4 * blocks(400)

    wait_until(numbers, what="the metrics of all processes say it")
    assert engine.stop() == 0


def test_an_operator_decides_whether_an_engine_saves_and_loads(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    producer = start_engine(
        server.endpoint,
        options={"save_decode": False, "cpu_bytes": "32MiB"},
        kv_role="kv_producer",
        enable_prefix_caching=False,
    )
    question, short = prompt(100), prompt(101, 100)
    for _ in range(2):
        check_answers(producer, expected, question, short, cached=0, tokens=70)
    producer.settle()
    assert stored_blocks(server) == blocks(500) + blocks(100), "the prompts' blocks, none of the answers'"
    producer.stop()

    consumer = start_engine(
        server.endpoint, options={"min_hit_tokens": 97}, kv_role="kv_consumer", enable_prefix_caching=False
    )
    for _ in range(2):
        check_answers(consumer, expected, question, cached=full_blocks(500))
        check_answers(consumer, expected, short, cached=0)  # three blocks are too few
        check_answers(consumer, expected, question[:129] + prompt(102, 300), cached=full_blocks(129))
        check_answers(consumer, expected, prompt(103), cached=0)
    consumer.settle()
    assert stored_blocks(server) == blocks(500) + blocks(100)
    assert consumer.metrics()["lookups"] == 6, "the short one's were not made"


TWO_RANKS = {
    "environment": SEPARATE,
    "fork": True,
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enable_prefix_caching": False,
}


def test_each_rank_stores_its_part(server: Server, start_engine: StartEngine, expected: Expected) -> None:
    prompts = [prompt(seed) for seed in (90, 91)]
    small = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 33, "max_model_len": 1024}
    for options, first, shape in (({}, 0, {}), ({"cpu_bytes": "32MiB"}, full_blocks(500), small)):
        engine = start_engine(server.endpoint, options=options, **TWO_RANKS, **shape)
        for cached in (first, full_blocks(500)):
            check_answers(engine, expected, *prompts, cached=cached, tokens=20)
            wait_until(lambda: stored_blocks(server) == 2 * 2 * blocks(519), what="both ranks have saved")
        assert engine.stop() == 0
    ranks = namespaces(server)
    assert [each.block_bytes for each in ranks] == [BLOCK_BYTES // 2] * 2
    assert [each.blocks for each in ranks] == [2 * blocks(519)] * 2


def test_engines_of_different_sizes_read_each_others_blocks(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    prompts = [prompt(seed) for seed in (110, 111, 112)]
    hit = full_blocks(500)
    for shape, asked, cached in (
        ({"enable_prefix_caching": False}, 1, [0]),
        (TWO_RANKS, 2, [hit, 0]),
        ({"enable_prefix_caching": False}, 3, [hit, hit, 0]),
    ):
        engine = start_engine(server.endpoint, options={"head_shards": 2}, **shape)
        answers = engine.generate(*prompts[:asked], max_tokens=20)
        assert [answer.token_ids for answer in answers] == expected(*prompts[:asked], max_tokens=20)
        assert [answer.cached_tokens for answer in answers] == cached
        if engine.has_core:
            engine.settle()
        wait_until(lambda asked=asked: stored_blocks(server) == asked * 2 * blocks(519), what="both parts are saved")
        assert engine.stop() == 0
    [namespace] = namespaces(server)
    assert (namespace.block_bytes, namespace.created) == (BLOCK_BYTES // 2, namespace.blocks)


def test_ranks_with_the_same_heads_store_them_once(server: Server, start_engine: StartEngine, tmp_path: Path) -> None:
    model = save_model(tmp_path / "one-head", kv_heads=1)
    prompts = [prompt(seed) for seed in (95, 96, 97)]
    plain = Engine(model, tmp_path / "plain.log", connector=None)
    tokens = [answer.token_ids for answer in plain.generate(*prompts, max_tokens=20)]
    plain.stop()
    engine = start_engine(server.endpoint, model=model, **TWO_RANKS)
    for asked, cached in ((2, [0, 0]), (3, [full_blocks(500), full_blocks(500), 0]), (3, [full_blocks(500)] * 3)):
        answers = engine.generate(*prompts[:asked], max_tokens=20)
        assert [answer.token_ids for answer in answers] == tokens[:asked]
        assert [answer.cached_tokens for answer in answers] == cached
        wait_until(
            lambda asked=asked: stored_blocks(server) == asked * blocks(519), what="each rank has saved its share"
        )
    [namespace] = namespaces(server)
    assert (namespace.block_bytes, namespace.created) == (BLOCK_BYTES // 4, namespace.blocks)
