"""The planner's workloads, search and plan, without the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore_serving.load.report import Slo
from kvstore_serving.planning import goodput as goodputs
from kvstore_serving.planning.fleet import NetworkLinks, NodePool, Via
from kvstore_serving.planning.goodput import Crew, Goal, goodput, mean_goodput
from kvstore_serving.planning.hit_curve import CurveError, HitCurve, read_curve
from kvstore_serving.planning.jobs import NetworkLink, transfer
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape, nodes_of
from kvstore_serving.planning.plan import make_plan
from kvstore_serving.planning.profile import DecodeTimes, Degree, PrefillTimes, Profile
from kvstore_serving.planning.search import NothingFits, Question, best, best_colocated, measured, rate_phases
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.watching import OfferedLoad, Watched, drift, propose
from kvstore_serving.planning.workload import Lengths, Replayed, Synthetic, rate_of


@pytest.fixture
def crew() -> Iterator[Crew]:
    with ThreadPoolExecutor(1) as executor:
        yield Crew(executor, lambda done, of: None)


@pytest.fixture(autouse=True)
def roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate short runs, because most of these tests do not need precise numbers."""
    monkeypatch.setattr(goodputs, "RUN_REQUESTS", 100)
    monkeypatch.setattr(goodputs, "REQUESTS_EACH", 25)
    monkeypatch.setattr(goodputs, "MISSES", 10)
    monkeypatch.setattr(goodputs, "AT_ONCE", 25)


@pytest.fixture
def less_roughly(roughly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate runs twice as long as in the other tests, to compare placements that differ little."""
    monkeypatch.setattr(goodputs, "RUN_REQUESTS", 200)
    monkeypatch.setattr(goodputs, "REQUESTS_EACH", 50)
    monkeypatch.setattr(goodputs, "MISSES", 20)


@pytest.fixture
def precisely(roughly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate runs as long as those of users."""
    monkeypatch.undo()


def small_profile(kv_tokens: int = 20_000, name: str = "small") -> Profile:
    """Return a profile in which a prefill of 500 tokens takes 0.1 s on one GPU and 0.06 s on two, and a step of ten
    requests 20 ms."""
    degrees = [
        Degree(1, PrefillTimes(0.01, 0.00018, 0.0), [DecodeTimes(0.01, 1e-7, 0.001)], {1: kv_tokens, 2: 2 * kv_tokens}),
        Degree(2, PrefillTimes(0.01, 0.0001, 0.0), [DecodeTimes(0.008, 1e-7, 0.0006)], {1: 2 * kv_tokens}),
    ]
    return Profile(name, "m", "gpu", "made for a test", False, 1000, degrees)


def question(rate_rps: float | None = 5.0, nodes: int = 2, gpus: int = 4, **changes: object) -> Question:
    given = {
        "pools": [NodePool(small_profile(), nodes, gpus)],
        "links": NetworkLinks(),
        "recipe": Synthetic(Lengths(500), Lengths(10)),
        "goal": Goal(Slo(0.3, 0.05), 90),
        "rate_rps": rate_rps,
        "seeds": (0,),
    }
    return Question(**(given | changes))  # type: ignore[arg-type]


# ---- workloads ---------------------------------------------------------------------------------------------------


def test_lengths_have_the_requested_mean_and_variation() -> None:
    made = Synthetic(Lengths(500, 1.0), Lengths(50, 0.5), arrival_cv=2.0, hit_rate=0.25).make(40_000, 1)
    assert made.inputs.mean() == pytest.approx(500, rel=0.03)
    assert made.inputs.std() / made.inputs.mean() == pytest.approx(1.0, rel=0.1)
    assert made.outputs.std() / made.outputs.mean() == pytest.approx(0.5, rel=0.1)
    gaps = np.diff(made.at)
    assert gaps.mean() == pytest.approx(1.0, rel=0.05) and gaps.std() == pytest.approx(2.0, rel=0.1)
    assert made.means.hit_rate == pytest.approx(0.25, abs=0.01)
    equal = Synthetic(Lengths(5), Lengths(5), arrival_cv=0.0).make(10, 0)
    assert np.diff(equal.at) == pytest.approx(1.0)


def trace(path: Path, prompts: list[list[int]]) -> Path:
    lines = [
        {"timestamp": 100 * number, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_traces_prompts_find_their_shared_blocks_in_the_store(tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", [[1, 2, 3], [1, 2, 4], [9, 2], [1, 2, 3]])
    whole = Replayed(str(file)).make(4, 0)
    assert whole.hits.tolist() == [0, 1024, 0, 1535], "leading blocks only, and one token is always computed"
    assert whole.kept_tokens == 6 * 512 - 512
    small = Replayed(str(file), kept_tokens=2 * 512).make(4, 0)
    assert small.hits.tolist() == [0, 1024, 0, 0] and small.kept_tokens == 2 * 512
    assert Replayed(str(file), hits=False).make(4, 0).hits.tolist() == [0] * 4
    again = Replayed(str(file)).make(6, 0)
    assert again.inputs.tolist() == [*whole.inputs.tolist(), *whole.inputs.tolist()[:2]], "a short trace comes again"
    assert np.diff(again.at) == pytest.approx(1.0)
    assert rate_of(file) == pytest.approx(10.0)
    assert np.diff(whole.at) == pytest.approx(1.0), "one a second in the mean"


def test_parts_of_a_trace_keep_their_own_rates(tmp_path: Path) -> None:
    lines = [(0, 1), (1000, 2), (1100, 3), (1200, 4)]
    file = tmp_path / "t.jsonl"
    file.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 9, "output_length": 5, "hash_ids": [block]}) + "\n"
            for at, block in lines
        )
    )
    busy, calm = (Replayed(str(file), parts=2).make(2, seed) for seed in (0, 1))  # 0: the middle one
    assert calm.at[1] == pytest.approx(10 * busy.at[1])


