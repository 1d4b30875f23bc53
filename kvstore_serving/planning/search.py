"""The search for a placement: the degrees of parallelism, the number of engines of each phase, and their nodes.

Both algorithms are DistServe's (Zhong et al., OSDI 2024, algorithms 1 and 2). They are extended in three ways: prompts
may be partly in the store, each request must attain both SLOs, and transfers take time.

* Blocks go *through the store*, over the nodes' network, so each phase is placed by itself (algorithm 1). Every shape
  that fits the memory is simulated alone, which gives the rate that one engine serves. Then combinations of engines are
  simulated, beginning with the cheapest ones that should serve the rate. A combination that does not hold the SLOs gets
  more engines. If no rate is given, combinations are simulated six at a time, and at most 24. The search stops when the
  rates of the next combination's engines promise less than the best combination serves. Then the best combination gets
  one engine more or fewer, as long as it serves more for its price. Finally, the three best combinations are compared
  with all seeds.
* Blocks go *directly* from GPU to GPU, and the network between nodes is slow. So corresponding stages of both phases
  are on one node (algorithm 2), and both phases have the same number of stages. A unit fills one node for each stage,
  and units are repeated.

Colocated engines are searched as well, for comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.goodput import Crew, Goal, Goodput, Task, mean_goodput
from kvstore_serving.planning.hit_curve import HitCurve
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape, shares_of
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.workload import Recipe

FINALISTS: Final = 6  # combinations of engines that are simulated at a time
MOST_FINALISTS: Final = 24
LEADERS: Final = 3  # placements that are compared with all seeds
GROWTH: Final = 4  # rounds in which finalists may get an engine, or the best one may gain or lose one
# On a link that is busier than this, transfers of random sizes at random times wait longer than they take.
BUSIEST_LINK: Final = 0.5
NEVER_S: Final = math.inf

_Order: TypeAlias = "Callable[[EnginePlacement], tuple[float, ...]]"


@dataclass(frozen=True)
class Question:
    """The question for the search.

    rate_rps: the requested rate; None to serve as much as possible for the price
    seeds: the seeds for the interval of the result, and for the choice between the best placements; the rest of the
    search uses only the first seed
    fixed_store: whether the store has the number of nodes in `links`; otherwise it gets as many as it needs
    kept_bytes: the bytes that the store keeps for later prompts; None for the number in the workload. If that is None,
    too, it is what is written within `keep_s`
    """

    pools: Sequence[NodePool]
    links: NetworkLinks
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

    def fleet(self, placement: EnginePlacement) -> Fleet:
        """Return the fleet with these engines."""
        return Fleet(self.pools, self.links, placement, self.max_batch, self.chunk_tokens)

    def task(
        self,
        placement: EnginePlacement,
        rate_rps: float | None = None,
        *,
        goal: Goal | None = None,
        seed: int | None = None,
    ) -> Task:
        """Return the task that simulates a placement: by default at the requested rate, with the first seed."""
        rate = rate_rps or self.rate_rps or 1.0
        return self.fleet(placement), self.recipe, goal or self.goal, rate, self.seeds[0] if seed is None else seed

    def price(self, placement: EnginePlacement) -> float:
        """Return the price of a placement for an hour."""
        return placement.price(self.pools)


@dataclass(frozen=True)
class Rated:
    """An engine that was simulated alone, with the rate that one instance serves."""

    pool: int
    shape: Shape
    rate_rps: float


@dataclass(frozen=True)
class PlacementResult:
    """A placement and its goodput. `enough`: whether the placement serves the requested rate."""

    placement: EnginePlacement
    goodput: Goodput
    enough: bool


class NothingFits(ValueError):
    """No engine fits the nodes, or no placement holds the SLOs."""


def shapes_of(pools: Sequence[NodePool]) -> list[tuple[int, Shape]]:
    """Return the pool and the shape of each kind of engine that fits the memory and the nodes."""
    return [
        (number, Shape(tp, pp))
        for number, pool in enumerate(pools)
        for tp, pp in pool.profile.shapes
        if tp <= pool.gpus_per_node and pp <= pool.nodes * (pool.gpus_per_node // tp)
    ]


def rate_phases(question: Question, crew: Crew) -> dict[str, list[Rated]]:
    """Return, for `prefill`, `decode` and `colocated`, the rate that each shape serves alone. The best rate for its
    price comes first."""
    shapes = shapes_of(question.pools)
    if not shapes:
        raise NothingFits(
            "no degree of parallelism in the profile fits these nodes: give more nodes, or more GPUs in each node"
        )
    # The two phases mostly miss the SLOs of different requests, so each phase may have half of the allowed misses.
    slo, percentile = question.goal.slo, 100 - (100 - question.goal.percentile) / 2
    goals = {
        "prefill": Goal(Slo(slo.ttft_s, NEVER_S), percentile),
        "decode": Goal(Slo(NEVER_S, slo.tpot_s), percentile),
        "colocated": question.goal,
    }
    names = [(phase, pool, shape) for phase in goals for pool, shape in shapes]
    tasks = [
        question.task(EnginePlacement(**{phase: Engines(shape, 1, pool)}), 1.0, goal=goals[phase])
        for phase, pool, shape in names
    ]
    found: dict[str, list[Rated]] = {phase: [] for phase in goals}
    for (phase, pool, shape), rate in zip(names, crew.goodputs(tasks), strict=True):
        if rate > 0:
            found[phase].append(Rated(pool, shape, rate))
    for rated in found.values():
        rated.sort(key=lambda each: -each.rate_rps / (each.shape.gpus * question.pools[each.pool].price))
    return found


def best(question: Question, phases: dict[str, list[Rated]], crew: Crew) -> PlacementResult:
    """Return the cheapest placement with separate prefill and decode engines that serves the rate. If there is none,
    return the placement that serves most. If no rate is given, return the one that serves most for its price. Raises
    `NothingFits`."""
    for phase in ("prefill", "decode"):
        if not phases[phase]:
            slo = question.goal.slo
            limit = f"TTFT of {slo.ttft_s:g} s" if phase == "prefill" else f"TPOT of {slo.tpot_s:g} s"
            raise NothingFits(f"no {phase} engine holds a {limit}, even with one request at a time")
    order = _order(question, phases)
    candidates = (_direct if question.links.via == "direct" else _apart)(question, phases, order)
    return _decide(question, candidates, crew, order)


def best_colocated(question: Question, phases: dict[str, list[Rated]], crew: Crew) -> PlacementResult | None:
    """Return the cheapest placement of engines that do both phases, or None if none holds the SLOs."""
    candidates = []
    for rated in phases["colocated"]:
        most = _most(question, rated)
        wanted = most if question.rate_rps is None else math.ceil(question.rate_rps / rated.rate_rps)
        if instances := min(wanted, most):
            candidates.append(EnginePlacement(colocated=Engines(rated.shape, instances, rated.pool)))
    if not candidates:
        return None
    order = _order(question, phases)
    return _decide(question, sorted(candidates, key=order), crew, order)


# ---- candidates --------------------------------------------------------------------------------------------------


def _apart(question: Question, phases: dict[str, list[Rated]], order: _Order) -> list[EnginePlacement]:
    """Return the candidates of algorithm 1, which places the engines of each phase by themselves."""
    pairs = [(prefill, decode) for prefill in phases["prefill"] for decode in phases["decode"]]
    return _ranked(order, [list(_counts(question, *pair)) for pair in pairs])


def _ranked(order: _Order, groups: Sequence[Sequence[EnginePlacement]]) -> list[EnginePlacement]:
    """Return the best placement of each group, in falling order. The placements of a group have the same pair of shapes
    and different numbers of engines."""
    return sorted((min(group, key=order) for group in groups if group), key=order)


def _counts(question: Question, prefill: Rated, decode: Rated) -> Iterator[EnginePlacement]:
    """Yield the numbers of engines that serve the rate. If no rate is given, or if these engines do not fit, yield as
    many as fit."""
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


def _direct(question: Question, phases: dict[str, list[Rated]], order: _Order) -> list[EnginePlacement]:
    """Return the candidates of algorithm 2: stages of both phases are on one node, in units that are repeated."""
    groups = [
        list(_units(question, prefill, decode))
        for prefill in phases["prefill"]
        for decode in phases["decode"]
        if prefill.pool == decode.pool and prefill.shape.pp == decode.shape.pp
    ]
    if not any(groups):
        raise NothingFits(
            "no prefill and decode engines with the same number of stages fit on one node: use --via store"
        )
    return _ranked(order, groups)


def _units(question: Question, prefill: Rated, decode: Rated) -> Iterator[EnginePlacement]:
    """Yield placements of units. A unit has engines of both phases and needs one node for each stage. Units are
    repeated until they serve the rate or fill all nodes."""
    pool, tp = question.pools[prefill.pool], prefill.shape.tp
    units = pool.nodes // prefill.shape.pp
    for number in range(1, pool.gpus_per_node // tp + 1):
        for instances in range(1, (pool.gpus_per_node - number * tp) // decode.shape.tp + 1):
            serves = min(number * prefill.rate_rps, instances * decode.rate_rps)
            times = units if question.rate_rps is None else min(units, math.ceil(question.rate_rps / serves))
            if times:
                yield _pair(prefill, number * times, decode, instances * times)


def _pair(prefill: Rated, prefills: int, decode: Rated, decodes: int) -> EnginePlacement:
    return EnginePlacement(Engines(prefill.shape, prefills, prefill.pool), Engines(decode.shape, decodes, decode.pool))


def _most(question: Question, rated: Rated) -> int:
    """Return how many instances of a shape fit its pool."""
    pool, shape = question.pools[rated.pool], rated.shape
    return pool.nodes * (pool.gpus_per_node // shape.tp) // shape.pp


def _order(question: Question, phases: dict[str, list[Rated]]) -> _Order:
    """Return the order of candidates. First come those that seem to serve the rate, ordered by price, and then the
    others, ordered by what they serve. If no rate is given, the order is by what candidates serve for their price."""
    rates = {(phase, each.pool, each.shape): each.rate_rps for phase, rated in phases.items() for each in rated}

    def order(placement: EnginePlacement) -> tuple[float, ...]:
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


def _carried(question: Question, placement: EnginePlacement) -> float:
    """Return the rate that the nodes' links can carry. A phase that is simulated alone does not hand anything over."""
    fleet, means = question.fleet(placement), question.recipe.means
    if question.links.via == "direct" or placement.prefill is None or fleet.nodes is None:
        return math.inf
    # The tokens of a request that the engines of each phase receive and send. Prefill engines receive the tokens that
    # the store has, and send the tokens that they compute. Decode engines receive the whole prompt.
    moved = ((means.hits, means.new), (means.inputs, 0.0))
    into: defaultdict[int, float] = defaultdict(float)  # bytes for each request, by node
    out: defaultdict[int, float] = defaultdict(float)
    kv = question.pools[placement.phases[0].pool].profile.kv_bytes_per_token
    for (gets, sends), instances in zip(moved, fleet.nodes, strict=True):
        for stages in instances:
            for node, share in shares_of(stages).items():
                into[node] += gets * kv * share / len(instances)
                out[node] += sends * kv * share / len(instances)
    return BUSIEST_LINK * question.links.node_bytes_per_s / max(*into.values(), *out.values())


