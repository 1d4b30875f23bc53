"""The options of commands that read a trace, and what these commands print about the trace."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore_cli.output import printable

if TYPE_CHECKING:
    from kvstore_serving.load.trace import TimeUnit, Trace


class Unit(str, Enum):
    """The values of --time-unit."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    MICROSECONDS = "us"
    NANOSECONDS = "ns"


TRACE_HELP: Final = "JSON lines as Mooncake and Qwen-Bailian publish them, also .gz and .zst"
BlockTokensOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="TOKENS", help="Tokens that a hash id of the trace stands for. Default: detected."),
]
TimeUnitOption = Annotated[
    Unit | None,
    typer.Option(
        help="Unit of the trace's timestamps. Default: s for traces with `chat_id`, as from Qwen-Bailian, else ms."
    ),
]


def unit_of(given: Unit | None) -> TimeUnit | None:
    """Return the time unit that --time-unit gives, or None."""
    return None if given is None else given.value


def say_what_is_odd(path: Path, trace: Trace) -> None:
    """Print a note on standard error about fields that are not used, and about a rate that no service has."""
    if trace.ignored:
        names = ", ".join(printable(name) for name in trace.ignored)
        print(f"{path.name}: fields that are not used: {names}", file=sys.stderr)
    if trace.unusual:
        print(f"{path.name}: {trace.unusual}", file=sys.stderr)
