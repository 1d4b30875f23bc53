"""The exit statuses of both commands, and the function that prints their error line."""

from __future__ import annotations

import sys
from typing import Final

FAILED: Final = 1
BAD_USAGE: Final = 2


def print_error(message: str) -> None:
    """Print one line on standard error."""
    print(f"error: {message}", file=sys.stderr)