def test_a_hit_curve_is_read_from_the_eviction_benchmarks_result(tmp_path: Path) -> None:
    file = tmp_path / "eviction.json"
    parameters = {"group": "trace", "blocks": [10, 20], "hit_rate": {"default": [0.2, 0.4]}}
    file.write_text(json.dumps({"cases": [{"parameters": parameters}]}))
    curve = read_curve(file)
    assert [curve.at(blocks * 512) for blocks in (0, 5, 15, 99)] == pytest.approx([0.0, 0.1, 0.3, 0.4])
    assert curve.around(15 * 512) == [10 * 512, 15 * 512, 20 * 512]
    file.write_text(json.dumps({"cases": [{"parameters": {**parameters, "block_tokens": 16}}]}))
    assert read_curve(file).tokens == [160, 320], "the blocks of its trace"
    long = HitCurve([100, 200, 300, 400, 500], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert long.around(300) == [100, 200, 300, 400, 500]
    assert long.around(250) == [100, 200, 250, 300, 400] and long.around(900) == [400, 500, 900]
    file.write_text("{}")
    with pytest.raises(CurveError, match=r"not a result of `python -m benchmarks\.eviction"):
        read_curve(file)


# ---- the search --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("precisely")
def test_the_goodput_is_the_highest_sustainable_rate() -> None:
    """One prefill takes 0.1 s. For a TTFT of 0.2 s for 90 % of requests, the exact distribution allows a utilisation of
    0.39."""
    made = Profile(
        "p",
        "m",
        "g",
        "test",
        False,
        1,
        [Degree(1, PrefillTimes(0, 1e-3, 0), [DecodeTimes(1e-9, 0, 0)], {1: 10**9})],
        0.0,
    )
    fleet = Fleet(
        [NodePool(made, 1, 1)], NetworkLinks(), EnginePlacement(prefill=Engines(Shape(1, 1), 1)), batch_tokens=1
    )
    goal = Goal(Slo(0.2, 1.0), 90)
    values = [goodput(fleet, Synthetic(Lengths(100), Lengths(1)), goal, 1.0, seed) for seed in range(6)]
    assert np.mean(values) == pytest.approx(3.92, rel=0.1)
    found = mean_goodput(values)
    assert found.ci95 is not None and found.ci95[0] < 3.92 < found.ci95[1]
    never = Goal(Slo(0.09, 1.0), 90)
    assert goodput(fleet, Synthetic(Lengths(100), Lengths(1)), never, 1.0, 0) == 0.0


def test_the_placement_serves_the_rate_and_uses_every_engine(crew: Crew) -> None:
    asked = question(seeds=(0, 1))
    answer = best(asked, rate_phases(asked, crew), crew)
    assert answer.enough and answer.goodput.value >= 5.0
    assert nodes_of(answer.placement, asked.pools) is not None
    for phase, engines in answer.placement.named.items():
        if engines.instances == 1:
            continue
        fewer = msgspec.structs.replace(engines, instances=engines.instances - 1)
        placement = msgspec.structs.replace(answer.placement, **{phase: fewer})
        assert goodput(asked.fleet(placement), asked.recipe, asked.goal, 5.0, 0) < 5.0, "one less would not do"


def test_no_other_placement_serves_much_more_for_the_price(crew: Crew) -> None:
    """The answer is compared with all placements, each simulated completely. Links are slow, and the store has half of
    each prompt."""
    recipe = Synthetic(Lengths(500), Lengths(10), hit_rate=0.5)
    asked = question(None, nodes=2, gpus=2, links=NetworkLinks(node_bytes_per_s=2e6), recipe=recipe)
    shapes = (Shape(1, 1), Shape(2, 1))
    every = [
        EnginePlacement(Engines(prefill, prefills), Engines(decode, decodes))
        for prefill in shapes
        for decode in shapes
        for prefills in (1, 2)
        for decodes in (1, 2, 3)
    ]
    fitting = [each for each in every if asked.fleet(each).nodes is not None]
    assert len(fitting) >= 7
    values = [measured(asked, each, crew).value / each.gpus for each in fitting]
    answer = best(asked, rate_phases(asked, crew), crew)
    # By chance, the highest of many simulated goodputs may be too high by a fifth.
    assert answer.goodput.value / answer.placement.gpus >= 0.8 * max(values)


@pytest.mark.usefixtures("less_roughly")
@pytest.mark.parametrize(("via", "hit_rate"), [("store", 0.5), ("direct", 0.0)])
def test_adding_or_removing_an_engine_serves_no_more_for_the_price(crew: Crew, via: Via, hit_rate: float) -> None:
    """The comparison uses the search's own seed, so it does not depend on chance. With this seed, the answer has an
    engine more or less than the best candidate."""
    recipe = Synthetic(Lengths(500, 1.0), Lengths(20, 1.0), hit_rate=hit_rate)
    asked = question(None, nodes=1, gpus=4, links=NetworkLinks(via), recipe=recipe, seeds=(3,))
    answer = best(asked, rate_phases(asked, crew), crew)
    found = answer.goodput.value / answer.placement.gpus
    others = [
        answer.placement.with_instances(phase, engines.instances + step)
        for phase, engines in answer.placement.named.items()
        for step in (1, -1)
        if engines.instances + step
    ]
    fitting = [each for each in others if asked.fleet(each).nodes is not None]
    assert fitting
    for each in fitting:
        assert measured(asked, each, crew).value / each.gpus <= found, f"{each} serves more than {answer.placement}"


def test_a_rate_beyond_all_gpus_is_reported(crew: Crew) -> None:
    asked = question(rate_rps=1000.0, nodes=1, gpus=2)
    answer = best(asked, rate_phases(asked, crew), crew)
    assert not answer.enough and answer.goodput.value < 1000
    assert answer.placement.gpus <= 2


def test_slower_links_and_shorter_slos_serve_less(crew: Crew) -> None:
    placement = EnginePlacement(Engines(Shape(1, 1), 2), Engines(Shape(1, 1), 2))
    values = {}
    for name, changes in {
        "base": {},
        "slow": {"links": NetworkLinks(node_bytes_per_s=1e6)},
        "strict": {"goal": Goal(Slo(0.15, 0.05), 90)},
        "cached": {"recipe": Synthetic(Lengths(500), Lengths(10), hit_rate=0.8)},
    }.items():
        asked = question(**changes)
        values[name] = goodput(asked.fleet(placement), asked.recipe, asked.goal, 5.0, 0)
    assert values["slow"] < values["base"] and values["strict"] < values["base"] < values["cached"]


def test_an_slo_that_no_engine_meets_is_named(crew: Crew) -> None:
    for slo, message in ((Slo(0.01, 0.05), "TTFT of 0.01 s"), (Slo(0.3, 0.001), "TPOT of 0.001 s")):
        asked = question(goal=Goal(slo, 90), nodes=1, gpus=2)
        phases = rate_phases(asked, crew)
        with pytest.raises(NothingFits, match=message):
            best(asked, phases, crew)
        assert best_colocated(asked, phases, crew) is None


def test_direct_hand_overs_keep_both_phases_on_one_node(crew: Crew) -> None:
    asked = question(links=NetworkLinks("direct", node_bytes_per_s=1e3, inside_bytes_per_s=1e12))
    answer = best(asked, rate_phases(asked, crew), crew)
    assert answer.enough
    prefill, decode = answer.placement.prefill, answer.placement.decode
    assert prefill is not None and decode is not None and prefill.shape.pp == decode.shape.pp
    with pytest.raises(NothingFits, match="use --via store"):
        alone = question(gpus=1, links=NetworkLinks("direct"))
        best(alone, rate_phases(alone, crew), crew)


def test_cheaper_gpus_are_preferred(crew: Crew) -> None:
    dear, cheap = (NodePool(small_profile(name=name), 2, 2, price) for name, price in (("dear", 5.0), ("cheap", 1.0)))
    asked = question(pools=[dear, cheap])
    answer = best(asked, rate_phases(asked, crew), crew)
    assert {engines.pool for engines in answer.placement.phases} == {1}


def test_a_plan_says_where_each_engine_runs_and_its_price(crew: Crew) -> None:
    """One kind of GPU prefills in half of the time; the other kind costs a third."""
    fast, slow = (
        msgspec.structs.replace(small_profile(name=name), gpu=name, degrees=[degree])
        for name, degree in zip(("fast", "slow"), reversed(small_profile().degrees), strict=True)
    )
    asked = question(rate_rps=12.0, pools=[NodePool(fast, 1, 4, 3.0), NodePool(slow, 3, 2, 1.0)])
    plan = make_plan(asked, crew, sensitivity=False)
    used: list[tuple[int, int]] = []
    for placed in (plan.placement.prefill, plan.placement.decode):
        assert placed.gpu == ("fast", "slow")[placed.pool] and placed.gpus == placed.tp * placed.pp * placed.instances
        assert placed.price_per_hour == placed.gpus * (3.0, 1.0)[placed.pool]
        assert len(placed.seats) == placed.instances
        for stages in placed.seats:
            assert len(stages) == placed.pp
            for seat in stages:
                assert (seat.node in (1, 2, 3)) is (placed.gpu == "slow"), "nodes are numbered through both kinds"
                assert len(seat.gpus) == placed.tp and max(seat.gpus) < (4, 2)[placed.pool]
                used += [(seat.node, gpu) for gpu in seat.gpus]
    assert len(set(used)) == len(used) == plan.gpus, "no GPU is used twice"
    assert plan.price_per_hour == plan.placement.prefill.price_per_hour + plan.placement.decode.price_per_hour
    assert plan.goodput_rps_per_price.value == pytest.approx(plan.goodput_rps / plan.price_per_hour)
    assert plan.goodput_rps_per_gpu.value == pytest.approx(plan.goodput_rps / plan.gpus)
    other = plan.colocated
    assert other.placement is not None and other.goodput_rps_per_price is not None
    assert other.goodput_rps_per_price.value == pytest.approx(other.goodput_rps / other.price_per_hour)


def test_a_plan_says_what_the_store_must_deliver(crew: Crew) -> None:
    recipe = Synthetic(Lengths(500), Lengths(10), hit_rate=0.5)
    plan = make_plan(question(recipe=recipe, keep_s=100.0), crew)
    assert plan.enough and plan.store.rate_rps == 5.0
    assert plan.store.write_bytes_per_s == pytest.approx(5 * 250 * 1000)
    assert plan.store.read_bytes_per_s == pytest.approx(5 * (250 + 500) * 1000)
    assert plan.store.capacity_bytes == pytest.approx(5 * 250 * 1000 * 100, rel=0.1)
    assert plan.store.nodes == 1
    assert plan.goodput_rps_per_gpu.value == pytest.approx(plan.goodput_rps / plan.gpus)
    changes = {each.change: each.ratio for each in plan.sensitivity}
    assert changes["nothing in the store"] < 1 and changes["TTFT SLO half"] <= 1 <= changes["TTFT SLO twice"]
    assert plan.capacities == [], "a share that was given says nothing of other sizes"
    rates = [point.rate_rps for point in plan.curve]
    assert rates == sorted(rates) and plan.curve[0].attainment > 0.9 > plan.curve[-1].attainment


def test_a_plan_reports_the_goodput_for_other_store_sizes(crew: Crew) -> None:
    """The plan assumes a size between the second and the third of the four measured ones."""
    curve = HitCurve([100e3, 200e3, 400e3, 800e3], [0.1, 0.3, 0.6, 0.7])
    recipe = Synthetic(Lengths(500), Lengths(10), hit_rate=curve.at(300e3))
    plan = make_plan(question(recipe=recipe, kept_bytes=300_000_000, hit_curve=curve), crew)
    assert plan.store.kept_bytes == 300e6 and plan.store.capacity_bytes > 300e6
    assert [each.kept_bytes for each in plan.capacities] == pytest.approx([100e6, 200e6, 300e6, 400e6, 800e6])
    assert [each.hit_rate for each in plan.capacities] == pytest.approx([0.1, 0.3, 0.45, 0.6, 0.7])
    assert [each.assumed for each in plan.capacities] == [False, False, True, False, False]
    served = [each.goodput_rps for each in plan.capacities]
    assert served == sorted(served) and served[0] < served[2] < served[-1], "what is found is not computed"
    assert [each.ratio for each in plan.capacities] == pytest.approx([each / served[2] for each in served])


def test_a_traces_plan_reports_the_hits_of_smaller_stores(crew: Crew, tmp_path: Path) -> None:
    prompts = [[number % 4, 100 + number] for number in range(400)]
    recipe = Replayed(str(trace(tmp_path / "t.jsonl", prompts)), kept_tokens=16 * 512)
    plan = make_plan(question(rate_rps=None, nodes=1, gpus=2, recipe=recipe), crew)
    sizes = [512_000 * blocks for blocks in (4, 8, 16, 32, 64)]
    assert [each.kept_bytes for each in plan.capacities] == sizes
    rates = [each.hit_rate for each in plan.capacities]
    assert rates[0] == 0.0 and rates[1:] == pytest.approx([0.495] * 4), "four prompts of two blocks come in between"
    assert plan.capacities[2].assumed and plan.capacities[0].goodput_rps < plan.capacities[2].goodput_rps


@pytest.mark.parametrize(
    ("changes", "short"),
    [
        ({}, "prefill compute"),
        (
            {
                "pools": [NodePool(small_profile(kv_tokens=1100), 1, 2)],
                "recipe": Synthetic(Lengths(500), Lengths(20)),
                "goal": Goal(Slo(2.0, 0.05), 90),
            },
            "decode memory",
        ),
        ({"links": NetworkLinks(store_bytes_per_s=3e6), "fixed_store": True}, "store bandwidth"),
        ({"recipe": Synthetic(Lengths(50), Lengths(20)), "goal": Goal(Slo(0.3, 0.025), 90)}, "decode compute"),
    ],
)
def test_a_plan_names_the_first_bottleneck(crew: Crew, changes: dict[str, object], short: str) -> None:
    asked = question(rate_rps=None, nodes=1, gpus=2, **changes)
    plan = make_plan(asked, crew, sensitivity=False)
    assert plan.binding == short


# ---- what a review found -----------------------------------------------------------------------------------------


def test_engines_that_share_a_load_are_as_few_as_possible(crew: Crew) -> None:
    """If the TTFT may be twice the prefill's time, a single engine may be only 29 % busy. Several engines that share
    the load may be much busier."""
    degree = Degree(1, PrefillTimes(0.1, 0, 0), [DecodeTimes(1e-6, 0, 0)], {1: 10**9})
    made = Profile("p", "m", "g", "test", False, 1, [degree], 0.0)
    asked = question(
        rate_rps=20.0,
        pools=[NodePool(made, 12, 1)],
        recipe=Synthetic(Lengths(100), Lengths(2)),
        goal=Goal(Slo(0.2, 1.0), 90),
    )
    answer = best(asked, rate_phases(asked, crew), crew)
    prefill = answer.placement.prefill
    assert answer.enough and prefill is not None and prefill.instances <= 4


def test_a_loose_slo_does_not_make_an_engine_faster(crew: Crew) -> None:
    """With an SLO of minutes, a backlog may grow for a few minutes without a miss, but the engine cannot sustain that
    load."""
    degree = Degree(1, PrefillTimes(0.1, 0, 0), [DecodeTimes(1e-6, 0, 0)], {1: 10**9})
    made = Profile("p", "m", "g", "test", False, 1, [degree], 0.0)
    fleet = Fleet(
        [NodePool(made, 1, 1)], NetworkLinks(), EnginePlacement(prefill=Engines(Shape(1, 1), 1)), batch_tokens=1
    )
    for ttft in (5.0, 60.0, 600.0):
        value = goodput(fleet, Synthetic(Lengths(100), Lengths(1)), Goal(Slo(ttft, 1.0), 90), 1.0, 0)
        assert 8.0 < value < 12.0, f"TTFT {ttft}: 10 prompts a second is all it can compute"


def test_many_requests_in_flight_are_not_mistaken_for_a_backlog() -> None:
    """At most 1500 requests of 10 s each are decoded at the same time: 150 per second."""
    degree = Degree(1, PrefillTimes(0, 0, 0), [DecodeTimes(0.1, 0, 0)], {1: 10**9})
    made = Profile("p", "m", "g", "test", False, 1, [degree], 0.0)
    fleet = Fleet(
        [NodePool(made, 1, 1)], NetworkLinks(), EnginePlacement(decode=Engines(Shape(1, 1), 1)), max_batch=1500
    )
    value = goodput(fleet, Synthetic(Lengths(10), Lengths(101)), Goal(Slo(1.0, 0.2), 90), 100.0, 0)
    assert 135 < value < 160


def test_a_slow_link_does_not_idle_the_others() -> None:
    slow, fast = NetworkLink(1.0), NetworkLink(100.0)
    assert transfer(0.0, 10.0, [(slow, 1.0), (fast, 1.0)]) == pytest.approx(10.0)
    assert transfer(0.0, 10.0, [(fast, 1.0)]) == pytest.approx(0.2)


def test_shared_roles_are_compared_too(crew: Crew) -> None:
    watched = Watched(small_profile(), Shape(1, 1), NetworkLinks(), Goal(Slo(0.3, 0.05), 90), seeds=(0,))
    load = OfferedLoad(4.0, 500.0, 20.0, 0.0)
    proposal = propose(watched, load, 2, None, [], crew)
    assert proposal.now is not None and proposal.best is not None
    assert (proposal.now.prefill, proposal.now.decode) == (2, 2)
    assert proposal.change is (proposal.best.goodput_rps >= 1.05 * proposal.now.goodput_rps)


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (OfferedLoad(10.9, 1000, 100, 0.5), []),
        (OfferedLoad(13.0, 1000, 100, 0.5), ["10 -> 13 req/s"]),
        (OfferedLoad(7.0, 1000, 100, 0.5), ["10 -> 7 req/s"]),
        (OfferedLoad(10.0, 1300, 60, 0.5), ["1e+03 -> 1.3e+03 tokens a prompt", "100 -> 60 tokens an answer"]),
        (OfferedLoad(10.0, 1000, 100, 0.8), ["hit rate 50% -> 80%"]),
        (OfferedLoad(10.0, 1000, 100, 0.31), []),
    ],
)
def test_drift_is_reported_above_the_given_share(now: OfferedLoad, says: list[str]) -> None:
    assert drift(OfferedLoad(10.0, 1000, 100, 0.5), now, 0.2) == says
