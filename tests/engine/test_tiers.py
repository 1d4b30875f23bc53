"""Every source of a block: the engine's own cache, the CPU tier and the store, also for requests that are aborted in
the meantime.

The expected token ids always come from an engine that computes everything itself.
"""

from __future__ import annotations

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
    stored_blocks,
    until_it_hits,
)
from tests.support.harness import Server, wait_until
from tests.support.slow_link import SlowLink


def blocks(tokens: int) -> int:
    return tokens // BLOCK


def test_the_cpu_tier_works_without_the_store_and_refills_it(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    question = prompt(1)
    engine = start_engine(server.endpoint, options={"cpu_bytes": "64MiB", "lookup_timeout_s": 0.5, "timeout_s": 2})
    check_answers(engine, expected, question, cached=0)
    check_answers(engine, expected, question, cached=full_blocks(500))  # the engine's own cache
    engine.settle()
    assert stored_blocks(server) == blocks(500)
    assert engine.metrics()["swap_blocks/in"] == 0

    server.kill()
    engine.reset_prefix_cache()
    check_answers(engine, expected, question, cached=full_blocks(500))
    assert engine.metrics()["hit_tokens/cpu"] == full_blocks(500)
    engine.reset_prefix_cache()
    branch = question[:300] + prompt(2, 100)
    check_answers(engine, expected, branch, cached=full_blocks(300))
    # A part of the blocks comes from the engine's own cache, the rest from the CPU tier.
    check_answers(engine, expected, question, cached=full_blocks(500))
    engine.settle()
    numbers = engine.metrics()
    assert numbers["hit_tokens/cpu"] == 2 * full_blocks(500)
    assert (numbers["hit_tokens/store"], numbers["transfer_blocks/in"], numbers["defects"]) == (0, 0, 0)

    server.restart()  # with an empty store
    engine.reset_prefix_cache()

    def stored_again() -> bool:
        check_answers(engine, expected, question, cached=full_blocks(500))
        engine.settle()
        return stored_blocks(server) >= blocks(500)

    wait_until(stored_again, what="what the CPU tier has is sent to a store that lost it")
    engine.stop()
    restarted = start_engine(server.endpoint, options={"cpu_bytes": "64MiB"})
    check_answers(restarted, expected, question, cached=full_blocks(500))
    restarted.settle()
    assert restarted.metrics()["hit_tokens/store"] == full_blocks(500)
    # Blocks from the store stayed in the CPU tier.
    server.kill()
    restarted.reset_prefix_cache()
    check_answers(restarted, expected, question, question[:400], cached=None)
    restarted.settle()
    assert restarted.metrics()["hit_tokens/cpu"] >= full_blocks(500)
    assert restarted.metrics()["hit_tokens/store"] == full_blocks(500)


def test_two_engines_answer_from_one_store_concurrently(
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
    # Each engine has all blocks, whichever engine computed them.
    for engine in engines:
        for leaf in rounds[-1]:
            [answer] = engine.generate(leaf)
            assert answer.cached_tokens == full_blocks(len(leaf))


def test_requests_aborted_in_any_phase_leave_nothing(
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
    check_answers(engines[0], expected, *stored, tokens=20)
    engines[0].settle()

    def play(engine: Engine, *asks: Ask) -> None:
        """Run the requests, and check that those with `abort` are aborted and that the answers of the others are
        right."""
        engine.order_play(*asks)
        answers = engine.result()
        assert [answer.aborted for answer in answers] == [ask.abort is not None for ask in asks]
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.aborted or [answer.token_ids] == expected(ask.prompt, max_tokens=ask.max_tokens)

    for number, engine in enumerate(engines):
        # First the lookup's answer is delayed, then the blocks.
        link.hold()
        play(engine, Ask(stored[0], 20, abort="waiting"), Ask(stored[1], 20), Ask(prompt(60 + number), abort="waiting"))
        link.release()
        until_it_hits(engine, stored[0])
        link.hold(BLOCK_BYTES)
        play(engine, Ask(stored[1 + number], 20, abort="loading"), Ask(prompt(62 + number)))
        link.release()
        until_it_hits(engine, stored[0])
        # A slow load is interrupted when no request needs it any more. Blocks that have arrived stay.
        link.bytes_per_s = 8e6
        play(engine, Ask(stored[3], 20, abort="loading"))
        link.bytes_per_s = None
        before = engine.metrics()["hit_tokens/cpu"]
        check_answers(engine, expected, stored[3], cached=full_blocks(500))
        engine.settle()
        assert 0 <= engine.metrics()["hit_tokens/cpu"] - before <= number * full_blocks(500)
        for index, phase in enumerate(("prefilling", "decoding")):
            new = prompt(70 + 2 * number + index)
            half = stored[1][:200] + prompt(80 + 2 * number + index, 300)
            play(engine, Ask(half, 20, abort=phase), Ask(new, 20, abort=phase), Ask(stored[3], 20, at=2))
            # Blocks computed before the abort can be used like any others.
            check_answers(engine, expected, new, half, tokens=20)
        engine.settle()
        check_answers(engine, expected, *stored, cached=full_blocks(500), tokens=20)
        engine.settle()
        assert engine.metrics()["defects"] == 0
