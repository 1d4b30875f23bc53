"""`scripts/on_gpu.sh` on a machine without a GPU: every step runs, and says what it left out; and what happens to a run
whose steps fail, take too long, or are ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.draw import draw_charts, fill
from benchmarks.gpu import __main__ as on_gpu
from benchmarks.gpu.names import COMPUTED, HOST, IN_CACHE, PINNED, SAVED, SHARED, TCP
from benchmarks.gpu.steps import STEPS, VLLM_TESTS, WORKER_TESTS, Step
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


@pytest.mark.timeout(700)
def test_without_a_device_every_step_runs_in_small_sizes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    done = script("--wheels", wheels, "--out", out, timeout_s=600, KVSTORE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    said = read(out / "run.json")
    assert [step["name"] for step in said["steps"]] == list(STEPS) and said["small_sizes"]
    ended = {step["name"]: step["status"] for step in said["steps"]}
    needs_device = {"copies", "worker", "memcheck", "vllm_variants", "vllm_tests"}
    assert {name for name, status in ended.items() if status == "skipped"} >= needs_device
    assert all(status in ("passed", "skipped") for status in ended.values())
    for name in STEPS:
        if name not in ("memcheck", "vllm_variants", "vllm_tests"):
            result = read(out / f"{name}.json")
            assert result["commit"] is None or result["commit"]["id"]
            assert result["skipped"] or name == "cores", f"{name} does not say what it left out"
    assert {case["case"] for case in read(out / "cores.json")["cases"]} == {"1 shard", "2 shards"}
    first = read(out / "first_token.json")
    assert first["complete"] and [case["case"] for case in first["cases"]] == ["128 tokens", "320 tokens"]
    for case in first["cases"]:
        assert list(case["seconds"]) == [COMPUTED, SAVED, PINNED, IN_CACHE, HOST, SHARED, TCP]
        assert case["limit"] == dict.fromkeys((HOST, SHARED, TCP), PINNED)
        found = case["parameters"]
        assert found["bytes_equal"] and found["tokens_equal"] and found["checked_loads"] == 8
        assert found["loaded_differs"] == 0.0 and found["control_differs"] > 1
        assert found["paths"] == {SHARED: "shared memory", TCP: "tcp"}
        assert found["kv_bytes"] == (found["prompt_tokens"] // 16 - 1) * found["block_bytes"]
    if ended["vllm"] == "passed" and read(out / "vllm.json")["cases"]:
        checks = read(out / "vllm.json")["parameters"]["checks"]
        assert checks["answers_equal"] and not checks["answers_wrong"] and checks["cached_as_expected"]
        (out / "run.json").rename(tmp_path / "run.json")
        out.rename(tmp_path / "gpu")
        results = read_results(tmp_path)
        document = fill((ROOT / "docs" / "gpu.md").read_text(), results)
        assert "Not measured yet." not in document and "skipped" in document
        drawn = draw_charts(results, tmp_path / "charts")
        assert {path.name for path in drawn} >= {"gpu_first_token.svg", "gpu_vllm.svg"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--wheels FOLDER is missing"),
        (["--wheels", "{tmp}"], "--out FOLDER is missing"),
        (["--wheels"], "--wheels FOLDER is missing"),
        (["--wheels", "{tmp}", "--out", "{tmp}/out", "--vlm", "x"], "unrecognized arguments: --vlm x"),
        (["--wheels", "{tmp}/none", "--out", "{tmp}/out"], "there is no such folder, and no earlier run"),
        (["--wheels", "{tmp}", "--out", "{tmp}/out", "--only", "swop"], "invalid choice: 'swop'"),
        (["--wheels", "{tmp}", "--out", "{tmp}/out", "--within", "-1"], "expected more than 0 seconds"),
        (["--wheels", "{tmp}", "--vllm", "{tmp}/no", "--out", "{tmp}/out"], "gpu_vllm.sh prepare"),
    ],
)
def test_a_wrong_call_is_told_what_was_expected(tmp_path: Path, arguments: list[str], said: str) -> None:
    pytest.importorskip("torch")
    done = script(*(word.format(tmp=tmp_path) for word in arguments), KVSTORE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2 and said in done.stderr


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "on_gpu.sh")],
        check=False,
        env=environment(PYTHON=str(tmp_path / "python")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and f"there is no {tmp_path / 'python'}" in done.stderr


def test_wheels_that_the_interpreter_has_are_not_installed(tmp_path: Path) -> None:
    """Such a file is no wheel at all: to install it would fail."""
    (tmp_path / "numpy-1.0-py3-none-any.whl").write_text("not a wheel")
    command = [sys.executable, str(ROOT / "scripts" / "install_missing.py"), str(tmp_path), str(tmp_path / "site")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "0 of 1 wheels installed" in done.stdout
    (tmp_path / "nobody_has_this-1.0-py3-none-any.whl").write_text("not a wheel")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "nobody_has_this" in done.stderr


# What ends badly. The steps are programs of Python's, in a run of its own, which ends all children that it has.

WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'skipped': {}, 'cases': [1]}))\n"
STARTS_A_CHILD = WRITES + (
    "import subprocess\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('child', child.pid, flush=True)\n"
)
HANGS = STARTS_A_CHILD + "import time; time.sleep(600)\n"


def begin(out: Path, steps: dict[str, tuple[str, float, str]], *arguments: str) -> subprocess.Popen[str]:
    """steps: name -> text of the program, limit in seconds, a program that it needs."""
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
    """-> the exit status, and the steps by name as run.json has them."""
    process = begin(out, steps, *arguments)
    process.communicate(timeout=90)
    return process.returncode, {step["name"]: step for step in read(out / "run.json")["steps"]}


def child_of(lines: Iterable[str]) -> int:
    return next(int(line.split()[1]) for line in lines if line.startswith("child"))


def test_a_step_that_fails_or_takes_too_long_costs_itself_only(tmp_path: Path) -> None:
    steps = {
        "fails": ("print('what happened'); raise SystemExit(3)", 30, ""),
        "hangs": (HANGS, 2, ""),
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
    assert ended["lacks"]["skipped"] == {"all of it": "there is no no-such-program here"}
    assert read(tmp_path / "hangs.json")["cases"] == [1], "what it had finished is kept"
    assert not psutil.pid_exists(child_of(ended["hangs"]["output"]))


def test_a_process_that_a_step_leaves_behind_is_ended_and_holds_nobody_up(tmp_path: Path) -> None:
    began = time.monotonic()
    status, ended = run(tmp_path, {"leaves": (STARTS_A_CHILD, 60, ""), "works": (WRITES, 60, "")})
    assert status == 0 and [step["status"] for step in ended.values()] == ["passed", "passed"]
    assert not psutil.pid_exists(child_of(ended["leaves"]["output"])) and time.monotonic() - began < 30


def test_tests_that_fail_fail_their_step_and_are_named(tmp_path: Path) -> None:
    file, report = tmp_path / "test_it.py", tmp_path / "tests.xml"
    file.write_text("import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n")
    step = Step("tests", "", 60, lambda *_: [], is_tests=True)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--junitxml={report}", str(file)]
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    on_gpu.tests_to_json(step, tmp_path / "tests.json", "the command")
    result = read(tmp_path / "tests.json")
    assert result["counts"] == {"passed": 1, "failed": 1, "skipped": 0} and result["command"] == "the command"
    assert "assert 1 == 2" in next(test["why"] for test in result["tests"] if test["outcome"] == "failed")


def test_tests_that_leave_no_report_are_no_success(tmp_path: Path) -> None:
    on_gpu.tests_to_json(Step("tests", "", 60, lambda *_: [], is_tests=True), tmp_path / "tests.json", "")
    assert read(tmp_path / "tests.json")["counts"] == {"passed": 0, "failed": 0, "skipped": 0}


def test_time_for_all_steps_is_shared_out(tmp_path: Path) -> None:
    began = time.monotonic()
    status, ended = run(tmp_path, {"hangs": (HANGS, 60, ""), "late": (WRITES, 60, "")}, "--within", "6")
    assert status == 1 and [step["status"] for step in ended.values()] == ["timed out", "not begun"]
    assert time.monotonic() - began < 30


def test_a_run_that_is_ended_keeps_what_it_finished_and_leaves_no_process(tmp_path: Path) -> None:
    process = begin(tmp_path, {"done": (WRITES, 60, ""), "hangs": (HANGS, 60, "")})
    assert process.stdout is not None
    child = child_of(process.stdout)
    process.terminate()
    process.communicate(timeout=40)
    assert process.returncode == 130
    assert [step["status"] for step in read(tmp_path / "run.json")["steps"]] == ["passed"]
    assert not psutil.pid_exists(child)


def test_the_steps_have_all_tests_that_need_a_device() -> None:
    marked = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py") if "mark.gpu" in file.read_text()}
    outside = {name for name in marked if not name.startswith(("tests/gpu/", "tests/integration/test_on_gpu"))}
    assert outside == set(VLLM_TESTS)
    assert all((ROOT / name).exists() for name in WORKER_TESTS)


# What travels.


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return {line.split(";")[0].strip() for line in lines if line and not line.startswith("#")}


def test_the_wheels_are_of_the_versions_that_the_suite_runs_with() -> None:
    assert pins("gpu.txt") <= pins("test.txt") | pins("engine.txt")
