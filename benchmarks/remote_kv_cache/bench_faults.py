"""Measures hand-overs while something fails: how long answers take with each fault, and in which phases of a request
the faults occurred.

Runs the tests of `make faults` (tests/engine). In each hand-over, an engine, the store, the proxy or a link is killed,
frozen, cut off or slowed down, or a request is aborted. The tests check that tokens are right, that waits are bounded
and that nothing is left behind. A round that fails a check ends the run, and nothing is written. The measured time is
that of the answer, without the duration of the fault itself. If a request is sent again, the time is that of the second
request, and includes computing the prompt again.

Needs vLLM; without it nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from benchmarks.remote_kv_cache.harness import Benchmark, missing_module
from benchmarks.remote_kv_cache.processes import ROOT, environment
from benchmarks.remote_kv_cache.report import Case, console, time_text
from kvstore_client.vllm.connector.hand_over import UNPROMISED_S

FAULTS: Final = 500
TESTS: Final = ("tests/engine/test_hand_over_faults.py", "tests/engine/test_proxy_faults.py")
# Limits on waiting for the blocks of a prompt that is handed over, and for an answer through the proxy.
PHASES: Final = ("before", "computing", "arriving", "there", "before a token", "in the stream", "afterwards")
MOST_WAITED_S: Final = UNPROMISED_S + 4.0 + 0.5  # D waits for a promise, for blocks, and until the wait ends
_QUICK_FAULTS: Final = 24


def play(faults: int, seed: int) -> list[dict[str, Any]]:
    """Run the rounds. Return the output of each: its `way`, its `fault`, the `phase` in which the fault occurred, and
    `waited_s`. Raises `RuntimeError` if a round failed a check."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rounds.jsonl"
        asked = {"KVSTORE_FAULTS": str(faults), "KVSTORE_FAULTS_FILE": str(file), "KVSTORE_FAULTS_SEED": str(seed)}
        command = [sys.executable, "-m", "pytest", "-s", "-q", *TESTS]
        if subprocess.run(command, cwd=ROOT, env=environment() | asked, check=False).returncode:
            raise RuntimeError("a round failed a check or could not be run; see the output above")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def cases_of(rounds: Sequence[dict[str, Any]]) -> list[Case]:
    """Return a case for each way to hand over, with the times by fault, and how often each fault occurred in each
    phase."""
    cases = []
    for way in dict.fromkeys(each["way"] for each in rounds):
        seconds: dict[str, list[float]] = {}
        met: dict[str, Counter[str]] = {}
        of_way = [each for each in rounds if each["way"] == way]
        for each in of_way:
            seconds.setdefault(each["fault"], []).append(each["waited_s"])
            met.setdefault(each["fault"], Counter())[each["phase"]] += 1
        cases.append(Case(way, dict(sorted(seconds.items())), parameters={"met": met}))
    return cases


def show(cases: Sequence[Case]) -> None:
    for case in cases:
        table = Table("fault", "times", "median", "longest", title=case.name, title_justify="left")
        for fault, seconds in case.seconds.items():
            table.add_row(fault, str(len(seconds)), time_text(float(np.median(seconds))), time_text(max(seconds)))
        console().print(table)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--faults",
        type=int,
        metavar="N",
        help=f"the number of hand-overs; a tenth as many requests go through the proxy (default: {FAULTS})",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="repeat the rounds of this seed (default: new rounds)")


def main() -> int:
    benchmark = Benchmark(__spec__.name, __doc__, rounds=1, add_options=_add_options, timed=False)
    if benchmark.lacks(missing_module("vllm")):
        return 0
    options = benchmark.options
    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    try:
        rounds = play(options.faults or (_QUICK_FAULTS if benchmark.quick else FAULTS), seed)
    except RuntimeError as error:
        benchmark.say(f"faults: {error}")
        return 1
    benchmark.cases += cases_of(rounds)
    show(benchmark.cases)
    benchmark.finish(faults=len(rounds), seed=seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
