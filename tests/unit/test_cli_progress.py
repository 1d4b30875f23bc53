"""What commands print about their progress if standard error is not a terminal."""

from __future__ import annotations

import importlib
import re

import pytest

from kvstore_cli import progress
from kvstore_cli.progress import progress_bar
from tests.support.harness import ROOT, wait_until


class Said:
    """The lines on standard error so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    def line(self, pattern: str) -> str:
        """Wait for a line that matches the pattern, and return it."""

        def found() -> str | None:
            self._text += self._capsys.readouterr().err
            return next((each for each in self._text.splitlines() if re.search(pattern, each)), None)

        return str(wait_until(found, what=f"a line like {pattern!r}"))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    return Said(capsys)


def test_a_pipe_gets_lines_with_an_estimate(said: Said) -> None:
    with progress_bar("2 req/s", True, "requests") as update:
        assert said.line("^2 req/s: 0 requests, 0 s$")
        update(0, 40)
        said.line("^2 req/s: 0 of 40 requests, 0 s$")  # nothing is known about the rest
        update(20, 40, "failed 3")
        said.line(r"^2 req/s: 20 of 40 requests, failed 3, \d+ s, about \d+ s left$")


def test_no_estimate_is_made_of_a_total_that_grows(said: Said) -> None:
    with progress_bar("simulating", True, "runs", grows=True) as update:
        update(20, 40)
        said.line(r"^simulating: 20 of 40 runs known so far, \d+ s$")


def test_bytes_are_shown_as_sizes(said: Said) -> None:
    with progress_bar("checking", True, "bytes") as update:
        update(1 << 20, 1 << 21)
        said.line(r"^checking: 1.0 MiB of 2.0 MiB, ")


def test_a_short_command_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring", True) as update:
        update(1, 2)
    assert capsys.readouterr().err == ""


def test_examples_say_what_they_wait_for(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    demo = importlib.import_module("demo")
    monkeypatch.setattr(demo, "SAY_S", 0.01)
    with demo.waiting("two engines are starting", 80.0) as wait:
        said.line(r"^two engines are starting … \d+ s, usually about 80 s$")
        wait.now("stopping")
        said.line(r"^stopping … \d+ s$")
