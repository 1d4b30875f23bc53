"""What may be claimed about a target, and which benchmarks a run includes, according to results in files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_all
from benchmarks.draw import CLAIMS, DOCUMENTS, fill
from benchmarks.gpu.steps import STEPS
from benchmarks.measures import measured_by
from benchmarks.remote_kv_cache import rig
from benchmarks.render.headline import APPENDIX, HEADLINES
from benchmarks.render.ledger import MET, MISSED, NOT_ESTABLISHED, NOT_MEASURED, Finding, verdict
from benchmarks.results_reader import Result, read_results
from tests.support.harness import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def result(**changes: Any) -> Result:
    """Return a result of seven rounds on an otherwise idle machine."""
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
def test_no_other_result_settles_a_target(changes: dict[str, Any]) -> None:
    assert verdict(REACHED, result(**changes)) == NOT_ESTABLISHED
    assert verdict(BEYOND, result(**changes)) == NOT_ESTABLISHED


def test_the_counted_rounds_are_those_of_the_figure() -> None:
    assert verdict(Finding("1/43", "", met=True, rounds=1), result()) == NOT_ESTABLISHED
    assert verdict(Finding("0.99", "", met=True, rounds=5), result(rounds=2)) == MET


def test_every_result_names_its_commit_load_and_rounds() -> None:
    results = read_results(RESULTS)
    assert results
    for name, each in results.items():
        assert each.commit and each.rounds >= 1 and each.load_text, name


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_the_documents_match_the_results(file: Path) -> None:
    """`python -m benchmarks.draw` would change nothing. If the test fails because a result has become stale, run that
    command."""
    document = file.read_text(encoding="utf-8")
    made = fill(document, read_results(RESULTS))
    if made.count("not known") > document.count("not known"):
        pytest.skip("a checkout without its history")
    assert made == document


def test_each_headline_was_measured_and_links_to_the_appendix() -> None:
    results = read_results(RESULTS)
    appendix = (ROOT / "docs" / APPENDIX).read_text(encoding="utf-8")
    sections = {anchor_of(title) for title in re.findall(r"^#+ (.*)$", appendix, re.MULTILINE)}
    assert 8 <= len(HEADLINES) <= 10
    for headline in HEADLINES:
        _, figure, held_against, stale = headline.row(results)
        assert headline.section in sections, headline.what
        assert re.match(r"[\d.]+(%| GB/s| ms| requests/s| prompts/s)$", figure), headline.what
        assert re.search(r"\d", held_against), headline.what
        assert stale.split(";")[0] in ("yes", "no", "not known"), headline.what


def anchor_of(title: str) -> str:
    """Return a title's anchor as the site and GitHub make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_every_target_has_a_command_that_runs() -> None:
    for claim in CLAIMS:
        module = claim.command.split()[2]
        assert any(entry.module == module for entry in run_all.BENCHMARKS), claim.command


# ---- running them all ----------------------------------------------------------------------------------------------


def test_a_run_includes_every_benchmark() -> None:
    modules = {entry.module for entry in run_all.BENCHMARKS}
    modules |= {word for step in STEPS.values() for word in step.command(Path("result.json"), True)}
    for file in (ROOT / "benchmarks").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        if "Benchmark(" in file.read_text(encoding="utf-8") and "def main" in file.read_text(encoding="utf-8"):
            assert module in modules, f"{module} is a benchmark that `make bench` and `scripts/on_gpu.sh` leave out"


def test_a_resumed_run_skips_results_of_this_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, stale, quick = "bench_lookup", "bench_server", "bench_clients"
    now = rig.commit(measured_by(done))
    if now is None:
        pytest.skip("not a git checkout")
    for name, commit, is_quick in ((done, now, False), (stale, {"id": "0" * 10, "how": ""}, False), (quick, now, True)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit, "quick": is_quick, "seconds": 90.0}))
    assert run_all.main(["--plan", "--resume", "--json", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert done not in said
    assert f"{stale} " in said and f"{quick} " in said and "cluster_sim, bench_conversation: give --trace" in said
