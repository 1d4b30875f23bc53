"""The planner's simulator, compared with the closed forms and with rules that are true of every simulation."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_serving.load.report import Slo
from kvstore_serving.planning import queueing
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape, nodes_of
from kvstore_serving.planning.profile import Contention, DecodeTimes, Degree, PrefillTimes, Profile
from kvstore_serving.planning.simulator import DoesNotFit, Fleet, Outage, simulate
from kvstore_serving.planning.workload import Lengths, Synthetic, Workload

FAST = NetworkLinks(node_bytes_per_s=1e15, inside_bytes_per_s=1e15, store_bytes_per_s=1e15)


def profile(
    *,
    fixed_s: float = 0.0,
    per_token_s: float = 0.001,
    step_s: float = 0.01,
    kv_tokens: int = 1_000_000,
    kv_bytes: int = 1,
) -> Profile:
    degrees = [
        Degree(
            tp,
            PrefillTimes(fixed_s / tp, per_token_s / tp, 0.0),
            [DecodeTimes(step_s, 0.0, 0.0)],
            {1: kv_tokens, 2: kv_tokens},
        )
        for tp in (1, 2)
    ]
    return Profile("p", "m", "g", "made for a test", False, kv_bytes, degrees, stage_s=0.0)


def fleet(placement: EnginePlacement, made: Profile | None = None, links: NetworkLinks = FAST, nodes: int = 8) -> Fleet:
    return Fleet([NodePool(made or profile(), nodes, 2)], links, placement, batch_tokens=1)


def requests(count: int, inputs: int, outputs: int, gap_s: float = 1.0, hits: int = 0) -> Workload:
    counts = [np.full(count, value, dtype=np.int64) for value in (inputs, outputs, hits)]
    return Workload(np.arange(count) * gap_s, *counts, "test")


APART = EnginePlacement(Engines(Shape(1, 1), 1), Engines(Shape(1, 1), 1))
COLOCATED = EnginePlacement(colocated=Engines(Shape(1, 1), 1))


@pytest.mark.parametrize(("shape", "load"), [(Shape(1, 1), 0.7), (Shape(1, 2), 1.4), (Shape(2, 1), 1.2)])
def test_prefills_of_equal_length_wait_as_the_closed_forms_predict(shape: Shape, load: float) -> None:
    """The three cases of the closed forms are one device, a pipeline, and tensor parallelism with a speed-up of 2."""
    made = Synthetic(Lengths(1000), Lengths(1)).make(60_000, 3)
    run = simulate(fleet(EnginePlacement(prefill=Engines(shape, 1))), made, load)
    expected = {
        Shape(1, 1): lambda: queueing.one_device(1.0, load),
        Shape(1, 2): lambda: queueing.inter_op(1.0, load, 2),
        Shape(2, 1): lambda: queueing.intra_op(1.0, load, 2.0),
    }[shape]()
    assert run.ttft_s.mean() == pytest.approx(expected.ttft_s.mean, rel=0.03)
    assert np.percentile(run.ttft_s, 90) == pytest.approx(expected.ttft_s.p90, rel=0.05)
    assert run.busy["prefill"] == pytest.approx(expected.utilisation, rel=0.02)


def test_a_single_request_takes_prefill_transfer_and_step_times() -> None:
    links = NetworkLinks(node_bytes_per_s=1000.0, store_bytes_per_s=1e15)
    run = simulate(fleet(APART, links=links), requests(10, 100, 11, gap_s=100.0), 1.0)
    assert run.ttft_s == pytest.approx(0.1)
    # 100 bytes leave over the prefill engine's link while the decode engine reads them over its own link; then there
    # are ten steps.
    assert run.tpot_s == pytest.approx((0.1 + 10 * 0.01) / 10)
    assert run.mean_parts_s() == pytest.approx(
        {"load": 0, "prefill_queue": 0, "prefill": 0.1, "decode_memory": 0, "hand_over": 0.1, "decode": 0.1}, abs=1e-9
    )


def test_store_transfers_take_latency_plus_bytes_over_rate() -> None:
    links = NetworkLinks(
        store_bytes_per_s=1000.0, store_read_latency_s=0.5, store_write_latency_s=0.25, node_bytes_per_s=1e15
    )
    run = simulate(fleet(APART, links=links), requests(10, 100, 11, gap_s=100.0), 1.0)
    assert run.ttft_s == pytest.approx(0.1)
    # The last block is in the store after 0.25 + 0.1 s, and is read 0.5 s later.
    assert run.mean_parts_s()["hand_over"] == pytest.approx(0.85)
    loaded = simulate(fleet(APART, links=links), requests(10, 100, 11, gap_s=100.0, hits=80), 1.0)
    assert loaded.mean_parts_s()["load"] == pytest.approx(0.5 + 0.08)
    # Twenty tokens are written, and all hundred are read.
    assert loaded.mean_parts_s()["hand_over"] == pytest.approx(max(0.25 + 0.02, 0.1) + 0.5)


def test_stored_prompt_blocks_are_loaded_instead_of_computed() -> None:
    links = NetworkLinks(node_bytes_per_s=1000.0, store_bytes_per_s=1e15)
    run = simulate(fleet(APART, links=links), requests(10, 100, 2, gap_s=100.0, hits=80), 1.0)
    assert run.ttft_s == pytest.approx(0.08 + 0.02)


def test_many_transfers_share_a_link() -> None:
    links = NetworkLinks(node_bytes_per_s=100.0, store_bytes_per_s=1e15)
    placement = EnginePlacement(Engines(Shape(1, 1), 2), Engines(Shape(1, 1), 1))
    run = simulate(fleet(placement, links=links), requests(200, 100, 2, gap_s=0.2), 1.0)
    assert run.duration_s >= 200 * 100 / 100.0, "100 bytes each, at 100 bytes/s into one node"
    assert run.links["node"] == pytest.approx(1.0, abs=0.02)


def test_a_decode_engine_admits_only_what_its_memory_holds() -> None:
    made = profile(kv_tokens=250)
    run = simulate(fleet(APART, made), requests(50, 100, 41, gap_s=0.01), 1.0)
    assert run.memory["decode"] <= 1.0
    assert run.mean_parts_s()["decode_memory"] > 0.05, "two at a time, the others wait"


def test_a_prompt_larger_than_any_memory_is_computed_alone() -> None:
    made = profile(kv_tokens=50)
    assert np.isfinite(simulate(fleet(APART, made), requests(10, 100, 5), 1.0).tpot_s).all()
    assert np.isfinite(simulate(fleet(COLOCATED, made), requests(10, 100, 5), 1.0).tpot_s).all()


def test_direct_hand_over_holds_prefill_memory_until_blocks_are_fetched() -> None:
    slow = NetworkLinks("direct", node_bytes_per_s=100.0, inside_bytes_per_s=100.0)
    made = profile(kv_tokens=150)
    direct = simulate(fleet(APART, made, slow), requests(20, 100, 2, gap_s=0.1), 1.0)
    through = simulate(
        fleet(APART, made, replace_links(slow, via="store", node_bytes_per_s=1e15)),
        requests(20, 100, 2, gap_s=0.1),
        1.0,
    )
    assert direct.ttft_s.max() > 10, "the second waits until the first has been fetched, a second each"
    assert through.ttft_s.max() < 1


def replace_links(links: NetworkLinks, **changes: object) -> NetworkLinks:
    return NetworkLinks(**{name: getattr(links, name) for name in links.__struct_fields__} | changes)


def test_pipeline_stages_of_both_phases_share_a_node_for_direct_hand_over() -> None:
    pool = NodePool(profile(), nodes=4, gpus_per_node=2)
    placement = EnginePlacement(Engines(Shape(1, 2), 2), Engines(Shape(1, 2), 2))
    together, apart = (nodes_of(placement, [pool], together=each) for each in (True, False))
    assert together is not None and apart is not None
    assert together[0] == together[1]
    slow = NetworkLinks("direct", node_bytes_per_s=1.0, inside_bytes_per_s=1e15)
    run = simulate(Fleet([pool], slow, placement), requests(10, 100, 2, gap_s=10), 1.0)
    assert run.links["node"] == 0.0 and run.tpot_s.max() < 0.1


def test_chunked_prefill_keeps_decoding_going() -> None:
    mixed = Workload(
        np.array([0.0, 0.5]), np.array([10, 4000]), np.array([400, 1]), np.zeros(2, dtype=np.int64), "test"
    )
    times = {
        chunk: simulate(replace(fleet(COLOCATED), chunk_tokens=chunk), mixed, 1.0, warm_up=0).tpot_s[0]
        for chunk in (0, 100)
    }
    assert times[0] == pytest.approx((399 * 0.01 + 4.0) / 399, rel=0.02), "it waits for the whole prompt"
    assert times[100] == pytest.approx((399 * 0.01 + 4.0) / 399, rel=0.05), "as long, in small steps"
    small = simulate(replace(fleet(COLOCATED), chunk_tokens=20), mixed, 1.0, warm_up=0)
    assert small.ttft_s[1] > 5, "a smaller budget takes the prompt longer"
    assert small.tpot_s[0] < times[100] + 0.02


def test_a_run_ends_early_after_too_many_misses() -> None:
    made = Synthetic(Lengths(1000), Lengths(5)).make(2000, 0)
    run = simulate(fleet(APART), made, 3.0, Slo(2.0, 1.0), 90)
    assert run.decided
    assert run.duration_s < made.at[-1] / 3.0


@pytest.mark.parametrize("phase", ["prefill", "decode", "colocated"])
def test_a_failed_engine_loses_no_request(phase: str) -> None:
    both = EnginePlacement(Engines(Shape(1, 1), 2), Engines(Shape(1, 1), 2))
    placement = both if phase != "colocated" else EnginePlacement(colocated=Engines(Shape(1, 1), 2))
    outages = (Outage(phase, 0, 10.0, 20.0), Outage(phase, 1, 15.0, 25.0))  # for five seconds, there is none
    made = Synthetic(Lengths(300), Lengths(40)).make(200, 1)
    calm = simulate(fleet(placement), made, 2.0, warm_up=0)
    run = simulate(replace(fleet(placement), outages=outages), made, 2.0, warm_up=0)
    for each in (run.ttft_s, run.tpot_s):
        assert np.isfinite(each).all() and (each >= 0).all()
    assert run.ttft_s.sum() + run.tpot_s.sum() > calm.ttft_s.sum() + calm.tpot_s.sum()


def test_engines_that_do_not_fit_on_the_nodes_are_refused() -> None:
    with pytest.raises(DoesNotFit):
        simulate(fleet(EnginePlacement(Engines(Shape(2, 1), 8), Engines(Shape(2, 1), 1))), requests(10, 10, 2), 1.0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    load=st.floats(0.1, 5.0),
    engines=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    shape=st.sampled_from([Shape(1, 1), Shape(1, 2), Shape(2, 1)]),
    kind=st.sampled_from(["store", "direct", "colocated", "whole prompts"]),
    hit_rate=st.sampled_from([0.0, 0.5]),
    kv_tokens=st.sampled_from([500, 3000, 100_000]),
    outage=st.booleans(),
)
def test_every_request_passes_its_stages_in_order(
    seed: int,
    load: float,
    engines: tuple[int, int],
    shape: Shape,
    kind: str,
    hit_rate: float,
    kv_tokens: int,
    outage: bool,
) -> None:
    made = Synthetic(Lengths(200, 1.0), Lengths(20, 1.0), hit_rate=hit_rate).make(60, seed)
    links = NetworkLinks("direct" if kind == "direct" else "store", 1e5, 1e6, 1e5)
    apart = EnginePlacement(Engines(shape, engines[0]), Engines(shape, engines[1]))
    placement = apart if kind in ("store", "direct") else EnginePlacement(colocated=Engines(shape, engines[0]))
    one = fleet(placement, profile(fixed_s=0.01, kv_tokens=kv_tokens), links, nodes=12)
    phase = "decode" if placement is apart else "colocated"
    one = replace(
        one,
        chunk_tokens=0 if kind == "whole prompts" else 64,
        outages=[Outage(phase, 0, 5.0, 6.0)] if outage else [],
    )
    run = simulate(one, made, load, warm_up=0)
    assert len(run.ttft_s) == 60
    assert (run.ttft_s > 0).all() and (run.tpot_s >= 0).all(), "no time runs backwards"
    assert np.isfinite(run.ttft_s).all() and np.isfinite(run.tpot_s).all(), "nothing is lost"
    for share in (*run.busy.values(), *run.links.values()):
        assert 0 <= share <= 1 + 1e-9, "nobody works more than all the time"
    again = simulate(one, made, load, warm_up=0)
    assert (again.ttft_s == run.ttft_s).all() and (again.tpot_s == run.tpot_s).all(), "a seed gives one result"


def test_engines_on_one_node_slow_each_other_only_when_both_work() -> None:
    """A prompt takes 1 s, an answer 120 steps of 10 ms, and a request comes every 2 s. So the next prompt is computed
    while an answer ends. If both overlap for x seconds, a prefill takes 1 + x / 3, and x = 2 (1.2 - (2 - (1 + x / 3))),
    so x = 1.2."""
    made = msgspec.structs.replace(profile(), contention=Contention(prefill=1.5, decode=2.0))
    load = requests(60, 1000, 121, gap_s=2.0)
    alone = simulate(fleet(APART, made, nodes=1), requests(40, 1000, 121, gap_s=4.0), 1.0)
    assert alone.ttft_s == pytest.approx(1.0) and alone.tpot_s == pytest.approx(0.01)
    together = Fleet([NodePool(made, 1, 2)], FAST, APART, batch_tokens=1)
    beside = simulate(together, load, 1.0)
    assert np.median(beside.ttft_s) == pytest.approx(1.4, rel=0.02)
    assert np.median(beside.tpot_s) == pytest.approx((0.6 + 1.2) / 120, rel=0.02)
    apart = simulate(Fleet([NodePool(made, 2, 1)], FAST, APART, batch_tokens=1), load, 1.0)
    assert apart.ttft_s == pytest.approx(1.0) and apart.tpot_s == pytest.approx(0.01)


def test_engines_on_one_node_interfere_by_the_measured_share() -> None:
    """If the decode engine always works, every prefill takes longer by the share in the profile."""
    made = msgspec.structs.replace(profile(), contention=Contention(prefill=1.3))
    run = simulate(Fleet([NodePool(made, 1, 2)], FAST, APART, batch_tokens=1), requests(60, 500, 400, gap_s=1.0), 1.0)
    assert np.median(run.ttft_s) == pytest.approx(0.65, rel=0.01)


# ---- batches of prompts, and lengths that vary ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "batches"),
    [
        ([500] * 8, [4, 4]),  # together just enough for a compute-bound prefill
        ([501] * 7, [3, 3, 1]),  # a fourth prompt would be too much
        ([1000, 1000, 1000], [2, 1]),
        ([1001, 1001, 1001], [1, 1, 1]),  # longer than half of that: alone
        ([5000, 300, 300, 5000], [1, 2, 1]),  # longer than all of that: alone, in order of arrival
        ([1500, 600, 400], [1, 2]),  # in order of arrival: the third does not pass the second
    ],
)
def test_prompts_are_batched_until_a_prefill_is_compute_bound(prompts: list[int], batches: list[int]) -> None:
    """A prefill of 2000 tokens takes 250 ms, a fifth of which is the fixed cost."""
    made = profile(fixed_s=0.05, per_token_s=1e-4)
    assert made.degree(1).prefill.saturating_tokens == 2000
    counts = [np.array(prompts), np.ones(len(prompts), dtype=np.int64), np.zeros(len(prompts), dtype=np.int64)]
    all_at_once = Workload(np.zeros(len(prompts)), *counts, "test")
    engine = replace(fleet(EnginePlacement(prefill=Engines(Shape(1, 1), 1)), made), batch_tokens=None)
    run = simulate(engine, all_at_once, 1.0, warm_up=0)
    expected: list[float] = []
    end_s = 0.0
    for size in batches:
        first = len(expected)
        end_s += 0.05 + sum(prompts[first : first + size]) * 1e-4
        expected += [end_s] * size
    assert run.ttft_s == pytest.approx(expected)


def test_only_computed_tokens_of_a_prompt_count_for_its_batch() -> None:
    made = profile(fixed_s=0.05, per_token_s=1e-4)
    engine = replace(fleet(EnginePlacement(prefill=Engines(Shape(1, 1), 1)), made), batch_tokens=None)
    run = simulate(engine, requests(4, 1500, 1, gap_s=0.0, hits=1000), 1.0, warm_up=0)
    assert run.ttft_s == pytest.approx([0.1, 0.3, 0.3, 0.3]), "what comes while the first is computed is one batch"


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_prompts_of_two_lengths_wait_as_pollaczek_khinchine_predicts(load: float) -> None:
    """Three of four prompts take 1 s and the fourth takes 5 s. This variation makes the mean wait 1.75 times as
    long."""
    random = np.random.default_rng(5)
    count = 60_000
    # Exactly a quarter of the prompts is long, and exactly one arrives per second on average. With random numbers, the
    # test would need twice as many prompts.
    tokens = random.permutation(np.where(np.arange(count) % 4 == 0, 5000, 1000))
    ones, none = np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    arrivals = np.cumsum(random.exponential(1.0, count))
    arrivals *= count / arrivals[-1]
    mean_s = 2.0
    variation = np.sqrt(0.75 * 1.0 + 0.25 * 25.0 - mean_s**2) / mean_s
    made = Workload(arrivals - arrivals[0], tokens, ones, none, "test")
    run = simulate(fleet(EnginePlacement(prefill=Engines(Shape(1, 1), 1))), made, load / mean_s, warm_up=0)
    waited = float((run.ttft_s - tokens * 0.001).mean())
    assert queueing.mean_wait(load / mean_s, mean_s, variation) == pytest.approx(load / mean_s * 7.0 / 2 / (1 - load))
    assert waited == pytest.approx(queueing.mean_wait(load / mean_s, mean_s, variation), rel=0.05)
    assert waited > 1.5 * queueing.mean_wait(load / mean_s, mean_s), "prompts of one length would wait less"
