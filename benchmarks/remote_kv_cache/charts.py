"""The charts of the benchmarks without engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.bars import draw
from benchmarks.remote_kv_cache.copies import GATHER, SCATTER
from benchmarks.remote_kv_cache.shapes import HEADLINE, size_text
from benchmarks.remote_kv_cache.tables import MOVES
from benchmarks.remote_kv_cache.test_clients import COUNTS
from benchmarks.remote_kv_cache.test_key_hashing import HASHING, MEMCPY
from benchmarks.remote_kv_cache.test_small_blocks import SIZES
from benchmarks.remote_kv_cache.transfers import PLAIN_GET, PLAIN_SET
from benchmarks.results_reader import CaseResult, Results, Spread


def server(results: Results, path: Path) -> None:
    """The headline model against the plain socket."""
    case = results["test_server"].case(HEADLINE.name)
    names = [name for name in case.operations if name in case.limits]
    draw(
        path,
        f"{HEADLINE.name}: 512 blocks of {HEADLINE.block_bytes} bytes, TCP over loopback",
        "time, as a multiple of the plain socket of the same direction in the same round",
        names,
        {"median, min … max": [case.to_limit(name) for name in names]},
        "plain socket",
        1.0,
    )


def server_models(results: Results, path: Path) -> None:
    """All models against the plain socket."""
    cases = results["test_server"].cases
    draw(
        path,
        "Five models: 512 blocks each, TCP over loopback",
        "time, as a multiple of the plain socket of the same direction in the same round",
        [case.name for case in cases],
        {name: [case.to_limit(name) for case in cases] for name in MOVES},
        "plain socket",
        1.0,
    )


def memory_io(results: Results, path: Path) -> None:
    """Copies against one memcpy."""
    _to_limit(path, "512 blocks within memory", results["test_memory_io"].cases, "one memcpy")


def zmq_transfer(results: Results, path: Path) -> None:
    """Transports against the plain socket."""
    _to_limit(path, "512 blocks through ZeroMQ's library", results["test_zmq_transfer"].cases, "the plain socket")


def _to_limit(path: Path, title: str, cases: Sequence[CaseResult], limit: str) -> None:
    """Every operation that has a limit, against that limit."""
    names = [name for name in cases[0].operations if name in cases[0].limits]
    draw(
        path,
        title,
        f"time, as a multiple of {limit} in the same round",
        names,
        {case.name: [case.to_limit(name) for name in names] for case in cases},
        limit.removeprefix("the "),
        1.0,
    )


def shared_memory(results: Results, path: Path) -> None:
    """What a client on the server's host does, against one memcpy."""
    cases = [case for case in results["test_shared_memory"].cases if case.limits]
    _to_limit(path, "512 blocks over shared memory", cases, "one memcpy")


def small_blocks(results: Results, path: Path) -> None:
    """Rates by block size."""
    case = results["test_small_blocks"].cases[0]
    sizes = [size_text(size) for size in SIZES]
    limits = {"set": PLAIN_SET, "get_into": PLAIN_GET}
    draw(
        path,
        "Small blocks, the same bytes in all",
        "GB/s",
        sizes,
        {name: [case.rate(f"{name} {size}") for size in sizes] for name in limits},
        "plain socket of that direction",
        {name: [case.rate(limit).median] * len(sizes) for name, limit in limits.items()},
    )


def waiters(results: Results, path: Path) -> None:
    """Calls to a server where reads wait, against those to one where nobody waits."""
    result = results["test_waiters"]
    case = result.cases[0]
    names = list(case.limits)
    given = case.parameters
    draw(
        path,
        f"Calls beside {given['waiting_reads']} waiting reads and {given['promises']} promises",
        "µs",
        names,
        {"median, min … max": [case.seconds(name).scaled(1e6) for name in names]},
        "nobody waits",
        {"median, min … max": [case.seconds(case.limits[name]).median * 1e6 for name in names]},
    )


def clients(results: Results, path: Path) -> None:
    """Aggregate rates by number of processes."""
    case = results["test_clients"].cases[0]
    limits = {"set": PLAIN_SET, "get_into": PLAIN_GET}
    draw(
        path,
        "Client processes at once, one server",
        "GB/s, all together",
        [f"{count} client{'s' * (count > 1)}" for count in COUNTS],
        {name: [case.rate(f"{name} x{count}") for count in COUNTS] for name in limits},
        "as many plain sockets",
        {name: [case.rate(f"{limit} x{count}").median for count in COUNTS] for name, limit in limits.items()},
    )


def lookup(results: Results, path: Path) -> None:
    """Latencies."""
    case = results["test_lookup"].cases[0]
    names = [name for name in case.operations if name in case.limits]
    series = "median of the rounds, min … max"
    draw(
        path,
        "Is it there? One call, all keys present",
        "µs",
        names,
        {series: [case.seconds(name).scaled(1e6) for name in names]},
        "plain socket round trip of as many bytes",
        {series: [case.seconds(case.limits[name]).median * 1e6 for name in names]},
        log=True,
    )


def key_hashing(results: Results, path: Path) -> None:
    """Tokens a second."""
    cases = results["test_key_hashing"].group("hashing")
    names = [name for name in cases[0].operations if name != MEMCPY]

    def rate(number: int, name: str) -> Spread:
        seconds, tokens = cases[number].seconds(name), cases[number].parameters["tokens"] / 1e6
        return Spread(tokens / seconds.median, tokens / seconds.high, tokens / seconds.low)

    everyone = range(len(cases))
    draw(
        path,
        f"Keys of a token chain ({HASHING}), one thread",
        "M tokens/s",
        [case.name for case in cases],
        {name: [rate(number, name) for number in everyone] for name in names},
        MEMCPY,
        {name: [rate(number, MEMCPY).median for number in everyone] for name in names},
        log=True,
    )


def copying(results: Results, path: Path) -> None:
    """Gather and scatter against one memcpy and NumPy."""
    cases = results["test_key_hashing"].group("copying")
    names = [name for name in cases[0].operations if name in cases[0].limits and not name.endswith("threads")]
    draw(
        path,
        f"{GATHER}, {SCATTER} and NumPy row copies, one thread",
        "time, as a multiple of one memcpy in the same round",
        [case.name for case in cases],
        {name: [case.to_limit(name) for case in cases] for name in names},
        "one memcpy",
        1.0,
    )


# File: the benchmark it needs, and the chart.
REMOTE_CHARTS: Final[dict[str, tuple[str, Callable[[Results, Path], None]]]] = {
    "server": ("test_server", server),
    "server_models": ("test_server", server_models),
    "memory_io": ("test_memory_io", memory_io),
    "zmq_transfer": ("test_zmq_transfer", zmq_transfer),
    "shared_memory": ("test_shared_memory", shared_memory),
    "small_blocks": ("test_small_blocks", small_blocks),
    "clients": ("test_clients", clients),
    "waiters": ("test_waiters", waiters),
    "lookup": ("test_lookup", lookup),
    "key_hashing": ("test_key_hashing", key_hashing),
    "copying": ("test_key_hashing", copying),
}
