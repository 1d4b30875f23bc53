"""Models with states (short convolutions, Mamba2) in the real engine, which keeps the states at the ends of some
blocks.

The expected tokens come from an engine without a connector, whose own cache is empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.driver import Ask
from tests.engine.engines import BLOCK, Engine, Expected, StartEngine, answers_alone, full_blocks, namespaces, prompt
from tests.engine.models import STATES
from tests.support.harness import Server

AT_LENGTH = "KVSTORE_LAYOUTS" in os.environ  # set by `make layouts`
KINDS = list(STATES) if AT_LENGTH else list(STATES)[:1]
at_length = pytest.mark.skipif(not AT_LENGTH, reason="make layouts runs it")
# Each step computes one block: on CPUs, vLLM's Mamba2 fails with states from a longer step, and the tokens of these
# models depend on where steps end.
STEPS = {"max_num_batched_tokens": BLOCK, "max_num_seqs": 4}
# CACHING makes an engine keep the state before a prompt's end; by default, a Mamba2 caches no prefixes. DENSELY makes
# it also keep the states at the ends of all steps, and in answers.
CACHING = {**STEPS, "enable_prefix_caching": True}
DENSELY = {**CACHING, "prefix_cache_retention_interval": BLOCK}


@pytest.fixture(scope="module", params=KINDS)
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return STATES[request.param](tmp_path_factory.mktemp("model") / request.param.replace(" ", "-"))


@pytest.fixture(scope="module")
def plain(stateful: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    engine = Engine(stateful, log, connector=None, **CACHING)
    yield answers_alone(engine, reset=True)
    engine.stop()


def check(engine: Engine, plain: Expected, *prompts: list[int], cached: int | None = None) -> list[list[int]]:
    """Check the engine's answers, and return them."""
    answers = engine.generate(*prompts, max_tokens=40)
    alone = plain(*prompts, max_tokens=40)
    assert [answer.token_ids for answer in answers] == alone
    if cached is not None:
        assert [answer.cached_tokens for answer in answers] == [cached] * len(prompts)
    return alone


def test_one_engine_loads_what_another_saved(
    server: Server, start_engine: StartEngine, stateful: Path, plain: Expected
) -> None:
    question = prompt(300)
    first = start_engine(server.endpoint, model=stateful, **DENSELY)
    [answer] = check(first, plain, question, cached=0)
    assert first.stop() == 0
    [namespace] = namespaces(server)
    assert namespace.blocks

    second = start_engine(server.endpoint, model=stateful, options={"cpu_bytes": "32MiB"}, **CACHING)
    check(second, plain, question[:300] + prompt(302, 200), cached=full_blocks(300))
    turn = [*question, *answer, *prompt(301, 50)]
    check(second, plain, turn, cached=539 // BLOCK * BLOCK)  # the answer's last token has not been computed
    second.settle()
    numbers = second.metrics()
    assert (numbers["defects"], numbers["failed_loads"]) == (0, 0)
    assert numbers["hit_tokens/store"] >= full_blocks(300) + 539 // BLOCK * BLOCK - 300
    assert second.stop() == 0


@at_length
def test_by_default_the_states_before_a_prompts_end_are_kept(
    server: Server, start_engine: StartEngine, stateful: Path, plain: Expected
) -> None:
    """By default, an engine keeps the states before a prompt's end, and none of those in the answer."""
    question = prompt(305)
    first = start_engine(server.endpoint, model=stateful, **CACHING)
    [answer] = check(first, plain, question, cached=0)
    assert first.stop() == 0
    second = start_engine(server.endpoint, model=stateful, **CACHING)
    check(second, plain, question[:300] + prompt(306, 200), cached=0)
    check(second, plain, [*question, *answer, *prompt(307, 50)], cached=full_blocks(500))
    second.settle()
    assert second.metrics()["hit_tokens/store"] == full_blocks(500)


@at_length
def test_batches_preemption_and_small_tiers_change_nothing(
    server: Server, start_engine: StartEngine, stateful: Path, plain: Expected
) -> None:
    """A preempted request is computed again in other steps. Short convolutions are skipped, because their tokens depend
    on the steps."""
    if stateful.name == "short-convolutions":
        pytest.skip("its tokens depend on where steps end, without a connector as well")
    engine = start_engine(
        server.endpoint,
        model=stateful,
        options={"cpu_bytes": "6MiB"},
        num_gpu_blocks_override=60,
        max_model_len=512,
        **DENSELY,
    )
    stem = prompt(310, 100)
    prompts = [stem + prompt(seed, 150) for seed in range(311, 315)] + [prompt(seed, 250) for seed in (316, 317)]
    for _ in range(3):
        check(engine, plain, *prompts)
        engine.settle()
        engine.reset_prefix_cache()
    numbers = engine.metrics()
    assert (numbers["defects"], numbers["failed_loads"], numbers["failed_calls"]) == (0, 0, 0)
    assert numbers["hit_tokens/store"] + numbers["hit_tokens/cpu"] > 0


def test_a_prompt_is_handed_over_with_its_states(
    server: Server, start_engine: StartEngine, stateful: Path, plain: Expected
) -> None:
    """Both engines get the prompt at once. The decode side waits for the blocks that the prefill side promises, and
    computes the tokens after the last whole block."""
    prefill = start_engine(server.endpoint, model=stateful, kv_role="kv_producer", **CACHING)
    decode = start_engine(server.endpoint, model=stateful, kv_role="kv_consumer", **CACHING)
    for question in (prompt(330), prompt(331, 10 * BLOCK), prompt(330) + prompt(332, 40)):
        prefill.order_play(Ask(question, 1, side="do_remote_decode"))
        decode.order_play(Ask(question, 40, side="do_remote_prefill"))
        [answer] = decode.result()
        prefill.result()
        assert [answer.token_ids] == plain(question, max_tokens=40)
        assert answer.cached_tokens == full_blocks(len(question))
        decode.reset_prefix_cache()
    for engine in (prefill, decode):
        engine.settle()
        numbers = engine.metrics()
        assert (numbers["defects"], numbers["failed_loads"], numbers["unkept_blocks"]) == (0, 0, 0)
    assert prefill.metrics()["hand_overs/prefill"] == decode.metrics()["hand_overs/decode"] == 3


def test_a_failed_load_is_computed_from_the_beginning(
    server: Server, start_engine: StartEngine, stateful: Path, plain: Expected
) -> None:
    question = prompt(320)
    filler = start_engine(server.endpoint, model=stateful, **CACHING)
    check(filler, plain, question)
    assert filler.stop() == 0
    engine = start_engine(server.endpoint, model=stateful, **CACHING)
    engine.deliver(0)
    for _ in range(2):
        check(engine, plain, question)
    engine.settle()
    assert engine.metrics()["failed_loads"] >= 1 and engine.metrics()["defects"] == 0


def test_an_engine_that_keeps_no_states_is_refused(server: Server, stateful: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    engine = Engine(stateful, log, connector={"endpoint": server.endpoint}, enable_prefix_caching=False, wait=False)
    assert not engine.ready()
    assert "Start the engine with --enable-prefix-caching" in engine.log_text()
