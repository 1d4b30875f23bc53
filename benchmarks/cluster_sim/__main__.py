"""Simulates a cluster of 4 to 1000 nodes with the requests of a trace, and measures balance, moved keys, and the hit
rate around changes.

The trace is a file in Mooncake's format (--trace). The simulation uses the server's placement, block index and eviction
policy, but no sockets, and blocks have no content. A reference to a block is a hit if this block and every block before
it in the request were present. The cost of a change is the hit rate that is lost during one minute, or during five
minutes, compared with the same minutes without the change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.cluster_sim.balance import (
    PARTS,
    RUN_SHARDS,
    RUNS,
    TRACE_BLOCK_TOKENS,
    UNIFORM_KEYS,
    on_trace,
    placing_keys,
    uniform,
)
from benchmarks.cluster_sim.cluster import POLICY, Cluster
from benchmarks.cluster_sim.scenarios import (
    CRASH,
    GRACE_S,
    GRACES_S,
    JOIN,
    LEAVE,
    RESTART_FILLED,
    SCENARIOS,
    STEADY,
    Change,
    Outcome,
    drop,
    join,
    replay,
)
from benchmarks.cluster_sim.tables import (
    BALANCE_GROUP,
    GRACE_GROUP,
    LINES,
    MEMORY_GROUP,
    RUN_CRASH_GROUP,
    RUN_GROUP,
    SCENARIO_GROUP,
    console_tables,
)
from benchmarks.eviction.traces import Trace, read_trace
from benchmarks.remote_kv_cache.harness import Benchmark
from benchmarks.remote_kv_cache.report import console
from kvstore_serving.load.trace import TraceError

NODES = (4, 10, 100, 1000)
REPLICAS = (1, 2)
ZONES = 3
CAPACITY = 400.0
CAPACITIES = (50.0, 100.0, 200.0)
MANY = 256  # the sweeps leave out clusters of this many nodes or more
QUICK_REQUESTS = 1000


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1 and commas, such as 10,100")
    return [int(part) for part in parts]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only this benchmark has."""
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help=".jsonl or .jsonl.gz")
    parser.add_argument("--nodes", type=_numbers, default=list(NODES), help=f"default: {','.join(map(str, NODES))}")
    parser.add_argument("--replicas", type=_numbers, default=list(REPLICAS), help="default: 1,2")
    parser.add_argument("--zones", type=int, choices=range(1, 10), default=ZONES, help=f"default: {ZONES}")
    parser.add_argument(
        "--capacity",
        type=float,
        default=CAPACITY,
        metavar="PERCENT",
        help=f"memory of all nodes together, in percent of the trace's distinct blocks; default: {CAPACITY:g}",
    )
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append", help="default: all of them")
    parser.add_argument("--requests", type=int, metavar="N", help="use only the first N requests of the trace")


