"""A result is stale only if code that its benchmark measures has changed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import code_changes, run_all
from benchmarks.gpu.steps import STEPS
from benchmarks.measures import MEASURES, PLANNER, measured_by
from benchmarks.remote_kv_cache import rig
from benchmarks.render.ledger import age
from benchmarks.results_reader import Result
from tests.support.harness import ROOT


def test_every_benchmark_names_existing_files_that_it_measures() -> None:
    modules = {word for step in STEPS.values() for word in step.command(Path("result.json"), True)}
    there = {entry.module.rpartition(".")[2] for entry in run_all.BENCHMARKS}
    there |= {module.rpartition(".")[2] for module in modules if module.startswith("benchmarks.")}
    there |= {step.name for step in STEPS.values() if step.is_tests}
    assert there == set(MEASURES)
    for benchmark, paths in MEASURES.items():
        assert paths, benchmark
        assert [path for path in paths if not (ROOT / path).exists()] == [], benchmark


def test_measured_files_are_found_by_module_name() -> None:
    assert measured_by("benchmarks.planning.bench_simulator") == measured_by("bench_simulator") == PLANNER
    assert measured_by("run") == ()


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A function that appends a text to a file in a new repository, commits it, and returns the commit."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def changed(path: str, text: str = "changed\n") -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(text)
        git("add", "--all")
        git("commit", "--quiet", "--message", path)
        return git("rev-parse", "--short=10", "HEAD")

    git("init", "--quiet")
    monkeypatch.setattr(code_changes, "ROOT", tmp_path)
    return changed


def of(benchmark: str, commit: str) -> Result:
    return Result({"benchmark": benchmark, "commit": {"id": commit, "how": "recorded"}})


def test_only_a_change_of_measured_files_makes_a_result_stale(change: Callable[[str], str]) -> None:
    measured = change("kvstore/wire/messages.py")
    for elsewhere in (
        "kvstore/disk/tier.py",
        "kvstore_client/vllm/connector/worker.py",
        "kvstore/node/cli.py",
        "docs/a",
    ):
        change(elsewhere)
    assert age(of("bench_lookup", measured)) == f"`{measured}`"
    assert age(of("bench_disk_tier", measured)) == f"`{measured}`, **stale**"  # the disk's code was added since
    assert age(of("bench_transfer_out", measured)) == f"`{measured}`, **stale**"  # and so was the connector
    change("kvstore/wire/messages.py")
    assert age(of("bench_lookup", measured)) == f"`{measured}`, **stale**"
    assert age(of("bench_simulator", measured)) == f"`{measured}`"


def test_an_uncommitted_change_counts_and_is_reported(change: Callable[[str], str], tmp_path: Path) -> None:
    measured = change("kvstore_client/_links/link.py")
    (tmp_path / "kvstore_client/_links/link.py").write_text("another\n")
    assert age(of("bench_lookup", measured)) == f"`{measured}`, **stale**"
    recorded, changed = rig.commit(measured_by("bench_simulator")), rig.commit(measured_by("bench_lookup"))
    assert recorded is not None and recorded["id"] == measured and recorded["how"] == "recorded"
    assert list(recorded["objects"]) == list(measured_by("bench_simulator"))
    assert changed == {"id": measured, "how": "with changes that are not committed"}


def test_a_rewritten_history_makes_no_result_stale(change: Callable[[str], str], tmp_path: Path) -> None:
    change("kvstore_client/_links/link.py")
    change("kvstore_client/_links/link.py")
    measured = Result({"benchmark": "bench_lookup", "commit": rig.commit(measured_by("bench_lookup"))})
    shutil.rmtree(tmp_path / ".git")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    change("README.md")
    assert age(measured) == f"`{measured.commit}`"
    change("kvstore/wire/messages.py")
    assert age(measured) == f"`{measured.commit}`, **stale**"


def test_other_words_make_no_result_stale_and_other_code_does(change: Callable[..., str]) -> None:
    for file in ("kvstore/wire/words.py", "cext/words.pxi"):
        change(file, "cdef int f(int *x) nogil:\n" if file.startswith("cext") else "def f(x: int) -> None:\n")
        measured = change(
            file, '    """One."""\n    if x == 1:\n        raise ValueError("one")\n    log.info("done")\n'
        )
        text = (code_changes.ROOT / file).read_text()
        for old, new in (
            ('    """One."""\n', '    """Two lines.\n\n    The second."""\n\n    # why\n'),
            ('"one"', '"one: expected two"'),
            ('"done"', '"done now"'),
            ('ValueError("one")', 'ValueError(\n            "one"\n            f" and {2}"\n        )  # why'),
        ):
            (code_changes.ROOT / file).write_text(text.replace(old, new))
            change(file, "")
            assert age(of("bench_lookup", measured)) == f"`{measured}`", (file, old)
        for old, new in (
            ("x == 1", "x == 2"),
            ("ValueError", "KeyError"),
            ("info", "error"),
            ("        raise", "        x = 2\n        raise"),
            ("    if x", '    y = "One."\n    if x'),
        ):
            (code_changes.ROOT / file).write_text(text.replace(old, new))
            change(file, "")
            assert age(of("bench_lookup", measured)) == f"`{measured}`, **stale**", (file, old)


def test_a_new_or_removed_file_makes_a_result_stale(change: Callable[..., str]) -> None:
    first = change("kvstore/wire/messages.py")
    second = change("kvstore/wire/errors.py", "# nothing\n")
    assert age(of("bench_lookup", first)) == f"`{first}`, **stale**"
    (code_changes.ROOT / "kvstore/wire/errors.py").unlink()
    change("README.md")
    assert age(of("bench_lookup", second)) == f"`{second}`, **stale**"


def test_the_age_of_an_unknown_commit_is_unknown(change: Callable[[str], str]) -> None:
    measured = change("README.md")
    assert age(of("bench_lookup", "0123456789")) == "`0123456789`, age not known"
    assert age(of("an old benchmark", measured)) == f"`{measured}`, age not known"
    assert age(Result({"commit": None})) == "not known"
