"""The statistics of `kvstore load`: percentiles, intervals, attainment, goodput."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_cli.load_tables import print_sweep
from kvstore_serving.load.records import Planned, RequestOutcome
from kvstore_serving.load.report import LoadReport, Slo, attains, block_bootstrap, make_report, spread, wilson
from kvstore_serving.load.run import LoadRun
from kvstore_serving.load.sweep import make_sweep, rates_around

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def outcome(
    index: int, ttft_s: float = 0.1, tpot_s: float = 0.01, *, tokens: int = 5, **fields: object
) -> RequestOutcome:
    """Return the outcome of request `index`: one request per second, each answered with evenly spaced tokens."""
    planned = Planned(index, float(index), [index], 10, tokens)
    arrivals = [index + ttft_s + position * tpot_s for position in range(tokens)]
    made = RequestOutcome(planned, sent_s=float(index), ended_s=arrivals[-1], arrivals_s=arrivals, tokens=tokens)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def report(outcomes: list[RequestOutcome], **run: object) -> LoadReport:
    made = LoadRun(outcomes, **run)  # type: ignore[arg-type]
    return make_report(made, SLO, rate_rps=1.0, source="test", url="http://nowhere", model="m", seed=0)


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_has_the_published_values(hits: int, count: int, low: float, high: float) -> None:
    interval = wilson(hits, count)
    assert interval == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(count - hits, count)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilsons_interval_of_nothing_is_unknown() -> None:
    assert wilson(0, 0) is None


def test_percentiles_are_interpolated_between_samples() -> None:
    values = spread([4.0, 1.0, 3.0, 2.0])
    assert (values.mean, values.p50, values.max) == (2.5, 2.5, 4.0)
    assert values.p90 == pytest.approx(3.7) and values.p99 == pytest.approx(3.97)
    assert spread([7.0]).p99 == 7.0
    assert spread([]).mean is None and spread([]).p99 is None


def test_a_requests_times_follow_from_its_arrivals() -> None:
    made = outcome(3, sent_s=3.5, arrivals_s=[4.0, 4.25, 4.5, 5.5], tokens=7)
    assert made.lateness_s == 0.5
    assert made.ttft_s == 0.5
    assert made.itl_s == [0.25, 0.25, 1.0]
    assert made.tpot_s == 0.25  # 1.5 s for the six tokens after the first, which came in three chunks


def test_a_request_with_one_token_cannot_miss_its_tpot() -> None:
    made = outcome(0, tokens=1)
    assert made.tpot_s is None and made.itl_s == []
    assert attains(made, SLO) == (True, True)


def test_one_request_must_meet_both_objectives() -> None:
    slow_first = [outcome(index, ttft_s=0.6) for index in range(2)]
    slow_later = [outcome(index, tpot_s=0.06) for index in range(2, 5)]
    good = [outcome(index) for index in range(5, 9)]
    failed = [outcome(9, error="timeout", message="not complete after 1 s")]
    made = report([*slow_first, *slow_later, *good, *failed])
    assert (made.requests, made.completed, made.failed) == (10, 9, 1)
    assert (made.attainment.ttft, made.attainment.tpot, made.attainment.joint) == (0.7, 0.6, 0.4)
    assert made.attainment.ci95 == wilson(4, 10)
    assert [(error.kind, error.count) for error in made.errors] == [("timeout", 1)]


def test_an_objective_is_met_exactly_at_its_limit() -> None:
    exact = outcome(0, arrivals_s=[0.5, 0.55], tokens=2)
    assert attains(exact, Slo(0.5, 0.05 + 1e-12)) == (True, True)
    assert attains(exact, Slo(0.499, 0.049)) == (False, False)


def test_goodput_counts_the_arrival_window_not_the_last_answers_end() -> None:
    # Five arrivals, one a second; the last answer takes a minute.
    outcomes = [outcome(index) for index in range(4)] + [outcome(4, ttft_s=60.0)]
    made = report(outcomes)
    assert made.window_s == 5.0 and made.sent_rps == 1.0
    assert made.goodput_rps == pytest.approx(0.8)
    assert made.duration_s > 60
    low, high = made.goodput_ci95
    assert low < made.goodput_rps < high <= 1.0


def test_simultaneous_requests_use_the_time_until_their_end_as_window() -> None:
    outcomes = [outcome(0, planned=Planned(index, 0.0, [index], 10, 5)) for index in range(4)]
    made = report(outcomes)
    assert made.window_s == made.duration_s == pytest.approx(0.14)


def test_warm_up_is_never_counted() -> None:
    warm = [
        outcome(index, ttft_s=9.0, planned=Planned(index, float(index), [index], 10, 5, counted=False))
        for index in range(3)
    ]
    made = report([*warm, *(outcome(index) for index in range(3, 6))])
    assert (made.requests, made.warmup) == (3, 3)
    assert made.attainment.joint == 1.0 and made.ttft_s.max == pytest.approx(0.1)
    assert made.window_s == 3.0


def test_the_overall_latency_covers_complete_requests_only() -> None:
    made = report([*(outcome(index, ended_s=index + 1.0 + index) for index in range(4)), outcome(9, error="cut")])
    assert (made.latency_s.mean, made.latency_s.p50, made.latency_s.max) == (2.5, 2.5, 4.0)
    assert made.latency_s.p90 == pytest.approx(3.7)
    line = outcome(3, ended_s=5.5).line()
    assert line["latency_s"] == 2.5


def test_simultaneous_tokens_have_no_time_between_them() -> None:
    made = outcome(0, arrivals_s=[0.5], tokens=5)
    assert made.tpot_s is None and attains(made, SLO) == (True, True)


def test_failed_requests_have_no_latencies_and_attain_nothing() -> None:
    made = report([outcome(0, error="cut", message="m"), outcome(1, error="http_500", arrivals_s=[])])
    assert made.ttft_s.mean is None and made.itl_s.p50 is None
    assert made.attainment.joint == made.attainment.ttft == made.attainment.tpot == 0.0
    assert made.goodput_rps == 0.0 and made.goodput_ci95[0] == 0.0


def test_a_report_without_requests_is_empty_and_no_error() -> None:
    made = report([], interrupted=True, unfinished=3)
    assert made.requests == 0 and made.attainment.joint is None and made.goodput_rps == 0.0


def test_a_late_generator_is_reported() -> None:
    assert not report([outcome(index, sent_s=index + 0.04) for index in range(10)]).generator_late
    late = report([outcome(index, sent_s=index + 0.06) for index in range(10)])  # more than a tenth of the SLO
    assert late.generator_late and late.lateness_s.p50 == pytest.approx(0.06)


def test_the_bootstrap_detects_that_neighbours_fail_together() -> None:
    scattered = [index % 2 == 0 for index in range(400)]
    together = [index < 200 for index in range(400)]
    independent = wilson(200, 400)
    assert independent is not None
    wide, narrow = block_bootstrap(together), block_bootstrap(scattered)
    assert wide[1] - wide[0] > 2 * (independent[1] - independent[0])
    assert narrow[1] - narrow[0] < independent[1] - independent[0]


def test_the_bootstrap_agrees_with_wilson_for_independent_requests() -> None:
    drawn = np.random.default_rng(5).random(900) < 0.7
    independent, low_high = wilson(int(drawn.sum()), 900), block_bootstrap(drawn.tolist())
    assert independent is not None
    assert low_high == pytest.approx(independent, abs=0.02)


@pytest.mark.parametrize("count", range(1, 12))
def test_the_bootstrap_of_a_few_equal_values_is_certain(count: int) -> None:
    assert block_bootstrap([True] * count) == (1.0, 1.0)
    assert block_bootstrap([False] * count) == (0.0, 0.0)


def test_the_goodput_of_a_sweep_is_between_two_measured_rates() -> None:
    assert rates_around([(1.0, 1.0), (2.0, 0.95), (4.0, 0.85), (8.0, 0.95)]) == (2.0, 4.0)
    assert rates_around([(1.0, 0.9), (2.0, 0.5)]) == (1.0, 2.0)
    assert rates_around([(1.0, 1.0), (2.0, 0.9)]) == (2.0, None)
    assert rates_around([(1.0, 0.8), (2.0, 0.95)]) == (None, 1.0)
    assert rates_around([]) == (None, None)


def test_a_sweep_is_ordered_by_rate() -> None:
    def at(rate: float, attained: int) -> LoadReport:
        outcomes = [outcome(index, ttft_s=0.1 if index < attained else 0.9) for index in range(10)]
        return make_report(LoadRun(outcomes), SLO, rate_rps=rate, source="", url="", model="", seed=0)

    sweep = make_sweep([at(4.0, 8), at(2.0, 10)])
    assert [each.rate_rps for each in sweep.sweep] == [2.0, 4.0]
    assert (sweep.goodput_at_90_rps, sweep.below_90_rps) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("attained", "said"),
    [
        ([7, 9], "the lowest rate does not attain 90 % but a higher one does"),
        ([7, 8], "no rate attains 90 %"),
        ([10, 8, 9], "goodput at 90 % attainment: between 2 and 4 req/s"),
    ],
)
def test_a_sweep_whose_attainment_rises_says_that_its_runs_are_too_short(
    attained: list[int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(rate: float, count: int) -> LoadReport:
        outcomes = [outcome(index, ttft_s=0.1 if index < count else 0.9) for index in range(10)]
        return make_report(LoadRun(outcomes), SLO, rate_rps=rate, source="", url="", model="", seed=0)

    print_sweep(make_sweep([at(rate, count) for rate, count in zip((2.0, 4.0, 8.0), attained, strict=False)]))
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown and "attainment does not fall as the rate rises" in shown


def test_an_interrupted_run_reports_no_rate() -> None:
    whole = [
        make_report(LoadRun([outcome(0)]), SLO, rate_rps=rate, source="", url="", model="", seed=0) for rate in (2, 4)
    ]
    cut = make_report(LoadRun([], interrupted=True, unfinished=9), SLO, rate_rps=8, source="", url="", model="", seed=0)
    assert make_sweep([*whole, cut]).goodput_at_90_rps == 4
