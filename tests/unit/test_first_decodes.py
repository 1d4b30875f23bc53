"""msgspec crashes the process if several threads decode a type for the first time at the same moment. Our code avoids
that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.harness import ROOT

# Files in which only one thread runs, or only one may decode.
ALONE = {
    "kvstore/auth/policy.py": "its type is read when the module is imported",
    "kvstore/node/settings.py": "the settings are read before any thread is started",
    "kvstore/shard/process.py": "a shard reads its configuration first of all",
    "kvstore/store/generations.py": "a shard reads its file before it serves anybody",
    "kvstore_cli/options.py": "a command reads its options before it connects",
    "kvstore_client/vllm/shared/store_options.py": "under a lock",
}


def typed_decodes_in_functions(file: Path) -> Iterator[int]:
    """Yield the lines at which msgspec first reads one of our types when a function runs, and not when the module is
    imported."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            typed = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
            of_msgspec = "msgspec" in ast.unparse(call.func)
            if of_msgspec and (
                call.func.attr in ("convert", "Decoder")
                or (call.func.attr == "decode" and typed and ast.unparse(typed[0]) not in ("int", "list[msgspec.Raw]"))
            ):
                yield call.lineno


def test_msgspec_types_are_read_when_modules_are_imported() -> None:
    found = {
        f"{file.relative_to(ROOT)}:{line}"
        for package in ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")
        for file in (ROOT / package).rglob("*.py")
        for line in typed_decodes_in_functions(file)
    }
    assert {place.rpartition(":")[0] for place in found} == set(ALONE), found
