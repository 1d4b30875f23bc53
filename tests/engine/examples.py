"""Runs the examples that start `vllm serve`, unchanged, in processes forked from the engines' nursery.

Their servers are forked, too, as in `served`. A test can choose that the first of them start as for a user, without a
fork.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.engines import nursery
from tests.engine.served import SERVER, run_server
from tests.support.harness import ROOT, wait_until

RUN_S = 390.0


def run_example(name: str, *arguments: str, folder: Path, cold: int = 0, end_at: str = "") -> dict[str, Any]:
    """Run examples/NAME. Returns the JSON that it prints.

    cold: this many of its servers are started without a fork, as for a user
    end_at: send SIGTERM when this text is on standard error
    """
    out, err = folder / "stdout", folder / "stderr"
    process = nursery().Process(target=_run, args=(name, arguments, out, err, cold))
    process.start()
    if end_at:
        wait_until(
            lambda: not process.is_alive() or (err.exists() and end_at in err.read_text()),
            RUN_S,
            f"{name} says {end_at!r}",
        )
        process.terminate()
    process.join(RUN_S)
    if process.is_alive():
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            each.kill()
        pytest.fail(f"{name} takes longer than {RUN_S} s: {err.read_text()[-4000:]}")
    assert process.exitcode == 0, err.read_text()[-4000:] + out.read_text()
    return dict(json.loads(out.read_text()))


def _run(name: str, arguments: tuple[str, ...], out: Path, err: Path, cold: int) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    started = 0
    popen = subprocess.Popen

    def start(command: list[str], **how: Any) -> Any:
        nonlocal started
        if command[:3] != [sys.executable, "-m", SERVER] or (started := started + 1) <= cold:
            return popen(command, **how)
        return Forked(command[3:], Path(how["stdout"].name), how["env"])

    subprocess.Popen = start  # type: ignore[assignment, misc]
    script = ROOT / "examples" / name
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


class Forked:
    """A server forked from the process of an example. Its methods work like those of `subprocess.Popen` with the same
    names."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self._process: ForkProcess = get_context("fork").Process(target=run_server, args=(arguments, log, environment))
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(SERVER, timeout or 0.0)
        return self._process.exitcode
