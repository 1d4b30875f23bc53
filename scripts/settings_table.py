"""Rewrites the table of settings in docs/operations.md, and the sample file packaging/server.toml, from the
descriptions in kvstore/node/config.py.

    python scripts/settings_table.py           writes both
    python scripts/settings_table.py --check   exit status 1 if one is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvstore.node.config import ServerConfig  # noqa: E402
from kvstore.node.settings import describe  # noqa: E402
from kvstore.node.settings_file import sample  # noqa: E402

SAMPLE = ROOT / "packaging" / "server.toml"
SAMPLE_HEADING = (
    "All settings of kvstore-server, with their defaults. Remove the # of those that you change, and run "
    "kvstore-server --config THIS_FILE --check-config. A flag wins over a variable, a variable over this file."
)
MANUAL = ROOT / "docs" / "operations.md"
BEGIN = "<!-- settings: written by python scripts/settings_table.py -->\n"
END = "<!-- end of settings -->\n"


def table() -> str:
    """Return the table: a row for each setting, sections in bold."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    section = ""
    for each in describe(ServerConfig):
        if each.setting.section != section:
            section = each.setting.section
            lines.append(f"| **{section}** | | |")
        if each.setting.file_only:
            name = f"`[[{each.name}]]` in the file"
        elif each.kind is bool:
            name = f"`{each.flag}`, `{each.flag.replace('--', '--no-', 1)}`"
        else:
            name = f"`{each.flag}`" if each.setting.choices else f"`{each.flag} {each.value}`"
        meaning = each.setting.help
        if each.setting.choices:
            meaning += f" One of {', '.join(f'`{choice}`' for choice in each.setting.choices)}."
        if each.setting.more:
            meaning += f" ([more]({each.setting.more.removeprefix('operations.md')}))"
        lines.append(f"| {name} | {each.default_text} | {meaning} |")
    return "\n".join([*lines, ""])


def with_table(manual: str) -> str:
    """Return the manual with its table updated."""
    before, found, rest = manual.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        sys.exit(f"{MANUAL}: expected the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    wanted = {
        MANUAL: with_table(MANUAL.read_text(encoding="utf-8")),
        SAMPLE: sample(ServerConfig, SAMPLE_HEADING),
    }
    for file, text in wanted.items():
        if "--check" not in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file} is out of date: run python scripts/settings_table.py")


if __name__ == "__main__":
    main()
