"""The search for a placement: which degrees of parallelism, how many engines of each phase, on which nodes.

Both ways are DistServe's (Zhong et al., OSDI 2024, algorithms 1 and 2), with prompts that the store has in part, with
SLOs that one request must hold together, and with transfers that take time:

* Blocks go *through the store*, over the nodes' network, so each phase is placed for itself (algorithm 1). Every shape
  that fits the memory is simulated alone, and gives the rate that one engine serves. The cheapest sums of engines that
  serve the rate are then simulated together, and get more engines where they do not hold. Without a rate, sums are
  simulated, six at a time and 24 at most, until the next one promises less, by what its engines serve alone, than the
  best serves; then the best one gets an engine more or less as long as that serves more for its price. All seeds
  decide between the three best.
* Blocks go *directly*, from GPU to GPU, and the network between nodes is slow: stages of both phases are on one node
  (algorithm 2). Both have as many stages, and a unit is what fits the nodes of one stage each; units are repeated.

Colocated engines are searched beside them, for comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import Links, Pool
from kvstore_serving.planning.goodput import Crew, Goal, Goodput, Task, mean_goodput
from kvstore_serving.planning.hit_curve import HitCurve
from kvstore_serving.planning.placement import Engines, Placement, Shape, shares_of
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.workload import Recipe

FINALISTS: Final = 6  # sums of engines that are simulated together at a time
MOST_FINALISTS: Final = 24
LEADERS: Final = 3  # placements of which all seeds decide
GROWTH: Final = 4  # times that finalists may get one more engine, or the best one an engine more or less
# A link that is busier makes transfers of random sizes at random times wait longer than they take.
BUSIEST_LINK: Final = 0.5
NEVER_S: Final = math.inf

_Order: TypeAlias = "Callable[[Placement], tuple[float, ...]]"


@dataclass(frozen=True)
class Question:
    """What the search is asked. `rate_rps` None: as much as can be served for the price. `seeds`: of the interval of
    the result, and of the choice between the best; the rest of the search uses the first. `fixed_store`: the store has
    the nodes that `links` says; else it is to have as many as it needs. `kept_bytes`: what the store keeps for later
    prompts; None: what the workload says, or what is written in `keep_s`."""

    pools: Sequence[Pool]
    links: Links
    recipe: Recipe
    goal: Goal
    rate_rps: float | None
    max_batch: int = 256
    chunk_tokens: int = 2048
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    fixed_store: bool = False
    keep_s: float = 600.0
    kept_bytes: int | None = None
    hit_curve: HitCurve | None = None

    def fleet(self, placement: Placement) -> Fleet:
        """These engines, on what there is."""
        return Fleet(self.pools, self.links, placement, self.max_batch, self.chunk_tokens)

    def task(
        self, placement: Placement, rate_rps: float | None = None, *, goal: Goal | None = None, seed: int | None = None
    ) -> Task:
        """What to simulate of a placement: at a rate, by default the one that was asked for, with the first seed."""
        rate = rate_rps or self.rate_rps or 1.0
        return self.fleet(placement), self.recipe, goal or self.goal, rate, self.seeds[0] if seed is None else seed

    def price(self, placement: Placement) -> float:
        """Of an hour."""
        return placement.price(self.pools)


@dataclass(frozen=True)
class Rated:
    """An engine alone: the rate that one instance serves."""

    pool: int
    shape: Shape
    rate_rps: float


@dataclass(frozen=True)
class Answer:
    """A placement and what it serves. `enough`: it serves the rate that was asked for."""

    placement: Placement
    goodput: Goodput
    enough: bool


class NothingFits(ValueError):
    """No engine fits the nodes, or none holds the SLOs."""


def shapes_of(pools: Sequence[Pool]) -> list[tuple[int, Shape]]:
    """-> the pool and the shape of all engines that fit memory and nodes."""
    return [
        (number, Shape(tp, pp))
        for number, pool in enumerate(pools)
        for tp, pp in pool.profile.shapes
        if tp <= pool.gpus_per_node and pp <= pool.nodes * (pool.gpus_per_node // tp)
    ]


def rate_phases(question: Question, crew: Crew) -> dict[str, list[Rated]]:
    """-> for `prefill`, `decode` and `colocated`, what each shape serves alone, the best for its price first."""
    shapes = shapes_of(question.pools)
    if not shapes:
        raise NothingFits(
            "no degree of parallelism of the profile fits these nodes: it needs more GPUs a node, or nodes"
        )
    # Misses of the two phases are of different requests, mostly: each may have half of what is allowed.
    slo, percentile = question.goal.slo, 100 - (100 - question.goal.percentile) / 2
    goals = {
        "prefill": Goal(Slo(slo.ttft_s, NEVER_S), percentile),
        "decode": Goal(Slo(NEVER_S, slo.tpot_s), percentile),
        "colocated": question.goal,
    }
    names = [(phase, pool, shape) for phase in goals for pool, shape in shapes]
    tasks = [
        question.task(Placement(**{phase: Engines(shape, 1, pool)}), 1.0, goal=goals[phase])
        for phase, pool, shape in names
    ]
    found: dict[str, list[Rated]] = {phase: [] for phase in goals}
    for (phase, pool, shape), rate in zip(names, crew.goodputs(tasks), strict=True):
        if rate > 0:
            found[phase].append(Rated(pool, shape, rate))
    for rated in found.values():
        rated.sort(key=lambda each: -each.rate_rps / (each.shape.gpus * question.pools[each.pool].price))
    return found


def best(question: Question, phases: dict[str, list[Rated]], crew: Crew) -> Answer:
    """-> the cheapest placement with prefill and decode apart that serves the rate; else the one that serves most.
    Without a rate, the one that serves most for its price. Raises `NothingFits`."""
    for phase in ("prefill", "decode"):
        if not phases[phase]:
            slo = question.goal.slo
            limit = f"TTFT of {slo.ttft_s:g} s" if phase == "prefill" else f"TPOT of {slo.tpot_s:g} s"
            raise NothingFits(f"no {phase} engine holds a {limit}, even with one request at a time")
    order = _order(question, phases)
    candidates = (_direct if question.links.via == "direct" else _apart)(question, phases, order)
    return _decide(question, candidates, crew, order)


def best_colocated(question: Question, phases: dict[str, list[Rated]], crew: Crew) -> Answer | None:
    """-> the cheapest placement of engines that do both. None if none holds the SLOs."""
    candidates = []
    for rated in phases["colocated"]:
        most = _most(question, rated)
        wanted = most if question.rate_rps is None else math.ceil(question.rate_rps / rated.rate_rps)
        if instances := min(wanted, most):
            candidates.append(Placement(colocated=Engines(rated.shape, instances, rated.pool)))
    if not candidates:
        return None
    order = _order(question, phases)
    return _decide(question, sorted(candidates, key=order), crew, order)


# ---- candidates --------------------------------------------------------------------------------------------------


def _apart(question: Question, phases: dict[str, list[Rated]], order: _Order) -> list[Placement]:
    """Algorithm 1: engines of each phase for themselves."""
    pairs = [(prefill, decode) for prefill in phases["prefill"] for decode in phases["decode"]]
    return _ranked(order, [list(_counts(question, *pair)) for pair in pairs])


def _ranked(order: _Order, groups: Sequence[Sequence[Placement]]) -> list[Placement]:
    """-> the best of each group, which are numbers of engines of one pair of shapes; the best first."""
    return sorted((min(group, key=order) for group in groups if group), key=order)


def _counts(question: Question, prefill: Rated, decode: Rated) -> Iterator[Placement]:
    """How many of each: for the rate; or, without one or if that does not fit, as many as fit."""
    rate = question.rate_rps
    if rate is not None:
        placement = _pair(prefill, math.ceil(rate / prefill.rate_rps), decode, math.ceil(rate / decode.rate_rps))
        if question.fleet(placement).nodes is not None:
            yield placement
            return
    for number in range(1, _most(question, prefill) + 1):
        wanted = math.ceil(number * prefill.rate_rps / decode.rate_rps)
        for instances in range(min(wanted, _most(question, decode)), 0, -1):
            placement = _pair(prefill, number, decode, instances)
            if question.fleet(placement).nodes is not None:
                yield placement
                break


def _direct(question: Question, phases: dict[str, list[Rated]], order: _Order) -> list[Placement]:
    """Algorithm 2: stages of both phases on one node, in units that are repeated."""
    groups = [
        list(_units(question, prefill, decode))
        for prefill in phases["prefill"]
        for decode in phases["decode"]
        if prefill.pool == decode.pool and prefill.shape.pp == decode.shape.pp
    ]
    if not any(groups):
        raise NothingFits("no pair of engines with as many stages fits the GPUs of a node: take --via store")
    return _ranked(order, groups)


def _units(question: Question, prefill: Rated, decode: Rated) -> Iterator[Placement]:
    """What of both fits the nodes of one stage each, as often as the rate wants it, or as there are nodes."""
    pool, tp = question.pools[prefill.pool], prefill.shape.tp
    units = pool.nodes // prefill.shape.pp
    for number in range(1, pool.gpus_per_node // tp + 1):
        for instances in range(1, (pool.gpus_per_node - number * tp) // decode.shape.tp + 1):
            serves = min(number * prefill.rate_rps, instances * decode.rate_rps)
            times = units if question.rate_rps is None else min(units, math.ceil(question.rate_rps / serves))
            if times:
                yield _pair(prefill, number * times, decode, instances * times)


def _pair(prefill: Rated, prefills: int, decode: Rated, decodes: int) -> Placement:
    return Placement(Engines(prefill.shape, prefills, prefill.pool), Engines(decode.shape, decodes, decode.pool))


def _most(question: Question, rated: Rated) -> int:
    """-> how many instances of a shape fit its pool."""
    pool, shape = question.pools[rated.pool], rated.shape
    return pool.nodes * (pool.gpus_per_node // shape.tp) // shape.pp


def _order(question: Question, phases: dict[str, list[Rated]]) -> _Order:
    """-> the order of candidates: those that seem to serve the rate, by their price; then by what they serve. Without a
    rate, by what they serve for their price."""
    rates = {(phase, each.pool, each.shape): each.rate_rps for phase, rated in phases.items() for each in rated}

    def order(placement: Placement) -> tuple[float, ...]:
        price = question.price(placement)
        serves = min(
            engines.instances * rates[phase, engines.pool, engines.shape] for phase, engines in placement.named.items()
        )
        serves = min(serves, _carried(question, placement))
        if question.rate_rps is None:
            return 0.0, -serves / price, price
        if serves < question.rate_rps:
            return 1.0, -serves, price
        return 0.0, price, -serves

    return order


def _carried(question: Question, placement: Placement) -> float:
    """-> the rate that the nodes' links carry well: a phase that is simulated alone does not hand anything over."""
    fleet, means = question.fleet(placement), question.recipe.means
    if question.links.via == "direct" or placement.prefill is None or fleet.nodes is None:
        return math.inf
    # Tokens of a request that the engines of a phase get and send: what prefill engines find in the store and what they
    # compute, and all of the prompt, which decode engines get.
    moved = ((means.hits, means.new), (means.inputs, 0.0))
    into: defaultdict[int, float] = defaultdict(float)  # bytes of a request, by node
    out: defaultdict[int, float] = defaultdict(float)
    kv = question.pools[placement.phases[0].pool].profile.kv_bytes_per_token
    for (gets, sends), instances in zip(moved, fleet.nodes, strict=True):
        for stages in instances:
            for node, share in shares_of(stages).items():
                into[node] += gets * kv * share / len(instances)
                out[node] += sends * kv * share / len(instances)
    return BUSIEST_LINK * question.links.node_bytes_per_s / max(*into.values(), *out.values())


