"""Parses and formats sizes in bytes, for the server and the clients."""

from __future__ import annotations

import re
from typing import Final

_BINARY: Final = {"Ti": 1 << 40, "Gi": 1 << 30, "Mi": 1 << 20, "Ki": 1 << 10}
_DECIMAL: Final = {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3}
_UNITS: Final = {"": 1, "b": 1} | {f"{unit}b".lower(): size for unit, size in (_BINARY | _DECIMAL).items()}
# The notation of Kubernetes. It is case-sensitive: `m` is a thousandth in Kubernetes and a MiB in Docker.
_KUBERNETES: Final = _BINARY | _DECIMAL


def parse_size(text: str) -> int:
    """Return the number of bytes in ``4GiB``, ``512 MiB``, ``1.5GB``, ``512Mi``, ``500M`` or ``1048576``.

    ``KiB MiB GiB TiB`` and ``Ki Mi Gi Ti`` are powers of 1024. ``kB MB GB TB`` and ``k M G T`` are powers of 1000.
    Raises `ValueError` if `text` is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = None if match is None else _KUBERNETES.get(match[2], _UNITS.get(match[2].lower()))
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: expected a number with a unit, such as 512MiB, 4GiB or 512Mi")
    return int(float(match[1]) * unit)


def spell_size(count: int) -> str:
    """Return `count` in the largest binary unit that is exact, such as ``4GiB``. `parse_size` turns the text into
    `count` again."""
    for unit, size in _BINARY.items():
        if count and count % size == 0:
            return f"{count // size}{unit}B"
    return str(count)


def format_size(count: float) -> str:
    """Return `count` rounded for people, such as ``4.0 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
