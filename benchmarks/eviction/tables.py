"""The tables of the eviction benchmark for the terminal and the documents. Each is a function of the benchmark's
results.

`benchmarks.draw` fills its document from `EVICTION_TABLES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table as ConsoleTable

from benchmarks.eviction.cost import TARGET_S
from benchmarks.eviction.live import AGREEMENT
from benchmarks.remote_kv_cache.report import Case
from benchmarks.render import cells
from benchmarks.render.tables import Each, Table, console, markdown, names_of, section
from benchmarks.results_reader import CaseResult, Result

BENCHMARK: Final = "eviction"
TRACE_GROUP: Final = "trace"
COST_GROUP: Final = "cost"
LIVE_GROUP: Final = "live"
DEFAULT: Final = "default"
S3FIFO: Final = "S3-FIFO"
ARC: Final = "ARC"
SIEVE: Final = "SIEVE"
OPTIMUM: Final = "optimum"
TEXTBOOK: Final = (S3FIFO, ARC, SIEVE)
ENVELOPE: Final = ("lru", S3FIFO, ARC)  # the default policy is compared with the best of these at each capacity

MOST_BELOW: Final = 0.003  # the default policy's hit rate may be at most this much lower


def envelope(case: CaseResult) -> list[float]:
    """Return the best hit rate of the `ENVELOPE` policies at each capacity. It is empty if none of them was
    replayed."""
    rates = case.parameters["hit_rate"]
    return [max(column) for column in zip(*(rates[name] for name in ENVELOPE if name in rates), strict=True)]


def _rows(case: CaseResult) -> tuple[list[str], list[list[str]]]:
    """Return the headings, a row for each capacity, and a row with the sum."""
    about = case.parameters
    rates, best = about["hit_rate"], envelope(case)
    headings = ["capacity", "blocks", *rates]
    columns = [*rates.values()]
    if best:
        headings.append("envelope")
        columns.append(best)
    distance = [mine - other for mine, other in zip(rates.get(DEFAULT, ()), best, strict=False)]
    if distance:
        headings.append(f"{DEFAULT} - envelope, points")
    rows = []
    for at, (share, blocks) in enumerate(zip(about["capacities"], about["blocks"], strict=True)):
        row = [f"{share:g} %", str(blocks), *(f"{column[at]:.4f}" for column in columns)]
        rows.append([*row, f"{distance[at] * 100:+.2f}"] if distance else row)
    sums = ["sum", "", *(f"{sum(column):.4f}" for column in columns)]
    rows.append([*sums, f"{sum(distance) * 100:+.2f}"] if distance else sums)
    return headings, rows


def console_table(case: Case) -> ConsoleTable:
    """Return the table of hit rates by capacity, for the terminal."""
    result = CaseResult(case.to_json())
    return console(_title(result), *_rows(result), sums=True)


def _title(case: CaseResult) -> str:
    about = case.parameters
    return (
        f"{case.name}: {about['requests']} requests, {about['references']} references to {about['distinct']} blocks, "
        f"{_calls(case)}; hit rate by capacity"
    )


def _calls(case: CaseResult) -> str:
    most = case.parameters.get("call_blocks")
    return "whole requests" if most is None else f"calls of {most} blocks"


def _distances(cases: Sequence[CaseResult]) -> tuple[list[str], list[list[str]], str]:
    """Return how far the default policy is from the envelope, in points, as headings, a row for each case, and a
    summary."""
    cases = [case for case in cases if DEFAULT in case.parameters["hit_rate"] and envelope(case)]
    if not cases:
        return [], [], ""
    capacities = cases[0].parameters["capacities"]
    rows, below, least = [], 0, (0.0, "")
    for case in cases:
        mine = [a - b for a, b in zip(case.parameters["hit_rate"][DEFAULT], envelope(case), strict=True)]
        below += sum(distance < -MOST_BELOW for distance in mine)
        least = min(least, (min(mine), f"{case.name}, {_calls(case)}"))
        rows.append([case.name, _calls(case), *(f"{distance * 100:+.2f}" for distance in mine)])
    said = f"{below} of {len(rows) * len(capacities)} figures are more than {MOST_BELOW * 100:g} points below"
    said += f"; the lowest: {least[0] * 100:+.2f} ({least[1]})." if least[1] else "."
    return ["trace", "calls", *(f"{share:g} %" for share in capacities)], rows, said


def distances_table(cases: Sequence[CaseResult]) -> ConsoleTable | None:
    """Return the table of `default` minus the best of LRU, S3-FIFO and ARC on each trace, for the terminal. Returns
    None if not all of them were replayed."""
    headings, rows, said = _distances(cases)
    left = headings[:2]
    return console(f"{DEFAULT} - envelope, points", headings, rows, left=left, caption=said) if rows else None


def cost_lines(cases: list[Case]) -> list[str]:
    """Return the table of each policy's cost, for the terminal."""
    lines = []
    for case in (CaseResult(case.to_json()) for case in cases if case.parameters["group"] == COST_GROUP):
        costs = ", ".join(f"{case.seconds(name).median * 1e9:.0f} ns {name}" for name in case.operations)
        blocks = case.parameters["blocks"]
        lines.append(f"{case.name}, {blocks} blocks: {costs}, each a block (target ≤ {TARGET_S * 1e9:.0f} ns)")
    return lines


def live_line(case: CaseResult) -> str:
    """Return the comparison of one live replay with the simulator."""
    about = case.parameters
    apart = abs(about["live"] - about["simulated"])
    verdict = "agree" if apart <= AGREEMENT else f"DIFFER by more than {AGREEMENT * 100:g} point"
    return (
        f"{case.name}: {about['policy']}, {_calls(case)}, {about['blocks']} blocks of {about['block_bytes']} bytes: "
        f"live {about['live']:.4f}, simulated {about['simulated']:.4f}: {verdict}"
    )


# ---- documents -----------------------------------------------------------------------------------------------------


def _hit_rates(result: Result) -> str:
    """Return the table of the first trace, and how far the default policy is from the others on all traces."""
    traces = result.group(TRACE_GROUP)
    parts = [f"{_title(traces[0])}.\n\n{markdown(*_rows(traces[0]))}"]
    headings, rows, said = _distances(traces)
    if rows:
        parts.append(
            f"`{DEFAULT}` minus the best of LRU, S3-FIFO and ARC, in points. {said}\n\n{markdown(headings, rows)}"
        )
    return "\n\n".join(parts)


EVICTION_TABLES: Final = {
    "eviction": section(BENCHMARK, _hit_rates),
    "eviction_cost": section(BENCHMARK, Table(
        cells.cases(COST_GROUP), ("{p[blocks]} blocks, ns a block", "{case}"),
        Each(names_of, lambda row: f"{row.s.median * 1e9:.0f}"), ("target", f"≤ {TARGET_S * 1e9:.0f}"),
    )),
    "eviction_live": section(BENCHMARK, Table(
        cells.cases(LIVE_GROUP), ("trace", "{case}"), ("calls", lambda row: _calls(row.data)),
        ("policy", "{p[policy]}"), ("blocks", "{p[blocks]}"), ("live", "{p[live]:.4f}"),
        ("simulated", "{p[simulated]:.4f}"),
        ("points", lambda row: f"{(row.p['live'] - row.p['simulated']) * 100:+.2f}"),
    )),
}  # fmt: skip
