"""Goodput: the highest rate at which enough requests attain their SLOs, found by bisection over simulated runs.

The same requests are simulated at every rate, so attainment falls as the rate rises, except for chance. Each seed gives
a goodput. The mean over the seeds is reported, with the 95 % interval from Student's t for this number of seeds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import msgspec

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.placement import EnginePlacement
from kvstore_serving.planning.simulator import Fleet, SimulatedRun, simulate
from kvstore_serving.planning.workload import Recipe

PRECISION: Final = 0.02  # the relative error of a goodput
RUN_REQUESTS: Final = 500  # requests in a run, plus REQUESTS_EACH for each instance
REQUESTS_EACH: Final = 150
# A growing queue shows only when its wait is as long as the SLOs allow, so a run lasts this many times as long.
SPAN: Final = 10
# Loose SLOs would make runs very long, so this is the limit. A run keeps up if as many requests end in its second half
# as arrive in it. So half of a run's requests must be more than all engines decode at a time.
MAX_RUN_REQUESTS: Final = 8000  # plus MOST_BATCHES full batches for each instance
MOST_BATCHES: Final = 2.5
MISSES: Final = 20  # misses that a run must allow; with fewer, the percentile is a matter of chance
KEEPS_UP: Final = 0.95
AT_ONCE: Final = 100  # requests that are sent at once to estimate the rate that is served
_Result = TypeVar("_Result")
_LOWEST_RPS: Final = 1e-4
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)
_HIGHEST_RPS: Final = 1e6
# Student's t for 95 %, two-sided, by degrees of freedom.
_T95: Final = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Goodput(msgspec.Struct, frozen=True):
    """A goodput in requests a second. `ci95`: its interval; None for a single seed."""

    value: float
    ci95: tuple[float, float] | None

    def per(self, number: float) -> Goodput:
        """Return the goodput divided by a number, such as the number of GPUs."""
        ci95 = None if self.ci95 is None else (self.ci95[0] / number, self.ci95[1] / number)
        return Goodput(self.value / number, ci95)


@dataclass(frozen=True)
class Goal:
    """The SLOs, and the percentage of requests that must attain them. `apart`: whether each SLO is counted by itself,
    as in DistServe. Different requests may then miss different SLOs."""

    slo: Slo
    percentile: float
    apart: bool = False


Task: TypeAlias = tuple[Fleet, Recipe, Goal, float, int]
"""What to simulate: a fleet, its load, what is to be held, the rate in requests a second, and the seed."""


def requests_of(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float) -> int:
    """Return the number of requests in a run. It is large enough that all engines have work, that a growing queue
    shows, and that misses can be counted."""
    instances = sum(engines.instances for engines in fleet.placement.phases)
    slack = (goal.slo.ttft_s, goal.slo.tpot_s * recipe.means.outputs)
    span_s = SPAN * sum(each for each in slack if each < math.inf)
    least = max(RUN_REQUESTS + REQUESTS_EACH * instances, math.ceil(MISSES / (1 - goal.percentile / 100)))
    most = MAX_RUN_REQUESTS + math.ceil(MOST_BATCHES * fleet.max_batch) * instances
    return max(least, min(most, math.ceil(rate_rps * span_s)))


def attained(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int) -> bool:
    """Return whether a fleet holds the SLOs at this rate."""
    if goal.apart:
        run = play(fleet, recipe, goal, rate_rps, seed, whole=True)
        share = min(float(held.mean()) for held in run.held(goal.slo))
    else:
        run = play(fleet, recipe, goal, rate_rps, seed)
        share = 0.0 if run.decided else run.attainment(goal.slo)
    return share >= goal.percentile / 100 and run.kept_up >= KEEPS_UP


def play(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int, whole: bool = False) -> SimulatedRun:
    """Simulate one run. `whole`: whether to continue the run when enough requests have missed to fail the goal."""
    workload = recipe.make(requests_of(fleet, recipe, goal, rate_rps), seed)
    return simulate(fleet, workload, rate_rps, goal.slo, None if whole else goal.percentile)


def goodput(fleet: Fleet, recipe: Recipe, goal: Goal, guess_rps: float, seed: int) -> float:
    """Return the goodput with one seed, or 0 if requests miss their SLOs even when they come one by one. The guess is
    doubled or halved, and then rates between the last two are tried. So the result does not depend on where the
    doubling begins."""
    low, high = 0.0, _doubled(fleet, recipe, guess_rps, seed)
    while attained(fleet, recipe, goal, high, seed):
        low, high = high, 2 * high
        if high > _HIGHEST_RPS:
            return low
    while not low and high > guess_rps:
        low, high = (high / 2, high) if attained(fleet, recipe, goal, high / 2, seed) else (0.0, high / 2)
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


def _doubled(fleet: Fleet, recipe: Recipe, guess_rps: float, seed: int) -> float:
    """Return the guess, doubled as long as it stays below the rate that is served when many requests arrive at once.

    Simulations of lower rates take longest, because few requests share a decoding step and the run does not end early.
    """
    run = simulate(fleet, recipe.make(AT_ONCE, seed), _HIGHEST_RPS, warm_up=0)
    served_rps = AT_ONCE / max(run.duration_s, AT_ONCE / _HIGHEST_RPS)
    return guess_rps * 2.0 ** max(0, math.floor(math.log2(served_rps / guess_rps)))


def mean_goodput(values: Sequence[float]) -> Goodput:
    """Return the mean of the goodputs of several seeds, with its interval."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Goodput(mean, None)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = _T95[min(count - 1, len(_T95) - 1)] * deviation / math.sqrt(count)
    half = max(half, PRECISION / 2 * mean)  # a bisection is not more precise than this
    return Goodput(mean, (max(0.0, mean - half), mean + half))


