"""The options of commands that read a trace, and what they say of it."""

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
    """Values of --time-unit."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    MICROSECONDS = "us"
    NANOSECONDS = "ns"


TRACE_HELP: Final = "JSON lines as Mooncake and Qwen-Bailian publish them, also .gz and .zst"
BlockTokensOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="TOKENS", help="Tokens that a hash id of the trace stands for. Default: found out."),
]
TimeUnitOption = Annotated[
    Unit | None,
    typer.Option(
        help="Unit of the trace's timestamps. Default: s if it has `chat_id`, as Qwen-Bailian's have, else ms."
    ),
]


def unit_of(given: Unit | None) -> TimeUnit | None:
    """The value of --time-unit."""
    return None if given is None else given.value


def say_what_is_odd(path: Path, trace: Trace) -> None:
    """Name the fields that are not used, once, on standard error; and a rate that no service has."""
    if trace.ignored:
        names = ", ".join(printable(name) for name in trace.ignored)
        print(f"{path.name}: fields that are not used: {names}", file=sys.stderr)
    if trace.unusual:
        print(f"{path.name}: {trace.unusual}", file=sys.stderr)
