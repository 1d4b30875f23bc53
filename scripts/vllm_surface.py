"""Records which names of vLLM this project uses, and says what another release of vLLM would change.

    python scripts/vllm_surface.py record [WHEEL|FOLDER]
    python scripts/vllm_surface.py compare [--tests] [--json] [--download VERSION] [WHEEL|FOLDER ...]

`record` writes tests/data/vllm_surface.json, by default from the installed vLLM. `compare` prints what differs from
that file. vLLM's files are only read, never imported, so a release need not be installed. A use is followed as far as
annotations go, here and in vLLM. The file also lists what cannot be followed ("not_followed"). The states in a
comparison are:

* **missing**: a name is gone, or a call does not fit. This release breaks something.
* **handled**: it is gone, but the code looks whether it is there, or does not use it with this release.
* **changed**: a signature or a type differs. Calls still fit.
* **new**: a hook that vLLM may call now, or something that the code looks for and that is there now.
* **not followed**: this release does not show the type of a value any more, so its uses are not checked.

The exit status is 1 if something is missing, else 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.surface.uses import HOOK, UNUSED, VLLM, Surface, Uses, is_before  # noqa: E402

RECORD = ROOT / "tests" / "data" / "vllm_surface.json"
STATES: Final = ("missing", "handled", "changed", "new", "not followed")


@dataclass(frozen=True)
class Row:
    """A difference between two releases. `recorded`, `now`: the texts, or what is known. `places`: uses that break."""

    state: str
    what: str
    recorded: str
    now: str = ""
    places: Sequence[str] = ()


def compare(recorded: Surface, uses: Uses) -> list[Row]:
    """Return the differences between the recorded surface and that of another release, the worst first."""
    before, now, problems = recorded.flat(), uses.surface.flat(), uses.problems
    rows = [
        Row("missing" if each.handled is None else "handled", what, each.handled or "", each.why, each.places)
        for what, each in problems.items()
        if what in before or not (each.optional or each.handled == UNUSED)
    ]
    unused = uses.unused | {what.rpartition(".")[2] for what, each in problems.items() if each.handled}
    for what, text in before.items():
        plain = what.removesuffix(HOOK).removesuffix("()")
        if what in now:
            if now[what] != text:
                rows.append(Row("changed", what, text, now[what]))
        elif plain not in problems and what.endswith(HOOK):
            known = uses.is_looked_up(*plain.split(".")) or is_before(plain, uses.surface.release)
            rows.append(Row("handled" if known else "missing", what, text, "vLLM does not call it"))
        elif plain not in problems and plain.rpartition(".")[2] not in unused:
            rows.append(Row("not followed", what, text))
    rows += [Row("new", what, "", text) for what, text in now.items() if what not in before]
    rows += [
        Row("new", f"{of}.{name}{HOOK}", "", "vLLM may call it; not overridden")
        for of, names in uses.surface.others.items()
        for name in names
        if name not in recorded.others.get(of, ()) and f"{of}.{name}" not in problems
    ]
    rows += [
        Row("not followed", value, "", f"the type of this does not show; uses: {', '.join(names)}")
        for value, names in uses.surface.not_followed.items()
        if value not in recorded.not_followed
    ]
    return sorted(rows, key=lambda row: (STATES.index(row.state), row.what))


def table(release: str, recorded: str, rows: Sequence[Row]) -> str:
    """Return the differences as text."""
    counts = ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in STATES)
    lines = [f"vLLM {release}, compared with {recorded}: {counts}"]
    for row in rows:
        lines.append(f"  {row.state:<13}{row.what}{' at ' if row.places else ''}{', '.join(row.places[:3])}")
        if row.state == "changed":
            was, now = _difference(row.recorded, row.now)
            lines += [f"{'':17}was {was}", f"{'':17}is  {now}"]
        elif row.recorded or row.now:
            lines.append(f"{'':17}{'; '.join(filter(None, (row.recorded, row.now)))}")
    return "\n".join(lines)


def _difference(was: str, now: str) -> tuple[str, str]:
    """Return two texts without the parameters at their beginning that are equal."""
    equal = [*takewhile(lambda pair: pair[0] == pair[1], zip(was, now, strict=False))]
    same = was[: len(equal)].rfind(", ")
    return (was, now) if same < 0 else (f"… {was[same + 2 :]}", f"… {now[same + 2 :]}")


# The command.


def installed() -> Path:
    """Return the folder of the installed vLLM, which is not imported."""
    found = importlib.util.find_spec(VLLM)
    if found is None or found.origin is None:
        raise SystemExit("vllm_surface.py: vLLM is not installed here. Give a wheel or a folder, or use run.sh full")
    return Path(found.origin).parents[1]


def download(version: str, folder: Path) -> Path:
    """Download the wheel of a release from the package index."""
    print(f"downloading vllm {version}, some 100 MB", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    if subprocess.run([*command, f"{VLLM}=={version}"], check=False).returncode:
        raise SystemExit(f"vllm_surface.py: pip could not download {VLLM}=={version}; its message is above")
    return next(folder.glob("*.whl"))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write the surface of a release to tests/data/vllm_surface.json")
    recording.add_argument("vllm", nargs="?", type=Path, help="a wheel, or a folder with vllm/; default: the installed")
    comparing = commands.add_parser("compare", help="print what another release would change")
    comparing.add_argument("vllm", nargs="*", type=Path, help="wheels, or folders with vllm/")
    comparing.add_argument("--download", metavar="VERSION", help="also download and compare this release")
    comparing.add_argument("--tests", action="store_true", help="include what the engine tests use")
    comparing.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(given)
    if args.command == "record":
        surface = Uses(args.vllm or installed()).surface
        RECORD.write_text(surface.as_json())
        print(f"{RECORD}: vLLM {surface.release}, {len(surface.flat())} names")
        return 0
    if not args.vllm and not args.download:
        parser.error("expected a wheel, a folder, or --download VERSION")
    recorded = Surface(**json.loads(RECORD.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        downloaded = [download(args.download, Path(folder))] if args.download else []
        found = [
            (uses.surface.release, compare(recorded, uses))
            for uses in (Uses(each, tests=args.tests) for each in [*args.vllm, *downloaded])
        ]
    if args.json:
        found_json = [{"release": release, "rows": [asdict(row) for row in rows]} for release, rows in found]
        print(json.dumps(found_json, indent=1))
    else:
        print("\n\n".join(table(release, recorded.release, rows) for release, rows in found))
    return int(any(row.state == "missing" for _, rows in found for row in rows))


if __name__ == "__main__":
    sys.exit(main())
