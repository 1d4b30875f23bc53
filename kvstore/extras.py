"""Which optional libraries are installed, asked without importing them."""

from __future__ import annotations

import importlib.util
from typing import Final

_NIXL: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")  # by the version of CUDA; without a GPU each of them works


def nixl_package() -> str:
    """-> the name of the installed package of NIXL; empty: there is none."""
    return next((package for package in _NIXL if importlib.util.find_spec(package)), "")
