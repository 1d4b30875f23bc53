"""Caches that are no plain table of one page size, in the real engine: latents (MLA), fp8, drafting models.

What one engine saves, another finds after a restart. The measure is the tokens of an engine without any cache.
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
LATENT_BLOCK = 16  # tokens: what vLLM's kernel on CPUs wants


def tokens_alone(model: Path, log: Path, *prompts: list[int], **arguments: Any) -> list[list[int]]:
    plain = Engine(model, log, connector=None, **{"enable_prefix_caching": False, **arguments})
    answers = [plain.generate(each, max_tokens=40)[0].token_ids for each in prompts]
    plain.stop()
    return answers


def save_and_load(
    server: Server, start_engine: StartEngine, model: Path, expected: list[int], question: list[int], **arguments: Any
) -> dict[str, float]:
    """-> the metrics of the second engine."""
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


def test_latents_are_stored_once_for_engines_of_any_size(
    server: Server, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Only first tokens are compared: vLLM's MLA on CPUs takes no prefixes of its own (it turns prefix caching off),
    and adds up in another way behind one. But they depend on every token of the prompt, and with random weights like
    these an engine of two ranks that computes the prompt itself begins with another one.
    """
    model = save_latent(tmp_path / "latent")
    prompts = [prompt(seed) for seed in (400, 401)]
    hit = 499 // LATENT_BLOCK * LATENT_BLOCK
    first_tokens = set()
    for shape, asked, cached in (({}, 1, [0]), ({}, 1, [hit]), (TWO_RANKS, 2, [hit, 0])):
        engine = start_engine(server.endpoint, model=model, **{"enable_prefix_caching": False, **shape})
        answers = [engine.generate(each, max_tokens=8)[0] for each in prompts[:asked]]
        first_tokens.add(answers[0].token_ids[0])
        assert [answer.cached_tokens for answer in answers] == cached
        wait_until(
            lambda asked=asked: namespaces(server)[0].blocks == asked * (507 // LATENT_BLOCK), what="all is saved"
        )
        assert engine.stop() == 0
    assert len(first_tokens) == 1
    [namespace] = namespaces(server)
    assert namespace.created == namespace.blocks, "each block was sent once"


def test_blocks_of_a_drafting_model_belong_to_those_of_its_target(
    server: Server, start_engine: StartEngine, expected: Expected, model: Path, tmp_path: Path
) -> None:
    """It has smaller pages."""
    question = prompt(410)
    draft = {"method": "draft_model", "model": str(save_draft(tmp_path / "draft")), "num_speculative_tokens": 3}
    [tokens] = expected(question, max_tokens=40)
    save_and_load(server, start_engine, model, tokens, question, speculative_config=draft)
    [namespace] = namespaces(server)
    assert namespace.block_bytes == BLOCK_BYTES + 2 * BLOCK_BYTES // 16, "two layers more, of half as many heads"


@at_length
def test_blocks_of_an_eagle_head_belong_to_those_of_its_target(
    server: Server, start_engine: StartEngine, tmp_path: Path
) -> None:
    model = save_windowed_model(tmp_path / "llama", 3 * BLOCK)
    head = {"method": "eagle", "model": str(save_eagle(tmp_path / "head")), "num_speculative_tokens": 2}
    question = prompt(420)
    [expected] = tokens_alone(model, tmp_path / "plain.log", question)
    save_and_load(server, start_engine, model, expected, question, speculative_config=head)


@at_length
def test_fp8_caches_are_copied_as_they_are(
    server: Server, start_engine: StartEngine, model: Path, tmp_path: Path
) -> None:
    question = prompt(430)
    fp8 = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    [expected] = tokens_alone(model, tmp_path / "plain.log", question, **fp8)
    save_and_load(server, start_engine, model, expected, question, **fp8)
