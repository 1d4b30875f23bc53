"""The golden vectors of the wire: files of hexadecimal digits in `tests/unit/wire`; what follows a `#` explains."""

from __future__ import annotations

from pathlib import Path
from typing import Final

VECTORS: Final = Path(__file__).parents[1] / "unit" / "wire"
PARTS: Final = ("part_of_6_fields", "part_of_10_fields", "part_of_11_fields")  # all say the same


def vector(name: str) -> bytes:
    lines = (VECTORS / f"{name}.hex").read_text(encoding="utf-8").splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))
