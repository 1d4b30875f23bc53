"""Replanning: detects from a proxy's metrics that the load differs from the planned load, and proposes a change.

Without new engines, only the roles of engines can change: of E engines, p prefill and E - p decode. Every such split is
simulated with the present load, and the best split is proposed if it gains enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client.samples import Sample

from kvstore_serving.planning.fleet import NetworkLinks, NodePool
from kvstore_serving.planning.goodput import Crew, Goal, mean_goodput
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape
from kvstore_serving.planning.profile import Profile
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.workload import Lengths, Synthetic

WORTH: Final = 1.05  # a split is proposed if it serves at least this many times the present rate
_PROXY_COUNTERS: Final = {
    "kvstore_proxy_requests_total": "requests",
    "kvstore_proxy_prompt_tokens_total": "prompt",
    "kvstore_proxy_cached_tokens_total": "cached",
    "kvstore_proxy_output_tokens_total": "output",
}
GENERATING: Final = ("/v1/completions", "/v1/chat/completions")  # endpoints


class OfferedLoad(msgspec.Struct, frozen=True):
    """The load in a time window: requests a second, the mean tokens of prompts and answers, and the share of prompts'
    tokens in a cache."""

    rate_rps: float
    input_tokens: float
    output_tokens: float
    hit_rate: float


class Split(msgspec.Struct, frozen=True):
    """The number of engines of each phase, and their goodput with the present load. An engine that does both phases
    counts in both."""

    prefill: int
    decode: int
    goodput_rps: float


class Proposal(msgspec.Struct, frozen=True):
    """A proposal of roles.

    drift: what has changed since the last plan, in words; empty if nothing has
    gain: the goodput of `best` divided by that of `now`, the present roles; None if the present roles serve nothing
    change: whether the best split is worth a change
    enough: whether the best split serves the rate; otherwise more engines are needed
    """

    load: OfferedLoad
    drift: list[str]
    now: Split | None = None
    best: Split | None = None
    gain: float | None = None
    change: bool = False
    enough: bool = True


@dataclass(frozen=True)
class ProxyCounters:
    """The proxy's counters at one time, with the roles of each of its engines."""

    at_s: float
    counts: dict[str, float]
    roles: dict[str, set[str]]

    @property
    def split(self) -> tuple[int, int] | None:
        """The number of engines that prefill, and the number that decode. It is None if some engines do both."""
        prefill = sum(roles == {"prefill"} for roles in self.roles.values())
        decode = sum(roles == {"decode"} for roles in self.roles.values())
        return (prefill, decode) if prefill + decode == len(self.roles) else None


def counters(samples: Sequence[Sample], at_s: float) -> ProxyCounters:
    """Return the counters on a page of metrics. Raises `ValueError` if it is not a proxy's page."""
    counts = dict.fromkeys(_PROXY_COUNTERS.values(), 0.0)
    roles: dict[str, set[str]] = {}
    seen = False
    for sample in samples:
        if name := _PROXY_COUNTERS.get(sample.name):
            seen = True
            # Other requests generate nothing, or were refused before they were sent to an engine.
            if name != "requests" or (
                sample.labels["endpoint"] in GENERATING and sample.labels["outcome"] not in ("rejected", "refused")
            ):
                counts[name] += sample.value
        elif sample.name == "kvstore_proxy_engine_up":  # an engine that has just failed is listed, too
            roles.setdefault(sample.labels["engine"], set()).add(sample.labels["role"])
    if not seen:
        raise ValueError("the page has no metrics of `kvstore proxy`")
    return ProxyCounters(at_s, counts, roles)


def load_between(before: ProxyCounters, after: ProxyCounters) -> OfferedLoad | None:
    """Return the load between two readings, or None if no request came or the proxy was restarted."""
    grown = {name: after.counts[name] - before.counts[name] for name in after.counts}
    if grown["requests"] <= 0 or min(grown.values()) < 0 or grown["prompt"] <= 0:
        return None
    requests = grown["requests"]
    return OfferedLoad(
        requests / (after.at_s - before.at_s),
        grown["prompt"] / requests,
        grown["output"] / requests,
        grown["cached"] / grown["prompt"],
    )


def drift(planned: OfferedLoad, now: OfferedLoad, share: float) -> list[str]:
    """Return what differs from the planned load by more than this share. Hit rates must differ by this share of all
    tokens."""
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
    """What stays the same while roles change: the engines' profile and shape, the links, and the goal."""

    profile: Profile
    shape: Shape
    links: NetworkLinks
    goal: Goal
    max_batch: int = 256
    seeds: Sequence[int] = (0, 1, 2)

    def fleet(self, prefill: int, decode: int) -> Fleet:
        """Return a fleet of this many engines of each phase, each on its own nodes."""
        pool = NodePool(self.profile, (prefill + decode) * self.shape.pp, self.shape.tp)
        placement = EnginePlacement(Engines(self.shape, prefill), Engines(self.shape, decode))
        return Fleet([pool], self.links, placement, self.max_batch)

    def colocated(self, engines: int) -> Fleet:
        """Return a fleet of this many engines that do both phases."""
        pool = NodePool(self.profile, engines * self.shape.pp, self.shape.tp)
        return Fleet([pool], self.links, EnginePlacement(colocated=Engines(self.shape, engines)), self.max_batch)


def propose(
    watched: Watched, load: OfferedLoad, engines: int, split: tuple[int, int] | None, drifted: list[str], crew: Crew
) -> Proposal:
    """Return the best split of `engines` (at least 2) for this load.

    split: the present numbers of prefill and decode engines. If some engines do both, it is None, and the present fleet
    is simulated as if all engines did both.
    """
    recipe = Synthetic(Lengths(load.input_tokens), Lengths(load.output_tokens), hit_rate=min(load.hit_rate, 0.99))
    tasks = [
        (watched.fleet(number, engines - number), recipe, watched.goal, load.rate_rps, seed)
        for number in range(1, engines)
        for seed in watched.seeds
    ]
    if split is None:
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
