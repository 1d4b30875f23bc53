"""Models with a sliding window in some layers: which blocks of each kind the connector loads and saves.

vLLM's own scheduler and hybrid cache manager run with it; no model is run and no byte is moved (`scheduled_engine`).
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kvstore_client.vllm.connector.block_groups import BlockGroups, GroupBlock, groups_digest
    from tests.engine.engine_config import PLAIN, cache
    from tests.engine.scheduled_engine import PROMPT, ScheduledEngine, StartEngine
    from tests.engine.scheduled_ranks import BLOCK_TOKENS

WINDOW = 2 * BLOCK_TOKENS + 1  # the two blocks before the one being computed
MIXED = (0, WINDOW)


def store(engine: ScheduledEngine, tokens: range = PROMPT) -> list[bytes]:
    """Put all blocks of these tokens into the store. Returns their keys, block by block."""
    keys = engine.keys(tokens)
    for rank in engine.ranks:
        rank.held.update(keys)
    return keys


def test_window_layers_load_only_the_window(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    keys = store(engine)
    request = engine.add(PROMPT)
    [load] = engine.step().plan.loads
    whole, window = engine.block_ids_by_group(request.request_id)
    assert load.keys == [keys[0], keys[2], keys[4], keys[6], keys[7], keys[8], keys[9]]
    assert load.block_ids == [*whole[:4], window[3], whole[4], window[4]]
    assert window[:3] == [0, 0, 0]
    assert engine.half.loads.hit_sources(request) == (0, 5 * BLOCK_TOKENS)


def test_a_model_with_only_windows_loads_the_window(start: StartEngine) -> None:
    engine = start(windows=(WINDOW,))
    keys = store(engine)
    assert len(keys) == 5
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert load.keys == keys[3:]


def test_a_block_missing_in_any_group_ends_the_hit(start: StartEngine) -> None:
    engine = start(windows=(0, WINDOW, WINDOW))
    keys = store(engine)
    for rank in engine.ranks:
        rank.held.remove(keys[3 * 3 + 1])
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert {key[:-1] for key in load.keys} == {key[:-1] for key in keys[: 3 * 3]}


@pytest.mark.parametrize("windows", [MIXED, (WINDOW,)])
def test_if_a_block_is_missing_the_whole_prompt_is_computed(start: StartEngine, windows: tuple[int, ...]) -> None:
    engine = start(windows=windows, prefix_cache=False)
    store(engine)
    request = engine.add(PROMPT)
    work = engine.load_in_part(1)
    assert (work.request, work.start) == (request, 0)
    engine.run()
    assert engine.counters.take()["failed_loads"] == 1


def test_blocks_of_all_groups_are_saved_before_the_window_moves(start: StartEngine) -> None:
    """A step computes one and a half blocks. The engine reuses blocks that the window has passed while the prompt
    continues."""
    engine = start(windows=MIXED, budget=BLOCK_TOKENS * 3 // 2, blocks=14)
    engine.add(PROMPT)
    engine.run()
    assert engine.ranks[0].held == set(engine.keys(PROMPT))


def test_copies_end_before_blocks_behind_the_window_are_reused(start: StartEngine) -> None:
    engine = start(windows=MIXED, budget=BLOCK_TOKENS)
    engine.add(PROMPT)
    assert engine.step().plan.reusing
    plain = start()
    plain.add(PROMPT)
    assert not plain.step().plan.reusing


def test_blocks_in_the_host_tier_are_loaded_from_there_in_each_group(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    engine.fill_tier()
    engine.empty_store()
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert (len(load.host_slots), load.keys) == (7, [])


def test_loaded_blocks_stay_in_the_host_tier_as_far_as_needed(start: StartEngine) -> None:
    """The tier never gets the blocks that the window has passed, and does not need them."""
    engine = start(windows=MIXED)
    store(engine)
    engine.fill_tier()
    engine.lookups.answering = False
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert (len(load.host_slots), load.keys) == (7, [])


@pytest.mark.parametrize("keep", [True, False])
def test_a_hole_in_the_store_is_filled_without_useless_copies(start: StartEngine, keep: bool) -> None:
    """The engine's own cache has the prefix; for the layers with a window it has only the prefix's end."""
    engine = start(windows=MIXED, keep=keep)
    engine.add(PROMPT)
    engine.run()
    keys = engine.keys(PROMPT)
    engine.empty_store()
    engine.add(range(6 * BLOCK_TOKENS + 3))
    engine.run()
    again = engine.ranks[0].held
    if keep:
        assert again >= set(keys), "the tier has them all"
    else:
        assert not again & set(keys[:6]), "they would be of no use"


def test_a_request_waits_for_a_load_of_its_own_prefixs_end(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    store(engine)
    store(engine, range(3 * BLOCK_TOKENS))
    for tokens in (PROMPT, PROMPT, range(3 * BLOCK_TOKENS + 1)):
        engine.add(tokens)
    loads = engine.step().plan.loads
    assert sorted(len(load.keys) for load in loads) == [3 + 2, 5 + 2]


def test_after_new_weights_no_group_finds_older_blocks(start: StartEngine) -> None:
    engine = start(windows=MIXED, checks=True)
    store(engine)
    engine.lookups.answering = False
    request = engine.add(PROMPT)
    engine.step()  # the request waits for an answer; its keys are known
    assert engine.change_weights("step-1")
    engine.step()  # the rank reports in this step
    engine.lookups.answering = True
    assert not engine.step().plan.loads
    before = set(engine.keys(PROMPT))
    assert before.isdisjoint(engine.groups.keys_of(request, engine.half.state.keys.of(request)))


def test_the_longest_hit_includes_its_window() -> None:
    groups = BlockGroups([0, WINDOW], BLOCK_TOKENS)
    yes, no = True, False

    def run(*window: bool, local: int = 0, full: int = 6) -> int:
        present = np.array([[index < full, there] for index, there in enumerate(window)], dtype=bool).reshape(-1, 2)
        return groups.run(present, local)

    assert run(yes, yes, yes, yes, yes, yes) == 6
    assert run(no, no, no, no, yes, yes) == 6
    assert run(no, no, no, no, no, yes) == 0
    assert run(no, no, no, no, no, yes, local=9) == 0
    assert run(yes, yes, no, no, no, yes) == 2
    assert run(yes, no, yes, yes, no, no) == 4
    assert run(no, yes, yes, no, no, no, full=2) == 0
    assert run() == 0
    present = np.array([[True, False], [True, False], [False, True], [True, True]])
    assert groups.needed(present, 0, 4).tolist() == [True, True, False, True]
    assert groups.needed(present, 0, 3).tolist() == [True, False, False]


def test_block_positions_skip_those_behind_the_window() -> None:
    groups = BlockGroups([64, 0], BLOCK_TOKENS)
    assert (groups.last, groups.whole, groups.recompute_whole) == (0, 1, True)
    assert list(groups.places([[0, 0, 7], [4, 5, 6]], [1, 2])) == [
        GroupBlock(1, 1, 5),
        GroupBlock(2, 0, 7),
        GroupBlock(2, 1, 6),
    ]
    assert groups.complete([[0, 0, 7], [4, 5, 6]], 2) and not groups.complete([[0, 0, 7], [4, 5, 6]], 1)
    assert groups.keys([b"a", b"b"]) == [b"a\x00", b"a\x01", b"b\x00", b"b\x01"]
    plain = BlockGroups([0], BLOCK_TOKENS)
    assert plain.keys([b"a"]) == [b"a"] and not plain.recompute_whole


def test_a_models_groups_are_part_of_its_namespace() -> None:
    one, two = cache(FullAttentionSpec(**PLAIN)), cache(SlidingWindowSpec(**PLAIN, sliding_window=64), groups=2)
    assert groups_digest(one) == "" and groups_digest(two).startswith("2-")
    assert BlockGroups.of(two, 32).count == 2 and BlockGroups.of(two, 32).windows
    assert not BlockGroups.of(one, 32).windows
