"""The tables of docs/benchmarks-appendix.md for benchmarks without engines."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

from benchmarks.remote_kv_cache.bench_beside_python import PACE
from benchmarks.remote_kv_cache.bench_block_macs import TCP
from benchmarks.remote_kv_cache.bench_demo import FIRST, SECOND
from benchmarks.remote_kv_cache.bench_logins import ALONE, BESIDE, LOGGED_IN, OPEN
from benchmarks.remote_kv_cache.bench_proxy_capacity import DIRECT, THROUGH
from benchmarks.remote_kv_cache.bench_proxy_frozen import FIGURES
from benchmarks.remote_kv_cache.bench_sharding import PLACEMENT, SPLIT, SPLIT_512, TWO_SHARDS
from benchmarks.remote_kv_cache.bench_shared_memory import BORROW, LOOKUP
from benchmarks.remote_kv_cache.bench_swap import CUDA_IN, CUDA_OUT, SWAP_IN, SWAP_OUT
from benchmarks.remote_kv_cache.copies import GATHER, NAIVE, NAIVE_WRITE, SCATTER
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import MEMCPY
from benchmarks.render.cells import Cell, Row, at, cases, joined, operations, text, times
from benchmarks.render.tables import (
    Column,
    Each,
    Mixed,
    Section,
    Table,
    limited_of,
    matrix,
    names_of,
    paragraph,
    section,
    unavailable,
)

MOVES: Final = ("set", "get", "stream_get", "get_into")
_RATE: Final = ("GB/s", "{rate:.2f}")
_X_SOCKET: Final = ("x plain socket", "{x:.2f~}")


def _over_models(multiple: Callable[[Row], float]) -> Cell:
    """The range of a multiple over all cases."""

    def cell(row: Row) -> str:
        found = [multiple(row.at(case)) for case in row.result.cases]
        return f"{min(found):.2f} - {max(found):.2f}"

    return cell


def _share_of_large(row: Row) -> str:
    large = f"{row.name.split()[0]} {HEADLINE.block_bytes} B"
    return f"{1 / row.times(large):.0%}" if row.name in row.data.limits else ""


def _shard_tls(row: Row) -> str:
    own = row.run.get("shard_tls_process_gb_per_s", {})
    return f"{statistics.median(own[row.name]):.2f}" if row.name in own else ""


def _of_one_shard(row: Row) -> str:
    one = row.name.replace("2 shards", "1 shard")
    return "" if one == row.name else f"{1 / row.times(one):.2f}"


def _with_macs(row: Row) -> Row:
    return row.at(f"{row.name.removesuffix('plain')}MACs")


def _swaps(row: Row) -> list[str]:
    return [name for name in (SWAP_OUT, SWAP_IN, CUDA_OUT, CUDA_IN) if name in row.data.operations]


def _swap_limits(row: Row) -> list[str]:
    return list(dict.fromkeys(row.data.limits[name] for name in _swaps(row)))


def _calls(limit: str, multiple: Cell) -> Table:
    """The latencies of calls, next to those of their limits."""
    p99 = ("p99, µs", "{mine[p99_seconds]:us.0f}")
    return Table(operations(), ("call", "{name}"), ("median, µs", "{s:us.0f}"), p99, (limit, multiple))


def _limited(*columns: Column) -> Table:
    """A table of the operations that have a limit, by name."""
    return Table(operations(limited=True), *columns)


# Both have a table for this machine and one for a machine with a GPU.
SWAP: Final = (
    Table(
        cases(),
        ("GB/s", "{case}"),
        Each(_swap_limits, "{rate:.1f}"),
        Each(_swaps, "{rate:.1f}"),
        Each(_swaps, "{share:.0%}", "{name}, share of its limit"),
    ),
    unavailable,
)
# fmt: off
REMOTE_TABLES: Final[dict[str, Section]] = {
    "server": section("bench_server", Table(operations(case=HEADLINE.name),
        ("operation", "{name}"), ("ms, median (min … max)", "{s:msauto~}"), _RATE, _X_SOCKET,
        ("x memcpy", times(MEMCPY)),
    )),
    "server_models": section("bench_server", matrix("x plain socket", "{x:.2f}", MOVES)),
    "memory_io": section("bench_memory_io",
        matrix(f"x {NAIVE}", times(NAIVE), lambda row: [name for name in names_of(row) if name != NAIVE]), unavailable,
    ),
    "zmq_transfer": section("bench_zmq_transfer", Table(
        lambda result: operations()(result)[: len(result.cases[0].operations)], ("range over the models", "{name}"),
        ("x memcpy", _over_models(lambda row: row.times(MEMCPY))),
        ("x plain socket", _over_models(lambda row: row.x.median)),
    )),
    "shared_memory": section("bench_shared_memory",
        Table(cases(where=lambda row: bool(row.data.limits)),
            ("x memcpy", "{case}"), ("memcpy, GB/s", at(MEMCPY, "{rate:.1f}")),
            Each(limited_of, "{x:.2f}"), Each((BORROW,), "{s:ms.3f}", "{name}, ms"),
        ),
        paragraph(
            lambda row: f"Over the Unix socket: {joined('{name} {s:ms.3f} ms')(row)}.",
            cases(where=lambda row: row.case == LOOKUP),
        ),
    ),
    "small_blocks": section("bench_small_blocks", Table(operations(),
        ("operation", "{name}"), _RATE, (f"share of {HEADLINE.block_bytes} B", _share_of_large), _X_SOCKET,
    )),
    "clients": section("bench_clients", _limited(
        ("clients", "{name}"), _RATE, ("plain sockets, GB/s", "{limit.rate:.2f}"), ("x plain sockets", "{x:.2f~}"),
    )),
    "processor_time": section("bench_processor_time", Table(operations(),
        ("operation", "{name}"), ("s for each GB", lambda row: f"{1 / row.rate.median:.2f}"),
        ("x plain socket", lambda row: text("{x:.2f~}", row) if row.name in row.data.limits else ""),
    )),
    "many_clients": section("bench_many_clients", Table(operations(),
        ("", "{name}"), ("GB/s, all together", "{rate:.2f}"),
        ("a read of 16 blocks: median, ms", "{mine[p50_seconds]:ms.1f}"), ("p99, ms", "{mine[p99_seconds]:ms.1f}"),
    )),
    "connections": section("bench_connections", _limited(("one client", "{name}"), _RATE, _X_SOCKET)),
    "logins": section("bench_logins", Mixed(("", "", "x plain socket, x alone"),
        (
            (operations(case="logins", names=(OPEN, LOGGED_IN)), ("{name}", "{rate:.2f} GB/s", "{x:.2f~}")),
            (
                operations(case="tenants", names=(ALONE, BESIDE)),
                ("{name}: {mine[found]:.1%} found", "{s:ms.2f} ms", "{x:.2f~}"),
            ),
        ),
    )),
    "proxy_capacity": section("bench_proxy_capacity", Table(operations(names=(THROUGH,)),
        ("µs", "{case}"), ("the engine directly", "{limit.s:us.0f}"), ("through the proxy", "{s:us.0f}"),
        ("added", lambda row: f"{(row.s.median - row.at(DIRECT).s.median) * 1e6:.0f}"),
    )),
    "proxy_frozen": section("bench_proxy_frozen", Table(cases(),
        ("time to first token, ms", "{case}"),
        *((figure, at(figure, "{s:ms.0f}")) for figure in FIGURES),
    )),
    "nixl": section("bench_nixl", _limited(("get_into, UCX over {p[ucx_tls]}", "{name}"), _RATE, _X_SOCKET)),
    "block_macs": section("bench_block_macs", Table(
        operations(where=lambda row: row.name in row.data.limits and row.name.endswith(", plain")),
        ("", lambda row: f"{row.case}: {row.name.removesuffix(', plain')}"), _RATE,
        ("with MACs, GB/s", lambda row: f"{_with_macs(row).rate.median:.2f}"),
        ("time with MACs, x", lambda row: f"{_with_macs(row).times(row.name):.2f}"),
    )),
    "block_macs_alone": section("bench_block_macs", Table(
        operations(case=TCP, where=lambda row: row.name.startswith(("hash, ", "xxh3, "))), ("one core", "{name}"),
        _RATE,
    )),
    "tls": section("bench_tls", _limited(
        ("one client", "{name}"), _RATE, ("limit, GB/s", "{limit.rate:.2f}"), ("x limit", "{x:.2f~}"),
        ("GB for each second of the shard's TLS process", _shard_tls),
    )),
    "beside_python": section("bench_beside_python", Table(operations(names=("get_into", "set")),
        ("next to a counting thread", "{name}"), _RATE, ("plain socket, GB/s", "{limit.rate:.2f}"), _X_SOCKET,
        ("pace, share of that next to a plain socket", lambda row: text("{share:.2f~}", row.at(f"{PACE} {row.name}"))),
    )),
    "lookup": section("bench_lookup", _calls("x round trip", "{x:.1f}")),
    "waiters": section("bench_waiters",
        _calls("x without waiting reads", "{x:.2f}"),
        "For these reads and promises the server holds {run[held_bytes]:Mi.0f} MiB of at most "
        "{run[held_limit_bytes]:Mi.0f} MiB.",
    ),
    "sharding": section("bench_sharding", Mixed(("", "median", "share of one shard"),
        (
            (
                operations(case=PLACEMENT),
                ("placement: {name}", lambda row: f"{row.p['keys'] / row.s.median / 1e6:.1f} M keys/s", ""),
            ),
            (operations(case=SPLIT, names=(SPLIT_512,)), ("split: {name}", "{s:ms.3f} ms of CPU", "")),
            (operations(case=TWO_SHARDS), ("{name}", "{rate:.2f} GB/s", _of_one_shard)),
        ),
    )),
    "key_hashing": section("bench_key_hashing", matrix(
        "M tokens/s", lambda row: f"{row.p['tokens'] / 1e6 / row.s.median:.0f}", names_of, "hashing",
    )),
    "copying": section("bench_key_hashing", Table(cases("copying"),
        ("GB/s", "{case}"), Each(names_of, "{rate:.1f}"),
        ("gather, x NumPy", at(GATHER, times(NAIVE))),
        ("scatter, x NumPy", at(SCATTER, times(NAIVE_WRITE))),
    )),
    "swap": section("bench_swap", *SWAP),
    "demo": section("bench_demo", Mixed(("{case}", "s, median (min … max)"),
        (
            (operations(names=(FIRST, SECOND)), ("{name}", "{s:.2f~}")),
            (operations(names=(FIRST,)), ("times shorter", times(SECOND, ".1f"))),
            (cases(), ("tokens equal", lambda row: "yes" if row.run["token_ids_equal"] else "**no**")),
        ),
    )),
}
# fmt: on
