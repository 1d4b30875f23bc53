"""Installs a third-party package for one test: a module, and its entry points in a dist-info folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, text: str, points: Mapping[str, str]) -> None:
    """`points`: entry points, as ``GROUP/NAME`` -> the name of an object in the module."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    groups: dict[str, list[str]] = {}
    for point, attribute in points.items():
        group, _, name = point.partition("/")
        groups.setdefault(group, []).append(f"{name} = {module}:{attribute}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{''.join(names)}" for group, names in groups.items()))
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
