"""Runs the steps of `scripts/on_gpu.sh` one after the other. Each step has its own process, time limit and result.
After each step, run.json is written. It lists the steps that ran, with the outcome of each and the end of its output.

If a step fails or takes too long, its whole tree of processes is ended, and the other steps still run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final
from xml.etree import ElementTree

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.steps import STEPS, Step, why_not
from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache.copies import no_cuda
from benchmarks.remote_kv_cache.processes import ROOT
from benchmarks.remote_kv_cache.rig import commit, rig, versions

PASSED: Final = "passed"
SKIPPED: Final = "skipped"
FAILED: Final = "failed"
TIMED_OUT: Final = "timed out"
NOT_BEGUN: Final = "not begun"
_KEPT_LINES: Final = 400
_GRACE_S: Final = 10.0
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass
class Outcome:
    """How a step ended. `skipped`: the parts that it left out, and why. `output`: the end of its output."""

    name: str
    status: str
    seconds: float
    limit_s: float
    command: str
    skipped: dict[str, str] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)


def adopt_orphans() -> None:
    """Let this process become the parent of processes that a step leaves behind, so that it can find and end them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel did not make this process a subreaper")


def end_children() -> None:
    """End all processes that this process has started, directly or not: by SIGTERM first, then by force."""
    family = psutil.Process().children(recursive=True)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(each)
        _, family = psutil.wait_procs(family, timeout=_GRACE_S)


def run(step: Step, out: Path, small: bool, limit_s: float) -> Outcome:
    """Run a step, and print its output as it comes."""
    file = out / f"{step.name}.json"
    file.unlink(missing_ok=True)  # a result of an earlier run must not be taken for this run's
    command = step.command(file, small)
    outcome = Outcome(step.name, PASSED, 0.0, limit_s, " ".join(command).replace(sys.executable, "python"))
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip

        def pass_on() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())

        printing = threading.Thread(target=pass_on)
        printing.start()
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            end_children()
            printing.join()
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.output = list(lines)
    if step.is_tests:
        tests_to_json(step, file, outcome.command)
    outcome.skipped = _skipped(file)
    if status is None:
        outcome.status = TIMED_OUT
    elif status:
        outcome.status = FAILED
    elif step.is_tests and not json.loads(file.read_text())["counts"]["passed"]:
        outcome.status = SKIPPED
    return outcome


def tests_to_json(step: Step, file: Path, command: str) -> None:
    """Turn pytest's report, which is next to the file, into a result: how each test ended, and why."""
    report = file.with_suffix(".xml")
    tests: list[dict[str, Any]] = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            ended = {child.tag: child.get("message", "") for child in case}
            status = next((name for name in ("failure", "error", "skipped") if name in ended), "passed")
            tests.append(
                {
                    "test": f"{case.get('classname')}::{case.get('name')}",
                    "outcome": {"failure": "failed", "error": "failed"}.get(status, status),
                    "seconds": round(float(case.get("time", 0)), 3),
                    "why": ended.get(status, "")[:500],
                }
            )
        report.unlink()
    counts = {name: sum(test["outcome"] == name for test in tests) for name in ("passed", "failed", "skipped")}
    reasons = Counter(test["why"] for test in tests if test["outcome"] == "skipped")
    said = {
        f"{count} of {len(tests)} tests, reason {number}": why for number, (why, count) in enumerate(reasons.items(), 1)
    }
    _write(file, {**head(step.name), "command": command, "counts": counts, "skipped": said, "tests": tests})


def _skipped(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_text()).get("skipped", {}))
    except (OSError, ValueError):  # the step ended before it wrote anything
        return {}


def head(name: str) -> dict[str, Any]:
    """Return the fields with which every result begins."""
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "commit": commit(measured_by(name)),
        "rig": rig(),
        "versions": versions(),
    }


def _write(file: Path, result: dict[str, Any]) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    part.rename(file)


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table("step", "ended", title="on-gpu", title_justify="left")
    shown.add_column("seconds", justify="right")
    shown.add_column("left out, and why")
    for outcome in outcomes:
        left_out = "; ".join(f"{what}: {why}" for what, why in outcome.skipped.items())
        shown.add_row(outcome.name, outcome.status, f"{outcome.seconds:.0f}", left_out[:300])
    return shown


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="on_gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--wheels", metavar="FOLDER", help="for the script: packages that the interpreter may lack")
    parser.add_argument("--vllm", metavar="PIECE", help="for the script: a piece of vLLM")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="gets a result file for each step, and run.json")
    parser.add_argument("--only", action="append", choices=list(STEPS), metavar="NAME", help="this step; repeatable")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="time limit for all steps together")
    parser.add_argument("--quick", action="store_true", help="use small sizes, even with a device")
    parser.add_argument("--list", action="store_true", help="only list the steps")
    options = parser.parse_args(arguments)
    if options.out is not None:
        options.out = options.out.resolve()  # steps run in the checkout
    if options.out is None and not options.list:
        parser.error("--out FOLDER is missing; expected the folder for the results")
    if options.within is not None and options.within <= 0:
        parser.error(f"--within {options.within:g}: expected more than 0 seconds")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        shown = Table("step", "at most, s", "what it is")
        for step in STEPS.values():
            shown.add_row(step.name, f"{step.limit_s:.0f}", step.about)
        console.print(shown)
        return 0

    def asked_to_end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, asked_to_end)
    adopt_orphans()
    options.out.mkdir(parents=True, exist_ok=True)
    no_device = no_cuda()
    small = bool(no_device) or options.quick
    chosen = [step for step in STEPS.values() if not options.only or step.name in options.only]
    until = time.monotonic() + options.within if options.within else None
    what = {**head("run"), "cuda": no_device or "available", "small_sizes": small}
    console.print(f"on-gpu: {', '.join(step.name for step in chosen)}; CUDA: {what['cuda']}")
    outcomes: list[Outcome] = []

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        _write(options.out / "run.json", {**what, "steps": [asdict(each) for each in outcomes]})

    try:
        for step in chosen:
            console.rule(f"{step.name}: {step.about}")
            left = step.limit_s if until is None else min(step.limit_s, until - time.monotonic())
            if why := why_not(step, small):
                keep(Outcome(step.name, SKIPPED, 0.0, step.limit_s, "", {"all of it": why}))
            elif left < min(5.0, step.limit_s):
                keep(Outcome(step.name, NOT_BEGUN, 0.0, step.limit_s, "", {"all of it": "--within is over"}))
            else:
                keep(run(step, options.out, small, left))
    except KeyboardInterrupt:
        console.print("on-gpu: interrupted; the results of finished steps are kept")
        console.print(table(outcomes))
        return 130
    console.print(table(outcomes))
    bad = [outcome.name for outcome in outcomes if outcome.status not in (PASSED, SKIPPED)]
    console.print(f"on-gpu: {'not finished: ' + ', '.join(bad) if bad else 'green'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
