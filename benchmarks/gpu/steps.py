"""The steps of `scripts/on_gpu.sh`: what each one runs, and for how long at most."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Command = Callable[[Path, bool], list[str]]


@dataclass(frozen=True)
class Step:
    """`command`: from the file of its result, and whether sizes are small. `limit_s`: on a machine with a GPU and 16
    cores it takes half of that or less. `program`: one without which it cannot run. `is_tests`: it is pytest, which
    writes a report in JUnit's format; else a benchmark, which writes its result itself. `large_only`: why it does not
    run in small sizes."""

    name: str
    about: str
    limit_s: float
    command: Command
    program: str = ""
    is_tests: bool = False
    large_only: str = ""


def _tests(*arguments: str, under: tuple[str, ...] = ()) -> Command:
    def command(file: Path, small: bool) -> list[str]:
        report = file.with_suffix(".xml")
        return [*under, sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu",
                f"--junitxml={report}", *arguments]  # fmt: skip

    return command


def _benchmark(module: str, *arguments: str, in_full: tuple[str, ...] = ()) -> Command:
    def command(file: Path, small: bool) -> list[str]:
        sizes = ("--quick",) if small else in_full
        return [sys.executable, "-m", module, "--json", str(file), *arguments, *sizes]

    return command


_REMOTE: Final = "benchmarks.remote_kv_cache"
# Every access of a kernel or a copy is checked. What allocates for itself is out of its sight, so torch must not. Calls
# that fail raise anyway; an event that is not ready is no failure.
_MEMCHECK: Final = (
    *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", "memcheck"),
    *("--target-processes", "application-only", "--report-api-errors", "no", "--error-exitcode", "9"),
)
WORKER_TESTS: Final = ("tests/gpu/test_worker_half.py", "tests/gpu/test_worker_steps.py")
VLLM_TESTS: Final = ("tests/engine/test_second_runner.py",)

STEPS: Final = {
    step.name: step
    for step in (
        Step(
            "copies",
            "copies between the device and host memory: streams, events, batches, page-locked memory, layouts",
            150,
            _tests("tests/gpu", *(f"--ignore={file}" for file in WORKER_TESTS)),
            is_tests=True,
        ),
        Step("swap", "blocks of five models, beside one pinned copy", 180, _benchmark(f"{_REMOTE}.test_swap")),
        Step("cores", "1 to 8 shards and clients, TCP and shared memory", 330, _benchmark(f"{_REMOTE}.test_cores")),
        Step(
            "worker",
            "the connector's worker half on a paged cache: save, load, abort, preemption",
            180,
            _tests(*WORKER_TESTS),
            is_tests=True,
        ),
        Step(
            "memcheck",
            "the core of both under compute-sanitizer",
            240,
            _tests("tests/gpu", "-k", "memory_checked", under=_MEMCHECK),
            program="compute-sanitizer",
            is_tests=True,
        ),
        Step(
            "first_token",
            "a toy transformer of 8B shapes: first token computed, from host memory, from the store",
            330,
            _benchmark("benchmarks.gpu.test_first_token", in_full=("--within", "270")),
        ),
        Step(
            "vllm",
            "vLLM, 8B: first token of 8k to 128k tokens, computed, filled in, after a restart, CPU tier",
            560,
            _benchmark("benchmarks.gpu.test_vllm", in_full=("--parts", "restart", "--within", "500")),
        ),
        Step(
            "vllm_variants",
            "vLLM, 8B: two engines on one store, CUDA graphs, behind vLLM's own offloading",
            560,
            _benchmark(
                "benchmarks.gpu.test_vllm",
                in_full=("--parts", "two engines", "graphs", "offloading tier", "--within", "500"),
            ),
            large_only="in small sizes its parts belong to the step vllm",
        ),
        Step(
            "vllm_tests",
            "the tests of the connector in vLLM's own parts that need a device",
            180,
            _tests(*VLLM_TESTS),
            is_tests=True,
            large_only="without a device none of them runs",
        ),
    )
}  # fmt: skip


def why_not(step: Step, small: bool) -> str:
    """Why it does not run at all; empty if it does."""
    if small and step.large_only:
        return step.large_only
    return f"there is no {step.program} here" if step.program and shutil.which(step.program) is None else ""
