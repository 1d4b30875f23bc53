"""`scripts/on_gpu.sh` on a machine without a GPU: steps run in small sizes, and report the parts that they skipped.
Other tests run steps that fail, exceed their time, or are interrupted.

`make gpu-rehearsal` (KVSTORE_GPU_REHEARSAL) runs all steps; `make test` leaves out those of `LATER`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from benchmarks.draw import draw_charts, fill
from benchmarks.gpu import __main__ as on_gpu
from benchmarks.gpu import bench_vllm
from benchmarks.gpu.names import COMPUTED, HOST, IN_CACHE, PINNED, SAVED, SHARED, TCP
from benchmarks.gpu.steps import STEPS, VLLM_TESTS, WORKER_TESTS, Step
from benchmarks.remote_kv_cache import first_token
from benchmarks.remote_kv_cache.first_token import CPU_TIER, FILLED, STORE
from benchmarks.results_reader import read_results
from tests.support.harness import ROOT, environment


def script(*arguments: object, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "on_gpu.sh"), *map(str, arguments)],
        check=False,
        env=environment(PYTHON=sys.executable, **variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


IN_FULL: Final = "KVSTORE_GPU_REHEARSAL" in os.environ
# Steps that other tests of `make test` cover. The clients of `cores` are in test_client_processes.py, the tests of
# `worker` are skipped without a device, and many tests of tests/engine start engines as `vllm` does.
LATER: Final = frozenset({"cores", "worker", "vllm"})


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run without a device."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("run")
    (folder / "wheels").mkdir()
    chosen = [word for name in STEPS if name not in LATER for word in ("--only", name)]
    arguments = ["--wheels", folder / "wheels", "--out", folder / "gpu", *([] if IN_FULL else chosen)]
    done = script(*arguments, timeout_s=600, KVSTORE_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return folder / "gpu"


@pytest.mark.timeout(700)
def test_without_a_device_steps_run_in_small_sizes(ended: Path) -> None:
    said = read(ended / "run.json")
    assert [step["name"] for step in said["steps"]] == [name for name in STEPS if IN_FULL or name not in LATER]
    assert said["small_sizes"]
    status = {step["name"]: step["status"] for step in said["steps"]}
    needs_device = {"copies", "worker", "memcheck", "vllm_variants", "vllm_tests"}
    assert {name for name in status if status[name] == "skipped"} >= needs_device & set(status)
    assert all(each in ("passed", "skipped") for each in status.values())
    for name in status:
        if name not in ("memcheck", "vllm_variants", "vllm_tests"):
            result = read(ended / f"{name}.json")
            assert result["commit"] is None or result["commit"]["id"]
            assert result["skipped"] or name == "cores", f"{name} does not say what it left out"
    if IN_FULL:
        assert {case["case"] for case in read(ended / "cores.json")["cases"]} == {"1 shard", "2 shards"}
        engines = read(ended / "vllm.json")
        assert engines["complete"] and engines["quick"]
        assert set(engines["skipped"]) >= {bench_vllm.GRAPHS, bench_vllm.TIER}
        restart = [first_token.COMPUTED, FILLED, STORE, bench_vllm.STORE_BESIDE_TIER, CPU_TIER]
        assert {case["case"]: list(case["seconds"]) for case in engines["cases"]} == {
            "restart, 256 tokens": restart,
            "restart, 512 tokens": restart,
            "two engines, 256 tokens": [first_token.COMPUTED, bench_vllm.AT_ONCE_FILLED, bench_vllm.AT_ONCE_STORE],
        }
        checks = engines["parameters"]["checks"]
        assert checks["answers_equal"] and not checks["answers_wrong"] and checks["cached_as_expected"]


@pytest.mark.timeout(700)
def test_every_way_to_the_first_token_is_measured_and_compared(ended: Path) -> None:
    first = read(ended / "first_token.json")
    assert first["complete"] and [case["case"] for case in first["cases"]] == ["128 tokens", "320 tokens"]
    for case in first["cases"]:
        assert list(case["seconds"]) == [COMPUTED, SAVED, PINNED, IN_CACHE, HOST, SHARED, TCP]
        assert case["limit"] == dict.fromkeys((HOST, SHARED, TCP), PINNED)
        found = case["parameters"]
        assert found["bytes_equal"] and found["tokens_equal"] and found["checked_loads"] == 8
        assert found["loaded_differs"] == 0.0 and found["control_differs"] > 1
        assert found["paths"] == {SHARED: "shared memory", TCP: "tcp"}
        assert found["kv_bytes"] == (found["prompt_tokens"] // 16 - 1) * found["block_bytes"]


@pytest.mark.timeout(700)
def test_the_results_fill_the_documents_tables_and_charts(ended: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(ended, folder / "gpu")
    (folder / "gpu" / "run.json").rename(folder / "run.json")
    results = read_results(folder)
    document = fill((ROOT / "docs" / "gpu.md").read_text(), results)
    not_measured = re.findall(r"<!-- begin:(\w+) -->\nNot measured yet.", document)
    assert not_measured == ([] if IN_FULL else ["gpu_cores", "gpu_vllm"]) and "skipped" in document
    drawn = {path.name for path in draw_charts(results, tmp_path / "charts")}
    assert drawn == {"gpu_first_token.svg", *(["gpu_vllm.svg"] if IN_FULL else [])}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--wheels FOLDER is missing"),
        (["--wheels", "{tmp}"], "--out FOLDER is missing"),
        (["--wheels"], "--wheels FOLDER is missing"),
        (["--wheels", "{tmp}", "--out", "{tmp}/out", "--vlm", "x"], "unrecognized arguments: --vlm x"),
        (["--wheels", "{tmp}/none", "--out", "{tmp}/out"], "the folder does not exist, and no earlier run"),
        (["--wheels", "{tmp}", "--out", "{tmp}/out", "--only", "swop"], "invalid choice: 'swop'"),
        (["--wheels", "{tmp}", "--out", "{tmp}/out", "--within", "-1"], "expected more than 0 seconds"),
        (["--wheels", "{tmp}", "--vllm", "{tmp}/no", "--out", "{tmp}/out"], "gpu_vllm.sh prepare"),
    ],
)
def test_a_wrong_call_reports_what_was_expected(tmp_path: Path, arguments: list[str], said: str) -> None:
    pytest.importorskip("torch")
    done = script(*(word.format(tmp=tmp_path) for word in arguments), KVSTORE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2 and said in done.stderr


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "on_gpu.sh")],
        check=False,
        env=environment(PYTHON=str(tmp_path / "python")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and f"there is no {tmp_path / 'python'}" in done.stderr


def test_wheels_that_the_interpreter_already_has_are_not_installed(tmp_path: Path) -> None:
    """The files are not real wheels, so installing one of them would fail."""
    (tmp_path / "numpy-1.0-py3-none-any.whl").write_text("not a wheel")
    command = [sys.executable, str(ROOT / "scripts" / "install_missing.py"), str(tmp_path), str(tmp_path / "site")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "0 of 1 wheels installed" in done.stdout
    (tmp_path / "nobody_has_this-1.0-py3-none-any.whl").write_text("not a wheel")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "nobody_has_this" in done.stderr


# Runs that fail or are interrupted. Their steps are Python programs, and the run must end all of its children.

WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'skipped': {}, 'cases': [1]}))\n"
STARTS_A_CHILD = WRITES + (
    "import subprocess\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('child', child.pid, flush=True)\n"
)
HANGS = STARTS_A_CHILD + "import time; time.sleep(600)\n"


def begin(out: Path, steps: dict[str, tuple[str, float, str]], *arguments: str) -> subprocess.Popen[str]:
    """Begin a run of these steps. steps: name -> the step's Python program, its limit in seconds, and a program that it
    needs."""
    program = (
        "import sys\nfrom benchmarks.gpu import __main__ as on_gpu\nfrom benchmarks.gpu.steps import Step\n"
        "command = lambda text: lambda file, small: [sys.executable, '-c', text, str(file)]\n"
        f"on_gpu.STEPS = {{n: Step(n, '', limit, command(text), program=needs)\n"
        f"                for n, (text, limit, needs) in {steps!r}.items()}}\n"
        f"sys.exit(on_gpu.main(['--out', {str(out)!r}, *{arguments!r}]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], env=environment(), stdout=subprocess.PIPE, text=True
    )


def run(out: Path, steps: dict[str, tuple[str, float, str]], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run these steps. Returns the exit status, and the steps of run.json by name."""
    process = begin(out, steps, *arguments)
    process.communicate(timeout=90)
    return process.returncode, {step["name"]: step for step in read(out / "run.json")["steps"]}


