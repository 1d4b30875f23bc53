"""How both commands end: their exit statuses and their error line."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

import typer

FAILED: Final = 1
BAD_USAGE: Final = 2


def fail(message: str, status: int) -> NoReturn:
    """Print one error line and end the command with `status`."""
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(status)