def shrunk(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int) -> EnginePlacement:
    """Return the placement with the fewest engines of each phase that hold the SLOs at a rate. If the given placement
    does not hold them, it is returned unchanged."""
    placement = fleet.placement
    if not attained(fleet, recipe, goal, rate_rps, seed):
        return placement
    for phase in placement.named:
        low, high = 0, placement.named[phase].instances  # `low` instances do not hold the SLOs, `high` do
        while high - low > 1:
            middle = (low + high) // 2
            fewer = replace(fleet, placement=placement.with_instances(phase, middle))
            holds = fewer.nodes is not None and attained(fewer, recipe, goal, rate_rps, seed)
            low, high = (low, middle) if holds else (middle, high)
        placement = placement.with_instances(phase, high)
    return placement


# ---- many at once ------------------------------------------------------------------------------------------------


class Crew:
    """Runs simulations on all cores. `progress`: called with the number of finished simulations, and the number of
    all."""

    def __init__(self, executor: Executor, progress: Callable[[int, int], None]) -> None:
        self._executor = executor
        self._progress = progress
        self._begun = self._done = 0
        self._goodputs: dict[bytes, float] = {}  # by pickled task

    def goodputs(self, tasks: Sequence[Task]) -> list[float]:
        """Return the goodput of each task. The rate of a task is a guess at its goodput. A task that was already
        simulated is not simulated again."""
        # Tasks contain lists, so their pickled bytes are the keys. Nothing is unpickled.
        keys = [pickle.dumps(task) for task in tasks]
        fresh = {key: task for key, task in zip(keys, tasks, strict=True) if key not in self._goodputs}
        self._goodputs |= zip(fresh, self.each(goodput, fresh.values()), strict=True)
        return [self._goodputs[key] for key in keys]

    def shrunk(self, tasks: Sequence[Task]) -> list[EnginePlacement]:
        """Return the placement that `shrunk` finds for each task."""
        return self.each(shrunk, tasks)

    def runs(self, tasks: Sequence[Task]) -> list[SimulatedRun]:
        """Simulate each task's run to its end, and return the runs."""
        return self.each(play, [(*task, True) for task in tasks])

    def each(self, function: Callable[..., _Result], tasks: Iterable[tuple[object, ...]]) -> list[_Result]:
        """Call a module's function for each task, in parallel. Returns the results in the order of the tasks."""
        with _interrupts_wait():  # an interrupt inside `submit` may leave a process without an owner
            futures = [self._executor.submit(function, *task) for task in tasks]
        self._begun += len(futures)
        for future in futures:
            future.add_done_callback(self._count)
        return [future.result() for future in futures]

    def _count(self, _: Future[_Result]) -> None:
        self._done += 1
        self._progress(self._done, self._begun)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the body, if this is the main thread. Other threads get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {each: signal.signal(each, lambda number, _: came.append(number)) for each in _INTERRUPTS}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def _end_with_the_command() -> None:
    """Run in each process of a crew. It ends the process when the command has ended, even if it was killed."""
    command = multiprocessing.parent_process()
    assert command is not None

    def wait() -> None:
        command.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def crew(progress: Callable[[int, int], None], processes: int | None = None) -> Iterator[Crew]:
    """Yield a crew with this many processes, or with one for each core if `processes` is None. They are forked from a
    process that has imported the simulator, so they need not import it themselves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvstore_serving.planning.outage"])  # with all that it imports
    number = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(number, mp_context=context, initializer=_end_with_the_command) as executor:
        try:
            yield Crew(executor, progress)
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():  # their simulations are not needed any more
                worker.terminate()
            raise
        finally:
            executor.shutdown(cancel_futures=True)
