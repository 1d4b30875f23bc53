"""Processes that are forked from a nursery behave like processes that are started normally."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kvstore_client import KVStoreClient
from tests.support import forked
from tests.support.harness import StartServer, make_namespace, wait_until

REFUSED = ("--memory", "1")  # a server that cannot start


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("kvstore_cli", ("--help",)), ("kvstore_cli", ("ping", "--nope")), ("kvstore", ("--port", "0", *REFUSED))],
)
def test_a_forked_command_prints_what_a_started_one_prints(module: str, arguments: tuple[str, ...]) -> None:
    variables = forked.environment(COLUMNS="70")
    done = forked.run(module, *arguments, env=variables)
    started = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (started.returncode, started.stdout, started.stderr)


def test_a_forked_command_that_cannot_write_ends_like_a_started_one() -> None:
    """The output is still in a buffer when the command ends, and cannot be written."""
    variables, arguments = forked.environment(), ["--version"]
    with open("/dev/full", "wb") as full, open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as said:
        process = forked.start("kvstore", arguments, stdin=nothing, stdout=full, stderr=said, env=variables)
        status = process.wait(60)
        said.seek(0)
        command = [sys.executable, "-m", "kvstore", *arguments]
        started = subprocess.run(command, env=variables, stdout=full, stderr=subprocess.PIPE, check=False)
        assert status == started.returncode != 0
        assert said.read().splitlines()[-1] == started.stderr.splitlines()[-1]


def test_a_forked_process_can_be_waited_for_and_killed() -> None:
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as said:
        arguments = ["--port", "0", "--memory", "64MiB"]
        process = forked.start("kvstore", arguments, stdin=nothing, stdout=said, stderr=said, env=forked.environment())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        process.kill()
        assert process.wait(20) == process.poll() == -signal.SIGKILL
        process.kill()  # it has ended already, so nothing happens


def described(process: psutil.Process) -> dict[str, object]:
    """Return the state of a process after its start: its descriptors, signal handling, threads and folder."""
    proc = Path("/proc", str(process.pid))
    links = []
    for each in (proc / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links += [os.readlink(each)] if int(each.name) > 2 else []
    files = sorted(
        re.sub(r"[0-9]+", "N", link) for link in links if "pidfd" not in link
    )  # the nursery waits for forks with this descriptor
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    signals = {name: int(status[name], 16) & 0x7FFF_FFFF for name in ("SigBlk", "SigIgn", "SigCgt")}  # not glibc's own
    return {"files": files, "cwd": process.cwd(), "threads": status["Threads"], **signals}


def test_forked_shards_and_keepers_are_like_started_ones(start_server: StartServer, tmp_path: Path) -> None:
    servers, processes = [], []
    for number, variables in enumerate(({}, {"PYTHONHASHSEED": "0"})):  # with that variable nothing is forked
        disk = ("--disk", str(tmp_path / f"disk-{number}"), "--disk-size", "64MiB")
        server = start_server("--shards", "2", *disk, **variables)
        with KVStoreClient(server.endpoint, make_namespace(4096, "forked")) as client:
            wait_until(lambda client=client: {each.disk.state for each in client.info().shards} == {"on"})
        shards = server.shards()
        keepers = [shard.children()[0] for shard in shards]
        is_forked = [each.cmdline() == psutil.Process(server.process.pid).cmdline() for each in (*shards, *keepers)]
        assert is_forked == [not number] * 4 or any(name.startswith("COVERAGE_") for name in os.environ)
        servers.append(server)
        processes.append([*shards, *keepers])
    for forked_one, started_one in zip(*processes, strict=True):
        # The server closes a client's connection a little after the client does.
        with contextlib.suppress(AssertionError):
            wait_until(lambda pair=(forked_one, started_one): described(pair[0]) == described(pair[1]))
        assert described(forked_one) == described(started_one)
    for server in servers:
        server.shards()[0].kill()
        wait_until(lambda server=server: "is serving again" in server.log_text(), what="another shard serves")
        assert "died: signal 9" in server.log_text()
        assert server.stop() == 0


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "COVERAGE_PROCESS_START"])
def test_programs_with_start_only_variables_are_never_forked(name: str) -> None:
    measured = any(name.startswith("COVERAGE_") for name in os.environ)  # under `make coverage` nothing is forked
    assert forked.forkable(forked.environment(KVSTORE_SERVER_PORT="1")) is not measured
    assert not forked.forkable(forked.environment(**{name: "/somewhere"}))
