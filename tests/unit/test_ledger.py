"""What may be said of a target, and which benchmarks a run takes: from results as files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_all
from benchmarks.draw import CLAIMS, fill
from benchmarks.gpu.steps import STEPS
from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache import rig
from benchmarks.render.ledger import MET, MISSED, NOT_ESTABLISHED, NOT_MEASURED, Finding, verdict
from benchmarks.results_reader import Result, read_results
from tests.support.harness import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def result(**changes: Any) -> Result:
    """Seven rounds on a machine that did nothing else."""
    load = {"average_before": 1.2, "average_after": 1.9, "busy_before": 0.01}
    return Result({"rounds": 7, "quick": False, "load": load, "commit": None, **changes})


REACHED = Finding("0.99 x", "", met=True)
BEYOND = Finding("1.20 x", "", met=False)


def test_a_quiet_machine_and_enough_rounds_settle_a_target() -> None:
    assert verdict(REACHED, result()) == MET
    assert verdict(BEYOND, result()) == MISSED
    assert verdict(REACHED, result(rounds=5)) == MET
    assert verdict(None, None) == NOT_MEASURED


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4},
        {"quick": True},
        {"load": {"average_before": 0.0, "average_after": 0.0, "busy_before": 0.3}},
        {"load": {"average_before": 0.96, "average_after": 1.1, "busy_before": None}},
    ],
)
def test_nothing_else_settles_one(changes: dict[str, Any]) -> None:
    assert verdict(REACHED, result(**changes)) == NOT_ESTABLISHED
    assert verdict(BEYOND, result(**changes)) == NOT_ESTABLISHED


def test_the_rounds_that_count_are_those_of_the_figure() -> None:
    assert verdict(Finding("1/43", "", met=True, rounds=1), result()) == NOT_ESTABLISHED
    assert verdict(Finding("0.99", "", met=True, rounds=5), result(rounds=2)) == MET


def test_every_result_tells_its_commit_its_load_and_its_rounds() -> None:
    results = read_results(RESULTS)
    assert results
    for name, each in results.items():
        assert each.commit and each.rounds >= 1 and each.load_text, name


def test_the_document_is_what_the_results_say(tmp_path: Path) -> None:
    """`python -m benchmarks.draw` would change nothing, except where a result has become stale since: run it then."""
    document = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    made = fill(document, read_results(RESULTS))
    if "age not known" in made:
        pytest.skip("a checkout without its history")
    assert made == document


def test_every_target_has_a_command_that_can_be_run() -> None:
    for claim in CLAIMS:
        module = claim.command.split()[2]
        assert any(entry.module == module for entry in run_all.BENCHMARKS), claim.command


# ---- running them all ----------------------------------------------------------------------------------------------


def test_a_run_takes_every_benchmark_there_is() -> None:
    modules = {entry.module for entry in run_all.BENCHMARKS}
    modules |= {word for step in STEPS.values() for word in step.command(Path("result.json"), True)}
    for file in (ROOT / "benchmarks").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        if "Benchmark(" in file.read_text(encoding="utf-8") and "def main" in file.read_text(encoding="utf-8"):
            assert module in modules, f"{module} is a benchmark that `make bench` and `scripts/on_gpu.sh` leave out"


def test_a_resumed_run_leaves_out_what_this_commit_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, stale, quick = "test_lookup", "test_server", "test_clients"
    now = rig.commit(measured_by(done))
    if now is None:
        pytest.skip("not a git checkout")
    for name, commit, is_quick in ((done, now, False), (stale, {"id": "0" * 10, "how": ""}, False), (quick, now, True)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit, "quick": is_quick, "seconds": 90.0}))
    assert run_all.main(["--plan", "--resume", "--json", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert done not in said
    assert f"{stale} " in said and f"{quick} " in said and "cluster_sim, test_conversation: needs --trace" in said
