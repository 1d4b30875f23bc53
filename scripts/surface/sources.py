"""Python modules of folders and wheels, which are read but never imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The modules of folders and wheels. `roots`: where each top-level package is; only these packages are read."""

    def __init__(self, roots: dict[str, Path]) -> None:
        self._roots = {package: zipfile.ZipFile(at) if zipfile.is_zipfile(at) else at for package, at in roots.items()}
        self._modules: dict[str, Module | None] = {}

    def has(self, name: str) -> bool:
        """Return whether a module belongs to one of the packages, even if the package has no such module."""
        return name.partition(".")[0] in self._roots

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def text(self, package: str, file: str) -> str | None:
        root = self._roots[package]
        try:
            return root.joinpath(file).read_text("utf-8") if isinstance(root, Path) else root.read(file).decode()
        except (OSError, KeyError):
            return None

    def files(self, package: str) -> list[str]:
        """Return the Python files of a package."""
        root = self._roots[package]
        if isinstance(root, Path):
            return sorted(str(file.relative_to(root)) for file in root.joinpath(package).rglob("*.py"))
        return sorted(name for name in root.namelist() if name.startswith(f"{package}/") and name.endswith(".py"))

    def _read(self, name: str) -> Module | None:
        if not self.has(name):
            return None
        for file in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
            text = self.text(name.partition(".")[0], file)
            if text is not None:
                return Module(name, file, ast.parse(text))
        return None


@dataclass(frozen=True, eq=False)
class Module:
    name: str
    file: str
    tree: ast.Module

    @cached_property
    def bindings(self) -> dict[str, list[ast.AST]]:
        """The statements that bind each name of the module. For an import it is the alias."""
        found: dict[str, list[ast.AST]] = {}
        for name, node in bindings_in(self.tree.body):
            found.setdefault(name, []).append(node)
        return found

    @cached_property
    def imports(self) -> dict[ast.AST, str]:
        """The module from which each alias of a from-import imports, also inside functions."""
        return {
            alias: self.absolute(node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the module of a from-import, also of a relative one."""
        parts = self.name.split(".") if node.level else []
        above = node.level - self.file.endswith("__init__.py")
        return ".".join([*parts[: len(parts) - max(0, above)], *([node.module] if node.module else [])])


def bindings_in(body: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef | FunctionNode):
            if not any(ast.unparse(each).endswith("overload") for each in node.decorator_list):
                yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                plain = isinstance(node, ast.Import) and alias.asname is None
                yield alias.name.partition(".")[0] if plain else alias.asname or alias.name, alias
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from bindings_in(getattr(node, part, ()))
