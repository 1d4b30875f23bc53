"""The connector's decisions: which blocks it loads and from where, which it saves, and which it holds in the meantime.

vLLM's own scheduler runs with it; no model is run and no byte is moved (`scheduled_engine`).
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm.v1.request import Request, RequestStatus

    from kvstore_client.engine.admission import Admission
    from kvstore_client.engine.lookup import LOOKUP_PIN_S
    from kvstore_client.engine.transfer_out import SendAs
    from kvstore_client.vllm.connector import block_keys
    from kvstore_client.vllm.connector.load_planner import RENEW_PIN_S
    from kvstore_client.vllm.shared.request_inputs import RequestInputs
    from tests.engine.scheduled_engine import PROMPT, ScheduledEngine, StartEngine
    from tests.engine.scheduled_ranks import BLOCK_TOKENS, STATE


def store(engine: ScheduledEngine, tokens: range, blocks: int, *ranks: int) -> None:
    """Put the first blocks of these tokens into the store, on some or on all ranks."""
    for number in ranks or range(len(engine.ranks)):
        engine.ranks[number].held.update(engine.keys(tokens)[:blocks])


def matched(engine: ScheduledEngine, tokens: range = PROMPT, local: int = 0) -> int | None:
    """Return how many blocks a request of these tokens can load, in addition to the ``local`` ones in the engine's own
    cache. Aborts the request."""
    request = engine.add(tokens)
    found = engine.half.loads.matched_tokens(request, local * BLOCK_TOKENS)
    engine.abort(request)
    return found if found is None else found // BLOCK_TOKENS


def saved_blocks(engine: ScheduledEngine, request: Request, saves: Any) -> list[int]:
    """Return the positions of the request's blocks that a plan copies out of the cache."""
    return [] if saves is None else [list(engine.keys_of(request)).index(block.key) for block in saves.copied]


def lose(engine: ScheduledEngine, *keys: bytes) -> None:
    """Remove these blocks from the host tier."""
    engine.tier.drop(engine.tier.find(keys).tolist())
    engine.half.state.events.evicted(keys)


# ---- what a request may load -----------------------------------------------------------------------------------------


def test_a_hit_is_what_every_rank_has(start: StartEngine) -> None:
    engine = start(ranks=3)
    for rank, blocks in enumerate((5, 3, 4)):
        store(engine, PROMPT, blocks, rank)
    assert matched(engine) == 3


