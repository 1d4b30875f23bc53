"""Log lines: whoever can cause a line can cause a million, so lines of a kind are bounded."""

from __future__ import annotations

import os
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


def test_lines_of_a_kind_are_bounded_and_those_left_out_are_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stderr.splitlines()
    assert sum("a line, number" in line for line in lines) == _BURST + 1
    assert sum("another line" in line for line in lines) == 2, "other lines are not affected"
    assert lines[-1].endswith(f"a line, number 1000 ({1000 - _BURST} more lines of this kind were left out)")


@pytest.mark.parametrize(("form", "first"), [("text", "20"), ("json", "{")])
def test_lines_have_their_priority_where_standard_error_is_the_journal_and_only_there(
    tmp_path: Path, form: str, first: str
) -> None:
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
