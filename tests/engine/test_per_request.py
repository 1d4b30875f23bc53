"""The connector's options that a single request sets, in a real engine with a real server."""

from __future__ import annotations

from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, Expected, Ledger, StartEngine, full_blocks, prompt
from tests.support.harness import Server


def test_requests_choose_what_is_loaded_and_saved(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    question, other = prompt(75), prompt(76)
    engine = start_engine(server.endpoint, enable_prefix_caching=False)
    ledger = Ledger(engine)
    [answer] = engine.play(Ask(question, options={"save": False}))
    assert [answer.token_ids] == expected(question)
    assert ledger["transfer_blocks/out"] == 0
    engine.play(Ask(question, options={"max_save_tokens": 4 * BLOCK, "priority": 3}))
    assert ledger["transfer_blocks/out"] == 4
    [answer] = engine.play(Ask(question, options={"max_load_tokens": 2 * BLOCK, "save": False}))
    assert (answer.cached_tokens, [answer.token_ids]) == (2 * BLOCK, expected(question))
    [answer] = engine.play(Ask(question, options={"load": False, "save": False}))
    assert (answer.cached_tokens, [answer.token_ids]) == (0, expected(question))
    assert ledger["refused_requests"] == 0

    # A request with a wrong option is computed, and other requests are not affected.
    answers = engine.play(Ask(question, options={"skip_save": True}), Ask(other))
    assert [answer.token_ids for answer in answers] == expected(question, other)
    assert ledger["refused_requests"] == 1
    assert "unknown option 'skip_save'" in engine.log_text()
    [answer] = engine.play(Ask(other))
    assert answer.cached_tokens == full_blocks(500)