def test_a_full_hit_leaves_the_last_token_to_compute(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    assert matched(engine, range(4 * BLOCK_TOKENS)) == 3
    assert matched(engine, range(4 * BLOCK_TOKENS + 1)) == 4


def test_blocks_that_the_engine_has_are_not_loaded(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 4)
    assert matched(engine, local=2) == 2
    assert matched(engine, local=4) == 0
    assert matched(engine, local=5) == 0


def test_lookups_cover_the_whole_chain_including_the_engines_blocks(start: StartEngine) -> None:
    """The lookup also marks the blocks that the engine has as used, so that the store does not evict a chain's head
    before its tail."""
    engine = start()
    matched(engine, local=2)
    assert engine.lookups.asked == [engine.keys(PROMPT)]


def test_a_lookup_starts_as_soon_as_a_request_arrives(start: StartEngine) -> None:
    """The lookup does not wait until the engine has room for the request, which may take long."""
    engine = start()
    request = engine.add(PROMPT)
    assert engine.lookups.asked == [engine.keys(PROMPT)]
    engine.abort(request)


def test_an_old_answer_holds_until_the_new_one_arrives(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 3)
    engine.lookups.asked_at = time.monotonic() - 2 * RENEW_PIN_S
    request = engine.add(PROMPT)
    engine.lookups.answering = False
    store(engine, PROMPT, 5)
    for _ in range(3):
        assert engine.half.loads.matched_tokens(request, 0) == 3 * BLOCK_TOKENS
    assert len(engine.lookups.asked) == 2
    engine.lookups.answering, engine.lookups.asked_at = True, math.inf
    assert engine.half.loads.matched_tokens(request, 0) == 5 * BLOCK_TOKENS
    engine.abort(request)


def test_an_answer_older_than_its_pins_is_requested_again(start: StartEngine) -> None:
    """Blocks that the lookup found may have been evicted since then, and missing ones may be stored by now."""
    engine = start()
    store(engine, PROMPT, 3)
    engine.lookups.asked_at = time.monotonic() - 2 * LOOKUP_PIN_S
    request = engine.add(PROMPT)
    engine.lookups.answering, engine.lookups.asked_at = False, math.inf
    assert engine.half.loads.matched_tokens(request, 0) is None
    store(engine, PROMPT, 5)
    engine.lookups.answering = True
    assert engine.half.loads.matched_tokens(request, 0) == 5 * BLOCK_TOKENS
    engine.abort(request)


def test_late_loads_are_computed_instead_but_host_memory_is_always_loaded(start: StartEngine) -> None:
    admission = Admission(timeout_s=5)
    engine = start(keep=True, admission=admission)
    admission.arriving.add(1, 1.0)
    engine.half.loads.computing.add([(0, 10**6)], 1.0)
    admission.begin(0, 0.0)
    admission.end(0)
    store(engine, PROMPT, 5)
    assert matched(engine) == 0
    assert "declined_tokens" not in engine.counters.take(), "it may be asked often before it has room"
    engine.fill_tier(PROMPT[: 2 * BLOCK_TOKENS])
    assert matched(engine) == 2
    engine.counters.take()
    engine.add(PROMPT)
    engine.step()
    assert engine.counters.take()["declined_tokens"] == 3 * BLOCK_TOKENS
    engine.run()
    engine.scheduler.reset_prefix_cache()
    lose(engine, *engine.keys(PROMPT))
    admission.arriving.add(1e9, 1.0)
    assert matched(engine) == 5


def test_with_a_too_slow_store_requests_do_not_wait_even_for_lookups(start: StartEngine) -> None:
    admission = Admission(timeout_s=5)
    engine = start(admission=admission)
    store(engine, PROMPT, 5)
    engine.half.loads.computing.add([(0, 10**6)], 1.0)
    engine.lookups.answering = False
    assert matched(engine) is None, "it may be fast"
    admission.arriving.add(1, 1.0)
    admission.begin(0, 0.0)
    admission.end(0)
    engine.lookups.asked_at = time.monotonic()
    requests = [engine.add([number, *PROMPT], max_tokens=40) for number in (101, 102, 103)]
    step = engine.step()
    assert set(step.output.num_scheduled_tokens) == {each.request_id for each in requests} and not step.plan.loads
    engine.run()
    expected = engine.add(PROMPT, side="do_remote_prefill")
    assert engine.half.loads.matched_tokens(expected, 0) is None, "what another engine computes is waited for"
    engine.abort(expected)


def test_blocks_computed_before_a_late_answer_are_counted_and_not_saved(start: StartEngine) -> None:
    admission = Admission(timeout_s=5)
    engine = start(admission=admission, keep=False, budget=2 * BLOCK_TOKENS)
    admission.arriving.add(1, 1.0)
    admission.begin(0, 0.0)
    admission.end(0)
    engine.half.loads.computing.add([(0, 10**6)], 1.0)
    store(engine, PROMPT, 4)
    engine.lookups.answering, engine.lookups.asked_at = False, time.monotonic()
    request = engine.add(PROMPT)
    assert saved_blocks(engine, request, engine.step().plan.saves) == [0, 1], "it may be that the store lacks them"
    engine.lookups.answering = True
    assert engine.step().plan.saves is None
    assert saved_blocks(engine, request, engine.step().plan.saves) == [4]
    assert engine.counters.take()["declined_tokens"] == 4 * BLOCK_TOKENS


def test_a_load_may_take_longer_while_other_prompts_are_computed(start: StartEngine) -> None:
    admission = Admission(timeout_s=5)
    engine = start(admission=admission, budget=2 * BLOCK_TOKENS)
    admission.arriving.add(100, 1.0)
    admission.begin(0, 0.0)
    admission.end(0)
    engine.half.loads.computing.add([(0, 200 * BLOCK_TOKENS)], 1.0)
    store(engine, PROMPT, 5)
    assert matched(engine) == 0, "to compute them takes half as long"
    other = engine.add([7] * 20 * BLOCK_TOKENS)
    engine.step()
    assert matched(engine) == 5, "18 blocks before them"
    loads = engine.half.loads
    before_s = loads.work.before_s(engine.add(PROMPT))
    assert before_s == pytest.approx(18 / 200)
    assert loads.work.before_s(other) == 0


@pytest.mark.parametrize("before", [0, 1])
def test_a_load_is_dropped_when_computing_would_finish_first(start: StartEngine, before: int) -> None:
    engine = start(admission=Admission(timeout_s=5), budget=2 * BLOCK_TOKENS)
    engine.half.loads.computing.add([(0, 100 * BLOCK_TOKENS)], 200.0)
    if before:
        engine.add([7] * (before + 2) * BLOCK_TOKENS)
        engine.step()  # the request computes all of its blocks but the last
    store(engine, PROMPT, 4)
    engine.add(PROMPT)
    (load,) = engine.step().plan.loads
    assert load.within_s == 5, "from when its turn begins"
    assert load.latest_s == pytest.approx((before + 4) * 2.0, rel=0.05), "from now, at 2 s a block"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_pace_estimator_gets_the_computed_part_of_each_step(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    engine = start(budget=2 * BLOCK_TOKENS, asynchronous=asynchronous)
    told: list[Any] = []
    monkeypatch.setattr(engine.half.loads.computing, "add", lambda parts, seconds: told.append(parts))
    engine.add(PROMPT, max_tokens=5)
    engine.run()
    assert told == [[(0, 64)], [(64, 128)], [(128, len(PROMPT))]], "and not of what follows the prompt"


@pytest.mark.parametrize("keep", [False, True])
def test_computed_blocks_that_the_store_has_go_to_the_cpu_tier_only(start: StartEngine, keep: bool) -> None:
    engine = start(keep=keep)
    store(engine, PROMPT, 4)
    request = engine.add(PROMPT, asks={"max_load_tokens": 2 * BLOCK_TOKENS})
    engine.step()
    engine.transfer()
    engine.step()
    assert saved_blocks(engine, request, engine.step().plan.saves) == ([2, 3, 4] if keep else [4])


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_a_lookup_waits_for_a_share_of_the_computing_time(start: StartEngine, after_s: float) -> None:
    admission = Admission(timeout_s=5)
    engine = start(admission=admission)
    engine.half.loads.computing.add([(0, 5 * BLOCK_TOKENS)], 5.0)
    engine.lookups.answering = False
    engine.lookups.asked_at = time.monotonic() - after_s
    request = engine.add(PROMPT)
    assert (request.request_id in engine.step().output.num_scheduled_tokens) is bool(after_s)
    engine.abort(request)


def test_a_request_may_skip_or_limit_its_loads(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    for asks, blocks in (({"load": False}, 0), ({"max_load_tokens": 2 * BLOCK_TOKENS + 1}, 2), ({"save": False}, 5)):
        request = engine.add(PROMPT, asks=asks)
        assert engine.half.loads.matched_tokens(request, 0) == blocks * BLOCK_TOKENS
        engine.abort(request)
    assert len(engine.lookups.asked) == 2, "nobody is asked what is not to be loaded"


@pytest.mark.parametrize(
    ("asks", "blocks"),
    [({"save": False}, 0), ({"max_save_tokens": 3 * BLOCK_TOKENS - 1}, 2), ({"load": False, "priority": 2}, 5)],
)
def test_a_request_may_choose_which_blocks_are_saved(start: StartEngine, asks: dict[str, Any], blocks: int) -> None:
    engine = start()
    request = engine.add(PROMPT, asks=asks)
    assert saved_blocks(engine, request, engine.step().plan.saves) == list(range(blocks))


def test_saved_blocks_have_their_requests_attributes(start: StartEngine) -> None:
    engine = start()
    engine.add(PROMPT, asks={"priority": 3, "ttl_s": 60})
    saves = engine.step().plan.saves
    assert saves is not None and [block.how for block in saves.copied] == [SendAs(3, 60.0)] * 5


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ({"skip": True}, "unknown option 'skip'"),
        ({"priority": 9}, "priority is 9"),
        ({"ttl_s": -1}, "ttl_s is -1"),
        ({"max_load_tokens": "all"}, "expected a whole number or null, got text"),
        ("nothing", "kvstore is 'nothing'; expected an object of options"),
    ],
)
def test_a_request_with_a_wrong_option_is_computed_without_the_store(
    start: StartEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    asks: object,
    said: str,
) -> None:
    engine = start()
    logging.disable(logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    store(engine, PROMPT, 5)
    request = engine.add(PROMPT, asks=asks)
    assert engine.half.loads.matched_tokens(request, 0) == 0
    assert engine.step().plan.saves is None
    assert engine.counters.take()["refused_requests"] == 1
    assert matched(engine) == 5, "others are not concerned"
    assert said in caplog.text and f"request {request.request_id} is computed without the store" in caplog.text


def test_a_hit_below_the_minimum_is_ignored(start: StartEngine) -> None:
    engine = start(min_hit_tokens=3 * BLOCK_TOKENS)
    store(engine, PROMPT, 2)
    assert matched(engine) == 0
    store(engine, PROMPT, 3)
    assert matched(engine) == 3
    assert matched(engine, local=1) == 0


def test_a_prompt_shorter_than_the_minimum_causes_no_lookup(start: StartEngine) -> None:
    engine = start(min_hit_tokens=3 * BLOCK_TOKENS)
    matched(engine, range(3 * BLOCK_TOKENS))
    assert not engine.lookups.asked
    matched(engine, range(3 * BLOCK_TOKENS + 1))
    assert len(engine.lookups.asked) == 1


def test_a_request_waits_for_the_stores_answer_while_others_run(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    engine.lookups.answering = False
    waiting = engine.add(PROMPT)
    engine.lookups.answering = True
    other = engine.add(range(1000, 1000 + BLOCK_TOKENS), max_tokens=40)
    engine.lookups.answering = False
    for _ in range(3):
        assert waiting.request_id not in engine.step().output.num_scheduled_tokens
    assert other.num_tokens > BLOCK_TOKENS and len(engine.lookups.asked) == 1
    engine.lookups.answering = True
    [load] = engine.step().plan.loads
    assert load.request_id == waiting.request_id and len(load.keys) == 5


def test_loads_only_from_the_host_tier_do_not_wait_for_the_store(
    start: StartEngine,
) -> None:
    engine = start()
    engine.fill_tier()
    engine.lookups.answering = False
    assert matched(engine) == 5
    assert matched(engine, range(7 * BLOCK_TOKENS)) is None


def test_a_load_combines_blocks_of_both_tiers(start: StartEngine) -> None:
    """The blocks of one chain are alternately in the host tier and in the store."""
    engine = start(ranks=2)
    engine.fill_tier()
    keys = engine.keys(PROMPT)
    lose(engine, keys[1], keys[3])
    request = engine.add(PROMPT)
    [load] = engine.step().plan.loads
    blocks = engine.block_ids(request.request_id)
    assert load.host_block_ids == [blocks[0], blocks[2], blocks[4]]
    assert load.host_slots == engine.tier.find([keys[0], keys[2], keys[4]]).tolist()
    assert (load.block_ids, load.keys) == ([blocks[1], blocks[3]], [keys[1], keys[3]])
    assert engine.half.loads.hit_sources(request) == (3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    engine.transfer()
    engine.step()
    assert (engine.tier.find(keys) >= 0).all()
    assert engine.counters.take()["hit_tokens_store"] == 2 * BLOCK_TOKENS


def test_a_hit_ends_at_the_first_block_that_no_tier_has(start: StartEngine) -> None:
    engine = start()
    engine.fill_tier()
    keys = engine.keys(PROMPT)
    engine.ranks[0].held.difference_update(keys)
    lose(engine, keys[2])
    assert matched(engine) == 2


def test_blocks_from_the_store_stay_in_the_host_tier(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    engine.fill_tier()
    engine.empty_store()
    assert matched(engine) == 5


def test_a_load_larger_than_half_the_tier_does_not_empty_it(start: StartEngine) -> None:
    engine = start(slots=8)
    store(engine, PROMPT, 5)
    engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert load.slots is None and len(load.keys) == 5


def test_loads_fill_the_blocks_behind_the_engines_own(start: StartEngine) -> None:
    engine = start(keep=False)
    engine.add(range(2 * BLOCK_TOKENS))
    engine.run()
    store(engine, PROMPT, 5)
    request = engine.add(PROMPT)
    [load] = engine.step().plan.loads
    assert load.keys == engine.keys(PROMPT)[2:5]
    assert load.block_ids == engine.block_ids(request.request_id)[2:5]


def test_requests_that_share_a_prefix_load_it_once(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    for _ in range(3):
        engine.add(PROMPT)
    loads = []
    while engine.scheduler.requests:
        loads += engine.step().plan.loads
        engine.transfer()
    assert [len(load.keys) for load in loads] == [5]


def test_after_a_shared_load_fails_no_request_waits_for_another(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    for _ in range(3):
        engine.add(PROMPT)
    assert len(engine.step().plan.loads) == 1
    engine.ranks[0].finish_load(deliver=0)
    engine.step()
    for _ in range(4):
        engine.step()
    assert not engine.half.under_way["waiting"]


# ---- loads that fail -------------------------------------------------------------------------------------------------


def test_a_failed_load_is_not_retried_and_its_missing_blocks_are_saved(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    request = engine.add(PROMPT, max_tokens=40)
    engine.step()
    engine.ranks[0].held.difference_update(engine.keys(PROMPT)[2:])
    engine.ranks[0].finish_load()
    engine.step()
    step = engine.step()
    assert engine.lookups.forgotten == 1 and engine.counters.take()["failed_loads"] == 1
    assert not step.plan.loads and step.work[0].start == 2 * BLOCK_TOKENS
    assert saved_blocks(engine, request, step.plan.saves) == [2, 3, 4]
    assert len(engine.lookups.asked) == 1


def test_after_an_empty_load_the_request_computes_everything(start: StartEngine) -> None:
    engine = start()
    store(engine, PROMPT, 5)
    request = engine.add(PROMPT)
    engine.step()
    engine.empty_store()
    engine.ranks[0].finish_load(deliver=0)
    engine.step()
    step = engine.step()
    assert not step.plan.loads and step.output.num_scheduled_tokens == {request.request_id: len(PROMPT)}
    assert saved_blocks(engine, request, step.plan.saves) == [0, 1, 2, 3, 4]
    assert len(engine.lookups.asked) == 1


def test_a_block_that_failed_on_one_rank_counts_as_missing(start: StartEngine) -> None:
    """The first rank reports its failure long before the second reports its success."""
    engine = start(ranks=2)
    store(engine, PROMPT, 5)
    engine.add(PROMPT)
    engine.step()
    engine.ranks[0].finish_load(deliver=3)
    for _ in range(3):
        assert not engine.step().work
    engine.ranks[1].finish_load()
    engine.step()
    assert (engine.tier.find(engine.keys(PROMPT)) >= 0).tolist() == [True, True, True, False, False]
    step = engine.step()
    assert step.work[0].start == 3 * BLOCK_TOKENS


def test_a_request_runs_only_after_all_ranks_have_its_blocks(start: StartEngine) -> None:
    engine = start(ranks=3)
    store(engine, PROMPT, 5)
    engine.add(PROMPT, max_tokens=40)
    engine.step()
    for rank in engine.ranks:
        assert not engine.step().work and engine.half.under_way["loading"] == 1
        rank.finish_load()
    engine.step()
    assert engine.half.under_way["loading"] == 0 and engine.step().work


def test_an_aborted_request_keeps_its_blocks_until_all_ranks_finish_loading(start: StartEngine) -> None:
    engine = start(ranks=2)
    store(engine, PROMPT, 5)
    request = engine.add(PROMPT)
    engine.step()
    engine.abort(request)
    for number, rank in enumerate(engine.ranks):
        assert engine.step().plan.cancelled == [request.request_id][number:], "each rank may end it now"
        assert engine.half.under_way["loading"] == 1 and engine.scheduler.kv_cache_manager.usage > 0
        rank.finish_load(deliver=1)
    engine.step()
    assert "failed_loads" not in engine.counters.take(), "nobody computes what did not come"
    assert not any(engine.half.under_way.values()) and engine.scheduler.kv_cache_manager.usage == 0


# ---- what is saved ---------------------------------------------------------------------------------------------------


def test_short_steps_within_a_prompt_are_saved_together_at_its_end(start: StartEngine) -> None:
    engine = start(budget=BLOCK_TOKENS, gather_s=math.inf)
    request = engine.add(PROMPT, max_tokens=2 * BLOCK_TOKENS)
    saved = [saved_blocks(engine, request, engine.step().plan.saves) for _ in range(6)]
    assert saved == [[0], [], [], [], [], [1, 2, 3, 4]]
    for _ in range(BLOCK_TOKENS):  # generated blocks may be saved at the end of every step
        saved.append(saved_blocks(engine, request, engine.step().plan.saves))
    assert [blocks for blocks in saved[6:] if blocks] == [[5]]


def test_gathered_blocks_are_saved_when_their_request_is_aborted(start: StartEngine) -> None:
    engine = start(budget=BLOCK_TOKENS, gather_s=math.inf)
    request = engine.add(PROMPT)
    for _ in range(3):
        engine.step()
    engine.abort(request)
    step = engine.step()
    assert saved_blocks(engine, request, step.plan.saves) == [1, 2]
    assert step.plan.held == {request.request_id: step.plan.saves.job}, "the engine keeps them until they are copied"


def test_handed_over_blocks_are_saved_in_every_step(start: StartEngine) -> None:
    engine = start(budget=BLOCK_TOKENS, gather_s=math.inf)
    request = engine.add(PROMPT, side="do_remote_decode")
    assert [saved_blocks(engine, request, engine.step().plan.saves) for _ in range(5)] == [[0], [1], [2], [3], [4]]


def test_window_blocks_are_saved_in_every_step_before_they_leave_the_cache(start: StartEngine) -> None:
    engine = start(budget=BLOCK_TOKENS, gather_s=math.inf, windows=(0, 2 * BLOCK_TOKENS), blocks=64)
    request = engine.add(PROMPT)
    saved = [saved_blocks(engine, request, engine.step().plan.saves) for _ in range(5)]
    assert saved == [[2 * block, 2 * block + 1] for block in range(5)]


def test_each_step_of_a_chunked_prefill_saves_its_complete_blocks(start: StartEngine) -> None:
    engine = start(budget=2 * BLOCK_TOKENS + 5)
    request = engine.add(PROMPT)
    saved = [saved_blocks(engine, request, engine.step().plan.saves) for _ in range(3)]
    assert saved == [[0, 1], [2, 3], [4]]
    engine.run()
    assert engine.ranks[0].held == set(engine.keys(PROMPT))


@pytest.mark.parametrize("save_decode", [True, False])
def test_blocks_filled_while_decoding_are_saved_on_request(start: StartEngine, save_decode: bool) -> None:
    engine = start(save_decode=save_decode)
    request = engine.add(PROMPT, max_tokens=2 * BLOCK_TOKENS)
    engine.run()
    keys = engine.keys_of(request)
    assert len(keys) == 7
    assert engine.ranks[0].held == set(keys if save_decode else keys[:5])


def test_a_block_computed_twice_in_one_step_is_saved_once(start: StartEngine) -> None:
    engine = start(prefix_cache=False)
    engine.add(PROMPT)
    engine.add(PROMPT)
    saves = engine.step().plan.saves
    assert saves is not None and [block.key for block in saves.copied] == engine.keys(PROMPT)


def test_blocks_that_the_store_has_are_not_saved_again(start: StartEngine) -> None:
    engine = start(keep=False)
    store(engine, PROMPT, 5)
    engine.add(PROMPT)
    while engine.scheduler.requests:
        step = engine.step()
        assert step.plan.saves is None
        engine.transfer()


def test_blocks_only_in_the_engine_are_saved_with_new_ones(start: StartEngine) -> None:
    """The store has lost blocks that this engine saved earlier. The next request with that prefix saves them again."""
    engine = start(keep=False)
    engine.add(range(3 * BLOCK_TOKENS))
    engine.run()
    engine.ranks[0].held.difference_update(engine.keys(range(3 * BLOCK_TOKENS))[1:])
    request = engine.add(PROMPT)
    step = engine.step()
    assert step.work[0].start == 3 * BLOCK_TOKENS
    assert saved_blocks(engine, request, step.plan.saves) == [1, 2, 3, 4]


def test_after_a_purge_the_host_tiers_blocks_are_sent_again(start: StartEngine) -> None:
    engine = start()
    engine.fill_tier()
    engine.empty_store()
    engine.add(PROMPT)
    engine.run()
    assert engine.ranks[0].held == set(engine.keys(PROMPT))


def test_a_late_answer_of_the_store_causes_no_second_send(start: StartEngine) -> None:
    engine = start()
    engine.fill_tier()
    engine.lookups.certain = False
    engine.add(PROMPT)
    while engine.scheduler.requests:
        assert engine.step().plan.saves is None
        engine.transfer()


def test_without_room_in_the_tier_blocks_wait_for_a_later_step(start: StartEngine) -> None:
    engine = start(slots=3)
    request = engine.add(PROMPT, max_tokens=40)
    assert saved_blocks(engine, request, engine.step().plan.saves) == [0, 1, 2]
    assert engine.step().plan.saves is None
    rank = engine.ranks[0]
    rank.finish_copy()
    rank.finish_send()
    engine.step()
    assert saved_blocks(engine, request, engine.step().plan.saves) == [3]
    engine.run()
    assert set(engine.keys(PROMPT)) <= rank.held


def test_a_preempted_request_continues_saving_where_it_was(start: StartEngine) -> None:
    engine = start(blocks=13, prefix_cache=False)
    first = engine.add(PROMPT, max_tokens=100)
    second = engine.add(range(2000, 2000 + 5 * BLOCK_TOKENS + 20), max_tokens=100)
    for _ in range(100):
        engine.step()
        if first.num_preemptions + second.num_preemptions:
            break
    assert first.num_preemptions + second.num_preemptions == 1
    engine.run()
    for request in (first, second):
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert set(list(engine.keys_of(request))[:8]) <= engine.ranks[0].held


def test_a_block_is_sent_once_copied_and_readable_once_all_ranks_did(start: StartEngine) -> None:
    engine = start(ranks=2)
    engine.add(PROMPT, max_tokens=40)
    engine.step()
    keys = engine.keys(PROMPT)
    for rank in engine.ranks:
        engine.step()
        assert (engine.tier.find(keys) < 0).all() and engine.tier.blocks == 0
        rank.finish_copy()
    engine.step()
    assert (engine.tier.find(keys) >= 0).all()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_block_whose_copy_failed_on_one_rank_is_never_readable(start: StartEngine, broken: int) -> None:
    engine = start(ranks=2)
    engine.ranks[broken].break_next_copy = True
    engine.add(PROMPT)
    for _ in range(5):
        engine.step()
        engine.transfer()
        assert engine.tier.blocks == 0
    assert not any(engine.half.under_way.values())
    assert not engine.ranks[broken].held


def test_without_a_cpu_tier_a_slot_is_free_once_all_ranks_sent(start: StartEngine) -> None:
    engine = start(ranks=2, keep=False)
    engine.add(PROMPT, max_tokens=40)
    engine.step()
    for rank in engine.ranks:
        rank.finish_copy()
    for rank, expected in zip(engine.ranks, ([5, 5, 5, 5, 5], [4, 3, 2, 1, 0]), strict=True):
        for busy in expected:
            rank.finish_send()
            engine.step()
            assert engine.tier.busy == busy
    assert engine.tier.blocks == 0 and (engine.tier.find(engine.keys(PROMPT)) < 0).all()


# ---- the end of a request --------------------------------------------------------------------------------------------


def test_a_finished_requests_blocks_are_held_until_all_ranks_copied_them(start: StartEngine) -> None:
    engine = start(ranks=2)
    engine.add(PROMPT)
    engine.step()
    for rank in engine.ranks:
        assert engine.half.saves.holds_blocks and engine.scheduler.kv_cache_manager.usage > 0
        engine.step()
        rank.finish_copy()
    engine.step()
    assert not engine.half.saves.holds_blocks and engine.scheduler.kv_cache_manager.usage == 0
    assert engine.half.under_way["sending"] == 5, "sent from the host tier, long after"


def test_blocks_without_room_are_saved_after_their_request_ends(start: StartEngine) -> None:
    engine = start(slots=1, keep=False)
    request = engine.add(range(2 * BLOCK_TOKENS), max_tokens=40)
    assert saved_blocks(engine, request, engine.step().plan.saves) == [0]
    engine.transfer()
    engine.step()
    engine.abort(request)
    assert engine.half.saves.holds_blocks
    assert saved_blocks(engine, request, engine.step().plan.saves) == [1]


def test_a_request_without_outstanding_copies_ends_at_once(start: StartEngine) -> None:
    engine = start()
    request = engine.add(PROMPT, max_tokens=3)
    for _ in range(2):
        engine.step()
        engine.transfer()
    assert not engine.half.under_way["copying"] and not request.is_finished()
    engine.step()
    assert request.is_finished() and engine.scheduler.kv_cache_manager.usage == 0


def test_a_request_aborted_while_waiting_leaves_nothing(start: StartEngine) -> None:
    engine = start()
    engine.lookups.answering = False
    request = engine.add(PROMPT)
    engine.step()
    assert engine.half.under_way["waiting"] == 1
    engine.abort(request)
    assert not any(engine.half.under_way.values())


def test_a_request_aborted_between_chunks_has_saved_its_whole_blocks(start: StartEngine) -> None:
    engine = start(budget=2 * BLOCK_TOKENS + 5)
    request = engine.add(PROMPT)
    engine.step()
    engine.abort(request)
    engine.run()
    assert engine.ranks[0].held == set(engine.keys(PROMPT)[:2])


# ---- new weights -----------------------------------------------------------------------------------------------------


def test_with_new_weights_no_block_of_the_old_ones_is_found(start: StartEngine) -> None:
    engine = start(checks=True)
    engine.fill_tier()
    assert engine.change_weights("step-1")
    for held, hits in ((10, 0), (10, 5)):
        engine.counters.take()
        engine.add(PROMPT)
        engine.run()
        assert len(engine.ranks[0].held) == held
        assert engine.counters.take().get("hit_tokens_cpu", 0) == hits * BLOCK_TOKENS
        engine.scheduler.reset_prefix_cache()


def test_blocks_copied_during_a_weight_change_are_not_found_afterwards(start: StartEngine) -> None:
    engine = start()
    request = engine.add(PROMPT, max_tokens=40)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.ranks[0].copies and engine.change_weights()
    engine.ranks[0].finish_copy()
    step = engine.step()
    assert step.plan.reusing and step.work[0].start == 0
    assert (engine.tier.find(engine.keys_of(request)) < 0).all()


def test_a_handed_over_prompt_is_sent_in_full_despite_few_slots(start: StartEngine) -> None:
    engine = start(slots=3)
    rank = engine.ranks[0]
    request = engine.add(PROMPT, side="do_remote_decode")
    other = engine.add([7] * 2 * BLOCK_TOKENS)
    step = engine.step()
    assert step.plan.saves is not None and len(step.plan.saves.copied) == 3
    assert request.is_finished() and other.is_finished()
    assert engine.half.saves.holds_blocks and engine.flights.open, "two blocks have no slot yet"
    while rank.copies:
        rank.finish_copy()
    rank.finish_send()
    engine.step()  # one slot is free
    assert engine.flights.open
    engine.run()
    assert rank.held.issuperset(engine.keys(PROMPT))
    assert not engine.flights.open and engine.counters.take().get("dropped_blocks", 0) <= 2, "of the other request"


def test_a_prompt_computed_elsewhere_is_waited_for_and_its_rest_computed(start: StartEngine) -> None:
    engine = start()
    engine.flights.others = set(engine.hashes(PROMPT[: 4 * BLOCK_TOKENS]))
    request = engine.add(PROMPT, side="do_remote_prefill")
    (load,) = engine.step().plan.loads
    assert load.waits and load.within_s == 30 and len(load.keys) == 4
    store(engine, PROMPT, 3)
    engine.run()
    assert request.is_finished()
    assert engine.counters.take()["failed_loads"] == 1, "the fourth block was not set"
    engine.flights.others.clear()
    engine.add([9, *PROMPT], side="do_remote_prefill", asks={"wait_s": 3})
    assert not engine.step().plan.loads, "nobody has promised it"


def test_requests_with_one_prompt_follow_the_first_of_them(start: StartEngine) -> None:
    engine = start(single_flight=True, budget=2 * BLOCK_TOKENS)
    requests = [engine.add(PROMPT, max_tokens=2) for _ in range(3)]
    assert len(engine.flights.open) == 1, "the others promise nothing"
    scheduled = [set(engine.step().output.num_scheduled_tokens) for _ in range(2)]
    assert scheduled == [{requests[0].request_id}] * 2
    starts: dict[str, int] = {}
    while not all(request.is_finished() for request in requests):
        for work in engine.step().work:
            starts.setdefault(work.request.request_id, work.start)
        engine.transfer()
    assert [starts[request.request_id] for request in requests[1:]] == [5 * BLOCK_TOKENS] * 2, "what is left to compute"


@pytest.mark.parametrize("windows", [(0,), (0, 64), (0, STATE)], ids=["tokens", "a window", "states"])
@pytest.mark.parametrize("known_blocks", [0, 2])
def test_behind_unknown_content_nothing_is_promised_saved_or_loaded(
    start: StartEngine, windows: tuple[int, ...], known_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of a block is unknown after a picture that cannot be read."""
    known = known_blocks * BLOCK_TOKENS
    monkeypatch.setattr(block_keys, "has_inputs", lambda _request: True)
    monkeypatch.setattr(RequestInputs, "before", lambda _inputs, end: None if end > known else b"")
    engine = start(windows=windows)
    first = engine.hashes(PROMPT)[:known_blocks]
    handed = engine.add(PROMPT, side="do_remote_decode")
    of_chain = engine.groups.of_chain if engine.groups.states else bytes
    names = {of_chain(key) for flight in engine.flights.open for key in flight.keys}
    assert names <= set(first) and (not names or STATE not in windows), "states of no other place are kept"
    engine.run()
    assert handed.is_finished() and not engine.flights.open
    assert {engine.groups.of_chain(key) for key in engine.ranks[0].held} <= set(first)
    assert engine.scheduler.reset_prefix_cache()
    engine.flights.others = set(engine.hashes(PROMPT))
    expected = engine.add(PROMPT, max_tokens=2, side="do_remote_prefill")
    for load in engine.step().plan.loads:
        assert {engine.groups.of_chain(key) for key in load.keys} <= set(first)
    engine.run()
    assert expected.is_finished()
