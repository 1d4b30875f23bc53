"""The real engine against the real server. The measure is always the same: the token ids of an engine that computed
everything itself; ``cached_tokens`` says that this one did not."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from engines import Engine
from harness import Server, wait_until

from kvstore_client import KVStoreClient, Namespace

Expected: TypeAlias = Callable[..., list[list[int]]]
StartEngine: TypeAlias = Callable[..., Engine]


BLOCK = 32


def prompt(seed: int, tokens: int = 500) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(4096) for _ in range(tokens)]


def full_blocks(tokens: int) -> int:
    """Tokens of a prompt of this length that can come from a cache: whole blocks, never the last token."""
    return (tokens - 1) // BLOCK * BLOCK


def test_a_second_engine_loads_what_the_first_saved(
    server: Server, start_engine: StartEngine, expected: Expected, model: Path, tmp_path: Path
) -> None:
    question = prompt(1)
    first = start_engine(server.endpoint)
    [computed] = first.generate(question, max_tokens=70)
    assert [computed.token_ids] == expected(question, max_tokens=70)
    assert computed.cached_tokens == 0
    assert first.stop() == 0

    # The same weights in another place are the same model.
    second = start_engine(server.endpoint, model=shutil.copytree(model, tmp_path / "elsewhere"))
    # A prefix in common with the first engine's prompt is loaded as far as it goes.
    branch = question[:300] + prompt(2, 200)
    [answer] = second.generate(branch)
    assert answer.cached_tokens == full_blocks(300)
    assert [answer.token_ids] == expected(branch)
    # The rest of it joins what is now in the engine's own cache; two requests want it at once.
    twins = [question, question]
    answers = second.generate(*twins)
    assert [answer.cached_tokens for answer in answers] == [full_blocks(500)] * 2
    assert [answer.token_ids for answer in answers] == expected(*twins)
    # Generated tokens were saved too: the next turn of the conversation starts where the answer ended.
    turn = question + computed.token_ids + prompt(3, 50)
    [answer] = second.generate(turn)
    assert answer.cached_tokens >= full_blocks(500 + 70 - 1)
    assert [answer.token_ids] == expected(turn)
    # A prompt of whole blocks leaves its last one to compute.
    aligned = question[: 10 * BLOCK]
    [answer] = second.generate(aligned)
    assert answer.cached_tokens == 9 * BLOCK
    assert [answer.token_ids] == expected(aligned)


def test_the_store_replaces_the_engines_own_cache_with_small_chunks_and_preemption(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    engine = start_engine(
        server.endpoint,
        enable_prefix_caching=False,
        max_num_batched_tokens=96,  # a prompt is computed in pieces that do not end at blocks
        num_gpu_blocks_override=40,  # not enough for all, so some are preempted and come back
        max_model_len=512,
    )
    prompts = [prompt(seed, 250) for seed in range(10, 16)]
    tokens = expected(*prompts, max_tokens=60)
    filling = engine.generate(*prompts, max_tokens=60)
    assert [answer.token_ids for answer in filling] == tokens
    assert sum(answer.preemptions for answer in filling) > 0
    reading = engine.generate(*prompts, max_tokens=60)
    assert [answer.token_ids for answer in reading] == tokens
    assert [answer.cached_tokens for answer in reading] == [full_blocks(250)] * len(prompts)


def test_blocks_that_do_not_arrive_are_computed(server: Server, start_engine: StartEngine, expected: Expected) -> None:
    question, other = prompt(20), prompt(21)
    filler = start_engine(server.endpoint)
    filler.generate(question, other)
    filler.stop()

    engine = start_engine(server.endpoint, deliver=4)
    assert [answer.token_ids for answer in engine.generate(question, other)] == expected(question, other)
    # What was computed in their place went into the engine's own cache, and only right blocks into the store.
    assert [answer.token_ids for answer in engine.generate(question, other)] == expected(question, other)
    assert "Recovered from KV load failure" in engine.log_text()
    engine.stop()
    none = start_engine(server.endpoint, deliver=0)
    longer = question + prompt(22, 100)
    assert [answer.token_ids for answer in none.generate(longer, other)] == expected(longer, other)


def until_it_hits(engine: Engine, question: list[int]) -> None:
    """Ask until the answer comes from the store."""
    wait_until(lambda: engine.generate(question)[0].cached_tokens, 60, "the engine uses the store again")


def stored_blocks(server: Server) -> int:
    """Blocks of all namespaces."""
    nobody = Namespace(model="nobody", dtype="uint8", block_tokens=1, block_bytes=1)
    with KVStoreClient(server.endpoint, nobody) as client:
        return sum(namespace.blocks for shard in client.info().shards for namespace in shard.namespaces)


def test_a_server_that_stalls_or_dies_costs_hits_and_nothing_else(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    prompts = [prompt(seed) for seed in range(30, 38)]
    tokens = expected(*prompts)
    engine = start_engine(
        server.endpoint,
        options={"timeout_s": 1, "lookup_timeout_s": 0.5},
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
    )
    filling = engine.generate(*prompts[:4])
    assert [answer.token_ids for answer in filling] == tokens[:4]

    with server.stopped():
        started = time.monotonic()
        assert [answer.token_ids for answer in engine.generate(*prompts[:4])] == tokens[:4]
        assert time.monotonic() - started < 15
    until_it_hits(engine, prompts[0])

    before = stored_blocks(server)
    engine.order(*prompts)
    wait_until(lambda: stored_blocks(server) > before, what="the engine saves")
    server.kill()  # after the engine saved a part of the first new prompt, before all the others
    assert [answer.token_ids for answer in engine.answers()] == tokens
    # Dead for good: what is asked now is computed, and the engine does not wait for the store every time.
    started = time.monotonic()
    assert [answer.token_ids for answer in engine.generate(*prompts)] == tokens
    assert time.monotonic() - started < 30
    # A server that comes back, empty, is filled and used again without a restart of the engine.
    server.restart()
    until_it_hits(engine, prompts[0])
    assert [answer.token_ids for answer in engine.generate(*prompts)] == tokens


def test_an_engine_starts_and_serves_without_its_server(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    server.kill()
    engine = start_engine(server.endpoint)
    question = prompt(40)
    [answer] = engine.generate(question)
    assert (answer.token_ids, answer.cached_tokens) == (expected(question)[0], 0)
    assert engine.stop() == 0
    assert "counted as a miss" in engine.log_text()


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


@pytest.mark.timeout(240)
def test_two_ranks_in_processes_of_their_own_each_store_their_part(
    server: Server, start_engine: StartEngine, expected: Expected
) -> None:
    engine = start_engine(
        server.endpoint,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # the engine's core, too
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    question = prompt(60)
    [computed] = engine.generate(question)
    [loaded] = engine.generate(question)
    assert (computed.cached_tokens, loaded.cached_tokens) == (0, full_blocks(500))
    assert computed.token_ids == loaded.token_ids


def test_block_hashes_that_no_other_process_has_stop_the_engine(start_engine: StartEngine) -> None:
    engine = start_engine("tcp://127.0.0.1:7070", prefix_caching_hash_algo="xxhash", wait=False)
    assert not engine.ready()
    assert engine.stop() == 1
    assert "Set --prefix-caching-hash-algo sha256" in engine.log_text()


def test_an_unknown_option_stops_the_engine_and_names_the_valid_ones(start_engine: StartEngine) -> None:
    engine = start_engine("tcp://127.0.0.1:7070", options={"time_out_s": 1}, wait=False)
    assert not engine.ready()
    assert engine.stop() == 1
    said = engine.log_text()
    assert "unknown option 'time_out_s'; did you mean 'timeout_s'?" in said
    assert "Valid options: endpoint, cpu_bytes, timeout_s, lookup_timeout_s, min_hit_tokens, tenant" in said
