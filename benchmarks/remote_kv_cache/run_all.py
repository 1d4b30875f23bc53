"""Every benchmark, one after the other, each in a process of its own; results as JSON, one file a benchmark.

A full run takes about 70 minutes on two cores and 14 GB of memory, 20 of them for the benchmarks of real engines, which
need vLLM. The machine should do nothing else. Afterwards `python -m benchmarks.draw` makes the charts and fills the
tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.remote_kv_cache.processes import ROOT, environment

PACKAGE: Final = "benchmarks.remote_kv_cache"
BENCHMARKS: Final = (
    "baseline.test_memory_io",
    "baseline.test_zmq_transfer",
    "test_server",
    "test_small_blocks",
    "test_clients",
    "test_lookup",
    "test_key_hashing",
    "test_sharding",
    "test_swap",
)
ENGINE_BENCHMARKS: Final = ("test_transfer_out", "test_transfer_in", "test_long_prefill", "test_demo")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}.run_all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="of those without engines; default: their own")
    parser.add_argument("--quick", action="store_true", help="few small rounds: do they run, not how fast")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="default: benchmarks/results; --quick: none")
    parser.add_argument(
        "--only", nargs="+", choices=(*BENCHMARKS, *ENGINE_BENCHMARKS), metavar="NAME", help="some of them"
    )
    parser.add_argument(
        "--engines", action=argparse.BooleanOptionalAction, default=True, help="those that need vLLM, too"
    )
    options = parser.parse_args()
    folder: Path | None = options.json
    if folder is None and not options.quick:
        folder = ROOT / "benchmarks" / "results"
    names = options.only or (*BENCHMARKS, *(ENGINE_BENCHMARKS if options.engines else ()))
    progress = Console(stderr=True)
    failed = []
    for number, name in enumerate(names, 1):
        progress.rule(f"{number} of {len(names)}: {name}")
        command = [sys.executable, "-m", f"{PACKAGE}.{name}"]
        if options.rounds and name not in ENGINE_BENCHMARKS:
            command += ["--rounds", str(options.rounds)]
        if options.quick:
            command.append("--quick")
        if folder is not None:
            command += ["--json", str(folder.resolve() / f"{name.rpartition('.')[2]}.json")]
        if subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode:
            failed.append(name)
    if failed:
        progress.print(f"[red]failed: {', '.join(failed)}[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
