"""The runs of `kvstore plan verify`: each rate is sent to the engines, and simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_cli.output import fail
from kvstore_cli.progress import progress_bar
from kvstore_serving.load.arrivals import seed_of, synthetic
from kvstore_serving.load.client import Bodies, Client, reach
from kvstore_serving.load.prompts import Prompts
from kvstore_serving.load.records import Planned
from kvstore_serving.load.report import Slo, make_report
from kvstore_serving.load.run import Run, raise_file_limit, run_load
from kvstore_serving.planning.fleet import Links, Pool
from kvstore_serving.planning.placement import Placement
from kvstore_serving.planning.profile import Profile
from kvstore_serving.planning.simulator import Fleet
from kvstore_serving.planning.verify import Verified, compare, predict, verified

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Against:
    """The endpoint, and what is sent there."""

    url: str
    model: str
    input_tokens: int
    output_tokens: int
    requests: int
    warmup: int
    vocabulary: int
    seed: int
    slo: Slo


def compare_rates(
    profile: Profile,
    placement: Placement,
    gpus_per_node: int | None,
    links: Links,
    against: Against,
    rates: Sequence[float],
    max_batch: int,
    chunk_tokens: int,
    shown: bool,
) -> Verified:
    """Measure and predict each rate. gpus_per_node: None: each engine has nodes of its own. Ends the command if the
    endpoint cannot be used, or the profile lacks a shape."""
    for engines in placement.phases:
        if (engines.shape.tp, engines.shape.pp) not in profile.shapes:
            shapes = ", ".join(f"{tp},{pp}" for tp, pp in profile.shapes)
            fail("usage", f"tp {engines.shape.tp}, pp {engines.shape.pp} are not in the profile, which has {shapes}")
    try:
        asyncio.run(reach(against.url))
    except (OSError, asyncio.TimeoutError) as error:
        fail("unreachable", f"nobody listens at {against.url}: {error}")
    largest = max(engines.shape.tp for engines in placement.phases)
    gpus = largest if gpus_per_node is None else gpus_per_node
    if gpus < largest:
        fail("usage", f"--gpus-per-node {gpus}: expected {largest} or more, the tensor parallelism of an engine")
    pool = Pool(profile, nodes=placement.gpus, gpus_per_node=gpus)
    fleet = Fleet([pool], links, placement, max_batch, chunk_tokens)
    found = []
    for number, rate in enumerate(rates):
        seed = seed_of(against.seed, number)
        planned = list(
            synthetic(rate, against.requests, against.warmup, against.input_tokens, against.output_tokens, seed)
        )
        with progress_bar(f"{rate:g} req/s", shown, "requests") as progress:
            run = asyncio.run(_send(against, planned, seed, lambda done: progress(done, len(planned))))  # noqa: B023
        report = make_report(
            run, against.slo, rate_rps=rate, source="verify", url=against.url, model=against.model, seed=seed
        )
        if not report.completed:
            fail("failed", f"all requests failed, {report.errors[0].kind}: {report.errors[0].message}")
        found.append(compare(predict(fleet, planned, against.warmup), report, rate))
    return verified(found, against.slo)


async def _send(against: Against, planned: Sequence[Planned], seed: int, ended: Callable[[int], None]) -> Run:
    raise_file_limit()
    bodies = Bodies(against.model, "completions")
    client = Client(against.url, "completions", timeout_s=TIMEOUT_S, api_key=None, whole_output=bodies.whole_output)
    async with client:
        return await run_load(
            planned,
            client,
            Prompts(against.vocabulary, seed),
            bodies,
            stop=asyncio.Event(),
            on_progress=lambda now: ended(now.ended),
        )
