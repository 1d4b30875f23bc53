"""The tables of these benchmarks for the documents and the terminal, each a function of the results.

`benchmarks.draw` fills its document from `PERSISTENCE_TABLES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table as ConsoleTable

from benchmarks.persistence_kv_cache import names
from benchmarks.persistence_kv_cache.placements import (
    PLACEMENTS,
)
from benchmarks.persistence_kv_cache.stores import (
    CHURNED,
    COLD,
    REPLACE,
    RESTART,
    WARM,
    WRITE,
    operation_name,
    threaded,
)
from benchmarks.remote_kv_cache.report import Case
from benchmarks.render.cells import Cell, Row, cases, operations, text
from benchmarks.render.tables import Each, Table, console, markdown, section
from benchmarks.results_reader import CaseResult, Result

PLACEMENT_GROUP: Final = "placement"
RESTART_GROUP: Final = "restart"
MOVES: Final = (
    WRITE,
    threaded(WRITE),
    COLD,
    threaded(COLD),
    WARM,
    threaded(WARM),
    REPLACE,
    CHURNED,
    threaded(CHURNED),
)


def measured_placements(case: CaseResult) -> list[str]:
    """The placements that were measured, in the order of the candidates."""
    return [name for name in PLACEMENTS if name in case.parameters["space"]]


# ---- placements on disk
# ------------------------------------------------------------------------------------------------


def _at(move: str, cell: Cell) -> Cell:
    """Return the cell for one operation of a placement."""
    return lambda row: text(cell, row.at(operation_name(row.name, move)))


def _rate(row: Row) -> str:
    share = f" ({row.share.median:.0%})" if row.name in row.data.limits else ""
    return f"{row.rate.median:.2f}{share}"


def _sync_part(row: Row) -> str:
    """The final fsync's share of the time of writes, as a median."""
    operation = operation_name(row.name, WRITE)
    whole, before = row.data.data["seconds"][operation], row.p["before_sync_s"][operation]
    parts = sorted(1 - early / all_of_it for early, all_of_it in zip(before, whole, strict=True))
    return f"{parts[len(parts) // 2]:.0%}"


def _placements(case: CaseResult) -> tuple[list[str], list[list[str]]]:
    """A column for each placement, and a row for each measure: GB/s and, in brackets, the share of the plain file's
    throughput in the same rounds. The first heading is that of the first column."""
    described = Table(
        lambda result: [Row(result, case, name) for name in measured_placements(case)],
        ("GB/s (of plain)", "{name}"), *((move, _at(move, _rate)) for move in MOVES),
        ("fsync's part of write", _sync_part), ("restart, ms", _at(RESTART, "{s:ms.1f}")),
        ("allocated ÷ blocks", "{mine[space][fresh]:.3f}"), ("at 95 %", "{mine[space][churned]:.3f}"),
        ("files", "{mine[space][files]}"),
    )  # fmt: skip
    headings, rows = described.headings_and_rows(Result({"parameters": {}, "cases": [case.data]}))
    turned = [list(column) for column in zip(headings, *rows, strict=True)]
    return turned[0], turned[1:]


def placement_console_table(case: Case) -> ConsoleTable:
    """The same table for the terminal."""
    headings, rows = _placements(CaseResult(case.to_json()))
    return console(case.name, headings, rows, left=headings)


def _placement(result: Result) -> str:
    """One table for each shape, and the placements that were not measured."""
    parts = []
    for case in result.group(PLACEMENT_GROUP):
        headings, rows = _placements(case)
        title = f"{case.parameters['blocks']} blocks of {case.parameters['block_bytes']} bytes, {headings[0]}"
        missing = "".join(f"\n\n{name}: not measured, {reason}." for name, reason in case.data["unavailable"].items())
        parts.append(markdown((title, *headings[1:]), rows) + missing)
    return "\n\n".join(parts)


# ---- the server's disk tier -----------------------------------------------------------------------------------------


def _plain(row: Row) -> list[str]:
    return [name for name in (*names.PLAIN_WRITES, *names.PLAIN_READS) if name in row.data.operations]


def _of_plain(fastest: bool) -> Cell:
    """The operation's throughput as a share of a plain file's: of its own limit, or of the fastest plain file."""

    def cell(row: Row) -> str:
        if row.name in (plain := _plain(row)):
            return ""
        one = min(plain, key=lambda name: row.at(name).s.median) if fastest else row.limit.name
        return f"{1 / row.times(one):.2f} ({one})"

    return cell