def _decide(question: Question, candidates: Sequence[EnginePlacement], crew: Crew, order: _Order) -> PlacementResult:
    """Simulate whole placements in the order of the candidates. Returns the best one, which is the cheapest whose
    goodput over all seeds reaches the rate."""
    if not candidates:
        raise NothingFits(
            "no placement with both phases fits these nodes and these SLOs: add nodes, or allow more time"
        )
    refused: dict[EnginePlacement, Goodput] = {}
    if question.rate_rps is None:
        served = _worthwhile(question, candidates, crew, order)
    else:
        served = _finalists(question, candidates, crew)
        for _ in range(GROWTH):
            enough = [each for each, value in served.items() if value >= question.rate_rps and each not in refused]
            for placement in sorted(enough, key=lambda each: (question.price(each), -served[each])):
                refused[placement] = found = measured(question, placement, crew)
                if found.value >= question.rate_rps:
                    return PlacementResult(placement, found, True)
            # What each phase serves alone is only an estimate, so one more engine may be needed.
            grown = dict.fromkeys(each for placement in served for each in _changed(question, placement, (1,)))
            fresh = sorted((each for each in grown if each not in served), key=question.price)
            if not fresh:
                break
            served |= _served(question, fresh[: 2 * FINALISTS], crew)

    def worth(placement: EnginePlacement, rps: float) -> tuple[float, float]:
        price = question.price(placement)
        return rps / price if question.rate_rps is None else rps, -price

    # The first seed may favour one placement by chance, so all seeds decide.
    leaders = sorted(served, key=lambda each: worth(each, served[each]), reverse=True)[:LEADERS]
    decided = {each: refused.get(each) or measured(question, each, crew) for each in leaders}
    chosen = max(leaders, key=lambda each: worth(each, decided[each].value))
    found = decided[chosen]
    if not found.value:
        raise NothingFits(
            "together, the engines do not hold the SLOs at any rate: hand-overs or computations take too long"
        )
    return PlacementResult(chosen, found, question.rate_rps is None or found.value >= question.rate_rps)


