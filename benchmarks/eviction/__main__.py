"""Measures hit rates at several capacities for the server's eviction policies, textbook policies and the clairvoyant
optimum.

A trace is a file in Mooncake's format (--trace), a part of one (--parts), or synthetic (--synthetic). A reference to a
block is a hit if this block and every block before it in the request were present. Capacities are shares of a trace's
distinct blocks. The last table shows how far `default` is from the best of LRU, S3-FIFO and ARC on each trace. With
--live, the trace is also replayed against a real server, and both hit rates must agree within one percentage point.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.eviction.baselines import Arc, Optimum, S3Fifo, Sieve
from benchmarks.eviction.cost import BLOCKS, CHAIN, QUICK_BLOCKS, FullIndex
from benchmarks.eviction.live import AGREEMENT, LiveError, own_server, replay_live
from benchmarks.eviction.parts import parts_of
from benchmarks.eviction.simulator import POLICIES, Cache, ServerCache, replay
from benchmarks.eviction.synthetic import SYNTHETIC, make_trace
from benchmarks.eviction.tables import (
    ARC,
    COST_GROUP,
    LIVE_GROUP,
    OPTIMUM,
    S3FIFO,
    SIEVE,
    TEXTBOOK,
    TRACE_GROUP,
    console_table,
    cost_lines,
    distances_table,
    live_line,
)
from benchmarks.eviction.traces import Trace, read_trace
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.report import console
from benchmarks.results_reader import CaseResult
from kvstore_client import KVStoreError
from kvstore_serving.load.trace import TraceError

CAPACITIES = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0)
ROUNDS = 5
QUICK_REQUESTS = 2000
ALL = "all"
WHOLE = "whole"
BASELINES = (*TEXTBOOK, OPTIMUM)


def _percents(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected percentages and commas, such as 1,5,25") from None
    if not all(0 < value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: expected percentages above 0 and at most 100")
    return values


def _ways(text: str) -> list[int | None]:
    return [None if part == WHOLE else _count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only this benchmark has."""
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help=".jsonl or .jsonl.gz")
    names = f"{ALL}, {', '.join(SYNTHETIC)}"
    parser.add_argument(
        "--synthetic", choices=[ALL, *SYNTHETIC], action="append", default=[], metavar="NAME", help=names
    )
    parser.add_argument("--seed", type=_count, default=0, metavar="N", help="makes other traces of the same kinds")
    parser.add_argument("--parts", action="store_true", help="also use parts and mixtures of each --trace")
    parser.add_argument(
        "--calls",
        type=_ways,
        default=[None],
        metavar="N,…",
        help=f"how the server is called. {WHOLE}: all blocks of a request in each call, on one connection; "
        f"a number: as the vLLM connector does, in calls of this many blocks; default: {WHOLE}",
    )
    parser.add_argument(
        "--capacities",
        type=_percents,
        default=list(CAPACITIES),
        metavar="PERCENTS",
        help=f"in percent of a trace's distinct blocks; default: {','.join(f'{share:g}' for share in CAPACITIES)}",
    )
    parser.add_argument("--policy", choices=[*POLICIES, *BASELINES], action="append", help="default: all of them")
    parser.add_argument("--requests", type=_count, metavar="N", help="use only the first N requests of each trace")
    parser.add_argument("--million", action="store_true", help=f"time the policies in an index of {BLOCKS} blocks")
    parser.add_argument("--live", action="store_true", help="also replay against a server, new for each capacity")
    parser.add_argument("--endpoint", metavar="tcp://HOST:PORT", help="like --live, but with this running server")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw a chart of the hit rate by capacity")


