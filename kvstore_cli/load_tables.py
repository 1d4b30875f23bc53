"""The output of `kvstore load` for people."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvstore_cli.output import printable
from kvstore_cli.plain_table import MS, columns, print_table

if TYPE_CHECKING:
    from kvstore_serving.load.report import LoadReport
    from kvstore_serving.load.sweep import RateSweep


FEW: Final = 100  # requests
OFF_RATE: Final = 0.1  # a difference of rates that needs a word


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.1%} … {interval[1]:.1%}"


# fmt: off
_TIMES: Final = columns(
    ("ms", "0"), ("mean", "1.mean", MS), ("p50", "1.p50", MS), ("p90", "1.p90", MS), ("p99", "1.p99", MS),
    ("max", "1.max", MS),
)
_OBJECTIVE_COLUMNS: Final = columns(("objective", "0"), ("attained", "1", ".1%"), ("95\xa0% interval", "2", _range))
_RATES: Final = columns(
    ("req/s", "rate_rps", "g"), ("attained", "attainment.joint", ".1%"),
    ("95\xa0% interval", "attainment.ci95", _range), ("goodput", "goodput_rps", ".3g"),
    ("failed", "failed"), ("TTFT p90", "ttft_s.p90", MS), ("TPOT p90", "tpot_s.p90", MS),
    ("total p90", "latency_s.p90", MS),
)
_FAILURE_COLUMNS: Final = columns(
    ("error", "kind", "", True), ("requests", "count"), ("first message", "message", "", True),
)
# fmt: on


def print_report(report: LoadReport) -> None:
    """Print the results of one run."""
    print(
        f"{report.requests} requests ({printable(report.source)}) in {report.duration_s:.1f} s: "
        f"{report.completed} completed, {report.failed} failed; {report.sent_rps:.3g} req/s sent, "
        f"{report.output_tokens_per_s:,.0f} tokens/s received\n"
    )
    times = {"TTFT": report.ttft_s, "TPOT": report.tpot_s, "inter-token": report.itl_s, "overall": report.latency_s}
    print_table("Latency of completed requests", _TIMES, times.items())
    print()
    held, slo = report.attainment, report.slo
    attained = (
        ("TTFT and TPOT", held.joint, held.ci95),
        (f"TTFT ≤ {slo.ttft_s:g} s", held.ttft, held.ttft_ci95),
        (f"TPOT ≤ {slo.tpot_s:g} s", held.tpot, held.tpot_ci95),
    )
    print_table("SLO attainment of all requests", _OBJECTIVE_COLUMNS, attained)
    low, high = report.goodput_ci95
    print(f"\ngoodput {report.goodput_rps:.3g} req/s (95 % interval {low:.3g} … {high:.3g})")
    _print_errors(report)
    _print_remarks(report)


def print_sweep(sweep: RateSweep) -> None:
    """Print a table with one row for each rate."""
    from kvstore_serving.load.sweep import TARGET

    print_table("SLO attainment against rate; times in ms", _RATES, sweep.sweep, narrow=True)
    at_90 = sweep.goodput_at_90_rps
    attainments = [each.attainment.joint or 0.0 for each in sweep.sweep if not each.interrupted]
    rises = any(low < high for low, high in pairwise(attainments))
    if at_90 is None and max(attainments, default=0.0) >= TARGET:
        print("\nthe lowest rate does not attain 90 % but a higher one does: no goodput can be read from this sweep")
    elif at_90 is None:
        print("\nno rate attains 90 %: measure lower rates")
    elif sweep.below_90_rps is None:
        print(f"\ngoodput at 90 % attainment: {at_90:g} req/s or more: all rates attain 90 %, measure higher rates")
    else:
        print(f"\ngoodput at 90 % attainment: between {at_90:g} and {sweep.below_90_rps:g} req/s")
    if rises:
        fewest = min(report.requests for report in sweep.sweep)
        print(
            "attainment does not fall as the rate rises: the runs are too short for their random arrivals, or another "
            f"program disturbed one. The shortest has {fewest} requests; measure with more"
        )
    for report in sweep.sweep:
        _print_errors(report)
        _print_remarks(report)


def _print_errors(report: LoadReport) -> None:
    if report.errors:
        print()
        print_table("Failed requests", _FAILURE_COLUMNS, report.errors)


def _print_remarks(report: LoadReport) -> None:
    """Print what a reader must know before using the figures."""
    tokens, rate = report.tokens, report.rate_rps
    if rate is not None and abs(report.sent_rps / rate - 1) > OFF_RATE and not report.generator_late:
        print(
            f"{report.sent_rps:.3g} req/s were sent where {rate:g} were asked for: arrivals are random (Poisson), and "
            f"{report.requests} are few. More requests come closer"
        )
    if report.unfinished:
        print(
            f"{report.unfinished} requests had not ended when the run was interrupted, and are not counted: slow ones "
            "are under-represented"
        )
    if 0 < report.completed < FEW:
        print(
            f"{report.completed} requests completed: with fewer than {FEW}, the p99 is near the maximum and says little"
        )
    if report.whole:
        print(
            f"{report.whole} answers came whole, not as streams: their TTFT is the time of the whole answer, and they "
            "have no TPOT"
        )
    if report.empty:
        print(f"{report.empty} answers ended without a token")
    if report.clipped:
        print(f"{report.clipped} requests of the trace were clipped to the token limits")
    if tokens.prompt is not None and tokens.prompt != tokens.input:
        print(f"the server counted {tokens.prompt} prompt tokens, but {tokens.input} were requested")
    if tokens.completion != tokens.output:
        print(f"the server generated {tokens.completion} tokens, but {tokens.output} were requested")
    if tokens.completion > tokens.chunks:
        print(f"{tokens.completion} tokens came in {tokens.chunks} chunks: inter-token latencies are between chunks")
    if report.generator_late:
        print(
            f"the generator itself was late: it sent requests up to {report.lateness_s.max or 0:.3f} s after their "
            "times. Run it on a machine with more free processors"
        )
