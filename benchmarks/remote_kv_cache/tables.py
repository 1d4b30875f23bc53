"""The Markdown tables of docs/benchmarks.md, each a function of the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.markdown import markdown, spread_text
from benchmarks.remote_kv_cache.copies import GATHER, NAIVE, NAIVE_WRITE, SCATTER
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.test_beside_python import PACE
from benchmarks.remote_kv_cache.test_block_macs import TCP
from benchmarks.remote_kv_cache.test_demo import FIRST, SECOND
from benchmarks.remote_kv_cache.test_logins import ALONE, BESIDE, LOGGED_IN, OPEN
from benchmarks.remote_kv_cache.test_sharding import PLACEMENT, SPLIT, SPLIT_512, TWO_SHARDS
from benchmarks.remote_kv_cache.test_shared_memory import BORROW, LOOKUP
from benchmarks.remote_kv_cache.test_swap import CUDA_IN, CUDA_OUT, SWAP_IN, SWAP_OUT
from benchmarks.remote_kv_cache.transfers import MEMCPY
from benchmarks.results_reader import Results

MOVES: Final = ("set", "get", "stream_get", "get_into")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"


def server(results: Results) -> str:
    """All operations of the headline model."""
    case = results["test_server"].case(HEADLINE.name)
    rows = [
        (
            name,
            f"{_milliseconds(case.seconds(name).median)} ({_milliseconds(case.seconds(name).low)} … "
            f"{_milliseconds(case.seconds(name).high)})",
            f"{case.rate(name).median:.2f}",
            spread_text(case.to_limit(name)) if name in case.limits else "",
            f"{case.ratio(name, MEMCPY):.2f}",
        )
        for name in case.operations
    ]
    return markdown(("operation", "ms, median (min … max)", "GB/s", "x plain socket", "x memcpy"), rows)


def server_models(results: Results) -> str:
    """Multiples of the plain socket of the same direction, every model."""
    names = MOVES
    cases = results["test_server"].cases
    rows = [(case.name, *(f"{case.to_limit(name).median:.2f}" for name in names)) for case in cases]
    return markdown(("x plain socket", *names), rows)


def memory_io(results: Results) -> str:
    """Multiples of block-to-block naive, ours."""
    cases = results["test_memory_io"].cases
    names = [name for name in cases[0].operations if name != NAIVE]
    rows = [(case.name, *(f"{case.ratio(name, NAIVE):.2f}" for name in names)) for case in cases]
    missing = cases[0].data["unavailable"]
    remark = "".join(f"\n\n{name}: {reason}." for name, reason in missing.items())
    return markdown((f"x {NAIVE}", *names), rows) + remark


def zmq_transfer(results: Results) -> str:
    """Transports as multiples of memcpy and of the plain socket."""
    cases = results["test_zmq_transfer"].cases
    rows = []
    for name in cases[0].operations:
        multiples = [case.ratio(name, MEMCPY) for case in cases]
        sockets = [case.to_limit(name).median for case in cases] if name in cases[0].limits else []
        rows.append((name, _range(multiples), _range(sockets)))
    return markdown(("over the models", "x memcpy", "x plain socket"), rows)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} - {max(values):.2f}" if values else ""


def shared_memory(results: Results) -> str:
    """Multiples of one memcpy, every model and small blocks; and what does not depend on the size."""
    result = results["test_shared_memory"]
    cases = [case for case in result.cases if case.limits]
    names = [name for name in cases[0].operations if name in cases[0].limits]
    rows = [
        (
            case.name,
            f"{case.rate(MEMCPY).median:.1f}",
            *(f"{case.to_limit(name).median:.2f}" for name in names),
            f"{case.seconds(BORROW).median * 1e3:.3f}" if BORROW in case.operations else "",
        )
        for case in cases
    ]
    case = result.case(LOOKUP)
    times = ", ".join(f"{name} {case.seconds(name).median * 1e3:.3f} ms" for name in case.operations)
    heads = ("x memcpy", "memcpy, GB/s", *names, f"{BORROW}, ms")
    return markdown(heads, rows) + f"\n\nOver the Unix socket: {times}."


def small_blocks(results: Results) -> str:
    """Rates by block size."""
    case = results["test_small_blocks"].cases[0]
    rows = []
    for name in case.operations:
        if name in case.limits:
            large = f"{name.split()[0]} {HEADLINE.block_bytes} B"
            share = f"{1 / case.ratio(name, large):.0%}"
            rows.append((name, f"{case.rate(name).median:.2f}", share, spread_text(case.to_limit(name))))
        else:
            rows.append((name, f"{case.rate(name).median:.2f}", "", ""))
    return markdown(("operation", "GB/s", f"share of {HEADLINE.block_bytes} B", "x plain socket"), rows)


def clients(results: Results) -> str:
    """Aggregate rates by number of processes."""
    case = results["test_clients"].cases[0]
    rows = []
    for name, limit in sorted(case.limits.items()):
        rates = (f"{case.rate(which).median:.2f}" for which in (name, limit))
        rows.append((name, *rates, spread_text(case.to_limit(name))))
    return markdown(("clients", "GB/s", "plain sockets, GB/s", "x plain sockets"), rows)


def connections(results: Results) -> str:
    """Rates of one client by number of connections."""
    case = results["test_connections"].cases[0]
    rows = [(name, f"{case.rate(name).median:.2f}", spread_text(case.to_limit(name))) for name in sorted(case.limits)]
    return markdown(("one client", "GB/s", "x plain socket"), rows)


def nixl(results: Results) -> str:
    """Reads with NIXL beside reads in band."""
    case = results["test_nixl"].cases[0]
    rows = [(name, f"{case.rate(name).median:.2f}", spread_text(case.to_limit(name))) for name in sorted(case.limits)]
    return markdown((f"get_into, UCX over {case.parameters['ucx_tls']}", "GB/s", "x plain socket"), rows)


def logins(results: Results) -> str:
    """What logins cost, and a tenant beside one that floods the store."""
    result = results["test_logins"]
    cost, tenants = result.case("logins"), result.case("tenants")
    rows = [
        (name, f"{cost.rate(name).median:.2f} GB/s", spread_text(cost.to_limit(name))) for name in (OPEN, LOGGED_IN)
    ]
    for name in (ALONE, BESIDE):
        beside = spread_text(tenants.to_limit(name)) if name in tenants.limits else ""
        found = tenants.parameters["found"][name]
        rows.append((f"{name}: {found:.1%} found", f"{tenants.seconds(name).median * 1000:.2f} ms", beside))
    return markdown(("", "", "x plain socket, x alone"), rows)


def block_macs(results: Results) -> str:
    """Calls with MACs beside those without."""
    rows = []
    for case in results["test_block_macs"].cases:
        for name in case.limits:
            if name.endswith(", plain"):
                with_macs = f"{name.removesuffix('plain')}MACs"
                rates = (f"{case.rate(which).median:.2f}" for which in (name, with_macs))
                what = f"{case.name}: {name.removesuffix(', plain')}"
                rows.append((what, *rates, f"{case.ratio(with_macs, name):.2f}"))
    return markdown(("", "GB/s", "with MACs, GB/s", "time with MACs, x"), rows)


def block_macs_alone(results: Results) -> str:
    """The sums alone."""
    case = results["test_block_macs"].case(TCP)
    rows = [
        (name, f"{case.rate(name).median:.2f}") for name in case.operations if name.startswith(("hash, ", "xxh3, "))
    ]
    return markdown(("one core", "GB/s"), rows)


def tls(results: Results) -> str:
    """Transfers with TLS beside those without it, and beside OpenSSL."""
    result = results["test_tls"]
    case, own = result.cases[0], result.parameters.get("shard_tls_process_gb_per_s", {})
    rows = []
    for name in sorted(case.limits):
        rates = (f"{case.rate(which).median:.2f}" for which in (name, case.limits[name]))
        of_core = f"{statistics.median(own[name]):.2f}" if name in own else ""
        rows.append((name, *rates, spread_text(case.to_limit(name)), of_core))
    return markdown(("one client", "GB/s", "limit, GB/s", "x limit", "GB per second of the shard's TLS process"), rows)


def beside_python(results: Results) -> str:
    """Transfers beside a thread that counts."""
    case = results["test_beside_python"].cases[0]
    rows = []
    for name in ("get_into", "set"):
        rates = (f"{case.rate(which).median:.2f}" for which in (name, case.limits[name]))
        pace = case.to_limit(f"{PACE} {name}").inverse
        rows.append((name, *rates, spread_text(case.to_limit(name)), spread_text(pace)))
    head = (
        "beside a counting thread",
        "GB/s",
        "plain socket, GB/s",
        "x plain socket",
        "the counter's pace, of that beside it",
    )
    return markdown(head, rows)


def sharding(results: Results) -> str:
    """Placement, split, two shards."""
    result = results["test_sharding"]
    placement = result.case(PLACEMENT)
    rows = [
        (
            f"placement: {name}",
            f"{placement.parameters['keys'] / placement.seconds(name).median / 1e6:.1f} M keys/s",
            "",
        )
        for name in placement.operations
    ]
    rows.append((f"split: {SPLIT_512}", f"{result.case(SPLIT).seconds(SPLIT_512).median * 1e3:.3f} ms of CPU", ""))
    shards = result.case(TWO_SHARDS)
    for name in shards.operations:
        one = name.replace("2 shards", "1 shard")
        share = f"{1 / shards.ratio(name, one):.2f}" if one != name else ""
        rows.append((name, f"{shards.rate(name).median:.2f} GB/s", share))
    return markdown(("", "median", "of one shard"), rows)


def lookup(results: Results) -> str:
    """Latencies."""
    result = results["test_lookup"]
    case = result.cases[0]
    p99 = result.parameters["p99_seconds"]
    rows = [
        (
            name,
            f"{case.seconds(name).median * 1e6:.0f}",
            f"{p99[name] * 1e6:.0f}",
            f"{case.to_limit(name).median:.1f}" if name in case.limits else "",
        )
        for name in case.operations
    ]
    return markdown(("call", "median, µs", "p99, µs", "x round trip"), rows)


def waiters(results: Results) -> str:
    """What waiting reads and promises cost others."""
    result = results["test_waiters"]
    case, p99 = result.cases[0], result.parameters["p99_seconds"]
    rows = [
        (
            name,
            f"{case.seconds(name).median * 1e6:.0f}",
            f"{p99[name] * 1e6:.0f}",
            f"{case.to_limit(name).median:.2f}" if name in case.limits else "",
        )
        for name in case.operations
    ]
    held, limit = (result.parameters[name] / 2**20 for name in ("held_bytes", "held_limit_bytes"))
    table = markdown(("call", "median, µs", "p99, µs", "x without"), rows)
    return f"{table}\n\nThe server holds {held:.0f} of {limit:.0f} MiB of its account for them."


def key_hashing(results: Results) -> str:
    """Tokens a second."""
    rows = []
    for case in results["test_key_hashing"].group("hashing"):
        tokens = case.parameters["tokens"] / 1e6
        rates = [f"{tokens / case.seconds(name).median:.0f}" for name in case.operations]
        rows.append((case.name, *rates))
        names = case.operations
    return markdown(("M tokens/s", *names), rows)


def copying(results: Results) -> str:
    """Gather and scatter beside NumPy rows."""
    rows = []
    for case in results["test_key_hashing"].group("copying"):
        cells = [f"{case.rate(name).median:.1f}" for name in case.operations]
        rows.append((case.name, *cells, f"{case.ratio(GATHER, NAIVE):.2f}", f"{case.ratio(SCATTER, NAIVE_WRITE):.2f}"))
        names = case.operations
    return markdown(("GB/s", *names, "gather x NumPy", "scatter x NumPy"), rows)


def swap(results: Results) -> str:
    """Rates of swapping, of the limits, and multiples of those."""
    cases = results["test_swap"].cases
    names = [name for name in (SWAP_OUT, SWAP_IN, CUDA_OUT, CUDA_IN) if name in cases[0].operations]
    limits = list(dict.fromkeys(cases[0].limits[name] for name in names))
    rows = []
    for case in cases:
        rates = [f"{case.rate(name).median:.1f}" for name in (*limits, *names)]
        rows.append((case.name, *rates, *(f"{1 / case.to_limit(name).median:.0%}" for name in names)))
    missing = cases[0].data["unavailable"]
    remark = "".join(f"\n\n{name}: {reason}." for name, reason in missing.items())
    return markdown(("GB/s", *limits, *names, *(f"{name}, share of its limit" for name in names)), rows) + remark


def demo(results: Results) -> str:
    """Time to the first token."""
    case = results["test_demo"].cases[0]
    rows = [(name, spread_text(case.seconds(name))) for name in (FIRST, SECOND)]
    rows.append(("times shorter", f"{case.ratio(FIRST, SECOND):.1f}"))
    rows.append(("tokens equal", "yes" if results["test_demo"].parameters["token_ids_equal"] else "**no**"))
    return markdown((case.name, "s, median (min … max)"), rows)


# Marker in the document: the benchmark it needs ("" for none), and the table.
REMOTE_TABLES: Final[dict[str, tuple[str, Callable[[Results], str]]]] = {
    "server": ("test_server", server),
    "server_models": ("test_server", server_models),
    "memory_io": ("test_memory_io", memory_io),
    "zmq_transfer": ("test_zmq_transfer", zmq_transfer),
    "shared_memory": ("test_shared_memory", shared_memory),
    "small_blocks": ("test_small_blocks", small_blocks),
    "clients": ("test_clients", clients),
    "connections": ("test_connections", connections),
    "logins": ("test_logins", logins),
    "nixl": ("test_nixl", nixl),
    "block_macs": ("test_block_macs", block_macs),
    "block_macs_alone": ("test_block_macs", block_macs_alone),
    "tls": ("test_tls", tls),
    "beside_python": ("test_beside_python", beside_python),
    "lookup": ("test_lookup", lookup),
    "waiters": ("test_waiters", waiters),
    "sharding": ("test_sharding", sharding),
    "key_hashing": ("test_key_hashing", key_hashing),
    "copying": ("test_key_hashing", copying),
    "swap": ("test_swap", swap),
    "demo": ("test_demo", demo),
}
