"""A client that can cause one log line can cause a million, so the lines of each kind are bounded. A reader that does
not read them delays nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.logs import _BURST
from tests.support.harness import environment

PROGRAM = """
import logging, time
from kvstore import logs
logs._BURST_S = 0.5
logs.configure("info", "here")
log = logging.getLogger("kvstore")
for number in range(1000):
    log.info("a line, number %d", number)
    log.info("another line") if number % 500 == 0 else None
time.sleep(0.6)
log.info("a line, number %d", 1000)
"""


def test_lines_of_each_kind_are_bounded_and_omitted_ones_are_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stderr.splitlines()
    assert sum("a line, number" in line for line in lines) == _BURST + 1
    assert sum("another line" in line for line in lines) == 2, "other lines are not affected"
    assert lines[-1].endswith(f"a line, number 1000 ({1000 - _BURST} more lines of this kind were left out)")


@pytest.mark.parametrize(("form", "first"), [("text", "20"), ("json", "{")])
def test_lines_have_priorities_only_where_standard_error_is_the_journal(tmp_path: Path, form: str, first: str) -> None:
    program = (
        "import logging; from kvstore import logs\n"
        f"logs.configure('info', 'here', '{form}')\n"
        "logging.info('one'); logging.warning('two\\nlines'); logging.error('three'); logging.critical('four')\n"
    )
    for named, prefixes in ((True, ["<6>", "<4>", "<3>", "<2>"]), (False, ["", "", "", ""])):
        with (tmp_path / f"log-{named}").open("w+") as log:
            status = os.fstat(log.fileno())
            stream = f"{status.st_dev}:{status.st_ino + (not named)}"
            command = [sys.executable, "-c", program]
            subprocess.run(command, env=environment(JOURNAL_STREAM=stream), stderr=log, timeout=60, check=True)
            log.seek(0)
            lines = log.read().splitlines()
            if form == "text":
                assert lines.pop(2) == f"{prefixes[1]}lines"
        assert [line[: len(prefix)] for line, prefix in zip(lines, prefixes, strict=True)] == prefixes
        assert all(line[len(prefix) :].startswith(first) for line, prefix in zip(lines, prefixes, strict=True)), lines


UNREAD = """
import logging, sys, time
from kvstore import logs
logs.configure("debug", "here", "json")
log = logging.getLogger("kvstore")
began = time.monotonic()
for number in range(2000):
    log.debug("a line %s", "x" * 200)
log.debug("a long line %s", "x" * 100_000)
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
log.debug("the end")
"""


@pytest.mark.parametrize("kind", ["pipe", "pipe of another user", "socket"])
def test_an_unread_standard_error_does_not_block_the_server(kind: str) -> None:
    if kind == "socket":
        near, far = socket.socketpair()
        reader, writer = near.detach(), far.detach()
    else:
        reader, writer = os.pipe()
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 16)
    program = UNREAD
    if kind == "pipe of another user":  # this pipe cannot be opened again
        program = (
            "import os; real = os.open\n"
            + (
                "def refuse(path, *more, **named):\n"
                "    if str(path).startswith('/proc/self/fd/'): raise PermissionError(path)\n"
                "    return real(path, *more, **named)\n"
                "os.open = refuse\n"
            )
            + UNREAD
        )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), stderr=writer, text=True, **pipes) as process:  # type: ignore[call-overload]
        os.close(writer)
        try:
            assert float(process.stdout.readline()) < 2.0, "it waited"
            os.set_blocking(reader, False)
            read = b""
            with contextlib.suppress(BlockingIOError):
                while True:
                    read += os.read(reader, 1 << 20)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(10) == 0
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(reader, 1 << 20):
                    read += piece
        finally:
            process.kill()
            os.close(reader)
    lines = read.decode().splitlines()
    messages = [json.loads(line)["message"] for line in lines if line.endswith("}")]
    assert messages[-1] == "the end"
    assert messages[-2].endswith("lines were left out here: standard error was not read")
    written = sum(message.startswith("a line") for message in messages)
    left_out = int(messages[-2].split()[0])
    assert written > 50 and 2000 <= written + left_out <= 2001
