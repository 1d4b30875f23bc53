"""A model with a sliding window in some layers, in the real engine with its hybrid cache manager.

The expected tokens come from an engine without any cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import (
    BLOCK,
    BLOCK_BYTES,
    Engine,
    Expected,
    StartEngine,
    answers_alone,
    full_blocks,
    namespaces,
    prompt,
    save_windowed_model,
    stored_blocks,
)
from tests.support.harness import Server

WINDOW = 3 * BLOCK
GROUPS = 2


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_windowed_model(tmp_path_factory.mktemp("model") / "windowed", WINDOW)


@pytest.fixture(scope="module")
def plain(windowed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    engine = Engine(
        windowed, tmp_path_factory.mktemp("plain") / "engine.log", connector=None, enable_prefix_caching=False
    )
    yield answers_alone(engine)
    engine.stop()


def check(engine: Engine, plain: Expected, *prompts: list[int], cached: int | None = None) -> None:
    answers = engine.generate(*prompts, max_tokens=40)
    assert [answer.token_ids for answer in answers] == plain(*prompts, max_tokens=40)
    if cached is not None:
        assert [answer.cached_tokens for answer in answers] == [cached] * len(prompts)


@pytest.mark.parametrize("parts", [1, 2])
def test_one_engine_loads_what_another_saved(
    server: Server, start_engine: StartEngine, windowed: Path, plain: Expected, parts: int
) -> None:
    question, options = prompt(200), {"layer_parts": parts}
    first = start_engine(
        server.endpoint, model=windowed, options=options, max_num_batched_tokens=80, max_model_len=1024
    )
    before = stored_blocks(server)
    check(first, plain, question, cached=0)
    assert first.stop() == 0
    assert stored_blocks(server) - before == parts * GROUPS * (539 // BLOCK)
    [namespace] = namespaces(server)
    assert namespace.block_bytes == BLOCK_BYTES // 2 // parts, "a block has the layers of one group"

    second = start_engine(server.endpoint, model=windowed, options=options)
    check(second, plain, question[:300] + prompt(201, 200), cached=full_blocks(300))
    check(second, plain, question, question, cached=full_blocks(500))
    second.settle()
    numbers = second.metrics()
    assert (numbers["defects"], numbers["failed_loads"]) == (0, 0)
    # There are two loads, because the last two requests share one. For the layers with a window, a load has only the
    # blocks of the window.
    assert numbers["transfer_blocks/in"] == numbers["hit_tokens/store"] // BLOCK + 2 * (WINDOW // BLOCK)


@pytest.mark.parametrize("cpu_bytes", [0, 16 * BLOCK_BYTES])
def test_chunks_preemption_and_small_tiers_change_nothing(
    server: Server, start_engine: StartEngine, windowed: Path, plain: Expected, cpu_bytes: int
) -> None:
    engine = start_engine(
        server.endpoint,
        model=windowed,
        options={"cpu_bytes": cpu_bytes},
        max_num_batched_tokens=80,
        num_gpu_blocks_override=50,
        max_model_len=512,
    )
    stem = prompt(210, 100)
    prompts = [stem + prompt(seed, 150) for seed in range(211, 215)] + [prompt(seed, 250) for seed in (216, 217)]
    for _ in range(3):
        check(engine, plain, *prompts)
    engine.settle()
    numbers = engine.metrics()
    assert (numbers["defects"], numbers["failed_loads"], numbers["failed_calls"]) == (0, 0, 0)
    assert numbers["hit_tokens/store"] > 0


def test_a_failed_load_is_computed_from_the_beginning(
    server: Server, start_engine: StartEngine, windowed: Path, plain: Expected
) -> None:
    question = prompt(220)
    filler = start_engine(server.endpoint, model=windowed)
    check(filler, plain, question)
    assert filler.stop() == 0
    engine = start_engine(server.endpoint, model=windowed, enable_prefix_caching=False)
    engine.deliver(4)
    for _ in range(2):
        check(engine, plain, question)
    engine.settle()
    assert engine.metrics()["failed_loads"] >= 1 and engine.metrics()["defects"] == 0
