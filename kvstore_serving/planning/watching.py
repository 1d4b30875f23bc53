"""Replanning: sees from a proxy's metrics when the load is no longer the one that was planned for, and says what helps.

What can change without new engines is their roles: of E engines, p prefill and E - p decode. Every split is simulated
with the load as it is now, and the best one is proposed if it gains enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client.samples import Sample

from kvstore_serving.planning.fleet import Links, Pool
from kvstore_serving.planning.goodput import Crew, Goal, mean_goodput
from kvstore_serving.planning.placement import Engines, Placement, Shape
from kvstore_serving.planning.profile import Profile
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.workload import Lengths, Synthetic

WORTH: Final = 1.05  # a split is proposed if it serves so many times as much
_COUNTERS: Final = {
    "kvstore_proxy_requests_total": "requests",
    "kvstore_proxy_prompt_tokens_total": "prompt",
    "kvstore_proxy_cached_tokens_total": "cached",
    "kvstore_proxy_output_tokens_total": "output",
}
GENERATING: Final = ("/v1/completions", "/v1/chat/completions")  # endpoints


class Load(msgspec.Struct, frozen=True):
    """What came in a window: requests a second, mean tokens of prompts and answers, share of prompts in a cache."""

    rate_rps: float
    input_tokens: float
    output_tokens: float
    hit_rate: float


class Split(msgspec.Struct, frozen=True):
    """Engines of each phase, and the goodput of the load as it is now. An engine that does both counts in both."""

    prefill: int
    decode: int
    goodput_rps: float


class Proposal(msgspec.Struct, frozen=True):
    """`drift`: what has changed since the last plan, in words; empty: nothing has. `gain`: goodput of `best` to that
    of `now`, the present roles; None if those serve nothing. `change`: the split is worth it. `enough`: the best split
    serves the rate; else more engines are needed."""

    load: Load
    drift: list[str]
    now: Split | None = None
    best: Split | None = None
    gain: float | None = None
    change: bool = False
    enough: bool = True


@dataclass(frozen=True)
class Counters:
    """The proxy's counters at a time, and the roles of each of its engines."""

    at_s: float
    counts: dict[str, float]
    roles: dict[str, set[str]]

    @property
    def split(self) -> tuple[int, int] | None:
        """-> engines that prefill, and that decode; None if there are some that do both."""
        prefill = sum(roles == {"prefill"} for roles in self.roles.values())
        decode = sum(roles == {"decode"} for roles in self.roles.values())
        return (prefill, decode) if prefill + decode == len(self.roles) else None


def counters(samples: Sequence[Sample], at_s: float) -> Counters:
    """Read a page. Raises `ValueError` if it is not a proxy's."""
    counts = dict.fromkeys(_COUNTERS.values(), 0.0)
    roles: dict[str, set[str]] = {}
    seen = False
    for sample in samples:
        if name := _COUNTERS.get(sample.name):
            seen = True
            # Others generate nothing, or were sent away before any engine had them.
            if name != "requests" or (
                sample.labels["endpoint"] in GENERATING and sample.labels["outcome"] not in ("rejected", "refused")
            ):
                counts[name] += sample.value
        elif sample.name == "kvstore_proxy_engine_up":  # also of one that failed a moment ago
            roles.setdefault(sample.labels["engine"], set()).add(sample.labels["role"])
    if not seen:
        raise ValueError("no metrics of `kvstore proxy` there")
    return Counters(at_s, counts, roles)


def load_between(before: Counters, after: Counters) -> Load | None:
    """-> the load of the time between; None if nothing came, or the proxy began again."""
    grown = {name: after.counts[name] - before.counts[name] for name in after.counts}
    if grown["requests"] <= 0 or min(grown.values()) < 0 or grown["prompt"] <= 0:
        return None
    requests = grown["requests"]
    return Load(
        requests / (after.at_s - before.at_s),
        grown["prompt"] / requests,
        grown["output"] / requests,
        grown["cached"] / grown["prompt"],
    )


def drift(planned: Load, now: Load, share: float) -> list[str]:
    """-> what differs by more than this share from the load that was planned for; hit rates, by so much of all."""
    found = []
    for name, unit in (
        ("rate_rps", "req/s"),
        ("input_tokens", "tokens a prompt"),
        ("output_tokens", "tokens an answer"),
    ):
        was, is_now = getattr(planned, name), getattr(now, name)
        if abs(is_now - was) > share * was:
            found.append(f"{was:.3g} -> {is_now:.3g} {unit}")
    if abs(now.hit_rate - planned.hit_rate) > share:
        found.append(f"hit rate {planned.hit_rate:.0%} -> {now.hit_rate:.0%}")
    return found


@dataclass(frozen=True)
class Watched:
    """What does not change: the engines' profile and shape, links, and the goal."""

    profile: Profile
    shape: Shape
    links: Links
    goal: Goal
    max_batch: int = 256
    seeds: Sequence[int] = (0, 1, 2)

    def fleet(self, prefill: int, decode: int) -> Fleet:
        """So many engines of each phase, each on nodes of its own."""
        pool = Pool(self.profile, (prefill + decode) * self.shape.pp, self.shape.tp)
        placement = Placement(Engines(self.shape, prefill), Engines(self.shape, decode))
        return Fleet([pool], self.links, placement, self.max_batch)

    def colocated(self, engines: int) -> Fleet:
        """So many engines that do both."""
        pool = Pool(self.profile, engines * self.shape.pp, self.shape.tp)
        return Fleet([pool], self.links, Placement(colocated=Engines(self.shape, engines)), self.max_batch)


def propose(
    watched: Watched, load: Load, engines: int, split: tuple[int, int] | None, drifted: list[str], crew: Crew
) -> Proposal:
    """-> the best split of so many engines, two or more, for this load. split: prefill and decode engines now; None:
    some do both, and are compared as if all did."""
    recipe = Synthetic(Lengths(load.input_tokens), Lengths(load.output_tokens), hit_rate=min(load.hit_rate, 0.99))
    tasks = [
        (watched.fleet(number, engines - number), recipe, watched.goal, load.rate_rps, seed)
        for number in range(1, engines)
        for seed in watched.seeds
    ]
    tasks += [(watched.colocated(engines), recipe, watched.goal, load.rate_rps, seed) for seed in watched.seeds]
    values = crew.goodputs(tasks)
    seeds = len(watched.seeds)
    splits = [
        Split(number, engines - number, mean_goodput(values[(number - 1) * seeds : number * seeds]).value)
        for number in range(1, engines)
    ]
    best = max(splits, key=lambda split: split.goodput_rps)
    if split is None:
        now = Split(engines, engines, mean_goodput(values[-seeds:]).value)
    else:
        now = splits[split[0] - 1] if 0 not in split else Split(*split, 0.0)
    gain = best.goodput_rps / now.goodput_rps if now.goodput_rps else None
    change = best.goodput_rps > 0 and (gain is None or gain >= WORTH)
    return Proposal(load, drifted, now, best, gain, change, best.goodput_rps >= load.rate_rps)
