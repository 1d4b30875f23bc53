"""Log lines for people and machines: one line an event on standard error, `time level where message`."""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")


def configure(level: str, where: str) -> None:
    """Send this process's log records of `level` and above to standard error, in UTC."""
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {where} %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
