"""The step of `scripts/on_gpu.sh` with the real vLLM, in small sizes on the CPU. `make gpu-rehearsal` runs it as the
script does, in a process of its own."""

from __future__ import annotations

import json
import re
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmarks.draw import draw_charts, fill
from benchmarks.gpu import test_vllm
from benchmarks.gpu.steps import STEPS
from benchmarks.remote_kv_cache.first_token import COMPUTED, CPU_TIER, FILLED, STORE
from benchmarks.results_reader import read_results
from tests.engine.engines import nursery
from tests.support.harness import ROOT


@pytest.mark.timeout(400)
def test_its_results_are_right_and_make_the_table_and_chart_of_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines come from the nursery of these tests: the benchmark's own would import vLLM once more."""
    nursery()
    forkserver.ensure_running()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # it sets such variables for its engines, also for what follows here
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = tmp_path / "results"
    (results / "gpu").mkdir(parents=True)
    file = results / "gpu" / "vllm.json"
    monkeypatch.setattr(sys, "argv", STEPS["vllm"].command(file, True)[2:])
    try:
        assert test_vllm.main() == 0
    finally:
        nursery()  # the next one, should this one end, is that of these tests again
    result = json.loads(file.read_text())
    assert result["complete"] and result["quick"] and set(result["skipped"]) >= {test_vllm.GRAPHS, test_vllm.TIER}
    cases = {case["case"]: list(case["seconds"]) for case in result["cases"]}
    restart = [COMPUTED, FILLED, STORE, test_vllm.STORE_BESIDE_TIER, CPU_TIER]
    at_once = [COMPUTED, test_vllm.AT_ONCE_FILLED, test_vllm.AT_ONCE_STORE]
    assert cases == {
        "restart, 256 tokens": restart, "restart, 512 tokens": restart, "two engines, 256 tokens": at_once,
    }  # fmt: skip
    checks = result["parameters"]["checks"]
    assert checks["answers_equal"] and not checks["answers_wrong"] and checks["cached_as_expected"]
    document = fill((ROOT / "docs" / "gpu.md").read_text(), read_results(results))
    assert "gpu_vllm" not in re.findall(r"<!-- begin:(\w+) -->\nNot measured yet.", document)
    drawn = draw_charts(read_results(results), tmp_path / "charts")
    assert [path.name for path in drawn] == ["gpu_vllm.svg"]
