"""The targets of set, get, lookup, placement and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.ledger import Claim, Finding
from benchmarks.remote_kv_cache.copies import GATHER, NAIVE, NAIVE_WRITE, SCATTER
from benchmarks.remote_kv_cache.engines import WITHOUT
from benchmarks.remote_kv_cache.first_token import COMPUTED, CPU_TIER, FIRST_TOKEN, OWN
from benchmarks.remote_kv_cache.first_token import STORE as FROM_STORE
from benchmarks.remote_kv_cache.shapes import HEADLINE, size_text
from benchmarks.remote_kv_cache.test_beside_python import PACE
from benchmarks.remote_kv_cache.test_demo import FIRST, SECOND
from benchmarks.remote_kv_cache.test_hand_over import ALONE as NO_ARRIVALS
from benchmarks.remote_kv_cache.test_hand_over import APART, BETWEEN_TOKENS
from benchmarks.remote_kv_cache.test_hand_over import CHUNKS as IN_CHUNKS
from benchmarks.remote_kv_cache.test_hooks import EVERYTHING, NOTHING
from benchmarks.remote_kv_cache.test_key_hashing import HASHING
from benchmarks.remote_kv_cache.test_request_time import FIRST as ALL_THE_WAY
from benchmarks.remote_kv_cache.test_request_time import WAY
from benchmarks.remote_kv_cache.test_sharding import (
    DIFFERENT,
    EQUAL,
    PLACEMENT,
    REPLICAS,
    SPLIT,
    SPLIT_512,
    TWO_SHARDS,
)
from benchmarks.remote_kv_cache.test_shared_memory import BORROW, CONTAINS, FROM_HOST, LOOKUP, SMALL_BYTES
from benchmarks.remote_kv_cache.test_slow_store import (
    ALL_AT_ONCE,
    ALWAYS,
    FAST,
    MEAN,
    ONE_AFTER_ANOTHER,
    P99,
    SLOW,
    SOONER,
)
from benchmarks.remote_kv_cache.test_transfer_out import ANSWERED, PREFILL, STORED, TARGET
from benchmarks.remote_kv_cache.test_waiters import CONTAINS as BESIDE_WAITERS
from benchmarks.remote_kv_cache.test_waiters import PING
from benchmarks.remote_kv_cache.transfers import MEMCPY, PLAIN_GET, PLAIN_SET
from benchmarks.results_reader import CaseResult, Result

_MODULE: Final = "benchmarks.remote_kv_cache"
_TWO_MODELS: Final = (("tiny", "", ""), ("mid", "--model mid", "mid"))  # name, arguments, variant
_LARGE: Final = size_text(HEADLINE.block_bytes)


def _of_the_socket(operation: str, at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case(HEADLINE.name)
        ratio = case.to_limit(operation)
        limit = case.limits[operation]
        return Finding(
            f"{ratio.median:.2f} x ({ratio.low:.2f} … {ratio.high:.2f}), {case.rate(operation).median:.2f} GB/s",
            f"{limit}: {case.rate(limit).median:.2f} GB/s",
            ratio.median <= at_most,
        )

    return find


def _of_memcpy(operation: str, at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case(HEADLINE.name)
        ratio = case.to_limit(operation)
        return Finding(
            f"{ratio.median:.2f} x ({ratio.low:.2f} … {ratio.high:.2f}), {case.rate(operation).median:.1f} GB/s",
            f"memcpy: {case.rate(MEMCPY).median:.1f} GB/s",
            ratio.median <= at_most,
        )

    return find


def _small_and_shared(at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        large, small = result.case(HEADLINE.name), result.case(size_text(SMALL_BYTES))
        shares = {name: small.rate(name).median / large.rate(name).median for name in ("get_into", FROM_HOST)}
        return Finding(
            ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
            f"{_LARGE}: " + ", ".join(f"{name} {large.rate(name).median:.1f} GB/s" for name in shares),
            min(shares.values()) >= at_least,
        )

    return find


def _at_once(case_name: str, operation: str, at_most_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        seconds = result.case(case_name).seconds(operation)
        return Finding(
            f"{seconds.median * 1e3:.3f} ms ({seconds.low * 1e3:.3f} … {seconds.high * 1e3:.3f})",
            "",
            seconds.median <= at_most_s,
        )

    return find


def _share_of_large(size: str, at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case("small blocks")
        shares = {name: 1 / case.ratio(f"{name} {size}", f"{name} {_LARGE}") for name in ("get_into", "set")}
        return Finding(
            ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
            f"{_LARGE}: " + ", ".join(f"{name} {case.rate(f'{name} {_LARGE}').median:.2f} GB/s" for name in shares),
            min(shares.values()) >= at_least,
        )

    return find


def _latency(operation: str, at_most_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.cases[0]
        seconds = case.seconds(operation)
        limit = case.limits[operation]
        return Finding(
            f"{seconds.median * 1e3:.3f} ms (p99 {result.parameters['p99_seconds'][operation] * 1e3:.3f})",
            f"{limit}: {case.seconds(limit).median * 1e3:.3f} ms",
            seconds.median <= at_most_s,
        )

    return find


def _placement(at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case(PLACEMENT)
        rates = {name: case.parameters["keys"] / case.seconds(name).median for name in (EQUAL, DIFFERENT, REPLICAS)}
        return Finding(
            ", ".join(f"{name}: {rates[name] / 1e6:.1f} M" for name in (EQUAL, DIFFERENT)),
            f"{REPLICAS}: {rates[REPLICAS] / 1e6:.1f} M",
            min(rates[EQUAL], rates[DIFFERENT]) >= at_least,
        )

    return find


def _split(at_most_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        seconds = result.case(SPLIT).seconds(SPLIT_512)
        return Finding(f"{seconds.median * 1e3:.3f} ms", "", seconds.median <= at_most_s)

    return find


def _two_shards(at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case(TWO_SHARDS)
        shares = {
            name: 1 / case.ratio(f"{name} 2 shards", f"{name} 1 shard") for name in ("set", "get_into", "stream_get")
        }
        return Finding(
            ", ".join(f"{name} {share:.2f}" for name, share in shares.items()),
            "one shard: " + ", ".join(f"{name} {case.rate(f'{name} 1 shard').median:.2f} GB/s" for name in shares),
            min(shares.values()) >= at_least,
        )

    return find


def _hashing(at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        cases = result.group("hashing")
        slowest = min(cases, key=lambda case: case.parameters["tokens"] / case.seconds(HASHING).median)
        tokens = slowest.parameters["tokens"]
        rate = tokens / slowest.seconds(HASHING).median
        limit = tokens / slowest.seconds(slowest.limits[HASHING]).median
        return Finding(
            f"{rate / 1e6:.0f} M tokens/s at the slowest ({slowest.name})",
            f"memcpy of the tokens: {limit / 1e6:.0f} M tokens/s",
            rate >= at_least,
        )

    return find


def _copies(result: Result) -> Finding:
    cases = result.group("copying")
    gather = max(case.ratio(GATHER, NAIVE) for case in cases)
    scatter = max(case.ratio(SCATTER, NAIVE_WRITE) for case in cases)
    to_limit = max(case.to_limit(name).median for case in cases for name in (GATHER, SCATTER))
    return Finding(
        f"time at the worst of {len(cases)} sizes: gather {gather:.2f} x, scatter {scatter:.2f} x NumPy's",
        f"one memcpy: {to_limit:.2f} x at the worst",
        max(gather, scatter) < 1.005,  # what is written as 1.00
    )


def _pace(at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.cases[0]
        names = ("get_into", "set")
        paces = {name: case.to_limit(f"{PACE} {name}").inverse for name in names}
        rates = ", ".join(f"{name} {case.rate(name).median:.2f} GB/s" for name in (*names, PLAIN_GET, PLAIN_SET))
        return Finding(
            ", ".join(f"beside {name} {pace.median:.2f}" for name, pace in paces.items()),
            rates,
            min(pace.median for pace in paces.values()) >= at_least,
        )

    return find


def _demo(result: Result) -> Finding:
    case = result.cases[0]
    shorter = case.ratio(FIRST, SECOND)
    equal = result.parameters["token_ids_equal"]
    return Finding(
        f"{shorter:.1f} times shorter, tokens {'equal' if equal else 'NOT equal'}",
        f"computing it: {case.seconds(FIRST).median:.2f} s",
        bool(equal) and shorter >= 10,
    )


def _right(result: Result) -> bool:
    """Whether every answer of a benchmark of engines was right."""
    checks = result.parameters["checks"]
    return not checks["answers_wrong"] and bool(checks["cached_as_expected"])


def _sending(at_least: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = _only(result, PREFILL)
        shares = {name: case.to_limit(name).inverse for name in (ANSWERED, STORED)}
        tokens = case.parameters["prompts"] * case.parameters["prompt_tokens"]
        stored = shares[STORED]
        return Finding(
            f"{stored.median:.3f} ({stored.low:.3f} … {stored.high:.3f}) until stored, "
            f"{shares[ANSWERED].median:.3f} until answered",
            f"{WITHOUT}: {tokens / case.seconds(WITHOUT).median:.0f} tokens/s",
            stored.median >= at_least and _right(result),
            len(case.data["seconds"][STORED]),
        )

    return find


def _first_token(at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = _only(result, FIRST_TOKEN)
        share = case.ratio(FROM_STORE, COMPUTED)
        cached, tokens = case.parameters["cached_tokens"], case.parameters["prompt_tokens"]
        right = _right(result)
        return Finding(
            f"1/{1 / share:.0f} of {case.seconds(COMPUTED).median:.1f} s, {cached} of {tokens} tokens cached, "
            f"tokens {'equal' if right else 'NOT all right'}",
            f"engine's own cache: {case.seconds(OWN).median:.3f} s; store: {case.seconds(FROM_STORE).median:.3f} s",
            share <= at_most and right,
            len(case.data["seconds"][FROM_STORE]),
        )

    return find


def _restarted(at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = _only(result, FIRST_TOKEN)
        share = case.seconds(FROM_STORE).median / case.seconds(CPU_TIER).median
        return Finding(
            f"{share:.2f} x: {case.seconds(FROM_STORE).median:.3f} s",
            f"CPU tier: {case.seconds(CPU_TIER).median:.3f} s",
            share <= at_most and _right(result),
            len(case.data["seconds"][FROM_STORE]),
        )

    return find


def _slow_store(slow: float, fast: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = _only(result, ONE_AFTER_ANOTHER)
        shares = {name: case.to_limit(name).median for name in (SLOW, FAST)}
        return Finding(
            ", ".join(f"{name} {share:.2f} x" for name, share in shares.items()),
            f"{WITHOUT}: {case.seconds(WITHOUT).median:.1f} s",
            shares[SLOW] <= slow and shares[FAST] <= fast and _right(result),
            len(case.data["seconds"][SLOW]),
        )

    return find


def _all_at_once(at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = _only(result, ALL_AT_ONCE)
        best = {
            which: min(case.seconds(f"{name}, {which}").median for name in (ALWAYS, WITHOUT)) for which in (MEAN, P99)
        }
        shares = {which: case.seconds(f"{SOONER}, {which}").median / best[which] for which in (MEAN, P99)}
        return Finding(
            ", ".join(f"{which} {share:.2f} x" for which, share in shares.items()),
            ", ".join(f"{which} {seconds:.2f} s" for which, seconds in best.items()),
            max(shares.values()) <= at_most and _right(result),
            len(case.data["seconds"][f"{SOONER}, {MEAN}"]),
        )

    return find


def _hooks(at_most_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        slowest = []
        for name in (NOTHING, EVERYTHING):
            calls = result.case(name).parameters["calls"]
            call = max(calls, key=lambda call: calls[call]["p99"])
            slowest.append((calls[call]["p99"], f"{name}: {call} {calls[call]['p99'] * 1e3:.2f} ms"))
        return Finding(
            "; ".join(said for _, said in slowest),
            "copies on the CPU are made by a thread",
            max(slowest)[0] <= at_most_s and _right(result),
        )

    return find


def _between_tokens(at_most: float, prompt_tokens: int) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case(f"{BETWEEN_TOKENS}, prompts of {prompt_tokens} tokens")
        shares = {name: case.to_limit(name).median for name in (APART, IN_CHUNKS)}
        return Finding(
            ", ".join(f"{name} {share:.2f} x" for name, share in shares.items()),
            f"{NO_ARRIVALS} {case.seconds(NO_ARRIVALS).median * 1e3:.1f} ms",
            shares[APART] <= at_most and _right(result),
        )

    return find


def _added(at_most_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        added = {case.name: case.seconds(WAY).median for case in result.cases}
        return Finding(
            "; ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in added.items()),
            "the first token: "
            + ", ".join(f"{case.seconds(ALL_THE_WAY).median * 1e3:.0f} ms at {case.name}" for case in result.cases),
            max(added.values()) <= at_most_s and _right(result),
        )

    return find


def _way_through_the_store(at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        shares = {case.name: case.seconds(WAY).median / case.seconds(ALL_THE_WAY).median for case in result.cases}
        return Finding(
            "; ".join(f"{name} {share * 100:.1f} %" for name, share in shares.items()),
            "the time to the first token",
            max(shares.values()) <= at_most and _right(result),
        )

    return find


def _beside_waiters(at_most: float, ping_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.cases[0]
        share, alone = case.to_limit(BESIDE_WAITERS), case.limits[BESIDE_WAITERS]
        longest_s = result.parameters["longest_ping_seconds"][PING]
        return Finding(
            f"{share.median:.2f} x ({share.low:.2f} … {share.high:.2f}), longest PING {longest_s * 1e3:.1f} ms",
            f"{alone}: {case.seconds(alone).median * 1e6:.0f} µs",
            share.median <= at_most and longest_s <= ping_s,
        )

    return find


def _one_part_late(result: Result) -> Finding:
    told, good = [], True
    for case in result.cases:
        within = []
        for way, parts in case.parameters["parts"].items():
            if parts > 1:
                most_s, beyond_s = case.parameters["link_s"] / parts, case.parameters["beyond_s"][way]
                within.append(f"{way} {beyond_s * 1e3:.0f} of {most_s * 1e3:.0f} ms")
                good = good and beyond_s <= most_s
        told.append(f"{case.parameters['bytes_per_s'] / 1e6:.0f} MB/s: {', '.join(within)}")
    return Finding("; ".join(told), "the longer of this prefill and the link's time", good and _right(result))


def _only(result: Result, group: str) -> CaseResult:
    """The one case of a part. Raises `KeyError` if that part was left out."""
    cases = result.group(group)
    if not cases:
        raise KeyError(group)
    return cases[0]


_HEADLINE_ONLY: Final = f"--model {HEADLINE.name}"

REMOTE_CLAIMS: Final = (
    Claim(_MODULE, "`get_into` ≤ 1.10 x plain socket", "test_server", _HEADLINE_ONLY, _of_the_socket("get_into", 1.10)),
    Claim(
        _MODULE,
        "`stream_get`, placed into memory, ≤ 1.10 x plain socket",
        "test_server",
        _HEADLINE_ONLY,
        _of_the_socket("stream_get", 1.10),
    ),
    Claim(_MODULE, "`set` ≤ 1.10 x plain socket", "test_server", _HEADLINE_ONLY, _of_the_socket("set", 1.10)),
    Claim(_MODULE, "`get` ≤ 1.15 x plain socket", "test_server", _HEADLINE_ONLY, _of_the_socket("get", 1.15)),
    Claim(
        _MODULE,
        "a thread that counts in Python keeps ≥ 0.9 of the pace it keeps beside a plain socket",
        "test_beside_python",
        "",
        _pace(0.9),
    ),
    Claim(
        _MODULE,
        "shared memory: `get_into` ≤ 1.15 x memcpy",
        "test_shared_memory",
        _HEADLINE_ONLY,
        _of_memcpy("get_into", 1.15),
    ),
    Claim(
        _MODULE,
        "shared memory: `set` from host memory ≤ 1.3 x memcpy",
        "test_shared_memory",
        _HEADLINE_ONLY,
        _of_memcpy(FROM_HOST, 1.3),
    ),
    Claim(
        _MODULE,
        "shared memory: `borrow` of 64 blocks ≤ 0.2 ms",
        "test_shared_memory",
        _HEADLINE_ONLY,
        _at_once(HEADLINE.name, BORROW, 0.2e-3),
    ),
    Claim(
        _MODULE,
        f"shared memory: 16 KiB blocks ≥ 60 % of the bytes/s of {_LARGE}",
        "test_shared_memory",
        _HEADLINE_ONLY,
        _small_and_shared(0.6),
    ),
    Claim(
        _MODULE,
        "shared memory: `contains` of 512 keys ≤ 0.12 ms",
        "test_shared_memory",
        _HEADLINE_ONLY,
        _at_once(LOOKUP, CONTAINS, 0.12e-3),
    ),
    Claim(
        _MODULE,
        f"64 KiB blocks ≥ 85 % of the bytes/s of {_LARGE}",
        "test_small_blocks",
        "",
        _share_of_large("64 KiB", 0.85),
    ),
    Claim(
        _MODULE,
        f"16 KiB blocks ≥ 60 % of the bytes/s of {_LARGE}",
        "test_small_blocks",
        "",
        _share_of_large("16 KiB", 0.6),
    ),
    Claim(_MODULE, "`contains` of 512 keys ≤ 0.15 ms", "test_lookup", "", _latency("contains 512", 0.15e-3)),
    Claim(_MODULE, "`match_prefix` of 4096 keys ≤ 1.0 ms", "test_lookup", "", _latency("match_prefix 4096", 1e-3)),
    Claim(
        _MODULE,
        "`contains` of 512 keys beside 10 000 waiting reads and 100 000 promises ≤ 1.05 x that without; PING ≤ 0.25 s",
        "test_waiters",
        "",
        _beside_waiters(1.05, 0.25),
    ),
    Claim(_MODULE, "key hashing ≥ 100 M tokens/s, one thread", "test_key_hashing", "", _hashing(100e6)),
    Claim(_MODULE, "gather and scatter ≥ NumPy row copies at every size", "test_key_hashing", "", _copies),
    Claim(_MODULE, "placement over 64 shards ≥ 5 M keys/s, one thread", "test_sharding", "", _placement(5e6)),
    Claim(_MODULE, "splitting a batch of 512 keys over 64 shards ≤ 1 ms of CPU", "test_sharding", "", _split(1e-3)),
    Claim(_MODULE, "two shards on the same two cores ≥ 0.95 x one", "test_sharding", "", _two_shards(0.95)),
    Claim(
        _MODULE,
        f"prefill at hit rate 0, every block sent: ≥ {TARGET} x the throughput without the connector",
        "test_transfer_out",
        f"--parts {PREFILL}",
        _sending(TARGET),
    ),
    Claim(
        _MODULE,
        "first token of 8192 tokens from the store, engine restarted: ≤ 1/20 of computing it, all but the last block's "
        "remainder cached, equal tokens",
        "test_long_prefill",
        f"--parts '{FIRST_TOKEN}'",
        _first_token(1 / 20),
    ),
    Claim(
        _MODULE,
        "first token of 8192 tokens from a server on the engine's host, engine restarted: ≤ 1.3 x from the engine's "
        "CPU tier",
        "test_long_prefill",
        f"--parts '{FIRST_TOKEN}'",
        _restarted(1.3),
    ),
    Claim(
        _MODULE,
        "prompts of 5000 tokens that the store has, engine restarted: over 1 MB/s ≤ 1.05 x the time without the "
        "connector, over 200 MB/s ≤ 0.15 x",
        "test_slow_store",
        f"--parts '{ONE_AFTER_ANOTHER}'",
        _slow_store(1.05, 0.15),
    ),
    Claim(
        _MODULE,
        "50 prompts at once, of which the store has 90 %, over 200 MB/s: time to the first token, mean and p99, ≤ 1.1 "
        "x the better of always loading and computing",
        "test_slow_store",
        f"--parts '{ALL_AT_ONCE}'",
        _all_at_once(1.1),
    ),
    Claim(
        _MODULE,
        "no step of an engine waits for the connector: p99 of each call ≤ 1 ms, without the wait for a core",
        "test_hooks",
        "",
        _hooks(0.001),
    ),
    Claim(
        _MODULE,
        "prefill and decode apart: time between tokens, p99, while prompts of 4096 tokens come ≤ 1.5 x that without",
        "test_hand_over",
        "",
        _between_tokens(1.5, 4096),
    ),
    *(
        Claim(
            _MODULE,
            f"from the end of the prefill until its last block is there: ≤ 10 ms (median) on one host, {model} model",
            "test_request_time",
            arguments,
            _added(0.010),
            variant,
        )
        for model, arguments, variant in _TWO_MODELS
    ),
    *(
        Claim(
            _MODULE,
            "from the end of the prefill until its last block is there: < 5 % of the time to the first token, on one "
            f"host, {model} model",
            "test_request_time",
            arguments,
            _way_through_the_store(0.05),
            variant,
        )
        for model, arguments, variant in _TWO_MODELS
    ),
    Claim(
        _MODULE,
        "in parts of layers, a prompt is there at most a part's time on the link after it is computed and sent",
        "test_layer_parts",
        "",
        _one_part_late,
    ),
    Claim(_MODULE, "demo: equal tokens, first token ≥ 10 times sooner", "test_demo", "", _demo),
)
