"""When a result is stale: what its benchmark measures has changed, and nothing else counts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import run_all
from benchmarks.gpu.steps import STEPS
from benchmarks.measures import MEASURES, PLANNER, measured_by
from benchmarks.remote_kv_cache import rig
from benchmarks.render.ledger import age
from benchmarks.results_reader import Result
from tests.support.harness import ROOT


def test_every_benchmark_says_what_it_measures_and_all_of_that_is_in_the_tree() -> None:
    modules = {word for step in STEPS.values() for word in step.command(Path("result.json"), True)}
    there = {entry.module.rpartition(".")[2] for entry in run_all.BENCHMARKS}
    there |= {module.rpartition(".")[2] for module in modules if module.startswith("benchmarks.")}
    there |= {step.name for step in STEPS.values() if step.is_tests}
    assert there == set(MEASURES)
    for benchmark, paths in MEASURES.items():
        assert paths, benchmark
        assert [path for path in paths if not (ROOT / path).exists()] == [], benchmark


def test_what_is_measured_is_found_by_the_name_of_the_module() -> None:
    assert measured_by("benchmarks.planning.test_simulator") == measured_by("test_simulator") == PLANNER
    assert measured_by("run") == ()


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A repository that holds nothing but what one changes in it: write to a file and commit. -> the commit."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def changed(path: str) -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write("changed\n")
        git("add", "--all")
        git("commit", "--quiet", "--message", path)
        return git("rev-parse", "--short=10", "HEAD")

    git("init", "--quiet")
    monkeypatch.setattr(rig, "ROOT", tmp_path)
    return changed


def of(benchmark: str, commit: str) -> Result:
    return Result({"benchmark": benchmark, "commit": {"id": commit, "how": "recorded"}})


def test_only_a_change_of_what_a_benchmark_measures_makes_its_result_stale(change: Callable[[str], str]) -> None:
    measured = change("kvstore/wire/messages.py")
    for elsewhere in (
        "kvstore/disk/tier.py",
        "kvstore_client/vllm/connector/worker.py",
        "kvstore/node/cli.py",
        "docs/a",
    ):
        change(elsewhere)
    assert age(of("test_lookup", measured)) == f"`{measured}`"
    assert age(of("test_disk_tier", measured)) == f"`{measured}`, **stale**"  # the disk has come since
    assert age(of("test_transfer_out", measured)) == f"`{measured}`, **stale**"  # and the connector
    change("kvstore/wire/messages.py")
    assert age(of("test_lookup", measured)) == f"`{measured}`, **stale**"
    assert age(of("test_simulator", measured)) == f"`{measured}`"


def test_a_change_that_is_not_committed_counts_and_is_told(change: Callable[[str], str], tmp_path: Path) -> None:
    measured = change("kvstore_client/_links/link.py")
    (tmp_path / "kvstore_client/_links/link.py").write_text("another\n")
    assert age(of("test_lookup", measured)) == f"`{measured}`, **stale**"
    recorded, changed = rig.commit(measured_by("test_simulator")), rig.commit(measured_by("test_lookup"))
    assert recorded is not None and recorded["id"] == measured and recorded["how"] == "recorded"
    assert list(recorded["objects"]) == list(measured_by("test_simulator"))
    assert changed == {"id": measured, "how": "with changes that are not committed"}


def test_a_history_that_is_rewritten_makes_nothing_stale(change: Callable[[str], str], tmp_path: Path) -> None:
    change("kvstore_client/_links/link.py")
    change("kvstore_client/_links/link.py")
    measured = Result({"benchmark": "test_lookup", "commit": rig.commit(measured_by("test_lookup"))})
    shutil.rmtree(tmp_path / ".git")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    change("README.md")
    assert age(measured) == f"`{measured.commit}`"
    change("kvstore/wire/messages.py")
    assert age(measured) == f"`{measured.commit}`, **stale**"


def test_the_age_of_what_cannot_be_told_is_not_known(change: Callable[[str], str]) -> None:
    measured = change("README.md")
    assert age(of("test_lookup", "0123456789")) == "`0123456789`, age not known"
    assert age(of("an old benchmark", measured)) == f"`{measured}`, age not known"
    assert age(Result({"commit": None})) == "not known"
