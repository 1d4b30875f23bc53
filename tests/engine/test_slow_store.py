"""A store that is slower than computing delays no request. The engine uses it again when it has become fast."""

from __future__ import annotations

import pytest

from tests.engine.engines import BLOCK, Expected, StartEngine, full_blocks, prompt
from tests.support.harness import Server, wait_until
from tests.support.slow_link import SlowLink

TOKENS = 1500
SLOW_BYTES_PER_S = 200_000  # a block in 1.3 s


@pytest.mark.timeout(240)
def test_with_a_slow_link_prompts_are_computed_until_it_is_fast(
    server: Server, link: SlowLink, start_engine: StartEngine, expected: Expected
) -> None:
    questions = [prompt(seed, TOKENS) for seed in range(80, 84)]
    filler = start_engine(server.endpoint)
    filler.generate(*questions)
    filler.settle()
    filler.stop()

    engine = start_engine(link.endpoint, options={"always_load": False}, enable_prefix_caching=False)
    engine.generate(prompt(90, TOKENS))  # measures how fast the engine computes
    engine.settle()
    link.bytes_per_s = SLOW_BYTES_PER_S
    for question in questions:
        [answer] = engine.generate(question)
        assert [answer.token_ids] == expected(question)
        assert answer.seconds < 5.0, "no request waits for as long as a load may take"
    engine.settle()
    numbers = engine.metrics()
    assert numbers["failed_loads"] <= 2, "after that it is known"
    assert numbers["declined_tokens"] >= (len(questions) - 2) * full_blocks(TOKENS) // 2
    assert numbers["defects"] == 0

    link.bytes_per_s = None
    engine.set_hope_s(0.05)  # computing shows nothing about the store, so it retries

    def is_used() -> bool:
        [answer] = engine.generate(questions[0])
        return answer.cached_tokens >= full_blocks(TOKENS) - BLOCK

    wait_until(is_used, 120, "the store is used again")
    assert [answer.token_ids for answer in engine.generate(questions[0])] == expected(questions[0])
