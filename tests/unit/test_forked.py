"""Processes that tests fork from a nursery are like those that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.support import forked

REFUSED = ("--memory", "1")  # a server that cannot start


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("kvstore_cli", ("--help",)), ("kvstore_cli", ("ping", "--nope")), ("kvstore", ("--port", "0", *REFUSED))],
)
def test_a_forked_command_says_what_a_started_one_says(module: str, arguments: tuple[str, ...]) -> None:
    variables = forked.environment(COLUMNS="70")
    done = forked.run(module, *arguments, env=variables)
    started = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (started.returncode, started.stdout, started.stderr)


def test_a_forked_process_can_be_waited_for_and_killed() -> None:
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as said:
        arguments = ["--port", "0", "--memory", "64MiB"]
        process = forked.start("kvstore", arguments, stdin=nothing, stdout=said, stderr=said, env=forked.environment())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        process.kill()
        assert process.wait(20) == process.poll() == -signal.SIGKILL
        process.kill()  # it is over: nothing happens


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "COVERAGE_PROCESS_START"])
def test_what_only_a_start_reads_is_never_forked(name: str) -> None:
    measured = any(name.startswith("COVERAGE_") for name in os.environ)  # `make coverage`: then nothing is forked
    assert forked.forkable(forked.environment(KVSTORE_SERVER_PORT="1")) is not measured
    assert not forked.forkable(forked.environment(**{name: "/somewhere"}))
