"""The steps of `scripts/on_gpu.sh`: the command of each, and its time limit."""

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
    """`command`: returns the command for a given result file, in small sizes or not. `limit_s`: the time
    limit; on a machine with a GPU and 16 cores the step takes at most half of it. `program`: a program that it needs.
    `is_tests`: whether it is pytest, which writes a report in JUnit's format; else it is a benchmark, which writes its
    own result. `large_only`: why it does not run in small sizes."""

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
# The tool checks every access of a kernel or a copy. It does not see memory errors inside torch's own allocator, so
# torch must not use that allocator. Calls that fail raise anyway, and an event that is not ready is no failure.
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
        Step("swap", "swaps of five models' blocks, and one pinned copy", 180, _benchmark(f"{_REMOTE}.bench_swap")),
        Step("cores", "1 to 8 shards and clients, TCP and shared memory", 330, _benchmark(f"{_REMOTE}.bench_cores")),
        Step(
            "worker",
            "the connector's worker half on a paged cache: save, load, abort, preemption",
            180,
            _tests(*WORKER_TESTS),
            is_tests=True,
        ),
        Step(
            "memcheck",
            "the most important tests of copies and worker under compute-sanitizer",
            240,
            _tests("tests/gpu", "-k", "memory_checked", under=_MEMCHECK),
            program="compute-sanitizer",
            is_tests=True,
        ),
        Step(
            "first_token",
            "first token of a toy transformer with 8B shapes: computed, from host memory, from the store",
            330,
            _benchmark("benchmarks.gpu.bench_first_token", in_full=("--within", "270")),
        ),
        Step(
            "vllm",
            "first token of vLLM with an 8B model, 8k to 128k tokens: computed, from the store, from the CPU tier",
            560,
            _benchmark("benchmarks.gpu.bench_vllm", in_full=("--parts", "restart", "--within", "500")),
        ),
        Step(
            "vllm_variants",
            "vLLM with an 8B model: two engines on one store, CUDA graphs, vLLM's own offloading",
            560,
            _benchmark(
                "benchmarks.gpu.bench_vllm",
                in_full=("--parts", "two engines", "graphs", "offloading tier", "--within", "500"),
            ),
            large_only="in small sizes, the step vllm runs its parts",
        ),
        Step(
            "vllm_tests",
            "the tests of the connector that need vLLM and a device",
            180,
            _tests(*VLLM_TESTS),
            is_tests=True,
            large_only="all of these tests need a device",
        ),
    )
}  # fmt: skip


def why_not(step: Step, small: bool) -> str:
    """Return why the step cannot run; empty if it can."""
    if small and step.large_only:
        return step.large_only
    return f"{step.program} is not installed" if step.program and shutil.which(step.program) is None else ""
