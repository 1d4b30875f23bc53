"""Each name has one meaning: no two public classes, and no two constants, of the packages have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.harness import ROOT

PACKAGES = ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")


def top_level() -> Iterator[tuple[Path, ast.stmt]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                yield file.relative_to(ROOT), node


def constants(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the constants that a statement defines: the name of each and the text of its value."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return
    text = ast.unparse(value)
    for target in targets:
        if isinstance(target, ast.Name) and target.id.isupper() and not text.startswith("TypeVar("):
            yield target.id, text


def test_no_two_public_classes_share_a_name() -> None:
    found = defaultdict[str, list[str]](list)
    for file, node in top_level():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name].append(str(file))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert not twice, f"give each class a name of its own: {twice}"


def test_no_two_constants_share_a_name_with_different_values() -> None:
    found = defaultdict[str, dict[str, str]](dict)
    for file, node in top_level():
        for name, value in constants(node):
            found[name][str(file)] = value
    twice = {name: values for name, values in found.items() if len(set(values.values())) > 1}
    assert not twice, f"give each constant a name of its own: {twice}"