def _decide(question: Question, candidates: Sequence[Placement], crew: Crew, order: _Order) -> Answer:
    """Simulate whole placements, the first ones first, and take the best: the cheapest one whose goodput, over all
    seeds, is the rate."""
    if not candidates:
        raise NothingFits("no placement with both phases fits these nodes")
    refused: dict[Placement, Goodput] = {}
    if question.rate_rps is None:
        served = _worthwhile(question, candidates, crew, order)
    else:
        served = _finalists(question, candidates, crew)
        for _ in range(GROWTH):
            enough = [each for each, value in served.items() if value >= question.rate_rps and each not in refused]
            for placement in sorted(enough, key=lambda each: (question.price(each), -served[each])):
                refused[placement] = found = measured(question, placement, crew)
                if found.value >= question.rate_rps:
                    return Answer(placement, found, True)
            # What each phase serves alone is an estimate: one more engine may be missing.
            grown = dict.fromkeys(each for placement in served for each in _changed(question, placement, (1,)))
            fresh = sorted((each for each in grown if each not in served), key=question.price)
            if not fresh:
                break
            served |= _served(question, fresh[: 2 * FINALISTS], crew)

    def worth(placement: Placement, rps: float) -> tuple[float, float]:
        price = question.price(placement)
        return rps / price if question.rate_rps is None else rps, -price

    # The first seed may favour one by chance: all seeds decide.
    leaders = sorted(served, key=lambda each: worth(each, served[each]), reverse=True)[:LEADERS]
    decided = {each: refused.get(each) or measured(question, each, crew) for each in leaders}
    chosen = max(leaders, key=lambda each: worth(each, decided[each].value))
    found = decided[chosen]
    if not found.value:
        raise NothingFits(
            "together, the engines hold the SLOs at no rate: a hand-over takes too long, or too much is computed"
        )
    return Answer(chosen, found, question.rate_rps is None or found.value >= question.rate_rps)