def main() -> int:
    benchmark = Benchmark("benchmarks.eviction", __doc__ or "", ROUNDS, add_options, timed=False)
    options = benchmark.options
    if not (options.trace or options.synthetic or options.million):
        print("error: nothing to do: give --trace FILE, --synthetic NAME or --million", file=sys.stderr)
        return 2
    try:
        for trace in _traces(benchmark):
            _simulate(benchmark, trace)
            if options.live or options.endpoint:
                _replay_live(benchmark, trace)
    except (TraceError, LiveError, KVStoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if len(traced := _results(benchmark, TRACE_GROUP)) > 1 and (table := distances_table(traced)):
        console().print(table)
    if options.million:
        _time_policies(benchmark)
    if options.chart and (cases := _results(benchmark, TRACE_GROUP)):
        from benchmarks.eviction.charts import draw

        draw(options.chart, cases)
    benchmark.finish(capacities=options.capacities, chain=CHAIN)
    apart = [abs(case.parameters["live"] - case.parameters["simulated"]) for case in _results(benchmark, LIVE_GROUP)]
    return 1 if any(distance > AGREEMENT for distance in apart) else 0


def _traces(benchmark: Benchmark) -> Iterator[Trace]:
    options = benchmark.options
    requests = options.requests or (QUICK_REQUESTS if benchmark.quick else None)
    for path in options.trace:
        trace = read_trace(path).first(requests)
        yield trace
        if options.parts:
            yield from parts_of(trace, options.seed)
    for name in SYNTHETIC if ALL in options.synthetic else options.synthetic:
        yield make_trace(name, options.seed).first(requests)


def _capacity(trace: Trace, share: float) -> int:
    """Return a capacity in blocks."""
    return max(1, int(trace.distinct * share / 100))


def _simulate(benchmark: Benchmark, trace: Trace) -> None:
    options = benchmark.options
    names: list[str] = options.policy or [*POLICIES, *BASELINES]
    capacities: list[float] = options.capacities
    rates: dict[tuple[str, int | None], list[float]] = {
        (name, way): [] for way in options.calls for name in names if name in POLICIES
    }
    rates |= {(name, None): [] for name in names if name not in POLICIES}  # they always see whole requests
    with benchmark.steps(trace.name, len(rates) * len(capacities) * len(trace.chains)) as step:
        for (name, way), found in rates.items():
            for share in capacities:
                step(f"{trace.name}: {name} at {share:g} %", 0)
                found.append(_hit_rate(name, trace, _capacity(trace, share), way, lambda done: step(done=done)))
    for way in options.calls:
        mine = {name: rates[name, way if name in POLICIES else None] for name in names}
        benchmark.found(
            trace.name,
            group=TRACE_GROUP,
            call_blocks=way,
            requests=len(trace.chains),
            references=trace.references,
            distinct=trace.distinct,
            block_tokens=trace.block_tokens,
            capacities=capacities,
            blocks=[_capacity(trace, share) for share in capacities],
            hit_rate={name: [round(rate, 6) for rate in each] for name, each in mine.items()},
        )
        console().print(console_table(benchmark.cases[-1]))


def _hit_rate(name: str, trace: Trace, capacity: int, call_blocks: int | None, progress: Any) -> float:
    if name in POLICIES:
        with ServerCache.of(name, trace.keys, capacity, call_blocks) as server:
            return replay(trace, server, progress)
    caches: dict[str, Cache] = {
        S3FIFO: S3Fifo(capacity),
        ARC: Arc(capacity),
        SIEVE: Sieve(capacity),
        OPTIMUM: Optimum(trace, capacity),
    }
    return replay(trace, caches[name], progress)


def _replay_live(benchmark: Benchmark, trace: Trace) -> None:
    options = benchmark.options
    for way, share in itertools.product(options.calls, options.capacities):
        wanted = _capacity(trace, share)
        server = contextlib.nullcontext(options.endpoint) if options.endpoint else own_server(wanted)
        with benchmark.steps(f"{trace.name}: live at {share:g} %", len(trace.chains)) as step, server as endpoint:
            result = replay_live(trace, endpoint, wanted, way, lambda done: step(done=done))
        benchmark.found(
            f"{trace.name} at {share:g} %",
            group=LIVE_GROUP,
            policy=result.policy,
            call_blocks=way,
            blocks=result.capacity,
            block_bytes=result.block_bytes,
            live=round(result.live, 6),
            simulated=round(result.simulated, 6),
        )
        console().print(live_line(_results(benchmark, LIVE_GROUP)[-1]))


def _time_policies(benchmark: Benchmark) -> None:
    blocks = QUICK_BLOCKS if benchmark.quick else BLOCKS
    for policy in POLICIES:
        benchmark.measure(policy, FullIndex(policy, blocks).operations(), group=COST_GROUP, blocks=blocks)
    for line in cost_lines(benchmark.cases):
        console().print(line)


def _results(benchmark: Benchmark, group: str) -> list[CaseResult]:
    return [CaseResult(case.to_json()) for case in benchmark.cases if case.parameters["group"] == group]


if __name__ == "__main__":
    sys.exit(main())
