"""KV caches other than a plain table of pages of one size, in the real engine: latents (MLA), fp8, draft models.

Blocks that one engine saves are found by another after a restart. The expected tokens come from an engine without any
cache.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import (
    BLOCK,
    BLOCK_BYTES,
    Engine,
    Expected,
    StartEngine,
    full_blocks,
    namespaces,
    prompt,
    save_windowed_model,
)
from tests.engine.models import save_draft, save_eagle, save_latent
from tests.engine.test_engine_shapes import TWO_RANKS
from tests.support.harness import Server, wait_until

at_length = pytest.mark.skipif("KVSTORE_LAYOUTS" not in os.environ, reason="make layouts runs it")
LATENT_BLOCK = 16  # tokens per block, as vLLM's kernel on CPUs requires
# CPU_MLA is the kernel that accepts the models of these tests: the other one, with AMX, takes no float32.
LATENT: dict[str, Any] = {"enable_prefix_caching": False, "attention_backend": "CPU_MLA"}


def tokens_alone(model: Path, log: Path, *prompts: list[int], **arguments: Any) -> list[list[int]]:
    plain = Engine(model, log, connector=None, **{"enable_prefix_caching": False, **arguments})
    answers = [plain.generate(each, max_tokens=40)[0].token_ids for each in prompts]
    plain.stop()
    return answers


def save_and_load(
    server: Server, start_engine: StartEngine, model: Path, expected: list[int], question: list[int], **arguments: Any
) -> dict[str, float]:
    """Save a prompt's blocks with one engine, and load them with another. Returns the second engine's metrics."""
    first = start_engine(server.endpoint, model=model, **arguments)
    [answer] = first.generate(question, max_tokens=40)
    assert (answer.token_ids, answer.cached_tokens) == (expected, 0)
    assert first.stop() == 0
    second = start_engine(server.endpoint, model=model, **arguments)
    [answer] = second.generate(question, max_tokens=40)
    assert (answer.token_ids, answer.cached_tokens) == (expected, full_blocks(len(question)))
    second.settle()
    numbers = second.metrics()
    assert (numbers["defects"], numbers["failed_loads"]) == (0, 0)
    assert numbers["hit_tokens/store"] == full_blocks(len(question))
    assert second.stop() == 0
    return numbers


def test_latents_are_stored_and_read_once_for_all_ranks(
    server: Server, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Only the first tokens of answers are compared. vLLM turns prefix caching off for MLA on CPUs, and after a loaded
    prefix its sums differ slightly. The first token depends on every token of the prompt. With these random weights, an
    engine of two ranks that computes the prompt itself answers with another first token.

    The host pool of the two ranks has 40 slots. The long prompt needs more than half of them, so its blocks are loaded
    but not kept there.
    """
    model = save_latent(tmp_path / "latent")
    long, short, new = prompt(400), prompt(400)[:200], prompt(401)[:64]
    slots, all_of, some, of_new = 40, 499 // LATENT_BLOCK, 199 // LATENT_BLOCK, 71 // LATENT_BLOCK
    first_tokens: dict[int, set[int]] = {len(long): set(), len(short): set()}

    def ask(engine: Engine, question: list[int], blocks: int) -> None:
        [answer] = engine.generate(question, max_tokens=8)
        assert answer.cached_tokens == blocks * LATENT_BLOCK
        if question is not new:
            first_tokens[len(question)].add(answer.token_ids[0])

    def saved(engine: Engine, blocks: int) -> None:
        if engine.has_core:
            engine.settle()
        wait_until(lambda: [each.blocks for each in namespaces(server)] == [blocks], what="all is saved")

    writer = start_engine(server.endpoint, model=model, **LATENT)
    ask(writer, long, 0)
    saved(writer, 507 // LATENT_BLOCK)
    assert writer.stop() == 0
    alone = start_engine(server.endpoint, model=model, **LATENT)
    ask(alone, long, all_of)
    ask(alone, short, some)
    assert alone.stop() == 0
    block_bytes = namespaces(server)[0].block_bytes
    both = start_engine(
        server.endpoint, model=model, options={"cpu_bytes": slots * block_bytes}, **{**LATENT, **TWO_RANKS}
    )
    assert f"host memory of these 2 ranks together: {slots} blocks" in both.log_text()
    ask(both, long, all_of)
    ask(both, new, 0)
    saved(both, 507 // LATENT_BLOCK + of_new)
    ask(both, short, some)
    ask(both, short, some)

    def counted() -> bool:
        both.generate([0], max_tokens=1)
        numbers = both.metrics()
        assert (numbers["defects"], numbers["failed_loads"]) == (0, 0), both.log_text()[-8000:]
        assert numbers["transfer_blocks/in"] <= all_of + some, "each block is read once, not by each rank"
        return (
            numbers["transfer_blocks/in"] == all_of + some
            and numbers["swap_blocks/in"] == 2 * (all_of + 2 * some)
            and numbers["swap_blocks/out"] == of_new
            and numbers["hit_tokens/cpu"] == some * LATENT_BLOCK
        )

    wait_until(counted, what="the metrics of both ranks say it")
    assert both.stop() == 0
    assert [len(tokens) for tokens in first_tokens.values()] == [1, 1]
    [namespace] = namespaces(server)
    assert namespace.created == namespace.blocks, "each block was sent once"


def test_a_draft_models_blocks_belong_to_its_targets(
    server: Server, start_engine: StartEngine, expected: Expected, model: Path, tmp_path: Path
) -> None:
    """The pages of the draft model are smaller than those of its target."""
    question = prompt(410)
    draft = {"method": "draft_model", "model": str(save_draft(tmp_path / "draft")), "num_speculative_tokens": 3}
    [tokens] = expected(question, max_tokens=40)
    save_and_load(server, start_engine, model, tokens, question, speculative_config=draft)
    [namespace] = namespaces(server)
    assert namespace.block_bytes == BLOCK_BYTES + BLOCK_BYTES // 4, "two layers more, of half as many heads"


@at_length
def test_an_eagle_heads_blocks_belong_to_its_targets(server: Server, start_engine: StartEngine, tmp_path: Path) -> None:
    model = save_windowed_model(tmp_path / "llama", 3 * BLOCK)
    head = {"method": "eagle", "model": str(save_eagle(tmp_path / "head")), "num_speculative_tokens": 2}
    question = prompt(420)
    [expected] = tokens_alone(model, tmp_path / "plain.log", question)
    save_and_load(server, start_engine, model, expected, question, speculative_config=head)


@at_length
def test_fp8_caches_are_copied_unchanged(
    server: Server, start_engine: StartEngine, model: Path, tmp_path: Path
) -> None:
    question = prompt(430)
    fp8 = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    [expected] = tokens_alone(model, tmp_path / "plain.log", question, **fp8)
    save_and_load(server, start_engine, model, expected, question, **fp8)
