"""The tables of these benchmarks for the documents and the terminal, each a function of the results.

`benchmarks.draw` fills its document from `PERSISTENCE_TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from benchmarks.markdown import markdown, spread_text
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
from benchmarks.results_reader import CaseResult, Results

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


# ---- where bytes lie ------------------------------------------------------------------------------------------------


def _placement_rows(case: CaseResult) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each placement: GB/s and, in brackets, the share of its plain file in the same rounds."""
    headings = [
        "GB/s (of plain)",
        *MOVES,
        "fsync's part of write",
        "restart, ms",
        "allocated ÷ blocks",
        "at 95 %",
        "files",
    ]
    rows = []
    for name in measured_placements(case):
        space = case.parameters["space"][name]
        row = [name, *(_rate_cell(case, operation_name(name, move)) for move in MOVES), _sync_part(case, name)]
        restart = operation_name(name, RESTART)
        row.append(f"{case.seconds(restart).median * 1e3:.1f}" if restart in case.operations else "")
        row += [f"{space['fresh']:.3f}", f"{space['churned']:.3f}", str(space["files"])]
        rows.append(row)
    return headings, rows


def _rate_cell(case: CaseResult, operation: str) -> str:
    if operation not in case.operations:
        return ""
    share = f" ({1 / case.to_limit(operation).median:.0%})" if operation in case.limits else ""
    return f"{case.rate(operation).median:.2f}{share}"


def _sync_part(case: CaseResult, placement: str) -> str:
    """The median share of the time of its writes that the final fsync took."""
    operation = operation_name(placement, WRITE)
    whole = case.data["seconds"][operation]
    before = case.parameters["before_sync_s"][operation]
    parts = sorted(1 - early / all_of_it for early, all_of_it in zip(before, whole, strict=True))
    return f"{parts[len(parts) // 2]:.0%}"


def placement_console_table(case: Case) -> Table:
    """The same rows for the terminal, transposed: a column for each placement."""
    headings, rows = _placement_rows(CaseResult(case.to_json()))
    table = Table(headings[0], *(row[0] for row in rows), title=case.name, title_justify="left")
    for number, heading in enumerate(headings[1:], 1):
        table.add_row(heading, *(row[number] for row in rows))
    return table


def placement(results: Results) -> str:
    """One table for each shape, transposed so that it fits a page, and the conditions of the figures."""
    result = results["test_placement"]
    parts = []
    for case in result.group(PLACEMENT_GROUP):
        headings, rows = _placement_rows(case)
        turned = [[heading, *(row[number] for row in rows)] for number, heading in enumerate(headings[1:], 1)]
        title = f"{case.parameters['blocks']} blocks of {case.parameters['block_bytes']} bytes, {headings[0]}"
        missing = "".join(f"\n\n{name}: not measured, {reason}." for name, reason in case.data["unavailable"].items())
        parts.append(markdown((title, *(row[0] for row in rows)), turned) + missing)
    about = result.parameters
    parts.append(f"File system: {about['file_system']}; cold by {about['cold']}; churn: {about['churn']}.")
    return "\n\n".join(parts)


def placement_restart(results: Results) -> str:
    """Seconds until all keys are known."""
    rows = []
    for case in results["test_placement"].cases:
        for name in PLACEMENTS:
            operation = operation_name(name, RESTART)
            if operation in case.operations:
                blocks = case.parameters["blocks"]
                seconds = case.seconds(operation)
                each = f"{seconds.median / blocks * 1e6:.2f}"
                size = f"{blocks} x {case.parameters['block_bytes']} B"
                rows.append((name, size, spread_text(seconds.scaled(1e3)), each))
    return markdown(("restart", "blocks", "ms, median (min … max)", "µs a block"), rows)


# ---- the server's disk tier -----------------------------------------------------------------------------------------


