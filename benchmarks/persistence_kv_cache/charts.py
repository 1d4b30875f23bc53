"""The charts of the placements on disk, and of the disk tier."""

from __future__ import annotations

from typing import Final

from benchmarks.persistence_kv_cache import names
from benchmarks.persistence_kv_cache.placements import PLAIN, PLAIN_DIRECT
from benchmarks.persistence_kv_cache.stores import CHURNED, COLD, REPLACE, THREADS, WRITE, operation_name, threaded
from benchmarks.persistence_kv_cache.tables import PLACEMENT_GROUP, measured_placements
from benchmarks.render.cells import Row, operations
from benchmarks.render.charts import ROUNDS, Bars
from benchmarks.render.tables import Item
from benchmarks.results_reader import Result, Spread

_DRAWN: Final = {
    "write": WRITE,
    f"cold, x{THREADS}": threaded(COLD),
    "replace a third": REPLACE,
    f"churned, cold, x{THREADS}": threaded(CHURNED),
}


def _placement(number: int) -> Bars:
    """The chart of the placements of one shape. The first shape is that of the headline model, and the last one has
    small blocks."""

    def candidates(result: Result) -> list[Row]:
        case = result.group(PLACEMENT_GROUP)[number]
        return [Row(result, case, name) for name in measured_placements(case) if name not in (PLAIN, PLAIN_DIRECT)]

    def rate(row: Row, item: Item) -> Spread:
        return row.at(operation_name(row.name, _DRAWN[str(item)])).rate

    def faster_plain_file(row: Row, item: Item) -> float:
        plain = (operation_name(name, _DRAWN[str(item)]) for name in (PLAIN, PLAIN_DIRECT))
        return max(row.at(name).rate.median for name in plain if name in row.data.operations)

    title = "{p[blocks]} blocks of {p[block_bytes]} bytes on disk"
    return Bars(
        "bench_placement",
        title,
        "GB/s",
        candidates,
        "{name}",
        list(_DRAWN),
        "faster plain file",
        rate,
        faster_plain_file,
    )


PERSISTENCE_CHARTS: Final = {
    "placement": _placement(0),
    "placement_small": _placement(-1),
    "disk_tier": Bars(
        "bench_disk_tier", "Disk tier: through the server, TCP over loopback", "GB/s",
        operations(names.WRITE_PART, names.READ_PART, where=lambda row: row.name in row.data.limits),
        "{p[shape]}: {name}", ROUNDS, "plain file, one thread", lambda row, item: row.rate,
        lambda row, item: row.limit.rate.median,
    ),
}  # fmt: skip
