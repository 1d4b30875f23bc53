"""Every benchmark there is, one after the other, each in a process of its own; results as JSON, one file a benchmark.

The machine should do nothing else. What a run takes is said at its start, from the results of the runs before.
`--resume` leaves out what has not changed since it was measured, so that a run that was ended can go on.
Afterwards `python -m benchmarks.draw` makes the charts and fills the tables of docs/benchmarks.md.
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

from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache.processes import ROOT, environment
from benchmarks.remote_kv_cache.rig import changed_since

RESULTS: Final = ROOT / "benchmarks" / "results"
QUICK_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Entry:
    """A benchmark. `minutes`: its duration on two cores, used if no result has it. `trace`: whether it replays the
    trace that --trace names; a benchmark that needs a trace is left out if none is given. `variant`: tells entries of
    one module apart."""

    module: str
    minutes: float
    arguments: Sequence[str] = ()
    quick: Sequence[str] = ("--quick",)
    engine: bool = False
    trace: Literal["no", "may", "must"] = "no"
    variant: str = ""

    @property
    def name(self) -> str:
        """The name of its result file."""
        module = self.module.rpartition(".")[2]
        return f"{module}_{self.variant}" if self.variant else module


REMOTE: Final = "benchmarks.remote_kv_cache"
DISK: Final = "benchmarks.persistence_kv_cache"
PLANNING: Final = "benchmarks.planning"
LONG_PREFILL: Final = ("--scale", "1", "--rounds", "5", "--outputs", "2", "16", "128", "--first-token-rounds", "7")
SYNTHETIC: Final = ("--synthetic", "all")
BENCHMARKS: Final = (
    Entry(f"{REMOTE}.baseline.test_memory_io", 3),
    Entry(f"{REMOTE}.baseline.test_zmq_transfer", 4),
    Entry(f"{REMOTE}.test_server", 9),
    Entry(f"{REMOTE}.test_shared_memory", 6),
    Entry(f"{REMOTE}.test_small_blocks", 2),
    Entry(f"{REMOTE}.test_processor_time", 2),
    Entry(f"{REMOTE}.test_clients", 6),
    Entry(f"{REMOTE}.test_many_clients", 2),
    Entry(f"{REMOTE}.test_cores", 7),
    Entry(f"{REMOTE}.test_connections", 2),
    Entry(f"{REMOTE}.test_nixl", 1),
    Entry(f"{REMOTE}.test_logins", 3),
    Entry(f"{REMOTE}.test_block_macs", 2),
    Entry(f"{REMOTE}.test_tls", 2),
    Entry(f"{REMOTE}.test_beside_python", 2),
    Entry(f"{REMOTE}.test_lookup", 1),
    Entry(f"{REMOTE}.test_waiters", 1),
    Entry(f"{REMOTE}.test_key_hashing", 2),
    Entry(f"{REMOTE}.test_sharding", 3),
    Entry(f"{REMOTE}.test_swap", 5),
    Entry(f"{DISK}.test_disk_tier", 12, ("--million",)),
    Entry(f"{DISK}.test_placement", 10, ("--models", "Qwen2.5-7B")),
    Entry("benchmarks.eviction", 15, (*SYNTHETIC, "--million"), ("--synthetic", "agents", "--quick"), trace="may"),
    Entry("benchmarks.eviction.chains", 2),
    Entry("benchmarks.cluster_sim", 10, trace="must"),
    Entry("benchmarks.cluster_sim.batch_latency", 3),
    Entry(f"{REMOTE}.test_transfer_out", 27, ("--scale", "1", "--rounds", "3"), engine=True),
    Entry(f"{REMOTE}.test_transfer_in", 26, ("--scale", "1", "--rounds", "1"), engine=True),
    Entry(f"{REMOTE}.test_long_prefill", 27, LONG_PREFILL, engine=True),
    Entry(f"{REMOTE}.test_documents", 12, engine=True),
    Entry(f"{REMOTE}.test_slow_store", 10, engine=True),
    Entry(f"{REMOTE}.test_hooks", 3, engine=True),
    Entry(f"{REMOTE}.test_hand_over", 12, engine=True),
    Entry(f"{REMOTE}.test_request_time", 6, engine=True),
    Entry(f"{REMOTE}.test_request_time", 17, ("--model", "mid"), engine=True, variant="mid"),
    Entry(f"{REMOTE}.test_layer_parts", 14, engine=True),
    Entry(f"{REMOTE}.test_layer_parts", 8, ("--round-trip-ms", "20"), engine=True, variant="delayed"),
    Entry(f"{REMOTE}.test_proxy_links", 5, engine=True),
    Entry(f"{REMOTE}.test_proxy_capacity", 10),
    Entry(f"{REMOTE}.test_proxy_frozen", 6),
    Entry(f"{REMOTE}.test_apart", 16, engine=True),
    Entry(f"{REMOTE}.test_conversation", 16, engine=True, trace="must"),
    Entry(f"{REMOTE}.test_faults", 15, engine=True),
    Entry(f"{REMOTE}.test_load_generators", 6, engine=True),
    Entry(f"{REMOTE}.test_demo", 4, engine=True),
    Entry(f"{PLANNING}.test_simulator", 20),
    Entry(f"{PLANNING}.test_parallelism", 1),
    Entry(f"{PLANNING}.test_headline", 3),
    Entry(f"{PLANNING}.test_predicted", 25, engine=True),
    Entry(f"{PLANNING}.test_predicted_apart", 28, engine=True),
    Entry(f"{PLANNING}.test_interference", 16, engine=True),
    Entry("benchmarks.kv_pipeline.test_pipeline", 15),
    Entry("benchmarks.kv_pipeline.test_pushed", 8),
    Entry("benchmarks.kv_pipeline.test_tokens", 8),
)


def measured(entry: Entry, folder: Path | None) -> dict[str, Any]:
    """Its result, as read from its file; empty if there is none."""
    file = folder / f"{entry.name}.json" if folder is not None else None
    if file is None or not file.exists():
        return {}
    return dict(json.loads(file.read_text(encoding="utf-8")))


def is_current(entry: Entry, folder: Path | None) -> bool:
    """Whether its result is complete, and of what is measured as it is now."""
    result = measured(entry, folder)
    if not result or result["quick"] or not result.get("complete", True) or result["commit"] is None:
        return False
    return changed_since(result["commit"], measured_by(entry.module)) is False


def seconds_of(entry: Entry, folder: Path | None, quick: bool) -> float:
    """How long it will take, roughly, in seconds."""
    seconds = measured(entry, folder).get("seconds")
    return QUICK_SECONDS if quick else float(str(seconds)) if seconds is not None else entry.minutes * 60


def plan_table(entries: Sequence[Entry], folder: Path | None, quick: bool) -> Table:
    """The table of the benchmarks that will run, and how long each takes."""
    table = Table("benchmark", title="about so long", title_justify="left")
    table.add_column("minutes", justify="right")
    for entry in entries:
        table.add_row(entry.name, f"{seconds_of(entry, folder, quick) / 60:.1f}")
    total = sum(seconds_of(entry, folder, quick) for entry in entries)
    table.add_row("all", f"{total / 60:.0f}", style="bold")
    return table


def command_of(entry: Entry, options: argparse.Namespace, folder: Path | None) -> list[str]:
    """The command that starts a benchmark."""
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
    parser.add_argument("--rounds", type=int, metavar="N", help="of those without engines; default: their own")
    parser.add_argument("--quick", action="store_true", help="few small rounds: do they run, not how fast")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="default: benchmarks/results; --quick: none")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of them: {', '.join(names)}")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format, .jsonl or .jsonl.gz")
    parser.add_argument("--resume", action="store_true", help="leave out what has not changed since it was measured")
    parser.add_argument("--plan", action="store_true", help="say what would be run and how long it takes, and end")
    parser.add_argument(
        "--engines", action=argparse.BooleanOptionalAction, default=True, help="those that need vLLM, too"
    )
    options = parser.parse_args(arguments)
    folder: Path | None = options.json
    if folder is None and not options.quick:
        folder = RESULTS
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: there is no such file")
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
        progress.print(f"left out: {', '.join(lacking)}: needs --trace FILE")
    if options.plan:
        return 0
    failed = []
    for number, entry in enumerate(chosen, 1):
        progress.rule(f"{number} of {len(chosen)}: {entry.name}")
        if subprocess.run(command_of(entry, options, folder), cwd=ROOT, env=environment(), check=False).returncode:
            failed.append(entry.name)
    if failed:
        progress.print(f"[red]failed: {', '.join(failed)}; run them again with --only or --resume[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
