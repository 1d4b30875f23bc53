"""The results of a run: percentiles, SLO attainment, goodput, and their confidence intervals.

A request attains its SLOs only if it holds both the SLO of TTFT and that of TPOT. Separate percentiles of TTFT and TPOT
would say less, because different requests may miss them. A failed request attains no SLO. Latencies are reported for
completed requests only.

Intervals are 95 % intervals. Attainment has Wilson's interval, which is also right for few requests and for shares near
0 and 1, but assumes that requests are independent. Requests in a queue are not independent. So the interval of goodput
is the union of Wilson's interval and the interval of a block bootstrap. Each block of the bootstrap has consecutive
requests, about as many as the square root of the number of all requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from kvstore import __version__
from kvstore_serving.load.records import RequestOutcome

if TYPE_CHECKING:  # `run` imports the code that sends requests, which the planner does not need
    from kvstore_serving.load.run import LoadRun

# A generator is late if the p99 of its lateness is above this time, and above this share of the SLO of TTFT.
SENT_LATE_S: Final = 0.02
LATE_SHARE: Final = 0.1
_Z95: Final = 1.959963984540054
_RESAMPLES: Final = 2000


class Slo(msgspec.Struct, frozen=True):
    """The service level objectives, in seconds."""

    ttft_s: float
    tpot_s: float


class Spread(msgspec.Struct, frozen=True):
    """The distribution of one quantity, in seconds. All fields are None if there is no sample. Percentiles are
    interpolated, as in numpy."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Attainment(msgspec.Struct, frozen=True):
    """The shares of requests for which both SLOs hold together, and for which each SLO holds. `ci95` is the interval of
    `joint`."""

    joint: float | None
    ttft: float | None
    tpot: float | None
    ci95: tuple[float, float] | None
    ttft_ci95: tuple[float, float] | None
    tpot_ci95: tuple[float, float] | None


class TokenCounts(msgspec.Struct, frozen=True):
    """The tokens of completed requests.

    input, output: the requested tokens; `output` is for all answers to a prompt together
    prompt, completion: the tokens that the server counted; None if it did not count them
    cached: prompt tokens that the server found in a cache; None if it does not report them
    chunks: the number of chunks in which the tokens came
    """

    input: int
    output: int
    prompt: int | None
    cached: int | None
    completion: int
    chunks: int


class ErrorCount(msgspec.Struct, frozen=True):
    """Failed requests with one kind of error, and the message of the first one."""

    kind: str
    count: int
    message: str


class LoadReport(msgspec.Struct, frozen=True):
    """The results of one run.

    requests: the number of counted requests, without the warm-up and without those cut short by an interrupt
    whole: the number of completed requests whose answer came as one JSON object instead of a stream
    empty: the number of completed requests without a token
    """

    requests: int
    completed: int
    failed: int
    whole: int
    empty: int
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    latency_s: Spread  # from sending to the end of the answer
    attainment: Attainment
    goodput_rps: float
    goodput_ci95: tuple[float, float]
    slo: Slo
    rate_rps: float | None  # the requested rate; None for a trace
    sent_rps: float  # counted requests in the arrival window
    window_s: float
    duration_s: float
    throughput_rps: float  # completed requests in the duration
    output_tokens_per_s: float
    tokens: TokenCounts
    errors: list[ErrorCount]
    warmup: int
    clipped: int
    interrupted: bool
    unfinished: int
    lateness_s: Spread
    generator_late: bool
    source: str
    url: str
    model: str
    seed: int
    version: str = __version__


def spread(values: Sequence[float]) -> Spread:
    """Return the distribution of any number of values."""
    if not values:
        return Spread()
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(array, [50, 90, 99]))
    return Spread(float(array.mean()), p50, p90, p99, float(array.max()))


def wilson(hits: int, count: int) -> tuple[float, float] | None:
    """Return Wilson's 95 % score interval for `hits` of `count` requests, or None if there is no request."""
    if not count:
        return None
    share, square = hits / count, _Z95**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = _Z95 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    # For a share of 0 or 1 the interval ends exactly there, whatever the rounding.
    return (0.0 if hits == 0 else centre - half, 1.0 if hits == count else centre + half)


