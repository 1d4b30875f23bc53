"""Compares the simulator's prediction with real engines, which get the same requests at the same times, at several
rates.

The requests are those of a plan's load: either they have the same lengths and the same kind of gaps, or they are a
trace's own requests. Prompts share as much as the plan assumes, in whole pieces of 512 tokens, as in traces. The
simulator's store holds what the sent requests can find there, not what the plan assumed.

Intervals are 95 % intervals. Each is the union of two intervals, because requests of one queue are not independent (see
`kvstore_serving.load.report`). The interval of the prediction shows how much the result of another sample with as many
requests would differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvstore_serving.load.prompts import HASHED_TOKENS
from kvstore_serving.load.records import Planned, RequestOutcome
from kvstore_serving.load.report import LoadReport, Slo, attains, widest_interval
from kvstore_serving.load.trace import replay
from kvstore_serving.planning.metrics_page import MetricsError, metrics_of
from kvstore_serving.planning.simulator import Fleet, SimulatedRun, simulate
from kvstore_serving.planning.watching import GENERATING
from kvstore_serving.planning.workload import Recipe, Synthetic, Workload, found_tokens, rate_of

LEAST_RATES: Final = 5  # fewer rates do not give a curve


class Compared(msgspec.Struct, frozen=True):
    """The predicted and measured results at one rate: the shares of requests that attain their SLOs, with their
    intervals, and medians in seconds.

    error: the error of the predicted attainment, in percentage points
    hit rates: the shares of prompts' tokens that were hits; the measured one is None if the engine does not report it
    split_share: the share of requests that the proxy split between two engines; None if the endpoint is not a proxy
    """

    rate_rps: float
    predicted: float
    predicted_ci95: tuple[float, float] | None
    measured: float
    measured_ci95: tuple[float, float] | None
    error: float
    predicted_ttft_s: float
    measured_ttft_s: float | None
    predicted_tpot_s: float
    measured_tpot_s: float | None
    predicted_hit_rate: float
    measured_hit_rate: float | None
    split_share: float | None


class Verified(msgspec.Struct, frozen=True):
    """The result of `kvstore plan verify`. `workload`: the load in words. Errors are absolute, in percentage points.
    `apart`: whether the prediction is for prefill engines with decode engines."""

    compared: list[Compared]
    mean_error: float
    worst_error: float
    slo: Slo
    workload: str
    apart: bool


async def decisions_at(url: str) -> dict[str, float] | None:
    """Return how many requests the proxy at this URL has served so far, by its decision; None if it is not a proxy."""
    try:
        samples = await metrics_of(url)
    except MetricsError:
        return None
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name == "kvstore_proxy_requests_total" and sample.labels["endpoint"] in GENERATING:
            decision = sample.labels["decision"]
            found[decision] = found.get(decision, 0.0) + sample.value
    proxy = any(sample.name.startswith("kvstore_proxy_") for sample in samples)
    return found if proxy else None


def split_share(before: dict[str, float] | None, after: dict[str, float] | None) -> float | None:
    """Return the share of requests that were split between two readings; None if not known."""
    if before is None or after is None:
        return None
    grown = {decision: after[decision] - before.get(decision, 0.0) for decision in after}
    served = sum(grown.values())
    return grown.get("split", 0.0) / served if served > 0 else None


def planned_load(recipe: Recipe, rate_rps: float, requests: int | None, warm_up: int, seed: int) -> list[Planned]:
    """Return the requests of a load at a rate. The first `warm_up` requests are not counted, and come in addition to
    `requests`.

    requests: the number of counted requests; None for the whole trace, or the part that the recipe uses
    seed: the seed of a synthetic load

    Raises `TraceError`, or `ValueError` for a trace without a rate.
    """
    if isinstance(recipe, Synthetic):
        assert requests is not None
        return list(_synthetic(recipe.make(warm_up + requests, seed), rate_rps, warm_up))
    path, total = Path(recipe.path), recipe.limit if requests is None else warm_up + requests
    counted = None if total is None else max(0, total - warm_up)
    blocks, unit = recipe.block_tokens, recipe.time_unit
    speed = rate_rps / rate_of(path, total, blocks, unit)
    return list(replay(path, speed=speed, requests=counted, warmup=warm_up, block_tokens=blocks, time_unit=unit))


def _synthetic(made: Workload, rate_rps: float, warm_up: int) -> Iterator[Planned]:
    """Yield prompts with shared beginnings. Each is as long as the part that the store is assumed to have, rounded to
    whole pieces."""
    lengths, outputs = made.inputs.tolist(), made.outputs.tolist()
    alike = [
        min(round(hits / HASHED_TOKENS), (tokens - 1) // HASHED_TOKENS)
        for hits, tokens in zip(made.hits.tolist(), lengths, strict=True)
    ]
    fresh = max(alike)
    for index, at in enumerate(made.at.tolist()):
        own = -(-lengths[index] // HASHED_TOKENS) - alike[index]
        hash_ids = [*range(alike[index]), *range(fresh, fresh + own)]
        fresh += own
        yield Planned(index, at / rate_rps, hash_ids, lengths[index], outputs[index], counted=index >= warm_up)


def workload_of(planned: Sequence[Planned], recipe: Recipe) -> Workload:
    """Return the requests of a load as a workload for the simulator. At a rate of 1 they come at their own times."""
    prompts = ((each.hash_ids, each.input_tokens) for each in planned)
    found, held = found_tokens(prompts, recipe, planned[0].block_tokens)
    return Workload(
        np.array([each.at_s for each in planned]),
        np.array([each.input_tokens for each in planned]),
        np.array([each.output_tokens for each in planned]),
        found,
        recipe.source,
        held,
    )


def compare(
    fleet: Fleet,
    recipe: Recipe,
    planned: Sequence[Planned],
    outcomes: Sequence[RequestOutcome],
    report: LoadReport,
    split: float | None = None,
) -> Compared:
    """Simulate the requests that were sent at one rate. `outcomes`: the outcomes that `report` was made from, in the
    order of arrival. `split`: the share of requests that were split, if known."""
    assert report.rate_rps is not None
    workload = workload_of(planned, recipe)
    run: SimulatedRun = simulate(fleet, workload, 1.0, warm_up=report.warmup)
    ttft, tpot = run.held(report.slo)
    predicted = [bool(each) for each in ttft & tpot]
    measured = [all(attains(outcome, report.slo)) for outcome in outcomes if outcome.planned.counted]
    shares = sum(predicted) / len(predicted), sum(measured) / len(measured)
    tokens, counted = report.tokens, slice(report.warmup, None)
    return Compared(
        rate_rps=report.rate_rps,
        predicted=shares[0],
        predicted_ci95=widest_interval(predicted),
        measured=shares[1],
        measured_ci95=widest_interval(measured),
        error=abs(shares[0] - shares[1]) * 100,
        predicted_ttft_s=float(np.median(run.ttft_s)),
        measured_ttft_s=report.ttft_s.p50,
        predicted_tpot_s=float(np.median(run.tpot_s)),
        measured_tpot_s=report.tpot_s.p50,
        predicted_hit_rate=float(workload.hits[counted].sum() / workload.inputs[counted].sum()),
        measured_hit_rate=None if tokens.cached is None or not tokens.prompt else tokens.cached / tokens.prompt,
        split_share=split,
    )


def verified(compared: Sequence[Compared], slo: Slo, recipe: Recipe, *, apart: bool) -> Verified:
    """Return the result over all rates."""
    errors = [each.error for each in compared]
    return Verified(list(compared), sum(errors) / len(errors), max(errors), slo, recipe.source, apart)
