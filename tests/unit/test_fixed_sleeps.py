"""Tests should wait for a condition and not for a time: fixed sleeps are counted, and their number may only fall."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from tests.support.harness import ROOT

LONGEST_S: Final = 0.05  # shorter sleeps are pauses of polling loops
LIMIT: Final = 2  # lower it when the count has fallen


def fixed_sleeps(source: str) -> list[int]:
    """Return the lines with calls of `time.sleep` with a number of seconds above `LONGEST_S`."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "time.sleep"
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value > LONGEST_S
    ]


def test_fixed_sleeps_become_fewer() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted(Path(ROOT, "tests").rglob("test_*.py"))
        for line in fixed_sleeps(file.read_text(encoding="utf-8"))
    ]
    told = "\n".join(found)
    assert len(found) <= LIMIT, f"{len(found)} fixed sleeps, {LIMIT} are allowed; wait for a condition:\n{told}"
    assert len(found) == LIMIT, f"{len(found)} fixed sleeps are left: lower LIMIT to that, so that none comes back"


def test_fixed_sleeps_are_found_and_polling_intervals_are_not() -> None:
    assert fixed_sleeps("import time\ntime.sleep(0.3)\ntime.sleep(0.01)\ntime.sleep(left_s)\n") == [2]
