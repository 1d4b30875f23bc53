"""The targets of the disk tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.persistence_kv_cache import names
from benchmarks.persistence_kv_cache.tables import restart_target_s
from benchmarks.render.cells import Row, operations
from benchmarks.render.ledger import Claim, Finding, at_least, found
from benchmarks.results_reader import Result

_TEST: Final = "bench_disk_tier"


def _share(part: str, shape: str, limit: float) -> Callable[[Result], Finding]:
    """The throughput of every operation of a part, for one shape, as a share of its limit's throughput."""
    rows = operations(part, where=lambda row: row.p["shape"] == shape and row.name in row.data.limits)

    def limits(row: Row) -> str:
        rates = {each.limit.name: each.limit.rate.median for each in rows(row.result)}
        text = ", ".join(f"{name.removeprefix(names.MEMORY_ONLY)} {rate:.2f} GB/s" for name, rate in rates.items())
        return names.MEMORY_ONLY + text if any(name.startswith(names.MEMORY_ONLY) for name in rates) else text

    return found(
        rows, lambda row: f"{row.name.removeprefix(names.HYBRID)} {row.share.median:.2f}", limits, at_least(limit)
    )


def _index(result: Result) -> Finding:
    case = max(result.measured_group(names.RESTART_PART), key=lambda case: int(case.parameters["blocks"]))
    index_bytes = case.parameters["index_bytes"] / case.parameters["blocks"]
    text = f"{index_bytes:.0f} bytes at {case.parameters['blocks']} blocks"
    return Finding(text, "", index_bytes <= names.INDEX_TARGET_BYTES, result.rounds)


_OF_SHAPES: Final = (
    (names.WRITE_PART, "`set` until on disk", names.WRITE_TARGET, "plain pwrite"),
    (names.READ_PART, "`get_into` and `stream_get` from disk", names.READ_TARGET, "plain pread"),
    (
        names.HYBRID_PART,
        "blocks in memory, against a server without a disk tier",
        names.HYBRID_TARGET,
        "its throughput",
    ),
)
# fmt: off
PERSISTENCE_CLAIMS: Final = (
    *(
        Claim(f"disk: {shape}, {what}: ≥ {target} x {beside}", _TEST, _share(part, shape, target))
        for shape in names.SHAPES
        for part, what, target, beside in _OF_SHAPES
    ),
    Claim(f"disk: restart ≤ {names.RESTART_TARGET_S:g} s per 100 000 blocks until all are readable",
        _TEST,
        found(
            operations(names.RESTART_PART, names=(names.READABLE,)), "{p[blocks]} blocks: {s:.2f} s", "",
            lambda row: row.s.median <= restart_target_s(row.p), own_rounds=True,
        ),
    ),
    Claim(f"disk: index ≤ {names.INDEX_TARGET_BYTES} bytes of memory a block", _TEST, _index, "--million"),
)
# fmt: on
