"""The output of `kvstore load` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore_cli.output import printable
from kvstore_cli.plain_table import plain_table

if TYPE_CHECKING:
    from kvstore_serving.load.report import LoadReport, Spread
    from kvstore_serving.load.sweep import Sweep


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _range(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.1%} … {interval[1]:.1%}"


def print_report(report: LoadReport) -> None:
    """Print one run."""
    console = Console(highlight=False)
    print(
        f"{report.requests} requests ({printable(report.source)}) in {report.duration_s:.1f} s: "
        f"{report.completed} completed, {report.failed} failed; {report.sent_rps:.3g} req/s sent, "
        f"{report.output_tokens_per_s:,.0f} tokens/s received\n"
    )
    times = plain_table("Latency of completed requests", "ms", "mean", "p50", "p90", "p99", "max")
    spreads: dict[str, Spread] = {"TTFT": report.ttft_s, "TPOT": report.tpot_s, "inter-token": report.itl_s}
    for name, spread in spreads.items():
        times.add_row(name, *map(_ms, (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)))
    console.print(times)
    print()
    held = report.attainment
    attained = plain_table("SLO attainment of all requests", "objective", "attained", "95 % interval")
    attained.add_row("TTFT and TPOT", _share(held.joint), _range(held.ci95))
    attained.add_row(f"TTFT ≤ {report.slo.ttft_s:g} s", _share(held.ttft), _range(held.ttft_ci95))
    attained.add_row(f"TPOT ≤ {report.slo.tpot_s:g} s", _share(held.tpot), _range(held.tpot_ci95))
    console.print(attained)
    low, high = report.goodput_ci95
    print(f"\ngoodput {report.goodput_rps:.3g} req/s (95 % interval {low:.3g} … {high:.3g})")
    _print_errors(report, console)
    _print_remarks(report)


def print_sweep(sweep: Sweep) -> None:
    """Print one row a rate."""
    console = Console(highlight=False)
    columns = ("attained", "95 % interval", "goodput", "failed", "TTFT p90 ms", "TPOT p90 ms")
    table = plain_table("SLO attainment against rate", "req/s", *columns)
    for report in sweep.sweep:
        table.add_row(
            f"{report.rate_rps:g}",
            _share(report.attainment.joint),
            _range(report.attainment.ci95),
            f"{report.goodput_rps:.3g}",
            str(report.failed),
            _ms(report.ttft_s.p90),
            _ms(report.tpot_s.p90),
        )
    console.print(table)
    at_90 = sweep.goodput_at_90_rps
    if at_90 is None:
        print("\nno rate attains 90 %: measure lower ones")
    else:
        attained = sweep.sweep[-1].attainment.joint or 0.0
        more = " or more: all rates attain 90 %, measure higher ones" if attained >= 0.9 else ""
        print(f"\ngoodput at 90 % attainment: {at_90:.3g} req/s{more}")
    for report in sweep.sweep:
        _print_errors(report, console)
        _print_remarks(report)


def _print_errors(report: LoadReport, console: Console) -> None:
    if report.errors:
        print()
        table = Table(title="Failed requests", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
        table.add_column("error")
        table.add_column("requests", justify="right")
        table.add_column("the first one's message", overflow="fold")
        for error in report.errors:
            table.add_row(error.kind, str(error.count), Text(printable(error.message)))
        console.print(table)


def _print_remarks(report: LoadReport) -> None:
    """What a reader has to know before using the numbers."""
    tokens = report.tokens
    if report.clipped:
        print(f"{report.clipped} requests of the trace were clipped to the most tokens that were allowed")
    if tokens.prompt is not None and tokens.prompt != tokens.input:
        print(f"the server counted {tokens.prompt} prompt tokens where {tokens.input} were asked for")
    if tokens.completion != tokens.output:
        print(f"the server generated {tokens.completion} tokens where {tokens.output} were asked for")
    if tokens.completion > tokens.chunks:
        print(f"{tokens.completion} tokens came in {tokens.chunks} chunks: inter-token latencies are between chunks")
    if report.generator_late:
        print(
            f"the generator itself was late: it sent requests up to {report.lateness_s.max or 0:.3f} s after their "
            "times. Run it on a machine with more free processors"
        )
