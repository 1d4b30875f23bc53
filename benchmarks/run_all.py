"""Runs all benchmarks one after another. Each has its own process and its own JSON file of results.

The machine should do nothing else. A run first prints how long it will take, according to the results of earlier runs.
`--resume` leaves out benchmarks whose code has not changed since they were measured, so that an interrupted run can be
continued. Afterwards, `python -m benchmarks.draw` makes the charts and fills the tables of docs/benchmarks.md and its
appendix.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.code_changes import changed_since
from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache.processes import ROOT, environment

RESULTS: Final = ROOT / "benchmarks" / "results"
QUICK_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Entry:
    """A benchmark of the run. `minutes`: its duration on two cores, which is used if there is no earlier result.
    `trace`: whether it may or must replay the trace of --trace; one that must is left out without this option.
    `variant`: a name that distinguishes entries of the same module."""

    module: str
    minutes: float
    arguments: Sequence[str] = ()
    quick: Sequence[str] = ("--quick",)
    engine: bool = False
    trace: Literal["no", "may", "must"] = "no"
    variant: str = ""

    @property
    def name(self) -> str:
        """The name of the benchmark's result file."""
        module = self.module.rpartition(".")[2]
        return f"{module}_{self.variant}" if self.variant else module


REMOTE: Final = "benchmarks.remote_kv_cache"
DISK: Final = "benchmarks.persistence_kv_cache"
PLANNING: Final = "benchmarks.planning"
LONG_PREFILL: Final = ("--scale", "1", "--rounds", "5", "--outputs", "2", "16", "128", "--first-token-rounds", "7")
SYNTHETIC: Final = ("--synthetic", "all")
BENCHMARKS: Final = (
    Entry(f"{REMOTE}.baseline.bench_memory_io", 3),
    Entry(f"{REMOTE}.baseline.bench_zmq_transfer", 4),
    Entry(f"{REMOTE}.bench_server", 9),
    Entry(f"{REMOTE}.bench_shared_memory", 6),
    Entry(f"{REMOTE}.bench_small_blocks", 2),
    Entry(f"{REMOTE}.bench_processor_time", 2),
    Entry(f"{REMOTE}.bench_clients", 6),
    Entry(f"{REMOTE}.bench_many_clients", 2),
    Entry(f"{REMOTE}.bench_cores", 7),
    Entry(f"{REMOTE}.bench_connections", 2),
    Entry(f"{REMOTE}.bench_nixl", 1),
    Entry(f"{REMOTE}.bench_logins", 3),
    Entry(f"{REMOTE}.bench_block_macs", 2),
    Entry(f"{REMOTE}.bench_tls", 2),
    Entry(f"{REMOTE}.bench_beside_python", 2),
    Entry(f"{REMOTE}.bench_lookup", 1),
    Entry(f"{REMOTE}.bench_waiters", 1),
    Entry(f"{REMOTE}.bench_key_hashing", 2),
    Entry(f"{REMOTE}.bench_sharding", 3),
    Entry(f"{REMOTE}.bench_swap", 5),
    Entry(f"{DISK}.bench_disk_tier", 12, ("--million",)),
    Entry(f"{DISK}.bench_placement", 10, ("--models", "Qwen2.5-7B")),
    Entry("benchmarks.eviction", 15, (*SYNTHETIC, "--million"), ("--synthetic", "agents", "--quick"), trace="may"),
    Entry("benchmarks.eviction.chains", 2),
    Entry("benchmarks.cluster_sim", 10, trace="must"),
    Entry("benchmarks.cluster_sim.batch_latency", 3),
    Entry(f"{REMOTE}.bench_transfer_out", 27, ("--scale", "1", "--rounds", "3"), engine=True),
    Entry(f"{REMOTE}.bench_transfer_in", 26, ("--scale", "1", "--rounds", "1"), engine=True),
    Entry(f"{REMOTE}.bench_long_prefill", 27, LONG_PREFILL, engine=True),
    Entry(f"{REMOTE}.bench_documents", 12, engine=True),
    Entry(f"{REMOTE}.bench_slow_store", 10, engine=True),
    Entry(f"{REMOTE}.bench_hooks", 3, engine=True),
    Entry(f"{REMOTE}.bench_hand_over", 12, engine=True),
    Entry(f"{REMOTE}.bench_request_time", 6, engine=True),
    Entry(f"{REMOTE}.bench_request_time", 17, ("--model", "mid"), engine=True, variant="mid"),
    Entry(f"{REMOTE}.bench_layer_parts", 14, engine=True),
    Entry(f"{REMOTE}.bench_layer_parts", 8, ("--round-trip-ms", "20"), engine=True, variant="delayed"),
    Entry(f"{REMOTE}.bench_layer_loads", 14, engine=True),
    Entry(f"{REMOTE}.bench_proxy_links", 5, engine=True),
    Entry(f"{REMOTE}.bench_proxy_capacity", 10),
    Entry(f"{REMOTE}.bench_proxy_frozen", 6),
    Entry(f"{REMOTE}.bench_apart", 16, engine=True),
    Entry(f"{REMOTE}.bench_conversation", 16, engine=True, trace="must"),
    Entry(f"{REMOTE}.bench_faults", 15, engine=True),
    Entry(f"{REMOTE}.bench_load_generators", 6, engine=True),
    Entry(f"{REMOTE}.bench_demo", 4, engine=True),
    Entry(f"{PLANNING}.bench_simulator", 20),
    Entry(f"{PLANNING}.bench_parallelism", 1),
    Entry(f"{PLANNING}.bench_headline", 3),
    Entry(f"{PLANNING}.bench_predicted", 25, engine=True),
    Entry(f"{PLANNING}.bench_predicted_apart", 28, engine=True),
    Entry(f"{PLANNING}.bench_interference", 16, engine=True),
    Entry("benchmarks.kv_pipeline.bench_pipeline", 15),
    Entry("benchmarks.kv_pipeline.bench_pushed", 8),
    Entry("benchmarks.kv_pipeline.bench_tokens", 8),
)


