"""The progress of commands that take a long time, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvstore.sizes import format_size

LINE_S: Final = 10.0  # the time between two lines, if standard error is not a terminal


class Update(Protocol):
    """Sets the progress. `total` is None while it is not known. `note`: what else to say."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


@contextmanager
def progress_bar(
    doing: str, shown: bool, unit: str = "blocks", stays: bool = False, grows: bool = False
) -> Iterator[Update]:
    """Show the progress while the body runs. Yields the function that updates it.

    unit: the unit of both numbers; "bytes" are shown as sizes
    stays: whether the bar stays on the screen at the end
    grows: whether the total rises during the work, so that the time that is left is not known
    """
    if not shown:
        yield lambda done, total, note="": None
    elif sys.stderr.isatty():
        with _bar(unit, stays, grows) as bar:
            task = bar.add_task(doing, total=None, note="")
            yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
    else:
        with _ProgressLines(doing, unit, grows, sys.stderr) as lines:
            yield lines.update


def _bar(unit: str, stays: bool, grows: bool) -> Progress:
    amount: list[ProgressColumn]
    amount = [DownloadColumn(binary_units=True)] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn() if grows else TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=not stays,
    )


class _ProgressLines:
    """Prints a line every `LINE_S` seconds. A thread prints it, so that nothing of the work can delay it."""

    def __init__(self, doing: str, unit: str, grows: bool, file: TextIO) -> None:
        self._doing, self._unit, self._grows, self._file = doing, unit, grows, file
        self.update(0, None)
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> _ProgressLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def update(self, done: int, total: int | None, note: str = "") -> None:
        self._done, self._total, self._note = done, total, note

    def _print(self) -> None:
        while not self._ended.wait(LINE_S):
            elapsed_s = time.monotonic() - self._began
            print(f"{self._doing}: {self._said(elapsed_s)}", file=self._file, flush=True)

    def _said(self, elapsed_s: float) -> str:
        done, total = self._done, self._total
        amount = format_size if self._unit == "bytes" else str
        parts = [amount(done) + ("" if total is None else f" of {amount(total)}")]
        if self._unit != "bytes":
            parts[0] += f" {self._unit}"
        if self._grows and total is not None:
            parts[0] += " known so far"
        parts += [self._note] if self._note else []
        parts.append(f"{elapsed_s:.0f} s")
        if done and total and not self._grows:
            parts.append(f"about {elapsed_s * (total - done) / done:.0f} s left")
        return ", ".join(parts)
