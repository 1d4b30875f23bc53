"""tests/slow.txt names tests that exist."""

from __future__ import annotations

import ast

from tests.support.harness import ROOT
from tests.support.scheduling import slow_tests


def test_every_slow_test_exists() -> None:
    missing = []
    for name in slow_tests():
        path, _, function = name.partition("::")
        file = ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
        defined = {each.name for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
        assigned = {
            ast.unparse(target) for each in tree.body if isinstance(each, ast.Assign) for target in each.targets
        }
        if function not in defined | assigned:
            missing.append(name)
    assert not missing, f"no such tests, take them out of tests/slow.txt or correct their names: {sorted(missing)}"
