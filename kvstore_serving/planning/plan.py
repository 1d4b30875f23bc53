"""The plan: the placement that was found, its bottleneck, what the store must deliver, and the alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.document import (
    Alone,
    Apart,
    AtCapacity,
    Basis,
    Binding,
    Colocated,
    Placed,
    PlanDocument,
    Point,
    Sensitivity,
    StoreNeeds,
)
from kvstore_serving.planning.goodput import Crew, Goal
from kvstore_serving.planning.outage import OutageCost, cost_of
from kvstore_serving.planning.placement import seats_of
from kvstore_serving.planning.queueing import Queue, Unstable, inter_op
from kvstore_serving.planning.search import (
    NothingFits,
    PlacementResult,
    Question,
    Rated,
    best,
    best_colocated,
    measured,
    rate_phases,
)
from kvstore_serving.planning.simulator import SimulatedRun
from kvstore_serving.planning.workload import Floats, Lengths, Recipe, Replayed, Synthetic, without_hits

STORE_BUSY: Final = 0.6  # the highest share of time for which a store's links may be busy: requests come in bursts
NEARLY: Final = 0.95  # the share of the goodput with an unlimited store that is enough
DOUBLINGS: Final = 8
UNLIMITED: Final = 1_000_000  # nodes of a store that is never the bottleneck
BEYOND: Final = 1.25  # the rate is raised by this factor until requests miss, which shows the bottleneck
AROUND: Final = (0.25, 0.5, 1.0, 2.0, 4.0)  # the sizes compared, in multiples of what the store keeps of a trace
CURVE: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)  # the chart's rates, in multiples of the goodput


def make_plan(
    question: Question, crew: Crew, *, sensitivity: bool = True, outage_s: float | None = None
) -> PlanDocument:
    """Search for a placement, and analyse it. `outage_s`: if given, also simulate an engine that is away for this time.
    Raises `NothingFits` or `OutageTooLong`."""
    # First find what the engines could serve with an unlimited store, then the store that this needs.
    unlimited = question if question.fixed_store else _with_store(question, UNLIMITED)
    phases = rate_phases(unlimited, crew)
    answer = best(unlimited, phases, crew)
    if not question.fixed_store:
        question, answer = _with_its_store(question, answer, crew)
    other = _other(question, phases, crew)
    curves = _curves(question, [each for each in (answer, other) if each is not None], crew)
    rate = answer.goodput.value
    base = crew.goodputs([question.task(answer.placement, rate)])[0] if sensitivity else 0.0
    [at_goodput] = crew.runs([question.task(answer.placement, rate)])
    placed, price = _placed(question, answer), question.price(answer.placement)
    return PlanDocument(
        placement=Apart(placed["prefill"], placed["decode"]),
        gpus=answer.placement.gpus,
        price_per_hour=price,
        goodput_rps=rate,
        goodput_rps_per_gpu=answer.goodput.per(answer.placement.gpus),
        goodput_rps_per_price=answer.goodput.per(price),
        rate_rps=question.rate_rps,
        enough=answer.enough,
        binding=_binding(question, answer, crew),
        store=store_needs(question, answer, at_goodput),
        colocated=_colocated(question, other, curves[1] if other is not None else []),
        sensitivity=_sensitivity(question, answer, base, crew) if sensitivity else [],
        capacities=_capacities(question, answer, base, crew) if sensitivity else [],
        outages=[] if outage_s is None else _outages(question, answer, outage_s, crew),
        alone=_alone(question, phases),
        closed_form=closed_form(question, answer),
        curve=curves[0],
        time_s=at_goodput.mean_parts_s(),
        busy=at_goodput.busy,
        memory=at_goodput.memory,
        links=at_goodput.links,
        slo=question.goal.slo,
        percentile=question.goal.percentile,
        workload=question.recipe.source,
        hit_rate=question.recipe.means.hit_rate,
        profiles=[
            f"{pool.profile.name} ({'measured' if pool.profile.measured else 'published'})" for pool in question.pools
        ],
        basis=Basis(list(question.pools), question.links, question.recipe, question.max_batch, question.chunk_tokens),
    )


def _with_store(question: Question, nodes: int) -> Question:
    return replace(question, links=msgspec.structs.replace(question.links, store_nodes=nodes))


def _with_its_store(question: Question, answer: PlacementResult, crew: Crew) -> tuple[Question, PlacementResult]:
    """Return the question with as many store nodes as the answer needs, and the answer for these nodes."""
    [run] = crew.runs([_with_store(question, UNLIMITED).task(answer.placement, answer.goodput.value)])
    nodes = store_needs(question, answer, run).nodes
    target = question.rate_rps if question.rate_rps is not None and answer.enough else NEARLY * answer.goodput.value
    for _ in range(DOUBLINGS):
        sized = _with_store(question, max(1, nodes))
        found = measured(sized, answer.placement, crew)
        if found.value >= target:
            break
        nodes = max(1, nodes) * 2  # the bandwidth is enough, but each transfer takes too long
    if not found.value:
        raise NothingFits(f"with {nodes} store nodes, the engines do not hold the SLOs at any rate: use faster nodes")
    return sized, replace(answer, goodput=found, enough=question.rate_rps is None or found.value >= question.rate_rps)


def _other(question: Question, phases: dict[str, list[Rated]], crew: Crew) -> PlacementResult | None:
    """Return the best placement of colocated engines with the same store, or None if none holds the SLOs."""
    try:
        return best_colocated(question, phases, crew)
    except NothingFits:
        return None


def _binding(question: Question, answer: PlacementResult, crew: Crew) -> Binding:
    """Return the bottleneck. It is found at a rate above the goodput, because requests then miss their SLOs."""
    rate = answer.goodput.value
    for _ in range(DOUBLINGS):
        rate *= BEYOND
        [run] = crew.runs([question.task(answer.placement, rate)])
        if run.attainment(question.goal.slo) < 1:
            break
    return binding(run, question.goal.slo)


def binding(run: SimulatedRun, slo: Slo) -> Binding:
    """Return the bottleneck of a run at a rate above the goodput. Most of the requests that missed their SLOs waited
    for it."""
    ttft, tpot = run.held(slo)
    link: Binding = "store bandwidth" if run.links["store"] >= run.links["node"] else "node link"
    parts = run.parts_s
    if (~ttft).sum() >= (~tpot).sum():
        return link if _mean(parts["load"][~ttft]) > _mean(parts["prefill_queue"][~ttft]) else "prefill compute"
    memory, moved = _mean(parts["decode_memory"][~tpot]), _mean(parts["hand_over"][~tpot])
    # The share of the requests missing TPOT that would have missed it without any wait.
    slow = float((run.tpot_s - (parts["decode_memory"] + parts["hand_over"]) / run.steps > slo.tpot_s)[~tpot].mean())
    if slow > 1 / 2:
        return "decode compute"
    return "decode memory" if memory >= moved else link


def _mean(values: Floats) -> float:
    return float(np.nanmean(values)) if len(values) and not np.isnan(values).all() else 0.0


def store_needs(question: Question, answer: PlacementResult, run: SimulatedRun) -> StoreNeeds:
    """Return what the store must deliver at the requested rate or, if that is not served, at the goodput. The store has
    at least as many nodes as in `links`."""
    links, profile = question.links, question.pools[answer.placement.phases[0].pool].profile
    rate = _served_rps(question, answer)
    means, kv = question.recipe.means, profile.kv_bytes_per_token
    through = means.inputs if links.via == "store" else 0.0
    read = rate * (means.hits + through) * kv
    write = rate * means.new * kv if through or means.hits else 0.0
    parts = run.mean_parts_s()
    under_way = rate * through * kv * (parts.get("hand_over", 0.0) + parts.get("decode_memory", 0.0))
    if question.kept_bytes is not None:
        kept = float(question.kept_bytes)
    elif isinstance(question.recipe, Replayed) and question.recipe.hits and question.recipe.kept_tokens is not None:
        kept = float(question.recipe.kept_tokens * kv)
    elif means.kept_tokens is not None:
        kept = float(means.kept_tokens * kv)
    else:
        kept = rate * means.new * kv * question.keep_s if means.hits else 0.0
    capacity = under_way + kept
    nodes = max(
        math.ceil(max(read, write) / (STORE_BUSY * links.store_bytes_per_s)),
        math.ceil(capacity / links.store_memory_bytes),
        links.store_nodes if read or write else 0,
    )
    return StoreNeeds(rate, read, write, capacity, kept, nodes)


def _served_rps(question: Question, answer: PlacementResult) -> float:
    """Return the requested rate if the placement serves it, and otherwise the goodput."""
    return question.rate_rps if question.rate_rps is not None and answer.enough else answer.goodput.value


def closed_form(question: Question, answer: PlacementResult) -> Queue | None:
    """Return the queue of a prefill engine that gets its share of the goodput at random times. Every prompt is assumed
    to have the mean length and to be computed alone. Returns None if the engine could serve this rate only in batches.
    In the simulation prompts wait longer, because lengths vary or because they wait for other resources."""
    prefill = answer.placement.prefill
    assert prefill is not None
    profile, means, stages = question.pools[prefill.pool].profile, question.recipe.means, prefill.shape.pp
    times = profile.degree(prefill.shape.tp).prefill
    service_s = times.of(means.new, means.inputs**2 - means.hits**2) + profile.stage_s * stages
    try:
        return inter_op(service_s, answer.goodput.value / prefill.instances, stages)
    except Unstable:
        return None


# ---- other parts -------------------------------------------------------------------------------------------------


def _placed(question: Question, answer: PlacementResult) -> dict[str, Placed]:
    """Return the engines of each phase of a placement. The placement must fit the nodes."""
    nodes = question.fleet(answer.placement).nodes
    assert nodes is not None
    found = {}
    for (phase, engines), seats in zip(answer.placement.named.items(), seats_of(answer.placement, nodes), strict=True):
        pool = question.pools[engines.pool]
        found[phase] = Placed(
            engines.shape.tp, engines.shape.pp, engines.instances, engines.pool, pool.profile.gpu, engines.gpus,
            engines.gpus * pool.price, seats,
        )  # fmt: skip
    return found


def _colocated(question: Question, answer: PlacementResult | None, curve: list[Point]) -> Colocated:
    if answer is None:
        return Colocated(None, None, None, 0.0, 0, 0.0, False, [])
    gpus, price, goodput = answer.placement.gpus, question.price(answer.placement), answer.goodput
    placed = _placed(question, answer)["colocated"]
    return Colocated(placed, goodput.per(gpus), goodput.per(price), goodput.value, gpus, price, answer.enough, curve)


def _alone(question: Question, phases: dict[str, list[Rated]]) -> list[Alone]:
    return [
        Alone(
            phase,
            question.pools[each.pool].profile.gpu,
            each.shape.tp,
            each.shape.pp,
            each.rate_rps / each.shape.gpus,
        )
        for phase, rated in phases.items()
        for each in rated
    ]


def _curves(question: Question, answers: Sequence[PlacementResult], crew: Crew) -> list[list[Point]]:
    tasks = [question.task(each.placement, each.goodput.value * share) for each in answers for share in CURVE]
    points = [
        Point(task[3], run.attainment(question.goal.slo)) for task, run in zip(tasks, crew.runs(tasks), strict=True)
    ]
    return [points[first : first + len(CURVE)] for first in range(0, len(points), len(CURVE))]


def _sensitivity(question: Question, answer: PlacementResult, base: float, crew: Crew) -> list[Sensitivity]:
    """Return the goodput when one thing at a time changes. `base`: the goodput of the first seed with nothing
    changed."""
    slo, links = question.goal.slo, question.links
    changed: dict[str, Question] = {
        "TTFT SLO half": replace(question, goal=Goal(Slo(slo.ttft_s / 2, slo.tpot_s), question.goal.percentile)),
        "TTFT SLO twice": replace(question, goal=Goal(Slo(slo.ttft_s * 2, slo.tpot_s), question.goal.percentile)),
        "TPOT SLO half": replace(question, goal=Goal(Slo(slo.ttft_s, slo.tpot_s / 2), question.goal.percentile)),
        "TPOT SLO twice": replace(question, goal=Goal(Slo(slo.ttft_s, slo.tpot_s * 2), question.goal.percentile)),
        "links between nodes half as fast": replace(
            question, links=msgspec.structs.replace(links, node_bytes_per_s=links.node_bytes_per_s / 2)
        ),
        "store half as fast": replace(
            question, links=msgspec.structs.replace(links, store_bytes_per_s=links.store_bytes_per_s / 2)
        ),
    }
    recipe, changing = question.recipe, msgspec.structs.replace
    if isinstance(recipe, Synthetic):
        longer: Callable[[Lengths], Lengths] = lambda lengths: Lengths(lengths.mean * 1.25, lengths.cv)  # noqa: E731
        changed["prompts a quarter longer"] = replace(question, recipe=changing(recipe, inputs=longer(recipe.inputs)))
        changed["answers a quarter longer"] = replace(question, recipe=changing(recipe, outputs=longer(recipe.outputs)))
    if recipe.means.hits:
        changed["nothing in the store"] = replace(question, recipe=without_hits(recipe))
    placements = [answer.placement] * len(changed)
    for phase, engines in answer.placement.named.items():
        if engines.instances > 1:
            changed[f"one {phase} engine less, as after a failure"] = question
            placements.append(answer.placement.with_instances(phase, engines.instances - 1))
    rate = answer.goodput.value
    tasks = [each.task(placement, rate) for each, placement in zip(changed.values(), placements, strict=True)]
    values = crew.goodputs(tasks)
    return [
        Sensitivity(change, value, value / base if base else 0.0) for change, value in zip(changed, values, strict=True)
    ]


def _capacities(question: Question, answer: PlacementResult, base: float, crew: Crew) -> list[AtCapacity]:
    """Return the goodput when the store keeps more or less, so that prompts find more or less there. `base`: as for
    `_sensitivity`."""
    kv = question.pools[0].profile.kv_bytes_per_token
    recipes, assumed = _by_capacity(question, kv)
    others = [tokens for tokens in recipes if tokens != assumed]
    changed = (replace(question, recipe=recipes[tokens]) for tokens in others)
    tasks = [each.task(answer.placement, answer.goodput.value) for each in changed]
    served = dict(zip(others, crew.goodputs(tasks), strict=True))
    served[assumed] = base
    return [
        AtCapacity(
            tokens * kv,
            recipe.means.hit_rate,
            served[tokens],
            served[tokens] / base if base else 0.0,
            tokens == assumed,
        )
        for tokens, recipe in recipes.items()
    ]


def _outages(question: Question, answer: PlacementResult, outage_s: float, crew: Crew) -> list[OutageCost]:
    fixed = question.task(answer.placement, _served_rps(question, answer))
    return crew.each(cost_of, [(*fixed, phase, outage_s) for phase in answer.placement.named])


def _by_capacity(question: Question, kv: int) -> tuple[dict[float, Recipe], float]:
    """Return the load for each size of the store in tokens, in rising order, and the assumed size. The loads are empty
    if it is not known how much prompts find in stores of other sizes."""
    recipe, changing, curve = question.recipe, msgspec.structs.replace, question.hit_curve
    if isinstance(recipe, Synthetic):
        if curve is None or question.kept_bytes is None:
            return {}, 0.0
        assumed = question.kept_bytes / kv
        return {tokens: changing(recipe, hit_rate=curve.at(tokens)) for tokens in curve.around(assumed)}, assumed
    if not recipe.hits or recipe.kept_tokens is None:
        return {}, 0.0
    kept = recipe.kept_tokens
    return {kept * share: changing(recipe, kept_tokens=round(kept * share)) for share in AROUND}, float(kept)