def child_of(lines: Iterable[str]) -> int:
    return next(int(line.split()[1]) for line in lines if line.startswith("child"))


def test_a_step_that_fails_or_is_too_slow_costs_only_itself(tmp_path: Path) -> None:
    steps = {
        "fails": ("print('what happened'); raise SystemExit(3)", 30, ""),
        "hangs": (HANGS, 10, ""),
        "lacks": ("", 30, "no-such-program"),
        "works": (WRITES, 30, ""),
    }
    (tmp_path / "fails.json").write_text('{"skipped": {"of an earlier": "run"}}')
    status, ended = run(tmp_path, steps)
    assert status == 1 and not (tmp_path / "fails.json").exists() and not ended["fails"]["skipped"]
    assert {name: step["status"] for name, step in ended.items()} == {
        "fails": "failed", "hangs": "timed out", "lacks": "skipped", "works": "passed",
    }  # fmt: skip
    assert ended["fails"]["output"] == ["what happened"]
    assert ended["lacks"]["skipped"] == {"all of it": "no-such-program is not installed"}
    assert read(tmp_path / "hangs.json")["cases"] == [1], "what it had finished is kept"
    assert not psutil.pid_exists(child_of(ended["hangs"]["output"]))


def test_a_process_left_by_a_step_is_ended_without_delay(tmp_path: Path) -> None:
    began = time.monotonic()
    status, ended = run(tmp_path, {"leaves": (STARTS_A_CHILD, 60, ""), "works": (WRITES, 60, "")})
    assert status == 0 and [step["status"] for step in ended.values()] == ["passed", "passed"]
    assert not psutil.pid_exists(child_of(ended["leaves"]["output"])) and time.monotonic() - began < 30


