"""Rewrites the table of settings in docs/operations.md from what kvstore/node/config.py says of each.

python scripts/settings_table.py           writes it
python scripts/settings_table.py --check   exit status 1 when it is not what it should be
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvstore.node.config import ServerConfig  # noqa: E402
from kvstore.node.settings import describe  # noqa: E402

MANUAL = ROOT / "docs" / "operations.md"
BEGIN = "<!-- settings: written by python scripts/settings_table.py -->\n"
END = "<!-- end of settings -->\n"


def table() -> str:
    """One row a setting, sections in bold."""
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
    """The manual with the table as it should be."""
    before, found, rest = manual.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        sys.exit(f"{MANUAL}: expected the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    manual = MANUAL.read_text(encoding="utf-8")
    wanted = with_table(manual)
    if "--check" in sys.argv[1:]:
        sys.exit(
            manual != wanted and f"{MANUAL}: the table of settings is out of date: python scripts/settings_table.py"
        )
    MANUAL.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
