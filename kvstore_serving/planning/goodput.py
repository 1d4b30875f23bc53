"""Goodput: the highest rate at which enough requests attain their SLOs, by bisection over simulated runs.

The same requests are played at every rate, so attainment falls as the rate rises, but for chance. Each seed gives a
goodput; their mean is reported, with the interval of 95 % that Student's t gives for so few.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import msgspec

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.placement import Placement
from kvstore_serving.planning.simulator import Fleet, Run, simulate
from kvstore_serving.planning.workload import Recipe

PRECISION: Final = 0.02  # of a goodput, relative
REQUESTS: Final = 500  # of a run, and for each instance REQUESTS_EACH more
REQUESTS_EACH: Final = 150
# A queue that grows is not seen before it is as long as the SLOs allow: a run lasts so many times that.
SPAN: Final = 10
# Loose SLOs would make runs very long: they end here. Half of a run's requests must be more than all engines decode at
# a time, because a run keeps up if as many end as come in its second half.
MOST_REQUESTS: Final = 8000  # and for each instance MOST_BATCHES full batches more
MOST_BATCHES: Final = 2.5
MISSES: Final = 20  # that a run must allow: else the percentile is a matter of chance
KEEPS_UP: Final = 0.95
_Result = TypeVar("_Result")
_LOWEST_RPS: Final = 1e-4
_HIGHEST_RPS: Final = 1e6
# Student's t for 95 %, two sided, by degrees of freedom.
_T95: Final = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Goodput(msgspec.Struct, frozen=True):
    """Requests a second; `ci95`: None for a single seed."""

    value: float
    ci95: tuple[float, float] | None

    def per(self, number: float) -> Goodput:
        """A share of it."""
        ci95 = None if self.ci95 is None else (self.ci95[0] / number, self.ci95[1] / number)
        return Goodput(self.value / number, ci95)


@dataclass(frozen=True)
class Goal:
    """What is to be held: the SLOs, by this share of requests, in percent. `apart`: each SLO for itself, as DistServe
    counts; a request may then miss one of them, and another request the other."""

    slo: Slo
    percentile: float
    apart: bool = False


Task: TypeAlias = tuple[Fleet, Recipe, Goal, float, int]
"""What to simulate: a fleet, its load, what is to be held, the rate in requests a second, and the seed."""


def requests_of(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float) -> int:
    """-> how many requests a run has: enough that all engines have work, that a queue which grows is seen, and that
    misses are counted."""
    instances = sum(engines.instances for engines in fleet.placement.phases)
    slack = (goal.slo.ttft_s, goal.slo.tpot_s * recipe.means.outputs)
    span_s = SPAN * sum(each for each in slack if each < math.inf)
    least = max(REQUESTS + REQUESTS_EACH * instances, math.ceil(MISSES / (1 - goal.percentile / 100)))
    most = MOST_REQUESTS + math.ceil(MOST_BATCHES * fleet.max_batch) * instances
    return max(least, min(most, math.ceil(rate_rps * span_s)))


def attained(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int) -> bool:
    """Whether a fleet holds the SLOs at a rate."""
    if goal.apart:
        run = play(fleet, recipe, goal, rate_rps, seed, whole=True)
        share = min(float(held.mean()) for held in run.held(goal.slo))
    else:
        run = play(fleet, recipe, goal, rate_rps, seed)
        share = 0.0 if run.decided else run.attainment(goal.slo)
    return share >= goal.percentile / 100 and run.kept_up >= KEEPS_UP


def play(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int, whole: bool = False) -> Run:
    """Simulate one run; `whole`: also when so many have missed that the goal is lost."""
    workload = recipe.make(requests_of(fleet, recipe, goal, rate_rps), seed)
    return simulate(fleet, workload, rate_rps, goal.slo, None if whole else goal.percentile)


def goodput(fleet: Fleet, recipe: Recipe, goal: Goal, guess_rps: float, seed: int) -> float:
    """-> the goodput of one seed; 0 if not even requests that come one by one attain their SLOs."""
    low, high = 0.0, guess_rps
    while attained(fleet, recipe, goal, high, seed):
        low, high = high, 2 * high
        if high > _HIGHEST_RPS:
            return low
    if not low:
        low = high / 2
        while not attained(fleet, recipe, goal, low, seed):
            low, high = low / 4, low
            if low < _LOWEST_RPS:
                return 0.0
    while high - low > PRECISION * high:
        middle = math.sqrt(low * high) if high > 2 * low else (low + high) / 2
        low, high = (middle, high) if attained(fleet, recipe, goal, middle, seed) else (low, middle)
    return low


def mean_goodput(values: Sequence[float]) -> Goodput:
    """-> the mean of the goodputs of several seeds, and its interval."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Goodput(mean, None)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = _T95[min(count - 1, len(_T95) - 1)] * deviation / math.sqrt(count)
    half = max(half, PRECISION / 2 * mean)  # a bisection knows no better
    return Goodput(mean, (max(0.0, mean - half), mean + half))


def shrunk(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int) -> Placement:
    """-> the placement with as few engines of each phase as hold the SLOs at a rate; the same one if it does not."""
    placement = fleet.placement
    if not attained(fleet, recipe, goal, rate_rps, seed):
        return placement
    for phase in placement.named:
        low, high = 0, placement.named[phase].instances  # the first does not hold, the other does
        while high - low > 1:
            middle = (low + high) // 2
            fewer = replace(fleet, placement=placement.with_instances(phase, middle))
            holds = fewer.nodes is not None and attained(fewer, recipe, goal, rate_rps, seed)
            low, high = (low, middle) if holds else (middle, high)
        placement = placement.with_instances(phase, high)
    return placement


# ---- many at once ------------------------------------------------------------------------------------------------


class Crew:
    """Runs simulations on all cores. `progress`: called with how many are done, and of how many."""

    def __init__(self, executor: Executor, progress: Callable[[int, int], None]) -> None:
        self._executor = executor
        self._progress = progress
        self._begun = self._done = 0

    def goodputs(self, tasks: Sequence[Task]) -> list[float]:
        """-> the goodput of each; its rate is a guess."""
        return self.each(goodput, tasks)

    def shrunk(self, tasks: Sequence[Task]) -> list[Placement]:
        """-> the smaller placement of each."""
        return self.each(shrunk, tasks)

    def runs(self, tasks: Sequence[Task]) -> list[Run]:
        """-> the whole run of each."""
        return self.each(play, [(*task, True) for task in tasks])

    def each(self, function: Callable[..., _Result], tasks: Iterable[tuple[object, ...]]) -> list[_Result]:
        """-> what a function of a module says to each task, in their order."""
        futures = [self._executor.submit(function, *task) for task in tasks]
        self._begun += len(futures)
        for future in futures:
            future.add_done_callback(self._count)
        return [future.result() for future in futures]

    def _count(self, _: Future[_Result]) -> None:
        self._done += 1
        self._progress(self._done, self._begun)


@contextmanager
def crew(progress: Callable[[int, int], None], processes: int | None = None) -> Iterator[Crew]:
    """A crew of so many processes; None: one for each core."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), mp_context=context) as executor:
        try:
            yield Crew(executor, progress)
        finally:
            executor.shutdown(cancel_futures=True)
