"""A progress bar on standard error, for commands that take a long time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(
    doing: str, shown: bool, unit: str = "blocks", stays: bool = False
) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar while the body runs, if standard error is a terminal. Yields a function `(done, total)` that updates
    the bar.

    unit: the unit of both numbers; "bytes" are shown as sizes. `total` is None while it is not known
    stays: whether the bar stays on the screen at the end
    """
    amount: list[ProgressColumn]
    amount = [DownloadColumn(binary_units=True)] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=not stays,
    )
    with bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
