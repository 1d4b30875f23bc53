"""The targets of set, get, lookup, placement, logins, TLS and engines.

This file has over 400 lines because it is one list: the functions that find each target's figure, and the targets in
the order of the document.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

from benchmarks.remote_kv_cache.bench_beside_python import PACE
from benchmarks.remote_kv_cache.bench_demo import FIRST, SECOND
from benchmarks.remote_kv_cache.bench_hand_over import ALONE as NO_ARRIVALS
from benchmarks.remote_kv_cache.bench_hand_over import APART, BETWEEN_TOKENS
from benchmarks.remote_kv_cache.bench_hand_over import CHUNKS as IN_CHUNKS
from benchmarks.remote_kv_cache.bench_hooks import EVERYTHING, NOTHING
from benchmarks.remote_kv_cache.bench_key_hashing import HASHING
from benchmarks.remote_kv_cache.bench_logins import ALONE, BESIDE, LOGGED_IN, OPEN
from benchmarks.remote_kv_cache.bench_many_clients import ALONE as ONE_CLIENT
from benchmarks.remote_kv_cache.bench_many_clients import TOGETHER
from benchmarks.remote_kv_cache.bench_proxy_frozen import AFTER_P99, BEFORE_P99
from benchmarks.remote_kv_cache.bench_request_time import FIRST as ALL_THE_WAY
from benchmarks.remote_kv_cache.bench_request_time import WAY
from benchmarks.remote_kv_cache.bench_sharding import (
    DIFFERENT,
    EQUAL,
    PLACEMENT,
    REPLICAS,
    SPLIT,
    SPLIT_512,
    TWO_SHARDS,
)
from benchmarks.remote_kv_cache.bench_shared_memory import BORROW, CONTAINS, FROM_HOST, LOOKUP, SMALL_BYTES
from benchmarks.remote_kv_cache.bench_slow_store import (
    ALL_AT_ONCE,
    ALWAYS,
    FAST,
    MEAN,
    ONE_AFTER_ANOTHER,
    P99,
    SLOW,
    SOONER,
)
from benchmarks.remote_kv_cache.bench_transfer_out import ANSWERED, PREFILL, STORED, TARGET
from benchmarks.remote_kv_cache.bench_waiters import CONTAINS as BESIDE_WAITERS
from benchmarks.remote_kv_cache.bench_waiters import PING
from benchmarks.remote_kv_cache.copies import GATHER, NAIVE, NAIVE_WRITE, SCATTER
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.first_token import COMPUTED, CPU_TIER, FIRST_TOKEN, OWN
from benchmarks.remote_kv_cache.first_token import STORE as FROM_STORE
from benchmarks.remote_kv_cache.shapes import HEADLINE, MODELS, size_text
from benchmarks.remote_kv_cache.transfers import MEMCPY, PLAIN_GET, PLAIN_SET, REDIS_GETS, REDIS_SETS
from benchmarks.render.cells import Cell, Row, Rows, at, cases, joined, operations, text
from benchmarks.render.ledger import Claim, Finding, at_least, at_most, found
from benchmarks.results_reader import Result

Find = Callable[[Result], Finding]
_LARGE: Final = size_text(HEADLINE.block_bytes)
_HEADLINE_ONLY: Final = f"--model {HEADLINE.name}"
_MOVES: Final = ("get_into", "set")


def _every_model(operation: str) -> Rows:
    """Return a row for each of the five models. Raises `KeyError` if one of them was not measured, because the target
    is then undecided."""

    def rows(result: Result) -> list[Row]:
        return [row for name in MODELS for row in operations(case=name, names=(operation,))(result)]

    return rows


def _of_the_socket(operation: str, limit: float) -> Find:
    limits = "{case}: {limit.name} {limit.rate:.2f} GB/s, {name} {rate:.2f} GB/s"
    return found(_every_model(operation), "{case} {x:.2f~ x}", limits, at_most(limit), between="; ")


def _of_memcpy(operation: str, limit: float) -> Find:
    limits = at(MEMCPY, "{case}: memcpy {rate:.1f} GB/s")
    return found(_every_model(operation), "{case} {x:.2f~ x}", limits, at_most(limit), between="; ")


def _borrowed_within(limit_s: float) -> Find:
    met = at_most(limit_s, lambda row: row.s.median)
    return found(_every_model(BORROW), "{case} {s:ms.3f} ms", "", met)


def _at_once(case: str, operation: str, limit_s: float) -> Find:
    rows = operations(case=case, names=(operation,))
    return found(rows, "{s:ms.3f~ ms}", "", at_most(limit_s, lambda row: row.s.median))


def _a_gb(row: Row) -> float:
    """Return the seconds of processor time for each GB."""
    return 1 / row.rate.median


def _processor_time(operation: str, beside: tuple[str, ...], met: Callable[[Row], bool]) -> Find:
    def others(row: Row) -> str:
        return ", ".join(f"{name} {_a_gb(row.at(name)):.2f} s" for name in beside if name in row.data.operations)

    return found(operations(names=(operation,)), lambda row: f"{_a_gb(row):.2f} s", others, met)


def _first_among_sets(row: Row) -> bool:
    return all(_a_gb(row) <= _a_gb(row.at(name)) for name in REDIS_SETS)


def _small_and_shared(limit: float) -> Find:
    def share(row: Row) -> float:
        return row.at(row.result.case(size_text(SMALL_BYTES))).rate.median / row.rate.median

    names = ("get_into", FROM_HOST)
    large = joined("{name} {rate:.1f} GB/s", names=names)
    return found(
        operations(case=HEADLINE.name, names=names),
        lambda row: f"{row.name} {share(row):.0%}",
        lambda row: f"{_LARGE}: {large(row)}",
        at_least(limit, share),
    )


def _share(case: str, this: str, other: str, spec: str, named: str, names: tuple[str, ...], limit: float) -> Find:
    """Find the throughput of operations with one suffix, as a share of the throughput of those with the other
    suffix."""

    def share(row: Row) -> float:
        return 1 / row.at(f"{row.name} {this}").times(f"{row.name} {other}")

    def of_other(row: Row) -> str:
        rates = (f"{name} {row.at(f'{name} {other}').rate.median:.2f} GB/s" for name in names)
        return f"{named}: {', '.join(rates)}"

    rows = operations(case=case, names=names)
    return found(rows, lambda row: f"{row.name} {format(share(row), spec)}", of_other, at_least(limit, share))


def _latency(operation: str, limit_s: float) -> Find:
    reached = "{s:ms.3f} ms (p99 {mine[p99_seconds]:ms.3f})"
    limit = "{limit.name}: {limit.s:ms.3f} ms"
    return found(operations(names=(operation,)), reached, limit, at_most(limit_s, lambda row: row.s.median))


def _placement(limit: float) -> Find:
    def rate(row: Row) -> float:
        return float(row.p["keys"] / row.s.median)

    return found(
        operations(case=PLACEMENT, names=(EQUAL, DIFFERENT)),
        lambda row: f"{row.name}: {rate(row) / 1e6:.1f} M",
        lambda row: f"{REPLICAS}: {rate(row.at(REPLICAS)) / 1e6:.1f} M",
        at_least(limit, rate),
    )


def _hashing(limit: float) -> Find:
    def rate(row: Row) -> float:
        return float(row.p["tokens"] / row.s.median)

    return found(
        lambda result: sorted(operations("hashing", names=(HASHING,))(result), key=rate)[:1],
        lambda row: f"{rate(row) / 1e6:.0f} M tokens/s at the slowest ({row.case})",
        lambda row: f"memcpy of the tokens: {rate(row.limit) / 1e6:.0f} M tokens/s",
        at_least(limit, rate),
    )


def _copies(result: Result) -> Finding:
    rows = cases("copying")(result)
    gather = max(row.at(GATHER).times(NAIVE) for row in rows)
    scatter = max(row.at(SCATTER).times(NAIVE_WRITE) for row in rows)
    to_limit = max(row.at(name).x.median for row in rows for name in (GATHER, SCATTER))
    return Finding(
        f"longest time of {len(rows)} sizes: gather {gather:.2f} x, scatter {scatter:.2f} x NumPy's",
        f"at most {to_limit:.2f} x one memcpy",
        max(gather, scatter) < 1.005,  # values that are shown as 1.00
    )


def _first_token(limit: float) -> Find:
    def reached(row: Row) -> str:
        checks = row.run["checks"]
        right = not checks["answers_wrong"] and checks["cached_as_expected"]
        return (
            f"1/{1 / row.times(COMPUTED):.0f} of {row.at(COMPUTED).s.median:.1f} s, {row.p['cached_tokens']} of "
            f"{row.p['prompt_tokens']} tokens cached, tokens {'equal' if right else 'NOT all right'}"
        )

    return found(
        operations(FIRST_TOKEN, names=(FROM_STORE,)),
        reached,
        lambda row: f"engine's own cache: {row.at(OWN).s.median:.3f} s; store: {row.s.median:.3f} s",
        at_most(limit, lambda row: row.times(COMPUTED)),
        own_rounds=True,
    )


def _restarted(limit: float) -> Find:
    def share(row: Row) -> float:
        return row.s.median / row.at(CPU_TIER).s.median

    return found(
        operations(FIRST_TOKEN, names=(FROM_STORE,)),
        lambda row: f"{share(row):.2f} x: {row.s.median:.3f} s",
        at(CPU_TIER, "CPU tier: {s:.3f} s"),
        at_most(limit, share),
        own_rounds=True,
    )


def _all_at_once(limit: float) -> Find:
    def best(row: Row, which: str) -> float:
        return min(row.at(f"{name}, {which}").s.median for name in (ALWAYS, WITHOUT))

    def share(row: Row) -> float:
        return row.s.median / best(row, row.name.removeprefix(f"{SOONER}, "))

    return found(
        operations(ALL_AT_ONCE, names=[f"{SOONER}, {which}" for which in (MEAN, P99)]),
        lambda row: f"{row.name.removeprefix(f'{SOONER}, ')} {share(row):.2f} x",
        lambda row: ", ".join(f"{which} {best(row, which):.2f} s" for which in (MEAN, P99)),
        at_most(limit, share),
        own_rounds=True,
    )


def _hooks(limit_s: float) -> Find:
    def slowest(row: Row) -> tuple[float, str]:
        return max((told["p99"], call) for call, told in row.p["calls"].items())

    return found(
        lambda result: [Row(result, result.case(name)) for name in (NOTHING, EVERYTHING)],
        lambda row: f"{row.case}: {slowest(row)[1]} {slowest(row)[0] * 1e3:.2f} ms",
        "on the CPU, a thread makes the copies",
        at_most(limit_s, lambda row: slowest(row)[0]),
        between="; ",
    )


def _fingerprints(limit: float) -> Find:
    look = "{p[fingerprints][seconds]:ms.2f} ms each, {p[fingerprints][looks]:.0f} a round"
    names = (NOTHING, EVERYTHING)
    return found(
        lambda result: [Row(result, result.case(name)) for name in names],
        "{case}: {p[fingerprints][share]:.3%}",
        lambda row: ", ".join(text(look, row.at(row.result.case(name))) for name in names),
        at_most(limit, lambda row: float(row.p["fingerprints"]["share"])),
        between="; ",
    )


def _added(limit_s: float) -> Find:
    def all_the_way(row: Row) -> str:
        every = (f"{case.seconds(ALL_THE_WAY).median * 1e3:.0f} ms at {case.name}" for case in row.result.cases)
        return f"the first token: {', '.join(every)}"

    met = at_most(limit_s, lambda row: row.s.median)
    return found(operations(names=(WAY,)), "{case} {s:ms.1f} ms", all_the_way, met, between="; ")


def _way_through_the_store(limit: float) -> Find:
    def share(row: Row) -> float:
        return row.s.median / row.at(ALL_THE_WAY).s.median

    return found(
        operations(names=(WAY,)),
        lambda row: f"{row.case} {share(row) * 100:.1f} %",
        "the time to the first token",
        at_most(limit, share),
        between="; ",
    )


def _one_part_late(result: Result) -> Finding:
    told, good = [], True
    for row in cases()(result):
        within = []
        for way, parts in row.p["parts"].items():
            if parts > 1:
                most_s, beyond_s = row.p["link_s"] / parts, row.p["beyond_s"][way]
                within.append(f"{way} {beyond_s * 1e3:.0f} of {most_s * 1e3:.0f} ms")
                good = good and beyond_s <= most_s
        told.append(f"{row.p['bytes_per_s'] / 1e6:.0f} MB/s: {', '.join(within)}")
    return Finding("; ".join(told), "the longer of this prefill and the link's time", good)


def _tls(limit: float) -> Find:
    def rate(row: Row) -> float:
        return float(median(row.mine["shard_tls_process_gb_per_s"]))

    def whole(row: Row) -> str:
        names = sorted(row.run["shard_tls_process_gb_per_s"])
        rates = joined("{name} {rate:.2f} GB/s", names=names)
        return f"with client, its TLS process and shard on two cores: {rates(row)}"

    def rows(result: Result) -> list[Row]:
        names = sorted(result.parameters["shard_tls_process_gb_per_s"])
        return list(operations(names=names)(result))

    return found(rows, lambda row: f"{row.name} {rate(row):.2f} GB/s", whole, at_least(limit, rate))


def _and(first: Cell, other: Cell) -> Cell:
    return lambda row: text(first, row) + text(other, row)


def _equal(equal: bool) -> str:
    return "equal" if equal else "NOT equal"


def _prompt_tokens(row: Row) -> int:
    return int(row.p["prompts"] * row.p["prompt_tokens"])


def _slowest(row: Row) -> float:
    return float(row.mine["p99_seconds"] / row.mine["p50_seconds"])


def _longest_ping_s(row: Row) -> float:
    return float(row.run["longest_ping_seconds"][PING])


_TWO_MODELS: Final = (("tiny", "", ""), ("mid", "--model mid", "mid"))  # name, arguments, variant
_BETWEEN: Final = f"{BETWEEN_TOKENS}, prompts of 4096 tokens"
_SLOW_STORE: Final = {SLOW: 1.05, FAST: 0.15}


def _of_before(row: Row) -> float:
    return row.s.median / row.at(BEFORE_P99).s.median


# fmt: off
REMOTE_CLAIMS: Final = (
    *(
        Claim(f"{what} ≤ {limit:.2f} x plain socket, each of five models",
            "bench_server", _of_the_socket(operation, limit),
        )
        for what, operation, limit in (
            ("`get_into`", "get_into", 0.80), ("`stream_get`, placed into memory,", "stream_get", 1.10),
            ("`set`", "set", 0.75), ("`get`", "get", 1.15),
        )
    ),
    Claim("processor time of client and server: `get_into` ≤ 0.45 s for each GB",
        "bench_processor_time", _processor_time("get_into", (PLAIN_GET, *REDIS_GETS), lambda row: _a_gb(row) <= 0.45),
    ),
    Claim("processor time of client and server: `set` ≤ 0.48 s for each GB",
        "bench_processor_time", _processor_time("set", (PLAIN_SET, *REDIS_SETS), lambda row: _a_gb(row) <= 0.48),
    ),
    Claim("processor time of client and server: `set`, with checksums, takes no more than the cheapest set of Redis",
        "bench_processor_time", _processor_time("set", REDIS_SETS, _first_among_sets),
    ),
    Claim("64 clients on two shards: bytes/s of all together ≥ 0.9 x those of one client",
        "bench_many_clients",
        found(
            operations(names=(TOGETHER,)), lambda row: f"{row.rate.median / row.at(ONE_CLIENT).rate.median:.2f}",
            at(ONE_CLIENT, "{name}: {rate:.2f} GB/s"),
            lambda row: row.rate.median >= 0.9 * row.at(ONE_CLIENT).rate.median,
        ),
    ),
    Claim("64 clients on two shards: p99 of a read of 16 blocks ≤ 5 x its median",
        "bench_many_clients",
        found(
            operations(names=(TOGETHER,)), lambda row: f"{_slowest(row):.1f} x, {row.mine['p99_seconds'] * 1e3:.0f} ms",
            at(ONE_CLIENT, "{name}: p99 {mine[p99_seconds]:ms.0f} ms, median {mine[p50_seconds]:ms.0f} ms"),
            at_most(5.0, _slowest),
        ),
    ),
    Claim("a thread that counts in Python: pace next to transfers ≥ 0.9 x that next to a plain socket",
        "bench_beside_python",
        found(
            operations(names=[f"{PACE} {name}" for name in _MOVES]),
            lambda row: f"beside {row.name.removeprefix(PACE + ' ')} {row.share.median:.2f}",
            joined("{name} {rate:.2f} GB/s", names=(*_MOVES, PLAIN_GET, PLAIN_SET)), at_least(0.9),
        ),
    ),
    Claim("shared memory: `get_into` ≤ 1.0 x memcpy, each of five models",
        "bench_shared_memory", _of_memcpy("get_into", 1.0),
    ),
    Claim("shared memory: `set` from host memory ≤ 1.2 x memcpy, each of five models",
        "bench_shared_memory", _of_memcpy(FROM_HOST, 1.2),
    ),
    Claim("shared memory: `borrow` of 64 blocks ≤ 0.2 ms, each of five models",
        "bench_shared_memory", _borrowed_within(0.2e-3),
    ),
    Claim(f"shared memory: 16 KiB blocks ≥ 60 % of the bytes/s of {_LARGE}",
        "bench_shared_memory", _small_and_shared(0.6), _HEADLINE_ONLY,
    ),
    Claim("shared memory: `contains` of 512 keys ≤ 0.12 ms",
        "bench_shared_memory", _at_once(LOOKUP, CONTAINS, 0.12e-3), _HEADLINE_ONLY,
    ),
    *(
        Claim(
            f"{size} blocks ≥ {share * 100:g} % of the bytes/s of {_LARGE}",
            "bench_small_blocks",
            _share("small blocks", size, _LARGE, ".0%", _LARGE, _MOVES, share),
        )
        for size, share in (("64 KiB", 0.9), ("16 KiB", 0.75))
    ),
    Claim("`contains` of 512 keys ≤ 0.1 ms", "bench_lookup", _latency("contains 512", 0.1e-3)),
    Claim("`match_prefix` of 4096 keys ≤ 1.0 ms", "bench_lookup", _latency("match_prefix 4096", 1e-3)),
    Claim(
        "`contains` of 512 keys with 10 000 waiting reads and 100 000 promises ≤ 1.05 x that without; PING ≤ 0.25 s",
        "bench_waiters",
        found(
            operations(names=(BESIDE_WAITERS,)),
            _and("{x:.2f~ x}, longest PING ", lambda row: f"{_longest_ping_s(row) * 1e3:.1f} ms"),
            "{limit.name}: {limit.s:us.0f} µs", lambda row: row.x.median <= 1.05 and _longest_ping_s(row) <= 0.25,
        ),
    ),
    Claim("key hashing ≥ 100 M tokens/s on one thread", "bench_key_hashing", _hashing(100e6)),
    Claim("gather and scatter: at every size at least as fast as NumPy row copies", "bench_key_hashing", _copies),
    Claim("placement over 64 shards ≥ 5 M keys/s on one thread", "bench_sharding", _placement(5e6)),
    Claim("splitting a batch of 512 keys over 64 shards ≤ 1 ms of processor time",
        "bench_sharding",
        found(operations(case=SPLIT, names=(SPLIT_512,)), "{s:ms.3f} ms", "", at_most(1e-3, lambda row: row.s.median)),
    ),
    Claim("two shards on the same two cores: throughput ≥ 0.95 x that of one shard",
        "bench_sharding",
        _share(TWO_SHARDS, "2 shards", "1 shard", ".2f", "one shard", ("set", "get_into", "stream_get"), 0.95),
    ),
    Claim(f"prefill at hit rate 0, every block sent: ≥ {TARGET} x the throughput without the connector",
        "bench_transfer_out",
        found(
            operations(PREFILL, names=(STORED,)),
            _and("{share:.3f~} until stored, ", at(ANSWERED, "{share:.3f} until answered")),
            lambda row: f"{WITHOUT}: {_prompt_tokens(row) / row.at(WITHOUT).s.median:.0f} tokens/s", at_least(TARGET),
            own_rounds=True,
        ),
        f"--parts {PREFILL}",
    ),
    Claim(
        "engine restarted, 8192 tokens from the store: first token ≤ 1/20 of computing it; all blocks cached; equal "
        "tokens",
        "bench_long_prefill", _first_token(1 / 20), f"--parts '{FIRST_TOKEN}'",
    ),
    Claim(
        "engine restarted, 8192 tokens from a server on its host: first token ≤ 1.3 x that from its CPU tier",
        "bench_long_prefill", _restarted(1.3), f"--parts '{FIRST_TOKEN}'",
    ),
    Claim(
        "engine restarted, 5000 tokens over 1 MB/s ≤ 1.05 x the time without the connector, over 200 MB/s ≤ 0.15 x",
        "bench_slow_store",
        found(
            operations(ONE_AFTER_ANOTHER, names=list(_SLOW_STORE)), "{name} {x:.2f} x",
            at(WITHOUT, "{name}: {s:.1f} s"), lambda row: row.x.median <= _SLOW_STORE[row.name], own_rounds=True,
        ),
        f"--parts '{ONE_AFTER_ANOTHER}'",
    ),
    Claim(
        "50 prompts, 90 % stored, over 200 MB/s: first token, mean and p99, ≤ 1.1 x the better of always loading and "
        "computing",
        "bench_slow_store", _all_at_once(1.1), f"--parts '{ALL_AT_ONCE}'",
    ),
    Claim("no step of an engine waits for the connector: p99 of each call ≤ 1 ms, without the wait for a core",
        "bench_hooks", _hooks(0.001),
    ),
    Claim("fingerprints of the weights take ≤ 0.2 % of an engine's time", "bench_hooks", _fingerprints(0.002)),
    Claim("P/D: p99 of the time between tokens while prompts of 4096 tokens arrive ≤ 1.5 x that without prompts",
        "bench_hand_over",
        found(
            operations(case=_BETWEEN, names=(APART, IN_CHUNKS)), "{name} {x:.2f} x",
            at(NO_ARRIVALS, "{name} {s:ms.1f} ms"), lambda row: row.name != APART or row.x.median <= 1.5,
        ),
    ),
    *(
        Claim(
            f"end of the prefill until D has its last block: {what}, {model} model",
            "bench_request_time",
            find,
            arguments,
            variant,
        )
        for what, find in (
            ("≤ 10 ms (median) on one host", _added(0.010)),
            ("< 5 % of the time to the first token, on one host", _way_through_the_store(0.05)),
        )
        for model, arguments, variant in _TWO_MODELS
    ),
    Claim("layer slices: D has a prompt at most one slice's link time later than the longer of prefill and link time",
        "bench_layer_parts", _one_part_late,
    ),
    Claim("demo: equal tokens, and the first token ≥ 10 times sooner",
        "bench_demo",
        found(
            operations(names=(FIRST,)),
            lambda row: f"{row.times(SECOND):.1f} times shorter, tokens {_equal(row.run['token_ids_equal'])}",
            "computing it: {s:.2f} s", lambda row: row.run["token_ids_equal"] and row.times(SECOND) >= 10,
        ),
    ),
    Claim("an engine freezes behind the proxy: p99 of the time to first token in the next 5 s ≤ 1.5 x that before",
        "bench_proxy_frozen",
        found(
            operations(names=(AFTER_P99,)),
            lambda row: f"{_of_before(row):.2f} x ({row.case})",
            at(BEFORE_P99, "before: p99 {s:ms.0f} ms"),
            at_most(1.5, _of_before),
        ),
    ),
    Claim("logins cost `get_into` at most 1 %",
        "bench_logins",
        found(
            operations(case="logins", names=(LOGGED_IN,)),
            lambda row: f"{row.x.median:.3f} x, without {row.at(OPEN).x.median:.3f} x",
            lambda row: text("plain socket get: {limit.rate:.2f} GB/s", row.at(OPEN)),
            lambda row: row.x.median <= row.at(OPEN).x.median * 1.01,
        ),
    ),
    Claim("a tenant while another one floods the store: p99 ≤ 2 x that alone, at most 2 points fewer blocks found",
        "bench_logins",
        found(
            operations(case="tenants", names=(BESIDE,)),
            _and("{x:.2f~ x}, {mine[found]:.1%} found, alone ", at(ALONE, "{mine[found]:.1%}")),
            at(ALONE, "alone: p99 {s:ms.1f} ms"),
            lambda row: row.x.median <= 2.0 and row.mine["found"] >= row.at(ALONE).mine["found"] - 0.02,
        ),
    ),
    Claim("TLS: the shard's TLS process moves ≥ 1.5 GB for each second of processor time", "bench_tls", _tls(1.5)),
)
# fmt: on