def measured(entry: Entry, folder: Path | None) -> dict[str, Any]:
    """Return the benchmark's result from its file, or an empty result if there is no file."""
    file = folder / f"{entry.name}.json" if folder is not None else None
    if file is None or not file.exists():
        return {}
    return dict(json.loads(file.read_text(encoding="utf-8")))


def is_current(entry: Entry, folder: Path | None) -> bool:
    """Return whether the benchmark's result is complete and not stale."""
    result = measured(entry, folder)
    if not result or result["quick"] or not result.get("complete", True) or result["commit"] is None:
        return False
    return changed_since(result["commit"], measured_by(entry.module)) is False


def seconds_of(entry: Entry, folder: Path | None, quick: bool) -> float:
    """Return the approximate number of seconds that the benchmark will take."""
    seconds = measured(entry, folder).get("seconds")
    return QUICK_SECONDS if quick else float(str(seconds)) if seconds is not None else entry.minutes * 60


def plan_table(entries: Sequence[Entry], folder: Path | None, quick: bool) -> Table:
    """Return a table of the benchmarks that will run, with the duration of each."""
    table = Table("benchmark", title="approximate durations", title_justify="left")
    table.add_column("minutes", justify="right")
    for entry in entries:
        table.add_row(entry.name, f"{seconds_of(entry, folder, quick) / 60:.1f}")
    total = sum(seconds_of(entry, folder, quick) for entry in entries)
    table.add_row("all", f"{total / 60:.0f}", style="bold")
    return table


def command_of(entry: Entry, options: argparse.Namespace, folder: Path | None) -> list[str]:
    """Return the command that starts a benchmark."""
    command = [sys.executable, "-m", entry.module, *(entry.quick if options.quick else entry.arguments)]
    if options.rounds and not entry.engine:
        command += ["--rounds", str(options.rounds)]
    if entry.trace != "no" and options.trace is not None:
        command += ["--trace", str(options.trace.resolve())]
    if folder is not None:
        command += ["--json", str(folder.resolve() / f"{entry.name}.json")]
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run_all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [entry.name for entry in BENCHMARKS]
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds without engines; default: their own")
    parser.add_argument("--quick", action="store_true", help="a few small rounds, only to test that they run")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="default: benchmarks/results; --quick: none")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format, .jsonl or .jsonl.gz")
    parser.add_argument("--resume", action="store_true", help="leave out benchmarks whose code has not changed since")
    parser.add_argument("--plan", action="store_true", help="only print what would be run, and how long it takes")
    parser.add_argument(
        "--engines", action=argparse.BooleanOptionalAction, default=True, help="also run the benchmarks that need vLLM"
    )
    options = parser.parse_args(arguments)
    folder: Path | None = options.json
    if folder is None and not options.quick:
        folder = RESULTS
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: the file does not exist")
    chosen = [
        entry
        for entry in BENCHMARKS
        if (entry.name in options.only if options.only else options.engines or not entry.engine)
        and not (options.resume and is_current(entry, folder))
    ]
    lacking = [entry.name for entry in chosen if entry.trace == "must" and options.trace is None]
    chosen = [entry for entry in chosen if entry.name not in lacking]
    progress = Console(stderr=True)
    progress.print(plan_table(chosen, folder, options.quick))
    if lacking:
        progress.print(f"left out: {', '.join(lacking)}: give --trace FILE to run them")
    if options.plan:
        return 0
    failed = []
    for number, entry in enumerate(chosen, 1):
        progress.rule(f"{number} of {len(chosen)}: {entry.name}")
        if subprocess.run(command_of(entry, options, folder), cwd=ROOT, env=environment(), check=False).returncode:
            failed.append(entry.name)
    if failed:
        progress.print(f"[red]failed: {', '.join(failed)}; repeat them with --only or --resume[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
