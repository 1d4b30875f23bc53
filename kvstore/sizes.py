"""Sizes in bytes as people write and read them, for both sides."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def parse_size(text: str) -> int:
    """Bytes of ``4GiB``, ``512 MiB``, ``1.5GB`` or ``1048576``; ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"a size of {text!r}: expected a number with a unit such as 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(count: float) -> str:
    """``4.0 GiB`` for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
