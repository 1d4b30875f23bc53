"""Writes settings as TOML files with comments: the settings in effect (`--print-config`), and the sample file that is
installed.

Reading the file gives the same settings again. A secret is not written; a comment stands in its place.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvstore.node.settings import Described, describe, shown_in_toml

_WIDTH: Final = 98  # the width of the comments


def effective(config: msgspec.Struct, heading: str, source: Callable[[str], str]) -> str:
    """Return the settings of `config`, each with the source of its value, which `source(name)` returns."""

    def lines(described: Described) -> list[str]:
        value = getattr(config, described.name)
        origin = f"  # source: {source(described.name)}"
        if described.setting.file_only:
            tables = [line for row in value for line in _table(described, row)]
            return [origin.strip(), *tables] if tables else _example(described)
        if value is None:
            return [f"# {_assignment(described, described.value)}{origin}"]
        if described.setting.secret:
            return [f"# {described.name}: a secret, which is not printed{origin}"]
        return [f"{_assignment(described, value)}{origin}"]

    return _file(type(config), heading, lines)


def sample(kind: type[msgspec.Struct], heading: str) -> str:
    """Return all settings of a struct with their defaults, commented out."""

    def lines(described: Described) -> list[str]:
        if described.setting.file_only:
            return _example(described)
        value = described.value if described.default is None else described.default
        return [f"# {_assignment(described, value)}"]

    return _file(kind, heading, lines)


def _file(kind: type[msgspec.Struct], heading: str, values: Callable[[Described], list[str]]) -> str:
    lines = _comment(heading)
    section = ""
    for each in sorted(describe(kind), key=lambda each: each.setting.file_only):  # tables have to come last
        if each.setting.section != section:
            section = each.setting.section
            lines += ["", f"# ---- {section} ".ljust(_WIDTH + 2, "-")]
        text = each.setting.help
        if not each.setting.file_only:
            bounds = "" if each.kind in (str, bool) and not each.setting.choices else f" Expected: {each.expected}."
            text += f"{bounds} Default: {each.default_text}."
        lines += ["", *_comment(text), *values(each)]
    return "\n".join([*lines, ""])


def _assignment(described: Described, value: Any) -> str:
    return f"{described.name} = {shown_in_toml(value)}"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _table(described: Described, row: msgspec.Struct) -> list[str]:
    values = msgspec.structs.asdict(row).items()
    return [f"[[{described.name}]]", *(f"{key} = {shown_in_toml(value)}" for key, value in values)]


def _example(described: Described) -> list[str]:
    return [f"# {line}" for line in (f"[[{described.name}]]", *described.setting.example.splitlines())]
