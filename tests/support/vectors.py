"""The golden vectors of the protocol: files of hexadecimal digits in `tests/unit/wire`, with comments after `#`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

VECTORS: Final = Path(__file__).parents[1] / "unit" / "wire"
PARTS: Final = ("part_of_6_fields", "part_of_10_fields", "part_of_11_fields")  # all have the same meaning


def vector(name: str) -> bytes:
    lines = (VECTORS / f"{name}.hex").read_text(encoding="utf-8").splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))
