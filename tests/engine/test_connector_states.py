"""Models with a state in some layers: where the engine keeps the state, and which states the connector loads and saves.

vLLM's own scheduler and cache managers run with it; no model is run and no byte is moved (`scheduled_engine`).
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from kvstore_client.vllm.connector.block_groups import BlockGroups, GroupBlock
    from tests.engine.engine_config import PLAIN, cache
    from tests.engine.scheduled_engine import PROMPT, ScheduledEngine, StartEngine
    from tests.engine.scheduled_ranks import BLOCK_TOKENS, STATE

MIXED = (0, STATE)


def table_keys(engine: ScheduledEngine, tokens: range, blocks: int) -> set[bytes]:
    return set(engine.keys(tokens)[0 : 2 * blocks : 2])


def state_key(engine: ScheduledEngine, tokens: range, end: int) -> bytes:
    """Return the key of the states after this many blocks."""
    return engine.keys(tokens)[2 * end - 1]


def store(engine: ScheduledEngine, *ends: int, blocks: int = 5) -> None:
    """Put the prompt's first blocks into the store, and its states after each of these numbers of blocks."""
    for rank in engine.ranks:
        rank.held.update(table_keys(engine, PROMPT, blocks), {state_key(engine, PROMPT, end) for end in ends})


def test_states_are_saved_where_steps_end(start: StartEngine) -> None:
    engine = start(windows=MIXED, budget=BLOCK_TOKENS * 5 // 2)
    engine.add(PROMPT)
    engine.run()
    assert engine.ranks[0].held == table_keys(engine, PROMPT, 5) | {
        state_key(engine, PROMPT, 2),
        state_key(engine, PROMPT, 4),
        state_key(engine, PROMPT, 5),
    }


def test_states_passed_while_decoding_are_saved(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    request = engine.add(PROMPT, max_tokens=40)
    engine.run()
    assert engine.ranks[0].held >= {engine.keys_of(request)[2 * end - 1] for end in (5, 6)}
    assert len(engine.ranks[0].held) == 6 + 2


def test_a_request_that_saves_no_answers_saves_none_of_their_states(start: StartEngine) -> None:
    engine = start(windows=MIXED, save_decode=False)
    engine.add(PROMPT, max_tokens=40)
    engine.run()
    assert engine.ranks[0].held == table_keys(engine, PROMPT, 5) | {state_key(engine, PROMPT, 5)}


def test_only_the_last_state_is_loaded(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    store(engine, 1, 3, 5)
    request = engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert set(load.keys) == table_keys(engine, PROMPT, 5) | {state_key(engine, PROMPT, 5)}
    assert engine.half.loads.hit_sources(request) == (0, 5 * BLOCK_TOKENS)


@pytest.mark.parametrize("states", [(1, 3), (3, 5)])
def test_a_hit_ends_where_there_is_a_state(start: StartEngine, states: tuple[int, ...]) -> None:
    engine = start(windows=MIXED)
    store(engine, *states, blocks=4)
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert set(load.keys) == table_keys(engine, PROMPT, 3) | {state_key(engine, PROMPT, 3)}


def test_without_a_state_nothing_is_loaded_and_it_is_saved(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    store(engine)
    engine.add(PROMPT)
    assert not engine.step().plan.loads
    engine.run()
    assert state_key(engine, PROMPT, 5) in engine.ranks[0].held


def test_a_longer_prompt_continues_from_the_engines_own_state(start: StartEngine) -> None:
    engine = start(windows=MIXED, keep=False)
    longer = range(8 * BLOCK_TOKENS + 3)
    engine.add(range(3 * BLOCK_TOKENS + 1))
    engine.run()
    engine.ranks[0].held.update(table_keys(engine, longer, 8), {state_key(engine, longer, 7)})
    engine.add(longer)
    [load] = engine.step().plan.loads
    others = table_keys(engine, longer, 7) - table_keys(engine, longer, 3)
    assert set(load.keys) == others | {state_key(engine, longer, 7)}


def test_a_model_with_only_states_loads_one_block(start: StartEngine) -> None:
    engine = start(windows=(STATE,), keep=False)
    keys = engine.keys(PROMPT)
    engine.add(PROMPT)
    engine.run()
    assert engine.ranks[0].held == {keys[4]}
    engine.scheduler.reset_prefix_cache()
    request = engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert load.keys == [keys[4]]
    assert engine.half.loads.hit_sources(request) == (0, 5 * BLOCK_TOKENS)


def test_if_a_block_is_missing_the_whole_prompt_is_computed(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    store(engine, 5)
    request = engine.add(PROMPT)
    work = engine.load_in_part(3)
    assert (work.request, work.start) == (request, 0)
    engine.run()
    assert engine.counters.take()["failed_loads"] == 1


def test_states_come_from_the_host_tier(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    engine.fill_tier()
    engine.empty_store()
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert (len(load.host_slots), load.keys) == (6, [])
    engine.run()
    assert engine.ranks[0].held == table_keys(engine, PROMPT, 5) | {state_key(engine, PROMPT, 5)}, "sent again"


def test_a_handed_over_prompt_promises_states_before_its_last_token(start: StartEngine) -> None:
    engine = start(windows=MIXED, keep=False)
    prompt = range(5 * BLOCK_TOKENS)
    promised = table_keys(engine, prompt, 4) | {state_key(engine, prompt, 4)}
    engine.add(prompt, side="do_remote_decode")
    [flight] = engine.flights.open
    assert set(flight.keys) == promised and flight.keys[-1] == state_key(engine, prompt, 4)
    engine.run()
    assert not engine.flights.open and engine.ranks[0].held >= promised
    engine.scheduler.reset_prefix_cache()
    request = engine.add(prompt, side="do_remote_prefill")
    [load] = engine.step().plan.loads
    assert set(load.keys) == promised, "the last token is computed"
    assert not load.waits, "all of it is there"
    assert engine.half.loads.hit_sources(request) == (0, 4 * BLOCK_TOKENS)


@pytest.mark.parametrize("windows", [MIXED, (STATE,)])
@pytest.mark.parametrize("stored", [0, 2, 5])
def test_the_decode_side_waits_for_promised_states(start: StartEngine, windows: tuple[int, ...], stored: int) -> None:
    """The decode side waits for the states even if the store already has all blocks of the other layers."""
    engine = start(windows=windows)
    keys = engine.keys(PROMPT)
    tables = set(keys[0::2]) if windows == MIXED else set()
    engine.ranks[0].held.update(list(keys[0 : 2 * stored : 2]) if windows == MIXED else ())
    engine.flights.others = set(engine.hashes(PROMPT))
    request = engine.add(PROMPT, side="do_remote_prefill")
    [load] = engine.step().plan.loads
    assert load.waits and load.within_s > 5
    assert set(load.keys) == tables | {keys[-1]}
    assert engine.half.loads.hit_sources(request) == (0, 5 * BLOCK_TOKENS)
    engine.ranks[0].held.update(load.keys)
    engine.ranks[0].finish_load()
    engine.step()
    [work] = engine.step().work
    assert work.start == 5 * BLOCK_TOKENS
    engine.run()


def test_promised_states_that_never_come_are_computed(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    engine.flights.others = set(engine.hashes(PROMPT))
    engine.add(PROMPT, side="do_remote_prefill")
    [load] = engine.step().plan.loads
    engine.ranks[0].held.update(table_keys(engine, PROMPT, 5))  # all blocks but the states
    engine.ranks[0].finish_load()
    engine.run()
    assert load.waits and engine.counters.take()["failed_loads"] == 1
    assert state_key(engine, PROMPT, 5) in engine.ranks[0].held, "computed, and saved"


def test_without_states_promised_blocks_are_not_waited_for(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    store(engine, 3, blocks=4)
    engine.flights.others = set(engine.hashes(PROMPT)[:4])  # as if the store had lost the states after the last block
    engine.add(PROMPT, side="do_remote_prefill")
    [load] = engine.step().plan.loads
    assert not load.waits
    assert set(load.keys) == table_keys(engine, PROMPT, 3) | {state_key(engine, PROMPT, 3)}
    engine.run()


def test_the_properties_of_groups_are_detected() -> None:
    state = MambaSpec(32, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = BlockGroups.of(cache(state, groups=2), 32)
    assert (groups.states, groups.tables, groups.whole, groups.windows) == ([0, 1], [], 0, True)
    assert groups.decoded_states and groups.slices == ([], [0, 1])
    drafts = MambaSpec(
        32, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align", num_speculative_blocks=2
    )
    assert not BlockGroups.of(cache(drafts), 32).decoded_states
    assert BlockGroups.of(cache(FullAttentionSpec(**PLAIN), groups=2), 32).slices is None


def test_table_blocks_and_state_blocks_are_distinguished() -> None:
    groups = BlockGroups([0, 0, 96], BLOCK_TOKENS, states={1})
    ids = [[1, 2, 3], [0, 4], [0, 5, 6]]
    assert list(groups.in_tables(ids, [1])) == [GroupBlock(1, 0, 2), GroupBlock(1, 2, 5)]
    assert groups.complete(ids, 1) and not groups.complete(ids, 0)
    assert (groups.table_blocks(ids, 9), groups.table_blocks(ids, 2)) == (3, 2)
    assert groups.stored(3, 1, 3, [1, 2, 3, 4]).tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert groups.stored(3, 1, 4, [3]).tolist() == [[True, False, True], [True] * 3, [True, False, True]]
    present = np.ones((3, 3), dtype=bool)
    present[2, 1] = False
    assert (groups.run(present, 0), groups.run(present, 4)) == (2, 2)
