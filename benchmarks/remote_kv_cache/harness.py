"""The common parts of all benchmarks here: rounds, options and results.

Operations are measured in rounds: a round runs each of them once, in an order that is shuffled for every round (from a
fixed seed). So neither a drift of the machine's speed nor effects of the previous operation favour one of them. The
first round is not counted. It runs in the given order, so an operation that reads must come after the one that writes.
`before` and `after` of an operation are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache.report import Case, case_table, console, matrix_table
from benchmarks.remote_kv_cache.rig import busy_share, commit, load_average, rig, versions
from benchmarks.remote_kv_cache.shapes import FULL, HEADLINE, MODELS, QUICK, Batch, Model

DEFAULT_ROUNDS: Final = 11
QUICK_ROUNDS: Final = 2


def nothing() -> None:
    """The default of `before` and `after`: does nothing."""


def _no_options(_: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Operation:
    """An operation that is timed. `run` returns the seconds if it measures them itself, otherwise None. `limit`: the
    name of the operation that is its physical limit. `after` raises an error if the moved bytes are wrong."""

    name: str
    run: Callable[[], float | None]
    moved: int = 0
    limit: str = ""
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


class Benchmark:
    """One run of a benchmark: its options, its cases, and the file to which results are written."""

    def __init__(
        self,
        name: str,
        document: str,
        rounds: int = DEFAULT_ROUNDS,
        add_options: Callable[[argparse.ArgumentParser], object] = _no_options,
        *,
        timed: bool = True,
    ) -> None:
        """timed: whether the results are times. If so, it waits a while until the machine is idle, and records how busy
        the machine is."""
        parser = argparse.ArgumentParser(
            prog=f"python -m {name}",
            description=document,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--rounds", type=_positive, metavar="N", help=f"default: {rounds}; --quick: {QUICK_ROUNDS}")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
        parser.add_argument("--quick", action="store_true", help="a few small rounds, only to test that it runs")
        add_options(parser)
        self.options = parser.parse_args()
        self.quick: bool = self.options.quick
        self.rounds: int = self.options.rounds or (QUICK_ROUNDS if self.quick else rounds)
        self.batch: Batch = QUICK if self.quick else FULL
        self.name = name
        self.cases: list[Case] = []
        self.skipped: dict[str, str] = {}  # the parts that this machine cannot run -> the reason
        self._load = load_average()
        self._timed = timed
        self._busy = busy_share() if timed and not self.quick else None
        self._began = time.monotonic()
        self._stderr = Console(stderr=True)

    def measure(
        self,
        case: str,
        operations: Sequence[Operation],
        references: Sequence[str] = (),
        unavailable: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> Case:
        """Run the rounds, print their table, keep the case."""
        seconds: dict[str, list[float]] = {operation.name: [] for operation in operations}
        with self.steps(case, (self.rounds + 1) * len(operations)) as step:
            for number in range(self.rounds + 1):
                order = list(operations)
                if number:
                    random.Random(number).shuffle(order)
                for operation in order:
                    step(f"{case}: {operation.name}", 0)
                    elapsed = _timed(operation)
                    if number:
                        seconds[operation.name].append(elapsed)
                    step()
        result = Case(
            name=case,
            seconds=seconds,
            moved={operation.name: operation.moved for operation in operations},
            limits={operation.name: operation.limit for operation in operations if operation.limit},
            references=references,
            unavailable=unavailable or {},
            parameters=parameters,
        )
        self.keep(result)
        return result

    def add(
        self,
        name: str,
        seconds: Mapping[str, Sequence[float]],
        *,
        moved: Mapping[str, int] | None = None,
        limits: Mapping[str, str] | None = None,
        references: Sequence[str] = (),
        **parameters: Any,
    ) -> None:
        """Add a case whose times the benchmark itself has measured: see `Case`. Prints no table."""
        self.cases.append(Case(name, seconds, moved or {}, limits or {}, references, parameters=parameters))

    def found(self, name: str, /, **parameters: Any) -> None:
        """Add a case without times, whose parameters are the findings."""
        self.cases.append(Case(name, parameters=parameters))

    def keep(self, case: Case) -> None:
        """Add a measured case, or replace an earlier state of it. Print its table, and write all results so far,
        because the run may be interrupted."""
        self.cases = [*(each for each in self.cases if each.name != case.name), case]
        console().print(case_table(case))
        self._write(complete=False)

    def skip(self, what: str, why: str) -> None:
        """Record that something is not measured here, and why. This is part of the result."""
        self.skipped[what] = why
        self.say(f"skipped: {what}: {why}")

    def lacks(self, *missing: str) -> bool:
        """Return whether the benchmark cannot run here, and print why. missing: for each requirement, why it is not
        met; empty if it is."""
        why = next(filter(None, missing), "")
        if why:
            self.say(f"nothing is measured: {why}")
        return bool(why)

    @contextlib.contextmanager
    def steps(self, doing: str, total: int) -> Iterator[Callable[..., None]]:
        """Show a progress bar while the body runs. Yield `step(doing, done)`, which reports the steps done (by default
        one) and the current activity. The bar is drawn only by `step`, because a separate thread would use part of the
        two cores."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._stderr, transient=True, auto_refresh=False) as bar:
            task = bar.add_task(doing, total=total)
            bar.refresh()

            def step(doing: str | None = None, done: int = 1) -> None:
                bar.update(task, description=doing, advance=done, refresh=True)

            yield step

    def matrix(self, title: str, reference: str = "") -> None:
        """Print all cases side by side, as multiples of one operation, or of each operation's own limit."""
        console().print(matrix_table(title, self.cases, reference))

    def say(self, text: str) -> None:
        """Print a line that is not part of the result."""
        self._stderr.print(text)

    def finish(self, **parameters: Any) -> None:
        """Write the JSON file, if one was requested."""
        self._write(complete=True, **parameters)

    def _write(self, *, complete: bool, **parameters: Any) -> None:
        """Write the results. complete: whether the run has ended."""
        if self.options.json is None:
            return
        result = {
            "benchmark": self.name.rpartition(".")[2],
            "command": self._command(),
            "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
            "commit": commit(measured_by(self.name)),
            "seconds": round(time.monotonic() - self._began, 1),
            "quick": self.quick,
            "complete": complete,
            "rounds": self.rounds,
            "rig": rig(),
            "timed": self._timed,
            "load": {"average_before": self._load, "average_after": load_average(), "busy_before": self._busy},
            "versions": versions(),
            "parameters": parameters,
            "skipped": self.skipped,
            "cases": [case.to_json() for case in self.cases],
        }
        self.options.json.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.options.json.with_name(f".{self.options.json.name}.part")
        scratch.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        scratch.rename(self.options.json)

    def _command(self) -> str:
        """Return the command that repeats this run, without the path of the JSON file."""
        words = iter(sys.argv[1:])
        kept = []
        for word in words:
            if word == "--json":
                next(words, None)
            elif not word.startswith("--json="):
                kept.append(word)
        return " ".join(["python", "-m", self.name, *kept])


def _timed(operation: Operation) -> float:
    operation.before()
    gc.collect()
    begin = time.perf_counter()
    own = operation.run()
    elapsed = time.perf_counter() - begin
    operation.after()
    return elapsed if own is None else own


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add `--model`: one of the five models, or all."""
    parser.add_argument("--model", choices=["all", *MODELS], default="all", help=f"headline: {HEADLINE.name}")


def chosen_models(options: argparse.Namespace) -> list[Model]:
    """Return the models that `--model` selects."""
    return list(MODELS.values()) if options.model == "all" else [MODELS[options.model]]


def missing_module(module: str) -> str:
    """Return why an optional package cannot be used; empty if it can."""
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


def missing_cores(count: int = 2) -> str:
    """Return why this process has fewer than `count` cores; empty if it has enough."""
    return "" if len(os.sched_getaffinity(0)) >= count else f"{count} cores are needed"