def test_failing_tests_fail_their_step_and_are_named(tmp_path: Path) -> None:
    file, report = tmp_path / "test_it.py", tmp_path / "tests.xml"
    file.write_text("import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n")
    step = Step("tests", "", 60, lambda *_: [], is_tests=True)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--junitxml={report}", str(file)]
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    on_gpu.tests_to_json(step, tmp_path / "tests.json", "the command")
    result = read(tmp_path / "tests.json")
    assert result["counts"] == {"passed": 1, "failed": 1, "skipped": 0} and result["command"] == "the command"
    assert "assert 1 == 2" in next(test["why"] for test in result["tests"] if test["outcome"] == "failed")


def test_tests_without_a_report_are_no_success(tmp_path: Path) -> None:
    on_gpu.tests_to_json(Step("tests", "", 60, lambda *_: [], is_tests=True), tmp_path / "tests.json", "")
    assert read(tmp_path / "tests.json")["counts"] == {"passed": 0, "failed": 0, "skipped": 0}


def test_the_total_time_is_divided_among_the_steps(tmp_path: Path) -> None:
    began = time.monotonic()
    status, ended = run(tmp_path, {"hangs": (HANGS, 60, ""), "late": (WRITES, 60, "")}, "--within", "6")
    assert status == 1 and [step["status"] for step in ended.values()] == ["timed out", "not begun"]
    assert time.monotonic() - began < 30


def test_an_ended_run_keeps_finished_results_and_leaves_no_process(tmp_path: Path) -> None:
    process = begin(tmp_path, {"done": (WRITES, 60, ""), "hangs": (HANGS, 60, "")})
    assert process.stdout is not None
    child = child_of(process.stdout)
    process.terminate()
    process.communicate(timeout=40)
    assert process.returncode == 130
    assert [step["status"] for step in read(tmp_path / "run.json")["steps"]] == ["passed"]
    assert not psutil.pid_exists(child)


def test_the_steps_include_all_tests_that_need_a_device() -> None:
    marked = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py") if "mark.gpu" in file.read_text()}
    outside = {name for name in marked if not name.startswith(("tests/gpu/", "tests/integration/test_on_gpu"))}
    assert outside == set(VLLM_TESTS)
    assert all((ROOT / name).exists() for name in WORKER_TESTS)


# The files to copy to the machine with the GPU.


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return {line.split(";")[0].strip() for line in lines if line and not line.startswith("#")}


def test_the_wheels_have_the_versions_of_the_suite() -> None:
    assert pins("gpu.txt") <= pins("test.txt") | pins("engine.txt")
