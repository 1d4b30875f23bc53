"""Every way a block can come back: from the engine's own cache, the CPU tier or the store, in every shape of engine.

The measure is always the same: the token ids of an engine that computed everything itself.
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
    full_blocks,
    namespaces,
    prompt,
    save_model,
    stored_blocks,
    until_it_hits,
)
from tests.engine.slow_link import SlowLink
from tests.support.harness import Server, wait_until

SEPARATE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the engine's core in a process of its own
TINY_TIER = 8 * BLOCK_BYTES  # the smallest there is


def blocks(tokens: int) -> int:
    return tokens // BLOCK


def check(engine: Engine, expected: Expected, *prompts: list[int], cached: int | None = None, tokens: int = 8) -> None:
    """All at once: the right answers, and so many cached tokens of each."""
    answers = engine.generate(*prompts, max_tokens=tokens)
    assert [answer.token_ids for answer in answers] == expected(*prompts, max_tokens=tokens)
    if cached is not None:
        assert [answer.cached_tokens for answer in answers] == [cached] * len(prompts)


def test_the_cpu_tier_answers_without_the_store_and_gives_it_back_what_it_lost(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    question = prompt(1)
    engine = start_engine(server.endpoint, options={"cpu_bytes": "64MiB", "lookup_timeout_s": 0.5, "timeout_s": 2})
    check(engine, expected, question, cached=0)
    check(engine, expected, question, cached=full_blocks(500))  # the engine's own cache
    engine.settle()
    assert stored_blocks(server) == blocks(500)
    assert engine.metrics()["swap_blocks/in"] == 0

    server.kill()
    engine.reset_prefix_cache()
    check(engine, expected, question, cached=full_blocks(500))
    assert engine.metrics()["hit_tokens/cpu"] == full_blocks(500)
    engine.reset_prefix_cache()
    branch = question[:300] + prompt(2, 100)
    check(engine, expected, branch, cached=full_blocks(300))
    # A part from the engine's own cache, the rest from the CPU tier.
    check(engine, expected, question, cached=full_blocks(500))
    engine.settle()
    numbers = engine.metrics()
    assert numbers["hit_tokens/cpu"] == 2 * full_blocks(500)
    assert (numbers["hit_tokens/store"], numbers["transfer_blocks/in"], numbers["defects"]) == (0, 0, 0)

    server.restart()  # empty
    engine.reset_prefix_cache()

    def stored_again() -> bool:
        check(engine, expected, question, cached=full_blocks(500))
        engine.settle()
        return stored_blocks(server) >= blocks(500)

    wait_until(stored_again, 30, "what the CPU tier has is sent to a store that lost it")
    engine.stop()
    restarted = start_engine(server.endpoint, options={"cpu_bytes": "64MiB"})
    check(restarted, expected, question, cached=full_blocks(500))
    restarted.settle()
    assert restarted.metrics()["hit_tokens/store"] == full_blocks(500)
    # What came from the store stayed in the CPU tier.
    server.kill()
    restarted.reset_prefix_cache()
    check(restarted, expected, question, question[:400], cached=None)
    restarted.settle()
    assert restarted.metrics()["hit_tokens/cpu"] >= full_blocks(500)
    assert restarted.metrics()["hit_tokens/store"] == full_blocks(500)


def test_two_engines_answer_from_one_store_at_the_same_time(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    engines = [
        start_engine(server.endpoint, options={"cpu_bytes": "32MiB"}, max_num_batched_tokens=256),
        start_engine(server.endpoint, enable_prefix_caching=False),
    ]
    stem = prompt(10, 200)
    leaves = [stem + prompt(seed, 60 + 40 * seed) for seed in range(11, 17)]
    rounds = [leaves[:4], leaves[2:], [leaf[:-50] + prompt(20, 70) for leaf in leaves]]
    for prompts in rounds:
        for engine, order in zip(engines, (prompts, prompts[::-1]), strict=True):
            engine.order(*order, max_tokens=20)
        tokens = expected(*prompts, max_tokens=20)
        assert [answer.token_ids for answer in engines[0].result()] == tokens
        assert [answer.token_ids for answer in engines[1].result()] == tokens[::-1]
    for engine in engines:
        engine.settle()
    [namespace] = namespaces(server)
    every_prefix = {
        tuple(each[: BLOCK * count])
        for asked in rounds
        for leaf, answer in zip(asked, expected(*asked, max_tokens=20), strict=True)
        for each in [leaf + answer[:-1]]
        for count in range(1, blocks(len(each)) + 1)
    }
    assert namespace.blocks == len(every_prefix), "every block is stored, once"
    # Either engine has all of it, whoever computed it.
    for engine in engines:
        for leaf in rounds[-1]:
            [answer] = engine.generate(leaf)
            assert answer.cached_tokens == full_blocks(len(leaf))


@pytest.mark.parametrize("cpu_bytes", [0, TINY_TIER, 64 << 20])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_and_preemption_change_nothing(
    server: Server, start_engine: StartEngine, expected: Expected, cpu_bytes: int, prefix_caching: bool
) -> None:
    engine = start_engine(
        server.endpoint,
        options={"cpu_bytes": cpu_bytes},
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=80,  # a prompt is computed in pieces that do not end at blocks
        num_gpu_blocks_override=33,  # not enough for all, so some are preempted and come back
        max_model_len=512,
    )
    stem = prompt(30, 100)
    prompts = [stem + prompt(seed, 150) for seed in range(31, 35)] + [prompt(seed, 250) for seed in (36, 37)]
    for _ in range(3):
        answers = engine.generate(*prompts, max_tokens=60)
        assert [answer.token_ids for answer in answers] == expected(*prompts, max_tokens=60)
    assert sum(answer.preemptions for answer in answers) > 0
    engine.settle()
    numbers = engine.metrics()
    assert (numbers["defects"], numbers["failed_loads"], numbers["failed_calls"]) == (0, 0, 0)
    assert numbers["hit_tokens/store"] > 0 if cpu_bytes < 64 << 20 else numbers["hit_tokens/cpu"] > 0
    for each in prompts:
        check(engine, expected, each, cached=None if cpu_bytes == TINY_TIER else full_blocks(250))


def test_an_engine_in_processes_of_its_own(server: Server, start_engine: StartEngine, expected: Expected) -> None:
    engine = start_engine(
        server.endpoint,
        options={"cpu_bytes": "32MiB"},
        environment=SEPARATE,
        fork=True,
        enable_prefix_caching=False,
    )
    prompts = [prompt(seed, 400) for seed in range(40, 44)]
    check(engine, expected, *prompts[:2], cached=0)
    wait_until(lambda: stored_blocks(server) == 2 * blocks(400), what="all is saved")
    check(engine, expected, *prompts[:2], cached=full_blocks(400))
    # Some are given up, after a moment or at once.
    asks = [Ask(each, 20, abort=abort) for each in prompts for abort in (None, 0.0, 0.05, 0.2)]
    played = engine.play(*asks)
    for ask, answer in zip(asks, played, strict=True):
        assert answer.aborted or [answer.token_ids] == expected(ask.prompt, max_tokens=20)
    assert any(answer.aborted for answer in played)
    check(engine, expected, *prompts, tokens=20)

    def numbers() -> bool:
        engine.generate([0], max_tokens=1)
        said = engine.metrics()
        assert said["defects"] == 0
        return said["hit_tokens/cpu"] >= 2 * full_blocks(400) and said["transfer_blocks/out"] >= 4 * blocks(400)

    wait_until(numbers, what="the metrics of all processes say it")
    assert engine.stop() == 0


def test_requests_given_up_in_any_phase_leave_nothing(
    server: Server, link: SlowLink, start_engine: StartEngine, expected: Expected
) -> None:
    engines = [
        start_engine(
            link.endpoint,
            options={"cpu_bytes": cpu_bytes, "lookup_timeout_s": 1, "timeout_s": 2},
            enable_prefix_caching=False,
            max_num_batched_tokens=128,
            num_gpu_blocks_override=80,
        )
        for cpu_bytes in ("0", "64MiB")
    ]
    stored = [prompt(seed) for seed in range(50, 54)]
    check(engines[0], expected, *stored, tokens=20)
    engines[0].settle()

    def play(engine: Engine, *asks: Ask) -> None:
        """Who is to be given up is, the others' answers are right."""
        engine.order_play(*asks)
        answers = engine.result()
        assert [answer.aborted for answer in answers] == [ask.abort is not None for ask in asks]
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.aborted or [answer.token_ids] == expected(ask.prompt, max_tokens=ask.max_tokens)

    for number, engine in enumerate(engines):
        # The answer to the lookup is held back; then blocks are.
        link.hold()
        play(engine, Ask(stored[0], 20, abort="waiting"), Ask(stored[1], 20), Ask(prompt(60 + number), abort="waiting"))
        link.release()
        until_it_hits(engine, stored[0])
        link.hold(3 * BLOCK_BYTES)
        play(engine, Ask(stored[1 + number], 20, abort="loading"), Ask(prompt(62 + number)))
        assert link.held
        link.release()
        until_it_hits(engine, stored[0])
        # A load that takes its time ends well although nobody wants it any more.
        link.bytes_per_s = 8e6
        play(engine, Ask(stored[3], 20, abort="loading"))
        link.bytes_per_s = None
        before = engine.metrics()["hit_tokens/cpu"]
        check(engine, expected, stored[3], cached=full_blocks(500))
        engine.settle()
        assert engine.metrics()["hit_tokens/cpu"] - before == number * full_blocks(500)
        for index, phase in enumerate(("prefilling", "decoding")):
            new = prompt(70 + 2 * number + index)
            half = stored[1][:200] + prompt(80 + 2 * number + index, 300)
            play(engine, Ask(half, 20, abort=phase), Ask(new, 20, abort=phase), Ask(stored[3], 20, at=2))
            # What it computed by then is as good as any.
            check(engine, expected, new, half, tokens=20)
        engine.settle()
        check(engine, expected, *stored, cached=full_blocks(500), tokens=20)
        engine.settle()
        assert engine.metrics()["defects"] == 0


def test_what_an_engine_may_save_and_load_is_its_operators_choice(
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
        check(producer, expected, question, short, cached=0, tokens=70)
    producer.settle()
    assert stored_blocks(server) == blocks(500) + blocks(100), "the prompts' blocks, none of the answers'"
    producer.stop()

    consumer = start_engine(
        server.endpoint, options={"min_hit_tokens": 97}, kv_role="kv_consumer", enable_prefix_caching=False
    )
    for _ in range(2):
        check(consumer, expected, question, cached=full_blocks(500))
        check(consumer, expected, short, cached=0)  # three blocks are too few
        check(consumer, expected, question[:129] + prompt(102, 300), cached=full_blocks(129))
        check(consumer, expected, prompt(103), cached=0)
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
            check(engine, expected, *prompts, cached=cached, tokens=60)
            wait_until(lambda: stored_blocks(server) == 2 * 2 * blocks(559), what="both ranks have saved")
        assert engine.stop() == 0
    ranks = namespaces(server)
    assert [each.block_bytes for each in ranks] == [BLOCK_BYTES // 2] * 2
    assert [each.blocks for each in ranks] == [2 * blocks(559)] * 2


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
