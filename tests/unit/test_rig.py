"""What a result records about the machine, read from files in the kernel's form and from the output of nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.remote_kv_cache import rig
from benchmarks.render.ledger import rig_table
from benchmarks.results_reader import Result

KIB = 1024


@pytest.fixture(autouse=True)
def ask_anew() -> None:
    rig.gpus.cache_clear()


def node(folder: Path, number: int, cores: str, memory_kib: int) -> None:
    path = folder / f"node{number}"
    path.mkdir(parents=True)
    (path / "cpulist").write_text(f"{cores}\n")
    (path / "meminfo").write_text(
        f"Node {number} MemTotal:       {memory_kib} kB\nNode {number} MemFree:        5 kB\n"
    )


# ---- memory --------------------------------------------------------------------------------------------------------


def test_each_numa_node_has_its_cores_and_its_memory(tmp_path: Path) -> None:
    for number, cores, memory in ((0, "0-7,16-23", 1000), (1, "8-15", 2000), (2, "", 500), (10, "24", 3000)):
        node(tmp_path, number, cores, memory)
    for other in ("possible", "online"):
        (tmp_path / other).write_text("0-2,10\n")
    assert rig.numa_nodes(tmp_path) == [
        {"node": 0, "cores": 16, "memory_bytes": 1000 * KIB},
        {"node": 1, "cores": 8, "memory_bytes": 2000 * KIB},
        {"node": 2, "cores": 0, "memory_bytes": 500 * KIB},
        {"node": 10, "cores": 1, "memory_bytes": 3000 * KIB},
    ]


def test_values_a_kernel_does_not_report_for_a_node_are_none(tmp_path: Path) -> None:
    assert rig.numa_nodes(tmp_path / "none") is None
    (tmp_path / "node0").mkdir()
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("all of them")
    (tmp_path / "node1" / "meminfo").write_bytes(b"\xff\xfe")
    nothing = {"cores": None, "memory_bytes": None}
    assert rig.numa_nodes(tmp_path) == [{"node": 0, **nothing}, {"node": 1, **nothing}]


def test_huge_pages_are_the_mode_and_the_reserve(tmp_path: Path) -> None:
    (tmp_path / "transparent_hugepage").mkdir()
    (tmp_path / "transparent_hugepage" / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "transparent_hugepage" / "shmem_enabled").write_text("always within_size advise never deny [force]\n")
    for size, pages in ((1048576, 0), (2048, 512)):
        path = tmp_path / "hugepages" / f"hugepages-{size}kB"
        path.mkdir(parents=True)
        (path / "nr_hugepages").write_text(f"{pages}\n")
    (tmp_path / "hugepages" / "hugepages-64kB").mkdir()
    assert rig.huge_pages(tmp_path) == {
        "anonymous": "madvise",
        "shared_memory": "force",
        "reserved": [{"page_bytes": 2 << 20, "pages": 512}, {"page_bytes": 1 << 30, "pages": 0}],
    }


def test_a_kernel_without_huge_pages_is_no_error(tmp_path: Path) -> None:
    assert rig.huge_pages(tmp_path) == {"anonymous": None, "shared_memory": None, "reserved": None}


# ---- GPUs ----------------------------------------------------------------------------------------------------------

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 81559 << 20,
    "driver": "580.159.04",
    "pcie_generation": 5,
    "pcie_width": 16,
}


def test_each_line_of_nvidia_smi_is_a_gpu() -> None:
    line = "NVIDIA H100 80GB HBM3, 81559, 580.159.04, 5, 16\n"
    assert rig.parse_gpus(line) == [H100]
    assert rig.parse_gpus(2 * line) == [H100, H100]


def test_unknown_values_of_nvidia_smi_are_none() -> None:
    unknown = {"memory_bytes": None, "driver": None, "pcie_generation": None, "pcie_width": None}
    text = "NVIDIA H200, [Insufficient Permissions], [N/A], [N/A], [Unknown Error]\n"
    assert rig.parse_gpus(text) == [{"name": "NVIDIA H200", **unknown}]
    assert rig.parse_gpus("") is None
    assert rig.parse_gpus("No devices were found\n") is None


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'NVIDIA H100 80GB HBM3, 81559, 580.159.04, 5, 16'", [H100]),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", None),
        ("exec sleep 60", None),
    ],
    ids=["a GPU", "no driver", "no answer"],
)
def test_nvidia_smi_is_run_and_may_fail(
    script: str, found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nexec 2>&1\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(rig, "GPU_LOOK_S", 0.5)
    assert rig.gpus() == found


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rig.gpus() is None


# ---- versions, and the whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ('cuda: str | None = "13.1"', "13.1"),
        ("cuda: Optional[str] = None", ""),
        ("", ""),
    ],
)
def test_torch_reports_the_cuda_version_it_was_built_for(line: str, cuda: str) -> None:
    text = f"from typing import Optional\n__version__ = '2.11.0+cu130'\n{line}\nhip: Optional[str] = '6.0'\n"
    assert rig.cuda_in(text) == cuda


def test_the_rig_is_json_and_versions_are_text() -> None:
    found = json.loads(json.dumps(rig.rig()))
    assert found["cores"] >= 1 and {"numa_nodes", "huge_pages", "gpus"} <= set(found)
    assert all(isinstance(version, str) and version for version in rig.versions().values())


def test_results_without_gpus_and_huge_pages_are_listed() -> None:
    old = {
        "cpu": "AMD EPYC",
        "cores": 2,
        "memory_bytes": 8 << 30,
        "kernel": "Linux 6",
        "python": "3.11.7",
        "network": "",
    }
    result = Result(
        {
            "rig": old,
            "versions": {"kvstore": "0.1.0"},
            "date": "",
            "commit": None,
            "rounds": 7,
            "quick": False,
            "load": {"average_before": 0.0, "busy_before": 0.0},
            "command": "",
        }
    )
    assert "AMD EPYC, 2 cores, 8 GiB" in rig_table({"bench_clients": result})