class Simulation:
    """One run of the program."""

    def __init__(self, benchmark: Benchmark, trace: Trace) -> None:
        self._benchmark, self._trace, self._options = benchmark, trace, benchmark.options
        self._at_s = trace.times_s[-1] / 2
        self._steady: dict[tuple[int, int, float, int], Outcome] = {}

    def balance(self) -> None:
        """Measure only the balance of placement, without caches."""
        keys = UNIFORM_KEYS // 10 if self._benchmark.quick else UNIFORM_KEYS
        for count in sorted({*self._options.nodes, *RUN_SHARDS}):
            found = uniform(count, keys)
            self._keep(f"{count} shards", group=BALANCE_GROUP, shards=count, keys=keys, **found._asdict())
        with self._benchmark.steps("runs", len(PARTS) * len(RUN_SHARDS) * len(RUNS)) as step:
            for parts in PARTS[:1] if self._benchmark.quick else PARTS:
                tokens = TRACE_BLOCK_TOKENS // parts
                for count in RUN_SHARDS:
                    for run in RUNS:
                        step(f"runs of {run} over {count} shards", 0)
                        found_on = on_trace(self._trace, count, run, parts)
                        self._keep(
                            f"{tokens} tokens, {count} shards, R {run}",
                            group=RUN_GROUP,
                            block_tokens=tokens,
                            shards=count,
                            run=run,
                            **found_on._asdict(),
                        )
                        step()

    def scenarios(self) -> None:
        """Run every scenario with every number of nodes and replicas."""
        names = self._options.scenario or list(SCENARIOS)
        for nodes in self._options.nodes:
            for replicas in self._options.replicas:
                for name in names:
                    self._scenario(SCENARIO_GROUP, name, nodes, replicas, self._options.capacity)

    def sweeps(self) -> None:
        """Run the sweeps over grace periods, small memories, and lengths of runs."""
        small = [nodes for nodes in self._options.nodes if nodes < MANY]
        for nodes in small:
            for grace_s in GRACES_S:
                lost, outcome = self._change(join(self._at_s, grace_s=grace_s), nodes, 1, self._options.capacity)
                self._keep(
                    f"{nodes} nodes, grace {grace_s:g} s",
                    group=GRACE_GROUP,
                    nodes=nodes,
                    grace_s=grace_s,
                    repaired=outcome.repaired,
                    **lost,
                )
        middle = small[len(small) // 2 :][:1]
        for nodes in middle:
            for replicas in self._options.replicas:
                for capacity in CAPACITIES:
                    for name in (STEADY, JOIN, LEAVE, CRASH, RESTART_FILLED):
                        self._scenario(MEMORY_GROUP, name, nodes, replicas, capacity)
            for run in RUNS:
                changes = SCENARIOS[CRASH].changes(self._at_s, nodes, self._options.zones)
                lost, _ = self._change(changes, nodes, 1, self._options.capacity, run=run)
                self._keep(f"{nodes} nodes, R {run}", group=RUN_CRASH_GROUP, nodes=nodes, run=run, **lost)

    def _scenario(self, group: str, name: str, nodes: int, replicas: int, capacity: float) -> None:
        scenario = SCENARIOS[name]
        changes = scenario.changes(self._at_s, nodes, self._options.zones)
        lost, outcome = self._change(changes, nodes, replicas, capacity, spares=scenario.spares)
        by_minute = {}
        if group == SCENARIO_GROUP and name in LINES:
            by_minute = {"hits": outcome.hits, "references": outcome.references}
        reads = [count for count in outcome.reads if count] or [0]
        self._keep(
            f"{nodes} nodes, {replicas} x, {capacity:g} %: {name}",
            group=group,
            scenario=name,
            nodes=nodes,
            replicas=replicas,
            capacity=capacity,
            hit_rate=round(outcome.hit_rate, 5),
            moved=[round(share, 5) for share in outcome.moved[:2]],
            changes=len(outcome.moved),
            repaired=outcome.repaired,
            copied=outcome.copied,
            reads_max_to_mean=round(max(reads) * len(outcome.reads) / max(1, sum(reads)), 3),
            by_minute=by_minute,
            **lost,
        )

    def _change(
        self, changes: list[Change], nodes: int, replicas: int, capacity: float, run: int = 1, spares: int = 0
    ) -> tuple[dict[str, float], Outcome]:
        """Run one scenario. Return its outcome, and its cost compared with the same cluster without the change."""
        where = (nodes, replicas, capacity, run)
        if where not in self._steady:
            self._steady[where] = self._replay([], *where, 0)
        outcome = self._replay(changes, *where, spares) if changes else self._steady[where]
        lost = drop(outcome, self._steady[where], self._at_s)
        return {"drop_minute": round(lost.minute, 5), "drop_five_minutes": round(lost.five_minutes, 5)}, outcome

    def _replay(
        self, changes: list[Change], nodes: int, replicas: int, capacity: float, run: int, spares: int
    ) -> Outcome:
        trace = self._trace
        room = max(1, int(trace.distinct * capacity / 100 / nodes))
        placing = placing_keys(trace, run) if run > 1 else None
        cluster = Cluster(trace.keys, nodes, self._options.zones, replicas, room, placing, spares)
        with self._benchmark.steps(f"{nodes} nodes, {replicas} x, {capacity:g} %", len(trace.chains)) as step:
            return replay(trace, cluster, changes, lambda done: step(done=done))

    def _keep(self, name: str, **parameters: Any) -> None:
        self._benchmark.found(name, **parameters)
        self._benchmark.say(f"{name}: {_short(parameters)}")


def _short(parameters: dict[str, Any]) -> str:
    kept = {name: value for name, value in parameters.items() if isinstance(value, float)}
    return ", ".join(f"{name} {value:.4g}" for name, value in kept.items())


def main() -> int:
    benchmark = Benchmark("benchmarks.cluster_sim", __doc__ or "", 1, add_options, timed=False)
    try:
        trace = read_trace(benchmark.options.trace)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    trace = trace.first(benchmark.options.requests or (QUICK_REQUESTS if benchmark.quick else None))
    simulation = Simulation(benchmark, trace)
    simulation.balance()
    simulation.scenarios()
    if not benchmark.options.scenario:
        simulation.sweeps()
    for table in console_tables(benchmark.cases):
        console().print(table)
    benchmark.finish(
        trace=trace.name,
        requests=len(trace.chains),
        references=trace.references,
        distinct=trace.distinct,
        zones=benchmark.options.zones,
        policy=POLICY,
        changed_at_s=trace.times_s[-1] / 2,
        grace_s=GRACE_S,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
