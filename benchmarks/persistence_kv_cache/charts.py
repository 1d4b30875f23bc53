"""The charts of these benchmarks: `benchmarks.draw` makes them from `PERSISTENCE_CHARTS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.bars import draw
from benchmarks.persistence_kv_cache import names
from benchmarks.persistence_kv_cache.placements import PLAIN, PLAIN_DIRECT
from benchmarks.persistence_kv_cache.stores import CHURNED, COLD, REPLACE, THREADS, WRITE, operation_name, threaded
from benchmarks.persistence_kv_cache.tables import PLACEMENT_GROUP, measured_placements
from benchmarks.results_reader import CaseResult, Results, Spread

_DRAWN: Final = {
    "write": WRITE,
    f"cold, x{THREADS}": threaded(COLD),
    "replace a third": REPLACE,
    f"churned, cold, x{THREADS}": threaded(CHURNED),
}


def _rate(case: CaseResult, operation: str) -> Spread | None:
    return case.rate(operation) if operation in case.operations else None


def _placement(results: Results, path: Path, number: int) -> None:
    case = results["test_placement"].group(PLACEMENT_GROUP)[number]
    candidates = [name for name in measured_placements(case) if name not in (PLAIN, PLAIN_DIRECT)]
    limits = {}
    for label, measure in _DRAWN.items():
        plain = [_rate(case, operation_name(name, measure)) for name in (PLAIN, PLAIN_DIRECT)]
        limits[label] = [max(rate.median for rate in plain if rate is not None)] * len(candidates)
    draw(
        path,
        f"{case.parameters['blocks']} blocks of {case.parameters['block_bytes']} bytes on disk",
        "GB/s",
        candidates,
        {label: [_rate(case, operation_name(name, move)) for name in candidates] for label, move in _DRAWN.items()},
        "faster plain file",
        limits,
    )


def placement(results: Results, path: Path) -> None:
    """The chart of placements with the first shape: blocks of the headline model."""
    _placement(results, path, 0)


def placement_small(results: Results, path: Path) -> None:
    """The chart of placements with the last shape: small blocks."""
    _placement(results, path, -1)


def disk_tier(results: Results, path: Path) -> None:
    """The chart of the disk tier through the server, beside plain pread and pwrite."""
    cases = [case for part in (names.WRITE_PART, names.READ_PART) for case in results["test_disk_tier"].group(part)]
    rows = [(case, name) for case in cases for name in case.limits]
    series = "median, min … max"
    draw(
        path,
        "Disk tier: through the server, TCP over loopback",
        "GB/s",
        [f"{case.parameters['shape']}: {name}" for case, name in rows],
        {series: [case.rate(name) for case, name in rows]},
        "plain file, one thread",
        {series: [case.rate(case.limits[name]).median for case, name in rows]},
    )


# File: the benchmark it needs, and the chart.
PERSISTENCE_CHARTS: Final[dict[str, tuple[str, Callable[[Results, Path], None]]]] = {
    "placement": ("test_placement", placement),
    "placement_small": ("test_placement", placement_small),
    "disk_tier": ("test_disk_tier", disk_tier),
}
