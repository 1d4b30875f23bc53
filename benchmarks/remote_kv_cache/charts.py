"""The charts of the benchmarks without engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.remote_kv_cache.bench_clients import COUNTS
from benchmarks.remote_kv_cache.bench_key_hashing import HASHING, MEMCPY
from benchmarks.remote_kv_cache.bench_small_blocks import SIZES
from benchmarks.remote_kv_cache.copies import GATHER, SCATTER
from benchmarks.remote_kv_cache.shapes import HEADLINE, size_text
from benchmarks.remote_kv_cache.tables import MOVES
from benchmarks.remote_kv_cache.transfers import PLAIN_GET, PLAIN_SET
from benchmarks.render.cells import Row, Rows, cases, operations
from benchmarks.render.charts import ROUNDS, Bars
from benchmarks.render.tables import Item, limited_of
from benchmarks.results_reader import CaseResult, Spread

_SOCKET_AXIS: Final = "time, as a multiple of the plain socket of the same direction in the same round"
_LIMITED: Final = operations(where=lambda row: row.name in row.data.limits)
_OF_MOVE: Final = {"set": PLAIN_SET, "get_into": PLAIN_GET}


def _to_limit(needs: str, title: str, limit: str) -> Bars:
    """Return a chart of every operation that has a limit, as multiples of that limit."""

    def series(row: Row) -> list[CaseResult]:
        return [case for case in row.result.cases if case.limits]

    def first_case(row: Row) -> bool:
        return row.name in row.data.limits and row.data == series(row)[0]

    axis = f"time, as a multiple of {limit} in the same round"
    return Bars(needs, title, axis, operations(where=first_case), "{name}", series, limit.removeprefix("the "))


def _of(names: Sequence[str]) -> Rows:
    return lambda result: [Row(result, result.cases[0], name) for name in names]


def _microseconds(row: Row, item: Item) -> Spread:
    return row.s.scaled(1e6)


def _limit_microseconds(row: Row, item: Item) -> float:
    return row.limit.s.median * 1e6


def _by_size(row: Row, item: Item) -> Spread:
    return row.at(f"{item} {row.name}").rate


def _one_socket(row: Row, item: Item) -> float:
    return row.at(_OF_MOVE[str(item)]).rate.median


def _by_count(row: Row, item: Item) -> Spread:
    return row.at(f"{item} x{row.name}").rate


def _as_many_sockets(row: Row, item: Item) -> float:
    return row.at(f"{_OF_MOVE[str(item)]} x{row.name}").rate.median


def _tokens(row: Row, item: Item) -> Spread:
    return row.at(item).s.inverse.scaled(row.p["tokens"] / 1e6)


# fmt: off
REMOTE_CHARTS: Final[dict[str, Bars]] = {
    "server": Bars(
        "bench_server", f"{HEADLINE.name}: 512 blocks of {HEADLINE.block_bytes} bytes, TCP over loopback", _SOCKET_AXIS,
        operations(case=HEADLINE.name, where=lambda row: row.name in row.data.limits), "{name}", ROUNDS, "plain socket",
        lambda row, item: row.x,
    ),
    "server_models": Bars(
        "bench_server", "Five models: 512 blocks each, TCP over loopback", _SOCKET_AXIS, cases(), "{case}", MOVES,
        "plain socket",
    ),
    "memory_io": _to_limit("bench_memory_io", "512 blocks within memory", "one memcpy"),
    "zmq_transfer": _to_limit("bench_zmq_transfer", "512 blocks through ZeroMQ's library", "the plain socket"),
    "shared_memory": _to_limit("bench_shared_memory", "512 blocks over shared memory", "one memcpy"),
    "small_blocks": Bars(
        "bench_small_blocks", "Small blocks, the same total bytes", "GB/s", _of([size_text(size) for size in SIZES]),
        "{name}", list(_OF_MOVE), "plain socket of that direction", _by_size, _one_socket,
    ),
    "clients": Bars(
        "bench_clients", "Concurrent client processes, one server", "GB/s, all together",
        _of([f"{each}" for each in COUNTS]), lambda row: f"{row.name} client{'s' * (row.name != '1')}", list(_OF_MOVE),
        "the same number of plain sockets", _by_count, _as_many_sockets,
    ),
    "waiters": Bars(
        "bench_waiters", "Calls with {p[waiting_reads]} waiting reads and {p[promises]} promises", "µs", _LIMITED,
        "{name}", ROUNDS, "nobody waits", _microseconds, _limit_microseconds,
    ),
    "lookup": Bars(
        "bench_lookup", "Lookups: one call, all keys present", "µs", _LIMITED, "{name}",
        ("median of the rounds, min … max",), "plain socket round trip of the same bytes", _microseconds,
        _limit_microseconds, log=True,
    ),
    "key_hashing": Bars(
        "bench_key_hashing", f"Keys of a token chain ({HASHING}), one thread", "M tokens/s", cases("hashing"), "{case}",
        lambda row: [name for name in row.data.operations if name != MEMCPY], MEMCPY, _tokens,
        lambda row, item: _tokens(row, MEMCPY).median, log=True,
    ),
    "copying": Bars(
        "bench_key_hashing", f"{GATHER}, {SCATTER} and NumPy row copies, one thread",
        "time, as a multiple of one memcpy in the same round", cases("copying"), "{case}",
        lambda row: [name for name in limited_of(row) if not name.endswith("threads")], "one memcpy",
    ),
}
# fmt: on
