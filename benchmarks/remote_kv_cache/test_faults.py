"""Hand-overs while something fails: how long answers take beside each fault, and which phases it met.

Plays what `make faults` plays (tests/engine): in each hand-over an engine, the store, the proxy or a link is killed,
frozen, cut off or slowed down, or a request is aborted. The tests check that tokens are right, that waits are bounded
and that nothing is left; a round that is not so ends the run, and nothing is written. The time is that of the answer,
less the fault's own; of a request that is sent again, that of the second one. It includes the prompt that is computed
again.

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
# Of the blocks of a prompt that is handed over, and of an answer through the proxy.
PHASES: Final = ("before", "computing", "arriving", "there", "before a token", "in the stream", "afterwards")
MOST_WAITED_S: Final = UNPROMISED_S + 4.0 + 0.5  # by D in hand-overs: for a promise, for blocks, and the wait's own end
_QUICK_FAULTS: Final = 24


def play(faults: int, seed: int) -> list[dict[str, Any]]:
    """-> what each round wrote: its `way`, its `fault`, the `phase` that was met, and `waited_s`. Raises `RuntimeError`
    if a round was not as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rounds.jsonl"
        asked = {"KVSTORE_FAULTS": str(faults), "KVSTORE_FAULTS_FILE": str(file), "KVSTORE_FAULTS_SEED": str(seed)}
        command = [sys.executable, "-m", "pytest", "-s", "-q", *TESTS]
        if subprocess.run(command, cwd=ROOT, env=environment() | asked, check=False).returncode:
            raise RuntimeError("a round was not as it must be, or could not be played; what was seen is above")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def cases_of(rounds: Sequence[dict[str, Any]]) -> list[Case]:
    """A case for each way of handing over: the times by fault, and how often each fault met each phase."""
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
        help=f"hand-overs, and a tenth as many requests through the proxy (default: {FAULTS})",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="play these rounds again (default: new ones)")


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