def _target(row: Row) -> str:
    target = names.WRITE_TARGET if row.p["group"] == names.WRITE_PART else names.READ_TARGET
    return "" if row.name in _plain(row) else f"≥ {target}"


def _from_disk(row: Row) -> str:
    """The smallest share of blocks that the server read from disk, over all rounds."""
    shares = row.mine.get("from_disk")
    return f"{min(shares):.0%}" if shares else ""


def restart_target_s(about: Mapping[str, Any]) -> float:
    return names.RESTART_TARGET_S * max(1.0, about["blocks"] / 100_000)


_BLOCKS: Final = "{p[blocks]} x {p[block_bytes]} B"


def target_lines(measured: Sequence[Case]) -> list[str]:
    """The figures of `bench_disk_tier`, each next to its target, for the terminal."""
    lines = []
    for case in (CaseResult(case.to_json()) for case in measured):
        part = case.parameters["group"]
        if part == names.RESTART_PART:
            bound = restart_target_s(case.parameters)
            seconds = case.seconds(names.READABLE).median
            index = case.parameters["index_bytes"] / case.parameters["blocks"]
            lines.append(f"{case.name}: all readable after {seconds:.2f} s (target ≤ {bound:g})")
            lines.append(f"{case.name}: index {index:.0f} bytes a block (target ≤ {names.INDEX_TARGET_BYTES})")
            continue
        targets = {
            names.WRITE_PART: names.WRITE_TARGET,
            names.READ_PART: names.READ_TARGET,
            names.HYBRID_PART: names.HYBRID_TARGET,
        }
        for name, limit in case.limits.items():
            share = text("{share:.2f~}", Row(Result({}), case, name))
            lines.append(f"{case.name}: {name}: {share} of {limit} (target ≥ {targets[part]})")
    return lines


PERSISTENCE_TABLES: Final = {
    "placement": section(
        "bench_placement", _placement, "File system: {run[file_system]}; cold by {run[cold]}; replaced: {run[churn]}."
    ),
    "placement_restart": section("bench_placement", Table(
        lambda result: [
            row.at(name) for row in cases()(result) for name in PLACEMENTS
            if operation_name(name, RESTART) in row.data.operations
        ],
        ("restart", "{name}"), ("blocks", _BLOCKS), ("ms, median (min … max)", _at(RESTART, "{s:ms.2f~}")),
        ("µs a block", _at(RESTART, lambda row: f"{row.s.median / row.p['blocks'] * 1e6:.2f}")),
    )),
    "disk_tier": section(
        "bench_disk_tier",
        Table(
            operations(names.WRITE_PART, names.READ_PART), ("part", "{case}"), ("operation", "{name}"),
            ("GB/s", "{rate:.2f}"), ("of the plain file, one thread", _of_plain(fastest=False)),
            ("of the fastest plain file", _of_plain(fastest=True)), ("target", _target), ("from disk", _from_disk),
            figures=False,
        ),
        "File system: {run[file_system]}; the page cache was emptied before every read and write ({run[cold]}), and "
        "blocks left the server's memory by {run[not_in_memory]}; order of reads: {run[order]}.",
    ),
    "disk_tier_hybrid": section("bench_disk_tier", Table(
        operations(names.HYBRID_PART, where=lambda row: row.name in row.data.limits),
        ("blocks in memory", lambda row: f"{row.p['shape']}: {row.name.removeprefix(names.HYBRID)}"),
        ("memory only, GB/s", "{limit.rate:.2f}"), ("with a disk tier, GB/s", "{rate:.2f}"), ("share", "{share:.2f~}"),
        ("target", f"≥ {names.HYBRID_TARGET}"),
    )),
    "disk_tier_restart": section("bench_disk_tier", Table(
        cases(names.RESTART_PART), ("blocks, s", _BLOCKS), Each((names.NEW_START,), "{s:.2f~}", "new server, ready"),
        Each((names.READY,), "{s:.2f~}", "restart, ready"),
        Each((names.READABLE,), "{s:.2f~}", "restart, all readable"),
        ("target", lambda row: f"≤ {restart_target_s(row.p):g}"),
        (
            "index bytes for each block",
            lambda row: f"{row.p['index_bytes'] / row.p['blocks']:.0f} (≤ {names.INDEX_TARGET_BYTES})",
        ),
    )),
}  # fmt: skip