def _finalists(question: Question, candidates: Sequence[Placement], crew: Crew) -> dict[Placement, float]:
    """-> what the first candidates serve, with as few engines as serve the rate: engines that share a load serve more
    than as many that have each a part of it."""
    shrunk = crew.shrunk([question.task(each) for each in candidates[:FINALISTS]])
    return _served(question, list(dict.fromkeys(shrunk)), crew)


def _worthwhile(
    question: Question, candidates: Sequence[Placement], crew: Crew, order: _Order
) -> dict[Placement, float]:
    """-> what candidates serve, until the next one promises less for its price than the best one serves; and what that
    one serves with an engine more or less."""

    def worth(placement: Placement) -> float:
        return served[placement] / question.price(placement)

    served: dict[Placement, float] = {}
    for first in range(0, min(len(candidates), MOST_FINALISTS), FINALISTS):
        if -order(candidates[first])[1] <= max(map(worth, served), default=0.0):
            break
        served |= _served(question, candidates[first : first + FINALISTS], crew)
    # What each phase serves alone says which shapes are good together, and less well how many of each.
    for _ in range(GROWTH):
        fresh = [each for each in _changed(question, max(served, key=worth), (1, -1)) if each not in served]
        if not fresh:
            break
        served |= _served(question, fresh, crew)
    return served


def measured(question: Question, placement: Placement, crew: Crew) -> Goodput:
    """-> the goodput of a placement, over all seeds."""
    return mean_goodput(crew.goodputs([question.task(placement, seed=seed) for seed in question.seeds]))


def _served(question: Question, placements: Sequence[Placement], crew: Crew) -> dict[Placement, float]:
    """-> the goodput of each, with the first seed."""
    return dict(zip(placements, crew.goodputs([question.task(each) for each in placements]), strict=True))


def _changed(question: Question, placement: Placement, steps: Sequence[int]) -> Iterator[Placement]:
    """-> the placements with so many engines more of one phase, if they fit."""
    for phase, engines in placement.named.items():
        for step in steps:
            changed = placement.with_instances(phase, max(1, engines.instances + step))
            if changed != placement and question.fleet(changed).nodes is not None:
                yield changed