def block_bootstrap(good: Sequence[bool], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the share of True values, from a circular block bootstrap. It needs at least one
    value."""
    count = len(good)
    length = math.isqrt(count - 1) + 1
    sums = np.concatenate([[0], np.cumsum(np.tile(np.asarray(good, dtype=np.int64), 2))])
    blocks = -(-count // length)
    starts = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, blocks))
    shares = (sums[starts + length] - sums[starts]).sum(axis=1) / (blocks * length)
    low, high = np.percentile(shares, [2.5, 97.5])
    return float(low), float(high)


def widest_interval(good: Sequence[bool]) -> tuple[float, float] | None:
    """Return the 95 % interval of the share of True among requests of one queue. It is the union of Wilson's interval
    and the bootstrap's, or None if there is no request."""
    interval = wilson(sum(good), len(good))
    if interval is None:
        return None
    low, high = block_bootstrap(good)
    return min(low, interval[0]), max(high, interval[1])


def attains(outcome: RequestOutcome, slo: Slo) -> tuple[bool, bool]:
    """Return whether a request holds the SLO of TTFT, and whether it holds the SLO of TPOT. An answer of one token has
    no TPOT, so it cannot miss that SLO. An answer without a token must be complete by the time when its first token
    would have been due."""
    if outcome.error:
        return False, False
    first_s = outcome.latency_s if outcome.ttft_s is None else outcome.ttft_s
    return first_s <= slo.ttft_s, (outcome.tpot_s or 0.0) <= slo.tpot_s


def window_s(counted: Sequence[RequestOutcome], duration_s: float) -> float:
    """Return the length of the time window in which the requests arrive, in seconds. It is the time from the first
    request to the last, plus one mean gap.

    Requests that all come at once have no such window. The time until all of them have ended is returned instead.
    """
    span = counted[-1].planned.at_s - counted[0].planned.at_s if counted else 0.0
    return span * len(counted) / (len(counted) - 1) if span > 0 else duration_s


def make_report(
    run: LoadRun, slo: Slo, *, rate_rps: float | None, source: str, url: str, model: str, seed: int
) -> LoadReport:
    """Return the results of a run whose outcomes are in the order of their arrivals."""
    counted = [outcome for outcome in run.outcomes if outcome.planned.counted]
    done = [outcome for outcome in counted if not outcome.error]
    held = [attains(outcome, slo) for outcome in counted]
    good = [ttft and tpot for ttft, tpot in held]
    # The load's own time begins with the first counted request.
    ended_s = max((outcome.ended_s for outcome in counted), default=0.0)
    duration_s = ended_s - counted[0].planned.at_s if counted else 0.0
    window = window_s(counted, duration_s)
    lateness = spread([outcome.lateness_s for outcome in counted])
    completion = sum(outcome.tokens for outcome in done)
    return LoadReport(
        requests=len(counted),
        completed=len(done),
        failed=len(counted) - len(done),
        whole=sum(outcome.whole for outcome in done),
        empty=sum(not outcome.tokens for outcome in done),
        ttft_s=spread([value for outcome in done if (value := outcome.ttft_s) is not None]),
        tpot_s=spread([value for outcome in done if (value := outcome.tpot_s) is not None]),
        itl_s=spread([gap for outcome in done for gap in outcome.itl_s]),
        latency_s=spread([outcome.latency_s for outcome in done]),
        attainment=_attainment(held, good),
        goodput_rps=_per_second(sum(good), window),
        goodput_ci95=_goodput_interval(good, window),
        slo=slo,
        rate_rps=rate_rps,
        sent_rps=_per_second(len(counted), window),
        window_s=window,
        duration_s=duration_s,
        throughput_rps=_per_second(len(done), duration_s),
        output_tokens_per_s=_per_second(completion, duration_s),
        tokens=TokenCounts(
            input=sum(outcome.planned.input_tokens for outcome in done),
            output=sum(outcome.asked_tokens for outcome in done),
            prompt=_total([outcome.prompt_tokens for outcome in done]),
            cached=_total([outcome.cached_tokens for outcome in done]),
            completion=completion,
            chunks=sum(len(outcome.arrivals_s) for outcome in done),
        ),
        errors=_errors(counted),
        warmup=len(run.outcomes) - len(counted),
        clipped=sum(outcome.planned.clipped for outcome in counted),
        interrupted=run.interrupted,
        unfinished=run.unfinished,
        lateness_s=lateness,
        generator_late=(lateness.p99 or 0.0) > max(SENT_LATE_S, LATE_SHARE * slo.ttft_s),
        source=source,
        url=url,
        model=model,
        seed=seed,
    )


def _attainment(held: list[tuple[bool, bool]], good: list[bool]) -> Attainment:
    count = len(held)
    joint, ttft, tpot = sum(good), sum(first for first, _ in held), sum(second for _, second in held)
    return Attainment(
        joint=joint / count if count else None,
        ttft=ttft / count if count else None,
        tpot=tpot / count if count else None,
        ci95=wilson(joint, count),
        ttft_ci95=wilson(ttft, count),
        tpot_ci95=wilson(tpot, count),
    )


def _goodput_interval(good: list[bool], window: float) -> tuple[float, float]:
    low, high = widest_interval(good) or (0.0, 0.0)
    arrivals = _per_second(len(good), window)
    return low * arrivals, high * arrivals


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the known values, or None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _errors(counted: Sequence[RequestOutcome]) -> list[ErrorCount]:
    kinds = Counter(outcome.error for outcome in counted if outcome.error)
    messages = {outcome.error: outcome.message for outcome in reversed(counted)}
    return [ErrorCount(kind, count, messages[kind]) for kind, count in kinds.most_common()]