def disk_tier(results: Results) -> str:
    """Rates through the server beside plain reads and writes, and the share that they reach."""
    result = results["test_disk_tier"]
    rows = []
    for part, target in ((names.WRITE_PART, names.WRITE_TARGET), (names.READ_PART, names.READ_TARGET)):
        for case in result.group(part):
            plain = [name for name in (*names.PLAIN_WRITES, *names.PLAIN_READS) if name in case.operations]
            for name in case.operations:
                shares = ["", "", ""]
                if name not in plain:
                    best = min(plain, key=lambda one: case.seconds(one).median)
                    own = case.limits[name]
                    shares = [f"{1 / case.ratio(name, one):.2f} ({one})" for one in (own, best)]
                    shares.append(f"≥ {target}")
                rows.append((case.name, name, f"{case.rate(name).median:.2f}", *shares, _from_disk(case, name)))
    about = result.parameters
    headings = ("part", "operation", "GB/s", "of plain, one thread", "of the fastest plain", "target", "from disk")
    remark = (
        f"File system: {about['file_system']}; the page cache was emptied before every read and write "
        f"({about['cold']}), and blocks left the server's memory by {about['not_in_memory']}; blocks were read in the "
        f"order in which they were written, or another: {about['order']}."
    )
    return f"{markdown(headings, rows, figures=False)}\n\n{remark}"


def _from_disk(case: CaseResult, operation: str) -> str:
    """The smallest share of blocks that the server read from disk, over all rounds."""
    shares = case.parameters.get("from_disk", {}).get(operation)
    return f"{min(shares):.0%}" if shares else ""


def disk_tier_hybrid(results: Results) -> str:
    """Throughput with a disk tier as a share of that without."""
    rows = []
    for case in results["test_disk_tier"].group(names.HYBRID_PART):
        for name, limit in case.limits.items():
            rates = (f"{case.rate(one).median:.2f}" for one in (limit, name))
            share = spread_text(case.to_limit(name).inverse)
            shape = case.parameters["shape"]
            rows.append((f"{shape}: {name.removeprefix(names.HYBRID)}", *rates, share, f"≥ {names.HYBRID_TARGET}"))
    return markdown(("blocks in memory", "memory only, GB/s", "with a disk tier, GB/s", "share", "target"), rows)


def disk_tier_restart(results: Results) -> str:
    """Seconds until ready and until readable, and the index's memory."""
    rows = []
    for case in results["test_disk_tier"].group(names.RESTART_PART):
        blocks = case.parameters["blocks"]
        cells = [spread_text(case.seconds(name)) for name in (names.NEW_START, names.READY, names.READABLE)]
        bound = f"≤ {names.RESTART_TARGET_S * max(1.0, blocks / 100_000):g}"
        index = f"{case.parameters['index_bytes'] / blocks:.0f} (≤ {names.INDEX_TARGET_BYTES})"
        rows.append((f"{blocks} x {case.parameters['block_bytes']} B", *cells, bound, index))
    headings = (
        "blocks",
        "new server, ready",
        "restart, ready",
        "restart, all readable",
        "target",
        "index bytes a block",
    )
    return markdown((f"{headings[0]}, s", *headings[1:]), rows)


def target_lines(cases: Sequence[Case]) -> list[str]:
    """The figures of `test_disk_tier` beside each target, for the terminal."""
    lines = []
    for case in (CaseResult(case.to_json()) for case in cases):
        part = case.parameters["group"]
        if part == names.RESTART_PART:
            bound = names.RESTART_TARGET_S * max(1.0, case.parameters["blocks"] / 100_000)
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
            share = spread_text(case.to_limit(name).inverse)
            lines.append(f"{case.name}: {name}: {share} of {limit} (target ≥ {targets[part]})")
    return lines


# Marker in the document: the benchmark it needs, and the table.
PERSISTENCE_TABLES: Final[dict[str, tuple[str, Callable[[Results], str]]]] = {
    "placement": ("test_placement", placement),
    "placement_restart": ("test_placement", placement_restart),
    "disk_tier": ("test_disk_tier", disk_tier),
    "disk_tier_hybrid": ("test_disk_tier", disk_tier_hybrid),
    "disk_tier_restart": ("test_disk_tier", disk_tier_restart),
}
