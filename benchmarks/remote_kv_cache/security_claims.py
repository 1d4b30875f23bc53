"""The targets of logins, of tenants and of TLS."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

from benchmarks.ledger import Claim, Finding
from benchmarks.remote_kv_cache.test_logins import ALONE, BESIDE, LOGGED_IN, OPEN
from benchmarks.results_reader import Result

_MODULE: Final = "benchmarks.remote_kv_cache"


def _cost(at_most: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case("logins")
        with_login, without = case.to_limit(LOGGED_IN), case.to_limit(OPEN)
        return Finding(
            f"{with_login.median:.3f} x, without {without.median:.3f} x",
            f"plain socket get: {case.rate(case.limits[OPEN]).median:.2f} GB/s",
            with_login.median <= without.median * at_most,
        )

    return find


def _beside_a_flood(times: float, points: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case = result.case("tenants")
        ratio, found = case.to_limit(BESIDE), case.parameters["found"]
        return Finding(
            f"{ratio.median:.2f} x ({ratio.low:.2f} … {ratio.high:.2f}), {found[BESIDE]:.1%} found, alone "
            f"{found[ALONE]:.1%}",
            f"alone: p99 {case.seconds(ALONE).median * 1000:.1f} ms",
            ratio.median <= times and found[BESIDE] >= found[ALONE] - points,
        )

    return find


def _tls(gb_per_s: float) -> Callable[[Result], Finding]:
    def find(result: Result) -> Finding:
        case, own = result.cases[0], result.parameters["shard_tls_process_gb_per_s"]
        rates = {name: statistics.median(values) for name, values in sorted(own.items())}
        whole = ", ".join(f"{name} {case.rate(name).median:.2f} GB/s" for name in rates)
        return Finding(
            ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items()),
            f"with client, its TLS process and shard on two cores: {whole}",
            min(rates.values()) >= gb_per_s,
        )

    return find


SECURITY_CLAIMS: Final = (
    Claim(_MODULE, "logins cost `get_into` at most 1 %", "test_logins", "", _cost(1.01)),
    Claim(
        _MODULE,
        "a tenant beside one that floods the store: p99 at most 2 x that alone, found at most 2 points less",
        "test_logins",
        "",
        _beside_a_flood(2.0, 0.02),
    ),
    Claim(
        _MODULE,
        "TLS: the shard's TLS process moves ≥ 1.5 GB in a second of one core",
        "test_tls",
        "",
        _tls(1.5),
    ),
)