def _finalists(question: Question, candidates: Sequence[EnginePlacement], crew: Crew) -> dict[EnginePlacement, float]:
    """Return what the first candidates serve, each with the fewest engines that serve the rate. Engines that share a
    load serve more than the sum of what each serves alone."""
    shrunk = crew.shrunk([question.task(each) for each in candidates[:FINALISTS]])
    return _served(question, list(dict.fromkeys(shrunk)), crew)


def _worthwhile(
    question: Question, candidates: Sequence[EnginePlacement], crew: Crew, order: _Order
) -> dict[EnginePlacement, float]:
    """Return what the candidates serve, until the next one promises less for its price than the best one serves. The
    result also has what the best one serves with one engine more or fewer."""

    def worth(placement: EnginePlacement) -> float:
        return served[placement] / question.price(placement)

    served: dict[EnginePlacement, float] = {}
    for first in range(0, min(len(candidates), MOST_FINALISTS), FINALISTS):
        if -order(candidates[first])[1] <= max(map(worth, served), default=0.0):
            break
        served |= _served(question, candidates[first : first + FINALISTS], crew)
    # What each phase serves alone shows which shapes go well together, but not so well how many engines of each are
    # needed.
    for _ in range(GROWTH):
        fresh = [each for each in _changed(question, max(served, key=worth), (1, -1)) if each not in served]
        if not fresh:
            break
        served |= _served(question, fresh, crew)
    return served


def measured(question: Question, placement: EnginePlacement, crew: Crew) -> Goodput:
    """Return the goodput of a placement over all seeds."""
    return mean_goodput(crew.goodputs([question.task(placement, seed=seed) for seed in question.seeds]))


def _served(question: Question, placements: Sequence[EnginePlacement], crew: Crew) -> dict[EnginePlacement, float]:
    """Return the goodput of each placement with the first seed."""
    return dict(zip(placements, crew.goodputs([question.task(each) for each in placements]), strict=True))


def _changed(question: Question, placement: EnginePlacement, steps: Sequence[int]) -> Iterator[EnginePlacement]:
    """Yield the placements that differ in one phase by one of `steps` engines, if they fit. Steps may be negative."""
    for phase, engines in placement.named.items():
        for step in steps:
            changed = placement.with_instances(phase, max(1, engines.instances + step))
            if changed != placement and question.fleet(changed).nodes is not None:
                yield changed
